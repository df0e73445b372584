"""Whole contrastive runs: what is logged, accumulation, the rehearsal of the ViT-L/14 story."""

import json
import math
import os
import signal

import pytest

from mmkit.config import ConfigError, changed
from mmkit.training.loop import train
from mmkit.training.rehearsal import layer_of, rehearse
from tests.training.processes import run_processes
from tests.training.tiny_clip import clip_run, shards


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("MMKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield shards(tmp_path_factory.mktemp("shards"))
    patch.undo()


def lines(folder):
    return [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]


@pytest.mark.parametrize(
    ("contrastive", "model", "message"),
    [
        ({"kind": "siglip"}, {}, "needs model.init_logit_bias"),
        ({"kind": "coca"}, {}, "has no caption decoder"),
        ({}, {"name": "coca_ViT-B-32", "architecture": None}, "has a caption decoder .multimodal_cfg.: use kind 'coca'"),
        ({"kind": "distill"}, {}, "needs the name of an open_clip model to learn from"),
        ({"distill_from": "RN50"}, {}, "other kinds have no use for it"),
    ],
)
def test_a_loss_that_does_not_suit_the_model_stops_before_anything_is_read(tmp_path, contrastive, model, message):
    with pytest.raises(ConfigError, match=message):
        train(clip_run(tmp_path, "/nowhere.tar", contrastive=contrastive, model=model))


def test_a_run_on_shards_learns_and_logs_what_tells_its_health(tmp_path, data):
    run = clip_run(tmp_path, data, steps=12)
    result = train(run)
    rows = lines(run.folder)
    assert result.reason == "done" and len(rows) == 12
    assert rows[-1]["loss"] < rows[0]["loss"]
    first = rows[0]
    assert first["loss_gap"] == pytest.approx(first["loss"] - math.log(12), abs=1e-4)
    assert first["logit_scale"] == pytest.approx(14.2857, abs=1e-2) and first["max_logit"] <= 14.3 and first["duplicate_share"] == 0
    towers = [first[f"grad_norm_{name}"] for name in ("image", "text", "scale")]
    assert math.sqrt(sum(norm**2 for norm in towers)) == pytest.approx(first["grad_norm"], rel=1e-4)


def test_a_run_whose_features_have_collapsed_says_once_that_it_learns_nothing(tmp_path, data, caplog):
    """Ten times the learning rate of the other tests: after six steps all features are alike."""
    too_high = {"lr": 3e-2, "warmup": 0, "schedule": "constant", "weight_decay": 0.1}
    run = clip_run(tmp_path, data, steps=24, optimizer=too_high)
    result = train(run)
    told = [record.getMessage() for record in caplog.records if "at chance" in record.getMessage()]
    assert result.reason == "done" and told == [result.hint]
    assert f"(ln 12 = {math.log(12):.4g})" in told[0] and "learning rate that is too high" in told[0]
    assert [row["note"] for row in lines(run.folder) if "note" in row] == told
    healthy = clip_run(tmp_path, data, name="healthy", steps=24)
    assert train(healthy).hint == "" and not any("note" in row for row in lines(healthy.folder))


def test_accumulation_changes_neither_losses_nor_gradients(tmp_path, data):
    whole, parts = (clip_run(tmp_path, data, name=f"d{size}", device_batch=size, steps=4) for size in (12, 4))
    train(whole)
    train(parts)
    for a, b in zip(lines(whole.folder), lines(parts.folder), strict=True):
        for name in ("loss", "grad_norm", "grad_norm_scale", "logit_scale", "loss_gap", "duplicate_share"):
            assert a[name] == pytest.approx(b[name], rel=2e-3, abs=1e-5), name


def test_gathering_without_gradient_stops_before_anything_is_read(tmp_path):
    with pytest.raises(ConfigError, match="gather_with_grad"):
        train(clip_run(tmp_path, "/nowhere.tar", contrastive={"gather_with_grad": False}))
    assert not (tmp_path / "runs").exists()


def test_fp16_overflow_is_gone_back_from_and_the_run_ends_in_fp32_near_the_clean_one(tmp_path, data):
    gently = {"lr": 3e-4, "warmup": 0, "schedule": "constant", "weight_decay": 0.1}  # the scaler skips the first two updates of fp16
    story = rehearse(clip_run(tmp_path, data, steps=16, optimizer=gently), at_step=9)
    assert story.clean.reason == story.strained.reason == "done"
    assert [event["decision"]["cause"] for event in story.events] == ["non-finite loss"]
    decision = story.events[0]["decision"]
    assert decision["step"] == 10 and decision["rewind_to"] == 9 and decision["precision"] == "fp32" and len(decision["keys"]) == 12
    assert [row["step"] for row in story.events[0]["last_steps"]][-1] == 10
    assert any(row["not_finite"] for row in story.events[0]["activations"])
    rows = lines(f"{tmp_path}/runs/test/pretrain/default-strained")
    assert rows[-1]["step"] == 16 and all(isinstance(row["loss"], float) for row in rows[10:])
    assert abs(story.gap) < 3 * story.noise


def test_the_strained_layer_can_be_named_and_must_exist(tmp_path, data):
    from mmkit.models.build import build

    run = clip_run(tmp_path, data)
    model = build(run.model)
    assert layer_of(model, "clip.transformer.resblocks.0.mlp.c_fc") is model.clip.transformer.resblocks[0].mlp.c_fc
    assert layer_of(model) is model.clip.visual.transformer.resblocks[1].mlp.c_proj
    with pytest.raises(ConfigError, match="no layer 'nothing'"):
        layer_of(model, "nothing")
    with pytest.raises(ConfigError, match="earlier"):
        rehearse(run, at_step=8)


def test_an_interrupted_run_goes_on_to_the_bit_through_the_unmasked_phase(tmp_path, data):
    settings = {"model": {"patch_dropout": 0.5}, "contrastive": {"unmasked_last": 0.25}, "checkpoint": {"save_every": 3}}
    whole, broken = (clip_run(tmp_path, data, name=name, **settings) for name in ("whole", "broken"))
    train(whole)

    def stop(row):
        if row["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    assert train(broken, on_log=stop).reason == "interrupted"
    assert train(broken).reason == "done"
    a, b = ([(row["step"], row["loss"], row["grad_norm"], row["logit_scale"]) for row in lines(run.folder)] for run in (whole, broken))
    assert a == b and len(a) == 8


def test_precision_may_change_at_a_resume_as_in_the_published_run(tmp_path, data):
    train(clip_run(tmp_path, data, steps=4, precision="bf16"))
    run = clip_run(tmp_path, data, steps=6, precision="fp32", device_batch=6)
    assert train(run).reason == "done"
    rows = lines(run.folder)
    assert len(rows) == 6 and rows[-1]["total_samples"] == 72
    assert abs(rows[4]["loss_gap"] - rows[3]["loss_gap"]) < 1.0


def test_a_rewind_to_an_epoch_changes_precision_batch_and_data_seed_and_keeps_the_share_of_training_done(tmp_path, data):
    schedule = {"lr": 3e-3, "warmup": 2, "schedule": "cosine"}
    length = {"steps": None, "epochs": 4, "optimizer": schedule, "checkpoint": {"save_every": 4, "keep_last": 9}}
    first = clip_run(tmp_path, data, precision="bf16", **length)
    assert train(first).steps == 16  # 48 pairs, 12 a step
    changes = {"precision": "fp32", "global_batch": 16, "device_batch": 16, "seed": 5}
    with pytest.raises(ConfigError, match="seed = 0, this one has 5.*resume=PATH, step-N or epoch-N"):
        train(clip_run(tmp_path, data, **length, **changes))
    second = clip_run(tmp_path, data, resume="epoch-2", **length, **changes)
    result = train(second)
    rows = lines(second.folder)
    assert result.reason == "done" and result.steps == 12
    assert [row["step"] for row in rows] == [*range(1, 9), *range(7, 13)]  # step 8 of 16 is step 6 of 12
    assert [row["total_samples"] for row in rows] == [*range(12, 97, 12), *range(112, 193, 16)]
    assert rows[8]["lr"] == pytest.approx(3e-3 / 2 * (1 + math.cos(math.pi * 4 / 10)))
    assert abs(rows[8]["loss_gap"] - rows[7]["loss_gap"]) < 1.0
    record = json.load(open(f"{second.folder}/environment.json"))
    (entry,) = record["history"]
    assert entry["asked"] == "epoch-2" and entry["from"].endswith("step-00000008") and entry["data"] == {"epoch": 2, "rows": 96, "seed": 5}
    assert (entry["step"], entry["step_there"], entry["global_batch"], entry["seed"], entry["samples"]) == (6, 8, 16, 5, 96)
    assert [change["precision"] for change in record["precisions"]] == ["bf16", "fp32"]
    parts = ["config.yaml", "environment.json", "export", "metrics.jsonl"]
    assert sorted(os.listdir(f"{second.folder}/checkpoints.before-1")) == [*parts, "step-00000008", "step-00000012", "step-00000016"]
    assert sorted(os.listdir(f"{second.folder}/checkpoints")) == [f"step-{step:08d}" for step in (4, 6, 8, 12)]
    assert train(second).reason == train(second.model_copy(update={"resume": "auto"})).reason == "already done"  # a requeue does not go back again


def test_a_branch_in_a_folder_of_its_own_is_resumed_by_the_same_command(tmp_path, data):
    length = {"steps": 6, "checkpoint": {"save_every": 2}}
    first = clip_run(tmp_path, data, **length)
    train(first)
    path = f"{first.folder}/checkpoints/step-00000002"
    branch = clip_run(tmp_path, data, name="branch", resume=path, seed=3, **length)
    whole = clip_run(tmp_path, data, name="whole", resume=path, seed=3, **length)
    train(whole)

    def stop(row):
        if row["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    assert train(branch, on_log=stop).reason == "interrupted"
    assert train(branch).reason == "done"
    a, b = ([(row["step"], row["loss"]) for row in lines(run.folder)] for run in (whole, branch))
    assert a == b and [step for step, _ in a] == [3, 4, 5, 6] and a != [(row["step"], row["loss"]) for row in lines(first.folder)][2:]
    assert len(os.listdir(f"{first.folder}/checkpoints")) == 3
    (entry,) = json.load(open(f"{branch.folder}/environment.json"))["history"]  # half an epoch in another order: begun anew
    assert (entry["samples_read_again"], entry["samples_left_out"], entry["data"]["epoch"]) == (24, 0, 0)
    with pytest.raises(ConfigError, match="no checkpoint there or before"):
        train(clip_run(tmp_path, data, resume="step-1", **length))


def test_checkpoints_are_written_every_so_many_samples(tmp_path, data):
    saved = []
    train(clip_run(tmp_path, data, steps=7, checkpoint={"save_samples": 30}), on_save=saved.append)
    assert saved == [3, 5, 7]  # 36, 60 and, at the end, 84 samples


@pytest.mark.parametrize(("settings", "at"), [({}, [4, 8]), ({"data__resampled": True, "data__samples_per_epoch": 36}, [3, 6])])
def test_measurements_may_be_counted_in_epochs_virtual_ones_too(tmp_path, data, settings, at):
    run = changed(clip_run(tmp_path, data, steps=8, eval_every=1, eval_unit="epochs"), **settings)
    train(run, on_eval=lambda state: {"step": state.step})
    assert [row["eval_step"] for row in lines(run.folder) if "eval_step" in row] == at


@pytest.mark.slow
def test_a_sharded_model_is_trained_and_encoded_in_turn_on_two_processes():
    """Weights are whole only inside the wrapped forward, so encoding and the temperature's clamp go through it and the optimizer (U48)."""
    alone = json.loads(run_processes("clip_case.py", ["single", "ddp"])[0].splitlines()[-1])
    for output in run_processes("clip_case.py", ["torch", "fsdp"], world=2):
        found = json.loads(output.strip().splitlines()[-1])
        assert found["scale"][1] == pytest.approx(math.log(100), abs=1e-6) and found["scale"][2] < 10
        assert found["encoded"] == pytest.approx(alone["encoded"], rel=1e-4)
        assert found["saved"] == pytest.approx(alone["saved"], rel=1e-3)
        for mine, theirs in zip(found["norms"], alone["norms"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3)
