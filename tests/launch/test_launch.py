"""Where a run starts, what is watched, and how it stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest

from mmkit.config import ConfigError, load
from mmkit.errors import InputError
from mmkit.launch import launch as launching
from mmkit.launch.launch import LaunchError, child_command, child_environment, evaluation_of, follow, is_worker, launch, read_metrics

VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "PJRT_DEVICE", "MMKIT_WORKER", "TPU_NAME")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def a_run(tmp_path: Path, **overrides):
    return load("8b-debug", "pretrain", {"root": str(tmp_path), "backend.kind": "single", **overrides})


def test_one_process_trains_in_the_kernel_and_several_in_a_torchrun_child(tmp_path):
    assert child_command(a_run(tmp_path)) is None
    command = child_command(a_run(tmp_path, **{"backend.kind": "torch", "backend.processes": 2}))
    assert command[1:4] == ["-m", "torch.distributed.run", "--standalone"] and "--nproc-per-node=2" in command


def test_deepspeed_with_one_process_stays_in_the_kernel(tmp_path):
    assert child_command(a_run(tmp_path, **{"backend.kind": "deepspeed"})) is None


def test_xla_gets_a_child_with_its_variables_set_before_any_import(tmp_path):
    run = a_run(tmp_path, **{"backend.kind": "xla", "backend.xla_devices": 2})
    assert child_command(run)[1:] == ["-m", "mmkit", "train"]
    assert child_environment(run) == {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    assert child_environment(a_run(tmp_path)) == {}


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [({"PJRT_DEVICE": "TPU"}, {}), ({"TPU_NAME": "pod"}, {"PJRT_DEVICE": "TPU"}), ({"PJRT_DEVICE": "CPU", "TPU_NAME": "pod"}, {"CPU_NUM_DEVICES": "16"})],
)
def test_devices_that_are_there_are_not_replaced_by_virtual_ones(tmp_path, monkeypatch, environment, wanted):
    monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert child_environment(a_run(tmp_path, **{"backend.kind": "xla", "backend.xla_devices": 16, "global_batch": 32})) == wanted


def test_several_machines_are_left_to_their_scheduler(tmp_path):
    with pytest.raises(ConfigError, match="--target slurm"):
        child_command(a_run(tmp_path, **{"backend.kind": "torch", "backend.nodes": 2}))


@pytest.mark.parametrize(
    ("variables", "worker"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),  # a kernel in which one DeepSpeed process ran
        ({"RANK": "1"}, True),  # incomplete: training says what is missing
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, False),  # a batch script with -n 4: its tasks are not started yet
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, False),  # srun -n1 --pty bash
        ({"WORLD_SIZE": "4"}, False), ({"LOCAL_RANK": "0"}, False),  # left by a library
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True), ({"PMI_RANK": "1", "PMI_SIZE": "4"}, True), ({"MV2_COMM_WORLD_SIZE": "1"}, False),
        ({"MMKIT_WORKER": "1"}, True),
    ],
)
def test_a_process_knows_whether_it_was_started_as_a_worker(monkeypatch, variables, worker):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_worker() is worker


def test_a_kernel_that_holds_the_devices_is_told_before_a_child_starts(tmp_path, monkeypatch):
    held = types.SimpleNamespace(_XLAC=types.SimpleNamespace(_xla_runtime_is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch_xla", held)
    monkeypatch.setattr(launching.subprocess, "Popen", lambda *a, **k: pytest.fail("a child was started"))
    with pytest.raises(ConfigError, match="restart the kernel"):
        launch(a_run(tmp_path, **{"backend.kind": "xla", "backend.xla_devices": 2}))


def test_follow_gives_whole_lines_once_and_waits_for_the_rest(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = follow(path)
    assert next(lines) == []
    path.write_text('{"step": 1}\n{"step": 2')
    assert next(lines) == [{"step": 1}]
    with path.open("a") as file:
        file.write("}\n")
    assert next(lines) == [{"step": 2}] and next(lines) == []
    path.write_text('{"step": 1}\n')  # shorter than before: begun anew
    assert next(lines) == [{"step": 1}]
    assert list(next(follow(path, from_end=True))) == []


WORKER = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1]); folder.mkdir(parents=True, exist_ok=True)
stop = []
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
for step in range(1, 400):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "loss": 1 / step}) + "\\n")
    if stop:
        (folder / "checkpoints").mkdir(exist_ok=True); break
    if step == int(sys.argv[2]):
        break
    time.sleep(0.05)
"""


