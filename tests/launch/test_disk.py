"""The disk is planned as it will be filled: checkpoints, export and cached features to the byte; too small a
disk is refused before."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

from mmkit.config import load
from mmkit.launch import disk
from mmkit.launch.disk import (
    DiskError,
    checkpoint_bytes,
    checkpoints_at_once,
    disk_rows,
    export_bytes,
    feature_bytes,
)
from mmkit.launch.preflight import plan_of, preflight
from mmkit.launch.machine import GIB, Machine
from tests.launch.test_preflight import llava_run
from tests.training.tiny_run import sourced, tiny_run

BIG = Machine("big", "cuda", "big", 1, 10_000 * GIB, peak=dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), 1e15))


def free(monkeypatch, count):
    """Lets every disk have ``count`` bytes free."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage._replace(free=count))


def test_an_8b_finetune_plans_a_hundred_gigabytes_a_checkpoint():
    plan = plan_of(load("8b", "finetune"), machine=BIG, samples=7_000_000)
    language = next(part for part in plan.parts if part.component == "language")
    assert (
        12 * language.parameters == pytest.approx(96.4e9, rel=1e-3) and 96e9 < checkpoint_bytes(plan) < 104e9
    )
    rows = {row["disk"]: row for row in disk_rows(plan)}
    assert (
        f"checkpoints: 4 x {disk.gb(checkpoint_bytes(plan))}" in rows
    )  # keep_last 3, and the one being written


CASES = list(itertools.product((1, 3, 7, 40), (0, 1, 2, 5), (1, 3), (0, 4, 5)))


@pytest.mark.parametrize(("steps", "every", "last", "forever"), CASES)
def test_checkpoints_at_once_hold_what_a_run_would_keep(steps, every, last, forever):
    held, most = [], 0
    for step in range(1, steps + 1):
        if (every and step % every == 0) or step == steps:
            held.append(step)
            most = max(most, len(held))
            held = [s for s in held if s in held[-last:] or (forever and s % forever == 0)]
    settings = {"save_every": every, "keep_last": last, "keep_every": forever, "steps": steps}
    planned = checkpoints_at_once(load("8b-debug", "pretrain", settings), steps)
    assert most <= planned <= most + last + 1 and (forever or planned == most)


@pytest.mark.parametrize("trainable", [["connector"], ["language", "connector"]], ids="+".join)
def test_checkpoints_export_and_features_take_what_was_planned(tmp_path, monkeypatch, trainable):
    from mmkit.launch.launch import launch

    monkeypatch.setenv("MMKIT_CACHE", str(tmp_path / "cache"))
    saving = {"save_every": 1, "keep_last": 2}
    run = tiny_run(tmp_path / "run", model=sourced(tmp_path), trainable=trainable, steps=4, checkpoint=saving)
    run = run.model_copy(update={"data": run.data.model_copy(update={"cache_features": True})})
    plan, result = plan_of(run), launch(run)
    written = [tensor_bytes(step) for step in sorted(Path(run.folder, "checkpoints").glob("step-*"))]
    assert written == [checkpoint_bytes(plan)] * 2 and checkpoints_at_once(run, 4) == 3
    assert tensor_bytes(Path(result.export)) == export_bytes(plan)
    pictures = sum("image" in record for record in json.loads((tmp_path / "run/data.json").read_text()))
    features = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("features.*.bin"))
    assert features == pictures * feature_bytes(run) > 0


def tensor_bytes(folder):
    """Bytes of all tensors in the safetensors files of a folder."""
    from safetensors.torch import load_file

    return sum(tensor.nbytes for path in folder.glob("*.safetensors") for tensor in load_file(path).values())


def test_a_disk_that_cannot_hold_two_checkpoints_is_refused_before_training(tmp_path, monkeypatch):
    settings = {"save_every": 1, "steps": 4, "root": str(tmp_path / "runs")}
    source = [llava_run(tmp_path, "mine", ["a.png"] * 8)]

    def run(**more):
        return load("8b-debug", "pretrain", {"data.sources": source} | settings | more)

    one = checkpoint_bytes(plan_of(run()))
    free(monkeypatch, 2 * one - 1)
    with pytest.raises(DiskError, match="a checkpoint takes .* free.*root=/larger/disk.*s3://"):
        preflight(run())
    assert not (tmp_path / "runs").exists()
    assert (
        "does NOT fit" in str(preflight(run(dry_run=True))) and preflight(run(save_every=0)).plan.fits
    )  # one at the end
    assert preflight(run(on_disk_full="continue")).plan.fits
    free(monkeypatch, 2 * one)
    assert preflight(run()).plan.fits
    free(monkeypatch, one)
    old = Path(run().folder, "checkpoints/step-00000001")
    old.mkdir(parents=True)
    (old / "rank-00000-00000.safetensors").write_bytes(b"0" * one)  # it gives way
    assert preflight(run()).plan.fits


def test_a_remote_root_has_no_limit_but_its_export_is_staged_here(monkeypatch):
    plan = plan_of(load("8b-debug", "pretrain", {"root": "s3://bucket/runs", "save_every": 1}))
    free(monkeypatch, 10)
    disk.check_disk(plan)
    rows = {row["disk"].partition(":")[0]: row for row in disk_rows(plan)}
    assert rows["checkpoints"]["free there"] == rows["export"]["free there"] == "no limit"
    assert rows["export, before it is uploaded"]["free there"] == "0.01 kB"
