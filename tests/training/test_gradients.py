"""The gradient report: every trained tensor, adapters' second halves excused only where the first half has a gradient."""

import pytest

from mmkit.training.gradients import check, report

REACHED = {
    "language.0.lora_A.default.weight": False,
    "language.0.lora_B.default.weight": True,
    "language.0.lora_magnitude_vector.default.weight": False,
    "connector.weight": True,
}


def test_report_counts_by_component():
    rows = report(REACHED, ((r"language\.", "language"), (r"connector\.", "connector")))
    assert rows == [
        {"component": "language", "tensors": 3, "with_gradient": 1},
        {"component": "connector", "tensors": 1, "with_gradient": 1},
    ]


def test_an_adapters_a_may_wait_for_its_b_but_not_without_it():
    check(REACHED)
    with pytest.raises(ValueError, match=r"3 of 4 trained tensors got no gradient in the first step: language\.0\.lora_A"):
        check(REACHED | {"language.0.lora_B.default.weight": False})


def test_allowed_patterns_excuse_what_they_name():
    reached = REACHED | {"connector.spare": False}
    with pytest.raises(ValueError, match="connector.spare. They would never change"):
        check(reached)
    check(reached, ("spare$",))
