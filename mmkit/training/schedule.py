"""Learning-rate schedules: pure functions of the step, so a resume needs nothing but the step number.

``plateau`` alone has a state (the best validation value and the cuts so far), which goes into the checkpoint.
Warmup and cosine follow open_clip (clip-training section 4): step s of w warmup steps has (s + 1) / w of the rate, then
1/2 (1 + cos(pi e / (total - w))) with e = s - w.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from mmkit.config import OptimizerConfig


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


def sqrt_scaled(base_lr: float, batch: int, base_batch: int) -> float:
    """The learning rate for ``batch`` where ``base_lr`` suits ``base_batch``: base_lr * sqrt(batch / base_batch) (Cambrian-1)."""
    if base_lr <= 0 or batch <= 0 or base_batch <= 0:
        raise ValueError(f"base_lr {base_lr}, batch {batch} and base_batch {base_batch} must all be above 0")
    return base_lr * math.sqrt(batch / base_batch)


@dataclass
class Plateau:
    """Halves the rate when the watched validation value has not improved for ``patience`` evaluations."""

    cut: float = 0.5
    patience: int = 2
    min_change: float = 1e-4  # relative improvement that counts
    best: float | None = None
    bad: int = 0
    scale: float = 1.0

    def observe(self, value: float) -> None:
        """One more validation value, lower being better."""
        if self.best is None or value < self.best - self.min_change * abs(self.best):
            self.best, self.bad = value, 0
            return
        self.bad += 1
        if self.bad > self.patience:
            self.scale, self.bad = self.scale * self.cut, 0


class Schedule:
    """Each group's ``base_lr`` times the factor of the step, times the cuts of a plateau and of rewinds."""

    def __init__(self, config: OptimizerConfig, total: int, lr_factor: float = 1.0):
        self.config, self.total, self.lr_factor = config, total, lr_factor
        self.plateau = Plateau()

    def rates(self, groups: list[dict], step: int) -> list[float]:
        """The learning rate at ``step`` of each of an optimizer's ``param_groups``."""
        share = self.share(step)
        return [group["base_lr"] * share for group in groups]

    def share(self, step: int) -> float:
        """What every base rate is multiplied by at ``step``."""
        return factor(step, self.total, self.config) * self.plateau.scale * self.lr_factor

    def observe(self, value: float) -> None:
        """A validation value (lower is better); changes the rate only where the schedule is ``plateau``."""
        if self.config.schedule == "plateau":
            self.plateau.observe(value)

    def state_dict(self) -> dict:
        """What a resume cannot compute from the step."""
        return {"plateau": asdict(self.plateau), "lr_factor": self.lr_factor}

    def load_state_dict(self, state: dict) -> None:
        """Takes over `state_dict` of an earlier run."""
        self.plateau = Plateau(**state["plateau"])
        self.lr_factor = state["lr_factor"]
