"""Checkpoints: complete or absent, refused when damaged, kept by rule, on any file system."""

import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn

from mmkit.config import BackendConfig, CheckpointConfig, OptimizerConfig, TrainConfig
from mmkit.sharding.backend import create
from mmkit.training import checkpoint as module
from mmkit.training.checkpoint import Checkpoint, CheckpointError, Checkpoints, open_verified
from mmkit.training.optim import optimizer_factory
from mmkit.training.weights import trained_buffers

COMPONENTS = ((r".*", "connector"),)
names = itertools.count()


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x):
        return self.model(x).square().sum()


def prepared(steps=2):
    """A backend that trained a toy for some steps."""
    backend = create(BackendConfig(), "fp32")
    toy = Toy()
    wrapped = backend.prepare(toy, optimizer_factory(toy.model, COMPONENTS, OptimizerConfig(lr=1e-2)), train=TrainConfig())
    for step in range(steps):
        torch.manual_seed(step)
        backend.backward(wrapped(torch.randn(4, 6)), last=True)
        backend.update(None)
    return backend, toy


def checkpoints(folder, backend, **settings):
    return Checkpoints(str(folder), CheckpointConfig(**settings), backend)


class Ranks:
    """Two ranks in two threads over one toy, to see who writes what."""

    def __init__(self, world):
        self.world, self.meet, self.shared = world, threading.Barrier(world), {}

    def view(self, rank, backend):
        ranks = self

        class View:
            world = ranks.world
            is_main = rank == 0

            def __init__(self):
                self.rank = rank

            def barrier(self, timeout=None):
                ranks.meet.wait(30)

            def all_objects(self, value):
                ranks.shared[rank] = value
                ranks.meet.wait(30)
                out = [ranks.shared[r] for r in range(ranks.world)]
                ranks.meet.wait(30)
                return out

            def any_device(self, flag):
                return any(self.all_objects(flag))

            def broadcast(self, value):
                return self.all_objects(value)[0]

            def export_state(self, owner):
                return backend.export_state(lambda index: 0 if owner(index) == rank else -1)

        return View()

    def run(self, function):
        out = [None] * self.world

        def call(rank):
            try:
                out[rank] = function(rank)
            except Exception as error:
                out[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.world)]
        [thread.start() for thread in threads]
        [thread.join(60) for thread in threads]
        return out


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    return str(tmp_path / "checkpoints") if request.param == "local" else f"memory://run{next(names)}/checkpoints"


@pytest.mark.parametrize("background", [False, True])
def test_parameters_moments_state_and_buffers_come_back_exactly(folder, background):
    backend, toy = prepared()
    saver = checkpoints(folder, backend, background=background)
    want = dict(backend.export_state())
    saver.save(2, {"step": 2, "lr": 0.1}, buffers=trained_buffers(toy.model), frozen={"hash": "x"}, metrics={"loss": 1.5})
    saver.wait()
    read = open_verified(saver.latest(), backend)
    assert read.step == 2 and read.state == {"step": 2, "lr": 0.1} and read.manifest["frozen"] == {"hash": "x"}
    assert set(read.names()) == set(want) == {name for name, _ in toy.model.named_parameters()}
    for name, entry in want.items():
        for kind, tensor in read.get(name).items():
            assert torch.equal(tensor, entry[kind]), (name, kind)
    assert torch.equal(read.buffers()["1.running_mean"], toy.model[1].running_mean)


def test_a_background_save_holds_the_values_of_the_moment_it_was_asked_for(tmp_path, monkeypatch):
    backend, toy = prepared()
    saver = checkpoints(tmp_path, backend, background=True)
    release = threading.Event()
    write = saver.store.write
    monkeypatch.setattr(saver.store, "write", lambda *args: (release.wait(30), write(*args)))
    want = {name: entry["param"] for name, entry in backend.export_state()}
    begin = time.monotonic()
    saver.save(1, {})
    assert time.monotonic() - begin < 5 and saver.steps() == []  # training goes on while nothing is written yet
    with torch.no_grad():
        [p.zero_() for p in toy.parameters()]
    release.set()
    saver.wait()
    assert torch.equal(Checkpoint(saver.latest()).get("0.weight")["param"], want["0.weight"])


