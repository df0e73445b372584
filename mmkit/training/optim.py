"""Parameter groups and AdamW: which parameter learns how fast, and which decays.

Groups are made by component (a model file's COMPONENTS table) and by whether weight decay applies. A parameter does not decay
when it has fewer than two dimensions (biases, norms, scales, class tokens) or belongs to a norm module; told by module type and
shape, because a name rule such as "contains ln" also hits names that merely contain it. Position embeddings do not decay either,
except in open_clip's towers, whose published recipes decay them. Schedules are in `schedule.py`.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from mmkit.config import ConfigError, OptimizerConfig
from mmkit.errors import InputError

log = logging.getLogger(__name__)

FUSED_DEVICES = ("cpu", "cuda")  # where torch's AdamW has one kernel for all parameters
LIMITS: dict[str, tuple[float, float]] = {"logit_scale": (0.0, math.log(100))}  # kept after every step (CLIP section 2.5); by last name
POSITION = re.compile(r"(^|[._])pos(ition(al)?)?(_?embed(ding)?s?|_?emb)([._]|$)|(^|\.)positions\.", re.IGNORECASE)
OPEN_CLIP_TOWERS = ("image", "text")  # whose published recipes decay position embeddings too
Components = Sequence[tuple[str, str]]  # (regex on the full parameter name, component)


@dataclass
class Group:
    """Parameters that share a learning rate and a weight decay."""

    component: str
    lr: float
    weight_decay: float
    limits: tuple[float, float] | None = None  # values are clamped to this range after every step
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """``connector`` or, for the part without decay, ``connector (no decay)``."""
        kept = f" in [{self.limits[0]:.3g}, {self.limits[1]:.3g}]" if self.limits else ""
        return self.component + ("" if self.weight_decay else " (no decay)") + kept


def component_of(name: str, components: Components) -> str:
    """The component a parameter belongs to; ValueError where the model's table does not know it."""
    for pattern, component in components:
        if re.match(pattern, name):
            return component
    raise InputError(f"parameter {name!r} fits no pattern of the model's COMPONENTS table; add one for it")


