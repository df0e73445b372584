"""Adapters: where they go, what they train, 4 and 8 bits below them, merging."""

import copy

import pytest
import torch
from torch import nn

from mmkit.config import ConfigError, LoraConfig
from mmkit.training.adapters import adapted, inject, lora_layers, merge, quantise, table_text, targets_of

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
COMPONENTS = ((r"encoders\.", "encoders"), (r"connector\.", "connector"), (r"language\.", "language"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2)


class Toy(nn.Module):
    """A language model with an encoder whose layers share its leaf names."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            tie_word_embeddings=tied,
        )  # fmt: skip
        self.encoders = nn.ModuleList([Block()])
        self.connector = nn.Linear(16, 16)
        self.language = transformers.LlamaForCausalLM(config)

    @property
    def head(self):
        return self.language.get_output_embeddings()

    def forward(self, ids):
        return self.language(inputs_embeds=self.connector(self.language.get_input_embeddings()(ids))).logits


IDS = torch.arange(12).reshape(2, 6)


def trained(model, scale=0.3):
    """The adapters as if trained: B is no longer zero."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            weight = layer.lora_B["default"].weight
            weight.copy_(torch.randn(weight.shape, generator=g) * scale)
    return model


def injected(settings=None, **more):
    model = Toy()
    inject(model, LoraConfig(rank=4, alpha=8, dropout=0, **(settings or {}), **more), COMPONENTS, model.head)
    return model.eval()


def test_only_the_named_component_is_adapted_though_others_share_the_leaf_name():
    model = Toy()
    names = targets_of(model, LoraConfig(targets=("q_proj",)), COMPONENTS, model.head)
    assert names == [f"language.model.layers.{i}.self_attn.q_proj" for i in range(2)]
    both = targets_of(model, LoraConfig(targets=(r".*\.q_proj",), components=("language", "encoders")), COMPONENTS, model.head)
    assert "encoders.0.q_proj" in both and len(both) == 3


def test_without_patterns_every_linear_layer_but_the_head_and_attentions_own_output():
    model = Toy()
    names = targets_of(model, LoraConfig(components=("language", "encoders")), COMPONENTS, model.head)
    assert len(names) == 2 * 7 + 1 and "language.lm_head" not in names and "encoders.0.attention.out_proj" not in names


def test_a_pattern_or_scope_that_matches_nothing_is_an_error_with_what_there_is():
    model = Toy()
    with pytest.raises(ConfigError, match=r"'q_pro' matches no linear layer.*language\.model\.layers\.\*\.mlp\.down_proj"):
        targets_of(model, LoraConfig(targets=("q_pro",)), COMPONENTS)
    with pytest.raises(ConfigError, match=r"\['regions'\] have no linear layer; .*connector \(1\)"):
        targets_of(model, LoraConfig(components=("regions",)), COMPONENTS)
    with pytest.raises(ConfigError, match="modules_to_save pattern 'embed_token' matches no module"):
        inject(model, LoraConfig(modules_to_save=("embed_token",)), COMPONENTS)


def test_only_adapters_train_and_the_table_counts_them():
    model = injected()
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    rows = adapted(model, COMPONENTS)
    assert sum(row["trained"] for row in rows) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert {"component": "language", "layer": "language.model.layers.*.mlp.up_proj", "layers": 2, "trained": 2 * 4 * 48, "base": 1024} in rows
    assert len(table_text(rows).splitlines()) == 8


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}, {"modules_to_save": (r"connector",)}])
def test_every_adapter_gets_a_gradient_also_with_recomputed_layers(settings):
    model = trained(injected(settings)).train()
    model.language.gradient_checkpointing_enable({"use_reentrant": False})
    model(IDS).square().mean().backward()
    found = [p.grad for p in model.parameters() if p.requires_grad]
    assert found and all(g is not None and g.any() for g in found)
    model.language.gradient_checkpointing_disable()
    again = copy.deepcopy(model)
    again.zero_grad()
    again(IDS).square().mean().backward()
    assert all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(found, (p for p in again.parameters() if p.requires_grad)))


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}, {"modules_to_save": (r"connector",)}])
def test_merged_in_fp32_the_model_answers_as_before_and_has_no_adapter_left(settings):
    model = trained(injected(settings))
    want = model(IDS)
    report = merge(model, probe=lambda: model(IDS).detach())
    assert torch.allclose(model(IDS), want, atol=1e-5) and report.max_logit_change < 1e-5 and report.worst < 1e-5
    assert not lora_layers(model) and {name for name, _ in model.named_parameters()} == {name for name, _ in Toy().named_parameters()}


