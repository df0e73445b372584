"""A TPU VM or pod, driven with gcloud: create it, copy the kit and the config, install, train on all hosts, delete it.

Every host runs the same command; torch_xla's SPMD joins their devices. Hosts have disks of their own, so the run folder must be one
that all of them see (gs://...). `steps` is plain data and can be read, tested and printed without an account.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

from pydantic import Field

import mmkit
from mmkit.config import ConfigError, RunConfig, Settings, changed, to_yaml
from mmkit.launch.machine import METADATA, Machine, named
from mmkit.launch.preflight import check_stage

RUNTIMES = {  # software version of a TPU VM by the accelerator's family
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
RUNS_ON = ("xla",)  # backends that drive these devices
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
    checkout: str | None = None  # git checkout to copy to the hosts; None = the one this mmkit runs from, else its wheel

    @property
    def family(self) -> str:
        """``v4`` of ``v4-512``."""
        return self.accelerator.split("-")[0]

    @property
    def machine(self) -> Machine:
        """The slice as a machine; ConfigError where its family has none of this size."""
        return named(self.accelerator)


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
    check_stage(run)
    if run.backend.kind not in RUNS_ON:
        raise ConfigError(f"backend.kind {run.backend.kind!r} does not run on a TPU; use --backend xla")
    if target.machine.hosts > 1 and "://" not in run.root:
        raise ConfigError(
            f"{target.accelerator} has {target.machine.hosts} hosts with a disk each, and root {run.root!r} is a local folder: checkpoints would "
            "be cut up between them; use --run-dir gs://BUCKET/FOLDER"
        )
    return changed(run, backend__nodes=1, backend__processes=1, backend__xla_devices=target.machine.devices)


def pack(target: TpuConfig, folder: Path) -> Path:
    """The kit as one file in ``folder``: the checkout's files that git tracks or would (uncommitted presets, but no .venv, .git or
    runs/) as ``mmkit.tar.gz``, or for an installed kit its wheel. ConfigError where there is neither."""
    here = Path(mmkit.__file__).resolve().parent.parent
    if target.checkout is None and not (here / "pyproject.toml").is_file():
        return installed_wheel(folder)
    root = Path(target.checkout).resolve() if target.checkout else here
    if not (root / "pyproject.toml").is_file():
        raise ConfigError(f"option checkout = {target.checkout!r} has no pyproject.toml; give the folder of a checkout of mmkit")
    if not shutil.which("git"):
        raise ConfigError(f"git is not on PATH, and it tells which files of {root} to copy; install it")
    ask = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(ask, capture_output=True, check=False)
    if listed.returncode:
        told = listed.stderr.decode(errors="replace").strip()
        raise ConfigError(f"{root} is no git checkout, so what to copy is not known ({told}); clone the kit, or install its wheel")
    names = sorted({name for name in os.fsdecode(listed.stdout).split("\0") if name})
    archive = folder / "mmkit.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in names:
            if os.path.lexists(root / name):  # git lists deleted files until the deletion is committed
                tar.add(root / name, arcname=name, recursive=False)
    return archive


def installed_wheel(folder: Path) -> Path:
    """The wheel that this mmkit was installed from, put together again from the files that its RECORD names; nothing is built."""
    kit = importlib.metadata.distribution("mmkit")
    made_here = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}  # by the installer; scripts come from entry points
    inside = [file for file in kit.files or () if ".." not in file.parts and file.suffix != ".pyc"]
    kept = [file for file in inside if not (file.parts[0].endswith(".dist-info") and file.name in made_here)]
    info = next((file.parts[0] for file in kept if file.parts[0].endswith(".dist-info")), "")
    if not info or not any(file.parts[0] == "mmkit" for file in kept):
        raise ConfigError("mmkit is neither a git checkout nor an installed wheel here; set --option checkout=FOLDER")
    wheel = folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    rows = [f"{file},{file.hash.mode}={file.hash.value},{file.size}" if file.hash else f"{file},," for file in kept]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in kept:
            archive.write(file.locate(), str(file))
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,", ""]))
    return wheel


def steps(target: TpuConfig, config: Path, kit: Path) -> tuple[Step, ...]:
    """All commands of a run, in order; ``config`` is the saved config on this machine, ``kit`` what `pack` made."""
    gcloud = ("gcloud", "compute", "tpus", "tpu-vm")
    where = (f"--zone={target.zone}", *((f"--project={target.project}",) if target.project else ()))
    runtime = target.runtime or RUNTIMES[target.family]
    create = (*gcloud, "create", target.name, *where, f"--accelerator-type={target.accelerator}", f"--version={runtime}")
    everywhere = (*where, "--worker=all")
    ssh = (*gcloud, "ssh", target.name, *everywhere)
    copy = (*gcloud, "scp", *everywhere)
    unpack, what = ("", f"./{kit.name}") if kit.suffix == ".whl" else (f"tar -xzf {kit.name} && ", "-e .")
    install = f"cd {FOLDER} && {unpack}python3 -m venv .venv && .venv/bin/pip install -q {what}'[tpu,gcs]'"
    made = [
        Step("create the slice", (*create, *(("--spot",) if target.spot else ()))),
        Step("a clean folder on every host", (*ssh, f"--command=rm -rf {FOLDER} && mkdir {FOLDER}")),
        Step("copy the kit to every host", (*copy, str(kit), f"{target.name}:{FOLDER}/{kit.name}")),
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
    if not show and not shutil.which("gcloud"):
        raise ConfigError(
            "gcloud is not on PATH; install the Google Cloud CLI and `gcloud auth login`, or use --show to see the commands"
        )
    with tempfile.TemporaryDirectory(prefix="mmkit-tpu-") as folder:
        config = Path(folder) / "run.yaml"
        config.write_text(to_yaml(spread), encoding="utf8")
        planned = steps(target, config, pack(target, Path(folder)))
        if show:
            print("\n".join(map(str, planned)))
            return 0
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
