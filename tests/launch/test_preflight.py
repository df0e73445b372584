"""Before a run starts: full-size models are counted and their shapes checked without memory, and missing data is told."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from PIL import Image

from mmkit import cli
from mmkit.config import ConfigError, changed, load
from mmkit.launch import preflight as before
from mmkit.launch.counting import count
from mmkit.launch.preflight import (
    check_examples,
    check_sources,
    data_notes,
    data_rows,
    meta_batch,
    plan_of,
    preflight,
)
from mmkit.launch.machine import GIB, Machine, named
from mmkit.launch.plan import TooLargeError
from tests.training.tiny_clip import clip_run, shards

LAPTOP = Machine("laptop", "cpu", "2 CPU cores", 1, 16 * GIB, peak=dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), 1e11), shared=True)


def test_a_debug_twin_is_counted_as_it_is_built():
    from mmkit.models.build import build

    run = load("8b-debug", "finetune")
    built = sum(p.numel() for p in build(run.model, weights=False).parameters())
    assert sum(part.parameters for part in count(run)) == built


def test_a_dry_run_sends_the_full_size_shapes_through_the_model(capsys):
    run = load("ferret-7b", "finetune", {"dry_run": True, "device_batch": 1, "max_length": 1024})
    report = preflight(run, LAPTOP)
    shapes = {row["tensor"]: row["shape"] for row in report.shapes}
    assert shapes["hidden states"] == (1, 1024, 4096) and shapes["images.0"] == (1, 1, 3, 336, 336) and "region_points" in shapes
    trainable = {row["component"]: row["trainable"] for row in report.rows()}
    assert trainable["regions"] > 0 and trainable["encoders"] == 0
    assert all(row["state"].startswith("not here") for row in report.sources)
    for shown in (str(report), report._repr_html_()):
        assert "hidden states" in shown and "language" in shown and "does not fit" in shown


def test_what_of_the_records_is_not_read_is_told_as_training_begins(tmp_path, monkeypatch):
    Image.new("RGB", (8, 8)).save(tmp_path / "0.jpg")
    asked = {"image": "0.jpg", "question": "Which?", "choices": ["x", "y"], "answer": 1, "lecture": "long"}
    (tmp_path / "a.json").write_text(json.dumps([asked] * 3))
    source = {"name": "science", "format": "llava", "path": str(tmp_path / "a.json")}
    run = load("8b-debug", "pretrain", {"data.sources": [source], "data.max_bad_share": 1.0})
    note = "science: 3 records have key 'lecture' that is not read"
    report = before.Preflight(SimpleNamespace(), SimpleNamespace(), notes=data_notes(run))
    assert report.notes == (note,) and report.at_start().splitlines()[-1] == note
    # a job's main process, which nobody has told before, says it in the job's log
    printed = []
    monkeypatch.setattr("mmkit.launch.launch.is_worker", lambda: True)
    monkeypatch.setattr("mmkit.launch.launch.launch", lambda run: printed.append("trained"))
    monkeypatch.setattr("builtins.print", lambda *words, **_: printed.extend(words))
    assert cli.main(["train", "--model", "8b-debug", "--stage", "pretrain", "--set", f"data.sources={json.dumps([source])}"]) == 0
    assert printed[:2] == [f"{note}\n", "trained"]


def test_the_same_run_without_dry_run_is_too_large_before_data_is_looked_at():
    with pytest.raises(TooLargeError, match="it fits with"):
        preflight(load("ferret-7b", "finetune"), LAPTOP)


def test_parts_that_do_not_fit_together_fail_in_a_dry_run(monkeypatch):
    run = load("8b-debug", "pretrain", {"dry_run": True})
    monkeypatch.setattr(before, "meta_batch", lambda run: {**meta_batch(run), "images.0": meta_batch(run)["images.0"][..., :10, :10]})
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        preflight(run, LAPTOP)


def test_a_contrastive_loss_that_does_not_suit_the_model_is_refused_in_a_dry_run_too():
    with pytest.raises(ConfigError, match="needs model.init_logit_bias"):
        preflight(load("clip-tiny", "pretrain", {"contrastive.kind": "siglip", "dry_run": True}))


def test_missing_data_stops_a_run_and_is_a_row_of_a_dry_run(tmp_path):
    source = [{"name": "mine", "format": "llava", "path": str(tmp_path / "none.jsonl")}]
    run = load("8b-debug", "pretrain", {"data.sources": source})
    with pytest.raises(ConfigError, match="'mine'.*none.jsonl"):
        data_rows(run)
    rows, total = data_rows(load("8b-debug", "pretrain", {"data.sources": source, "dry_run": True}))
    assert total is None and rows[0]["state"].startswith("not here")
    [row] = check_examples(run)
    assert row["bad"] == 1 and "none.jsonl" in row["first fault"]


def test_undecodable_pictures_are_counted_with_the_first_fault(tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    records = (
        '[{"id": "a", "image": "broken.jpg", "conversations": [{"from": "human", "value": "<image>\\nq"}, {"from": "gpt", "value": "a"}]}]'
    )
    (tmp_path / "data.json").write_text(records)
    source = [{"name": "mine", "format": "llava", "path": str(tmp_path / "data.json"), "images": str(tmp_path)}]
    [row] = check_examples(load("8b-debug", "pretrain", {"data.sources": source}))
    assert (row["examples"], row["opened"], row["bad"]) == (1, 0, 1) and "broken.jpg" in row["first fault"]


def llava_run(tmp_path, name, paths, **more):
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    turns = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a kite"}]
    (tmp_path / f"{name}.json").write_text(json.dumps([{"id": k, "image": path, "conversations": turns} for k, path in enumerate(paths)]))
    return {"name": name, "format": "llava", "path": str(tmp_path / f"{name}.json"), "images": str(tmp_path)} | more


def test_every_path_is_tested_and_the_share_in_the_mixture_decides(tmp_path):
    half = llava_run(tmp_path, "half", ["a.png", "no.png"] * 64)
    one = llava_run(tmp_path, "one", ["no.png", *["a.png"] * 400])
    rows = check_examples(load("8b-debug", "pretrain", {"data.sources": [half]}))
    assert [(row["bad"], row["training"]) for row in rows] == [(64, "would stop")] and "no.png" in rows[0]["first fault"]
    rows = check_examples(load("8b-debug", "pretrain", {"data.sources": [one]}))
    assert [(row["bad"], row["training"]) for row in rows] == [(1, "ready")]
    few = half | {"weight": 0.01}
    rows = check_examples(load("8b-debug", "pretrain", {"data.sources": [few, one]}))
    assert [(row["bad"], row["training"]) for row in rows] == [(64, "ready"), (1, "ready")]
    rows = check_examples(load("8b-debug", "pretrain", {"data.sources": [one, one]}))
    assert {row["training"] for row in rows} == {"would stop"} and "more than once" in rows[0]["first fault"]


def test_conversations_are_checked_without_a_tokenizer_and_its_absence_is_told(tmp_path, monkeypatch):
    def missing(run):
        raise ConfigError("no tokenizer here")

    monkeypatch.setattr("mmkit.notebook.data_view.formatter_of", missing)
    [report] = check_sources(load("8b-debug", "pretrain", {"data.sources": [llava_run(tmp_path, "one", ["no.png", "a.png"])]}))
    assert report.faults == {"missing image": 1} and report.refused == "no tokenizer here" and report.would_fail


def test_held_out_shards_beside_a_stream_are_looked_at_as_they_are_read(tmp_path):
    run = clip_run(tmp_path, shards(tmp_path / "a", n=24), shards(tmp_path / "b", n=12))
    run = changed(run, data__resampled=True, data__samples_per_epoch=1000)
    assert [row["examples"] for row in data_rows(run)[0]] == [1000, 12]
    assert [(row["examples"], row["training"]) for row in check_examples(run)] == [(1000, "ready"), (12, "ready")]


def test_a_stage_that_a_preset_lacks_is_refused_by_name_everywhere(capsys):
    from mmkit.cli import main

    message = "model 'clip-tiny' has no stage 'finetune'; its stages are pretrain, eval"
    for ask in (plan_of, preflight):
        with pytest.raises(ConfigError, match=message):
            ask(load("clip-tiny", "finetune", {"dry_run": True}))
    for command in (["plan"], ["train"], ["launch", "--slurm", "--dry-run"]):
        assert main([*command, "--model", "clip-tiny", "--stage", "finetune"]) == 2
        assert message in capsys.readouterr().err
    assert plan_of(load("clip-tiny", "eval"), machine=LAPTOP).fits


def test_the_demo_s_own_adapters_are_planned_as_training_makes_them():
    """`q_proj$` of the preset: 30 layers with two thin matrices each, and as many for `v_proj$`."""
    parts = {part.component: part for part in count(load("tiny", "finetune"))}
    assert parts["language"].adapters == 30 * 16 * ((576 + 576) + (576 + 192)) and parts["language"].trained == 0
    with pytest.raises(ConfigError, match="'q_prj' matches no linear layer"):
        plan_of(load("tiny", "finetune", {"lora.targets": "[q_prj]"}), machine=LAPTOP)


def test_modules_to_save_train_and_locked_towers_do_not():
    head = load("8b-debug", "finetune", {"lora": {"rank": 4, "modules_to_save": ["lm_head"]}, "trainable": "[connector]"})
    [language] = [part for part in count(head) if part.component == "language"]
    architecture = head.model.language.architecture
    assert language.trained == architecture["vocab_size"] * architecture["hidden_size"] and language.adapters > 0
    parts = {part.component: part for part in count(load("clip-tiny", "pretrain"))}
    assert 0 < parts["image"].trained < parts["image"].parameters / 2 and 0 < parts["text"].trained < parts["text"].parameters / 2


@pytest.mark.parametrize("pack", [False, True])
def test_rows_of_a_plan_are_as_training_makes_them(pack):
    """Positions and samples of the first batches, beside those that the loader gives."""
    from mmkit.data.loader import loader
    from mmkit.models.build import image_transforms, tokenizer

    settings = {"buckets": "[64, 128, 256, 512]", "pack": pack, "max_images": 2, "global_batch": 4, "device_batch": 4}
    run = load("8b-debug", "pretrain", settings)
    planned = preflight(run, LAPTOP).plan
    with loader(run.data, run.model, tokenizer(run.model), image_transforms(run.model), train=True, device_batch=4) as made:
        batches = [next(made) for _ in range(12)]
    positions = sum(batch.tensors["input_ids"].shape[1] for batch in batches) / 12
    assert planned.row.positions == pytest.approx(positions, rel=0.1)
    assert planned.row.samples == pytest.approx(sum(batch.n_samples for batch in batches) / 48, rel=0.1)
    assert (planned.operations < dataclasses.replace(planned, row=None).operations) is (positions < run.data.max_length)


def test_a_plan_for_named_devices_needs_no_such_device():
    plan = plan_of(load("8b-debug", "finetune"), machine=named("h100-80gb"), samples=100, price=2.0)
    assert plan.machine.device == "H100 80GB" and plan.fits and plan.steps == 4


def test_the_layers_that_get_an_adapter_are_shown_before_the_start_and_wrong_names_refused():
    settings = {"dry_run": True, "lora.rank": 8, "lora.targets": "[q_proj, v_proj]", "trainable": "[connector, regions]"}
    report = preflight(load("ferret-7b", "finetune", settings))
    assert [(row["component"], row["layer"].rpartition(".")[2], row["layers"]) for row in report.adapters] == [("language", "q_proj", 32), ("language", "v_proj", 32)]
    assert "self_attn.v_proj" in str(report)
    for wrong, message in (({"lora.targets": "[q_prj]"}, "'q_prj' matches no linear layer of language"), ({"lr_of": {"samplers": 0.1}}, "'samplers', which is not trained")):
        with pytest.raises(ConfigError, match=message):
            preflight(load("ferret-7b", "finetune", settings | wrong))