def fake_command(tmp_path: Path, run, steps: int) -> list[str]:
    """A stand-in for torchrun: writes metrics, and on SIGINT a checkpoint."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return [sys.executable, str(script), run.folder, str(steps)]


def test_metrics_of_a_child_arrive_one_by_one(tmp_path, monkeypatch):
    run = a_run(tmp_path, **{"backend.kind": "torch", "backend.processes": 2})
    monkeypatch.setattr(launching, "child_command", lambda run: fake_command(tmp_path, run, 5))
    seen = []
    result = launch(run, on_log=seen.append)
    assert [record["step"] for record in seen] == [1, 2, 3, 4, 5]
    assert result.steps == 5 and result.last["loss"] == 0.2 and not result.stopped and "5 steps" in str(result)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_becomes_a_checkpoint_and_a_clean_end(tmp_path, monkeypatch, capsys, name):
    run = a_run(tmp_path, **{"backend.kind": "torch", "backend.processes": 2})
    monkeypatch.setattr(launching, "child_command", lambda run: fake_command(tmp_path, run, 399))
    seen = []

    def on_log(record):
        seen.append(record)
        if len(seen) == 3:
            os.kill(os.getpid(), getattr(signal, name))

    result = launch(run, on_log=on_log)
    assert result.stopped and Path(result.folder, "checkpoints").is_dir() and result.steps < 399
    assert "stopping after the step in hand" in capsys.readouterr().out


WRONG = """
import sys
import mmkit.launch.launch as launching
from mmkit.cli import main
from mmkit.config import ConfigError

def wrong(run):
    raise ConfigError("two settings are wrong:\\n  lr = 'fast'\\n  steps = -1")

launching.launch = wrong
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_a_child_that_dies_shows_its_last_lines_and_a_users_error_its_whole_message(tmp_path, monkeypatch):
    run = a_run(tmp_path, **{"backend.kind": "torch", "backend.processes": 2})
    for code, kind, words in (
        ("print('before'); raise RuntimeError('boom')", LaunchError, r"before\n(.*\n)*RuntimeError: boom"),
        (WRONG, InputError, r"^two settings are wrong:\n  lr = 'fast'\n  steps = -1$"),
    ):
        monkeypatch.setattr(launching, "child_command", lambda run, code=code: [sys.executable, "-c", code])
        with pytest.raises(kind, match=words):
            launch(run)


def test_the_tree_below_a_child_is_ended(tmp_path):
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    grandchildren = psutil.Process(child.pid).children()
    launching.end_tree(child.pid)
    child.wait()
    assert not [each for each in grandchildren if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    launching.end_tree(child.pid)  # safe to repeat


LAUNCHER = """
import sys
from mmkit.config import load
from mmkit.launch.launch import launch
settings = {"root": sys.argv[1], "steps": 100000, "device_batch": 8, "backend.kind": "torch", "backend.processes": 2}
launch(load("clip-vit-l-14-debug", "pretrain", settings))
"""


def test_no_training_process_outlives_a_launcher_killed_with_9(tmp_path):
    """Torchrun and two ranks below it, which no signal of the launcher reaches any more; what was trained is saved."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.DEVNULL)
    below: list[psutil.Process] = []
    try:
        [metrics] = waited(lambda: list(tmp_path.rglob("metrics.jsonl")))
        waited(metrics.read_text)
        below = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
        launcher.wait()
        assert len(below) >= 3
        assert psutil.wait_procs(below, timeout=90)[1] == []
        assert [path for path in tmp_path.rglob("step-*") if path.is_dir()], "the last checkpoint"
    finally:
        for process in [each for each in below if each.is_running()]:
            process.kill()
        launcher.kill()


def waited(found, seconds: float = 120.0):
    """What ``found`` returns once it is something."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
    return value


def test_a_dry_run_starts_nothing(tmp_path):
    result = launch(a_run(tmp_path, dry_run=True))
    assert result.steps == 0 and "dry run" in str(result) and not Path(result.run.folder).exists()


def test_read_metrics_of_a_run_that_is_still_writing(tmp_path):
    stop = threading.Event()

    def write():
        with (tmp_path / "metrics.jsonl").open("a") as file:
            for step in range(1, 200):
                file.write(json.dumps({"step": step}) + "\n")
                file.flush()
                if stop.is_set():
                    return
                time.sleep(0.005)

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.1)
    found = read_metrics(tmp_path)
    stop.set()
    writer.join()
    assert [record["step"] for record in found] == list(range(1, len(found) + 1)) and found
    assert read_metrics(tmp_path / "none") == []


