"""A real SLURM of two nodes: CLIP trains over gloo with ranks from SLURM, is requeued, resumes; a lost master ends the job."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.launch.slurm_cluster import Cluster, missing_reason
from PIL import Image

from mmkit.config import load, to_yaml
from mmkit.data.tar_writer import ShardWriter
from mmkit.launch import slurm

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing_reason()), reason=missing_reason())]
STEPS = 12
CLUSTER = slurm.SlurmConfig(
    nodes=2, tasks_per_node=1, gpus_per_node=0, cpus_per_task=1, time_limit="10", signal_seconds=30, master_address="127.0.0.1",
    environment={"OMP_WAIT_POLICY": "PASSIVE"},
)  # fmt: skip


def overrides(shards: Path, root: Path, **more) -> dict:
    source = {"name": "pairs", "format": "webdataset", "path": f"{shards}/{{00000..00003}}.tar"}
    return {
        "data.sources": [source], "data.samples_per_epoch": 64, "steps": STEPS, "global_batch": 8, "device_batch": 4, "save_every": 4,
        "keep_last": 20, "data.cache_features": False, "backend.kind": "torch", "backend.processes": 2, "root": str(root), **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    with ShardWriter(str(folder), max_samples=16) as writer:
        for i in range(64):
            picture = io.BytesIO()
            Image.new("RGB", (32, 32), (4 * i % 256, 90 * i % 256, 255 - 3 * i)).save(picture, "png")
            writer.write(f"{i:06d}", {"png": picture.getvalue(), "txt": f"picture number {i}"})
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def losses(folder: str) -> dict[int, float]:
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf8").splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


def wait_until(check, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.2)


@pytest.fixture(scope="module")
def unbroken(shards, tmp_path_factory) -> dict[int, float]:
    """Losses of the same run on two processes of this machine, never interrupted."""
    folder = tmp_path_factory.mktemp("unbroken")
    run = load("clip-tiny", "pretrain", overrides(shards, folder / "runs", **{"backend.nodes": 1}))
    config = folder / "config.yaml"
    config.write_text(to_yaml(run), encoding="utf8")
    command = [sys.executable, "-m", "mmkit", "train", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return losses(run.folder)


def test_a_requeued_job_saves_and_resumes_to_the_same_curve(cluster, shards, unbroken, tmp_path):
    run = load("clip-tiny", "pretrain", overrides(shards, tmp_path / "runs"))
    job = slurm.submit(run, CLUSTER, tmp_path / "job", env=cluster.env)
    metrics = Path(run.folder) / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, 200, f"no training: {job.log.read_text() if job.log.exists() else ''}")
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    cluster.wait_for(job.id, ("PENDING",), 120)
    # SLURM holds a requeued job back for two minutes; a node refuses one that starts in the second in which it ended ("credential revoked")
    cluster.run("scontrol", "update", f"JobId={job.id}", "StartTime=now+5")
    state = slurm.watch(job, env=cluster.env, every=0.5)
    log = job.log.read_text(encoding="utf8")
    assert state == "COMPLETED", log
    assert f"job {job.id} goes back into the queue" in log
    got = losses(run.folder)
    assert sorted(got) == list(range(1, STEPS + 1))
    assert got == pytest.approx(unbroken, rel=1e-5)


def test_a_lost_master_ends_the_job_with_a_message(cluster, shards, tmp_path):
    run = load("clip-tiny", "pretrain", overrides(shards, tmp_path / "runs", steps=100_000))
    job = slurm.submit(run, CLUSTER, tmp_path / "job", env=cluster.env)
    metrics = Path(run.folder) / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, 200, f"no training: {job.log.read_text() if job.log.exists() else ''}")
    for process in psutil.process_iter(["environ"]):
        variables = process.info["environ"] or {}
        if variables.get("SLURM_JOB_ID") == job.id and variables.get("SLURM_PROCID") == "0" and "mmkit" in process.cmdline():
            os.kill(process.pid, signal.SIGKILL)
    assert cluster.wait_for(job.id, ("FAILED",), 100) == "FAILED"
    assert "a task ended with exit code" in job.log.read_text(encoding="utf8")


def test_a_job_is_cancelled(cluster, shards, tmp_path):
    run = load("clip-tiny", "pretrain", overrides(shards, tmp_path / "runs"))
    job = slurm.submit(run, CLUSTER, tmp_path / "job", env=cluster.env)
    cluster.run("scancel", job.id)
    assert cluster.wait_for(job.id, ("CANCELLED",), 60) == "CANCELLED"


def test_a_partition_that_does_not_exist_is_refused_by_sbatch(cluster, shards, tmp_path):
    run = load("clip-tiny", "pretrain", overrides(shards, tmp_path / "runs"))
    with pytest.raises(ValueError, match="invalid partition"):
        slurm.submit(run, CLUSTER.model_copy(update={"partition": "gpus"}), tmp_path / "job", env=cluster.env)
