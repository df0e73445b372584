"""Adapters: where they go, what they train, 4 and 8 bits below them, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mmkit.config import ConfigError, LoraConfig
from mmkit.models.pretrained import from_pretrained
from mmkit.training.adapters import adapted, inject, lora_layers, quantise, table_text, targets_of
from mmkit.training.loop import train
from mmkit.training.weights import adapter_record
from tests.training.tiny_run import sourced, tiny_run

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
    with pytest.raises(ConfigError, match=r"\['regions'\] have no linear layer .*connector \(1\)"):
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


def test_modules_to_save_train_in_place_and_tied_weights_stay_tied():
    model = Toy(tied=True)
    assert model.head.weight is model.language.get_input_embeddings().weight
    inject(model, LoraConfig(rank=2, modules_to_save=(r"language\.model\.embed_tokens",)), COMPONENTS, model.head)
    table = model.language.get_input_embeddings().weight
    assert table.requires_grad and model.head.weight is table
    assert {name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name} == {"language.model.embed_tokens.weight"}


@pytest.mark.parametrize("bits", [4, 8])
def test_above_a_quantised_base_only_adapters_train(bits):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = Toy()
    want = model(IDS)
    assert quantise(model.language, bits, torch.float32, skip=model.head) == 14
    kinds = {p.dtype for name, p in model.named_parameters() if name.endswith("_proj.weight") and name.startswith("language")}
    assert kinds == {torch.uint8 if bits == 4 else torch.int8} and type(model.head) is nn.Linear
    assert (model(IDS) - want).abs().max() < 0.5 * want.abs().max()
    inject(model, LoraConfig(rank=4, alpha=8, dropout=0), COMPONENTS, model.head)
    trained(model, 0.5)
    model(IDS).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_above_a_base_that_computes_in_half_precision_adapters_start_with_fp32_values(kind):
    bitsandbytes, model = pytest.importorskip("bitsandbytes"), Toy()
    quantise(model.language, 4, kind, skip=model.head)
    inject(model, LoraConfig(rank=4, use_dora=True, modules_to_save=("norm",)), COMPONENTS, model.head)
    opened = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in opened.values()} == {torch.float32} and "language.model.norm.weight" in opened
    for layer in lora_layers(model).values():
        a, magnitude = layer.lora_A["default"].weight, layer.lora_magnitude_vector["default"].weight
        assert not torch.equal(a, a.to(kind).float()), "drawn in fp32, not rounded"
        assert not torch.equal(magnitude, magnitude.to(kind).float())
        weight = layer.get_base_layer().weight
        torch.testing.assert_close(magnitude, bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).norm(dim=1))


CANNOT_TRAIN_WHOLE = [
    (16, ("q_proj",), "'q_proj' matches (?P<n>language.*0.self_attn.q_proj), but (?P=n) gets an adapter"),
    (16, (r"layers\.1",), r"matches language.model.layers.1, but language.model.layers.1.self_attn.q_proj gets an adapter"),
    (16, ("act_fn",), "'act_fn' matches language.model.layers.0.mlp.act_fn, which has no parameters to train"),
    (4, ("o_proj",), "'o_proj' matches .*o_proj, whose weights are quantised and cannot train; take it out or use bits 16"),
]


@pytest.mark.parametrize(("bits", "patterns", "message"), CANNOT_TRAIN_WHOLE)
def test_modules_to_save_that_cannot_train_whole_are_refused_by_name(bits, patterns, message):
    model = Toy()
    if bits == 4:
        pytest.importorskip("bitsandbytes")
        quantise(model.language, 4, torch.float32, skip=model.head)
    with pytest.raises(ConfigError, match=message):
        inject(model, LoraConfig(targets=("q_proj",), modules_to_save=patterns), COMPONENTS, model.head)
    assert not lora_layers(model)


@pytest.mark.parametrize("settings", [{"targets": ("q_proj(",)}, {"modules_to_save": ("q_proj(",)}])
def test_a_pattern_that_is_no_regular_expression_is_refused_with_its_setting(settings):
    with pytest.raises(ConfigError, match=rf"lora\.{next(iter(settings))} pattern 'q_proj\(' is no regular expression: missing \)"):
        inject(Toy(), LoraConfig(**settings), COMPONENTS)


def test_patterns_may_set_flags():
    assert len(targets_of(Toy(), LoraConfig(targets=("(?i)Q_PROJ",)), COMPONENTS)) == 2


def test_a_component_that_the_model_lacks_is_refused_beside_one_that_it_has():
    with pytest.raises(ConfigError, match=r"lora.components \['regions', 'image'\] have no linear layer in this model; .*language \(15\)"):
        targets_of(Toy(), LoraConfig(components=("language", "regions", "image")), COMPONENTS)


# ---------------------------------------------------------------- whole runs

LORA = {"rank": 4, "alpha": 8, "dropout": 0.0}


@pytest.mark.parametrize(("bits", "precision"), [(4, "bf16"), (4, "fp16"), (8, "bf16"), (8, "fp16")])
def test_a_quantised_run_trains_in_half_precision_as_it_does_in_fp32_and_goes_on_from_there(tmp_path, bits, precision):
    pytest.importorskip("bitsandbytes")
    settings = {"model": sourced(tmp_path), "bits": bits, "lora": LORA}
    if bits == 4:
        train(tiny_run(tmp_path, **settings, steps=1, name="half", precision="fp32"))
    half = tiny_run(tmp_path, **settings, steps=2, name="half", precision=precision)
    assert train(half).reason == "done"
    whole = tiny_run(tmp_path, **settings, steps=2, name="whole", precision="fp32")
    train(whole)
    losses = [[json.loads(line)["loss"] for line in Path(run.folder, "metrics.jsonl").read_text().splitlines()] for run in (half, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    held = torch.cat([tensor.flatten() for tensor in load_file(Path(half.folder, "export/adapter/adapter_model.safetensors")).values()])
    assert held.dtype == torch.float32 and held.any()


@pytest.mark.parametrize("bits", [16, 4])
def test_the_next_stage_starts_from_merged_dora(tmp_path, bits):
    settings = {"model": sourced(tmp_path), "steps": 2, "lora": LORA | {"use_dora": True}, "trainable": []}
    first = tiny_run(tmp_path, **settings, bits=bits)
    train(first)
    apart, merged = (from_pretrained(f"{first.folder}/export", merge=merge)[0] for merge in (False, True))
    plain = load_file(tmp_path / "language" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].float()
    assert not torch.equal(merged.language.model.layers[0].mlp.up_proj.weight, plain)
    torch.testing.assert_close(*(model.language(input_ids=IDS).logits for model in (apart, merged)), atol=1e-5, rtol=1e-5)
    assert train(tiny_run(tmp_path, **settings | {"stage": "finetune"})).reason == "done"


REFUSED = [
    ({"trainable": ["connector", "regions"]}, "train.trainable names regions, which this model lacks; its components are encoders, "),
    ({"allow_no_grad": ["("]}, r"train.allow_no_grad pattern '\(' is no regular expression"),
    ({"allow_no_grad": ["conector"]}, "train.allow_no_grad pattern 'conector' matches no trained tensor; their names look like connector"),
    ({"trainable": [], "lora": LORA | {"components": ["encoders"]}, "cache": True}, "cache_features .* but lora.components has 'encoders'"),
    ({"lora": LORA | {"modules_to_save": [r"encoders\.0"]}, "cache": True}, "cache_features .*modules_to_save names modules of encoders"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_would_do_nothing_or_fail_later_are_refused_before_work(tmp_path, settings, message):
    cache = settings.get("cache", False)
    run = tiny_run(tmp_path, **{name: value for name, value in settings.items() if name != "cache"})
    run = run.model_copy(update={"data": run.data.model_copy(update={"cache_features": cache})})
    with pytest.raises(ConfigError, match=message):
        train(run)
    assert not Path(run.folder, "checkpoints").exists()


def test_what_a_checkpoint_remembers_of_adapters_is_plain_json_whatever_the_order_of_names(tmp_path):
    lora = LORA | {"targets": ["q_proj", "v_proj"]}
    one, two = (
        adapter_record(tiny_run(tmp_path, lora=settings, trainable=names))
        for settings, names in ((lora, ["connector", "samplers"]), (lora | {"targets": ["v_proj", "q_proj"]}, ["samplers", "connector"]))
    )
    assert one == two == json.loads(json.dumps(one)) and one["lora"]["alpha"] == 8 and one["bits"] == 16
    assert one != adapter_record(tiny_run(tmp_path, lora=lora | {"use_rslora": True}))
    assert adapter_record(tiny_run(tmp_path))["lora"] is None