def test_a_worker_trains_in_place_and_passes_the_records_on(tmp_path, monkeypatch):
    called = []
    fake = types.ModuleType("mmkit.training.loop")
    fake.train = lambda run, on_log=None: called.append((run, on_log))
    monkeypatch.setitem(sys.modules, "mmkit.training.loop", fake)
    monkeypatch.setenv("MMKIT_WORKER", "1")
    run = a_run(tmp_path, **{"backend.kind": "torch", "backend.processes": 2})
    launch(run, on_log=print)
    assert called == [(run, print)] and os.environ["MMKIT_WORKER"] == "1"


def test_a_contrastive_run_is_scored_while_it_trains(tmp_path):
    settings = {"root": str(tmp_path), "eval_every": 2, "evaluation.tasks": ["clip_retrieval"], "steps": 2}
    result = launch(load("clip-vit-l-14-debug", "pretrain", settings))
    rows = read_metrics(result.folder)
    assert [any(name.startswith("eval_clip_retrieval") for name in row) for row in rows] == [False, True]
    assert 0 <= rows[1]["eval_clip_retrieval_image_to_text_R@5"] <= 1
    with pytest.raises(ConfigError, match="did you mean 'clip_retrieval'"):
        launch(load("clip-vit-l-14-debug", "pretrain", settings | {"evaluation.tasks": ["clip_retrival"], "name": "other"}))
    assert evaluation_of(a_run(tmp_path, eval_every=2)) is None


def test_a_set_that_is_not_here_is_left_out_of_training_with_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MMKIT_EVAL_DATA", str(tmp_path / "sets"))
    settings = {"root": str(tmp_path), "eval_every": 2, "evaluation.tasks": ["imagenet1k", "clip_retrieval"], "steps": 4}
    result = launch(load("clip-vit-l-14-debug", "pretrain", settings))
    rows = read_metrics(result.folder)
    assert [any(name.startswith("eval_clip_retrieval") for name in row) for row in rows] == [False, True, False, True]
    warnings = [record.getMessage() for record in caplog.records if "not measured while training" in record.getMessage()]
    assert len(warnings) == 1 and "imagenet1k (" in warnings[0] and "wds_imagenet1k" in warnings[0]
    alone = settings | {"evaluation.tasks": ["imagenet1k"], "name": "alone", "eval_every": 1, "eval_unit": "epochs"}
    result = launch(load("clip-vit-l-14-debug", "pretrain", alone))  # as the published preset where the set is absent
    assert result.steps == 4 and not any(name.startswith("eval_imagenet") for row in read_metrics(result.folder) for name in row)


def test_a_set_that_decides_the_best_checkpoint_must_be_here(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_EVAL_DATA", str(tmp_path / "sets"))
    best = {"best_metric": "eval_imagenet1k_acc1", "best_mode": "max", "train.eval_every": 1, "evaluation.tasks": ["imagenet1k"]}
    with pytest.raises(ConfigError, match="task 'imagenet1k': no set at"):
        launch(load("clip-vit-l-14-debug", "pretrain", best | {"root": str(tmp_path)}))


def test_a_stop_of_the_stability_guard_in_a_child_is_told_with_its_advice(tmp_path):
    settings = {"train.stability.threshold": 1e-6, "train.stability.window": 8, "train.log_every": 1, "train.steps": 40, "train.device_batch": 1}
    run = a_run(tmp_path, **{"backend.kind": "torch", "backend.processes": 2, **settings})
    result = launch(run)
    assert result.stopped and result.export is None and result.steps < 40
    assert "loss spike" in result.told and "lower the learning rate" in str(result) and "resumes it" not in str(result)
    assert json.loads(Path(result.folder, "environment.json").read_text())["ended"]["reason"] == "loss spike"
