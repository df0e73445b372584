"""The NVIDIA GPUs that a process may use, asked of the driver's own tool: no call here starts CUDA or opens a device."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

MIB, GB = 2**20, 10**9
FIELDS = "name,memory.total,uuid,mig.mode.current"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of one that is cut up (MIG), as the driver tells it."""

    name: str
    memory: int
    uuid: str = ""
    capability: float | None = None  # CUDA's, as 8.0; None where an old tool does not tell
    profile: str = ""  # of an instance, as 1g.10gb
    whole: int = 0  # bytes of the GPU that it is an instance of
    cut_up: bool = False
    instances: tuple[Gpu, ...] = ()


def nvidia_gpus(env: Mapping[str, str] | None = None, root: Path = Path("/")) -> tuple[list[Gpu], str]:
    """(the NVIDIA GPUs this process may use, what is wrong with them or ""), asked without starting CUDA in this process."""
    env = os.environ if env is None else env
    tool = shutil.which("nvidia-smi", path=env.get("PATH"))
    if not tool:
        loaded = (root / "proc/driver/nvidia/gpus").is_dir()
        return [], "NVIDIA's driver is loaded, but its tool nvidia-smi is not on PATH to ask for the GPUs" * loaded
    form = "--format=csv,noheader,nounits"
    text, trouble = _ask(tool, f"--query-gpu={FIELDS},compute_cap", form)
    if "compute_cap" in trouble:  # drivers before 2021 do not know the field
        text, trouble = _ask(tool, f"--query-gpu={FIELDS}", form)
    if trouble:
        return [], "" if "no devices were found" in trouble.lower() else f"nvidia-smi fails: {trouble}"
    gpus, silent = [], []
    for fields in ([part.strip() for part in line.split(",")] for line in text.splitlines() if line.count(",") >= 3):
        name, memory, uuid, mig, *more = fields
        if memory.isdigit():
            capability = float(more[0]) if more and re.fullmatch(r"\d+\.\d+", more[0]) else None
            gpus.append(Gpu(name, int(memory) * MIB, uuid, capability, cut_up=mig == "Enabled"))
        else:
            silent.append(name)
    if any(gpu.cut_up for gpu in gpus):
        gpus = _with_instances(gpus, _ask(tool, "-L")[0])
    trouble = f"nvidia-smi does not tell the memory of {', '.join(silent)}, which is left out" if silent else ""
    return visible(gpus, env.get("CUDA_VISIBLE_DEVICES")), trouble


def _ask(tool: str, *options: str) -> tuple[str, str]:
    """(what the tool prints, what it complains of)."""
    try:
        done = subprocess.run([tool, *options], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[0]
    return done.stdout, said if done.returncode or "no devices were found" in done.stdout.lower() else ""


def _with_instances(gpus: Sequence[Gpu], listed: str) -> list[Gpu]:
    """Each cut-up GPU with its instances, out of the tool's list: lines ``GPU 0: ...`` and below them ``MIG 1g.10gb ...``."""
    of: dict[str, list[Gpu]] = {}
    whole = {gpu.uuid: gpu for gpu in gpus}
    current = None
    for line in listed.splitlines():
        uuid = re.search(r"UUID: ([^)\s]+)\)", line)
        profile = re.match(r"\s+MIG (\S*?(\d+)g\.(\d+)gb\S*)", line)
        if profile and uuid and current:
            # the profile's size is rounded; in units of 10^9 it is below what the instance has
            own = Gpu(current.name, int(profile[3]) * GB, uuid[1], current.capability, profile[1], current.memory)
            of.setdefault(current.uuid, []).append(own)
        elif uuid and line.startswith("GPU"):
            current = whole.get(uuid[1])
    return [dataclasses.replace(gpu, instances=tuple(of.get(gpu.uuid, ()))) for gpu in gpus]


def visible(gpus: Sequence[Gpu], asked: str | None) -> list[Gpu]:
    """The GPUs that CUDA shows a process where CUDA_VISIBLE_DEVICES is ``asked``: by number, UUID or its beginning, up to the
    first that does not exist. Of GPUs that are cut up a process sees one instance, whichever others there are."""
    if asked is None:
        chosen = list(gpus)
    else:
        chosen = []
        for word in filter(None, (word.strip() for word in asked.split(","))):
            every = [*gpus, *(instance for gpu in gpus for instance in gpu.instances)]
            hits = [gpus[int(word)]] if word.isdigit() and int(word) < len(gpus) else []
            hits = hits or [gpu for gpu in every if not word.isdigit() and gpu.uuid.startswith(word)]
            if not hits or hits[0] in chosen:
                break
            chosen.append(hits[0])
    instances = [gpu if gpu.profile else gpu.instances[0] for gpu in chosen if gpu.profile or gpu.instances]
    return instances[:1] or [gpu for gpu in chosen if not gpu.cut_up]