def compiled(setting: str, pattern: str) -> re.Pattern[str]:
    """A pattern of a setting; ConfigError naming both where it is no regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{setting} pattern {pattern!r} is no regular expression: {error}") from None


def decaying(module: nn.Module) -> set[str]:
    """Names of the parameters of an unwrapped ``module`` that weight decay applies to."""
    out = set()
    for prefix, owner in module.named_modules():
        in_norm = any("norm" in kind.__name__.lower() for kind in type(owner).__mro__)
        for name, parameter in owner.named_parameters(prefix, recurse=False):
            if parameter.dim() >= 2 and not in_norm:
                out.add(name)
    return out


def groups_of(named: Mapping[str, nn.Parameter], decays: set[str], components: Components, config: OptimizerConfig) -> list[Group]:
    """The trainable parameters ``named`` in groups by component and decay.

    Raises ValueError when nothing is trainable, when a parameter fits no component, or when ``lr_of`` names a component
    without trainable parameters (its rate would silently do nothing).
    """
    groups: dict[tuple, Group] = {}
    for name, parameter in named.items():
        component = component_of(name, components)
        place = POSITION.search(name) and component not in OPEN_CLIP_TOWERS
        decay = config.weight_decay if name in decays and not place else 0.0
        limits = LIMITS.get(name.rsplit(".", 1)[-1])
        made = Group(component, config.lr_of.get(component, config.lr), decay, limits)
        group = groups.setdefault((component, bool(decay), limits), made)
        group.parameters[name] = parameter
    if not groups:
        raise InputError("nothing is trainable: name components in train.trainable or adapters in train.lora")
    present = sorted({group.component for group in groups.values()})
    if idle := sorted(set(config.lr_of) - set(present)):
        raise InputError(f"train.optimizer.lr_of names {idle[0]!r}, which has no trainable parameter; trained are {', '.join(present)}")
    return list(groups.values())


def check_groups(groups: Iterable[Group], named: Mapping[str, nn.Parameter]) -> None:
    """Every parameter of ``named`` is in exactly one group; ValueError names one that is in none or in several."""
    count = Counter(id(parameter) for group in groups for parameter in group.parameters.values())
    wrong = {name: count[id(parameter)] for name, parameter in named.items() if count[id(parameter)] != 1}
    if wrong:
        name, times = next(iter(wrong.items()))
        raise InputError(f"{len(wrong)} trainable parameters are not in exactly one group: {name} is in {times}")


def table(groups: Iterable[Group]) -> list[dict]:
    """Rows for people: group, learning rate, decay, tensors, parameters."""
    rows = []
    for group in groups:
        numel = sum(getattr(p, "ds_numel", p.numel()) for p in group.parameters.values())
        row = {"group": group.title, "lr": group.lr, "weight_decay": group.weight_decay, "tensors": len(group.parameters)}
        rows.append(row | {"parameters": int(numel)})
    return rows


def table_text(rows: Iterable[dict]) -> str:
    """`table` as aligned text."""
    lines = [f"{'group':28} {'lr':>9} {'decay':>6} {'tensors':>8} {'parameters':>14}"]
    for row in rows:
        counts = f"{row['tensors']:8d} {row['parameters']:14,d}"
        lines.append(f"{row['group']:28} {row['lr']:9.2e} {row['weight_decay']:6.2g} {counts}")
    return "\n".join(lines)


def optimizer_factory(
    model: nn.Module, components: Components, config: OptimizerConfig
) -> Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]:
    """What `Backend.prepare` calls with the sharded trainable parameters of ``model``; decay is decided here, on whole shapes."""
    decays = decaying(model)

    def make(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        groups = groups_of(named, decays, components, config)
        check_groups(groups, named)
        log.info("parameter groups\n%s", table_text(table(groups)))
        return adamw(groups, config)

    return make


def adamw(groups: Sequence[Group], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over ``groups``; each parameter group carries ``title`` and ``base_lr``, which the schedule multiplies.

    Raises ValueError for half-precision parameters: Adam run on fp16 weights sends them to inf within a step (U28).
    """
    for group in groups:
        for name, parameter in group.parameters.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise InputError(
                    f"trainable parameter {name} is {str(parameter.dtype).removeprefix('torch.')}: the optimizer needs fp32 "
                    "weights; keep them in fp32 and let train.precision choose the arithmetic"
                )
    made = [
        {"params": list(g.parameters.values()), "lr": g.lr, "base_lr": g.lr, "weight_decay": g.weight_decay, "title": g.title}
        | ({"limits": g.limits} if g.limits else {})
        for g in groups
    ]
    settings = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    optimizer = _adamw_8bit(made, settings) if config.kind == "adamw_8bit" else _adamw(made, settings)
    optimizer.register_step_post_hook(_keep_in_limits)
    return optimizer


@torch.no_grad()
def _keep_in_limits(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    for group in optimizer.param_groups:
        if "limits" in group:
            for parameter in group["params"]:
                parameter.clamp_(*group["limits"])


def _adamw(groups: list[dict], settings: dict) -> torch.optim.Optimizer:
    parameters = [parameter for group in groups for parameter in group["params"]]
    whole = all(type(p) is nn.Parameter and not hasattr(p, "ds_id") for p in parameters)
    fused = whole and all(p.device.type in FUSED_DEVICES for p in parameters)
    return torch.optim.AdamW(groups, **settings, fused=fused or None)


def _adamw_8bit(groups: list[dict], settings: dict) -> torch.optim.Optimizer:
    try:
        import bitsandbytes
    except ImportError as error:
        raise InputError(f"optimizer kind 'adamw_8bit' needs bitsandbytes ({error}); install it or use 'adamw'") from error
    return bitsandbytes.optim.AdamW8bit(groups, **settings)
