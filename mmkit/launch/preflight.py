"""Before anything starts: does the run fit this machine, what would it build, and is its data in order.

The model is built on the meta device, full-sized and without a byte of weights, its parameters are counted, and the plan is made.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from mmkit.config import ConfigError, RunConfig
from mmkit.sharding.plan import Machine, Part, Plan, accelerator, count_parts, make_plan

CPU_FLOPS = 5e10  # a core's rate in fp32 matrix products; half precision is slower or faster with the processor


@dataclasses.dataclass(frozen=True)
class Preflight:
    """What was found before the start."""

    run: RunConfig
    plan: Plan
    sources: tuple[dict[str, Any], ...] = ()  # one row a data source

    @property
    def steps(self) -> int:
        """Optimizer steps the run will take, for progress; 1 where that is not known."""
        return self.plan.steps or 1

    def rows(self) -> list[dict[str, Any]]:
        """The parameter and memory table, one row a component."""
        return self.plan.rows()

    def _repr_html_(self) -> str:
        from mmkit.notebook.tables import html

        parts = [f"<pre>{self.plan}</pre>", html(self.rows(), "parameters and memory of one device")]
        return "".join(parts) + (html(list(self.sources), "data") if self.sources else "")

    def __str__(self) -> str:
        from mmkit.notebook.tables import text

        return "\n".join([str(self.plan), "", text(self.rows()), *(["", text(list(self.sources))] if self.sources else [])])


def preflight(run: RunConfig, machine: Machine | None = None) -> Preflight:
    """Counts the model of ``run``, plans it, looks at its data, and raises TooLargeError where it cannot run here.

    A dry run is never too large: it is meant for looking at a model on a machine that cannot hold it. Nothing is downloaded.
    """
    plan = plan_of(run, machine=machine)
    if not run.dry_run:
        plan.check()
    sources, samples = data_rows(run)
    return Preflight(run, dataclasses.replace(plan, samples=samples or plan.samples), tuple(sources))


def plan_of(
    run: RunConfig,
    *,
    machine: Machine | None = None,
    device: str | None = None,
    devices: int | None = None,
    samples: int | None = None,
    price: float | None = None,
) -> Plan:
    """The plan of a run on ``machine``, on named accelerators, or (neither given) on this machine."""
    if machine is None:
        machine = accelerator(device, devices or 1, price) if device else this_machine(devices or run.devices)
    return make_plan(run, count(run), machine, samples)


def count(run: RunConfig) -> tuple[Part, ...]:
    """Parameters by component of the full-size model of ``run``, built without memory for its weights."""
    from mmkit.models.build import build

    module = build(run.model, device="meta", weights=False)
    described = importlib.import_module(type(module).__module__)
    components = getattr(described, "COMPONENTS", None) or importlib.import_module("mmkit.models.clip").COMPONENTS
    return count_parts(module, components, run.train)


# ---------------------------------------------------------------- this machine


def this_machine(devices: int = 1) -> Machine:
    """The accelerators of this machine, or its CPU and memory; ``devices`` processes share it."""
    gpus = nvidia_gpus()
    if gpus:
        name, memory = gpus[0]
        return Machine(f"{name} x {len(gpus)}", max(devices, 1), memory, 1e14)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = f"{cores} CPU cores, no accelerator"
    return Machine(name, max(devices, 1), host_memory(), CPU_FLOPS * cores / max(devices, 1), shared=True)


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


# ---------------------------------------------------------------- data


def data_rows(run: RunConfig) -> tuple[list[dict[str, Any]], int | None]:
    """One row a source (is it there, how many examples) and the number of examples in all; None where a source is not here.

    In a dry run a missing source is only told; otherwise it is a ConfigError, since the run would fail at its first batch.
    """
    from mmkit.data.readers import open_source

    rows, total = [], 0
    for source in run.data.sources:
        row = {"source": source.name, "format": source.format, "path": source.path}
        try:
            examples = len(open_source(source))
        except (ConfigError, OSError, ValueError) as error:
            if not run.dry_run:
                raise ConfigError(f"data source {source.name!r}: {error}") from None
            rows.append(row | {"examples": 0, "state": f"not here: {str(error).splitlines()[0]}"})
            continue
        rows.append(row | {"examples": examples, "state": "ok"})
        total += min(examples, source.cap or examples)
    return rows, total or None


def missing_sources(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the sources that are not on this machine."""
    return [row["source"] for row in rows if row["state"] != "ok"]
