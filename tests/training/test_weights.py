"""Weights stay in their files until they are placed, are those that a whole build reads, and are known again by all of their bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from mmkit.config import ModelConfig
from mmkit.models.build import build
from mmkit.models.pretrained import hollow
from mmkit.training.checkpoint import Checkpoint, CheckpointError
from mmkit.training.loop import train
from mmkit.training import weights
from mmkit.training.weights import materialise
from tests.training.test_processes import by_two
from tests.training.tiny_run import sourced, tiny_run

LORA = {"rank": 2, "alpha": 4, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocabulary", [320, 300])
def test_a_hollow_model_once_filled_is_the_model_that_is_built_whole(tmp_path, tied, vocabulary):
    tree = sourced(tmp_path, vocabulary=vocabulary, tie_word_embeddings=tied)
    tree["connector"]["match_embeddings"] = True
    config = TypeAdapter(ModelConfig).validate_python(tree)
    torch.manual_seed(0)
    whole = build(config)
    torch.manual_seed(0)
    model, stored = hollow(config)
    empty = {name for name, tensor in model.state_dict().items() if tensor.is_meta}
    assert empty <= set(stored) and not any(name.startswith("connector") for name in empty)
    assert {name for name, _ in model.named_parameters() if name.startswith(("language", "encoders"))} <= empty
    materialise(model, stored)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    for table in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(model, table)()), dict(getattr(whole, table)())
        same = [name for name in mine if vocabulary == 320 or not name.startswith("connector")]  # transformers draws for rows it then adds
        assert mine.keys() == theirs.keys() and same and all(torch.equal(mine[name], theirs[name]) for name in same), table
    assert (model.language.lm_head.weight is model.language.model.embed_tokens.weight) == tied


def test_names_transformers_converts_are_left_to_transformers(tmp_path):
    tree = sourced(tmp_path)
    path = tmp_path / "language" / "model.safetensors"
    bare = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}  # as a model saved without its head's class
    save_file(bare, path, metadata={"format": "pt"})
    model, stored = hollow(TypeAdapter(ModelConfig).validate_python(tree))
    assert not any(name.startswith("language") for name in stored) and not any(p.is_meta for p in model.language.parameters())
    assert torch.equal(model.language.model.norm.weight, bare["norm.weight"].float())


def frozen_of(run) -> dict:
    return Checkpoint(sorted(str(path) for path in Path(run.folder, "checkpoints").iterdir())[-1]).manifest["frozen"]


def change_one_value(path: Path, name: str, place: int) -> None:
    state = load_file(path)
    state[name].view(-1)[place] += 1
    save_file(state, path, metadata={"format": "pt"})


def test_a_checkpoint_refers_to_frozen_weights_by_source_and_all_of_their_bytes(tmp_path):
    tree, path = sourced(tmp_path), tmp_path / "language" / "model.safetensors"
    run = tiny_run(tmp_path, model=tree, steps=1)
    train(run)
    frozen, before = frozen_of(run), Path(run.folder, "checkpoints", "step-00000001", "manifest.json").read_text()
    sources = {component: record["sources"] for component, record in frozen.items()}
    assert sources == {"language": [str(tmp_path / "language")], "encoders": [str(tmp_path / "encoder.bin")]}
    assert set(frozen["language"]["tensors"]) == {f"language.{name}" for name in load_file(path)}
    assert frozen["language"]["tensors"]["language.model.norm.weight"].startswith("bfloat16:")
    assert json.loads(before)["tensors"]["connector.output.0.weight"]["dtype"] == "float32"
    train(tiny_run(tmp_path, model=tree, steps=2))
    assert frozen_of(run) == frozen
    change_one_value(path, "model.embed_tokens.weight", 4567)  # one of 7,680, where a sample might not look
    message = "other frozen weights of component 'language' .*language.*, first 'language.model.embed_tokens.weight'; start from the same"
    with pytest.raises(CheckpointError, match=message):
        train(tiny_run(tmp_path, model=tree, steps=3))


def test_statistics_of_a_frozen_encoder_are_frozen_weights_too(tmp_path):
    tree = sourced(tmp_path)
    tree["encoders"][0] = {"name": "lite0", "side": 4, "resolution": 64}
    run = tiny_run(tmp_path, model=tree, steps=1)
    train(run)
    record = frozen_of(run)["encoders"]
    assert record["sources"] == ["pack:lite0"] and any(name.endswith("running_var") for name in record["tensors"])


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_a_stage_after_another_reads_its_weights_through_the_export_that_refers_to_them(tmp_path, lora):
    tree, path = sourced(tmp_path), tmp_path / "language" / "model.safetensors"
    train(tiny_run(tmp_path, model=tree, steps=1, lora=LORA | {"targets": ["q_proj"]}))
    settings = {"model": tree, "stage": "finetune", "lora": LORA | lora, "trainable": ["connector"]}
    run = tiny_run(tmp_path, **settings, steps=1)
    result = train(run)
    sources = frozen_of(run)["language"]["sources"]  # what was adapted comes from the export, merged
    assert set(sources) == {f"{tmp_path}/runs/test/pretrain/default/export", str(tmp_path / "language")}
    assert Path(result.export, "adapter", "adapter_model.safetensors").is_file()
    change_one_value(path, "model.norm.weight", 3)
    with pytest.raises(ValueError, match="language.model.norm.weight is taken from .*language, which has changed since the export"):
        train(tiny_run(tmp_path, **settings, steps=2))


WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 8}
CUTS = {"fsdp": {"kind": "torch", "strategy": "fsdp", "processes": 2}, "zero3": {"kind": "deepspeed", "zero_stage": 3, "processes": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_a_process_never_holds_much_more_than_its_share_of_a_cut_model(tmp_path, cut):
    tree = sourced(tmp_path, torch.float32, **WIDE)
    by_two(tmp_path, "child_memory.py", model=tree, backend=CUTS[cut], lora=LORA, device_batch=1)
    whole = (tmp_path / "language" / "model.safetensors").stat().st_size
    took = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert whole > 150e6 and max(took) < 0.65 * whole, (took, whole)


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_linear_weights_in_half_precision_stay_so_and_change_no_number(tmp_path, monkeypatch, tied):
    tree = sourced(tmp_path, tie_word_embeddings=tied)
    settings = {"model": tree, "steps": 2, "lora": LORA, "precision": "bf16"}
    states = []
    run = tiny_run(tmp_path, **settings)
    train(run, on_assemble=states.append)
    language = states[0].model.language
    halves = {name.removesuffix(".weight").rpartition(".")[2] for name, p in language.named_parameters() if p.dtype == torch.bfloat16}
    assert halves == {"base_layer", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} | (set() if tied else {"lm_head"})
    assert all(p.dtype == torch.float32 for p in states[0].model.parameters() if p.requires_grad)
    monkeypatch.setattr(weights, "keep_half", lambda *_: None)
    wide = tiny_run(tmp_path, **settings, name="wide")
    train(wide)
    rows = [[json.loads(line)["loss"] for line in Path(one.folder, "metrics.jsonl").read_text().splitlines()] for one in (run, wide)]
    assert rows[0] == rows[1] and len(rows[0]) == 2
    monkeypatch.undo()
    resumed = train(tiny_run(tmp_path, **settings | {"precision": "fp32", "steps": 3}))  # the file is what counts, not the type in memory
    assert resumed.steps == 3
    references = json.loads(Path(resumed.export, "config.json").read_text())["references"]
    assert "language.model.layers.0.mlp.up_proj.weight" in references["language"]["tensors"]


def test_cached_features_come_from_encoders_that_were_in_their_files(tmp_path):
    tree = sourced(tmp_path)
    plain = tiny_run(tmp_path, model=tree, steps=1)
    train(plain)
    data = plain.data.model_dump(mode="json") | {"cache_features": True, "cache_dir": str(tmp_path / "cache")}
    cached = tiny_run(tmp_path, model=tree, steps=1, data=data, name="cached")
    train(cached)
    one, other = (json.loads(Path(run.folder, "metrics.jsonl").read_text()) for run in (plain, cached))
    assert any((tmp_path / "cache").rglob("*")) and one["loss"] == pytest.approx(other["loss"], rel=1e-3)
