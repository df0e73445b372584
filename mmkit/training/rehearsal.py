"""The ViT-L/14 story on a small model: fp16 overflows in one layer, the loss is gone, the guard goes back and on in fp32.

The published run met this by itself after 13 billion samples (clip-training section 7); here one layer is strained from a given step
on (`Strain`), which fp16 cannot hold and fp32 does not notice. A clean run of the same seed stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from mmkit.config import ConfigError, RunConfig, changed
from mmkit.training.stability import Strain, events

if TYPE_CHECKING:
    from mmkit.training.assemble import TrainState
    from mmkit.training.loop import TrainResult


@dataclass(frozen=True)
class Rehearsal:
    """Both runs and what the guard wrote down of the strained one."""

    clean: TrainResult
    strained: TrainResult
    events: list[dict[str, Any]]

    @property
    def gap(self) -> float:
        """Last loss of the strained run minus that of the clean one."""
        return self.strained.last["loss"] - self.clean.last["loss"]


def rehearse(run: RunConfig, at_step: int, gain: float = 2.0**18, layer: str = "", on_log: Callable | None = None) -> Rehearsal:
    """Trains ``run`` twice, as ``NAME-clean`` in fp32 and as ``NAME-strained`` in fp16 with ``layer`` strained after ``at_step`` steps.

    ``layer`` is a module name of the model; empty = the last linear layer of its first trained tower. The strained run saves often
    enough to lose few steps and goes back as the guard decides. ConfigError where no step is left after ``at_step``.
    """
    from mmkit.training.loop import train

    if run.train.steps is not None and at_step >= run.train.steps:
        raise ConfigError(f"at_step {at_step} leaves none of the run's {run.train.steps} steps; strain an earlier one")
    every = max(1, at_step // 3)
    again = {"resume": "never", "train__log_every": 1}
    clean = train(changed(run, name=f"{run.name}-clean", train__precision="fp32", **again), on_log)
    settings = {"train__stability__action": "rewind", "train__stability__rewind_precision": "fp32", "train__checkpoint__save_every": every}
    strained = changed(run, name=f"{run.name}-strained", train__precision="fp16", **settings, **again)

    def strain(state: TrainState) -> None:
        Strain(layer_of(state.model, layer), gain, after=at_step * state.accumulation)

    result = train(strained, on_log, on_assemble=strain)
    return Rehearsal(clean, result, events(strained.folder))


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
