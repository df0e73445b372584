"""Published scores come from the table with its source, and are compared by name."""

from __future__ import annotations

import pytest

from mmkit.evaluation.published import COLUMNS, PRESETS, benchmarks, published_score
from mmkit.evaluation.tasks.table import TASKS


def test_presets_have_the_rows_of_the_main_results_table():
    for name in PRESETS.values():
        assert {"gqa", "chartqa", "mmvp", *COLUMNS.values()} <= set(benchmarks()[name])
    assert all(0 <= score <= 2000 for scores in benchmarks().values() for score in scores.values())


def test_a_published_score_is_in_the_unit_of_our_task():
    assert (
        published_score("8b", "mmvp", "percent") == 51.3 and published_score("8b", "mme", "points") == 1547.1
    )
    assert published_score("8b", "mmbench_en", TASKS["mmbench_en"].unit) == pytest.approx(0.759)
    assert published_score("8b", "omni", "fraction") == pytest.approx(0.72)
    assert (
        published_score("tiny", "gqa", "percent") is None
        and published_score("8b", "easy_vqa", "fraction") is None
    )
