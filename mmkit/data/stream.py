"""Tar shards read without indexing the set first: any number of them, memory for their names alone, training begins with the first.

Each process x worker reads a stream of its own, and a few of its shards are open at a time (`dealing.GROUP`), remote ones copied whole
so that every byte is fetched once, with their samples mixed; the next few are opened meanwhile. What a shard lacks is counted when it
is opened. A position is the number of rows read, the same for every process; each step takes a batch from every process, by construction.

Without replacement the samples of each shard are known from the files beside them, and `dealing` gives every stream its part: every
sample of an epoch comes once, also after a stop with other processes and workers. A sample that a shard lacks, though those files count
it (a damaged shard), is replaced by another one of those open; what a shard has beyond its count is left out and counted.

With replacement (``data.resampled``) a stream's shards are a function of (seed, epoch, stream), and a reader that begins in the middle
passes over the shards before by their remembered numbers of samples. With other processes or workers the streams are others: then the
number goes on, and which samples come is a new draw.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mmkit.config import ConfigError, DataConfig, SourceConfig
from mmkit.data.batches import Batch, Problem, Shape
from mmkit.data.building import ClipBuilder, Task
from mmkit.data.dealing import GROUP, MIXED, SHARD, Layout, deal, group_size
from mmkit.data.example import Example
from mmkit.data.mixture import wanted_counts
from mmkit.data.shard_sizes import known_samples, known_sizes
from mmkit.data.shards import ShardSource, check_extensions
from mmkit.data.tar_files import expand
from mmkit.data.tar_index import NOTED, WHOLE, ShardIndex, index_of, is_damage, opened_index, remember, remembered
from mmkit.errors import InputError

log = logging.getLogger(__name__)

MANY = 1000  # shards; a set without replacement is streamed from here on
FIRST_SHARDS, FIRST_SAMPLES = 8, 100  # looked at before training starts
IDLE_GROUPS = 64  # without one usable sample: an error
BEYOND = "more than the count beside the shards"
_PLAIN = ("shard", "source", "samples", "ok", "message")  # fields of a shard's row that are no causes


def streamed(data: DataConfig) -> ShardSet | None:
    """The sources of ``data`` as a stream, None where they are to be indexed. All are tar shards, and either they are drawn with
    replacement and an epoch's length is known (``data.samples_per_epoch``, or `known_samples`), or there are more than `MANY` whose
    sizes are known (`known_sizes`) and no filter makes others of them."""
    if not data.sources or any(source.format != "webdataset" or source.cap or source.multiple for source in data.sources):
        return None
    urls = [expand(source.path) for source in data.sources]
    flat, weighted = [url for some in urls for url in some], any(source.weight for source in data.sources)
    if not data.resampled and (weighted or len(flat) <= MANY):
        return None
    sizes = None if data.resampled or any(source.filters for source in data.sources) else known_sizes(flat)
    total = data.samples_per_epoch or (known_samples(flat) if data.resampled else sum(sizes or ()))
    if not total or not (data.resampled or sum(sizes or ())):
        wanted = "set data.samples_per_epoch" if data.resampled else "leave out filters, or set data.resampled"
        ask = "%d shards are read once before training starts; put a sizes.json beside them, or %s, to start at once"
        log.warning(ask, len(flat), wanted)
        return None
    return ShardSet(data.sources, urls, total, data.caption_key, tuple(sizes) if sizes else None)


class ShardSet:
    """Shards of one or several sources by number, and the examples of those that are open. Takes a `Mixture`'s place in loading.

    ``sizes`` are the samples of each shard; None: they are drawn with replacement.
    """

    def __init__(
        self, configs: Sequence[SourceConfig], urls: Sequence[Sequence[str]], samples_per_epoch: int, caption: str, sizes: tuple[int, ...] | None
    ):
        self.configs, self.samples_per_epoch, self.caption, self.sizes = tuple(configs), samples_per_epoch, caption, sizes
        self.urls = [url for some in urls for url in some]
        counts = [len(some) for some in urls]
        self.ends = np.cumsum(counts)
        self.bounds = np.cumsum(np.repeat(np.array(wanted_counts(configs, counts, 10**9)) / 1e9 / counts, counts))  # of each shard's chance
        self.open: dict[int, ShardIndex] = {}  # by this process, now

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, number: int) -> Example:
        shard, local = divmod(int(number), SHARD)
        index = self.open.get(shard) or self.opened(shard)
        return index.example(local, self.config(shard).name)

    def varies(self, number: int) -> bool:
        """Whether examples have random choices: never."""
        return False

    def config(self, shard: int) -> SourceConfig:
        """The source a shard belongs to."""
        return self.configs[int(np.searchsorted(self.ends, shard, side="right"))]

    def source_name(self, number: int) -> str:
        """Name of the source of an example."""
        return self.config(int(number) // SHARD).name

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the shards' names, how they are drawn, and what their samples are."""
        facts = [config.model_dump(mode="json") for config in self.configs]
        hashed = hashlib.sha256(json.dumps([facts, self.samples_per_epoch, self.sizes or True, self.caption]).encode())
        hashed.update("\n".join(self.urls).encode())
        return hashed.hexdigest()[:16]

    def summary(self) -> str:
        """One line: how many shards, how they are drawn."""
        how = "drawn with replacement" if self.sizes is None else "shuffled and dealt out"
        return f"{len(self):,} shards in {len(self.configs)} sources, {how}, opened as they are needed; an epoch is {self.samples_per_epoch:,} samples"

    def drawn(self, seed: int, epoch: int, stream: int, number: int) -> int:
        """The ``number``-th shard of a stream, where they are drawn with replacement."""
        place = np.random.default_rng([seed, epoch, stream, number]).random()
        return min(int(np.searchsorted(self.bounds, place, side="right")), len(self) - 1)

    def opened(self, shard: int) -> ShardIndex:
        """A shard's index with its descriptor, an empty one with a message where it cannot be read. Its size is remembered."""
        url, filters = self.urls[shard], self.config(shard).filters
        index = opened_index(url, self.caption, filters)
        if "unreadable shard" not in index.counts:
            remember(url, len(index), self.caption, filters)
        return index

    def size(self, shard: int) -> int | None:
        """Usable samples of a shard that some process of this machine has opened before."""
        return remembered(self.urls[shard], self.caption, self.config(shard).filters)

    def first(self, config: SourceConfig) -> ShardSource:
        """The first shards of one source by index, for looking at."""
        return ShardSource(config.name, [index_of(url, self.caption, config.filters) for url in self._first_urls(config)])

    def _first_urls(self, config: SourceConfig) -> list[str]:
        number = self.configs.index(config)
        begin, end = [0, *self.ends.tolist()][number : number + 2]
        return self.urls[begin : min(end, begin + FIRST_SHARDS)]

    def share(self, config: SourceConfig) -> int:
        """Samples an epoch is expected to take from one source."""
        part = np.concatenate([[0], self.bounds])[[0, *self.ends]]
        return round(float(np.diff(part)[self.configs.index(config)]) * self.samples_per_epoch)

    def check_first(self, only: SourceConfig | None = None) -> None:
        """ValueError where the first shard that is there of a source (of ``only``, or of all) has no usable sample, or none is there."""
        for config in [only] if only else self.configs:
            messages = []
            for url in self._first_urls(config):
                index = opened_index(url, self.caption, config.filters, most=FIRST_SAMPLES)
                index.close()
                if index.found:
                    check_extensions(config.name, index, self.caption)
                    break
                messages.append(f"  {index.url}: {index.message or 'it holds no file'}")
            else:
                told = f"{config.name}: none of the first {len(messages)} shards can be read; correct the path of the source:"
                raise InputError("\n".join([told, *messages]))