def test_resuming_after_two_steps_equals_four_unbroken_ones_to_the_bit(tmp_path):
    unbroken, toy = prepared(4)
    first, _ = prepared(2)
    saver = checkpoints(tmp_path, first)
    saver.save(2, first.extra_state())
    read = Checkpoint(saver.latest())
    second, other = prepared(0)
    second.import_state(read.get, read.state["optimizer_step"])
    for step in (2, 3):
        torch.manual_seed(step)
        second.backward(second.module(torch.randn(4, 6)), last=True)
        second.update(None)
    for a, b in zip(toy.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_ranks_take_turns_and_another_world_size_reads_all(tmp_path):
    backend, toy = prepared()
    ranks = Ranks(2)
    ranks.run(lambda rank: checkpoints(tmp_path, ranks.view(rank, backend)).save(1, {}))
    read = Checkpoint(str(tmp_path / "step-00000001"))
    files = [entry["file"] for entry in read.manifest["tensors"].values()]
    assert {file[:10] for file in files} == {"rank-00000", "rank-00001"} and len(files) == 6
    assert read.verify() is None
    want = {name: entry["param"] for name, entry in backend.export_state()}
    assert all(torch.equal(read.get(name)["param"], tensor) for name, tensor in want.items())


def test_files_of_a_rank_that_cannot_be_seen_are_missed_by_rank(tmp_path):
    backend, _ = prepared()
    ranks = Ranks(3)
    own_disk = tmp_path / "elsewhere"
    out = ranks.run(lambda rank: checkpoints(own_disk if rank == 1 else tmp_path / "c", ranks.view(rank, backend)).save(1, {}))
    assert all(isinstance(error, CheckpointError) for error in out)
    assert "missing rank 1 of 3" in str(out[0])


def test_every_damaged_byte_is_refused_and_the_file_named(tmp_path):
    backend, toy = prepared()
    saver = checkpoints(tmp_path, backend)
    saver.save(1, {"step": 1}, buffers=trained_buffers(toy.model))
    path = tmp_path / "step-00000001"
    files = [file for file in sorted(path.iterdir()) if not file.name.startswith("rank-00000.json")]
    assert {file.name for file in files} > {"manifest.json", "state.json", "buffers.safetensors"}
    g = random.Random(0)
    for file in files:
        whole = file.read_bytes()
        for place in (0, len(whole) - 1, g.randrange(len(whole)), g.randrange(len(whole))):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CheckpointError, match=file.name):
                open_verified(str(path), backend)
        file.write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match=file.name):
            Checkpoint(str(path))
        file.unlink()
        with pytest.raises(CheckpointError, match=file.name):
            Checkpoint(str(path))
        file.write_bytes(whole)
    assert open_verified(str(path), backend).step == 1


def test_names_that_are_missing_or_unknown_are_named(tmp_path):
    backend, _ = prepared()
    saver = checkpoints(tmp_path, backend)
    saver.save(1, {})
    read = Checkpoint(saver.latest())
    read.require(read.names())
    with pytest.raises(CheckpointError, match="lacks 1 trained parameters of this run, first 'lora'"):
        read.require([*read.names(), "lora"])
    with pytest.raises(CheckpointError, match="holds 1 parameters unknown to this run, first '0.bias'"):
        read.require(name for name in read.names() if name != "0.bias")


def test_keep_last_keep_every_and_best(folder):
    backend, _ = prepared()
    saver = checkpoints(folder, backend, keep_last=2, keep_every=4, best_metric="loss")
    for step in range(1, 10):
        saver.save(step, {}, metrics={"loss": abs(step - 3)})
    assert saver.steps() == [3, 4, 8, 9]
    assert saver.is_best(-1.0) and not saver.is_best(0.0) and not saver.is_best(2.0)


def test_a_metric_that_is_not_finite_is_never_the_best(tmp_path):
    backend, _ = prepared()
    saver = checkpoints(tmp_path, backend, keep_last=1, best_metric="eval_loss")
    kept = []
    for step, value in enumerate([float("nan"), 0.5, 0.9, float("-inf"), 0.8], start=1):
        saver.save(step, {}, metrics={"eval_loss": value})
        kept.append(saver.steps())
    assert kept == [[1], [2], [2, 3], [2, 4], [2, 5]]
    assert saver.is_best(0.4) and not any(saver.is_best(float(value)) for value in ("nan", "inf", "-inf"))


