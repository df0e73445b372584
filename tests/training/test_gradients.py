"""The gradient report: every trained tensor, adapters' second halves excused only where the first half has a gradient."""

from types import SimpleNamespace

import pytest
import torch

from mmkit.models.vocabulary import AddedRows
from mmkit.training.gradients import PATIENCE, check, check_reached, report

REACHED = {
    "language.0.lora_A.default.weight": False,
    "language.0.lora_B.default.weight": True,
    "language.0.lora_magnitude_vector.default.weight": False,
    "connector.weight": True,
}


def test_report_counts_by_component():
    rows = report(REACHED, ((r"language\.", "language"), (r"connector\.", "connector")))
    assert rows == [
        {"component": "language", "tensors": 3, "with_gradient": 1, "vouched": 2, "share": 1.0},
        {"component": "connector", "tensors": 1, "with_gradient": 1, "vouched": 0, "share": 1.0},
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


def state_at(step, pictures, regions):
    tensors = {"image_real": torch.tensor([[pictures]]), "region_real": torch.tensor([[regions]])}
    backend = SimpleNamespace(any_device=bool, reached={})
    train = SimpleNamespace(allow_no_grad=())
    components = ((r"connector\.", "connector"), (r"regions\.", "regions"))
    window = [SimpleNamespace(tensors=tensors)]
    facts = {"step": step, "backend": backend, "window": window, "components": components, "model": torch.nn.Module()}
    return SimpleNamespace(**facts, run=SimpleNamespace(train=train))


def test_a_component_is_excused_while_no_step_had_its_input_and_looked_at_again():
    reached = {"connector.weight": True, "regions.weight": False}
    early = state_at(1, True, False)
    assert check_reached(early, reached) is None and early.backend.reached is None
    with pytest.raises(ValueError, match="no gradient in the first step: regions.weight"):
        check_reached(state_at(2, True, True), reached)
    with pytest.raises(ValueError, match="connector.weight"):
        check_reached(state_at(1, True, False), {"connector.weight": False, "regions.weight": False})
    assert check_reached(state_at(1, False, False), {"connector.weight": False, "regions.weight": False}) is None


def test_an_embeddings_added_rows_wait_for_their_tokens():
    state, reached = state_at(1, True, True), {"connector.weight": True, "connector.added_rows": False}
    table = torch.nn.Embedding(9, 2)
    state.model.connector = AddedRows(table, [7, 8], torch.nn.Parameter(table.weight[7:].detach().clone()))
    state.window[0].tensors["input_ids"] = torch.tensor([[1, 2, -200]])
    assert check_reached(state, reached) is None
    state.window[0].tensors["input_ids"] = torch.tensor([[1, 8, -200]])
    with pytest.raises(ValueError, match="no gradient in the first step: connector.added_rows"):
        check_reached(state, reached)


def test_after_patience_the_report_is_given_with_a_warning(caplog):
    rows = check_reached(state_at(PATIENCE, True, False), {"connector.weight": True, "regions.weight": False})
    assert {"component": "regions", "tensors": 1, "with_gradient": 0, "vouched": 0, "share": 0.0} in rows and "the input of regions" in caplog.text
