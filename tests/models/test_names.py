"""Names of published tensors: to ours and back, for every weight of the golden files and every tensor of a model with all parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmkit.models.convert.names import original, ours
from tests.models.test_vlm import model_of

GOLDEN = Path(__file__).parents[1] / "golden"


def weight_names() -> list[tuple[str, list[str]]]:
    """(case, original names) of every golden case with weights of a whole model or its parts."""
    found = ((path.stem, json.loads(path.read_text(encoding="utf8"))) for path in sorted(GOLDEN.glob("*.json")))
    return [(stem, facts["weight_keys"]) for stem, facts in found if isinstance(facts, dict) and facts.get("weight_keys")]


@pytest.mark.parametrize(("case", "names"), weight_names())
def test_every_golden_weight_has_one_name_here_and_the_same_one_back(case, names):
    if case.startswith("sampler_"):
        names = [f"model.vision_sampler_0.{name}" for name in names]  # the file holds one bare sampler
    linear, mean = "model.mm_projector.weight" in names, any("region_fea_adapter" in name for name in names)
    renamed = {ours(name): name for name in names}
    assert len(renamed) == len(names)
    for here, there in renamed.items():
        assert original(here, linear=linear, mean=mean) == there


def test_every_tensor_of_a_model_with_all_parts_survives_the_way_there_and_back():
    own = [name for name in model_of(query_sides=[4, 2], regions={"kind": "geo"}).state_dict() if not name.startswith("encoders.")]
    there = [original(name) for name in own]
    assert len(set(there)) == len(own) and [ours(name) for name in there] == own
    assert "model.vision_sampler_layers.1.layers.0.cross_attn.k_proj_1.0.bias" in there
    assert "model.vision_sampler_1.layers.0.pos_embed_0" in there and "model.layers.3.mlp.up_proj.weight" in there


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "base_model.model."])
def test_wrapper_prefixes_are_dropped(prefix):
    assert ours(prefix + "model.vision_query") == "connector.queries"


def test_a_name_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="'connector.strange'"):
        original("connector.strange")
