"""Length-grouped order: random in the original, so both orders are held to the properties that make it useful."""

from __future__ import annotations

import numpy as np

from mmkit.data.mixture import length_grouped
from tests.golden_checks.case import Case


def check(case: Case) -> None:
    """The original's order and ours of the same lengths."""
    for facts in case.json["cases"]:
        lengths, world = np.array(facts["lengths"]), facts["world_size"]
        megabatch = facts["batch_size"] * world
        theirs = np.array(facts["modality_grouped"])
        own = length_grouped(lengths, megabatch, np.random.default_rng(facts["generator_seed"]))
        assert np.array_equal(own, length_grouped(lengths, megabatch, np.random.default_rng(facts["generator_seed"])))
        # a device gets a run of a megabatch in the original, every world-th row of it here
        _properties(theirs, lengths, megabatch, lambda block: block.reshape(world, -1))
        _properties(own, lengths, megabatch, lambda block, world=world: block.reshape(-1, world).T)


def _properties(order: np.ndarray, lengths: np.ndarray, megabatch: int, by_device) -> None:
    """Each example once; pure megabatches first; devices of one megabatch get about the same length.

    The original merges the last megabatch of both modalities, full or not; ours only what does not fill one.
    """
    assert sorted(order.tolist()) == list(range(len(lengths)))
    n_full = sum(max(-(-int((lengths * sign > 0).sum()) // megabatch) - 1, 0) for sign in (1, -1))
    for block in order[: n_full * megabatch].reshape(n_full, megabatch):
        assert len(set(np.sign(lengths[block]))) == 1
        sums = np.abs(lengths[by_device(block)]).sum(1)
        assert sums.max() - sums.min() <= np.abs(lengths[block]).max()
    assert len(order) - n_full * megabatch <= 2 * megabatch
