"""What the data notebook measures of the demo's own mixture."""

from __future__ import annotations

import pytest

from mmkit.config import load
from mmkit.notebook.data_view import fill_rows, open_data


@pytest.mark.slow
def test_rows_of_the_demo_mixture_hold_95_percent_real_positions():
    run = load("tiny", "finetune", {"data.cache_features": False})
    here, padded = fill_rows(run, open_data(run))
    assert here["real positions %"] >= 95
    assert padded["real positions %"] < 20 and "2048" in padded["rows"]


def test_a_contrastive_model_has_no_rows_to_fill():
    assert fill_rows(load("clip-tiny", "pretrain"), None) == []
