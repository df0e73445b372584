"""Job scripts hold the published run's facts and quote what users give; a refused request says why."""

from __future__ import annotations

import subprocess

import pytest

from mmkit.cli import checked
from mmkit.config import ConfigError, load
from mmkit.launch import slurm
from mmkit.launch.slurm import SlurmConfig


@pytest.fixture
def run():
    return load("clip-vit-l-14", "pretrain", {"backend.kind": "torch", "global_batch": 86016, "device_batch": 224})


def test_defaults_render_the_published_run(run, tmp_path):
    script, log = slurm.prepare(run, SlurmConfig(partition="booster", master_suffix="i", master_port=12802), tmp_path)
    text = script.read_text(encoding="utf8")
    for line in (
        "#SBATCH --nodes=96",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gres=gpu:4",
        "#SBATCH --cpus-per-task=6",
        "#SBATCH --partition=booster",
        "#SBATCH --signal=B:USR1@120",
        "#SBATCH --requeue",
        "#SBATCH --wait-all-nodes=1",
        "export MASTER_PORT=12802",
        'export MASTER_ADDR="${hosts[0]}"i',
        "export CUDA_VISIBLE_DEVICES=0,1,2,3",
        "export TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
    ):
        assert line in text.splitlines(), line
    assert f"#SBATCH --output={log}" in text
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_the_saved_config_spreads_the_run_over_the_jobs_tasks(run, tmp_path):
    from mmkit.config import load_file

    slurm.prepare(run, SlurmConfig(), tmp_path)
    spread = load_file(tmp_path / "config.yaml")
    assert (spread.devices, spread.accumulation) == (384, 1)


def test_modules_load_before_the_environment_and_both_may_read_unset_variables(run, tmp_path):
    """The script itself runs, with stand-ins for the cluster's commands; conda's activate and many modules fail under `set -u`."""
    activate = tmp_path / "activate"
    activate.write_text('echo "activate$NOT_SET_ANYWHERE" >> $LOG\nexport PREFIX=there\n')
    for name, text in {"module": 'echo "module $2" >> $LOG', "scontrol": "echo n1", "srun": 'echo "srun $PREFIX" >> $LOG'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    cluster = SlurmConfig(modules=("cuda/12", "nccl"), activate=str(activate))
    script, _ = slurm.prepare(run, cluster, tmp_path / "job")
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(tmp_path / "log"), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(["bash", str(script)], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text().splitlines() == ["module cuda/12", "module nccl", "activate", "srun there"]
    assert "set -u" in script.read_text(encoding="utf8").splitlines()


def test_ports_differ_between_jobs_by_default(tmp_path, run):
    script, _ = slurm.prepare(run, SlurmConfig(), tmp_path)
    assert "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))" in script.read_text(encoding="utf8")


def test_values_cannot_break_out_of_their_line(run, tmp_path):
    script, _ = slurm.prepare(run, SlurmConfig(activate="a; touch evil", environment={"NOTE": "$(touch evil)"}), tmp_path)
    text = script.read_text(encoding="utf8")
    assert "source 'a; touch evil'" in text and "export NOTE='$(touch evil)'" in text
    with pytest.raises(ConfigError, match="slurm partition = 'a b'"):
        slurm.prepare(run, SlurmConfig(partition="a b"), tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodes": 0}, "nodes = 0"), ({"time_limit": "a day"}, "time_limit = 'a day'"), ({"master_port": 80}, "master_port = 80"),
        ({"node": 2}, "no option 'node'.*did you mean 'nodes'"), ({"gpus_per_node": 5}, "gpus_per_node 5 and tasks_per_node 4 differ"),
    ],
)  # fmt: skip
def test_wrong_cluster_settings_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        checked(SlurmConfig, values, "--option")


def test_a_batch_that_does_not_divide_and_a_single_backend_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="global_batch 86016 does not divide"):
        slurm.prepare(run, SlurmConfig(nodes=95), tmp_path)
    alone = load("clip-vit-l-14", "pretrain", {"backend.kind": "single", "nodes": 1, "processes": 1, "global_batch": 224, "device_batch": 224})
    with pytest.raises(ConfigError, match="'single' cannot use several tasks"):
        slurm.prepare(alone, SlurmConfig(nodes=2), tmp_path)


def test_submitting_without_slurm_says_what_to_do(run, tmp_path):
    with pytest.raises(ConfigError, match="sbatch is not installed here.*--dry-run"):
        slurm.submit(run, SlurmConfig(), tmp_path, env={"PATH": str(tmp_path)})
