"""What is wrong with data, found before training by what training does: records read, paths tested, a sample decoded and tokenised.

Faults make a sample unusable, notes do not. Training would fail where the share of faults exceeds the allowed
one, where shards lack too much, or where nothing can be learned. A sample grows until it tells on which side
of the allowed share the data lie. What is only too long is no fault: ``data.too_long`` drops or truncates it,
and it is counted apart, as in training.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmkit.config import ClipConfig, ConfigError, DataConfig, ModelConfig, SourceConfig, VlmConfig
from mmkit.data.building import ClipBuilder, Pictures, VlmBuilder, check_regions, drawn
from mmkit.data.conversation import Formatter
from mmkit.data.example import TOO_LONG, BadRecord, Example, ImageRef, checked, checked_pair
from mmkit.data.images import ImageError, image_size, open_image
from mmkit.data.mixture import Mixture, Source
from mmkit.data.readers import RecordSource, open_source
from mmkit.data.shards import ShardSource, damage, inspect
from mmkit.data.tar_index import NOTED, WHOLE
from mmkit.data.templates import TEMPLATES, Rendered, render

SHOWN = 5  # examples named for each fault
TRUNCATED = "longer than data.max_length, truncated"
DECODED, TOKENISED = 200, 20_000  # samples taken evenly from the file, at first
GROWTH, DEVIATIONS = 4, 2  # a sample is made larger while the share found is this near the allowed one


@dataclass
class Report:
    """What was found: counts of each fault and note with examples, lengths in tokens, the share that training could not use."""

    name: str
    records: int = 0
    examples: int = 0  # of an epoch; more than ``records`` where only the first shards of a stream were looked at
    images: int = 0
    decoded: int = 0
    tokenised: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)  # by cause: samples of shards that are no records, `TOO_LONG`
    shown: dict[str, list[str]] = field(default_factory=dict)
    lengths: dict[str, float] = field(default_factory=dict)  # tokens of a sample: least, median, 95%, most
    supervised: float = 0.0  # share of text and image tokens that carry loss
    bad: int = 0  # samples found with a fault
    share: float = 0.0  # of all samples, that training could not use: measured, or estimated from what was decoded and tokenised
    max_bad_share: float = 0.01
    refused: str = ""  # what training says when it is to open the source
    would_fail: bool = False  # training on this data would stop

    @property
    def too_long(self) -> tuple[int, float]:
        """(samples found that are longer than a row, their share of those tokenised), left out or truncated."""
        found = self.left_out.get(TOO_LONG, 0) + self.notes.get(TRUNCATED, 0)
        return found, found / max(self.tokenised, 1)

    @property
    def unused(self) -> float:
        """Share of all samples that training would not see: bad ones, and those left out for their length."""
        return 1 - (1 - self.share) * (1 - self.left_out.get(TOO_LONG, 0) / max(self.tokenised, 1))

    def judge(self, share: float | None = None, unused: float | None = None) -> None:
        """Sets ``would_fail``, by the shares of the mixture the source belongs to where they are given."""
        share, unused = self.share if share is None else share, self.unused if unused is None else unused
        too_bad = self.share > 0 and (share > self.max_bad_share or share >= 1)
        self.would_fail = bool(self.refused) or not self.records or too_bad or unused >= 1

    def rows(self) -> list[dict[str, Any]]:
        """A table: kind (fault, left out or note), what, how many, examples."""
        kinds = (("fault", self.faults), ("left out", self.left_out), ("note", self.notes))
        return [
            {"kind": kind, "what": what, "count": count, "examples": "; ".join(self.shown.get(what, []))}
            for kind, found in kinds
            for what, count in sorted(found.items(), key=lambda pair: -pair[1])
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return asdict(self)

    def summary(self) -> str:
        """A few lines for people."""
        verdict = "training would stop" if self.would_fail else "ready to train"
        estimate = f", about {self.share:.1%} of all" if abs(self.share * self.records - self.bad) >= 1 else ""
        lines = [f"{self.name}: {self.records:,} records, {self.images:,} images, {self.bad:,} unusable{estimate} ({verdict})"]
        lines += ["  refused: " + self.refused.replace("\n", "\n  ")] if self.refused else []
        lines += [f"  {row['kind']}: {row['count']:,} {row['what']}: {row['examples']}" for row in self.rows()]
        if self.too_long[0]:
            lines.append(f"  longer than a row: {self.too_long[1]:.1%} of the samples tokenised")
        if self.lengths:
            sizes = ", ".join(f"{name} {value:g}" for name, value in self.lengths.items())
            lines.append(f"  tokens ({self.tokenised:,} samples): {sizes}; {self.supervised:.1%} supervised")
        return "\n".join(lines)


def check(
    source: Source,
    data: DataConfig | None = None,
    model: ModelConfig | None = None,
    formatter: Formatter | None = None,
    *,
    decode: int = DECODED,
    tokenise: int = TOKENISED,
    streamed: bool = False,
    refused: str = "",
) -> Report:
    """The report of a source, as training of ``model`` under ``data`` would find it; without a model, as any model would.

    A vision-language model needs its ``formatter``. At most ``decode`` samples are opened whole and at least as many of its
    conversations tokenised as ``tokenise`` says, evenly apart. ``streamed``: the source is the first shards of a stream. ``refused``: see `opened`.
    """
    return _Check(source, data or DataConfig(), model, formatter, refused).run(decode, max(decode, tokenise), streamed)


def check_file(file: str, images: str | None = None, format: str = "llava", data: DataConfig | None = None, **options) -> Report:
    """The report of a data file (tar shards: a pattern) whose picture paths start from ``images``. Other options as for `check`."""
    config = SourceConfig(name=Path(file).name, format=format, path=file, images=images)
    source, refused = opened(config, data or DataConfig())
    return check(source, data, refused=refused, **options)


def opened(config: SourceConfig, data: DataConfig) -> tuple[Source, str]:
    """(a source, what training says when it refuses to open it): damaged shards, with what they hold. ConfigError for a wrong path."""
    try:
        return open_source(config, data), ""
    except ConfigError:
        raise
    except ValueError as error:
        if config.format != "webdataset":
            raise
        source = inspect(config.path, data.caption_key, config.filters)
        source.name = config.name
        return source, str(error)


def record_notes(source: Source, most: int) -> list[str]:
    """What becomes of the keys of a source's records, one line each: what is not read, what was chosen of several.

    Up to ``most`` records are looked at, evenly apart; those that cannot be read are counted while training goes on.
    """
    counts: Counter[str] = Counter()
    numbers = _spread(len(source), most).tolist() if isinstance(source, RecordSource) else []
    for index in numbers:
        with contextlib.suppress(BadRecord):
            counts.update(source[index].notes)
    part = f" (of {len(numbers):,} looked at, of {len(source):,} in all)" if len(numbers) < len(source) else ""
    return [f"{source.name}: {count:,} {note}{part}" for note, count in counts.most_common()]


def judge_together(reports: Sequence[Report], wanted: Sequence[int]) -> None:
    """Judges the sources of one mixture, of which an epoch takes ``wanted`` samples each: training counts faults over all of them."""
    share = sum(report.share * count for report, count in zip(reports, wanted, strict=True)) / max(sum(wanted), 1)
    unused = sum(one.unused * count for one, count in zip(reports, wanted, strict=True)) / max(sum(wanted), 1)
    for report in reports:
        report.judge(share, unused)


class _Check:
    def __init__(self, source: Source, data: DataConfig, model: ModelConfig | None, formatter: Formatter | None, refused: str):
        self.source, n = source, len(source)
        self.report = Report(source.name, n, n, max_bad_share=data.max_bad_share, refused=refused)
        self.faults, self.notes, self.shown = Counter(), Counter(), defaultdict(list)
        self.usable = np.ones(n, dtype=bool)
        self.seen_keys, self.seen_texts = set(), set()
        self.sizes: dict[str, tuple[int, int] | ImageError] = {}
        self.use: _AnyModel = _AnyModel(source)
        if n and isinstance(model, ClipConfig):
            self.use = _Pairs(source)
        elif n and isinstance(model, VlmConfig) and formatter:
            self.use = _Conversations(source, data, model, formatter)

    def run(self, decode: int, tokenise: int, streamed: bool) -> Report:
        if isinstance(self.source, ShardSource):  # their index has told what is in them, without reading them
            self._shards(self.source, streamed)
            tests = ((self._look_and_decode, decode), (self.use.tokenise, tokenise))
        else:
            tests = ((self._look, len(self.source)), (self.use.tokenise, tokenise), (self._decode, decode))
        for test, wanted in tests:
            self._try(test, wanted)
        return self._finished()

    def _shards(self, source: ShardSource, streamed: bool) -> None:
        """Counts what the shards lack. An indexed set is refused for it when it is opened, a stream while training goes on."""
        from mmkit.data.stream import ShardLog

        for index in source.indexes:
            for cause, n in index.counts.items():
                if cause != "samples":
                    counted = self.notes if cause in NOTED else self.report.left_out
                    counted[cause] = counted.get(cause, 0) + n
                    whole = index.message if cause in WHOLE else ""
                    self._show(cause, f"{index.url}: {whole or '%d of %d samples' % (n, index.counts['samples'])}")
            self.report.bad += index.bad_samples
        for extension, n in source.unread.most_common(SHOWN):
            self.notes[f"{extension} files that are not read"] = n
        if not streamed:
            self.report.share = damage(source)
            return
        self.report.share = min(sum(index.bad for index in source.indexes) / max(source.counts["samples"], 1), 1.0)
        try:
            ShardLog().add(sorted(source.report(), key=lambda row: bool(row["message"])), self.report.max_bad_share)
        except ValueError as error:
            self.report.refused = str(error)

    def _try(self, test: Callable[[int], None], wanted: int) -> None:
        """Tests up to ``wanted`` of the samples that are usable so far, evenly apart, and counts the share of the others."""
        left, tried, bad = np.flatnonzero(self.usable), np.zeros(0, dtype=np.int64), 0
        while len(tried) < min(wanted, len(left)):
            places = np.setdiff1d(_spread(len(left), wanted), tried)
            bad += sum(not self._passes(test, index) for index in left[places].tolist())
            tried = np.union1d(tried, places)
            if self._unclear(bad / len(tried), len(tried)):
                wanted *= GROWTH
        if len(tried):
            self.report.share += (1 - self.report.share) * bad / len(tried)

    def _unclear(self, found: float, tried: int) -> bool:
        """Whether faults in a share ``found`` of so many samples leave open on which side of the allowed share the data lie."""
        allowed = self.report.max_bad_share
        share = self.report.share + (1 - self.report.share) * found
        return found > 0 and abs(share - allowed) <= DEVIATIONS * (allowed * (1 - allowed) / tried) ** 0.5

    def _passes(self, test: Callable[[int], None], index: int) -> bool:
        """Whether a sample has no fault by this test. One left out for its length has none, and is looked at
        no further."""
        try:
            test(index)
        except BadRecord as error:
            self.usable[index] = False
            self._show(error.reason, f"{error.key}: {error.message}")
            if error.reason == TOO_LONG:
                self.report.left_out[TOO_LONG] = self.report.left_out.get(TOO_LONG, 0) + 1
                return True
            self.report.bad += 1
            self.faults[error.reason] += 1
            return False
        return True

    def _look(self, index: int) -> None:
        example = self.source[index]
        self._duplicates(example)
        for note in example.notes:
            self._note(note, example.key)
        if not example.images:
            self._note("no image", example.key)
        sizes = [self._size(ref, example) for ref in self.use.look(example)]
        try:
            check_regions(example, (), sizes)
        except ImageError as error:
            raise BadRecord(error.message, key=example.key, source=example.source, reason=error.reason) from None
        for box in (region.box for region in example.regions):
            if box.clamped() != box:
                self._note("box outside", example.key, f"{box.corners} in {box.frame.width:g}x{box.frame.height:g}")

    def _size(self, ref: ImageRef, example: Example) -> tuple[int, int]:
        """(width, height) of a picture, each looked at once; BadRecord where it is not there or no picture."""
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

    def _look_and_decode(self, index: int) -> None:
        self._look(index)
        self._decode(index)

    def _decode(self, index: int) -> None:
        self.report.decoded += 1
        self.use.decode(index)

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

    def _note(self, what: str, key: str, detail: str = "") -> None:
        self.notes[what] += 1
        self._show(what, f"{key} {detail}".strip())

    def _show(self, what: str, text: str) -> None:
        if len(self.shown[what]) < SHOWN:
            self.shown[what].append(text)

    def _finished(self) -> Report:
        report, lengths = self.report, self.use.lengths
        report.images, report.tokenised = len(self.sizes), len(lengths)
        if self.use.truncated:
            self.notes[TRUNCATED], self.shown[TRUNCATED] = len(self.use.truncated), self.use.truncated[:SHOWN]
        report.faults, report.notes, report.shown = dict(self.faults), dict(self.notes), dict(self.shown)
        if lengths:
            low, middle, high, most = np.percentile(lengths, [0, 50, 95, 100]).tolist()
            report.lengths = {"least": low, "median": middle, "95%": high, "most": most}
            report.supervised = self.use.trained / sum(lengths)
        report.judge()
        return report


# ---------------------------------------------------------------- what a model asks of an example; each method raises BadRecord


class _AnyModel:
    """What every model asks, whichever will be trained: an answer without a question is taken for the caption of a pair."""

    def __init__(self, source: Source):
        self.source = source
        self.lengths, self.trained = [], 0  # in tokens, of the samples tokenised, before any is cut
        self.truncated: list[str] = []  # keys of them

    def look(self, example: Example) -> Sequence[ImageRef]:
        """The pictures that training opens."""
        _answered(checked(example), lambda turns: render(TEMPLATES["short"], turns))
        return example.images if example.question else checked_pair(example).images

    def tokenise(self, index: int) -> None:
        """Nothing without a tokenizer."""

    def decode(self, index: int) -> None:
        """Opens the example's pictures whole, and lays its regions on them."""
        example = self.source[index]
        try:
            check_regions(example, range(len(example.regions)), [open_image(ref).size for ref in example.images])
        except ImageError as error:
            raise BadRecord(error.message, key=example.key, source=example.source, reason=error.reason) from None


