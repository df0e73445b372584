"""A TPU VM or pod, driven with gcloud: create it, copy the checkout and the config, install, train on all hosts, delete it.

Every host runs the same command; torch_xla's SPMD joins their devices. Hosts have disks of their own, so the run folder must be one
that all of them see (gs://...). `steps` is plain data and can be read, tested and printed without an account.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from pydantic import Field

from mmkit.config import ConfigError, RunConfig, Settings, changed, to_yaml

METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes"
RUNTIMES = {  # software version of a TPU VM by the accelerator's family
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
RUNS_ON = ("xla",)  # backends that drive these devices
CORES_A_CHIP = {"v4": 2, "v5p": 2}  # these families are named by cores, the others by chips
FOLDER = "mmkit-run"  # on the hosts, below the home folder


class TpuConfig(Settings):
    """What to ask Google Cloud for."""

    accelerator: str = Field("v4-8", pattern=r"^(v4|v5litepod|v5p|v6e)-\d+$")
    zone: str = "us-central2-b"
    project: str | None = None  # None = gcloud's own default
    name: str = Field("mmkit", pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")
    runtime: str | None = None  # None = by family
    spot: bool = False
    keep: bool = False  # leave the machine running afterwards
    checkout: str = "."  # folder that is copied to the hosts

    @property
    def family(self) -> str:
        """``v4`` of ``v4-512``."""
        return self.accelerator.split("-")[0]

    @property
    def chips(self) -> int:
        """Chips of the slice, each of which is one device."""
        return max(int(self.accelerator.split("-")[1]) // CORES_A_CHIP.get(self.family, 1), 1)

    @property
    def hosts(self) -> int:
        """Machines of the slice: four chips each, eight on small v5e and v6e slices."""
        return 1 if self.chips <= (8 if self.family in ("v5litepod", "v6e") else 4) else self.chips // 4


@dataclasses.dataclass(frozen=True)
class Step:
    """One command and what it is for; ``always`` also runs after a failure."""

    about: str
    command: tuple[str, ...]
    always: bool = False

    def __str__(self) -> str:
        return f"# {self.about}\n{shlex.join(self.command)}"


def for_slice(run: RunConfig, target: TpuConfig) -> RunConfig:
    """The run on the devices of this slice; ConfigError where it cannot work there."""
    if run.backend.kind not in RUNS_ON:
        raise ConfigError(f"backend.kind {run.backend.kind!r} does not run on a TPU; use --backend xla")
    if target.hosts > 1 and "://" not in run.root:
        raise ConfigError(
            f"{target.accelerator} has {target.hosts} hosts with a disk each, and root {run.root!r} is a local folder: checkpoints would "
            "be cut up between them; use --run-dir gs://BUCKET/FOLDER"
        )
    return changed(run, backend__nodes=1, backend__processes=1, backend__xla_devices=target.chips)


def steps(target: TpuConfig, config: Path) -> tuple[Step, ...]:
    """All commands of a run, in order; ``config`` is the saved config on this machine."""
    gcloud = ("gcloud", "compute", "tpus", "tpu-vm")
    where = (f"--zone={target.zone}", *((f"--project={target.project}",) if target.project else ()))
    runtime = target.runtime or RUNTIMES[target.family]
    create = (*gcloud, "create", target.name, *where, f"--accelerator-type={target.accelerator}", f"--version={runtime}")
    everywhere = (*where, "--worker=all")
    ssh = (*gcloud, "ssh", target.name, *everywhere)
    copy = (*gcloud, "scp", *everywhere)
    install = f"cd {FOLDER} && python3 -m venv .venv && .venv/bin/pip install -q -e '.[tpu,gcs]'"
    made = [
        Step("create the slice", (*create, *(("--spot",) if target.spot else ()))),
        Step("a clean folder on every host", (*ssh, f"--command=rm -rf {FOLDER}")),
        Step("copy the checkout to every host", (*copy, "--recurse", target.checkout, f"{target.name}:{FOLDER}")),
        Step("copy the config to every host", (*copy, str(config), f"{target.name}:{FOLDER}/run.yaml")),
        Step("install on every host", (*ssh, f"--command={install}")),
        Step("train on every host", (*ssh, f"--command={train_command()}")),
    ]
    if not target.keep:
        made.append(Step("delete the slice", (*gcloud, "delete", target.name, *where, "--quiet"), always=True))
    return tuple(made)


def train_command() -> str:
    """What each host runs: its place among the hosts comes from the machine's metadata, the rest from the config."""
    ask = f"curl -sf -H Metadata-Flavor:Google {METADATA}"
    return " && ".join(
        (
            f"cd {FOLDER}",
            f"export TPU_WORKER_ID=$({ask}/agent-worker-number)",
            f"export TPU_WORKER_HOSTNAMES=$({ask}/worker-network-endpoints | tr , '\\n' | cut -d: -f3 | paste -sd,)",
            "export PJRT_DEVICE=TPU MMKIT_WORKER=1",
            ".venv/bin/python -m mmkit train --config run.yaml",
        )
    )


def start(run: RunConfig, target: TpuConfig, show: bool = False) -> int:
    """Runs every step, or only prints them with ``show``; returns the exit code of the first that failed, 0 otherwise.

    The slice is deleted after a failure too, unless ``keep``, so that a broken run costs nothing more.
    """
    spread = for_slice(run, target)
    with tempfile.TemporaryDirectory(prefix="mmkit-tpu-") as folder:
        config = Path(folder) / "run.yaml"
        config.write_text(to_yaml(spread), encoding="utf8")
        planned = steps(target, config)
        if show:
            print("\n".join(map(str, planned)))
            return 0
        if not shutil.which("gcloud"):
            raise ConfigError(
                "gcloud is not on PATH; install the Google Cloud CLI and `gcloud auth login`, or use --show to see the commands"
            )
        return _run(planned)


def _run(planned: tuple[Step, ...]) -> int:
    code = 0
    for step in planned:
        if code and not step.always:
            continue
        print(f"{step.about} ...", flush=True)
        try:
            ended = subprocess.run(step.command, check=False).returncode
        except KeyboardInterrupt:
            ended = 130
        if ended and not code:
            code = ended
            print(f"{step.about}: exit code {ended}", flush=True)
    return code
