"""Which preset fits which machine: the table of `mmkit plan --all` and of the notebook 00_setup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmkit.config import RunConfig, load
from mmkit.launch.machine import Machine, machine_of, named
from mmkit.launch.plan import Part, make_plan, size
from mmkit.launch.preflight import build_meta, count, spelt_out, stages_of
from mmkit.presets import presets

# One GPU of a small server, a workstation, GPU servers, the published runs' machines, and a slice of the newest kinds.
MACHINES = (
    "t4-16gb", "l4-24gb", "4xrtx-4090", "8xl40s-48gb", "8xa100-40gb", "8xa100-80gb", "8xh100-80gb", "96x4xa100-40gb",
    "v4-64", "v4-128", "v4-256", "v4-512", "v5e-256", "v6e-64",
)  # fmt: skip
DEBUG = "-debug"  # ends the names of the twins that run anywhere


def overview(models: Sequence[str] = (), stage: str = "finetune", machine: Machine | None = None) -> list[dict[str, Any]]:
    """One row a preset (all but the debug twins where none is named) and one column a machine: ``machine``, or where none is given
    this one, as ``here``, then those of `MACHINES`. A cell says what one device needs, with ``no`` where it has less.

    A preset without ``stage`` is planned at the last one it trains in. Each model is built once, without memory.
    """
    here, rows, built = machine or machine_of(), [], {}
    for name in dict.fromkeys(models or [name for name in presets() if not name.endswith(DEBUG)]):
        has = stages_of(name)
        trains = [each for each in ("pretrain", "finetune") if each in has]
        at = stage if stage in has or stage == "eval" or not trains else trains[-1]
        run = load(name, at)
        key = run.model.model_dump_json()
        built[key] = built.get(key) or build_meta(run)
        parts = count(run, built[key])
        row = {"model": name, "stage": at if at == stage else f"{at} (it has no {stage})"}
        row["parameters"] = f"{sum(part.parameters for part in parts) / 1e9:.3g} B"
        row["trainable"] = f"{sum(part.trained + part.adapters for part in parts) / 1e9:.3g} B"
        row |= {"here": verdict(run, parts, here if here.named else here.using(run.devices))}
        row |= {other: verdict(run, parts, named(other)) for other in MACHINES}
        rows.append(row)
    return rows


def verdict(run: RunConfig, parts: Sequence[Part], machine: Machine) -> str:
    """What one device of ``machine`` needs for ``run``, and whether it has that."""
    plan = make_plan(spelt_out(run), parts, machine)
    return size(plan.need.total) if plan.fits else f"no: {size(plan.need.total)}"
