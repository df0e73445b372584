"""Exports: read back equal, referenced where the source is public, refused by name where something is wrong, within one model's memory."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmkit.config import ConfigError, EncoderConfig
from mmkit.models import pretrained
from mmkit.models.build import build, tokenizer
from mmkit.models.hollow import SkipInit
from mmkit.training.weights import materialise
from tests.models import twins


def equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """The same names and the same bits."""
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def filled(model: torch.nn.Module, stored) -> torch.nn.Module:
    """A hollow model with all of its tensors read."""
    materialise(model, stored)
    return model


@pytest.mark.parametrize("twin", [twins.cambrian, twins.ferret, twins.llava, twins.clip], ids=lambda twin: twin.__name__)
def test_an_export_reads_back_equal_whatever_its_folder_is_called(tmp_path, twin):
    config = twin()
    model = build(config)
    words = tokenizer(config)
    folder = pretrained.save_pretrained(model, tmp_path / "export", config, words).rename(tmp_path / "x")  # U16
    again, stored = pretrained.from_pretrained(folder)
    assert equal(model, again)
    if config.kind == "vlm":
        assert stored == config
        assert tokenizer(stored, folder / "tokenizer")("hi <|eot_id|>").input_ids == words("hi <|eot_id|>").input_ids


def test_a_grown_tied_vocabulary_is_stored_once(tmp_path):
    config = twins.llava(language=twins.language(tie_word_embeddings=True))
    model = build(config)
    folder = pretrained.save_pretrained(model, tmp_path / "export", config)
    names = load_file(folder / "model.safetensors").keys()
    assert ("language.lm_head.weight" in names) + ("language.model.embed_tokens.weight" in names) == 1
    again, _ = pretrained.from_pretrained(folder)
    assert equal(model, again) and again.language.lm_head.weight is again.language.model.embed_tokens.weight


def sourced(tmp_path: Path, **changes):
    """A model whose language weights lie in a folder (bf16) and whose first encoder is a pack."""
    language = twins.language(tie_word_embeddings=True)
    build(twins.llava(language=language)).language.to(torch.bfloat16).save_pretrained(tmp_path / "source")
    language = language.model_copy(update={"source": str(tmp_path / "source")})
    config = twins.cambrian(encoders=(EncoderConfig(name="lite0", side=4), twins.CLIP), language=language, **changes)
    model = build(config)
    model.language.requires_grad_(False)
    return config, model


def test_frozen_tensors_of_a_public_source_are_referenced_and_only_those(tmp_path):
    config, model = sourced(tmp_path)
    with torch.no_grad():
        model.language.model.norm.weight += 1  # no longer the source's
    folder = pretrained.save_pretrained(model, tmp_path / "export", config)
    references = json.loads((folder / "config.json").read_text())["references"]
    stored = load_file(folder / "model.safetensors")
    assert references["encoders.0"]["source"] == "pack:lite0"
    public = {f"language.{name}" for name in load_file(tmp_path / "source" / "model.safetensors")}
    assert set(references["language"]["tensors"]) == public - {"language.model.norm.weight"}
    assert "language.model.norm.weight" in stored and not any(name.startswith("encoders.0.") for name in stored)
    again, _ = pretrained.from_pretrained(folder)
    assert equal(model, again)


def test_a_trained_part_is_stored_whole(tmp_path):
    config, model = sourced(tmp_path)
    model.language.requires_grad_(True)
    folder = pretrained.save_pretrained(model, tmp_path / "export", config)
    assert "language" not in json.loads((folder / "config.json").read_text())["references"]


def test_a_source_that_changed_since_is_an_error(tmp_path):
    config, model = sourced(tmp_path)
    folder = pretrained.save_pretrained(model, tmp_path / "export", config)
    state = load_file(tmp_path / "source" / "model.safetensors")
    state["model.norm.weight"] += 1
    save_file(state, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="language.model.norm.weight is taken from .*, which has changed since the export"):
        pretrained.from_pretrained(folder)


def test_missing_and_unexpected_tensors_are_all_named(tmp_path):
    config = twins.llava()
    folder = pretrained.save_pretrained(build(config), tmp_path / "export", config)
    state = load_file(folder / "model.safetensors")
    state["connector.more"] = torch.zeros(1)
    for name in ("connector.output.0.bias", "language.model.norm.weight"):
        del state[name]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError) as error:
        pretrained.from_pretrained(folder)
    for name in ("missing connector.output.0.bias", "missing language.model.norm.weight", "unexpected connector.more", "3 tensors"):
        assert name in str(error.value)


def test_not_finite_and_empty_tensors_are_never_exported(tmp_path):
    config = twins.llava()
    model = build(config)
    model.connector.output[0].bias.data[3] = float("nan")
    with pytest.raises(ValueError, match="export is not written: 1 tensors are missing, empty or not finite: connector.output.0.bias"):
        pretrained.save_pretrained(model, tmp_path / "export", config)
    state = ((name, tensor[:0] if name == "connector.output.2.weight" else tensor) for name, tensor in build(config).state_dict().items())
    with pytest.raises(ValueError, match="connector.output.2.weight"):  # what ZeRO-3 leaves without gathering
        pretrained.save_pretrained(model, tmp_path / "export", config, state=state)
    assert not any(tmp_path.iterdir())


def test_only_the_main_process_writes_but_all_take_part(tmp_path):
    config = twins.llava()
    model = build(config)
    seen = []
    state = ((seen.append(name) or name, tensor) for name, tensor in model.state_dict().items())
    pretrained.save_pretrained(model, tmp_path / "export", config, state=state, main=False)
    assert len(seen) == len(model.state_dict()) and not (tmp_path / "export").exists()


# ---------------------------------------------------------------- adapters


def adapted(config, scale=1.0, **settings):
    """A model with adapters on all query projections, B not zero and with DoRA no magnitude that of its weight."""
    model = build(config)
    pattern = r"language\.model\.layers\.\d+\.self_attn\.q_proj"
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=8, target_modules=pattern, **settings), model, "default")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=scale)
        elif "lora_magnitude" in name:
            parameter.data *= 1 + torch.rand(parameter.shape)
    return model


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
def test_adapters_are_kept_apart_injected_again_or_merged(tmp_path, kind):
    config = twins.llava()
    model = adapted(config, **kind)
    folder = pretrained.save_pretrained(model, tmp_path / "export", config)
    assert not any("lora" in name or "base_layer" in name for name in load_file(folder / "model.safetensors"))
    assert len(load_file(folder / "adapter" / "adapter_model.safetensors")) == (3 if kind.get("use_dora") else 2) * 4
    again, _ = pretrained.from_pretrained(folder)
    assert equal(model, again)
    merged, _ = pretrained.from_pretrained(folder, merge=True)
    ids = torch.arange(1, 9)[None]
    expected, got = (each.language(input_ids=ids).logits for each in (model, merged))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert equal(filled(*pretrained.hollow(config, folder)), merged)


def test_a_merge_says_what_rounding_costs_the_adapter_and_is_refused_where_it_is_lost(tmp_path, caplog):
    caplog.set_level("INFO", "mmkit.models.merging")
    config = twins.llava()
    folder = pretrained.save_pretrained(adapted(config, scale=1e-3), tmp_path / "export", config)
    pretrained.from_pretrained(folder, merge=True)
    assert f"{folder}: 4 layers merged into float32: 0.00% of the adapter lost at worst (language.model.layers." in caplog.text
    with pytest.raises(ValueError, match=r"4 layers merged into bfloat16: \d+\.\d+% of .* lost .*; above the limit of 5%: .* loss_limit"):
        pretrained.from_pretrained(folder, dtype=torch.bfloat16, merge=True)
    model, _ = pretrained.from_pretrained(folder, dtype=torch.bfloat16, merge=True, loss_limit=1)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_peft_folder_of_ours_is_readable_by_peft(tmp_path):
    config = twins.llava()
    model = adapted(config)
    folder = pretrained.save_pretrained(model, tmp_path / "export", config)
    wrapped = peft.PeftModel.from_pretrained(build(config), folder / "adapter", "second")
    name = "language.model.layers.2.self_attn.q_proj"
    halves = wrapped.base_model.model.get_submodule(name)
    torch.testing.assert_close(halves.lora_B["second"].weight, model.get_submodule(name).lora_B["default"].weight)


def test_adapter_settings_of_a_newer_peft(tmp_path):
    """U51: unknown and off is ignored, unknown and on names the version that wrote it."""
    stored = peft.LoraConfig(r=4, target_modules=["a"]).to_dict() | {"peft_version": "9.9.9"}
    assert pretrained.lora_config(stored | {"foo_config": None, "bar": False}, "x").r == 4
    with pytest.raises(ValueError, match=r"\{'foo_config': 3\} are unknown to peft .*written by peft 9.9.9"):
        pretrained.lora_config(stored | {"foo_config": 3}, "x")


def test_an_adapter_with_a_lost_tensor_is_refused(tmp_path):
    config = twins.llava()
    folder = pretrained.save_pretrained(adapted(config), tmp_path / "export", config)
    path = folder / "adapter" / "adapter_model.safetensors"
    state = load_file(path)
    lost = sorted(state)[0]
    save_file({name: tensor for name, tensor in state.items() if name != lost}, path)
    with pytest.raises(ValueError, match="adapter tensors are missing: .*layers.0.self_attn.q_proj.lora_A.default.weight"):
        pretrained.from_pretrained(folder)
    with pytest.raises(ValueError, match="1 layers lack a half"):
        pretrained.from_pretrained(folder, merge=True)


# ---------------------------------------------------------------- refusals


def test_weights_of_another_architecture_name_the_setting_and_both_values(tmp_path):
    config = twins.cambrian()
    folder = pretrained.save_pretrained(build(config), tmp_path / "export", config)
    cases = {
        "samplers is None, the weights in .* have {'start': 0, 'stride': 2, 'count': 2};": twins.cambrian(samplers=None),
        "language.architecture.vocab_size is 200, the weights in .* have 300": twins.cambrian(language=twins.language(vocab_size=200)),
        "language.architecture.hidden_act is gelu, the weights in .* have silu": twins.cambrian(language=twins.language(hidden_act="gelu")),
        "holds a vlm model, the run builds a clip model": twins.clip(),
    }
    for message, wanted in cases.items():
        with pytest.raises(ConfigError, match=message):
            pretrained.hollow(wanted, folder)


def test_folders_that_are_no_export_say_what_they_are(tmp_path):
    with pytest.raises(ConfigError, match="is no exported model: it has no config.json"):
        pretrained.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="was not written by mmkit; published checkpoints are read by"):
        pretrained.read_config(tmp_path)


PEAK = """
import resource, sys, threading, time
from pathlib import Path
import torch
from mmkit.models import pretrained
from mmkit.models.build import build

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

config, _ = pretrained.read_config(sys.argv[1])
language = config.language.model_copy(update={"architecture": config.language.architecture | {"num_hidden_layers": 1}})
small = config.model_copy(update={"language": language})
build(small)  # what importing costs is no part of the measure
before, peak, done = resident(), [0], threading.Event()

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], resident())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
model, _ = pretrained.from_pretrained(sys.argv[1])
done.set()
thread.join()
size = sum(p.numel() * p.element_size() for p in model.parameters())
print(size, peak[0] - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_loading_takes_the_memory_of_one_model(tmp_path):
    config = twins.llava(language=twins.language(hidden_size=512, intermediate_size=2048, num_hidden_layers=12, vocab_size=8000))
    with SkipInit():
        model = build(config)
    for parameter in model.parameters():
        parameter.data.zero_()
    folder = pretrained.save_pretrained(model, tmp_path / "export", config)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PEAK), str(folder)], capture_output=True, text=True, check=True)
    size, peak = map(int, done.stdout.split())
    assert size > 200e6
    assert peak < 1.5 * size, f"{peak / size:.2f} models"
