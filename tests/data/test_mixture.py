"""Shares, caps and orders of mixtures (user reports U18, U22) and grouping by length."""

import numpy as np
import pytest

from mmkit.config import ConfigError, SourceConfig
from mmkit.data.example import Example, ImageRef, Turn
from mmkit.data.mixture import Mixture, iterate, length_grouped, wanted_counts


class Made:
    """Examples with a picture for every ``per_image`` of them."""

    def __init__(self, name, n, per_image=1):
        self.name, self.n, self.per_image = name, n, per_image

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        image = (ImageRef(b"", name=f"{self.name}-{index // self.per_image}"),)
        return Example(f"{self.name}-{index}", images=image, turns=(Turn("user", "<image>\nq"), Turn("assistant", "a " * (index % 7 + 1))))


def mixture(*parts, samples_per_epoch=None):
    configs = [SourceConfig(name=name, format="llava", path=name, **settings) for name, _, settings in parts]
    return Mixture(configs, [source for _, source, _ in parts], samples_per_epoch)


def test_without_weights_an_epoch_is_every_example_once():
    mix = mixture(("a", Made("a", 30), {}), ("b", Made("b", 12), {}))
    seen = list(iterate(mix, mix.order(0, 0)))
    assert sorted(seen) == list(range(42)) and seen != list(range(42))
    assert list(iterate(mix, mix.order(0, 0, train=False))) == list(range(42))
    assert "42 different, each at most once" in mix.summary()