class _Pairs(_AnyModel):
    """What a contrastive model asks, by `building.ClipBuilder`."""

    def __init__(self, source: Source):
        import torch

        super().__init__(source)
        self.builder = ClipBuilder(_alone(source), Pictures([lambda image: torch.zeros(1)]), None, seed=0, train=True)

    def look(self, example: Example) -> Sequence[ImageRef]:
        return checked_pair(example).images[:1]

    def decode(self, index: int) -> None:
        self.builder.load(index, epoch=0)


class _Conversations(_AnyModel):
    """What a vision-language model asks, by `planning.ConversationPlan` and `building.VlmBuilder`."""

    def __init__(self, source: Source, data: DataConfig, model: VlmConfig, formatter: Formatter):
        from mmkit.data.planning import ConversationPlan

        super().__init__(source)
        self.mixture = _alone(source)
        self.plan = ConversationPlan(self.mixture, data, model, formatter, seed=0, train=True, megabatch=1)
        self.builder = VlmBuilder(self.mixture, model, Pictures([]), seed=0, train=True)

    def look(self, example: Example) -> Sequence[ImageRef]:
        _answered(checked(example), self.plan.formatter.render)
        return example.images

    def tokenise(self, index: int) -> None:
        example = self._drawn(index)
        member = self.plan.encode(index, example)
        self.lengths.append(member.length)
        self.trained += int(member.encoded.trained.sum())
        if self.plan.fit(member, example).cut:
            self.truncated.append(example.key)

    def decode(self, index: int) -> None:
        from mmkit.data.packing import Item

        problems: list = []
        self.builder.load_row((Item((self.plan.encode(index, self._drawn(index)),)),), 0, problems)
        if problems:
            raise BadRecord(problems[0].message, key=problems[0].key, source=problems[0].source, reason=problems[0].reason)

    def _drawn(self, index: int) -> Example:
        return drawn(self.mixture, index, seed=0, epoch=0, train=True)


def _alone(source: Source) -> Mixture:
    return Mixture([SourceConfig(name=source.name, format="llava", path="-")], [source])


def _answered(example: Example, render_turns: Callable[[Sequence], Rendered]) -> None:
    """BadRecord where roles are out of order or no answer is to be learned; tokens are not needed to tell."""
    try:
        spans = render_turns(example.turns).spans
    except ValueError as error:
        raise BadRecord(str(error), key=example.key, source=example.source, reason="turns") from None
    if not spans:
        message = "no answer to learn from; it needs an answer that is not empty"
        raise BadRecord(message, key=example.key, source=example.source, reason="no supervised token")


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


def _spread(n: int, wanted: int) -> np.ndarray:
    """Up to ``wanted`` numbers of 0..n-1, evenly apart."""
    return np.unique(np.linspace(0, n - 1, min(n, wanted)).astype(np.int64)) if n else np.zeros(0, dtype=np.int64)


def write_json(report: Report | Sequence[Report], path: str | os.PathLike) -> None:
    """The report (or several) as a JSON file."""
    import json

    from mmkit.cache import atomic_write

    content = report.to_json() if isinstance(report, Report) else [one.to_json() for one in report]
    with atomic_write(path) as work:
        work.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf8")
