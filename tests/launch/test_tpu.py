"""The commands that drive a TPU slice are right without an account, and a broken run still deletes the slice."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mmkit.config import ConfigError, load
from mmkit.launch import tpu


def run_on(root: str = "gs://bucket/runs", **overrides):
    return load("8b", "finetune", {"root": root, "backend.kind": "xla", **overrides})


def test_sizes_of_slices():
    for name, chips, hosts in (("v4-512", 256, 64), ("v4-8", 4, 1), ("v5litepod-16", 16, 4), ("v6e-8", 8, 1)):
        machine = tpu.TpuConfig(accelerator=name).machine
        assert (machine.devices, machine.hosts) == (chips, hosts)
    with pytest.raises(ConfigError, match="v6e has no slice of 12 chips"):
        tpu.for_slice(run_on(), tpu.TpuConfig(accelerator="v6e-12"))


def test_the_commands_of_a_pod_reach_all_workers_and_end_with_delete():
    target = tpu.TpuConfig(accelerator="v4-512", name="big", zone="us-central2-b", project="lab", spot=True)
    planned = tpu.steps(target, Path("run.yaml"), Path("mmkit.tar.gz"))
    assert planned[0].command[:6] == ("gcloud", "compute", "tpus", "tpu-vm", "create", "big")
    assert {"--spot", "--version=tpu-ubuntu2204-base", "--accelerator-type=v4-512"} <= set(planned[0].command)
    assert all("--worker=all" in step.command and "--project=lab" in step.command for step in planned[1:-1])
    assert planned[-1].command[4] == "delete" and planned[-1].always
    assert "mmkit train --config run.yaml" in planned[-2].command[-1] and "TPU_WORKER_ID" in planned[-2].command[-1]


def test_a_kept_slice_is_not_deleted():
    assert all("delete" not in step.command for step in tpu.steps(tpu.TpuConfig(keep=True), Path("run.yaml"), Path("mmkit.tar.gz")))


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


GCLOUD = """#!/bin/bash
# a slice of one host on this machine: its home is $HOME/host; scp copies there, ssh runs there
mkdir -p "$HOME/host"; cd "$HOME/host"
what="$4"; shift 4; last="${@: -1}"
case "$what" in
  scp) cp "${@: -2:1}" "${last#*:}" ;;
  ssh) exec bash -c "${last#--command=}" ;;
esac
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """The home of a host that a stand-in for gcloud reaches; its pip and python are stand-ins too, so nothing is downloaded."""
    tools = tmp_path / "bin"
    tools.mkdir()
    made = {
        "gcloud": GCLOUD,
        "python3": "#!/bin/bash\nmkdir -p .venv/bin; for t in pip python; do cp $HOME/bin/told .venv/bin/$t; done\n",
        "told": "#!/bin/bash\necho \"$(basename $0) $*\" >> $HOME/told.log\n",
        "curl": "#!/bin/sh\necho 0\n",
    }
    for name, text in made.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return tmp_path / "host" / tpu.FOLDER


def test_what_git_tracks_or_would_is_on_the_host_and_nothing_else(tmp_path, host):
    kit = tmp_path / "my kit"
    for name in ("pyproject.toml", "mmkit/a.py", "params/mine.yaml", ".venv/lib/large.so", "runs/r/model.safetensors", "gone.py"):
        (kit / name).parent.mkdir(parents=True, exist_ok=True)
        (kit / name).write_text(name)
    (kit / ".gitignore").write_text(".venv/\nruns/\n")
    (kit / "mmkit/link.py").symlink_to("a.py")
    for command in (["init", "-q"], ["add", "pyproject.toml", ".gitignore", "mmkit", "gone.py"]):  # params/mine.yaml is not added
        subprocess.run(["git", "-C", str(kit), *command], check=True)
    (kit / "gone.py").unlink()
    assert tpu.start(run_on(), tpu.TpuConfig(accelerator="v4-32", checkout=str(kit))) == 0
    there = {str(path.relative_to(host)) for path in host.rglob("*") if not path.is_dir() and ".venv" not in path.parts}
    assert there == {"pyproject.toml", ".gitignore", "mmkit/a.py", "mmkit/link.py", "params/mine.yaml", "mmkit.tar.gz", "run.yaml"}
    told = (tmp_path / "told.log").read_text().splitlines()
    assert told == ["pip install -q -e .[tpu,gcs]", "python -m mmkit train --config run.yaml"]


def test_an_installed_kit_sends_its_wheel(tmp_path, host, monkeypatch):
    site = tmp_path / "site"
    for name in ("mmkit/__init__.py", "mmkit/params/tiny.yaml", "mmkit/__pycache__/x.pyc", "mmkit-0.3.dist-info/METADATA",
                 "mmkit-0.3.dist-info/WHEEL", "mmkit-0.3.dist-info/entry_points.txt", "mmkit-0.3.dist-info/INSTALLER"):  # fmt: skip
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("Wheel-Version: 1.0\nName: mmkit\nVersion: 0.3\nMetadata-Version: 2.1\n")
    files = [str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()]
    (site / "mmkit-0.3.dist-info/RECORD").write_text("".join(f"{name},,\n" for name in [*files, "../../bin/mmkit"]))
    installed = importlib.metadata.Distribution.at(site / "mmkit-0.3.dist-info")
    monkeypatch.setattr(tpu.importlib.metadata, "distribution", lambda name: installed)
    monkeypatch.setattr(tpu.mmkit, "__file__", str(site / "mmkit/__init__.py"))
    assert tpu.start(run_on(), tpu.TpuConfig(accelerator="v4-32")) == 0
    assert (tmp_path / "told.log").read_text().splitlines()[0] == "pip install -q ./mmkit-0.3-py3-none-any.whl[tpu,gcs]"
    wheel = host / "mmkit-0.3-py3-none-any.whl"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(tmp_path / "again"), str(wheel)]
    subprocess.run(pip, check=True)
    assert (tmp_path / "again/mmkit/params/tiny.yaml").is_file() and not list((tmp_path / "again").rglob("x.pyc"))


def test_a_folder_that_is_no_checkout_is_refused_before_anything_costs_money(tmp_path):
    target = tpu.TpuConfig(checkout=str(tmp_path))
    with pytest.raises(ConfigError, match="has no pyproject.toml"):
        tpu.start(run_on(), target, show=True)
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(ConfigError, match="is no git checkout.*clone the kit"):
        tpu.start(run_on(), target, show=True)


def test_without_gcloud_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match="--show"):
        tpu.start(run_on(), tpu.TpuConfig(accelerator="v4-32"))
