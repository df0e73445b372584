"""WebDataset tar shards as a source of examples, without a sample lost in silence (clip-training section 8; U09, U17-U23).

`open_shards` indexes every shard once and gives a map-style source: `Mixture` and `Loader` then shuffle, share out and resume it like
any other, one sample at a time, so neither the number of shards nor of workers limits the number of processes. Its `draw_order` keeps
neighbours of an epoch in one shard for fast reading. Sets too large to index first are read by `stream.py`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mmkit.config import DataConfig, FilterRule, SourceConfig
from mmkit.data.example import Example
from mmkit.data.tar_files import expand, is_remote
from mmkit.data.records import CAPTION_FIELDS
from mmkit.data.tar_captions import IMAGE_EXTENSIONS, caption_place
from mmkit.data.tar_index import APART, EMPTY, FILTERED, NOTED, WHOLE, ShardIndex, index_of, is_damage, title, total
from mmkit.errors import InputError

log = logging.getLogger(__name__)

SHUFFLE = 5000  # samples whose order is mixed in a window of an epoch, as open_clip's sample buffer
CONNECTIONS = 8  # remote shards indexed at the same time
NAMED = 10  # shards and endings that a message names


class ShardSource:
    """Examples of tar shards by number: the picture's encoded bytes, the caption as an assistant's turn, metadata in ``meta``."""

    def __init__(self, name: str, indexes: Sequence[ShardIndex], *, resampled: bool = False):
        self.name, self.indexes, self.resampled = name, list(indexes), resampled
        self.starts = np.cumsum([0, *(len(index) for index in indexes)])
        some = (np.diff(self.starts) > 0).astype(float)
        self.chances = some / max(some.sum(), 1)  # of each shard, where they are drawn with replacement

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, i: int) -> Example:
        shard, local = self._place(i)
        return self.indexes[shard].example(local, self.name)

    def group(self, i: int) -> str:
        """The picture's identity, without reading it."""
        shard, local = self._place(i)
        return self.indexes[shard].picture_name(local)

    def _place(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        shard = int(np.searchsorted(self.starts, i, side="right")) - 1
        return shard, int(i - self.starts[shard])

    def draw_order(self, rng: np.random.Generator, wanted: int) -> np.ndarray:
        """Up to ``wanted`` sample numbers in the order of an epoch: shards shuffled, then samples mixed within `SHUFFLE` neighbours.

        Without replacement every sample comes once; ``resampled`` draws shards with replacement, which open_clip does.
        """
        if not self.resampled:
            shards = rng.permutation(len(self.indexes))
        else:
            mean = float(self.chances @ np.diff(self.starts))
            shards = rng.choice(len(self.indexes), size=max(1, -int(-wanted // mean)) + 1, p=self.chances)
        parts = [np.arange(self.starts[shard], self.starts[shard + 1]) for shard in shards]
        order = np.concatenate(parts)[: wanted if self.resampled else None]
        for start in range(0, len(order), SHUFFLE):
            rng.shuffle(order[start : start + SHUFFLE])
        return order[:wanted]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the shards, their samples or the way they are drawn."""
        facts = [(index.url, len(index)) for index in self.indexes] + [self.resampled, self.chances.tolist()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @property
    def counts(self) -> Counter:
        """Samples left out, by cause, over all shards."""
        return total(self.indexes)

    @property
    def unread(self) -> Counter:
        """Files of usable samples that nothing reads, by their ending, over all shards."""
        return sum((index.unread for index in self.indexes), Counter())

    def report(self) -> list[dict[str, Any]]:
        """One row a shard: samples usable, left out by cause, and what is wrong with it."""
        return [index.row() for index in self.indexes]

    def summary(self) -> str:
        """Lines for people: totals, what each cause and rule removed, damaged shards by name, how an epoch draws."""
        counts = self.counts
        lines = [f"{self.name}: {len(self.indexes)} shards, {counts['samples']:,} samples found, {len(self):,} usable"]
        causes = sorted(counts.keys() - {"samples"})
        lines += [f"  {'noted' if cause in NOTED else 'left out'}: {counts[cause]:,} {cause}" for cause in causes]
        empty = [index.url for index in self.indexes if index.counts[EMPTY]]
        lines += [f"  {url}: it holds no file" for url in empty[:NAMED]]
        lines += [f"  not read: {n:,} {name} files" for name, n in self.unread.most_common(NAMED)]
        faulty = [index for index in self.indexes if index.message or index.bad]
        worst = sorted(faulty, key=lambda index: -index.bad)
        told = [index for place, index in enumerate(worst) if index.message or place < NAMED]
        lines += [f"  {_wrong_with(index)} ({len(index):,} samples kept)" for index in told]
        if len(worst) > len(told):
            lines.append(f"  and {len(worst) - len(told):,} more shards with samples that cannot be used")
        if self.resampled:
            different = f"{unique_expected(self):,} different ones"
            lines.append(f"  shards drawn with replacement: of {len(self):,} samples an epoch as long shows {different}")
        return "\n".join(lines)


def _wrong_with(index: ShardIndex) -> str:
    """A shard's name with what is wrong with it as a whole, and how many of its samples cannot be used, by
    cause."""
    bad = [cause for cause, _ in index.counts.most_common() if cause not in ("samples", *WHOLE) and is_damage(cause)]
    causes = [f"{index.counts[cause]:,} {cause}" for cause in bad]
    of = f"{', '.join(causes)} of {index.counts['samples']:,} samples" if causes else ""
    return f"{index.url}: {'; '.join(part for part in (index.message, of) if part)}"


def unique_expected(source: ShardSource, drawn: int | None = None) -> int:
    """Different samples to be expected when about ``drawn`` (all) samples come from shards drawn with replacement (U18)."""
    sizes = np.diff(source.starts)
    draws = (drawn or len(source)) / max(float(source.chances @ sizes), 1e-9)
    return round(float((sizes * (1 - (1 - source.chances) ** draws)).sum()))


def open_shards(config: SourceConfig, data: DataConfig | None = None) -> ShardSource:
    """The source of ``config.path`` (see `tar_files.expand`), filtered by ``config.filters``.

    Raises ValueError where no sample of the first readable shard can be used, naming the extensions found and wanted; where the filters
    leave none, naming the keys seen; where more than ``data.max_bad_share`` of the samples are damaged or missing, naming the shards;
    ConfigError for a wrong path.
    """
    data = data or DataConfig()
    urls = expand(config.path)
    indexes = _first_checked(config, urls, data.caption_key)
    source = ShardSource(config.name, indexes, resampled=data.resampled)
    check_filters(source, config.filters)
    check_damage(source, data.max_bad_share)
    causes = {cause for index in indexes for cause in index.counts if not cause.startswith(FILTERED)}
    told = causes - {"samples"} or any(index.message for index in indexes)
    log.log(logging.WARNING if told else logging.INFO, "%s", source.summary())
    return source


def _first_checked(config: SourceConfig, urls: Sequence[str], caption: str) -> list[ShardIndex]:
    """All indexes; an error as soon as one shard was read that has samples but none of use (U21)."""
    indexes: list[ShardIndex] = []
    for url in urls:
        indexes.append(index_of(url, caption, config.filters))
        if indexes[-1].found:
            check_extensions(config.name, indexes[-1], caption)
            break
    rest = urls[len(indexes) :]
    with ThreadPoolExecutor(CONNECTIONS if any(map(is_remote, rest)) else 1) as pool:
        return indexes + list(pool.map(lambda url: index_of(url, caption, config.filters), rest))


def check_extensions(name: str, index: ShardIndex, caption: str) -> None:
    """ValueError where a shard has samples but none of use, naming the extensions found and wanted; a warning
    of files that nothing reads."""
    if index.unread:
        endings = ", ".join(name for name, _ in index.unread.most_common(NAMED))
        log.warning("%s: beside pictures and captions its samples have files that are not read: %s", name, endings)
    removed = sum(n for cause, n in index.counts.items() if cause.startswith(FILTERED))
    if len(index) or removed:
        return
    none = f"{name}: none of the {index.counts['samples']} samples of the first shard {index.url} can be used"
    ending, _ = caption_place(caption)
    if index.counts[APART]:
        raise InputError(
            f"{none}. It has pictures and {ending} files, but the files of one key do not stand side by side: "
            f"{index.counts[APART]} keys come again later. Make the tar anew with its names sorted (`tar --sort=name`), or by "
            "`mmkit.data.tar_writer`"
        )
    causes = ", ".join(f"{n:,} {cause}" for cause, n in index.counts.most_common() if cause != "samples")
    likely = sorted(index.texts, key=lambda field: re.split("[:.]", field)[-1] not in CAPTION_FIELDS)[:NAMED]
    to_do = f"set data.caption_key to one, as {likely[0]}" if likely else ""
    fields = f" Fields of its json that hold text: {', '.join(likely)}; {to_do}." if likely else ""
    found = sorted(index.found)
    raise InputError(
        f"{none} ({causes}). Extensions found: {', '.join(found[:NAMED])}{' ...' if found[NAMED:] else ''}; wanted: one of "
        f"{', '.join(IMAGE_EXTENSIONS)} and {ending}.{fields} A key ends at its first dot, so `a.input.jpg` has extension `input.jpg`; "
        "write the shards anew with `mmkit.data.tar_writer`, or set data.caption_key"
    )


def check_filters(source: ShardSource, filters: Sequence[FilterRule]) -> None:
    """ValueError where the filters leave no sample, a warning for a rule whose key no sample has: it is likely misspelt."""
    removed = [(title(rule), source.counts[FILTERED + title(rule)]) for rule in filters]
    n, missing = len(source) + sum(count for _, count in removed), sum((index.missing for index in source.indexes), Counter())
    absent = [rule.key for rule in filters if n and missing[title(rule)] == n]
    if not absent and (len(source) or not n):
        return
    seen = sorted(sum((index.keys for index in source.indexes[:NAMED]), Counter()))
    keys = f"keys of the samples' json: {', '.join(seen) or 'none'}"
    if absent:
        keys = f"no sample has a value for {', '.join(absent)}; {keys}"
    if len(source):
        log.warning("%s: %s", source.name, keys)
        return
    causes = ", ".join(f"{count} by {rule}" for rule, count in removed if count)
    raise InputError(f"{source.name}: the filters remove all {n} samples ({causes}); {keys}. Correct the source's filters")


def check_damage(source: ShardSource, max_bad_share: float) -> None:
    """ValueError where too much is missing, or nothing is there."""
    if (share := damage(source)) > max_bad_share or not len(source):
        much = f"{share:.1%} of the samples are damaged or missing, more than data.max_bad_share {max_bad_share:.1%}"
        raise InputError(
            f"{much if share > max_bad_share else 'the shards hold no sample'}:\n"
            f"{source.summary()}\nRepair or leave out these shards, or raise data.max_bad_share"
        )


def damage(source: ShardSource) -> float:
    """The share of samples damaged or missing. A damaged shard counts for what lies behind the damage or it lacks of an average one, an
    absent one for a whole."""
    sizes = [index.counts["samples"] for index in source.indexes if index.counts["samples"] and not index.message]
    average = sum(sizes) / len(sizes) if sizes else 1.0
    lost = sum(index.lost or max(average - index.counts["samples"], 1) for index in source.indexes if index.message)
    bad = sum(index.bad_samples for index in source.indexes)
    return min((bad + lost) / max(source.counts["samples"] + lost, 1), 1.0)


def inspect(pattern: str, caption: str = "txt", filters: Sequence[FilterRule] = ()) -> ShardSource:
    """The shards of a pattern, damage and all, for `mmkit data shards`; nothing is refused."""
    return ShardSource(pattern, [index_of(url, caption, filters) for url in expand(pattern)])
