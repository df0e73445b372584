"""One folder, one training: what a second run of the same name takes over, tells, refuses; and that nothing stale is taken for its result."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml

from mmkit import folder_lock
from mmkit.config import ConfigError, RunConfig, changed
from mmkit.errors import Unusable, writing
from mmkit.evaluation.scoring import export_of
from mmkit.launch.launch import launch
from mmkit.launch.preflight import plan_of, preflight
from mmkit.notebook.record import read_record, record
from mmkit.storage import Store
from mmkit.training import exporting, same_run
from mmkit.training.checkpoint import Checkpoint, CheckpointError, _own_hash
from mmkit.training.loop import train
from mmkit.training.same_run import CLASSES, FIXED, FREE, NAMED, PLACE, TOLD, class_of, differences
from mmkit.values import names_of
from tests.training.tiny_run import MODEL, sourced, tiny_run

LORA = {"rank": 2, "alpha": 4, "dropout": 0.1, "targets": ["q_proj", "v_proj"]}


def optimizer(**settings):
    return {"optimizer": {"lr": 1e-3, "warmup": 0, "schedule": "cosine"} | settings}


def newest(run) -> Checkpoint:
    return Checkpoint(str(sorted(Path(run.folder, "checkpoints").glob("step-*"))[-1]))


def exported(folder) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(Path(folder, "model.safetensors"))


def holds(export, run) -> bool:
    """Whether an export holds the trained tensors of the run's newest checkpoint."""
    read, found = newest(run), exported(export)
    return all(torch.equal(found[name], read.get(name)["param"]) for name in read.names())


def lines(run):
    return [json.loads(line) for line in Path(run.folder, "metrics.jsonl").read_text().splitlines()]


def stop_at(step):
    return lambda row: os.kill(os.getpid(), signal.SIGTERM) if row["step"] == step else None


# ---------------------------------------------------------------- which settings are compared


def leaves() -> list[str]:
    names = names_of(RunConfig)
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


def test_every_setting_is_in_one_class_and_a_new_one_is_compared():
    assert set(CLASSES) <= set(names_of(RunConfig)), "CLASSES names a setting there is not"
    assert set(CLASSES.values()) == {FREE, PLACE, TOLD, NAMED, FIXED}
    by_class = {kind: {name for name in leaves() if class_of(name) == kind} for kind in (FREE, PLACE, TOLD, NAMED, FIXED)}
    assert sum(map(len, by_class.values())) == len(leaves())
    assert {"seed", "train.global_batch", "train.optimizer.lr", "train.optimizer.lr_of", "train.optimizer.weight_decay", "data.sources",
            "train.optimizer.schedule", "train.stability.action", "train.contrastive.kind", "data.pack", "train.lora.dropout"} <= by_class[NAMED]  # fmt: skip
    assert by_class[TOLD] == {"train.steps", "train.epochs", "train.precision"}
    fixed = ("model.", "train.lora.", "train.trainable", "train.new_tokens", "train.bits", "train.optimizer.kind")
    assert all(name.startswith(fixed) for name in by_class[FIXED])
    assert class_of("train.optimizer.a_setting_of_tomorrow") == class_of("data.tomorrow") == NAMED and class_of("train.lora.tomorrow") == FIXED


def test_what_steers_a_plateau_is_compared_only_there(tmp_path):
    plain = tiny_run(tmp_path)
    plateau = tiny_run(tmp_path, **optimizer(schedule="plateau"))
    for name in same_run.WATCHED:
        assert (class_of(name, plain), class_of(name, plateau)) == (FREE, NAMED)


def test_the_same_settings_spelled_otherwise_do_not_differ(tmp_path):
    lora = LORA | {"components": ["language", "encoders"]}
    run = tiny_run(tmp_path, lora=lora, trainable=["connector", "samplers"], **optimizer(lr_of={"connector": 1e-3, "samplers": 2e-3}))
    turned = lora | {"targets": lora["targets"][::-1], "components": lora["components"][::-1]}
    other = tiny_run(tmp_path, lora=turned, trainable=["samplers", "connector"], start_from="elsewhere", log_every=5, **optimizer(lr_of={"samplers": 2e-3}))
    source = other.data.sources[0].model_copy(update={"path": "/moved/data.json", "images": "/moved"})
    other = changed(other, data__sources=(source,), root="/moved/runs", device_batch=1)
    assert differences(run.model_dump(mode="json"), other) == []
    assert [each.path for each in differences(run.model_dump(mode="json"), changed(other, lr=2e-3))] == ["train.optimizer.lr", "train.optimizer.lr_of.samplers"]