def reported_case(dtype):
    """User report U50: W 64x64 N(0,1), A and B of rank 8 N(0,1) x 0.02, scaling 2, base weights of ``dtype``."""
    torch.manual_seed(0)
    weight, a, b = torch.randn(64, 64), torch.randn(8, 64) * 0.02, torch.randn(64, 8) * 0.02
    model = nn.Module()
    model.connector = nn.Linear(64, 64, bias=False, dtype=dtype)
    inject(model, LoraConfig(rank=8, alpha=16, dropout=0, components=("connector",)), COMPONENTS)
    with torch.no_grad():
        model.connector.lora_A["default"].weight.copy_(a)
        model.connector.lora_B["default"].weight.copy_(b)
        model.connector.get_base_layer().weight.copy_(weight)
    return model


def test_merging_into_bf16_reports_the_share_that_rounding_eats_and_is_refused_unless_forced():
    model = reported_case(torch.bfloat16)
    with pytest.raises(ValueError, match=r"merged 1 layers into bfloat16: 5\d\.\d+% of the adapter lost.*float32.*force=True"):
        merge(model)
    assert lora_layers(model), "a refused merge leaves the model as it was"
    report = merge(model, force=True)
    assert 0.5 < report.worst < 0.6 and model.connector.weight.dtype == torch.bfloat16


def test_merging_into_fp32_loses_nothing():
    model = reported_case(torch.float32)
    delta = model.connector.get_delta_weight("default")
    exact = model.connector.get_base_layer().weight.double() + delta.double()
    assert merge(model).worst < 2e-5
    assert (model.connector.weight.double() - exact).abs().max() < 1e-6


def test_modules_to_save_train_in_place_and_tied_weights_stay_tied():
    model = Toy(tied=True)
    assert model.head.weight is model.language.get_input_embeddings().weight
    inject(model, LoraConfig(rank=2, modules_to_save=(r"language\.model\.embed_tokens",)), COMPONENTS, model.head)
    table = model.language.get_input_embeddings().weight
    assert table.requires_grad and model.head.weight is table
    assert {name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name} == {"language.model.embed_tokens.weight"}


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_base_trains_only_adapters_and_merges_from_the_unquantised_weight(bits):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = Toy()
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    want = model(IDS)
    assert quantise(model.language, bits, torch.float32, skip=model.head) == 14
    kinds = {p.dtype for name, p in model.named_parameters() if name.endswith("_proj.weight") and name.startswith("language")}
    assert kinds == {torch.uint8 if bits == 4 else torch.int8} and type(model.head) is nn.Linear
    assert (model(IDS) - want).abs().max() < 0.5 * want.abs().max()
    inject(model, LoraConfig(rank=4, alpha=8, dropout=0), COMPONENTS, model.head)
    trained(model, 0.5)
    model(IDS).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)
    with pytest.raises(ValueError, match="the unquantised weight"):
        merge(model)
    layers = {name: layer.get_delta_weight("default").detach() for name, layer in lora_layers(model).items()}
    report = merge(model, base=lambda name: plain[f"{name}.weight"])
    assert report.worst < 1e-4
    for name, delta in layers.items():
        merged = model.get_submodule(name).weight
        assert merged.dtype == torch.float32 and torch.allclose(merged, plain[f"{name}.weight"] + delta, atol=1e-5)
