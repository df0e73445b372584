"""What is this machine, what is missing on it, and what to do about each fault.

`examine` looks and changes nothing; it makes no network connection and opens no accelerator, so a training process can still have it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mmkit.cache import cache_root
from mmkit.config import ConfigError
from mmkit.launch.machine import GIB, VARIABLE, machine_of, this_cpu, tpu_chips
from mmkit.launch.nvidia import nvidia_gpus
from mmkit.notebook.tables import html, text

OK, NOTE, FAULT = "ok", "note", "FAULT"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    what: str
    state: str
    found: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """All findings; shows itself as a table."""

    findings: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        """What must be put right before anything runs."""
        return tuple(finding for finding in self.findings if finding.state == FAULT)

    def rows(self) -> list[dict[str, Any]]:
        """One row a finding."""
        return [dataclasses.asdict(finding) for finding in self.findings]

    def _repr_html_(self) -> str:
        return html(self.rows(), self.verdict())

    def verdict(self) -> str:
        """One sentence."""
        faults = self.faults
        return "this machine is ready" if not faults else f"{len(faults)} to put right: {', '.join(fault.what for fault in faults)}"

    def __str__(self) -> str:
        return f"{text(self.rows())}\n{self.verdict()}"

    __repr__ = __str__


def examine() -> Report:
    """Looks at the machine, the packages, the accelerators, the compilers, the offline packs and the schedulers."""
    looks: tuple[Callable[[], Iterable[Finding]], ...] = (
        _python, _machine, _disk, _packages, _torch, _compiled_ops, _packs, _data_tools, _threads, _jupyter, _schedulers
    )  # fmt: skip
    return Report(tuple(finding for look in looks for finding in look()))


def _python() -> Iterator[Finding]:
    good = (3, 11) <= sys.version_info < (3, 13)
    remedy = "" if good else "use Python 3.11 or 3.12: `make env` picks one of them on PATH"
    yield Finding("python", OK if good else FAULT, f"{platform.python_version()} at {sys.executable}", remedy)


def _machine() -> Iterator[Finding]:
    cpu = this_cpu()
    small = cpu.memory < 6 * GIB
    remedy = "the demo needs about 5 GB: close other programs or take smaller settings (data.max_length)" if small else ""
    found = f"{cpu.cores} cores, {cpu.memory / GIB:.1f} GiB, {platform.machine()}"
    yield Finding("cpu and memory", NOTE if small else OK, found, remedy)
    gpus, trouble = nvidia_gpus()
    names = ", ".join(f"{gpu.name} {gpu.profile} {gpu.memory / GIB:.0f} GiB".replace("  ", " ") for gpu in gpus)
    if trouble:
        remedy = "put the driver right (nvidia-smi must list the GPUs), or hide them: CUDA_VISIBLE_DEVICES="
        yield Finding("NVIDIA GPUs", FAULT, "; ".join(filter(None, (names, trouble))), remedy)
    else:
        yield _optional("NVIDIA GPUs", names, "runs marked for GPUs or TPUs can be planned and dry-run here")
    chips = tpu_chips()
    yield _optional("TPU", f"{len(chips)} {chips[0]} chips of this host" if chips else "", "`mmkit launch --target tpu` drives one from here")
    try:
        machine = machine_of()
    except ConfigError as error:
        yield Finding("machine", FAULT, os.environ.get(VARIABLE, ""), str(error))
        return
    told = f"{machine.name}: {machine.devices} x {machine.device}, {machine.memory / GIB:.1f} GiB each" if machine.kind != "cpu" else machine.name
    links = f"; {machine.link / 1e9:.0f} GB/s to others of its host" if machine.devices_per_host > 1 else ""
    links += f", {machine.between_hosts / 1e9:.3g} GB/s between {machine.hosts} hosts" if machine.hosts > 1 else ""
    elsewhere = f"named by {VARIABLE}: runs are planned for it, and train only where it is" if machine.named else ""
    yield Finding("machine", NOTE if machine.named else OK, told + links, elsewhere)


def _optional(what: str, found: str, otherwise: str) -> Finding:
    """A finding about something that may be absent; ``found`` is empty then, and ``otherwise`` says what that means."""
    return Finding(what, OK if found else NOTE, found or "none", "" if found else otherwise)


def _disk() -> Iterator[Finding]:
    for what, folder in (("cache folder", cache_root()), ("working folder", Path.cwd())):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        writable = os.access(there, os.W_OK)
        remedy = "" if writable else "point MMKIT_CACHE at a folder you may write to"
        remedy = remedy or ("free some space: the demo keeps about 2 GB" if free < 3 * GIB else "")
        yield Finding(what, FAULT if not writable else NOTE if remedy else OK, f"{folder}, {free / GIB:.0f} GiB free", remedy)


def requirements() -> list[Any]:
    """What mmkit's own metadata asks for on this platform, less the optional parts; ConfigError where it is not installed."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("mmkit") or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("mmkit is not installed in this Python; run `make env`, or `pip install -e .` in the checkout") from None
    wanted = [Requirement(line) for line in lines]
    return [need for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]