# ---------------------------------------------------------------- same name, other settings


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    run = tiny_run(folder, steps=2)
    train(run)
    return folder, run


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (optimizer(lr=1e-4), "train.optimizer.lr = 0.001, this one has 0.0001"),
        (optimizer(schedule="linear"), "train.optimizer.schedule = 'cosine', this one has 'linear'"),
        (optimizer(weight_decay=0.1), "train.optimizer.weight_decay = 0.0, this one has 0.1"),
        (optimizer(lr_of={"connector": 1e-4}), "train.optimizer.lr_of.connector = None, this one has 0.0001"),
        ({"stability": {"action": "skip"}}, "train.stability.action = 'stop', this one has 'skip'"),
        ({"trainable": ["connector"]}, "train.trainable = .*this one has"),
        ({"trainable": ["connector"], "lora": LORA}, "train.lora = None, this one has"),
        ({"seed": 1}, "seed = 0, this one has 1"),
    ],
)
def test_a_finished_run_with_another_setting_is_refused_and_left_as_it_is(finished, settings, told):
    folder, run = finished
    before = {path: path.read_bytes() for path in Path(run.folder).rglob("*") if path.is_file()}
    other = tiny_run(folder, **{"steps": 2} | settings)
    for starts in (train, preflight):
        with pytest.raises(ConfigError, match=rf"finished before at step 2 \(nothing was trained now\), with .*{told}.*: give it another name .*resume=never"):
            starts(other)
    assert {path: path.read_bytes() for path in Path(run.folder).rglob("*") if path.is_file()} == before


def test_other_data_under_the_same_source_name_is_refused_and_moved_data_is_not(tmp_path):
    run = tiny_run(tmp_path, steps=1)
    train(run)
    copy = tmp_path / "copy.json"
    records = json.loads((tmp_path / "data.json").read_text())
    copy.write_bytes((tmp_path / "data.json").read_bytes())
    moved = changed(tiny_run(tmp_path, steps=2), data__sources=(run.data.sources[0].model_copy(update={"path": str(copy)}),))
    assert train(moved).reason == "done"
    copy.write_text(json.dumps(records[::-1]))
    further = changed(moved, train__steps=3)
    with pytest.raises(ValueError, match="changed: source made"):
        train(further)
    assert train(changed(further, resume="step-2")).steps == 3  # by name other data may be gone on with
    assert newest(run).state["history"][-1]["from"].endswith("step-00000002")


def test_steps_may_change_and_the_learning_rates_are_told_and_recorded(tmp_path, caplog):
    first = tiny_run(tmp_path, steps=4)
    train(first)
    last = lines(first)[-1]["lr"]
    longer = tiny_run(tmp_path, steps=8)
    shown = str(launch(longer))
    (entry,) = newest(longer).state["history"]
    assert entry["step"] == 4 and entry["changes"]["train.steps"] == [4, 8]
    assert entry["lr"] == pytest.approx([last, lines(longer)[4]["lr"]]) and lines(longer)[4]["lr"] > 2 * last
    said = f"from step 4 on: train.steps 4 -> 8.*learning rate {last:.4g} before, {lines(longer)[4]['lr']:.4g} then"
    assert re.search(said, caplog.text) and re.search(said, shown) and "4 steps in" in shown and "8 in all" in shown
    assert yaml.safe_load(Path(longer.folder, "config.yaml").read_text())["train"]["steps"] == 8
    fewer = tiny_run(tmp_path, steps=6)
    result = train(fewer)
    assert (result.reason, result.steps) == ("already done", 8) and "step 8 of 6; nothing was trained" in result.hint
    assert "finished before at step 8 of 6; nothing was trained; give it another name" in str(launch(fewer))
    assert yaml.safe_load(Path(longer.folder, "config.yaml").read_text())["train"]["steps"] == 8


