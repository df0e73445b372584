"""Which trained tensors the first update reached: a tensor without a gradient is a mistake that no loss curve shows (U11, U49)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mmkit.training.optim import Components, component_of

LATE = re.compile(r"\.lora_(A|magnitude_vector)\.default\.weight$")

def check_reached(state: Any, reached: Mapping[str, bool]) -> list[dict[str, Any]]:
    """The table of `report` for this run; ValueError where a tensor got no gradient and ``train.allow_no_grad`` does not name it."""
    rows = report(reached, state.components)
    check(reached, state.run.train.allow_no_grad)
    return rows


def report(reached: Mapping[str, bool], components: Components) -> list[dict[str, Any]]:
    """One row a component: trained tensors, and how many of them had a non-zero gradient."""
    rows: dict[str, dict] = {}
    for name, had in reached.items():
        component = component_of(name, components)
        row = rows.setdefault(component, {"component": component, "tensors": 0, "with_gradient": 0})
        row["tensors"] += 1
        row["with_gradient"] += bool(had)
    return list(rows.values())


def check(reached: Mapping[str, bool], allowed: Iterable[str] = ()) -> None:
    """ValueError naming tensors without a gradient, but for those that fit one of the ``allowed`` patterns.

    LoRA's A and DoRA's magnitude get theirs from the second step on, because B starts at zero: B's own gradient vouches for the layer.
    """
    idle = [
        name for name, had in reached.items() if not had and not _waits(name, reached) and not any(re.search(p, name) for p in allowed)
    ]
    if idle:
        shown = ", ".join(idle[:5]) + (", ..." if len(idle) > 5 else "")
        raise ValueError(
            f"{len(idle)} of {len(reached)} trained tensors got no gradient in the first step: {shown}. They would never change. Leave "
            "their component out of train.trainable, or name them in train.allow_no_grad if that is meant"
        )


def _waits(name: str, reached: Mapping[str, bool]) -> bool:
    return bool(LATE.search(name)) and reached.get(LATE.sub(".lora_B.default.weight", name), False)
