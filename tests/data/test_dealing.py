"""An epoch of shards, cut for streams: all of it, once, whoever reads which part."""

import random

import numpy as np
import pytest

from mmkit.data import dealing
from mmkit.data.dealing import Layout, deal, groups, shard_order, whole_epoch


@pytest.mark.parametrize("trial", range(40))
def test_streams_of_any_layouts_one_after_the_other_read_every_sample_once(monkeypatch, trial):
    monkeypatch.setattr(dealing, "GROUP", 3)
    monkeypatch.setattr(dealing, "MIXED", 20)
    deal.cache_clear()
    chosen = random.Random(trial)
    sizes = (*(chosen.randint(0, 15) for _ in range(chosen.randint(1, 29))), chosen.randint(1, 15))
    total = max(1, sum(sizes) + chosen.choice((0, 0, -7, 3)))
    any_layout = lambda start: Layout(start, chosen.randint(1, 4), chosen.randint(1, 3), chosen.randint(1, 3))
    layouts, row, seen = [any_layout(0)], 0, []
    head = chosen.randint(0, min(layouts[0].size - 1, total))
    while row < total:
        now, mine = layouts[-1], head if row == 0 else 0
        dealt, left = deal(sizes, total, 3, 1, tuple(layouts), head), total - row
        n = min(left, (mine or now.size) + now.size * chosen.randint(0, 5))
        for stream in range(now.streams):
            numbers = [number for first, group in groups(dealt.pieces(stream)) for number in dealt.mixed(stream, first, group).tolist()]
            assert len(numbers) == now.rows(stream, mine, left)
            seen += numbers[: now.rows(stream, mine, n)]
        row += n
        layouts.append(any_layout(row))
    counts = np.unique(seen, return_counts=True)[1]
    assert len(seen) == total and len(counts) == min(total, sum(sizes)) and (counts.max() == 1 or total > sum(sizes))


def test_every_process_gives_a_whole_batch_to_every_block():
    """Also to one that holds the end of an epoch and the beginning of the next."""
    for world, workers, batch, total in ((3, 2, 4, 200), (2, 3, 5, 61), (4, 1, 1, 7), (1, 1, 8, 9)):
        layout, tail = Layout(0, world, workers, batch), total % (world * batch)
        for rank in range(world):
            streams = [rank + world * worker for worker in range(workers)]
            ends = sum(layout.rows(stream, 0, total) - layout.rows(stream, 0, total - tail) for stream in streams)
            begins = sum(layout.rows(stream, layout.size - tail, layout.size - tail) for stream in streams) if tail else batch
            assert ends + begins == batch


def test_the_order_of_shards_is_another_each_epoch_and_the_same_for_all():
    assert shard_order(17, 3, 0).tolist() == shard_order(17, 3, 0).tolist() != shard_order(17, 3, 1).tolist()
    pieces = whole_epoch([5, 0, 3], seed=0, epoch=0, total=12)
    assert sum(len(piece.places) for piece in pieces) == 12 and {piece.shard for piece in pieces[:2]} == {0, 2}