def test_steps_that_equal_the_epochs_are_the_same_run(tmp_path, caplog):
    run = tiny_run(tmp_path, steps=None, epochs=1)
    assert train(run, on_log=stop_at(1)).reason == "interrupted"
    caplog.clear()
    assert train(tiny_run(tmp_path, steps=3)).steps == 3
    state = newest(run).state
    assert state["total_steps"] == 3 and state["history"] == [] and "learning rate" not in caplog.text


def test_a_named_checkpoint_may_be_resumed_with_other_settings_and_each_change_is_recorded(tmp_path):
    run = tiny_run(tmp_path, steps=4, checkpoint={"save_every": 1, "keep_last": 9})
    train(run)
    record("02_pretrain", run, {"loss": 1.0})
    old = exported(f"{run.folder}/export")
    more = {"checkpoint": {"save_every": 1, "keep_last": 9}, "stability": {"action": "skip"}, **optimizer(lr=1e-2, weight_decay=0.1)}
    branch = tiny_run(tmp_path, steps=4, resume="step-2", **more)
    assert train(branch).reason == "done" and holds(f"{run.folder}/export", run)
    (entry,) = newest(run).state["history"]
    assert (entry["step"], entry["changes"]) == (2, {
        "train.optimizer.lr": [1e-3, 1e-2], "train.optimizer.weight_decay": [0.0, 0.1], "train.stability.action": ["stop", "skip"],
    })  # fmt: skip
    aside = Path(run.folder, "checkpoints.before-1")
    assert {"export", "config.yaml", "metrics.jsonl", "record-02_pretrain.json", "step-00000003", "step-00000004"} <= {p.name for p in aside.iterdir()}
    assert all(torch.equal(old[name], tensor) for name, tensor in exported(aside / "export").items())
    assert yaml.safe_load((aside / "config.yaml").read_text())["train"]["optimizer"]["lr"] == 1e-3 and not read_record("02_pretrain", run)
    assert train(branch).reason == train(changed(branch, resume="auto")).reason == "already done"
    before = {path: path.read_bytes() for path in Path(run.folder).rglob("*") if path.is_file() and path.name != ".in-use"}
    with pytest.raises(ConfigError, match=r"'step-4' is at step 4 of 4, so nothing would be trained with train.optimizer.lr = 0.5: raise train.steps"):
        train(changed(branch, resume="step-4", train__optimizer__lr=0.5))
    assert {path: path.read_bytes() for path in before} == before
    assert train(changed(branch, train__optimizer__lr=1e-4)).reason == "done"  # the same name with yet another rate branches again
    assert [each["changes"]["train.optimizer.lr"] for each in newest(run).state["history"]] == [[1e-3, 1e-4]]
    with pytest.raises(ConfigError, match=r"model.connector.width = 16, this one has 32: give it another name \(name=...\), or start anew with resume=never$"):
        train(changed(branch, model=MODEL | {"connector": MODEL["connector"] | {"width": 32}}))


def test_a_checkpoint_named_as_the_end_is_the_end(tmp_path):
    run = tiny_run(tmp_path, steps=3, checkpoint={"save_every": 1, "keep_last": 9})
    train(run)
    assert train(tiny_run(tmp_path, steps=2, resume="step-2", checkpoint={"save_every": 1, "keep_last": 9})).steps == 2
    assert holds(f"{run.folder}/export", run) and newest(run).step == 2
    assert export_of(changed(run, stage="eval")) == f"{run.folder}/export"


def test_a_run_that_left_no_checkpoint_holds_nobody_to_its_settings(tmp_path):
    broken = tiny_run(tmp_path, steps=4, **optimizer(lr=1e30))
    assert train(broken).reason == "non-finite loss"
    assert train(tiny_run(tmp_path, steps=1)).reason == "done"


def test_a_folder_of_an_older_version_is_compared_by_its_config(tmp_path):
    run = tiny_run(tmp_path, steps=1)
    train(run)
    folder = Path(run.folder, "checkpoints", "step-00000001")
    state = json.loads((folder / "state.json").read_text())
    for name in ("settings", "started"):
        del state[name]
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    data = (folder / "state.json").read_bytes()
    manifest["files"]["state.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": _own_hash(manifest)}))
    file = Path(run.folder, "config.yaml")
    tree = yaml.safe_load(file.read_text())
    del tree["train"]["stability"], tree["model"]["image_fit"], tree["train"]["optimizer"]["betas"]
    tree["train"]["forgotten"], tree["model"]["encoders"][0]["gone"] = 1, 2  # settings there are no more
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match="train.optimizer.lr = 0.001, this one has 0.01:"):
        train(tiny_run(tmp_path, steps=2, **optimizer(lr=1e-2)))
    assert train(tiny_run(tmp_path, steps=2)).steps == 2