@dataclass(frozen=True)
class Part:
    """Samples of one stream in one epoch, by their place in it; its reader finds out which samples stand there."""

    epoch: int
    stream: int
    start: int  # samples of the stream before it
    n: int
    length: int  # samples of the stream in the whole epoch
    layouts: tuple[Layout, ...] = ()  # see `deal`; empty: shards are drawn with replacement
    head: int = 0

    @property
    def reader(self) -> tuple:
        """What the parts of one reader have in common."""
        return self.epoch, self.stream, self.layouts, self.head


@dataclass(frozen=True, eq=False)
class Place(Task):
    """A batch by its place in a stream; where an epoch ends in the middle of it, it has two."""

    parts: tuple[Part, ...] = ()


class StreamPlan:
    """Which batch of which stream comes when: the part of a `planning.ExamplePlan` for shards nobody has looked into.

    ConfigError where a reader would have no shard.
    """

    train = True
    settings: dict[str, int] = {}  # a position in samples depends on nothing else
    begin: dict[str, Any] = {"epoch": 0, "row": 0, "layouts": [], "rows": 0, "samples": 0}  # layouts: who has read the epoch so far

    def __init__(self, mixture: ShardSet, *, seed: int, world: int, workers: int):
        self.mixture, self.seed, self.workers = mixture, seed, max(workers, 1)
        if mixture.sizes is not None:
            check_enough(len(mixture), world, workers)

    def rows_per_epoch(self) -> int:
        """Samples of an epoch."""
        return self.mixture.samples_per_epoch

    def tasks(self, state: dict[str, Any], rank: int, world: int, device_batch: int) -> Iterator[Place]:
        """One process's batches from position ``state`` on, endless. Workers take turns, so each has one stream an epoch."""
        parts = self._drawn if self.mixture.sizes is None else self._dealt
        for found, place in parts(state, rank, Layout(0, world, self.workers, device_batch)):
            size = device_batch * world
            state = {**place, "rows": state["rows"] + size, "samples": state["samples"] + size}
            epochs = tuple(part.epoch for part in found for _ in range(part.n))
            yield Place((), Shape(device_batch, 1), epochs, state, parts=found)

    def _drawn(self, state: dict[str, Any], rank: int, layout: Layout) -> Iterator[tuple[tuple[Part, ...], dict[str, Any]]]:
        """(parts of a batch, place after it): an epoch is a whole number of blocks."""
        blocks = max(1, round(self.mixture.samples_per_epoch / layout.size))
        epoch, first = state["epoch"], state["row"] // layout.size
        while True:
            for block in range(first, blocks):
                turn, worker = divmod(block, layout.workers)
                length = -(-(blocks - worker) // layout.workers) * layout.batch
                part = Part(epoch, rank + layout.world * worker, turn * layout.batch, layout.batch, length)
                yield (part,), {"epoch": epoch, "row": (block + 1) * layout.size, "layouts": []}
            epoch, first = epoch + 1, 0

    def _dealt(self, state: dict[str, Any], rank: int, layout: Layout) -> Iterator[tuple[tuple[Part, ...], dict[str, Any]]]:
        """(parts of a batch, place after it): a block takes what is left of an epoch and the rest from the next."""
        total = self.mixture.samples_per_epoch
        if layout.size > total:
            raise ConfigError(f"an epoch of {total} samples is less than one batch of all processes, {layout.size}; use a smaller batch")
        epoch, row, layouts = state["epoch"], state["row"], tuple(Layout(*numbers) for numbers in state["layouts"]) or (layout,)
        if row and layouts[-1][1:] != layout[1:]:
            layouts += (layout._replace(start=row),)
        while True:
            if row == 0 or row == total:
                epoch, row, layouts = epoch + (row == total), 0, (layout,)
            n = min(layout.size, total - row)
            parts = [self._part(epoch, row, n, rank, layouts)]
            row += n
            if n < layout.size:
                epoch, row, layouts = epoch + 1, layout.size - n, (layout,)
                parts.append(self._part(epoch, 0, row, rank, layouts, row))
            yield tuple(part for part in parts if part.n), {"epoch": epoch, "row": row, "layouts": [list(each) for each in layouts]}

    def _part(self, epoch: int, row: int, n: int, rank: int, layouts: tuple[Layout, ...], head: int | None = None) -> Part:
        """One process's part of the ``n`` rows from ``row`` on."""
        if head is None:  # every stop is at the end of a block
            head = (layouts[1].start if layouts[1:] else row) % layouts[0].size
        layout, past = layouts[-1], row - layouts[-1].start
        mine = 0 if layout.start else head
        stream = rank + layout.world * (layout.block(mine, past) % layout.workers)
        start, end, length = (layout.rows(stream, mine, many) for many in (past, past + n, self.mixture.samples_per_epoch - layout.start))
        return Part(epoch, stream, start, end - start, length, layouts, head)


class StreamBuilder(ClipBuilder):
    """Batches of streams; each worker process holds the open shards of its own."""

    reader: Reader | None = None

    def __getitem__(self, task: Place) -> Batch:
        numbers, rows = [], []
        if self.reader:
            self.reader.close_stale()
        for part in task.parts:
            if self.reader is None or self.reader.key != part.reader:
                kept = self.reader.retire() if self.reader else []  # the batch at hand may need them
                kind = DealtReader if part.layouts else Reader
                self.reader = kind(self.mixture, self.seed, part, kept)
            found, opened = self.reader.take(part.start, part.n)
            numbers, rows = numbers + found, rows + opened
        problems = [problem for row in rows for problem in _problems(row)]
        task = replace(task, rows=tuple(numbers), problems=tuple(problems), examined=sum(row["samples"] for row in rows))
        return replace(super().__getitem__(task), shards=tuple(rows))

    def close(self) -> None:
        """Ends the reader."""
        if self.reader:
            self.reader.close()
            self.reader = None

    def another(self, rng: np.random.Generator) -> int:
        """A sample of the shards at hand."""
        return int(rng.choice(self.reader.numbers))


def _problems(row: dict[str, Any]) -> list[Problem]:
    """What a shard just opened lacks, each cause once with its count; what rules removed is no problem."""
    bad = {cause: n for cause, n in row.items() if cause not in _PLAIN and is_damage(cause)}
    texts = {cause: f"{n} of {row['samples']} samples: {cause}" for cause, n in bad.items()}
    said = {cause: row["message"] if cause in WHOLE else text for cause, text in texts.items()}
    return [Problem(row["shard"], row["source"], cause, said[cause], n) for cause, n in bad.items()]


class Reader:
    """The samples of one stream in one epoch, in order, from any place on; its shards are drawn with replacement."""

    def __init__(self, shards: ShardSet, seed: int, part: Part, stale: Sequence[ShardIndex] = ()):
        self.shards, self.seed, self.key, self.part = shards, seed, part.reader, part
        self.stale = list(stale)  # to be closed when the batch at hand is built
        self.pool = ThreadPoolExecutor(1)
        self._begin()

    def _begin(self) -> None:
        self.taken, self.first = 0, 0  # shards of the stream taken so far; samples before the group at hand
        self.numbers = np.zeros(0, np.int64)  # the group at hand
        self.group: dict[int, ShardIndex] = {}  # its shards
        self.ahead = None  # the next group, being opened

    def take(self, start: int, n: int) -> tuple[list[int], list[dict[str, Any]]]:
        """(example numbers of ``n`` samples from place ``start``, a row of `ShardIndex.row` for every shard opened for them)."""
        if start < self.first:
            self._forget()
            self._begin()
        found, rows, idle = [], [], 0
        while n > 0:
            place = start - self.first
            if place < len(self.numbers):
                part = self.numbers[place : place + n].tolist()
                found, start, n = found + part, start + len(part), n - len(part)
                continue
            self.first += len(self.numbers)
            rows += self._next(start - self.first)
            idle = 0 if len(self.numbers) else idle + 1
            if idle == IDLE_GROUPS:
                raise InputError(self._none_found(idle * GROUP))
        return found, rows

    def close(self) -> None:
        """Closes the open shards."""
        self._forget()
        self.pool.shutdown()

    def retire(self) -> list[ShardIndex]:
        """Ends the reader, its shards staying open: they are given back, to be closed."""
        ahead = [index for _, index in self.ahead.result()] if self.ahead else []
        self.pool.shutdown()
        return [*self.stale, *self.group.values(), *ahead]

    def close_stale(self) -> None:
        """Closes shards that no batch needs any more."""
        while self.stale:
            self.stale.pop().close()
        self.shards.open = dict(self.group)

    def _forget(self) -> None:
        self.stale += self.group.values()
        self.stale += [index for _, index in self.ahead.result()] if self.ahead else []
        self.group, self.ahead = {}, None
        self.close_stale()

    def _next(self, wanted: int) -> list[dict[str, Any]]:
        """Goes on to the next group; it is opened only where it holds more than ``wanted`` samples. Rows of the shards opened."""
        number = self.taken
        sizes = self._sizes(number) if wanted and self.ahead is None else None
        if sizes and sum(sizes) <= wanted:
            self.taken, self.numbers = number + len(sizes), np.zeros(sum(sizes), np.int64)  # passed over
            return []
        group = self.ahead.result() if self.ahead else self._opened(number)
        self.stale += self.group.values()  # the batch at hand may still need them
        self.group, self.ahead = dict(group), None
        self.shards.open = self.shards.open | self.group
        self.taken = number + len(group)
        self.numbers = self._mixed(number, group)
        if self.first + len(self.numbers) < self.part.length:
            self.ahead = self.pool.submit(self._opened, self.taken)
        return [self._row(shard, index) for shard, index in self.group.items()]

    def _row(self, shard: int, index: ShardIndex) -> dict[str, Any]:
        return index.row() | {"source": self.shards.config(shard).name}

    def _mixed(self, number: int, group: Sequence[tuple[int, ShardIndex]]) -> np.ndarray:
        numbers = np.concatenate([shard * SHARD + np.arange(len(index)) for shard, index in group])
        return np.random.default_rng([self.seed, self.part.epoch, self.part.stream, number, 1]).permutation(numbers)

    def _opened(self, number: int) -> list[tuple[int, ShardIndex]]:
        """The next group, opened."""
        group: list[tuple[int, ShardIndex]] = []
        while not _full([len(index) for _, index in group]):
            shard = self._shard(number + len(group))
            group.append((shard, dict(group).get(shard) or self.shards.opened(shard)))
        return group

    def _sizes(self, number: int) -> list[int] | None:
        """Sizes of the next group's shards, None where one is not known."""
        sizes: list[int] = []
        while not _full(sizes):
            size = self.shards.size(self._shard(number + len(sizes)))
            if size is None:
                return None
            sizes.append(size)
        return sizes

    def _shard(self, number: int) -> int:
        return self.shards.drawn(self.seed, self.part.epoch, self.part.stream, number)

    def _none_found(self, n: int) -> str:
        last = self.shards.urls[self._shard(self.taken - 1)]
        return f"none of the last {n} shards holds a sample that can be used, the last is {last}; see the source's filters"


def _full(sizes: Sequence[int]) -> bool:
    """Whether shards of these sizes make a group."""
    return len(sizes) == GROUP or sum(sizes) >= MIXED


class DealtReader(Reader):
    """The samples that an epoch without replacement deals to one stream."""

    def __init__(self, shards: ShardSet, seed: int, part: Part, stale: Sequence[ShardIndex] = ()):
        self.deal = deal(shards.sizes, shards.samples_per_epoch, seed, part.epoch, part.layouts, part.head)
        self.pieces = self.deal.pieces(part.stream)
        super().__init__(shards, seed, part, stale)

    def _sizes(self, number: int) -> list[int]:
        sizes = [len(piece.places) for piece in self.pieces[number : number + GROUP]]
        return sizes[: group_size(sizes)]

    def _opened(self, number: int) -> list[tuple[int, ShardIndex]]:
        group: list[tuple[int, ShardIndex]] = []
        for piece in self.pieces[number : number + len(self._sizes(number))]:
            group.append((piece.shard, dict(group).get(piece.shard) or self.shards.opened(piece.shard)))
        return group

    def _mixed(self, number: int, group: Sequence[tuple[int, ShardIndex]]) -> np.ndarray:
        """The group in its order; where a sample is not there, another one of the group."""
        numbers = self.deal.mixed(self.part.stream, number, self.pieces[number : number + len(group)])
        held = np.zeros(max(self.group) + 1, np.int64)
        for shard, index in group:
            held[shard] = len(index)
        absent = numbers % SHARD >= held[numbers // SHARD]
        if absent.any():
            there = numbers[~absent] if not absent.all() else self._stand_in(number + len(group))
            numbers[absent] = np.random.default_rng([self.seed, self.part.epoch, self.part.stream, number, 1]).choice(there, absent.sum())
        return numbers

    def _stand_in(self, number: int) -> np.ndarray:
        """Samples of the next shard that has some, in a group that has none. ValueError where none is found."""
        for n in range(IDLE_GROUPS * GROUP):
            shard = self._shard(number + n)
            index = self.shards.opened(shard)
            if len(index):
                self.group[shard] = self.shards.open[shard] = index
                return shard * SHARD + np.arange(len(index))
        raise InputError(self._none_found(IDLE_GROUPS * GROUP))

    def _row(self, shard: int, index: ShardIndex) -> dict[str, Any]:
        beyond = len(index) - self.shards.sizes[shard]
        return super()._row(shard, index) | ({BEYOND: beyond} if beyond > 0 else {})

    def _shard(self, number: int) -> int:
        return self.pieces[number % len(self.pieces)].shard


@dataclass
class ShardLog:
    """What a process has learnt of the shards it opened."""

    opened: int = 0
    left_out: Counter = field(default_factory=Counter)  # cause or rule -> samples
    damaged: dict[str, str] = field(default_factory=dict)  # shard -> what is wrong with it

    def add(self, rows: Sequence[dict[str, Any]], max_bad_share: float) -> None:
        """Notes newly opened shards; ValueError where more of them are damaged than ``max_bad_share`` and chance explain.

        One process sees few shards of many, so the limit is the expected number and four deviations.
        """
        for row in rows:
            self.opened += 1
            self.left_out.update({cause: n for cause, n in row.items() if cause not in _PLAIN})
            if row["message"]:
                self.damaged[row["shard"]] = row["message"]
        expected = max_bad_share * self.opened
        if rows and rows[-1]["message"] and len(self.damaged) > expected + 4 * expected**0.5 + 1:
            raise InputError(
                f"{len(self.damaged)} of {self.opened} shards are damaged or missing, more than data.max_bad_share {max_bad_share:.1%}:\n"
                f"{self.summary()}\nRepair or leave out these shards, or raise data.max_bad_share"
            )

    def summary(self) -> str:
        """Lines for people: shards opened, samples left out by cause, damaged shards by name."""
        lines = [f"{self.opened:,} shards opened, {len(self.damaged)} of them damaged or missing"]
        lines += [f"  {'noted' if cause in NOTED else 'left out'}: {n:,} {cause}" for cause, n in sorted(self.left_out.items())]
        return "\n".join(lines + [f"  {shard}: {message}" for shard, message in self.damaged.items()])


def check_enough(n: int, world: int, workers: int) -> None:
    """ConfigError where some reader would have no shard and its process would wait forever (U09)."""
    needed = world * max(workers, 1)
    if n < needed:
        raise ConfigError(
            f"{n} shards for {world} processes x {max(workers, 1)} workers = {needed} readers: some would have none. Use at most "
            f"{max(n // world, 1)} workers and {n} processes, write more shards, or set data.resampled"
        )
