"""Folding LoRA and DoRA adapters into the weights they adapt: computed in double precision, rounded once, and with a report of how much
of each adapter the storage type rounds away (U50). Not here: reading adapters from files (`models.convert.llava`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmkit.errors import InputError

log = logging.getLogger(__name__)

LOSS_LIMIT = 0.05  # more rounding than this share of a layer's adapter is refused
VALUES = 1 << 22  # of a weight that are computed at a time: four copies in double precision


class Merging:
    """Folds the adapters of ``halves`` (layer -> A, B and with DoRA magnitude) into weights of ``dtype`` (None: each weight's own).

    ``losses``: |stored - exact| / |change| of each layer folded so far. After the last one they are logged, and ValueError says where
    half precision lost more than ``limit``; fp32 is never refused, since there is nothing better to store.
    """

    def __init__(
        self, halves: Mapping[str, Mapping[str, Tensor]], config: Mapping[str, Any], source: str,
        dtype: torch.dtype | None = None, limit: float = LOSS_LIMIT,
    ):  # fmt: skip
        self.halves, self.config, self.source, self.dtype, self.limit = halves, config, source, dtype, limit
        self.losses: dict[str, float] = {}
        self._half = False  # whether any weight was stored in fewer bits than fp32 has
        self._lock = threading.Lock()  # weights are read by several threads

    def fold(self, layer: str, weight: Tensor) -> Tensor:
        """The weight of ``layer`` that does alone what ``weight`` and its adapter do together."""
        kind = self.dtype or weight.dtype
        stored, loss = merged(weight, self.halves[layer], self.config, kind)
        with self._lock:
            last = layer not in self.losses and len(self.losses) + 1 == len(self.halves)
            self.losses.setdefault(layer, loss)
            self._half |= torch.finfo(kind).eps > torch.finfo(torch.float32).eps
            if last:
                self._conclude(kind)
        return stored

    def _conclude(self, kind: torch.dtype) -> None:
        worst = max(self.losses, key=self.losses.get)
        name = str(kind).removeprefix("torch.")
        report = f"{len(self.losses)} layers merged into {name}: {self.losses[worst]:.2%} of the adapter lost at worst ({worst})"
        if self._half and self.losses[worst] > self.limit:
            raise InputError(
                f"{self.source}: {report}; above the limit of {self.limit:.0%}: take dtype float32, keep the adapter apart (merge=False), "
                "or raise loss_limit of from_pretrained"
            )
        log.log(logging.WARNING if self._half else logging.INFO, "%s: %s", self.source, report)


def merged(weight: Tensor, halves: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype) -> tuple[Tensor, float]:
    """W + scale * B A (LoRA section 4), with DoRA each row scaled to its magnitude (DoRA section 4), in ``dtype``; and the share of the
    change that rounding to it loses. ``config`` is peft's."""
    a, b, magnitude = halves["A"].double(), halves["B"].double(), halves.get("magnitude")
    weight = weight.T if config.get("fan_in_fan_out") else weight
    rank = a.shape[0]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    stored, lost, changed = torch.empty(weight.shape, dtype=dtype), 0.0, 0.0
    step = max(VALUES // weight.shape[1], 1)
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        before = weight[rows].double()
        exact = before + scale * (b[rows] @ a)
        if magnitude is not None:
            exact *= (magnitude[rows].double() / exact.norm(dim=1))[:, None]
        stored[rows] = exact
        lost += float((stored[rows].double() - exact).square().sum())
        changed += float((exact - before).square().sum())
    return stored.T.contiguous() if config.get("fan_in_fan_out") else stored, (lost / changed) ** 0.5 if changed else 0.0