# ---------------------------------------------------------------- nothing stale


def test_after_a_retrain_the_export_is_the_model_just_trained_and_the_next_stage_starts_from_it(tmp_path):
    first = tiny_run(tmp_path, steps=2)
    train(first)
    old, kept = exported(f"{first.folder}/export"), Path(first.folder, "checkpoints.before-1")
    scores = Store(f"{first.root}/{first.preset}/eval/default")
    scores.write("results.json", json.dumps({"tasks": {}, "export": f"{first.folder}/export"}).encode())
    record("02_pretrain", first, {"loss": 1.0})
    tune = {"stage": "finetune", "steps": 2, "trainable": ["connector", "samplers"]}
    train(tiny_run(tmp_path, **tune))

    again = tiny_run(tmp_path, steps=2, resume="never", **optimizer(lr=0.5))
    result = train(again)
    new = exported(result.export)
    assert result.reason == "done" and holds(result.export, again)
    assert any(not torch.equal(old[name], new[name]) for name in old)
    assert all(torch.equal(old[name], tensor) for name, tensor in exported(kept / "export").items())
    assert {"export", "config.yaml", "environment.json", "metrics.jsonl", "record-02_pretrain.json"} <= {p.name for p in kept.iterdir()}
    assert yaml.safe_load((kept / "config.yaml").read_text())["train"]["optimizer"]["lr"] == 1e-3
    assert not read_record("02_pretrain", again) and scores.size("results.json") is None and scores.size("before-1/results.json")

    # what was tuned from the old weights is not passed off as tuned from the new ones
    for starts in (train, preflight):
        with pytest.raises(CheckpointError, match="was trained from other weights than .* holds now .*trained anew.*resume=never"):
            starts(tiny_run(tmp_path, **tune))
    score = changed(again, stage="eval")
    with pytest.raises(ConfigError, match="finetune/default was trained from other weights than .*anew since.*start_from="):
        export_of(score)
    stale = f"{first.root}/{first.preset}/finetune/default/export"
    assert export_of(changed(score, start_from=stale)) == stale  # named, it is taken as it is
    tuned = train(tiny_run(tmp_path, resume="never", **tune | {"steps": 1}, **optimizer(lr=1e-9)))
    end = exported(tuned.export)
    assert export_of(score) == tuned.export
    assert all(torch.allclose(new[name], end[name], atol=1e-7) for name in new) and not torch.allclose(old["connector.queries"], end["connector.queries"])


def test_an_export_of_other_weights_at_the_same_step_is_written_anew(tmp_path):
    run = tiny_run(tmp_path, steps=1)
    export = Path(train(run).export)
    touched = (export / "model.safetensors").stat().st_mtime_ns
    train(run)
    assert (export / "model.safetensors").stat().st_mtime_ns == touched
    tensors = exported(export)
    safetensors.torch.save_file(tensors | {"connector.queries": tensors["connector.queries"] + 1}, export / "model.safetensors")
    assert train(run).reason == "already done" and holds(export, run)
    facts = json.loads((export / "training.json").read_text())
    facts["trained"] = dict.fromkeys(facts["trained"], "float32:of another training")
    (export / "training.json").write_text(json.dumps(facts))
    train(run)
    assert json.loads((export / "training.json").read_text())["trained"] != facts["trained"]


def test_an_export_that_does_not_hold_what_was_trained_is_never_under_its_name(tmp_path, monkeypatch):
    run = tiny_run(tmp_path, steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "other_in_files", lambda folder, trained: list(trained)[:1])
        with pytest.raises(ValueError, match="does not hold what was trained"):
            train(run)
    assert {path.name for path in Path(run.folder).iterdir() if path.is_dir()} == {"checkpoints"}
    with pytest.raises(ConfigError, match="has made all its 1 steps but has no export"):
        train(tiny_run(tmp_path, stage="finetune", steps=1))
    assert train(run).reason == "already done" and holds(f"{run.folder}/export", run)


