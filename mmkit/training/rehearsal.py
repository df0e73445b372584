"""The ViT-L/14 story on a small model: fp16 overflows in one layer, the loss is gone, the guard goes back and on in fp32.

The published run met this by itself after 13 billion samples (clip-training section 7); here one layer is strained from a given step
on (`Strain`), which fp16 cannot hold and fp32 does not notice. Beside the guarded run stand one of the same seed without a strain, and
one with it that is left to itself.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from mmkit.config import ConfigError, RunConfig, changed
from mmkit.storage import Store
from mmkit.training.stability import Strain, events

if TYPE_CHECKING:
    from mmkit.training.assemble import TrainState
    from mmkit.training.loop import TrainResult


UNWATCHED = 1e12  # a spike threshold that nothing reaches


@dataclass(frozen=True)
class Rehearsal:
    """The three runs and what the guard wrote down of the strained one. Lines of metrics.jsonl come by the runs' names."""

    clean: TrainResult
    unguarded: TrainResult  # strained, and left to itself until the loss is gone
    strained: TrainResult  # strained, and gone back from
    events: list[dict[str, Any]]
    lines: dict[str, list[dict[str, Any]]]

    @property
    def gap(self) -> float:
        """Mean loss over the last quarter of the steps, strained minus clean."""
        return statistics.fmean(self._tail("strained")) - statistics.fmean(self._tail("clean"))

    @property
    def noise(self) -> float:
        """Standard deviation of the clean run's loss from step to step over the last quarter of its steps."""
        return statistics.stdev(self._tail("clean"))

    def _tail(self, name: str) -> list[float]:
        losses = [line["loss"] for line in self.lines[name]]
        return losses[-max(2, len(losses) // 4) :]


def rehearse(
    run: RunConfig, at_step: int, gain: float = 2.0**18, layer: str = "", clipped: int = 0, on_log: Callable | None = None
) -> Rehearsal:
    """Trains ``run`` as ``NAME-clean`` in fp32, and in fp16 with ``layer`` strained after ``at_step`` steps as ``NAME-unguarded`` and
    ``NAME-strained``.

    ``layer`` is a module name of the model; empty = the last linear layer of its first trained tower. For ``clipped`` steps the loss
    rises before it is gone (`Strain`). The strained run saves often enough to lose few steps and goes back as the guard decides; the
    unguarded one ends where its loss is gone. ConfigError where no step is left after ``at_step``.
    """
    from mmkit.training.loop import train

    if run.train.steps is not None and at_step >= run.train.steps:
        raise ConfigError(f"at_step {at_step} leaves none of the run's {run.train.steps} steps; strain an earlier one")
    every = max(1, at_step // 3)
    again = {"resume": "never", "train__log_every": 1}
    clean = train(changed(run, name=f"{run.name}-clean", train__precision="fp32", **again), on_log)
    half = changed(run, train__precision="fp16", train__checkpoint__save_every=every, **again)
    alone = changed(half, name=f"{run.name}-unguarded", train__stability__action="stop", train__stability__threshold=UNWATCHED)
    guarded = {"train__stability__action": "rewind", "train__stability__rewind_precision": "fp32"}
    strained = changed(half, name=f"{run.name}-strained", **guarded)

    def strain(state: TrainState) -> None:
        rewound = state.run.resume != "never"
        Strain(layer_of(state.model, layer), gain, 0 if rewound else at_step * state.accumulation, clipped * state.accumulation)

    results = [clean, train(alone, on_log, on_assemble=strain), train(strained, on_log, on_assemble=strain)]
    names = ("clean", "unguarded", "strained")
    lines = {name: read_lines(result.folder) for name, result in zip(names, results, strict=True)}
    return Rehearsal(*results, events(strained.folder), lines)


def read_lines(folder: str) -> list[dict[str, Any]]:
    """metrics.jsonl of a run that has ended; a loss that is not finite as the number it is."""
    rows = [json.loads(line) for line in Store(folder).read("metrics.jsonl").splitlines()]
    return [row | {"loss": float(row["loss"])} for row in rows]


def layer_of(model: nn.Module, name: str = "") -> nn.Module:
    """The module called ``name``, or the last trained linear layer of the first child tower that has one."""
    modules = dict(model.named_modules())
    if name:
        if name not in modules:
            raise ConfigError(f"the model has no layer {name!r}; layers are named as in its parameters, without .weight")
        return modules[name]
    linear = [(path, m) for path, m in modules.items() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    if not linear:
        raise ConfigError("no linear layer of this model is trained; name the layer to strain")
    tower = linear[0][0].split(".")[:2]
    return [m for path, m in linear if path.split(".")[:2] == tower][-1]
