"""An epoch of shards dealt out to streams so that every sample comes once, whoever reads which part of it.

The numbers of samples in the shards are known beforehand. The shuffled shards stand in one row; a layout (processes x workers x batch)
cuts it into a stretch for each of its streams, as long as the batches the stream will give. Where another layout goes on in the middle
of an epoch, what the streams before it have left is put in a row again and cut anew. Every process works this out for itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

SHARD = 1 << 32  # an example number is shard * SHARD + its place in the shard
GROUP, MIXED = 8, 5000  # a group of shards whose samples are mixed ends with this many shards or samples


class Layout(NamedTuple):
    """Who reads an epoch from row ``start`` on: blocks of ``world * batch`` rows, the workers of each process taking turns.

    Stream ``rank + world * worker`` is that worker's. ``head`` rows (of a block that began in the epoch before) come first where the
    layout has read the end of that epoch.
    """

    start: int
    world: int
    workers: int
    batch: int

    @property
    def size(self) -> int:
        """Rows of a block."""
        return self.world * self.batch

    @property
    def streams(self) -> int:
        """Readers of the epoch."""
        return self.world * self.workers

    def block(self, head: int, n: int) -> int:
        """Number of the block that begins ``n`` rows after ``start``."""
        return (n > 0) + (n - head) // self.size if head else n // self.size

    def rows(self, stream: int, head: int, n: int) -> int:
        """How many of the first ``n`` rows a stream gets."""
        if n == 0:
            return 0
        worker, rank = divmod(stream, self.world)
        full, tail = divmod(n - head, self.size)
        first = int(head > 0)  # block of the first full one
        rows = self.batch * len(range((worker - first) % self.workers, full, self.workers))
        if head and worker == 0:
            rows += self.batch - len(range(rank, self.size - head, self.world))
        if tail and (first + full) % self.workers == worker:
            rows += len(range(rank, tail, self.world))
        return rows


class Piece(NamedTuple):
    """Some samples of a shard, by their places in it."""

    shard: int
    places: range | np.ndarray


def shard_order(n: int, seed: int, epoch: int, again: int = 0) -> np.ndarray:
    """The order of ``n`` shards in an epoch, the same on every process; another where they come ``again`` in it."""
    return np.random.default_rng([seed, epoch, n, again]).permutation(n)


def whole_epoch(sizes: Sequence[int], seed: int, epoch: int, total: int) -> list[Piece]:
    """The first ``total`` samples of the shuffled shards; those of a second shuffle where there are not as many."""
    pieces: list[Piece] = []
    for again in itertools.count():
        for shard in shard_order(len(sizes), seed, epoch, again).tolist():
            pieces.append(Piece(shard, range(min(sizes[shard], total))))
            total -= len(pieces[-1].places)
            if not total:
                return [piece for piece in pieces if len(piece.places)]


class Deal:
    """The rest of an epoch, cut for the streams of one layout."""

    def __init__(self, pieces: Sequence[Piece], layout: Layout, head: int, seed: int, epoch: int):
        self.all, self.layout, self.head, self.seed, self.epoch = pieces, layout, head, seed, epoch
        self.ends = np.cumsum([len(piece.places) for piece in pieces])
        total = int(self.ends[-1])
        self.bounds = np.cumsum([0] + [layout.rows(stream, head, total) for stream in range(layout.streams)]).tolist()

    def pieces(self, stream: int) -> list[Piece]:
        """A stream's stretch; a shard on the border of two is in both, each with samples of its own."""
        first, last = self.bounds[stream : stream + 2]
        found = []
        for number in range(int(np.searchsorted(self.ends, first, side="right")), len(self.all)):
            shard, places = self.all[number]
            begin = int(self.ends[number]) - len(places)
            if begin >= last:
                break
            found.append(Piece(shard, places[max(first - begin, 0) : last - begin]))
        return found

    def mixed(self, stream: int, number: int, group: Sequence[Piece]) -> np.ndarray:
        """Example numbers of a group, which is a stream's from its piece ``number`` on, in the order they are read."""
        numbers = np.concatenate([piece.shard * SHARD + np.array(piece.places, np.int64) for piece in group])
        return np.random.default_rng([self.seed, self.epoch, self.layout.start, stream, number]).permutation(numbers)

    def rest(self, n: int) -> list[Piece]:
        """What is left when ``n`` rows have been read."""
        left: list[Piece] = []
        for stream in range(self.layout.streams):
            taken, pieces = self.layout.rows(stream, self.head, n), self.pieces(stream)
            for number, group in groups(pieces):
                size = sum(len(piece.places) for piece in group)
                if taken >= size:
                    taken -= size
                    continue
                left += _by_shard(self.mixed(stream, number, group)[taken:]) if taken else group
                taken = 0
        return left


def groups(pieces: Sequence[Piece]) -> Iterator[tuple[int, Sequence[Piece]]]:
    """(number of its first piece, pieces) of each group."""
    first = 0
    while first < len(pieces):
        n = group_size([len(piece.places) for piece in pieces[first : first + GROUP]])
        yield first, pieces[first : first + n]
        first += n


def group_size(sizes: Sequence[int]) -> int:
    """How many of the shards or pieces of these sizes make a group."""
    return min(int(np.searchsorted(np.cumsum(sizes[:GROUP]), MIXED)) + 1, len(sizes[:GROUP]))


def _by_shard(numbers: np.ndarray) -> list[Piece]:
    shards, places = np.divmod(np.sort(numbers), SHARD)
    return [Piece(int(shard), places[shards == shard]) for shard in np.unique(shards)]


@functools.lru_cache(maxsize=2)  # of the streams of one process
def deal(sizes: tuple[int, ...], total: int, seed: int, epoch: int, layouts: tuple[Layout, ...], head: int) -> Deal:
    """How an epoch of ``total`` samples is dealt out by the last of ``layouts``, the others having read it up to where it starts.

    ``head`` is the first layout's; the later ones begin with a block of their own.
    """
    pieces = whole_epoch(sizes, seed, epoch, total)
    for before, after in itertools.pairwise(layouts):
        pieces = Deal(pieces, before, 0 if before.start else head, seed, epoch).rest(after.start - before.start)
    return Deal(pieces, layouts[-1], 0 if layouts[-1].start else head, seed, epoch)