def test_a_second_run_of_one_name_at_the_same_time_is_refused(tmp_path):
    run, told = tiny_run(tmp_path, steps=4, checkpoint={"save_every": 1}), []

    def second(row):
        if row["step"] == 2:
            for resume in ("auto", "never"):
                with pytest.raises(ConfigError, match=rf"is in use: process {os.getpid()} on .* trains in it") as error:
                    train(changed(run, resume=resume))
                told.append(error.value)
            assert train(changed(run, name="other")).reason == "done"

    assert train(run, on_log=second).reason == "done" and len(told) == 2
    assert [row["step"] for row in lines(run)] == [1, 2, 3, 4] and holds(f"{run.folder}/export", run)
    assert train(run).reason == "already done"  # nobody holds it any more


def test_a_training_that_was_taken_over_from_writes_no_more_checkpoints(tmp_path):
    run = tiny_run(tmp_path, steps=4, checkpoint={"save_every": 2, "keep_last": 9})

    def taken_over(row):
        if row["step"] == 3:  # the machine slept, and another host went on
            other = {"id": "other", "pid": 7, "host": "gpu03", "system": "gpu03", "renewed": time.time()}
            Store(run.folder).write(folder_lock.NAME, json.dumps(other).encode())

    with pytest.raises(ConfigError, match="was taken over by process 7 on gpu03, .* nothing more is written here"):
        train(run, on_log=taken_over)
    assert [path.name for path in Path(run.folder, "checkpoints").iterdir()] == ["step-00000002"]
    assert json.loads(Store(run.folder).read(folder_lock.NAME))["id"] == "other"
    with pytest.raises(ConfigError, match="is in use: process 7 on gpu03"):
        train(run)


def test_a_requeued_job_that_began_anew_goes_on_and_another_job_begins_anew(tmp_path, monkeypatch):
    train(tiny_run(tmp_path, steps=2, **optimizer(lr=0.1)))
    run = tiny_run(tmp_path, steps=6, resume="never", checkpoint={"save_every": 1})
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert train(run, on_log=stop_at(2)).reason == "interrupted"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train(run).reason == "done" and [row["step"] for row in lines(run)] == [1, 2, 3, 4, 5, 6]
    asides = lambda: sorted(path.name for path in Path(run.folder).glob("checkpoints.before-*"))  # noqa: E731
    assert asides() == ["checkpoints.before-1"]
    monkeypatch.setenv("SLURM_JOB_ID", "8")  # requeued before it wrote anything
    assert train(run, on_log=stop_at(1)).reason == "interrupted" and asides() == ["checkpoints.before-1", "checkpoints.before-2"]


@pytest.mark.parametrize("fails_at", range(1, 6))
def test_a_disk_that_fails_while_a_training_is_set_aside_loses_nothing_of_it(tmp_path, monkeypatch, fails_at):
    run = tiny_run(tmp_path, steps=2, checkpoint={"save_every": 1, "keep_last": 9})
    train(run)
    kept = {path.name: path.read_bytes() for path in Path(run.folder).rglob("*") if path.is_file() and path.suffix}
    move, n = Store.move, [0]

    def failing(self, name, to):
        n[0] += 1
        if n[0] == fails_at:
            with writing(self.path(to), "root=FOLDER"):
                raise OSError(errno.ENOSPC, "No space left on device")
        move(self, name, to)

    anew = changed(run, resume="never", train__optimizer__lr=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "move", failing)
        with pytest.raises(Unusable, match="No space left"):
            train(anew)
    found = {path.name: path.read_bytes() for path in Path(run.folder).rglob("*") if path.is_file() and path.suffix}
    assert found == kept
    assert train(changed(anew, resume="auto") if fails_at > 2 else anew).reason == "done" and holds(f"{run.folder}/export", anew)


