"""The commands that drive a TPU slice are right without an account, and a broken run still deletes the slice."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from mmkit.config import ConfigError, load
from mmkit.launch import tpu


def run_on(root: str = "gs://bucket/runs", **overrides):
    return load("8b", "finetune", {"root": root, "backend.kind": "xla", **overrides})


def test_sizes_of_slices():
    assert (tpu.TpuConfig(accelerator="v4-512").chips, tpu.TpuConfig(accelerator="v4-512").hosts) == (256, 64)
    assert (tpu.TpuConfig(accelerator="v4-8").chips, tpu.TpuConfig(accelerator="v4-8").hosts) == (4, 1)
    assert (tpu.TpuConfig(accelerator="v5litepod-16").chips, tpu.TpuConfig(accelerator="v5litepod-16").hosts) == (16, 4)
    assert tpu.TpuConfig(accelerator="v6e-8").hosts == 1


def test_the_commands_of_a_pod_reach_all_workers_and_end_with_delete():
    target = tpu.TpuConfig(accelerator="v4-512", name="big", zone="us-central2-b", project="lab", spot=True)
    planned = tpu.steps(target, Path("run.yaml"))
    assert planned[0].command[:6] == ("gcloud", "compute", "tpus", "tpu-vm", "create", "big")
    assert {"--spot", "--version=tpu-ubuntu2204-base", "--accelerator-type=v4-512"} <= set(planned[0].command)
    assert all("--worker=all" in step.command and "--project=lab" in step.command for step in planned[1:-1])
    assert planned[-1].command[4] == "delete" and planned[-1].always
    assert "mmkit train --config run.yaml" in planned[-2].command[-1] and "TPU_WORKER_ID" in planned[-2].command[-1]


def test_a_kept_slice_is_not_deleted():
    assert all("delete" not in step.command for step in tpu.steps(tpu.TpuConfig(keep=True), Path("run.yaml")))


def test_local_folders_and_other_backends_are_refused_before_anything_costs_money():
    with pytest.raises(ConfigError, match="gs://"):
        tpu.for_slice(run_on("runs"), tpu.TpuConfig(accelerator="v4-512"))
    with pytest.raises(ConfigError, match="--backend xla"):
        tpu.for_slice(load("8b-debug", "finetune"), tpu.TpuConfig())
    with pytest.raises(ConfigError, match="global_batch"):
        tpu.for_slice(run_on(), tpu.TpuConfig(accelerator="v4-3072"))


def test_show_prints_commands_that_a_shell_reads_back(capsys):
    assert tpu.start(run_on(), tpu.TpuConfig(accelerator="v4-32"), show=True) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(lines) == 7 and all(shlex.split(line)[0] == "gcloud" for line in lines)


def test_a_failing_step_skips_the_rest_but_deletes_the_slice(tmp_path, monkeypatch):
    fake = tmp_path / "gcloud"
    fake.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\ncase "$*" in *"pip install"*) exit 7;; esac\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert tpu.start(run_on(), tpu.TpuConfig(accelerator="v4-32")) == 7
    calls = (tmp_path / "calls").read_text()
    assert "mmkit train" not in calls and calls.splitlines()[-1].split()[3] == "delete"


def test_without_gcloud_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match="--show"):
        tpu.start(run_on(), tpu.TpuConfig(accelerator="v4-32"))
