"""What is wrong with a data file, found before training: every record read, every path tested, a sample decoded and tokenised.

Faults make a sample unusable, notes do not. Training would fail where faults exceed the allowed share or nothing can be learned.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmkit.config import DataConfig, SourceConfig
from mmkit.data.conversation import Formatter
from mmkit.data.example import BadRecord, Example, ImageRef, checked
from mmkit.data.images import ImageError, image_size, open_image
from mmkit.data.mixture import Source
from mmkit.data.readers import open_source

SHOWN = 5  # examples named for each fault
DECODED, TOKENISED = 200, 20_000  # samples taken evenly from the file
NOTES = ("duplicate id", "duplicate content", "empty answer", "box outside", "no image")


@dataclass
class Report:
    """What was found: counts of each fault and note with examples, lengths in tokens, the share that training could not use."""

    name: str
    records: int = 0
    images: int = 0
    decoded: int = 0
    tokenised: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    shown: dict[str, list[str]] = field(default_factory=dict)
    lengths: dict[str, float] = field(default_factory=dict)  # tokens of a sample: least, median, 95%, most
    supervised: float = 0.0  # share of text and image tokens that carry loss
    bad: int = 0  # samples with a fault
    max_bad_share: float = 0.01

    @property
    def would_fail(self) -> bool:
        """Whether training on this data would stop."""
        return not self.records or self.bad > self.max_bad_share * self.records

    def rows(self) -> list[dict[str, Any]]:
        """A table: kind (fault or note), what, how many, examples."""
        kinds = (("fault", self.faults), ("note", self.notes))
        return [
            {"kind": kind, "what": what, "count": count, "examples": "; ".join(self.shown.get(what, []))}
            for kind, found in kinds
            for what, count in sorted(found.items(), key=lambda pair: -pair[1])
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return asdict(self) | {"would_fail": self.would_fail}

    def summary(self) -> str:
        """A few lines for people."""
        verdict = "training would stop" if self.would_fail else "ready to train"
        lines = [f"{self.name}: {self.records:,} records, {self.images:,} images, {self.bad:,} unusable ({verdict})"]
        lines += [f"  {row['kind']}: {row['count']:,} {row['what']}: {row['examples']}" for row in self.rows()]
        if self.lengths:
            sizes = ", ".join(f"{name} {value:g}" for name, value in self.lengths.items())
            lines.append(f"  tokens ({self.tokenised:,} samples): {sizes}; {self.supervised:.1%} supervised")
        return "\n".join(lines)


def check(
    source: Source,
    *,
    formatter: Formatter | None = None,
    slots: int = 0,
    max_length: int | None = None,
    max_bad_share: float = 0.01,
    decode: int = DECODED,
    tokenise: int = TOKENISED,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """The report of a source. With a ``formatter`` conversations are tokenised too; each picture then counts ``slots`` tokens."""
    return _Check(source, formatter, slots, max_length, max_bad_share).run(decode, tokenise, progress)


def check_file(file: str, images: str | None = None, format: str = "llava", **options) -> Report:
    """The report of a data file whose picture paths start from ``images``. Options as for `check`."""
    return check(open_source(SourceConfig(name=Path(file).name, format=format, path=file, images=images), DataConfig()), **options)


class _Check:
    def __init__(self, source: Source, formatter: Formatter | None, slots: int, max_length: int | None, max_bad_share: float):
        self.source, self.formatter, self.slots, self.max_length = source, formatter, slots, max_length
        self.report = Report(source.name, len(source), max_bad_share=max_bad_share)
        self.faults, self.notes, self.shown = Counter(), Counter(), defaultdict(list)
        self.seen_keys, self.seen_texts = set(), set()
        self.sizes: dict[str, tuple[int, int] | ImageError] = {}
        self.lengths, self.trained = [], 0

    def run(self, decode: int, tokenise: int, progress) -> Report:
        n = len(self.source)
        decoded, tokenised = _spread(n, decode), _spread(n, tokenise) if self.formatter else set()
        for index in range(n):
            try:
                example = self.source[index]
                self._check(example, index in decoded, index in tokenised)
            except BadRecord as error:
                self._fault(error.reason, error.key, error.message)
            if progress and (index % 1000 == 999 or index == n - 1):
                progress(index + 1, n)
        return self._finished()

    def _check(self, example: Example, decode: bool, tokenise: bool) -> None:
        self._duplicates(example)
        if any(turn.role == "assistant" and not turn.text.strip() for turn in example.turns):
            self._note("empty answer", example.key)
        if not example.images:
            self._note("no image", example.key)
        checked(example)
        sizes = [self._size(ref, example) for ref in example.images]
        for region in example.regions:
            box = region.box
            if box.clamped() != box or box.x1 > box.x2 or box.y1 > box.y2:
                self._note("box outside", example.key, f"{box.corners} in {box.frame.width:g}x{box.frame.height:g}")
        if decode:
            for ref in example.images:
                self._decode(ref, example)
        if tokenise and len(sizes) == len(example.images):
            self._tokenise(example)

    def _size(self, ref: ImageRef, example: Example) -> tuple[int, int]:
        """Upright size of a picture, each looked at once."""
        identity = ref.identity
        if identity not in self.sizes:
            try:
                self.sizes[identity] = image_size(ref)
            except ImageError as error:
                hint = nearest_path(str(ref.data)) if error.reason == "missing image" and isinstance(ref.data, str | Path) else None
                self.sizes[identity] = ImageError(error.message + (f"; on disk: {hint}" if hint else ""), error.reason)
        found = self.sizes[identity]
        if isinstance(found, ImageError):
            raise BadRecord(found.message, key=example.key, source=example.source, reason=found.reason)
        return found

    def _decode(self, ref: ImageRef, example: Example) -> None:
        self.report.decoded += 1
        try:
            open_image(ref)
        except ImageError as error:
            raise BadRecord(error.message, key=example.key, source=example.source, reason=error.reason) from None

    def _tokenise(self, example: Example) -> None:
        encoded = self.formatter.encode(example)
        length = encoded.length(self.slots) if self.slots else len(encoded.ids)
        self.report.tokenised += 1
        self.lengths.append(length)
        self.trained += int(encoded.trained.sum())
        if self.max_length and length > self.max_length:
            raise BadRecord(f"needs {length}, more than {self.max_length}", key=example.key, source=example.source, reason="too long")

    def _duplicates(self, example: Example) -> None:
        key = hash(example.key)
        if key in self.seen_keys:
            self._note("duplicate id", example.key)
        self.seen_keys.add(key)
        content = "\0".join([*(ref.identity for ref in example.images), *(turn.role + turn.text for turn in example.turns)])
        digest = hashlib.blake2b(content.encode("utf8", "replace"), digest_size=8).digest()
        if digest in self.seen_texts:
            self._note("duplicate content", example.key)
        self.seen_texts.add(digest)

    def _fault(self, reason: str, key: str, message: str) -> None:
        self.report.bad += 1
        self.faults[reason] += 1
        self._show(reason, f"{key}: {message}")

    def _note(self, what: str, key: str, detail: str = "") -> None:
        self.notes[what] += 1
        self._show(what, f"{key} {detail}".strip())

    def _show(self, what: str, text: str) -> None:
        if len(self.shown[what]) < SHOWN:
            self.shown[what].append(text)

    def _finished(self) -> Report:
        report = self.report
        report.images = len(self.sizes)
        report.faults, report.notes, report.shown = dict(self.faults), dict(self.notes), dict(self.shown)
        if self.lengths:
            low, middle, high, most = np.percentile(self.lengths, [0, 50, 95, 100]).tolist()
            report.lengths = {"least": low, "median": middle, "95%": high, "most": most}
            report.supervised = self.trained / sum(self.lengths)
        return report


def nearest_path(path: str) -> str | None:
    """The path on disk most like a missing one: parts of the same letters in another case first, then similar names (user report U25)."""
    place = Path("/" if os.path.isabs(path) else ".")
    for part in Path(path).parts:
        if part in ("/", ".") or (place / part).exists():
            place = place / part
            continue
        if not place.is_dir():
            return None
        names = os.listdir(place)
        same = next((name for name in sorted(names) if name.lower() == part.lower()), None)
        close = [same] if same else difflib.get_close_matches(part, names, n=1, cutoff=0.6)
        if not close:
            return None
        place = place / close[0]
    return str(place)


def _spread(n: int, wanted: int) -> set[int]:
    """Up to ``wanted`` numbers of 0..n-1, evenly apart."""
    return set(np.linspace(0, n - 1, min(n, wanted)).astype(int).tolist()) if n else set()


def write_json(report: Report | Sequence[Report], path: str | os.PathLike) -> None:
    """The report (or several) as a JSON file."""
    import json

    from mmkit.cache import atomic_write

    content = report.to_json() if isinstance(report, Report) else [one.to_json() for one in report]
    with atomic_write(path) as work:
        work.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf8")
