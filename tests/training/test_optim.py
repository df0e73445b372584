"""Parameter groups: each parameter once, own rates, decay by module type and shape."""


import pytest
import torch
from torch import nn

from mmkit.config import OptimizerConfig
from mmkit.training.optim import adamw, check_groups, component_of, decaying, groups_of, optimizer_factory, table, table_text

COMPONENTS = ((r"connector\.", "connector"), (r"language\.", "language"), (r"logit_scale", "scale"))


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.connector = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.language = nn.ModuleDict({"embed": nn.Embedding(5, 4), "position_embeddings": nn.Embedding(7, 4), "plane_ln_up": nn.Linear(4, 4)})
        self.logit_scale = nn.Parameter(torch.tensor(2.0))


def named(module):
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def test_every_trainable_parameter_is_in_exactly_one_group_with_its_components_rate():
    model = Toy()
    config = OptimizerConfig(lr=2e-4, lr_of={"connector": 2e-5}, weight_decay=0.1)
    optimizer = optimizer_factory(model, COMPONENTS, config)(named(model))
    rate = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert len(rate) == sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))
    assert {rate[id(p)] for p in model.connector.parameters()} == {2e-5}
    assert {rate[id(p)] for p in model.language.parameters()} == {2e-4}


def test_norms_biases_and_scales_do_not_decay():
    assert decaying(Toy()) == {
        "connector.0.weight", "language.embed.weight", "language.plane_ln_up.weight", "language.position_embeddings.weight"
    }


def test_position_embeddings_decay_only_in_open_clips_towers():
    model = Toy()
    for component, expected in (("language", 0.0), ("text", 0.1)):
        components = ((r"connector\.", "connector"), (r"language\.", component), (r"logit_scale", "scale"))
        groups = groups_of(named(model), decaying(model), components, OptimizerConfig(weight_decay=0.1))
        assert [g.weight_decay for g in groups if "language.position_embeddings.weight" in g.parameters] == [expected]


def test_decay_agrees_with_open_clips_name_rule():
    open_clip = pytest.importorskip("open_clip")
    vision = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
    model = open_clip.CLIP(16, vision, {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1})
    by_name = {
        name for name, p in model.named_parameters() if p.ndim >= 2 and not any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
    }
    assert by_name == decaying(model)
    assert decaying(model) <= by_name


def test_frozen_parameters_are_in_no_group_and_nothing_trainable_is_an_error():
    model = Toy()
    model.language.requires_grad_(False)
    groups = groups_of(named(model), decaying(model), COMPONENTS, OptimizerConfig())
    assert {group.component for group in groups} == {"connector", "scale"}
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing is trainable"):
        groups_of(named(model), set(), COMPONENTS, OptimizerConfig())


def test_a_rate_for_a_component_that_is_not_trained_is_an_error():
    model = Toy()
    model.connector.requires_grad_(False)
    with pytest.raises(ValueError, match="'connector', which has no trainable parameter; trained are language, scale"):
        groups_of(named(model), set(), COMPONENTS, OptimizerConfig(lr_of={"connector": 1e-5}))


def test_a_parameter_in_two_groups_or_in_none_is_an_error():
    model = Toy()
    groups = groups_of(named(model), set(), COMPONENTS, OptimizerConfig())
    check_groups(groups, named(model))
    with pytest.raises(ValueError, match="is in 2"):
        check_groups([*groups, groups[0]], named(model))
    with pytest.raises(ValueError, match="is in 0"):
        check_groups(groups[1:], named(model))


def test_a_parameter_no_pattern_knows_is_an_error():
    with pytest.raises(ValueError, match="'other.weight' fits no pattern"):
        component_of("other.weight", COMPONENTS)


def test_half_precision_weights_are_refused():
    model = Toy().half()
    with pytest.raises(ValueError, match="is float16: the optimizer needs fp32"):
        adamw(groups_of(named(model), set(), COMPONENTS, OptimizerConfig()), OptimizerConfig())


def test_table_shows_rate_decay_and_counts():
    model = Toy()
    rows = table(groups_of(named(model), decaying(model), COMPONENTS, OptimizerConfig(weight_decay=0.2)))
    assert {"group": "connector (no decay)", "lr": 2e-5, "weight_decay": 0.0, "tensors": 3, "parameters": 12} in rows
    assert sum(row["parameters"] for row in rows) == sum(p.numel() for p in model.parameters())
    assert len(table_text(rows).splitlines()) == len(rows) + 1


def test_eight_bit_moments_are_kept_in_bytes_and_its_groups_carry_rates():
    pytest.importorskip("bitsandbytes")
    model = nn.ModuleDict({"connector": nn.Linear(128, 64)})
    optimizer = optimizer_factory(model, COMPONENTS, OptimizerConfig(kind="adamw_8bit", lr=1e-3))(named(model))
    before = model["connector"].weight.detach().clone()
    model["connector"](torch.randn(8, 128)).square().mean().backward()
    optimizer.step()
    assert optimizer.state[model["connector"].weight]["state1"].dtype == torch.uint8
    assert (model["connector"].weight - before).abs().max().item() == pytest.approx(1e-3, rel=0.1)  # Adam's first step is lr
    assert [group["base_lr"] for group in optimizer.param_groups] == [1e-3]