def test_an_unfinished_stage_is_no_start_for_the_next_and_not_scored(tmp_path):
    run, tune = tiny_run(tmp_path, steps=8), tiny_run(tmp_path, stage="finetune", steps=1)
    score = changed(run, stage="eval")
    train(run, on_log=stop_at(1))
    for what in (lambda: train(tune), lambda: preflight(tune), lambda: export_of(score), lambda: preflight(score)):
        with pytest.raises(ConfigError, match=r"is unfinished: at step \d of 8; finish it with: mmkit train --model test --stage pretrain"):
            what()
    assert "is unfinished: at step" in str(preflight(changed(tune, dry_run=True)))
    train(run)
    assert preflight(tune) and export_of(score) == f"{run.folder}/export"
    train(tiny_run(tmp_path, steps=12), on_log=stop_at(9))
    with pytest.raises(ConfigError, match=r"is unfinished: at step \d+ of 12"):
        train(tune)
    assert train(changed(tune, start_from=f"{run.folder}/export")).reason == "done"  # the export itself, by name
    train(changed(tune, train__steps=5, start_from=f"{run.folder}/export"), on_log=stop_at(2))
    with pytest.raises(ConfigError, match="finetune/default is unfinished"):  # the earlier stage is no stand-in
        export_of(score)


@pytest.mark.parametrize("stage", ["finetune", "eval"])
def test_a_missing_stage_is_seen_before_any_work_and_told_in_a_dry_run(tmp_path, monkeypatch, stage):
    run = changed(tiny_run(tmp_path, name="mine"), stage=stage, evaluation__tasks=("easy_vqa",))
    makes = "finetune" if stage == "eval" else "pretrain"
    monkeypatch.setattr("mmkit.launch.preflight.data_rows", lambda run: ([], None))
    command = f"mmkit train --model test --stage {makes} --name mine"
    with pytest.raises(ConfigError, match=f": {command}"):
        preflight(run)
    assert command in str(preflight(changed(run, dry_run=True)))  # in the table of what is missing
    monkeypatch.setattr("mmkit.models.exports.in_notebook", lambda: True)
    number = {"pretrain": "02", "finetune": "03"}[makes]
    with pytest.raises(ConfigError, match=f"run {number}_{makes} with model='test', name='mine', root=.*, or .*{command}"):
        preflight(run)


# ---------------------------------------------------------------- what cannot be exported


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_that_lie_nowhere_are_refused_before_training(tmp_path, bits):
    settings = {"bits": bits, "lora": LORA | {"dropout": 0.0}, "trainable": ["connector"]}
    run = tiny_run(tmp_path, **settings)
    for starts in (train, preflight, plan_of, lambda run: preflight(changed(run, dry_run=True))):
        with pytest.raises(ConfigError, match=f"train.bits {bits} with model.language.source 'random' cannot be exported"):
            starts(run)
    assert not Path(run.folder).exists()
    pytest.importorskip("bitsandbytes")
    (tmp_path / "files").mkdir()
    assert train(tiny_run(tmp_path, steps=1, model=sourced(tmp_path / "files"), **settings)).export


# ---------------------------------------------------------------- what is recorded


def test_the_record_of_a_resumed_run_is_of_the_whole_and_a_repeat_leaves_it(tmp_path):
    run = tiny_run(tmp_path, steps=20)
    first = launch(run, on_log=stop_at(3))
    assert first.stopped and first.made == first.steps in (3, 4)
    second = launch(run)
    assert (second.steps, second.made) == (20, 20 - first.steps) and f"{second.made} steps in" in str(second) and "20 in all" in str(second)
    numbers, rows = second.numbers(), lines(run)
    assert numbers["test_pretrain_steps"] == 20 and numbers["test_pretrain_loss"] == rows[-1]["loss"]
    assert numbers["test_pretrain_loss_last_tenth"] == pytest.approx((rows[-1]["loss"] + rows[-2]["loss"]) / 2)
    assert numbers["test_pretrain_seconds"] == pytest.approx(sum(r["seconds"] + r.get("save_seconds", 0) for r in rows), abs=0.06)
    third = launch(run)
    assert third.made == 0 and third.numbers() == numbers and "nothing was trained" in str(third)
    record("02_pretrain", run, numbers)
    record("02_pretrain", changed(run, dry_run=True), launch(changed(run, dry_run=True)).numbers())
    assert read_record("02_pretrain", run)["results"] == numbers


def test_a_run_config_of_this_version_is_its_own_equal(tmp_path):
    run = tiny_run(tmp_path)
    assert differences(json.loads(run.model_dump_json()), RunConfig.model_validate(run.model_dump())) == []
