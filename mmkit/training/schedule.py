"""Learning-rate schedules: pure functions of the step, so a resume needs nothing but the step number.

``plateau`` alone has a state (the best value of what it watches and the cuts so far), which goes into the checkpoint.
Warmup and cosine follow open_clip (clip-training section 4): step s of w warmup steps has (s + 1) / w of the rate, then
1/2 (1 + cos(pi e / (total - w))) with e = s - w.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mmkit.config import ConfigError, OptimizerConfig, TrainConfig


def cosine(elapsed: float, span: float) -> float:
    """From 1 to 0 along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * min(elapsed / span, 1.0)))


def linear(elapsed: float, span: float) -> float:
    """From 1 to 0 along a line."""
    return max(1 - elapsed / span, 0.0)


def constant(elapsed: float, span: float) -> float:
    """Always 1."""
    return 1.0


DECAYS = {"cosine": cosine, "linear": linear, "constant": constant, "const-cooldown": constant, "plateau": constant}


def steps_of(amount: float, total: int) -> int:
    """A length given as a share of ``total`` (below 1) or as a number of steps."""
    return round(amount * total) if amount < 1 else round(amount)


def factor(step: int, total: int, config: OptimizerConfig) -> float:
    """The share of the base learning rate at ``step`` (from 0) of ``total`` steps."""
    warmup = steps_of(config.warmup, total)
    if step < warmup:
        return (step + 1) / warmup
    elapsed, span = step - warmup, max(total - warmup, 1)
    if config.schedule == "const-cooldown":
        cooldown = steps_of(config.cooldown, total)
        return linear(max(step - (total - cooldown), 0), cooldown) if cooldown else 1.0
    return DECAYS[config.schedule](elapsed, span)


@dataclass
class Plateau:
    """Halves the rate when the watched validation value has not improved for ``patience`` evaluations."""

    cut: float = 0.5
    patience: int = 2
    min_change: float = 1e-4  # relative improvement that counts
    best: float | None = None
    bad: int = 0
    scale: float = 1.0

    def observe(self, value: float, mode: str = "min") -> None:
        """One more validation value; a lower one is better, with ``mode`` "max" a higher one. One that is not finite is no improvement."""
        gain = math.inf if self.best is None else self.best - value if mode == "min" else value - self.best
        if math.isfinite(value) and gain > self.min_change * abs(self.best or 0.0):
            self.best, self.bad = value, 0
            return
        self.bad += 1
        if self.bad > self.patience:
            self.scale, self.bad = self.scale * self.cut, 0


VALIDATION_LOSS = "eval_loss"


def watched(train: TrainConfig) -> tuple[str, str]:
    """The one value of metrics.jsonl that decides the best checkpoint and a plateau, and which is better of it, "min" or "max"."""
    best = train.checkpoint
    return (best.best_metric, best.best_mode) if best.best_metric else (VALIDATION_LOSS, "min")


def value_of(row: Mapping[str, Any], name: str) -> float:
    """A measured value of a line; ConfigError where there is none of this name."""
    if name not in row:
        raise ConfigError(f"train.checkpoint.best_metric {name!r} is not measured; a line has {', '.join(row)}")
    return row[name]


def check_lengths(config: OptimizerConfig, total: int) -> None:
    """ConfigError where the rate never reaches its peak: ``total`` steps end before the warm-up does, or begin in the cooldown."""
    warmup, cools = steps_of(config.warmup, total), config.schedule == "const-cooldown"
    cooldown = steps_of(config.cooldown, total) if cools else 0
    if warmup + cooldown > total:
        with_it = f" and train.optimizer.cooldown = {config.cooldown:g} ({cooldown})" if cooldown else ""
        raise ConfigError(
            f"train.optimizer.warmup = {config.warmup:g} ({warmup} steps){with_it} is more than the run's {total} steps, so the learning rate "
            "never reaches its value; use fewer, or a share below 1 as 0.03"
        )


class Schedule:
    """Each group's ``base_lr`` times the factor of the step, times the cuts of a plateau and of rewinds."""

    def __init__(self, config: OptimizerConfig, total: int, lr_factor: float = 1.0, watched: tuple[str, str] = (VALIDATION_LOSS, "min")):
        check_lengths(config, total)
        self.config, self.total, self.lr_factor, self.watched = config, total, lr_factor, watched
        self.plateau = Plateau()

    def rates(self, groups: list[dict], step: int) -> list[float]:
        """The learning rate at ``step`` of each of an optimizer's ``param_groups``."""
        share = self.share(step)
        return [group["base_lr"] * share for group in groups]

    def share(self, step: int) -> float:
        """What every base rate is multiplied by at ``step``."""
        return factor(step, self.total, self.config) * self.plateau.scale * self.lr_factor

    def observe(self, row: Mapping[str, Any]) -> None:
        """What an evaluation measured; changes the rate only where the schedule is ``plateau``."""
        if self.config.schedule == "plateau":
            name, mode = self.watched
            self.plateau.observe(value_of(row, name), mode)

    def state_dict(self) -> dict:
        """What a resume cannot compute from the step."""
        return {"plateau": asdict(self.plateau), "lr_factor": self.lr_factor, "watched": list(self.watched)}

    def load_state_dict(self, state: dict) -> None:
        """Takes over `state_dict` of an earlier run; the best value only where it is one of what is watched now."""
        self.plateau = Plateau(**state["plateau"])
        if state.get("watched") != list(self.watched):
            self.plateau.best, self.plateau.bad = None, 0
        self.lr_factor = state["lr_factor"]
