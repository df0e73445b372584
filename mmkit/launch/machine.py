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
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import psutil

from mmkit.config import ConfigError, nearest

log = logging.getLogger(__name__)
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
        return dataclasses.replace(self, devices=devices, hosts=min(self.hosts, devices))


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
HOPPER, NETWORK = _peaks(989, 494, 67), 12.5e9 / 8
GPUS: dict[str, Device] = {
    "a100-40gb": Device("A100 40GB", 40 * GIB, _peaks(312, 156, 19.5), 300e9, 25e9, 85 * GB, 12, calibrated=True),
    "a100-80gb": Device("A100 80GB", 80 * GIB, _peaks(312, 156, 19.5), 300e9, 25e9, 170 * GB, 12, calibrated=True),
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
    kind, dash, size = asked.partition("-")
    if SPELT.get(kind, kind) in TPUS and (not dash or size.isdigit()):
        return _slice(text, SPELT.get(kind, kind), int(size or 0))
    counts, device = re.match(r"((?:\d+x)*)(.*)$", asked).groups()
    numbers = [int(number) for number in counts.split("x") if number]
    hits = [name for name in GPUS if _plain(device) in (_plain(name), _plain(re.sub(r"-\d+gb$", "", name)))]
    if len(hits) != 1 or len(numbers) > 2 or 0 in numbers:
        near = f"; did you mean {' or '.join(map(repr, hits))}?" if len(hits) > 1 else nearest(device, [*GPUS, *TPUS, "cpu"])
        slices = ", ".join(f"{name}-N" for name in TPUS)
        raise ConfigError(
            f"no machine {text!r}{near}; machines are [HOSTSx][DEVICESx]DEVICE of {', '.join(GPUS)}, TPU slices {slices}, and cpu"
        )
    hosts, each = [1] * (2 - len(numbers)) + numbers
    if each > MOST_GPUS:
        raise ConfigError(f"machine {text!r}: no host has {each} GPUs; write hosts x devices of each, as {each // 8}x8x{hits[0]}")
    row = GPUS[hits[0]]
    name = "x".join([*([str(hosts)] if hosts > 1 else []), *([str(each)] if hosts * each > 1 else []), hits[0]])
    return _machine(name, "cuda", row, hosts * each, hosts)


def _plain(text: str) -> str:
    return re.sub(r"[-_ ]", "", text)


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


# ---------------------------------------------------------------- by looking


def machine_of(text: str | None = None) -> Machine:
    """The machine that ``text`` names, else the one of the variable MMKIT_MACHINE, else the one found here."""
    name = text or os.environ.get(VARIABLE, "").strip()
    return named(name) if name else found()


def found() -> Machine:
    """This machine: its GPUs, or its CPU cores and memory."""
    cpu, gpus = this_cpu(), nvidia_gpus()
    if not gpus:
        return cpu
    name, memory = gpus[0]
    rates = dict.fromkeys(PRECISIONS, 0.0)
    return Machine(
        f"{len(gpus)} x {name}", "cuda", name, len(gpus), memory, peak=rates, host_memory=cpu.memory, cores=cpu.cores,
        measured=matmul_rate,
    )  # fmt: skip


PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


def this_cpu() -> Machine:
    """This computer's cores and memory as a machine: one process on it, whose rate is measured where it is asked for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name, memory = f"{cores} CPU cores", host_memory()
    return Machine(
        f"{name}, no accelerator", "cpu", name, 1, memory, peak=dict.fromkeys(PRECISIONS, 0.0), host_memory=memory,
        cores=cores, shared=True, measured=matmul_rate,
    )  # fmt: skip


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


def host_memory() -> int:
    """Bytes of memory this process may use: the machine's, or the container's limit where that is lower."""
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).is_file() else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def nvidia_gpus() -> list[tuple[str, int]]:
    """Name and memory in bytes of each NVIDIA GPU, asked without starting CUDA in this process."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    found = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line] if done.returncode == 0 else []
    return [(name.strip(), int(memory) * 2**20) for name, memory in found if memory.strip().isdigit()]
