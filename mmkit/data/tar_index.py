"""The index of a tar shard: where each usable sample's picture, caption and metadata lie, made in one pass and kept in the cache.

With it any sample is one read away, so tar sources behave like any other: exact position, any number of workers. What cannot be
used is counted by cause here, before training starts; pictures that do not decode are found when they are read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import itertools
import logging
import operator
import os
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmkit.cache import atomic_write, cache_root
from mmkit.config import ConfigError, FilterRule
from mmkit.data.example import IMAGE, BadRecord, Example, ImageRef, Turn
from mmkit.data.tar_files import ShardError, TarMember, is_remote, members, opened, read_range, stamp
from mmkit.storage import ATTEMPTS

log = logging.getLogger(__name__)

IMAGE_EXTENSIONS = ("jpg", "png", "jpeg", "webp")
VERSION = 2
OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "in": lambda value, allowed: any(operator.eq(*_alike(value, one)) for one in allowed),
    "not in": lambda value, refused: not any(operator.eq(*_alike(value, one)) for one in refused),
}
# Counters that are not damage: what a rule removes is removed on purpose.
FILTERED = "filter "
REPEATED = "duplicate key"  # the sample is used all the same
WHOLE = ("truncated tar", "damaged tar", "absent shard", "unreadable shard")  # counters of shards, not of samples
SUSPECT_SECONDS = 60.0


@dataclass
class ShardIndex:
    """The n usable samples of a shard, about 60 bytes each."""

    url: str
    names: np.ndarray  # (n,) keys in UTF-8
    kinds: np.ndarray  # (n,) uint8: the picture's extension in IMAGE_EXTENSIONS
    spans: np.ndarray  # (n, 3, 2) int64: offset and size of picture, caption and metadata (size -1: none)
    counts: Counter = field(default_factory=Counter)  # cause -> samples left out; "samples" -> all that were found
    found: Counter = field(default_factory=Counter)  # extension -> files
    missing: Counter = field(default_factory=Counter)  # rule -> samples without a value for it
    message: str = ""  # what was wrong with the shard as a whole
    lost: int = 0  # samples behind the damage, estimated by bytes
    suspect_until: float = 0.0  # all attempts to read it have failed: until then one attempt has to do
    file: int | None = None  # the shard's descriptor while it is `tar_files.opened`

    def __len__(self) -> int:
        return len(self.names)

    def key(self, i: int) -> str:
        """The key of sample ``i``."""
        return self.names[i].decode("utf8")

    def picture_name(self, i: int) -> str:
        """A name of sample ``i``'s picture that is unique over shards."""
        return f"{self.url}/{self.key(i)}.{IMAGE_EXTENSIONS[self.kinds[i]]}"

    def example(self, i: int, source: str) -> Example:
        """Sample ``i``: the picture's encoded bytes, the caption as an assistant's turn, metadata in ``meta``; BadRecord where it cannot be read."""
        key = self.key(i)
        try:
            picture, caption, meta = self.read(i)
        except ShardError as error:
            raise BadRecord(str(error), key=key, source=source, reason=error.reason) from error
        turns = (Turn("user", IMAGE, trained=False), Turn("assistant", caption))
        return Example(key, (ImageRef(picture, name=self.picture_name(i)),), turns, source=source, meta=meta)

    def close(self) -> None:
        """Gives back the descriptor, where the shard is opened."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def row(self) -> dict[str, Any]:
        """What people want to know: samples found and usable, left out by cause, what is wrong with the shard."""
        causes = {cause: n for cause, n in self.counts.items() if cause != "samples"}
        return {"shard": self.url, "samples": self.counts["samples"], "ok": len(self), **causes, "message": self.message}

    @property
    def bad(self) -> int:
        """Samples that damage has cost; what filters removed does not count."""
        return sum(n for cause, n in self.counts.items() if cause != "samples" and is_damage(cause))

    def read(self, i: int) -> tuple[bytes, str, dict[str, Any]]:
        """Picture, caption and metadata of sample ``i``, by one read where they lie side by side (they do, but for strange tars)."""
        spans = [(int(offset), int(size)) for offset, size in self.spans[i] if size >= 0]
        first, last = min(offset for offset, _ in spans), max(offset + size for offset, size in spans)
        if last - first > 2 * sum(size for _, size in spans) + (1 << 16):
            parts = [self._range(offset, size) for offset, size in spans]
        else:
            data = self._range(first, last - first)
            parts = [data[offset - first : offset - first + size] for offset, size in spans]
        meta = _metadata(parts[2]) if len(parts) > 2 else {}
        return parts[0], parts[1].decode("utf8", "replace").strip(), meta or {}

    def _range(self, offset: int, size: int) -> bytes:
        """A part of the shard. Where it has just failed for good, one attempt: each of its samples would wait as long as the first."""
        if self.file is not None:
            return os.pread(self.file, size, offset)
        try:
            return read_range(self.url, offset, size, 1 if time.monotonic() < self.suspect_until else ATTEMPTS)
        except ShardError as error:
            if error.reason == "unreadable shard":
                self.suspect_until = time.monotonic() + SUSPECT_SECONDS
            raise


def index_of(url: str, caption: str = "txt", filters: Sequence[FilterRule] = ()) -> ShardIndex:
    """The index of a shard, from the cache where the shard has not changed. An absent shard gives an empty one that says so.

    A pipe runs once and its output is held open: what a command gave to another process is not what it gives now.
    """
    if url.startswith("pipe:"):
        return _held_open(url, caption, filters)
    try:
        mark = stamp(url)
    except ShardError as error:
        return _absent(url, error)
    path = cache_root() / "shards" / f"{_name(url, mark, caption, filters)}.npz"
    if path.is_file() and (index := _load(url, path)):
        return index
    index = build(url, caption, filters)
    if "unreadable shard" not in index.counts:  # a network fault is not a property of the shard
        _save(index, path)
    return index


def _held_open(url: str, caption: str, filters: Sequence[FilterRule]) -> ShardIndex:
    try:
        return opened_index(url, caption, filters)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise ConfigError(
            f"{url}: this process may open no more files; raise `ulimit -n`, or set data.samples_per_epoch and data.resampled"
        ) from None


def opened_index(url: str, caption: str = "txt", filters: Sequence[FilterRule] = (), most: int | None = None) -> ShardIndex:
    """The index of a shard that is opened for reading it whole (`tar_files.opened`); the caller closes it. Nothing is kept.

    With ``most`` samples wanted a remote shard is not copied: its beginning is read where it lies. An absent shard gives an empty index.
    """
    try:
        return build(url, caption, filters, file=None if most and is_remote(url) else opened(url), most=most)
    except ShardError as error:
        log.warning("%s", error)
        return _absent(url, error)


def remember(url: str, size: int, caption: str, filters: Sequence[FilterRule]) -> None:
    """Keeps the number of usable samples of a shard."""
    path = _size_file(url, caption, filters)
    if not path.is_file() or path.read_text() != str(size):  # a pipe may give others than before
        with atomic_write(path) as temporary:
            temporary.write_text(str(size))


def remembered(url: str, caption: str, filters: Sequence[FilterRule]) -> int | None:
    """The number kept by `remember`, None where there is none or the shard has changed."""
    path = _size_file(url, caption, filters)
    text = path.read_text() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def _size_file(url: str, caption: str, filters: Sequence[FilterRule]) -> Path:
    try:
        mark = "" if url.startswith("pipe:") else stamp(url)
    except ShardError as error:
        mark = error.reason
    return cache_root() / "shards" / "sizes" / _name(url, mark, caption, filters)


def _absent(url: str, error: ShardError) -> ShardIndex:
    return ShardIndex(url, *_arrays([], [], []), Counter({error.reason: 1}), message=error.message)


def _name(url: str, mark: str, caption: str, filters: Sequence[FilterRule]) -> str:
    rules = json.dumps([rule.model_dump() for rule in filters], sort_keys=True, default=str)
    return hashlib.sha256(f"{VERSION} {url} {mark} {caption} {rules}".encode()).hexdigest()[:32]


def build(
    url: str, caption: str = "txt", filters: Sequence[FilterRule] = (), *, file: int | None = None, most: int | None = None
) -> ShardIndex:
    """Reads a shard's headers once, from its descriptor ``file`` where it is opened; the first ``most`` samples only, where given.

    Damage ends the reading and is counted; the whole samples before it stay.
    """
    keys, kinds, spans = [], [], []
    check_rules(filters)
    index = ShardIndex(url, *_arrays(keys, kinds, spans), file=file)
    for key, files in itertools.islice(_samples(url, index), most):
        index.counts["samples"] += 1
        index.found.update(files.keys())
        picture = next((name for name in IMAGE_EXTENSIONS if name in files), None)
        cause = _unusable(picture, files, caption) or _filtered(index, files, filters)
        if cause:
            index.counts[cause] += 1
            continue
        keys.append(key.encode("utf8"))
        kinds.append(IMAGE_EXTENSIONS.index(picture))
        row = [files[picture], files[caption], files.get("json")]
        spans.append([(file.offset, file.size) if file else (0, -1) for file in row])
    index.names, index.kinds, index.spans = _arrays(keys, kinds, spans)
    return index


def _arrays(keys: list[bytes], kinds: list[int], spans: list) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array(keys, "S" if keys else "S1"), np.array(kinds, np.uint8), np.array(spans, np.int64).reshape(-1, 3, 2)


def _samples(url: str, index: ShardIndex) -> Iterator[tuple[str, dict[str, TarMember]]]:
    """(key, extension -> file) of each sample: neighbours that share a key. An extension seen twice begins a new sample."""
    key, files = "", {}
    seen: set[str] = set()
    try:
        for member in members(url, index.file):
            folder, _, name = member.name.rpartition("/")
            base, _, extension = name.partition(".")
            if not base or not extension:
                continue
            extension, this = extension.lower(), f"{folder}/{base}" if folder else base
            if this != key or extension in files:
                if files:
                    yield key, files
                if this in seen:
                    index.counts[REPEATED] += 1
                seen.add(this)
                key, files = this, {}
            files[extension] = member
    except ShardError as error:
        index.counts[error.reason] += 1
        index.message = error.message
        index.lost = round(index.counts["samples"] * error.unread / (1 - error.unread)) if error.unread < 1 else 0
        log.warning("%s", error)
        return  # the sample being read may lack a file, so it is not given
    if files:
        yield key, files


def _unusable(picture: str | None, files: dict[str, TarMember], caption: str) -> str:
    if picture and caption in files:
        return ""
    if any("." in name and name.rsplit(".", 1)[-1] in (*IMAGE_EXTENSIONS, caption) for name in files):
        return "dotted key"
    return "missing image" if picture is None else "missing text"


def _filtered(index: ShardIndex, files: dict[str, TarMember], filters: Sequence[FilterRule]) -> str:
    """The counter of the first rule that removes a sample, or an empty text."""
    if not filters:
        return ""
    meta = _metadata(index._range(files["json"].offset, files["json"].size)) if "json" in files else {}
    if meta is None:
        return "bad json"
    index.missing.update(title(rule) for rule in filters if _compared(rule, meta) is None)
    return next((f"{FILTERED}{title(rule)}" for rule in filters if not keeps(rule, meta)), "")


def is_damage(cause: str) -> bool:
    """Whether a counter of a shard counts as bad: not what a rule removed, nor a key that comes again."""
    return not cause.startswith(FILTERED) and cause != REPEATED


def title(rule: FilterRule) -> str:
    """``punsafe <= 0.5``."""
    return f"{rule.key} {rule.op} {rule.value}"


def keeps(rule: FilterRule, meta: dict[str, Any]) -> bool:
    """Whether a sample with this metadata stays. A value of another type than the rule's counts as missing, but a number may be text."""
    kept = _compared(rule, meta)
    return rule.if_missing == "keep" if kept is None else kept


