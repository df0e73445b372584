"""The published mixture and what a run makes of it."""

import numpy as np
import pytest

from mmkit.config import ConfigError
from mmkit.data.mixture import Mixture, iterate
from mmkit.data.recipe import category_shares, realised, recipe, sources_of


class Sized:
    def __init__(self, name, n):
        self.name, self.n = name, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        raise AssertionError("the order of an epoch needs no example")


def mixture(**options):
    facts = recipe("cambrian_7m")
    sizes = {row["name"]: row["samples"] // 100 for row in facts["sources"]}
    configs = sources_of("cambrian_7m", "data", **options)
    return Mixture(configs, [Sized(config.name, sizes[config.name]) for config in configs], 50_000 if options else None)


def test_published_sizes_add_up():
    facts = recipe("cambrian_7m")
    assert sum(row["samples"] for row in facts["sources"]) == 7_055_500 and len(facts["sources"]) == 65
    shares = category_shares(mixture().lines(), "share")
    printed = {"OCR": 27.6, "General": 33.3, "Language": 23.8, "Counting": 8.5, "Code": 0.8, "Math": 3.2, "Science": 2.9}
    assert all(abs(shares[name] * 100 - share) < 0.06 for name, share in printed.items())


def test_categories_get_their_published_ratio_within_one_percent():
    mix = mixture(ratios=True, cap=3500)
    seen = np.array(list(iterate(mix, mix.order(0, 0)))[:10_000])
    counts = {name: int(n) for name, n in zip((c.name for c in mix.configs), np.histogram(seen, mix.offsets)[0], strict=True)}
    rows = realised(mix, counts)
    assert max(abs(row["difference"]) for row in rows) < 0.01
    wanted, total = recipe("cambrian_7m")["ratios"], sum(recipe("cambrian_7m")["ratios"].values())
    found = category_shares(rows)
    assert all(abs(found[name] - share / total) < 0.01 for name, share in wanted.items())


def test_cap_is_the_threshold_of_one_source():
    mix = Mixture(sources_of("cambrian_7m", "data", cap=3500), [Sized(row["name"], row["samples"] // 100) for row in recipe("cambrian_7m")["sources"]])
    assert max(row["wanted"] for row in mix.lines()) == 3500


def test_unknown_mixture_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'cambrian_7m'"):
        recipe("cambrian_10m")
