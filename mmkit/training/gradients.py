"""Which trained tensors the first update reached: a tensor without a gradient is a mistake that no loss curve shows (U11, U49)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mmkit.config import ConfigError
from mmkit.models.vocabulary import ROWS, row_tables
from mmkit.errors import InputError
from mmkit.training.optim import Components, compiled, component_of

log = logging.getLogger(__name__)

NEEDS = {"encoders": "image_real", "connector": "image_real", "samplers": "image_real", "regions": "region_real"}  # component: its input
PATIENCE = 20  # steps
LATE = re.compile(r"\.lora_(A|magnitude_vector)\.default\.weight$")


def check_allowed(allowed: Iterable[str], trained: Iterable[str]) -> None:
    """ConfigError for a pattern of ``train.allow_no_grad`` that is none, or that fits no trained tensor and so would excuse nothing."""
    trained = list(trained)
    for pattern in allowed:
        if not any(map(compiled("train.allow_no_grad", pattern).search, trained)):
            examples = ", ".join(trained[:3])
            raise ConfigError(f"train.allow_no_grad pattern {pattern!r} matches no trained tensor; their names look like {examples}")


def check_reached(state: Any, reached: Mapping[str, bool]) -> list[dict[str, Any]] | None:
    """The table of `report` for this run; ValueError where a tensor got no gradient and ``train.allow_no_grad`` does not name it.

    A component whose input the step did not have (no picture, no region, no added token) is excused, and None
    asks for another look at the next step, up to `PATIENCE` steps. All processes.
    """
    inputs = {name: state.backend.any_device(_has(state.window, name)) for name in dict.fromkeys(NEEDS.values())}
    absent = {component for component, name in NEEDS.items() if name in state.window[0].tensors and not inputs[name]}
    idle = {name for name in reached if component_of(name, state.components) in absent}
    for path, table in row_tables(state.model).items():  # an embedding's rows wait for their tokens
        words, ids = [batch.tensors["input_ids"].cpu() for batch in state.window], table.ids.cpu()
        if not state.backend.any_device(any(bool(torch.isin(each, ids).any()) for each in words)):
            idle.add(f"{path}.{ROWS}")
            absent.add("rows of added tokens")
    excused = {name: had for name, had in reached.items() if had or name not in idle}
    check(excused, state.run.train.allow_no_grad)
    if len(excused) == len(reached):
        return report(reached, state.components)
    if state.step < PATIENCE:
        state.backend.reached = None
        return None
    missing = " and ".join(sorted(absent))
    log.warning("no step so far had the input of %s, so whether it trains is not known", missing)
    return report(reached, state.components)


def _has(window: Iterable[Any], name: str) -> bool:
    return any(bool(batch.tensors[name].any()) for batch in window if name in batch.tensors)


def report(reached: Mapping[str, bool], components: Components) -> list[dict[str, Any]]:
    """One row a component: trained tensors, how many of them had a non-zero gradient, and the share that had one or is vouched for (see
    `check`)."""
    rows: dict[str, dict] = {}
    for name, had in reached.items():
        component = component_of(name, components)
        row = rows.setdefault(component, {"component": component, "tensors": 0, "with_gradient": 0, "vouched": 0})
        row["tensors"] += 1
        row["with_gradient"] += bool(had)
        row["vouched"] += not had and _waits(name, reached)
    return [row | {"share": (row["with_gradient"] + row["vouched"]) / row["tensors"]} for row in rows.values()]


def check(reached: Mapping[str, bool], allowed: Iterable[str] = ()) -> None:
    """ValueError naming tensors without a gradient, but for those that fit one of the ``allowed`` patterns.

    LoRA's A and DoRA's magnitude get theirs from the second step on, because B starts at zero: B's own gradient vouches for the layer.
    """
    idle = [
        name for name, had in reached.items() if not had and not _waits(name, reached) and not any(re.search(p, name) for p in allowed)
    ]
    if idle:
        shown = ", ".join(idle[:5]) + (", ..." if len(idle) > 5 else "")
        raise InputError(
            f"{len(idle)} of {len(reached)} trained tensors got no gradient in the first step: {shown}. They would never change. Leave "
            "their component out of train.trainable, or name them in train.allow_no_grad if that is meant"
        )


def _waits(name: str, reached: Mapping[str, bool]) -> bool:
    return bool(LATE.search(name)) and reached.get(LATE.sub(".lora_B.default.weight", name), False)