def _packages() -> Iterator[Finding]:
    try:
        needs = requirements()
    except ConfigError as error:
        yield Finding("packages", FAULT, "no metadata of mmkit", str(error))
        return
    good = 0
    for need in needs:
        try:
            version = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(f"package {need.name}", FAULT, "missing", f"pip install '{need.name}{need.specifier}', or `make env`")
            continue
        if need.specifier.contains(version, prereleases=True):
            good += 1
        else:
            yield Finding(f"package {need.name}", FAULT, version, f"pip install '{need.name}{need.specifier}', or `make env`")
    yield Finding("packages", OK if good == len(needs) else NOTE, f"{good} of {len(needs)} as pinned")


def _torch() -> Iterator[Finding]:
    import torch

    yield Finding("torch", OK, f"{torch.__version__}, {torch.get_num_threads()} threads")
    (gpus, _), built = nvidia_gpus(), torch.version.cuda
    if gpus and not built:
        yield Finding("CUDA build", FAULT, "torch without CUDA on a machine with GPUs", "pip install torch==2.9.1 from the default index")
    flags = getattr(torch.backends.cpu, "get_cpu_capability", lambda: "unknown")()
    yield Finding("bf16 on the CPU", OK, f"runs in {flags}; fast where the processor has avx512_bf16 or amx: {_has_fast_bf16()}")


def _has_fast_bf16() -> str:
    path = Path("/proc/cpuinfo")
    words = path.read_text(errors="replace") if path.is_file() else ""
    return "yes" if "avx512_bf16" in words or "amx_bf16" in words else "no" if words else "unknown"


def _compiled_ops() -> Iterator[Finding]:
    """DeepSpeed compiles operations when asked to; mmkit asks for none, so that a machine without a compiler trains too."""
    home = os.environ.get("CUDA_HOME")
    tools = {name: shutil.which(name) for name in ("nvcc", "ninja", "g++")}
    have = ", ".join(name for name, path in tools.items() if path) or "none"
    found = f"compilers here: {have}; CUDA_HOME {'set' if home else 'not set'}; ZeRO uses torch AdamW (no compiled ops)"
    there = importlib.util.find_spec("deepspeed") is not None
    yield Finding("deepspeed", OK if there else FAULT, found, "" if there else "make env")


def _packs() -> Iterator[Finding]:
    from mmkit.models.packs import PACKS, pack_path

    for name, pack in PACKS.items():
        try:
            pack_path(name)
        except ValueError:
            yield Finding(f"weights {name}", FAULT, "missing", f"{pack.install} (or `make env`); the demo needs it")
        else:
            yield Finding(f"weights {name}", OK, f"{pack.content}, {pack.licence}")


def _data_tools() -> Iterator[Finding]:
    apt = "there" * bool(shutil.which("apt-get") and shutil.which("dpkg-deb"))
    npm = "there" * bool(shutil.which("npm"))
    yield _optional(
        "apt (photo stamps, emoji font)", apt, "captions and regions fall back to easy-VQA's shapes without Debian's photo stamps"
    )
    yield _optional("npm (emoji pictures)", npm or "none, and not needed beside apt" * bool(apt), "no emoji pictures without apt or npm")


def _threads() -> Iterator[Finding]:
    policy = os.environ["OMP_WAIT_POLICY"]  # the package sets it where the user has not
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    busy = load > cores + 0.5 and policy.upper() != "PASSIVE"
    remedy = "other work runs here: unset OMP_WAIT_POLICY before starting Python, so that threads wait without spinning" if busy else ""
    yield Finding("threads", NOTE if busy else OK, f"OMP_WAIT_POLICY={policy}, load {load:.1f} on {cores} cores", remedy)


def _jupyter() -> Iterator[Finding]:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        command = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        yield Finding("notebook kernel", FAULT, "no kernel named python3", "python -m ipykernel install --sys-prefix")
        return
    other = Path(command).is_absolute() and Path(command).resolve() != Path(sys.executable).resolve()
    remedy = "notebooks would run in another Python: python -m ipykernel install --sys-prefix" if other else ""
    yield Finding("notebook kernel", FAULT if other else OK, command if other else "python3, this Python", remedy)


def _schedulers() -> Iterator[Finding]:
    for what, tool, target in (("SLURM", "sbatch", "slurm"), ("Google Cloud", "gcloud", "tpu")):
        yield _optional(what, f"{tool} is here" * bool(shutil.which(tool)), f"no {tool}; needed only for --target {target}")