def test_order_depends_on_seed_and_epoch_only():
    mix = mixture(("a", Made("a", 50), {}))
    orders = [list(iterate(mix, mix.order(seed, epoch))) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert orders[0] == orders[1] != orders[2] != orders[3]


@pytest.mark.parametrize("by_image", [False, True])
def test_realised_shares_are_within_one_percent_after_ten_thousand_samples(by_image):
    parts = [("a", Made("a", 9000, 9), {"weight": 0.6}), ("b", Made("b", 700), {"weight": 0.1}), ("c", Made("c", 50_000, 4), {"weight": 0.3})]
    mix = mixture(*parts, samples_per_epoch=40_000)
    seen = np.array(list(iterate(mix, mix.order(3, 0, by_image=by_image)))[:10_000])
    for number, share in enumerate((0.6, 0.1, 0.3)):
        inside = (seen >= mix.offsets[number]) & (seen < mix.offsets[number + 1])
        assert abs(inside.mean() - share) < 0.01
    assert "with repeats (up to 5.71 x, b)" in mix.summary()


def test_repeats_are_whole_permutations():
    mix = mixture(("a", Made("a", 10), {"weight": 1.0}), samples_per_epoch=25)
    counts = np.bincount(list(iterate(mix, mix.order(0, 0))), minlength=10)
    assert counts.sum() == 25 and counts.min() == 2 and counts.max() == 3


def test_cap_takes_a_random_part_and_lines_report_it():
    mix = mixture(("a", Made("a", 1000), {"cap": 40, "category": "vqa"}), ("b", Made("b", 60), {}))
    seen = list(iterate(mix, mix.order(0, 0)))
    assert sum(index < 1000 for index in seen) == 40 and len(seen) == 100 == mix.samples_per_epoch
    assert max(index for index in seen if index < 1000) > 100
    assert mix.lines()[0] == {"source": "a", "category": "vqa", "samples": 1000, "wanted": 40, "share": 0.4, "repeats": 1.0}


class Tarred(Made):
    """A source with an order of its own, as tar shards have."""

    def draw_order(self, rng, wanted):
        return rng.permutation(self.n)[:wanted]


@pytest.mark.parametrize("kind, by_image", [(Made, False), (Made, True), (Tarred, False)])
def test_a_capped_source_shows_no_other_samples_however_often_it_is_seen(kind, by_image):
    mix = mixture(("a", kind("a", 1000, 7), {"cap": 100, "weight": 0.9}), ("b", Made("b", 4000), {}), samples_per_epoch=3000)
    seen = [np.bincount([i for i in iterate(mix, mix.order(5, epoch, by_image=by_image)) if i < 1000], minlength=1000) for epoch in (0, 1)]
    assert all(counts.sum() == 2700 and set(counts) == {0, 27} for counts in seen)
    assert (seen[0] == seen[1]).all() and seen[0][100:].any()  # the same in every epoch, and not the beginning
    assert "400 different, with repeats (up to 27.00 x, a)" in mix.summary()
    assert mix.fingerprint != mixture(("a", kind("a", 1000, 7), {"cap": 200, "weight": 0.9}), ("b", Made("b", 4000), {}), samples_per_epoch=3000).fingerprint


def test_a_multiple_repeats_a_source_whole_and_adds_a_part_drawn_anew_each_epoch():
    mix = mixture(("thrice", Made("thrice", 20), {"multiple": 3}), ("part", Made("part", 50), {"multiple": 0.2}), ("mixed", Made("mixed", 10), {"multiple": 1.5}))
    epochs = [np.bincount(list(iterate(mix, mix.order(0, epoch))), minlength=80) for epoch in (0, 1)]
    for counts in epochs:
        assert set(counts[:20]) == {3} and counts[20:70].sum() == 10 and counts[20:70].max() == 1
        assert counts[70:].sum() == 15 and set(counts[70:]) == {1, 2}
    assert (epochs[0][20:70] != epochs[1][20:70]).any()
    with pytest.raises(ConfigError, match="'a' has a weight and a multiple"):
        mixture(("a", Made("a", 10), {"weight": 1.0, "multiple": 2}))


def test_units_by_image_keep_its_questions_together():
    mix = mixture(("a", Made("a", 35, 10), {}))
    order = mix.order(0, 0, by_image=True)
    assert sorted(len(order.unit(u)) for u in range(len(order))) == [5, 10, 10, 10]
    assert all(len({index // 10 for index in order.unit(u)}) == 1 for u in range(len(order)))
    assert sorted(iterate(mix, order)) == list(range(35))


@pytest.mark.parametrize("weights, sizes, expected", [((None, None), (30, 10), [30, 10]), ((0.5, None), (30, 10), [20, 20]), ((3, 1), (10, 10), [15, 5])])
def test_weights_are_shares(weights, sizes, expected):
    configs = [SourceConfig(name=str(k), format="csv", path="x", weight=w) for k, w in enumerate(weights)]
    assert wanted_counts(configs, sizes) == expected


def test_impossible_mixtures_say_what_is_wrong():
    with pytest.raises(ConfigError, match="add up to 1.2, which leaves no share for 'b'"):
        mixture(("a", Made("a", 3), {"weight": 1.2}), ("b", Made("b", 3), {}))
    with pytest.raises(ConfigError, match="'a' occurs more than once"):
        mixture(("a", Made("a", 3), {}), ("a", Made("a", 3), {}))
    with pytest.raises(ConfigError, match="'a' .* has no examples"):
        mixture(("a", Made("a", 0), {}))
    with pytest.raises(ConfigError, match="data.sources is empty"):
        Mixture([], [])


def test_fingerprint_changes_with_the_data():
    assert mixture(("a", Made("a", 3), {})).fingerprint != mixture(("a", Made("a", 4), {})).fingerprint
    assert mixture(("a", Made("a", 3), {})).fingerprint == mixture(("a", Made("a", 3), {})).fingerprint


def test_length_groups_are_of_one_modality_and_sorted():
    lengths = np.random.default_rng(0).integers(1, 400, 103) * np.where(np.random.default_rng(1).random(103) < 0.4, -1, 1)
    order = length_grouped(lengths, 8, np.random.default_rng(2))
    assert sorted(order) == list(range(103))
    n_full = sum((lengths > 0).sum() // 8 * 8 for lengths in (lengths, -lengths)) // 8
    for part in order[: n_full * 8].reshape(-1, 8):
        assert len({bool(value > 0) for value in lengths[part]}) == 1
        assert (np.diff(np.abs(lengths[part])) <= 0).all()
    assert (np.diff(order[n_full * 8 :]) > 0).all()
    assert np.array_equal(order, length_grouped(lengths, 8, np.random.default_rng(2)))


def test_mixture_grouped_by_length_is_a_permutation():
    mix = mixture(("a", Made("a", 40), {}))
    order = list(iterate(mix, mix.order(0, 0, megabatch=8)))
    assert sorted(order) == list(range(40))
    assert all((np.diff([index % 7 for index in order[k : k + 8]]) <= 0).all() for k in range(0, 40, 8))
