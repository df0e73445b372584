"""Going back after a spike: nothing on the disk is lost, every step is judged, and what was changed outlives a requeue."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import yaml

from mmkit.storage import Store
from mmkit.training import loop, loss
from mmkit.training.checkpoint import Checkpoint, Checkpoints
from mmkit.training.loop import train
from mmkit.training.stability import events
from tests.training.test_loop import lines, steps_of
from tests.training.tiny_run import tiny_run

CONSTANT = {"lr": 1e-3, "warmup": 0, "schedule": "constant"}
REWIND = {"action": "rewind", "window": 4}
NAN = float("nan")


def run_of(folder, **settings):
    return tiny_run(folder, **{"device_batch": 4, "optimizer": CONSTANT, **settings})


def spoil(monkeypatch, at, factor=NAN):
    """Multiplies the loss of the n-th step that is made, whatever its number, by ``factor``."""
    made, spoilt = [], [False]
    real_step, real_loss = loop.one_step, loss.chunk_loss

    def one_step(state):
        made.append(state.step)
        spoilt[0] = len(made) in at
        row = real_step(state)
        spoilt[0] = False
        return row

    def chunk_loss(*args):
        value, correct = real_loss(*args)
        return (value * factor if spoilt[0] else value), correct

    monkeypatch.setattr(loop, "one_step", one_step)
    monkeypatch.setattr(loss, "chunk_loss", chunk_loss)


def stop_at(step):
    """An on_log that asks the run to stop after ``step``."""
    return lambda row: os.kill(os.getpid(), signal.SIGTERM) if row["step"] == step else None


# ---------------------------------------------------------------- where to


@pytest.mark.parametrize(
    ("saved", "spikes", "target", "kept"),
    [
        ({"save_every": 5, "keep_last": 1}, {7, 10}, 4, [5]),  # step 7, and step 8 of the second try: within a window of the first
        ({"save_every": 0}, {3}, 2, []),  # before anything was saved
    ],
)
def test_a_rewind_with_nothing_to_go_back_to_stops_and_keeps_everything(tmp_path, monkeypatch, saved, spikes, target, kept):
    spoil(monkeypatch, spikes)
    run = run_of(tmp_path, steps=9, checkpoint=saved, stability=REWIND)
    result = train(run)
    assert result.stopped and result.reason == "non-finite loss" and result.export is None
    assert f"no checkpoint of step {target} or earlier is kept" in result.hint and "resume=step-N" in result.hint
    assert (steps_of(run) if kept else []) == kept
    last = events(run.folder)[-1]["decision"]
    assert last["action"] == "stop" and last["message"] == result.hint
    steps = [row["step"] for row in lines(run)]
    assert steps == list(range(1, steps[-1] + 1)) and lines(run)[-1]["loss"] == "nan"  # nothing was started anew
    monkeypatch.undo()
    assert train(run).reason == "done" and [row["step"] for row in lines(run)] == list(range(1, 10))


def test_checkpoints_that_a_rewind_leaves_behind_are_moved_aside_with_the_best_of_them(tmp_path, monkeypatch):
    spoil(monkeypatch, {7, 9})  # step 7: back to 6; step 8 of the second try: back to 4
    best = {"save_every": 2, "keep_last": 9, "best_metric": "eval_error"}
    run = run_of(tmp_path, steps=10, checkpoint=best, stability=REWIND, eval_every=2)
    result = train(run, on_eval=lambda state: {"error": 1.0 if state.step == 6 else 2.0 + state.step})
    assert result.reason == "done" and result.steps == 10
    aside = Path(run.folder, "checkpoints.before-1")
    assert Checkpoint(str(aside / "step-00000006")).verify() is None and (aside / "metrics.jsonl").is_file()
    assert steps_of(run) == [2, 4, 6, 8, 10] and [row["step"] for row in lines(run)] == list(range(1, 11))


def test_a_damaged_checkpoint_to_go_back_to_costs_no_other(tmp_path, monkeypatch):
    spoil(monkeypatch, {7, 9})
    run = run_of(tmp_path, steps=10, checkpoint={"save_every": 2, "keep_last": 9}, stability=REWIND)

    def damage(step):
        if step == 6:
            Path(run.folder, "checkpoints", "step-00000004", "state.json").write_bytes(b"{}")

    with pytest.raises(ValueError, match=r"step-00000004/state.json"):
        train(run, on_save=damage)
    assert steps_of(run) == [2, 4, 6]


# ---------------------------------------------------------------- the save in hand


@pytest.fixture
def held(monkeypatch):
    """Lets no checkpoint get its manifest before this event is set."""
    write, event = Store.write, threading.Event()

    def hold(self, name, data):
        if name.startswith("step-") and name.endswith("manifest.json"):
            assert event.wait(60)
        write(self, name, data)

    monkeypatch.setattr(Store, "write", hold)
    return event


def test_a_rewind_waits_for_the_save_in_hand_and_can_go_back_to_it(tmp_path, monkeypatch, held):
    spoil(monkeypatch, {5})
    wait = Checkpoints.wait

    def release(self):
        if self.thread is not None:
            held.set()
        return wait(self)

    monkeypatch.setattr(Checkpoints, "wait", release)
    stability = REWIND | {"rewind_lr_factor": 0.5}
    run = run_of(tmp_path, steps=6, checkpoint={"save_every": 4, "background": True}, stability=stability)
    assert train(run).reason == "done"
    assert [row["lr"] for row in lines(run)] == [1e-3] * 4 + [5e-4] * 2
    newest = Checkpoint(f"{run.folder}/checkpoints/step-00000006")
    assert newest.state["guard"]["last_target"] == 4 and steps_of(run) == [4, 6]


def test_a_save_in_hand_does_not_outlive_a_run_that_fails(tmp_path, held):
    def fail(row):
        if row["step"] == 3:
            threading.Timer(0.5, held.set).start()
            raise KeyError("of the caller")

    run = run_of(tmp_path, steps=6, checkpoint={"save_every": 2, "background": True})
    with pytest.raises(KeyError):
        train(run, on_log=fail)
    assert steps_of(run) == [2]


def test_a_step_counts_as_saved_once_it_is_on_the_disk(tmp_path, held):
    saved = []

    def look(step):
        assert Path(run.folder, "checkpoints", f"step-{step:08d}", "manifest.json").is_file()
        saved.append(step)

    def free(row):
        if row["step"] == 3:
            assert saved == []
            held.set()

    run = run_of(tmp_path, steps=5, checkpoint={"save_every": 2, "background": True})
    train(run, on_save=look, on_log=free)
    assert saved == [2, 4, 5]


# ---------------------------------------------------------------- every step is judged


@pytest.mark.parametrize("action", ["skip", "stop", "rewind"])
def test_a_log_window_hides_no_step_from_the_guard(tmp_path, monkeypatch, action):
    found = []
    for log_every in (1, 4):
        spoil(monkeypatch, set(range(5, 99)))
        stability = {"action": action, "max_skipped": 3, "window": 8, "max_rewinds": 2}
        settings = {"checkpoint": {"save_every": 1, "keep_last": 99}, "stability": stability}
        if action != "rewind":
            settings["checkpoint"] = {}
        run = run_of(tmp_path / f"{log_every}", steps=20, log_every=log_every, **settings)
        result = train(run)
        decisions = [event["decision"] for event in events(run.folder)]
        found.append((result.reason, result.hint, [(d["step"], d["action"], d["message"], d["keys"]) for d in decisions]))
        assert [event["last_steps"][-1]["step"] for event in events(run.folder)] == [d["step"] for d in decisions]
        monkeypatch.undo()
    assert found[0] == found[1]
    if action == "skip":
        assert [step for step, *_ in found[0][2]] == [5, 6, 7, 8] and found[0][2][-1][1] == "stop"


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_skipped_batch_costs_no_checkpoint(tmp_path, monkeypatch, log_every):
    spoil(monkeypatch, {2, 6, 7})
    run = run_of(tmp_path, steps=9, log_every=log_every, checkpoint={"save_every": 4}, stability={"action": "skip"})
    result = train(run)
    assert result.reason == "done" and steps_of(run) == [4, 8, 9]
    assert [event["decision"]["step"] for event in events(run.folder)] == [2, 6, 7]


def test_a_spike_whose_update_was_applied_is_not_called_skipped(tmp_path, monkeypatch):
    spoil(monkeypatch, {7}, 1000.0)  # the limit is known from the first line on, after this window
    run = run_of(tmp_path, steps=8, log_every=8, stability={"action": "skip", "window": 8})
    train(run)
    (event,) = events(run.folder)
    assert event["decision"]["step"] == 7 and "its update was applied" in event["decision"]["message"]
    assert [row["skipped"] for row in lines(run)] == [False] * 8


# ---------------------------------------------------------------- the precision of a rewind


def precisions(run):
    facts = json.loads(Path(run.folder, "environment.json").read_text())["precisions"]
    return [(entry["step"], entry["precision"]) for entry in facts]


def asked_for(run):
    return yaml.safe_load(Path(run.folder, "config.yaml").read_text())["train"]["precision"]


HALF = {"precision": "bf16", "checkpoint": {"save_every": 2, "keep_last": 9}, "stability": REWIND | {"rewind_precision": "fp32"}}


def test_a_requeue_keeps_the_precision_of_a_rewind_until_another_is_asked_for(tmp_path, monkeypatch):
    spoil(monkeypatch, {5})
    run = run_of(tmp_path, steps=8, **HALF)
    assert train(run, on_log=stop_at(6)).reason == "interrupted"
    states = []
    assert train(run, on_assemble=states.append).reason == "done"
    assert len(states) == 1 and states[0].run.train.precision == states[0].backend.precision == "fp32"
    assert precisions(run) == [(0, "bf16"), (4, "fp32")] and asked_for(run) == "bf16"
    other = HALF | {"precision": "tf32"}
    train(run_of(tmp_path, steps=10, **other), on_log=stop_at(9))
    assert precisions(run) == [(0, "bf16"), (4, "fp32"), (8, "tf32")] and asked_for(run) == "tf32"
    train(run_of(tmp_path, steps=11, **other))
    assert precisions(run)[-1] == (8, "tf32") and len(precisions(run)) == 3


def test_another_precision_holds_though_the_run_ends_before_its_first_checkpoint(tmp_path, monkeypatch):
    spoil(monkeypatch, {5})
    train(run_of(tmp_path, steps=6, **HALF))
    run = run_of(tmp_path, steps=9, **HALF | {"precision": "tf32"})

    def fail(row):
        raise KeyError("before anything is saved")

    for _ in range(2):
        with pytest.raises(KeyError):
            train(run, on_log=fail)
        assert precisions(run)[-1] == (6, "tf32")


def test_a_requeued_resume_by_name_goes_on_in_the_precision_of_its_rewind(tmp_path, monkeypatch):
    train(run_of(tmp_path, steps=4, **HALF))
    spoil(monkeypatch, {4})  # step 6
    run = run_of(tmp_path, steps=9, resume="step-2", **HALF)
    assert train(run, on_log=stop_at(7)).reason == "interrupted"
    assert train(run).reason == "done"
    assert precisions(run) == [(0, "bf16"), (4, "fp32")]
    assert [row["step"] for row in lines(run)] == list(range(1, 10))
    assert len(json.loads(Path(run.folder, "environment.json").read_text())["history"]) == 1