def _compared(rule: FilterRule, meta: dict[str, Any]) -> bool | None:
    """The rule's answer, None where the metadata have no value to compare."""
    value, wanted = meta.get(rule.key), rule.value
    if value is None:
        return None
    if rule.op[0] in "<>":
        wanted = _number(wanted)
    try:
        return OPERATIONS[rule.op](value, wanted) if "in" in rule.op else OPERATIONS[rule.op](*_alike(value, wanted))
    except TypeError:
        return None


def _alike(value: Any, wanted: Any) -> tuple[Any, Any]:
    """A number and a text that spells one as two numbers, anything else as it is."""
    return (_number(value), _number(wanted)) if isinstance(value, str) != isinstance(wanted, str) else (value, wanted)


def _number(value: Any) -> Any:
    for kind in (int, float) if isinstance(value, str) else ():
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def check_rules(filters: Sequence[FilterRule]) -> None:
    """ConfigError for a rule that no sample could answer."""
    for rule in filters:
        if "in" in rule.op and not isinstance(rule.value, list | tuple | set):
            raise ConfigError(f"filter {title(rule)}: `{rule.op}` needs a list of values, such as [{rule.value!r}]")


def _metadata(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _save(index: ShardIndex, path) -> None:
    facts = {"counts": index.counts, "found": index.found, "missing": index.missing, "message": index.message, "lost": index.lost}
    arrays = {"names": index.names, "kinds": index.kinds, "spans": index.spans}
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8))


def _load(url: str, path: Path) -> ShardIndex | None:
    """An index kept in the cache; None where the file is damaged, by a full disk for instance."""
    try:
        with np.load(path) as stored:
            facts = json.loads(stored["facts"].tobytes())
            arrays = (stored[name] for name in ("names", "kinds", "spans"))
            counters = (Counter(facts[name]) for name in ("counts", "found", "missing"))
            return ShardIndex(url, *arrays, *counters, facts["message"], facts["lost"])
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        log.warning("%s: the index kept in %s is damaged (%s) and made anew", url, path, error)
        return None


def total(indexes: Iterable[ShardIndex]) -> Counter:
    """All counters of several shards added up."""
    out: Counter = Counter()
    for index in indexes:
        out.update(index.counts)
    return out
