"""Published scores come from the table with its source, and are compared by name."""

from __future__ import annotations

import pytest

from mmkit.evaluation.published import PRESETS, beside, benchmarks, published


def test_presets_have_the_rows_of_the_main_results_table():
    for preset, name in PRESETS.items():
        assert published(preset) is benchmarks()[name] and {"gqa", "chartqa", "mmvp"} <= set(published(preset))
    assert all(0 <= score <= 2000 for scores in benchmarks().values() for score in scores.values())


def test_reached_scores_stand_beside_published_ones_with_the_difference():
    rows = {row["benchmark"]: row for row in beside({"gqa": 60.0}, "8b")}
    assert rows["gqa"]["difference"] == pytest.approx(60.0 - published("8b")["gqa"]) and rows["chartqa"]["reached"] is None


def test_unknown_models_and_benchmarks_are_named():
    with pytest.raises(ValueError, match="no published scores of '9b'"):
        published("9b")
    with pytest.raises(ValueError, match="no published score on 'gqq'; did you mean 'gqa'"):
        beside({"gqq": 1.0}, "8b")
