"""What becomes of the steps a loop has made: lines of metrics.jsonl, the guard's opinion, evaluations, checkpoints.

A step's values stay on the device until `read_steps`; between log steps nothing waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mmkit.training.accumulate import frozen_statistics
from mmkit.config import RunConfig
from mmkit.training.assemble import TrainState
from mmkit.training.contrastive import advice
from mmkit.training.metrics import MetricsFile, device_facts, row_of
from mmkit.training.run_folder import save_checkpoint
from mmkit.training.schedule import value_of
from mmkit.training.stability import Decision, activation_statistics
from mmkit.training.validation import check, measure

log = logging.getLogger(__name__)
Row = dict[str, Any]
WATCHED = ("step", "loss", "skipped", "lr", "logit_scale", "max_logit", "scaler")  # kept by the stability guard, with the gradient norms


@dataclass(frozen=True)
class Hooks:
    """Called on the main process with each line of metrics (on_log) and each saved step (on_save); on all with the state (on_eval)."""

    on_log: Callable[[Row], None] | None = None
    on_save: Callable[[int], None] | None = None
    on_eval: Callable[[TrainState], dict[str, float]] | None = None

    def check(self, run: RunConfig) -> None:
        """ConfigError where ``run`` wants to watch what neither its held-out data nor ``on_eval`` measures."""
        check(run, tasks=self.on_eval is not None)


@dataclass
class Notes:
    """What the loop keeps between reading steps from the device."""

    hooks: Hooks
    metrics: MetricsFile | None = None  # on the main process
    pending: list[Row] = field(default_factory=list)
    last: Row = field(default_factory=dict)
    saved: int = -1  # step of the last checkpoint
    held_up: float = 0.0  # seconds that training waited for checkpoints since the last line


def read_steps(state: TrainState, notes: Notes, evaluate: bool) -> Decision:
    """Reads the pending steps from the device, writes their lines, asks the guard about each; the first decision to do something."""
    found = Decision("continue", state.step)
    for pending in notes.pending:
        row, keys = row_of(pending), pending["keys"]
        state.samples, state.tokens = state.samples + row["samples"], state.tokens + row["tokens"]
        row |= {"total_steps": state.total_steps, "total_samples": state.samples, "total_tokens": state.tokens}
        row |= device_facts(state.backend, notes.last)
        if notes.held_up:
            row["save_seconds"], notes.held_up = round(notes.held_up, 3), 0.0
        if (warning := advice(row)) and not advice(notes.last):
            log.warning("%s", warning)
        if evaluate and row["step"] == state.step:
            row |= evaluation(state, notes)
        best = state.run.train.checkpoint.best_metric
        if best is not None and not best.startswith("eval_"):
            value_of(row, best)  # a wrong name is told after the first step
        notes.last = row
        if notes.metrics:
            notes.metrics.write(row)
            if notes.hooks.on_log:
                notes.hooks.on_log(row)
        watched = {name: value for name, value in row.items() if name in WATCHED or name.startswith("grad_norm")}
        found = found or state.guard.observe(keys=keys, **watched)
    notes.pending.clear()
    return found


def evaluation(state: TrainState, notes: Notes) -> Row:
    """``eval_...`` of the held-out data and of what on_eval measures, and ``eval_seconds`` it took; the schedule sees them.

    Training goes on as if nothing had been: random numbers are put back. All processes call it.
    """
    begin, random = time.monotonic(), state.backend.rng_state()
    state.objective.eval()
    scores = notes.hooks.on_eval(state) if notes.hooks.on_eval else {}
    values = {f"eval_{name}": float(value) for name, value in scores.items()} | (measure(state) if state.held_out else {})
    state.objective.train()
    state.backend.set_rng_state(random)
    values = state.backend.broadcast(values | {"eval_seconds": round(time.monotonic() - begin, 3)})
    log.info("step %d: %s", state.step, ", ".join(f"{name} {value:.5g}" for name, value in values.items()))
    state.schedule.observe(values)
    return values | {"compiles": state.backend.compiles()}  # programs of the evaluation are no surprise in the next step


def activations(state: TrainState) -> list[Row]:
    """What each block computes on the last window's first batch, with the weights as they are now; random numbers are put back. All
    processes call it."""
    batch = state.backend.shard(state.window[0].tensors)
    random = state.backend.rng_state()
    with frozen_statistics(state.model):
        rows = activation_statistics(state.model, state.blocks, lambda: state.objective(batch, mode="loss"))
    state.backend.set_rng_state(random)
    return rows


def is_best(state: TrainState, notes: Notes) -> bool:
    """Whether the evaluation just made is the best so far, where a metric is watched."""
    metric = state.run.train.checkpoint.best_metric
    return metric is not None and state.checkpoints.is_best(value_of(notes.last, metric))


def save(state: TrainState, notes: Notes) -> None:
    """A checkpoint of this step, with the last line's numbers."""
    numbers = {name: value for name, value in notes.last.items() if isinstance(value, float)}
    if notes.metrics:
        notes.metrics.flush()
    written = save_checkpoint(state, numbers)
    notes.held_up += state.checkpoints.last_save_seconds
    notes.last = notes.last | {"compiles": state.backend.compiles()}  # programs that gather from several hosts are no surprise in the next step
    if written:
        notes.saved = state.step
        if notes.hooks.on_save and state.backend.is_main:
            notes.hooks.on_save(state.step)
