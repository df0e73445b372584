"""The machine a run is for, as data: named by hand (``8xa100-80gb``, ``v4-64``, ``cpu``) or found by looking.

Everything that decides something from the machine takes a `Machine`, so that a decision for a machine that is not here can be
computed and tested. Looking opens no device: it asks the driver's own tool and reads variables and files.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil

from mmkit.config import BackendConfig, ConfigError, RunConfig, changed, nearest
from mmkit.launch.nvidia import Gpu, nvidia_gpus

log = logging.getLogger(__name__)
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
GIB, MIB, GB = 2**30, 2**20, 10**9
MOST_GPUS = 16  # of one host: the largest sold, a2-megagpu-16g
VARIABLE = "MMKIT_MACHINE"


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a run has: ``devices`` of ``memory`` bytes each, over ``hosts``, and what one does in a second."""

    name: str  # "8xa100-80gb", "v4-64", "cpu", or what was found
    kind: Literal["cuda", "tpu", "cpu"]
    device: str  # "A100 80GB", "TPU v4 chip", "2 CPU cores"
    devices: int  # of all hosts together; of a TPU its chips, whichever way its name counts
    memory: int  # bytes of one device; of a CPU those of the host, which its processes share
    hosts: int = 1
    # precision -> operations a second, from the maker's data sheet. A precision that the device does not compute in has no
    # entry; 0 says that it does, but not how fast (`measured` does).
    peak: Mapping[str, float] = dataclasses.field(default_factory=dict)
    host_memory: int = 0  # bytes of one host
    cores: int = 1  # CPU cores of one host
    link: float = 0.0  # bytes a second that a device sends to others of its host
    between_hosts: float = 0.0  # the same to devices of other hosts
    shared: bool = False  # the devices share one memory, as processes on a CPU do
    price: float | None = None  # USD of one device for one hour
    calibrated: bool = False  # `plan.FRACTIONS` were reached on it
    measured: Callable[[str], float] | None = None  # precision -> operations a second of a matrix product tried here
    named: bool = False  # given by name rather than found

    @property
    def devices_per_host(self) -> int:
        """Devices of each host."""
        return self.devices // self.hosts

    def using(self, devices: int) -> Machine:
        """The same machine for a run that spreads over ``devices`` of it: GPUs of one host, or processes of a CPU."""
        hosts = max(min(self.hosts, -(-devices // self.devices_per_host)), 1)
        return dataclasses.replace(self, devices=devices, hosts=hosts)


# ---------------------------------------------------------------- the table


@dataclasses.dataclass(frozen=True)
class Device:
    """One row of the table: a device, and the part of a host that comes with it."""

    label: str
    memory: int  # bytes that the driver reports, so that what is planned is there
    peak: Mapping[str, float]
    link: float
    between_hosts: float
    host_memory: int  # a device's part of it
    cores: int
    calibrated: bool = False
    slices: tuple[int, ...] = ()  # of a TPU: the chips of the slices there are
    cubes: int = 0  # and up to how many cubes of 64 chips, where it has those
    cores_a_chip: int = 1  # by which a TPU's slices are named
    chips_of_one_host: int = 4  # the largest slice with one host


def _peaks(half: float, tf32: float, fp32: float, *without: str) -> dict[str, float]:
    """Precision -> operations a second, from 10^12; bf16 and fp16 are as fast as each other where both are there."""
    rates = (("fp32", fp32), ("tf32", tf32), ("bf16", half), ("fp16", half))
    return {name: rate * 1e12 for name, rate in rates if name not in without}


def _tpu(half: float) -> dict[str, float]:
    """A TPU multiplies in bf16: three passes give tf32's digits, six fp32's; it has no fp16."""
    return _peaks(half, half / 3, half / 6, "fp16")


# Peaks are dense ones of the makers' data sheets (A100, H100, H200, HGX B200, L4, L40S, T4 tensor core GPU; the Ada whitepaper for
# the RTX 4090, with fp32 accumulation); memory is what nvidia-smi reports, which ECC and the driver make smaller than the name.
# Links are one direction: NVLink 3, 4, 5 (300, 450, 900 GB/s), PCIe 4 and 3 (32, 16 GB/s). Between hosts: the network of DGX A100,
# H100, B200 (one 200 or 400 Gb/s card a GPU), else an eighth of 100 Gb/s. Host memory and cores are an eighth of the clouds' largest
# machine with this GPU (a2-highgpu-8g, a2-ultragpu-8g, a3-highgpu-8g, a3-ultragpu-8g, a4-highgpu-8g, g2-standard-96, g6e.48xlarge,
# g4dn.metal); for the RTX 4090, which no cloud of the makers' has, those of a small workstation.
AMPERE, HOPPER = _peaks(312, 156, 19.5), _peaks(989, 494, 67)
NETWORK, PCIE = 12.5e9 / 8, 32e9
BF16_FROM = 8.0  # CUDA's capability from which a GPU multiplies in bf16
GPUS: dict[str, Device] = {
    "a100-40gb": Device("A100 40GB", 40 * GIB, AMPERE, 300e9, 25e9, 85 * GB, 12, calibrated=True),
    "a100-80gb": Device("A100 80GB", 80 * GIB, AMPERE, 300e9, 25e9, 170 * GB, 12, calibrated=True),
    "h100-80gb": Device("H100 80GB", 81559 * MIB, HOPPER, 450e9, 50e9, 234 * GB, 26),
    "h200-141gb": Device("H200 141GB", 143771 * MIB, HOPPER, 450e9, 50e9, 369 * GB, 28),
    "b200-180gb": Device("B200 180GB", 183359 * MIB, _peaks(2250, 1125, 75), 900e9, 50e9, 496 * GB, 28),
    "l4-24gb": Device("L4 24GB", 23034 * MIB, _peaks(121, 60, 30.3), 32e9, NETWORK, 48 * GB, 12),
    "l40s-48gb": Device("L40S 48GB", 46068 * MIB, _peaks(362, 183, 91.6), 32e9, NETWORK, 192 * GIB, 24),
    "rtx-4090": Device("RTX 4090 24GB", 24564 * MIB, _peaks(165, 82.6, 82.6), 32e9, NETWORK, 32 * GB, 8),
    "t4-16gb": Device("T4 16GB", 15360 * MIB, _peaks(65, 8.1, 8.1, "bf16"), 16e9, NETWORK, 48 * GIB, 12),
}
# cloud.google.com/tpu/docs/v4, v5e, v5p, v6e: peak, memory, links between chips (which also join hosts) and the slices there are.
# Machine types ct4p-hightpu-4t, ct5lp-hightpu-4t, ct5p-hightpu-4t, ct6e-standard-4t: host memory and cores of a chip.
# Sizes below a cube of 4x4x4 chips are powers of two, above it whole cubes; v5e and v6e have one flat pod.
CUBE = 64
BELOW = (4, 8, 16, 32)
FLAT = (1, 4, 8, 16, 32, 64, 128, 256)
TPUS: dict[str, Device] = {
    "v4": Device("TPU v4 chip", 32 * GIB, _tpu(275), 300e9, 300e9, 100 * GB, 60, slices=BELOW, cubes=32, cores_a_chip=2),
    "v5e": Device("TPU v5e chip", 16 * GIB, _tpu(197), 200e9, 200e9, 48 * GB, 28, slices=FLAT, chips_of_one_host=8),
    "v5p": Device("TPU v5p chip", 95 * GIB, _tpu(459), 600e9, 600e9, 112 * GB, 52, slices=BELOW, cubes=96, cores_a_chip=2),
    "v6e": Device("TPU v6e chip", 32 * GIB, _tpu(918), 400e9, 400e9, 180 * GB, 45, slices=FLAT, chips_of_one_host=8),
}
CHIPS_A_HOST = 4  # of every slice over several hosts
SPELT = {"v5litepod": "v5e"}  # gcloud's own word


# ---------------------------------------------------------------- by name


def named(text: str) -> Machine:
    """The machine that ``text`` names: ``8xa100-80gb``, ``2x8xh100-80gb`` (hosts x devices of each), ``v4-64`` (a TPU slice as
    gcloud spells it: v4 and v5p by cores, v5e and v6e by chips), or ``cpu``, which is this computer's.

    ConfigError with the nearest name for one that is not known, and with the sizes there are for a slice of another size.
    """
    asked = text.strip().lower()
    if asked == "cpu":
        return dataclasses.replace(this_cpu(), name="cpu", named=True)
    kind, _, size = asked.partition("-")
    family = SPELT.get(kind, kind)
    if family in TPUS and size.isdigit():
        return _slice(text, family, int(size))
    counts, device = re.match(r"((?:\d+x)*)(.*)$", asked).groups()
    numbers = [int(number) for number in counts.split("x") if number]
    if family in TPUS and not size or 0 in numbers:
        raise ConfigError(f"machine {text!r} does not say how many devices it has; write it as 8xa100-80gb, v4-64")
    hits = [name for name in GPUS if _plain(device) in (_plain(name), _plain(re.sub(r"-\d+gb$", "", name)))]
    if len(hits) != 1 or len(numbers) > 2:
        near = f", did you mean {' or '.join(map(repr, hits))}?" if len(hits) > 1 else nearest(device, [*GPUS, *TPUS, "cpu"])
        slices = ", ".join(f"{name}-N" for name in TPUS)
        known = f"DEVICE, NxDEVICE or HOSTSxNxDEVICE of {', '.join(GPUS)}, TPU slices {slices}, and cpu"
        raise ConfigError(f"no machine {text!r}{near}; machines are {known}")
    hosts, each = [1] * (2 - len(numbers)) + numbers
    if each > MOST_GPUS:
        raise ConfigError(f"machine {text!r}: no host has {each} GPUs; write hosts x devices of each, as {each // 8}x8x{hits[0]}")
    row = GPUS[hits[0]]
    return _machine(_name(hosts, each, hits[0]), "cuda", row, hosts * each, hosts)


def _plain(text: str) -> str:
    return re.sub(r"[-_ ]", "", text)


def _name(hosts: int, each: int, device: str, times: str = "x") -> str:
    counts = [hosts, each] if hosts > 1 else [each] if each > 1 else []
    return times.join([*map(str, counts), device])


def _slice(text: str, family: str, size: int) -> Machine:
    row = TPUS[family]
    chips, rest = divmod(size, row.cores_a_chip)
    whole_cubes = chips > 0 and chips % CUBE == 0 and chips <= row.cubes * CUBE
    if rest or not (chips in row.slices or whole_cubes):
        counted = "cores" if row.cores_a_chip > 1 else "chips"
        there = ", ".join(str(chips * row.cores_a_chip) for chips in row.slices)
        cube = CUBE * row.cores_a_chip
        there += f", and multiples of {cube} up to {row.cubes * cube}" if row.cubes else ""
        raise ConfigError(f"machine {text!r}: {family} has no slice of {size} {counted}; it has {there}")
    hosts = 1 if chips <= row.chips_of_one_host else chips // CHIPS_A_HOST
    return _machine(f"{family}-{size}", "tpu", row, chips, hosts)


def _machine(name: str, kind: Literal["cuda", "tpu"], row: Device, devices: int, hosts: int) -> Machine:
    return Machine(
        name, kind, row.label, devices, row.memory, hosts, row.peak, row.host_memory * devices // hosts,
        row.cores * devices // hosts, row.link, row.between_hosts, calibrated=row.calibrated, named=True,
    )  # fmt: skip


# ---------------------------------------------------------------- which one


def machine_of(text: str | None = None) -> Machine:
    """The machine that ``text`` names, else the one of the variable MMKIT_MACHINE, else the one found here."""
    if text and text.strip():
        return named(text)
    name = os.environ.get(VARIABLE, "").strip()
    try:
        return named(name) if name else found()
    except ConfigError as error:
        raise ConfigError(f"{error} (from the variable {VARIABLE})" if name else str(error)) from None


def check_is_here(machine: Machine) -> None:
    """ConfigError where a machine given by name is not this one: what would train has other devices than what was planned."""
    if not machine.named:
        return
    here = found()
    same = (here.kind, here.device) == (machine.kind, machine.device) or here.kind == machine.kind == "cpu"
    if not same or machine.devices > here.devices or machine.hosts > here.hosts:
        raise ConfigError(
            f"machine {machine.name} is not here: this is {here.name}. For a machine that is elsewhere a run is planned, looked "
            "at with dry_run (--dry-run), and its job written (mmkit launch --slurm or --tpu, --show); to train here leave "
            f"out machine and {VARIABLE}"
        )


def one_device(run: RunConfig) -> RunConfig:
    """``run`` with the backend of one process on one device of this machine, whatever backend its preset trains by: what scores."""
    virtual = run.backend.xla_devices  # of the CPU; one of them does the work of one process
    kind = "xla" if virtual or found().kind == "tpu" else "single"
    return changed(run, backend=BackendConfig(kind=kind, xla_devices=virtual and 1).model_dump())


def job_options(machine: Machine, target: str) -> dict[str, str]:
    """What a SLURM job or a TPU VM is asked for to be this machine; ConfigError where the target has no such devices."""
    other = {"slurm": "tpu", "tpu": "slurm"}[target]
    if (machine.kind == "tpu") != (target == "tpu"):
        what = "a TPU slice" if machine.kind == "tpu" else "no TPU slice"
        raise ConfigError(f"machine {machine.name} is {what}: it goes with --target {other}, or name another machine")
    if target == "tpu":
        family, size = machine.name.split("-")
        return {"accelerator": f"{next((ours for ours, own in SPELT.items() if own == family), family)}-{size}"}
    gpus = {"gpus_per_node": "0"} if machine.kind == "cpu" else {}
    return {"nodes": str(machine.hosts), "tasks_per_node": str(machine.devices_per_host)} | gpus


# ---------------------------------------------------------------- by looking


def found(env: Mapping[str, str] | None = None, root: Path = Path("/")) -> Machine:
    """The machine that this process may use: a TPU slice, the GPUs of its hosts, or CPU cores and memory.

    It looks at the driver's tool, the PCI bus, the metadata of a TPU VM, SLURM's and cgroups' limits; ``env`` stands for the
    variables of this process, ``root`` for its files. Apple's GPU is not used: a Mac is its CPU cores.
    """
    env = os.environ if env is None else env
    cpu = this_cpu(env, root)
    if tpu := _tpu_here(env, root):
        return dataclasses.replace(tpu, host_memory=cpu.memory, cores=cpu.cores, named=False)
    gpus, trouble = nvidia_gpus(env, root)
    if trouble:
        log.warning("%s; going on without GPUs", trouble) if not gpus else log.warning("%s", trouble)
    return _of_gpus(gpus, env, cpu) if gpus else cpu


def this_cpu(env: Mapping[str, str] | None = None, root: Path = Path("/")) -> Machine:
    """The cores and memory that this process may use, as a machine; its rate is measured where somebody asks for it."""
    cores, memory = host_cores(root), host_memory(os.environ if env is None else env, root)
    device = f"{cores} CPU core{'s' * (cores > 1)}"
    apple = " (Apple's GPU is not used)" if sys.platform == "darwin" else ""
    return Machine(
        f"{device}, no accelerator{apple}", "cpu", device, 1, memory, peak=dict.fromkeys(PRECISIONS, 0.0),
        host_memory=memory, cores=cores, shared=True, measured=matmul_rate,
    )  # fmt: skip


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The control groups of this process that may limit ``controller``, innermost first, of version 2 and 1: a limit of any of
    them holds. In a container the path that the kernel tells may lie outside of what is mounted; the mount's top is its own."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if names else "")
        own = top / path.strip("/")
        yield from [own, *(folder for folder in own.parents if folder == top or top in folder.parents)]


def host_memory(env: Mapping[str, str] | None = None, root: Path = Path("/")) -> int:
    """Bytes of memory this process may use: the machine's, or where that is lower the limit of its control groups or SLURM job."""
    env = os.environ if env is None else env
    limits = [psutil.virtual_memory().total]
    for folder in _cgroups(root, "memory"):
        limits += [int(text) for name in ("memory.max", "memory.limit_in_bytes") if (text := _read(folder / name)).isdigit()]
    if "SLURM_JOB_ID" in env:  # MB; 0 stands for all of a node. Not every cluster enforces it by a control group
        limits += [_count(env, "SLURM_MEM_PER_NODE") * MIB, _count(env, "SLURM_MEM_PER_CPU") * _count(env, "SLURM_CPUS_ON_NODE") * MIB]
    return min(limit for limit in limits if limit > 0)


def host_cores(root: Path = Path("/")) -> int:
    """CPU cores this process may use: those it may run on, or where that is less what its control groups grant."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups(root, "cpu"):
        quota = _read(folder / "cpu.max").split() or [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if all(text.isdigit() and int(text) > 0 for text in quota):
            cores = min(cores, max(int(quota[0]) // int(quota[1]), 1))
    return cores


def _count(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "").strip()
    return int(text) if text.isdigit() else 0


# ---------------------------------------------------------------- GPUs


def _row_of(gpu: Gpu) -> tuple[str, Device]:
    """(the GPU's name in the table, or "" where it is not there; what is known of it)."""
    words = set(re.split(r"[^a-z0-9]+", gpu.name.lower()))
    for name, row in GPUS.items():
        family = name.removeprefix("rtx-").split("-")[0]
        # a laptop's chip, a 4090 D and H100's PCIe card are slower than their namesakes
        other = words & {"laptop", "d", "max"} or ("pcie" in words and family != "a100")
        near = abs((gpu.whole or gpu.memory) - row.memory) < 0.06 * row.memory
        if family in words and near and not other:
            link = PCIE if "pcie" in words else row.link
            if not gpu.profile:
                return name, dataclasses.replace(row, link=link)
            part = int(re.search(r"(\d+)g\.", gpu.profile)[1]) / 7
            peak = {precision: rate * part for precision, rate in row.peak.items()}
            return "", dataclasses.replace(row, label=f"{row.label} {gpu.profile}", memory=gpu.memory, peak=peak, calibrated=False)
    lacks = {"bf16"} if gpu.capability is not None and gpu.capability < BF16_FROM else set()
    peak = {precision: 0.0 for precision in PRECISIONS if precision not in lacks}
    return "", Device(f"{gpu.name} {gpu.profile}".strip(), gpu.memory, peak, PCIE, NETWORK, 0, 0)


def _of_gpus(gpus: Sequence[Gpu], env: Mapping[str, str], cpu: Machine) -> Machine:
    """The machine of these GPUs of each host: what the weakest of them can, on as many hosts as SLURM's job has.

    Where srun gives each task a GPU of its own, a process sees one and its host has as many as tasks.
    """
    rows = [_row_of(gpu) for gpu in gpus]
    labels = dict.fromkeys(row.label for _, row in rows)
    if len(labels) > 1:
        log.warning(
            "GPUs of %d kinds (%s): the weakest decides. CUDA_VISIBLE_DEVICES leaves some out; with CUDA_DEVICE_ORDER=PCI_BUS_ID "
            "its numbers are nvidia-smi's", len(labels), ", ".join(labels),
        )  # fmt: skip
    weakest = min((row for _, row in rows), key=lambda row: row.memory)
    peak = {name: min(row.peak[name] for _, row in rows) for name in PRECISIONS if all(name in row.peak for _, row in rows)}
    hosts = max(_count(env, "SLURM_STEP_NUM_NODES") or _count(env, "SLURM_JOB_NUM_NODES") or _count(env, "SLURM_NNODES"), 1)
    tasks = _count(env, "SLURM_STEP_NUM_TASKS") // hosts if "SLURM_PROCID" in env else 0
    each = max(len(gpus), min(tasks, _count(env, "SLURM_GPUS_ON_NODE")))
    known = {name for name, _ in rows}
    name = _name(hosts, each, known.pop()) if len(known) == 1 and "" not in known else _name(hosts, each, " and ".join(labels), " x ")
    return Machine(
        name, "cuda", " and ".join(labels), hosts * each, weakest.memory, hosts, peak, cpu.memory, cpu.cores,
        min(row.link for _, row in rows), weakest.between_hosts, calibrated=all(row.calibrated for _, row in rows),
        measured=matmul_rate,
    )  # fmt: skip


# ---------------------------------------------------------------- TPUs


METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes"
# Google's chips on the PCI bus, as torch_xla/_internal/tpu.py and jax/_src/hardware_utils.py list them.
GOOGLE, CHIPS = "0x1ae0", {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e"}


def tpu_chips(root: Path = Path("/")) -> list[str]:
    """The family of each TPU chip of this host, from the PCI bus."""
    folders = [path.parent for path in root.glob("sys/bus/pci/devices/*/vendor") if _read(path) == GOOGLE]
    return [CHIPS[kind] for folder in folders if (kind := _read(folder / "device")) in CHIPS]


def _metadata(name: str) -> str:
    """An attribute of this Google Cloud VM; "" where nothing answers."""
    request = urllib.request.Request(f"{METADATA}/{name}", headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310 - a constant address
            return answer.read().decode().strip()
    except OSError:
        return ""


def _tpu_here(env: Mapping[str, str], root: Path) -> Machine | None:
    """The TPU slice that this host is part of: by its variables, else its VM's metadata, else the chips of its PCI bus and the
    hosts of TPU_WORKER_HOSTNAMES. None where PJRT_DEVICE names another device."""
    asked = env.get("PJRT_DEVICE", "").upper()
    if asked not in ("", "TPU"):
        return None
    chips, kind = tpu_chips(root), env.get("TPU_ACCELERATOR_TYPE", "").strip()
    if not chips and not kind and not asked:
        return None
    kind = kind or _metadata("accelerator-type")
    hosts = len([host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host.strip()]) or 1
    try:
        slice_ = named(kind) if kind else None
    except ConfigError as error:
        if not chips:
            raise ConfigError(f"this TPU is not in the table: {error}; name the machine it is most like by {VARIABLE}") from None
        slice_ = None
    if slice_ is None and not chips:
        log.warning("PJRT_DEVICE=TPU, but this host has no TPU chip and no variable or metadata names one; going on without")
        return None
    slice_ = slice_ or _machine(f"{hosts * len(chips)} x {TPUS[chips[0]].label}", "tpu", TPUS[chips[0]], hosts * len(chips), hosts)
    alone = (env.get("TPU_PROCESS_BOUNDS") or env.get("TPU_HOST_BOUNDS") or "").replace(" ", "") == "1,1,1"
    some = len((env.get("TPU_VISIBLE_CHIPS") or env.get("TPU_VISIBLE_DEVICES") or "").replace(",", " ").split())
    use = slice_.devices_per_host if alone or some else slice_.devices
    use = min(some or use, use)
    if use == slice_.devices:
        return slice_
    return dataclasses.replace(slice_, name=f"{use} of {slice_.name}", devices=use, hosts=1)


# ---------------------------------------------------------------- how fast


MATMUL = """
import sys, time, torch
precision, seconds, device = sys.argv[1], float(sys.argv[2]), "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
size = 1024 if device == "cpu" else 8192
half = {"bf16": torch.bfloat16, "fp16": torch.float16}
a, b = (torch.randn(size, size, device=device, dtype=half.get(precision)) for _ in range(2))
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
(a @ b, wait())
start, products = time.perf_counter(), 0
while time.perf_counter() - start < seconds:
    (a @ b, wait())
    products += 1
print("RATE", 2 * size**3 * products / (time.perf_counter() - start))
"""


@functools.cache
def matmul_rate(precision: str, seconds: float = 2.0) -> float:
    """Operations a second of a square matrix product in ``precision``, tried for two seconds once in the life of this
    process; 0 where it cannot be tried. A process of its own does it: the accelerator stays free for training, and no
    setting of this process changes.
    """
    command = [sys.executable, "-c", MATMUL, precision, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"RATE (\S+)", done.stdout)
    if not found:
        log.warning("a matrix product in %s could not be tried here: %s", precision, done.stderr[-500:])
    return float(found[1]) if found else 0.0
