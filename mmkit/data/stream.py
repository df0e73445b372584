"""Tar shards read without indexing the set first: any number of them, memory for their names alone, training begins with the first.

Each process x worker reads a stream of its own. Its shards are a function of (seed, epoch, stream): drawn with replacement where
``data.resampled``, else its part of the shuffled list. A few are opened at a time (`GROUP`), remote ones copied whole so that every
byte is fetched once, and their samples mixed; the next few are opened meanwhile. What a shard lacks is counted when it is opened.

A position is the number of batches of the epoch, the same for every process. A reader that begins in the middle passes over the
shards before by their remembered numbers of samples. With other processes or workers the streams are others: then the number goes
on, but samples of that epoch may come again or not at all. An epoch has the same number of batches everywhere: a stream whose shards
hold fewer samples than its share begins them again, one that holds more leaves the rest for another epoch's order.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import fsspec
import numpy as np

from mmkit.config import ConfigError, DataConfig, SourceConfig
from mmkit.data.batches import Batch, Problem, Shape
from mmkit.data.building import ClipBuilder, Task
from mmkit.data.example import Example
from mmkit.data.mixture import wanted_counts
from mmkit.data.shards import ShardSource, check_extensions
from mmkit.data.tar_files import ShardError, expand
from mmkit.data.tar_index import FILTERED, ShardIndex, index_of, opened_index, remember, remembered

log = logging.getLogger(__name__)

MANY = 1000  # shards; a set without replacement is streamed from here on
GROUP, MIXED = 8, 5000  # a group ends with this many shards or samples
FIRST_SHARDS, FIRST_SAMPLES = 8, 100  # looked at before training starts
IDLE_GROUPS = 64  # without one usable sample: an error
CONNECTIONS = 8  # small files read at the same time
_SHARD = 1 << 32  # an example number is shard * _SHARD + its place in the shard
_PLAIN = ("shard", "source", "samples", "ok", "message")  # fields of a shard's row that are no causes


def streamed(data: DataConfig) -> ShardSet | None:
    """The sources of ``data`` as a stream, where all are tar shards, an epoch's length is known without reading them, and either they
    are drawn with replacement or there are more than `MANY`; None where they are to be indexed.

    The length is ``data.samples_per_epoch``, or what ``sizes.json``, ``__len__`` or img2dataset's ``N_stats.json`` beside them say.
    """
    if not data.sources or any(source.format != "webdataset" or source.cap or source.multiple for source in data.sources):
        return None
    urls = [expand(source.path) for source in data.sources]
    many, weighted = sum(map(len, urls)) > MANY, any(source.weight for source in data.sources)
    if not data.resampled and (weighted or not many):
        return None
    total = data.samples_per_epoch or known_samples([url for some in urls for url in some])
    if total is None:
        log.warning(
            "%d shards are read once before training starts; set data.samples_per_epoch, or put a sizes.json beside them, to start at once",
            sum(map(len, urls)),
        )
        return None
    return ShardSet(data.sources, urls, total, data.resampled, data.caption_key)


class ShardSet:
    """Shards of one or several sources by number, and the examples of those that are open. Takes a `Mixture`'s place in loading."""

    def __init__(self, configs: Sequence[SourceConfig], urls: Sequence[Sequence[str]], samples_per_epoch: int, resampled: bool, caption: str):
        self.configs, self.samples_per_epoch, self.resampled, self.caption = tuple(configs), samples_per_epoch, resampled, caption
        self.urls = [url for some in urls for url in some]
        counts = [len(some) for some in urls]
        self.ends = np.cumsum(counts)
        self.bounds = np.cumsum(np.repeat(np.array(wanted_counts(configs, counts, 10**9)) / 1e9 / counts, counts))  # of each shard's chance
        self.open: dict[int, ShardIndex] = {}  # by this process, now

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, number: int) -> Example:
        shard, local = divmod(int(number), _SHARD)
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
        return self.config(int(number) // _SHARD).name

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the shards' names, how they are drawn, and what their samples are."""
        facts = [config.model_dump(mode="json") for config in self.configs]
        hashed = hashlib.sha256(json.dumps([facts, self.samples_per_epoch, self.resampled, self.caption]).encode())
        hashed.update("\n".join(self.urls).encode())
        return hashed.hexdigest()[:16]

    def summary(self) -> str:
        """One line: how many shards, how they are drawn."""
        how = "drawn with replacement" if self.resampled else "shuffled and shared out"
        return f"{len(self):,} shards in {len(self.configs)} sources, {how}, opened as they are needed; an epoch is {self.samples_per_epoch:,} samples"

    def shard(self, seed: int, epoch: int, stream: int, streams: int, number: int) -> int:
        """The ``number``-th shard of a stream."""
        if not self.resampled:
            mine = split(_kept_order(len(self), seed, epoch), stream, streams)
            return int(mine[number % len(mine)])
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
        number = self.configs.index(config)
        begin, end = [0, *self.ends.tolist()][number : number + 2]
        urls = self.urls[begin : min(end, begin + FIRST_SHARDS)]
        return ShardSource(config.name, [index_of(url, self.caption, config.filters) for url in urls])

    def share(self, config: SourceConfig) -> int:
        """Samples an epoch is expected to take from one source."""
        part = np.concatenate([[0], self.bounds])[[0, *self.ends]]
        return round(float(np.diff(part)[self.configs.index(config)]) * self.samples_per_epoch)

    def check_first(self) -> None:
        """ValueError where the first shard that is there holds no usable sample (U21), or none of the first few is there."""
        messages = []
        for shard in range(min(FIRST_SHARDS, len(self))):
            index = opened_index(self.urls[shard], self.caption, self.config(shard).filters, most=FIRST_SAMPLES)
            index.close()
            if index.found:
                return check_extensions(self.config(shard).name, index, self.caption)
            messages.append(f"  {index.url}: {index.message or 'it holds no sample'}")
        raise ValueError(f"none of the first {len(messages)} shards can be read; correct the path of the source:\n" + "\n".join(messages))


@dataclass(frozen=True, eq=False)
class Place(Task):
    """A batch by its place in a stream; its reader finds out which samples stand there."""

    stream: int = 0
    streams: int = 1
    start: int = 0  # samples of the stream in this epoch before it
    length: int = 0  # samples of the stream in the whole epoch


class StreamPlan:
    """Which batch of which stream comes when: the part of a `planning.ExamplePlan` for shards nobody has looked into.

    ConfigError where a reader would have no shard.
    """

    train = True
    settings: dict[str, int] = {}  # a position in samples depends on nothing else

    def __init__(self, mixture: ShardSet, *, seed: int, world: int, workers: int):
        self.mixture, self.seed, self.workers = mixture, seed, max(workers, 1)
        if not mixture.resampled:
            check_enough(len(mixture), world, workers)

    def rows_per_epoch(self) -> int:
        """Samples of an epoch."""
        return self.mixture.samples_per_epoch

    def tasks(self, state: dict[str, int], rank: int, world: int, device_batch: int) -> Iterator[Place]:
        """One process's batches from position ``state`` on, endless. Workers take turns, so each has one stream an epoch."""
        size, streams, epoch = device_batch * world, world * self.workers, state["epoch"]
        blocks = max(1, round(self.mixture.samples_per_epoch / size))
        first = state["row"] // size
        while True:
            for block in range(first, blocks):
                turn, worker = divmod(block, self.workers)
                length = -(-(blocks - worker) // self.workers) * device_batch
                counted = {"rows": state["rows"] + size, "samples": state["samples"] + size}
                state = {"epoch": epoch, "window": 0, "row": (block + 1) * size, **counted}
                yield Place(
                    (), Shape(device_batch, 1), (epoch,) * device_batch, state,
                    stream=rank + world * worker, streams=streams, start=turn * device_batch, length=length,
                )  # fmt: skip
            epoch, first = epoch + 1, 0


class StreamBuilder(ClipBuilder):
    """Batches of streams; each worker process holds the open shards of its own."""

    reader: Reader | None = None

    def __getitem__(self, task: Place) -> Batch:
        if self.reader is None or self.reader.key != (task.epochs[0], task.stream):
            self.close()
            self.reader = Reader(self.mixture, self.seed, task)
        numbers, rows = self.reader.take(task.start, len(task.epochs))
        problems = [problem for row in rows for problem in _problems(row)]
        task = replace(task, rows=numbers, problems=tuple(problems), examined=sum(row["samples"] for row in rows))
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
    bad = {cause: n for cause, n in row.items() if cause not in _PLAIN and not cause.startswith(FILTERED)}
    texts = {cause: f"{n} of {row['samples']} samples: {cause}" for cause, n in bad.items()}
    return [Problem(row["shard"], row["source"], cause, row["message"] or texts[cause], n) for cause, n in bad.items()]


class Reader:
    """The samples of one stream in one epoch, in order, from any place on."""

    def __init__(self, shards: ShardSet, seed: int, task: Place):
        self.shards, self.seed, self.key = shards, seed, (task.epochs[0], task.stream)
        self.streams, self.length = task.streams, task.length
        self.part = len(range(task.stream, len(shards), task.streams))  # shards of this stream, where they are shared out
        self.pool = ThreadPoolExecutor(1)
        self._begin()

    def _begin(self) -> None:
        self.drawn, self.first = 0, 0  # shards of the stream taken so far; samples before the group at hand
        self.numbers = np.zeros(0, np.int64)  # the group at hand
        self.ahead, self.stale = None, []  # the next group, being opened; shards of the group before, to be closed

    def take(self, start: int, n: int) -> tuple[tuple[int, ...], list[dict[str, Any]]]:
        """(example numbers of ``n`` samples from place ``start``, a row of `ShardIndex.row` for every shard opened for them)."""
        if start < self.first:
            self._forget()
            self._begin()
        self._close_stale()
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
                last = self.shards.urls[self._shard(self.drawn - 1)]
                raise ValueError(f"none of the last {idle * GROUP} shards holds a sample that can be used, the last is {last}; see the source's filters")
        return tuple(found), rows

    def close(self) -> None:
        """Closes the open shards."""
        self._forget()
        self.pool.shutdown()

    def _close_stale(self) -> None:
        while self.stale:
            self.stale.pop().close()

    def _forget(self) -> None:
        self._close_stale()
        ahead = [index for _, index in self.ahead.result()] if self.ahead else []
        for index in [*self.shards.open.values(), *ahead]:
            index.close()
        self.shards.open, self.ahead = {}, None

    def _next(self, wanted: int) -> list[dict[str, Any]]:
        """Goes on to the next group; it is opened only where it holds more than ``wanted`` samples. Rows of the shards opened."""
        drawn = self.drawn
        sizes = self._sizes(drawn) if wanted and self.ahead is None else None
        if sizes and sum(sizes) <= wanted:
            self.drawn, self.numbers = drawn + len(sizes), np.zeros(sum(sizes), np.int64)  # passed over
            return []
        group = self.ahead.result() if self.ahead else self._opened(drawn)
        self.stale += self.shards.open.values()  # the batch at hand may still need them
        self.shards.open, self.ahead = self.shards.open | dict(group), None
        self.drawn = drawn + len(group)
        numbers = np.concatenate([shard * _SHARD + np.arange(len(index)) for shard, index in group])
        self.numbers = np.random.default_rng([self.seed, *self.key, drawn, 1]).permutation(numbers)
        if self.first + len(numbers) < self.length:
            self.ahead = self.pool.submit(self._opened, self.drawn)
        return [index.row() | {"source": self.shards.config(shard).name} for shard, index in dict(group).items()]

    def _opened(self, drawn: int) -> list[tuple[int, ShardIndex]]:
        """The next group, opened."""
        group: list[tuple[int, ShardIndex]] = []
        while not self._full(drawn, [len(index) for _, index in group]):
            shard = self._shard(drawn + len(group))
            group.append((shard, dict(group).get(shard) or self.shards.opened(shard)))
        return group

    def _sizes(self, drawn: int) -> list[int] | None:
        """Sizes of the next group's shards, None where one is not known."""
        sizes: list[int] = []
        while not self._full(drawn, sizes):
            size = self.shards.size(self._shard(drawn + len(sizes)))
            if size is None:
                return None
            sizes.append(size)
        return sizes

    def _full(self, drawn: int, sizes: Sequence[int]) -> bool:
        """Whether shards of these sizes make a group. Without replacement one ends with the stream's shards, so that none comes twice before all have."""
        ended = not self.shards.resampled and len(sizes) > 0 and (drawn + len(sizes)) % self.part == 0
        return len(sizes) == GROUP or sum(sizes) >= MIXED or ended

    def _shard(self, number: int) -> int:
        return self.shards.shard(self.seed, *self.key, self.streams, number)


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
            raise ValueError(
                f"{len(self.damaged)} of {self.opened} shards are damaged or missing, more than data.max_bad_share {max_bad_share:.1%}:\n"
                f"{self.summary()}\nRepair or leave out these shards, or raise data.max_bad_share"
            )

    def summary(self) -> str:
        """Lines for people: shards opened, samples left out by cause, damaged shards by name."""
        lines = [f"{self.opened:,} shards opened, {len(self.damaged)} of them damaged or missing"]
        lines += [f"  left out: {n:,} {cause}" for cause, n in sorted(self.left_out.items())]
        return "\n".join(lines + [f"  {shard}: {message}" for shard, message in self.damaged.items()])


def known_samples(urls: Sequence[str]) -> int | None:
    """Samples of shards as files beside them say: ``sizes.json``, ``__len__`` (of a whole folder) or ``NAME_stats.json`` of img2dataset."""
    folders: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        folder, _, name = url.rpartition("/")
        folders[folder or "."].append(name)
    counts = [None if folder.startswith("pipe:") else _counted(folder, names) for folder, names in folders.items()]
    return None if None in counts else sum(counts)


def _counted(folder: str, names: Sequence[str]) -> int | None:
    sizes = _json_of(f"{folder}/sizes.json") or {}
    if all(name in sizes for name in names):
        return sum(int(sizes[name]) for name in names)
    whole = _json_of(f"{folder}/__len__")
    if isinstance(whole, int) and len(expand(f"{folder}/")) == len(names):
        return whole
    if _stats(folder, names[0]) is None:
        return None
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        found = list(pool.map(lambda name: _stats(folder, name), names))
    return None if None in found else sum(found)


def _stats(folder: str, name: str) -> int | None:
    facts = _json_of(f"{folder}/{name.removesuffix('.tar')}_stats.json")
    return facts.get("successes") if isinstance(facts, dict) else None


def _json_of(url: str) -> Any:
    """The content of a small JSON file, None where there is none."""
    try:
        with fsspec.open(url, "rb") as file:
            return json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def shard_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The order of ``n`` shards in an epoch, the same on every process."""
    return np.random.default_rng([seed, epoch, n]).permutation(n)


@functools.lru_cache(maxsize=2)
def _kept_order(n: int, seed: int, epoch: int) -> np.ndarray:
    return shard_order(n, seed, epoch)


def split(order: np.ndarray, stream: int, streams: int) -> np.ndarray:
    """One stream's shards of an order made before the split."""
    return order[stream::streams]


def check_enough(n: int, world: int, workers: int) -> None:
    """ConfigError where some reader would have no shard and its process would wait forever (U09)."""
    needed = world * max(workers, 1)
    if n < needed:
        raise ConfigError(
            f"{n} shards for {world} processes x {max(workers, 1)} workers = {needed} readers: some would have none. Use at most "
            f"{max(n // world, 1)} workers and {n} processes, write more shards, or set data.resampled"
        )
