"""The index of a tar shard: where each usable sample's picture, caption and metadata lie, made in one pass
and kept in the cache.

With it any sample is one read away, so tar sources behave like any other: exact position, any number of
workers. What cannot be used is counted by cause here, before training starts: captions and json are read,
which lie beside the headers and are small. Pictures that do not decode are found when they are read.
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
import re
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
from mmkit.data.tar_captions import IMAGE_EXTENSIONS, caption_of, caption_place, json_of, text_fields
from mmkit.data.tar_files import ShardError, TarMember, is_remote, members, opened, read_range, stamp
from mmkit.storage import ATTEMPTS

log = logging.getLogger(__name__)

VERSION = 3
FIRST = 10  # samples of a shard whose json tells which fields there are
MOST_FIELDS = 30  # taken from each
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
# Counters that are not damage: what a rule removes is removed on purpose, and what is noted costs no sample.
FILTERED = "filter "
REPEATED = "duplicate key"  # the sample is used all the same
UNREAD_JSON = "unreadable json, sample kept"  # as above: its metadata are lost, for which nothing asked
UNNAMED = "file without a key or an extension"  # as README, or ._a.jpg: of no sample
EMPTY = "empty shard"  # a whole tar without a file
NOTED = (REPEATED, UNREAD_JSON, UNNAMED, EMPTY)
DOTTED, APART = "dotted key", "files apart"
NO_SAMPLE = "shard without a sample"  # whose files all have no key or no extension
WHOLE = ("truncated tar", "damaged tar", "absent shard", "unreadable shard", NO_SAMPLE)  # shards, not samples
COUNTERS = ("counts", "found", "unread", "keys", "texts", "missing")  # of a `ShardIndex`
SUSPECT_SECONDS = 60.0


@dataclass
class ShardIndex:
    """The n usable samples of a shard, about 60 bytes each."""

    url: str
    names: np.ndarray  # (n,) keys in UTF-8
    kinds: np.ndarray  # (n,) uint8: the picture's extension in IMAGE_EXTENSIONS
    spans: np.ndarray  # (n, 3, 2) int64: offset and size of picture, caption and metadata (size -1: none)
    counts: Counter = field(default_factory=Counter)  # cause -> samples left out; "samples" -> all that were found
    found: Counter = field(default_factory=Counter)  # extension -> files, with N for its numbers
    unread: Counter = field(default_factory=Counter)  # the same, of usable samples' files that nothing reads
    keys: Counter = field(default_factory=Counter)  # of the first samples' json
    texts: Counter = field(default_factory=Counter)  # fields of the same that hold text, as ``json:caption``
    missing: Counter = field(default_factory=Counter)  # rule -> samples without a value for it
    message: str = ""  # what was wrong with the shard as a whole
    lost: int = 0  # samples behind the damage, estimated by bytes
    caption: str = "txt"  # `data.caption_key`
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
        except BadRecord as error:  # the shard is another than when it was indexed
            said = f"{error.message}; in {self.url}"
            raise BadRecord(said, key=key, source=source, reason=error.reason) from error
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

    @property
    def bad_samples(self) -> int:
        """Of `bad` those that are samples, not shards."""
        return self.bad - sum(self.counts[cause] for cause in WHOLE)

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
        return parts[0], caption_of(parts[1], self.caption), meta or {}

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
    if path.is_file() and (index := _load(url, path, caption)):
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
    """Reads a shard's headers once, from its descriptor ``file`` where it is opened; the first ``most``
    samples only, where given.

    Damage ends the reading and is counted; the whole samples before it stay. ConfigError for a caption or a
    rule that no sample can have.
    """
    keys, kinds, spans = [], [], []
    check_rules(filters)
    index = ShardIndex(url, *_arrays(keys, kinds, spans), file=file, caption=caption)
    halves: dict[str, str] = {}  # keys whose files are no sample -> their counter: the rest may come later
    for key, files in itertools.islice(_samples(url, index), most):
        index.found.update(_numberless(extension) for extension in files)
        for extension, facts in files.items() if index.counts["samples"] < FIRST else ():
            meta = (extension.endswith("json") and _metadata(facts.content or b"")) or {}
            index.keys.update([*meta] if extension == "json" else ())
            named = itertools.islice(text_fields(meta), MOST_FIELDS)
            index.texts.update(f"{extension}:{name}" for name in named)
        picture, cause, behind_dots = _taken(files, caption)
        halved = cause in ("missing image", "missing text")
        if halved and halves.get(key, cause) != cause:
            index.counts.subtract((halves.pop(key), REPEATED))  # a sample is counted once, also in two pieces
            index.counts[APART] += 1
            continue
        if halved:
            halves[key] = cause
        index.counts["samples"] += behind_dots + (cause != DOTTED)
        index.counts[DOTTED] += behind_dots
        if cause == DOTTED:
            continue
        cause = cause or _unlearnable(index, files, picture, filters)
        if cause:
            index.counts[cause] += 1
            continue
        keys.append(key.encode("utf8"))
        kinds.append(IMAGE_EXTENSIONS.index(picture))
        row = [files[picture], files[caption_place(caption)[0]], files.get("json")]
        spans.append([(file.offset, file.size) if file and file.size >= 0 else (0, -1) for file in row])
        index.unread.update(_numberless(name) for name in files if name != "json" and files[name] not in row)
    index.counts = +index.counts  # without zeros
    if not index.counts["samples"] and not index.message:
        unnamed = index.counts[UNNAMED]
        index.counts[NO_SAMPLE if unnamed else EMPTY] += 1
        index.message = f"none of its {unnamed:,} files has a key and an extension" if unnamed else ""
        log.warning("shard %s: %s", url, index.message or "it holds no file")
    index.names, index.kinds, index.spans = _arrays(keys, kinds, spans)
    return index


def _arrays(keys: list[bytes], kinds: list[int], spans: list) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array(keys, "S" if keys else "S1"), np.array(kinds, np.uint8), np.array(spans, np.int64).reshape(-1, 3, 2)


def _key_and_extension(name: str) -> tuple[str, str]:
    """A file's place in a sample: a key ends at the first dot of the name. Both empty for a file that belongs
    to none."""
    folder, _, name = name.rpartition("/")
    base, _, extension = name.partition(".")
    return (f"{folder}/{base}" if folder else base, extension.lower()) if base and extension else ("", "")


def _samples(url: str, index: ShardIndex) -> Iterator[tuple[str, dict[str, TarMember]]]:
    """(key, extension -> file) of each sample: neighbours that share a key. An extension seen twice begins a new sample."""
    key, files = "", {}
    seen: set[str] = set()
    wanted = (caption_place(index.caption)[0], "json")
    try:
        for member in members(url, index.file, lambda name: _key_and_extension(name)[1].endswith(wanted)):
            this, extension = _key_and_extension(member.name)
            if not this:
                index.counts[UNNAMED] += 1
                continue
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


def _taken(files: dict[str, TarMember], caption: str) -> tuple[str, str, int]:
    """(extension of the picture, why these files are no pair, samples that stand behind a dot) of the files
    of one key.

    A key ends at its first dot, so ``img.0.jpg``, ``img.0.txt``, ``img.1.jpg`` ... are the files of one key,
    ``img``, whose extensions are ``0.jpg`` and so on: each number is a sample that would be lost uncounted.
    """
    place = caption_place(caption)[0]
    picture = next((name for name in IMAGE_EXTENSIONS if name in files), "")
    pictures = {name.rpartition(".")[0] for name in files if name.rpartition(".")[2] in IMAGE_EXTENSIONS}
    captions = {name[: -len(place)].rstrip(".") for name in files if f".{name}".endswith(f".{place}")}
    pairs = len((pictures & captions) - {""})
    if picture and place in files:
        return picture, "", pairs
    plain = picture or place in files
    if captions if picture else pictures if plain else pictures | captions:
        return picture, DOTTED, 1 + pairs if plain else max(len(pictures), len(captions))
    return picture, "missing text" if picture else "missing image", 0


def _unlearnable(
    index: ShardIndex, files: dict[str, TarMember], picture: str, filters: Sequence[FilterRule]
) -> str:
    """The counter of what is wrong with a pair, or of the first rule that removes it; empty where it can be
    used."""
    caption, facts = files[caption_place(index.caption)[0]], files.get("json")
    if min(files[picture].size, caption.size) < 0:
        return "link in the place of a file"
    if not files[picture].size:
        return "empty image"
    meta = _metadata(facts.content) if facts and facts.content is not None else {}
    try:
        caption_of(caption.content, index.caption)
    except BadRecord as error:
        return error.reason
    if not filters:
        index.counts[UNREAD_JSON] += meta is None or bool(facts and facts.size < 0)
        return ""
    if meta is None or facts and facts.size < 0:
        return "bad json"
    index.missing.update(title(rule) for rule in filters if _compared(rule, meta) is None)
    return next((f"{FILTERED}{title(rule)}" for rule in filters if not keeps(rule, meta)), "")


def _numberless(extension: str) -> str:
    """An extension with N for its numbers: that of ``img.0.jpg`` is one of thousands."""
    return re.sub(r"\d+(?=.*\.)", "N", extension)


def is_damage(cause: str) -> bool:
    """Whether a counter of a shard counts as bad: not what a rule removed, nor what is only noted."""
    return not cause.startswith(FILTERED) and cause not in NOTED


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
    """The object of a json file, None where it holds none."""
    with contextlib.suppress(BadRecord):
        return value if isinstance(value := json_of(data), dict) else None
    return None


def _save(index: ShardIndex, path) -> None:
    facts = {name: getattr(index, name) for name in (*COUNTERS, "message", "lost")}
    arrays = {"names": index.names, "kinds": index.kinds, "spans": index.spans}
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8))


def _load(url: str, path: Path, caption: str) -> ShardIndex | None:
    """An index kept in the cache; None where the file is damaged, by a full disk for instance."""
    try:
        with np.load(path) as stored:
            facts = json.loads(stored["facts"].tobytes())
            arrays = (stored[name] for name in ("names", "kinds", "spans"))
            facts |= {name: Counter(facts[name]) for name in COUNTERS}
            return ShardIndex(url, *arrays, **facts, caption=caption)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        log.warning("%s: the index kept in %s is damaged (%s) and made anew", url, path, error)
        return None


def total(indexes: Iterable[ShardIndex]) -> Counter:
    """All counters of several shards added up."""
    out: Counter = Counter()
    for index in indexes:
        out.update(index.counts)
    return out