def test_best_is_decided_by_the_main_process_for_all(tmp_path):
    backend, _ = prepared()
    checkpoints(tmp_path, backend, best_metric="loss").save(1, {}, metrics={"loss": 1.0})
    ranks = Ranks(2)
    answers = ranks.run(lambda rank: checkpoints(tmp_path, ranks.view(rank, backend), best_metric="loss").is_best([0.5, 9.0][rank]))
    assert answers == [True, True]


def test_an_unfinished_folder_is_skipped_and_cleared_by_the_next_save(folder):
    backend, _ = prepared()
    saver = checkpoints(folder, backend)
    saver.save(1, {})
    saver.store.make("step-00000002")
    saver.store.write("step-00000002/rank-00000-00000.safetensors", b"half")
    saver.store.make("step-00000003.tmp")
    saver.store.write("step-00000003.tmp/rank-00000-00000.safetensors", b"half")
    assert saver.latest().endswith("step-00000001")
    saver.save(2, {})
    assert saver.steps() == [1, 2] and "step-00000003.tmp" not in saver.store.folders()


class FullDisk(LocalFileSystem):
    """A local disk with room for a number of files."""

    cachable = False
    room = 0

    def open(self, path, mode="rb", **kwargs):
        if "w" in mode:
            if FullDisk.room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            FullDisk.room -= 1
        return super().open(path, mode, **kwargs)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("room", range(4))
def test_a_full_disk_is_a_clear_error_and_leaves_older_checkpoints(tmp_path, room, background):
    backend, toy = prepared()
    saver = checkpoints(tmp_path, backend, background=background)
    saver.save(1, {})
    saver.wait()
    saver.store.fs, FullDisk.room = FullDisk(), room  # a save writes tensors, mark, state, manifest
    with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device.* intact \(latest: step-00000001\).*on_disk_full"):
        saver.save(2, {})
        saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"] and Checkpoint(str(tmp_path / "step-00000001")).verify() is None


def test_a_full_disk_lets_training_go_on_when_configured(tmp_path, caplog):
    backend, _ = prepared()
    saver = checkpoints(tmp_path, backend, on_disk_full="continue")
    assert saver.save(1, {})
    saver.store.fs, FullDisk.room = FullDisk(), 1
    assert not saver.save(2, {})
    assert "training goes on" in caplog.text
    FullDisk.room = 100
    assert saver.save(3, {}) and saver.steps() == [1, 3]


def test_one_rank_with_a_full_disk_stops_all_ranks_alike(tmp_path):
    backend, _ = prepared()
    ranks = Ranks(2)

    def save(rank):
        saver = checkpoints(tmp_path, ranks.view(rank, backend), background=True)
        if rank == 1:
            saver.store.fs, FullDisk.room = FullDisk(), 0
        saver.save(1, {})
        return saver.wait()

    assert all(isinstance(out, CheckpointError) for out in ranks.run(save)) and not list(tmp_path.iterdir())


class Fault(Exception):
    """No error of a disk."""


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", ["tensors", "mark", "manifest.json", "removal"])
def test_a_fault_of_the_program_while_saving_stops_the_run_whatever_a_full_disk_may_do(tmp_path, monkeypatch, background, place):
    backend, _ = prepared()
    saver = checkpoints(tmp_path, backend, background=background, on_disk_full="continue", keep_last=1)
    saver.save(1, {})
    saver.wait()
    write, fault = saver.store.write, Fault("cannot be told in JSON")

    def fail(*args):
        raise fault

    if place == "tensors":
        monkeypatch.setattr(module.safetensors.torch, "save", fail)
    elif place == "removal":
        monkeypatch.setattr(saver.store, "remove", fail)
    else:
        wanted = "rank-00000.json" if place == "mark" else place
        monkeypatch.setattr(saver.store, "write", lambda name, data: fail() if name.endswith(wanted) else write(name, data))
    with pytest.raises((RuntimeError, Fault), match="cannot be told in JSON") as raised:
        saver.save(2, {})
        saver.wait()
    assert raised.value is fault or raised.value.__cause__ is fault
    kept = checkpoints(tmp_path, backend).steps()
    assert kept[0] == 1 and saver.written == kept[-1]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("broken", [0, 1])
