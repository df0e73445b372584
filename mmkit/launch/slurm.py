"""SLURM jobs from typed settings: rendered, submitted, watched, requeued before the time limit, cancelled.

The defaults are the published ViT-L/14 run's: 96 nodes of 4 GPUs, 6 CPUs a task (clip-training section 13). Each task trains with
``python -m mmkit train --config FILE``; ranks come from SLURM's own variables (`sharding.environment`). Before the limit SLURM
signals the batch shell, which passes SIGUSR1 on: training finishes its step, saves and ends, and the job goes back into the queue.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, model_validator

from mmkit.config import ConfigError, RunConfig, Settings, changed, to_yaml
from mmkit.errors import InputError
from mmkit.launch.launch import follow
from mmkit.launch.preflight import check_stage

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


class SlurmConfig(Settings):
    """What to ask of the cluster."""

    nodes: int = Field(96, ge=1)
    tasks_per_node: int = Field(4, ge=1)  # one process a GPU
    gpus_per_node: int | None = Field(None, ge=0)  # None = as many as tasks, 0 = CPUs only
    cpus_per_task: int = Field(6, ge=1)
    time_limit: str = Field("24:00:00", pattern=r"^(\d+-)?\d+(:\d{2}){0,2}$")
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    job_name: str = "mmkit"
    signal_seconds: int = Field(120, ge=10)  # this long before the limit training is told to save and stop
    max_requeues: int = Field(20, ge=0)
    master_suffix: str = ""  # appended to the first host's name; JUWELS wants "i" for its InfiniBand address
    master_address: str | None = None  # instead of the first host of the job
    master_port: int | None = Field(None, gt=1023, lt=65536)  # None = 20000 + job id % 20000, so that jobs on one node differ
    modules: tuple[str, ...] = ()  # environment modules to load first
    activate: str | None = None  # a file to source after them, e.g. a virtual environment's bin/activate
    python: str = sys.executable
    environment: dict[str, str] = {}  # more variables for every task

    @model_validator(mode="after")
    def _one_gpu_a_task(self):
        if self.gpus not in (0, self.tasks_per_node):
            raise InputError(
                f"gpus_per_node {self.gpus} and tasks_per_node {self.tasks_per_node} differ, but a task is one process on one GPU; "
                "leave gpus_per_node out, or 0 for CPUs"
            )
        return self

    @property
    def gpus(self) -> int:
        """GPUs of a node."""
        return self.tasks_per_node if self.gpus_per_node is None else self.gpus_per_node


@dataclass(frozen=True)
class Job:
    """A submitted job: its id, script, log and the run it trains."""

    id: str
    script: Path
    log: Path
    run: RunConfig


def for_cluster(run: RunConfig, cluster: SlurmConfig) -> RunConfig:
    """The run with its backend spread over the job's tasks; ConfigError where the batch does not divide by them, or for a
    stage that the preset does not have."""
    check_stage(run)
    if run.backend.kind == "single" and cluster.nodes * cluster.tasks_per_node > 1:
        raise ConfigError("backend.kind 'single' cannot use several tasks; set backend.kind to torch or deepspeed")
    return changed(run, backend__nodes=cluster.nodes, backend__processes=cluster.tasks_per_node)


def render(cluster: SlurmConfig, config: Path, log: Path) -> str:
    """The batch script that trains the run saved in ``config``; every value is quoted for the shell."""
    asked = {
        "job-name": cluster.job_name,
        "nodes": cluster.nodes,
        "ntasks-per-node": cluster.tasks_per_node,
        "cpus-per-task": cluster.cpus_per_task,
        "gres": f"gpu:{cluster.gpus}" if cluster.gpus else None,
        "time": cluster.time_limit,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "output": log,
        "open-mode": "append",
        "signal": f"B:USR1@{cluster.signal_seconds}",
        "wait-all-nodes": 1 if cluster.nodes > 1 else None,
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={_directive(name, value)}" for name, value in asked.items() if value is not None)]
    lines += ["#SBATCH --requeue", ""]
    # modules first: they put the libraries on the paths that an environment's activate builds on; both read variables nobody has set
    lines += [f"module load {shlex.quote(name)}" for name in cluster.modules]
    lines += [f"source {shlex.quote(cluster.activate)}"] if cluster.activate else []
    lines += ["set -u", *_rendezvous(cluster), *_exports(cluster), "", *_body(cluster, config)]
    return "\n".join(lines) + "\n"


def _directive(name: str, value) -> str:
    text = str(value)
    if any(char.isspace() or not char.isprintable() for char in text):
        raise ConfigError(f"slurm {name} = {text!r} holds white space, which a #SBATCH line cannot carry")
    return text


def _rendezvous(cluster: SlurmConfig) -> list[str]:
    address = shlex.quote(cluster.master_address) if cluster.master_address else '"${hosts[0]}"' + shlex.quote(cluster.master_suffix)
    port = str(cluster.master_port) if cluster.master_port else "$((20000 + SLURM_JOB_ID % 20000))"
    return ['hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))', f"export MASTER_ADDR={address}", f"export MASTER_PORT={port}"]


def _exports(cluster: SlurmConfig) -> list[str]:
    values = {"OMP_NUM_THREADS": str(cluster.cpus_per_task), "PYTHONUNBUFFERED": "1"}
    if cluster.gpus:  # an NCCL failure on one rank ends the others instead of leaving them waiting
        devices = ",".join(map(str, range(cluster.gpus)))
        values |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "CUDA_VISIBLE_DEVICES": devices}
    return [f"export {name}={shlex.quote(value)}" for name, value in (values | cluster.environment).items()]


def _body(cluster: SlurmConfig, config: Path) -> list[str]:
    """Run the step in the background so that the shell can act on the signal, and requeue after training has saved."""
    bind = " --accel-bind=gn" if cluster.gpus else ""
    train = f"{shlex.quote(cluster.python)} -u -m mmkit train --config {shlex.quote(str(config))}"
    return [
        "asked_to_stop=0",
        'stop() { asked_to_stop=1; kill -USR1 "$step"; }',
        "trap stop USR1",
        f"srun --cpu-bind=none{bind} --kill-on-bad-exit=1 --wait=60 {train} &",
        "step=$!",
        'wait "$step"; code=$?',
        'while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done',
        f'if [ "$asked_to_stop" = 1 ] && [ "$code" = 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {cluster.max_requeues} ]; then',
        '  echo "mmkit: saved before the limit; job $SLURM_JOB_ID goes back into the queue"',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "  exit 0",
        "fi",
        'if [ "$code" != 0 ]; then echo "mmkit: a task ended with exit code $code; its message stands above"; fi',
        'exit "$code"',
    ]


def prepare(run: RunConfig, cluster: SlurmConfig, folder: Path) -> tuple[Path, Path]:
    """Write ``config.yaml`` and ``job.sh`` into ``folder``; the paths of script and log. Nothing is submitted."""
    spread = for_cluster(run, cluster)
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    config, script, log = folder / "config.yaml", folder / "job.sh", folder / "job.log"
    config.write_text(to_yaml(spread), encoding="utf8")
    script.write_text(render(cluster, config, log), encoding="utf8")
    return script, log


def submit(run: RunConfig, cluster: SlurmConfig, folder: Path, env: dict[str, str] | None = None) -> Job:
    """Hand the job to ``sbatch``; ConfigError with its message where it refuses."""
    script, log = prepare(run, cluster, folder)
    return Job(_slurm(["sbatch", "--parsable", str(script)], env).split(";")[0].strip(), script, log, run)


def state(job: Job, env: dict[str, str] | None = None) -> str:
    """The job's state as SLURM names it; "UNKNOWN" once the controller has forgotten it."""
    try:
        text = _slurm(["scontrol", "show", "job", job.id], env)
    except ConfigError:
        return "UNKNOWN"
    return next((part.removeprefix("JobState=") for part in text.split() if part.startswith("JobState=")), "UNKNOWN")


def watch(job: Job, on_log: Callable[[dict], None] | None = None, env: dict[str, str] | None = None, every: float = 5.0) -> str:
    """Wait until the job has ended, passing new lines of metrics.jsonl on; its final state. Requeued jobs are waited for."""
    lines = follow(f"{job.run.folder}/metrics.jsonl", from_end=True)
    while True:
        now = state(job, env)
        for record in next(lines):
            if on_log:
                on_log(record)
        if now in ENDED or now == "UNKNOWN":
            return now
        time.sleep(every)


def _slurm(command: list[str], env: dict[str, str] | None) -> str:
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not installed here; submit from a login node of the cluster, or use --dry-run") from None
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