def test_a_fault_on_one_rank_stops_every_rank_by_name(tmp_path, monkeypatch, background, broken):
    backend, _ = prepared()
    ranks = Ranks(2)

    def save(rank):
        saver = checkpoints(tmp_path, ranks.view(rank, backend), background=background, on_disk_full="continue")
        if rank == broken:
            monkeypatch.setattr(saver.store, "write", lambda *args: (_ for _ in ()).throw(Fault("a bug")))
        saver.save(1, {})
        return saver.wait()

    out = ranks.run(save)
    assert all(type(error) is RuntimeError for error in out), out
    assert all("step 1 could not be written" in str(error) and f"rank {broken} of 2: Fault('a bug')" in str(error) for error in out)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("background", [False, True])
def test_too_little_memory_for_a_save_is_told_with_what_to_do(tmp_path, monkeypatch, background):
    backend, _ = prepared()
    saver = checkpoints(tmp_path, backend, background=background, on_disk_full="continue")
    monkeypatch.setattr(module.safetensors.torch, "save", lambda tensors: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(CheckpointError, match=r"MemoryError.'no room'.*there are none yet.*background=false"):
        saver.save(1, {})
        saver.wait()
    assert saver.written == -1 and saver.steps() == []


def test_a_store_out_of_reach_lets_training_go_on_when_configured(monkeypatch, caplog):
    monkeypatch.setattr("mmkit.storage.FIRST_WAIT", 0.0)
    backend, _ = prepared()
    saver = checkpoints(f"memory://run{next(names)}", backend, on_disk_full="continue")
    assert saver.save(1, {})

    class Gone:
        def __getattr__(self, name):
            raise ConnectionError("no route to the store")

    there, saver.store.fs = saver.store.fs, Gone()
    assert not saver.save(2, {}) and saver.written == 1
    assert "no route to the store" in caplog.text and "training goes on" in caplog.text
    saver.store.fs = there
    assert saver.save(3, {}) and saver.steps() == [1, 3]


def test_large_parts_are_split_into_files_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD_BYTES", 100)
    backend, _ = prepared()
    saver = checkpoints(tmp_path, backend)
    saver.save(1, {})
    read = Checkpoint(saver.latest())
    assert sum("safetensors" in name for name in read.manifest["files"]) >= 3
    for name, entry in backend.export_state():
        assert torch.equal(read.get(name)["exp_avg_sq"], entry["exp_avg_sq"])


def test_a_newer_format_is_refused(tmp_path):
    backend, _ = prepared()
    saver = checkpoints(tmp_path, backend)
    saver.save(1, {})
    file = tmp_path / "step-00000001" / "manifest.json"
    for version, advice in ((99, "update mmkit"), (1, "go on with the mmkit that wrote it, or start anew with resume=never")):
        manifest = json.loads(file.read_text()) | {"version": version}
        file.write_text(json.dumps(manifest | {"sha256": module._own_hash(manifest)}))
        with pytest.raises(CheckpointError, match=f"version {version}, this mmkit reads version 2; {advice}"):
            Checkpoint(str(file.parent))


def save_until_killed(folder, background, backend):
    saver = checkpoints(folder, backend, keep_last=2, background=background)
    step = (saver.steps() or [0])[-1]
    while True:
        step += 1
        saver.save(step, {"step": step, "filler": list(range(200))})


def kill_often(folder):
    """25 times: a forked child saves in a loop, is killed at a random moment, and its latest checkpoint is loaded. Prints the steps."""
    g, found = random.Random(0), []
    backend, _ = prepared(1)
    for n in range(25):
        child = os.fork()
        if not child:
            save_until_killed(folder, n % 2 == 1, backend)
        time.sleep(g.uniform(0.02, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        steps = checkpoints(folder, backend).steps()
        if steps:
            latest = Checkpoint(f"{folder}/step-{steps[-1]:08d}")
            assert latest.verify() is None and latest.state["step"] == steps[-1]
            assert all(len(latest.get(name)) == 3 for name in latest.names())
        found.append(steps[-1] if steps else 0)
    print(json.dumps(found))


def test_killed_at_25_random_moments_the_latest_checkpoint_always_loads(tmp_path):
    here = Path(__file__)
    code = f"import sys; sys.path[:0] = {[str(here.parents[2]), str(here.parent)]}; import test_checkpoint as t; t.kill_often({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = json.loads(done.stdout.splitlines()[-1])
    assert len(steps) == 25 and steps == sorted(steps) and steps[-1] > 25  # a later process never finds less than an earlier one
