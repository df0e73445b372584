"""What becomes of the steps a loop has made: lines of metrics.jsonl, the guard's opinion, evaluations, checkpoints.

A step's values stay on the device until `read_steps`; between log steps nothing waits for it.
"""

from __future__ import annotations

import logging
import math
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

# A loss at chance tells nothing by itself: every run begins near it. With a gradient that has vanished as well nothing
# will change any more. Measured on small CLIP models: a collapsed one (all features alike) lies within 0.005 nats of
# ln N with a norm below 0.01 after six steps and stays there; one that learns crosses ln N with norms above 1. A small
# language model with random weights lies within 3% of ln V, and one that has learnt anything soon leaves that band.
CHANCE_GAP = 0.01  # nats from ln N: the right caption is at most 1% likelier than any other
CHANCE_BAND = 0.05  # fraction of ln V
VANISHED = 0.01  # gradient norm: weights have to move by 1 to lower the loss by 0.01
CHANCE_STEPS = 20  # in a row; a quarter of a shorter run, at least 5
WATCHED = ("step", "loss", "skipped", "lr", "logit_scale", "max_logit", "scaler")  # kept by the stability guard, with the gradient norms


@dataclass(frozen=True)
class Hooks:
    """Called on the main process with each line of metrics (on_log) and each step whose checkpoint is on the disk
    (on_save); on all with the state (on_eval)."""

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
    saved: int = -1  # step of the last checkpoint that is on the disk
    warned: str = ""  # of a loss that stays at chance, said once
    idle: int = 0  # steps in a row at chance with a vanishing gradient
    held_up: float = 0.0  # seconds that training waited for checkpoints since the last line


def read_steps(state: TrainState, notes: Notes, evaluate: bool) -> Decision:
    """Reads the pending steps from the device, writes their lines and has the guard judge each. The decision that ends
    training here, or the last to skip a batch; each is written down."""
    found, seen = Decision("continue", state.step), None
    for pending in notes.pending:
        row, keys = row_of(pending), pending["keys"]
        limit = row.pop("limit")
        state.samples, state.tokens = state.samples + row["samples"], state.tokens + row["tokens"]
        row |= {"total_steps": state.total_steps, "total_samples": state.samples, "total_tokens": state.tokens}
        row |= device_facts(state.backend, notes.last)
        if notes.held_up:
            row["save_seconds"], notes.held_up = round(notes.held_up, 3), 0.0
        if (warning := advice(row)) and not advice(notes.last):
            log.warning("%s", warning)
        warn_at_chance(state, notes, row)
        if evaluate and row["step"] == state.step and not found.ends:
            row |= evaluation(state, notes)
        best = state.run.train.checkpoint.best_metric
        if best is not None and not best.startswith("eval_"):
            value_of(row, best)  # a wrong name is told after the first step
        notes.last = row
        if notes.metrics:
            notes.metrics.write(row)
            if notes.hooks.on_log:
                notes.hooks.on_log(row)
        if found.ends:
            continue  # made after the step that ends it: judging it too would count a second rewind
        watched = {name: value for name, value in row.items() if name in WATCHED or name.startswith("grad_norm")}
        decision = state.guard.observe(keys=keys, limit=limit, **watched)
        if decision:
            found, seen = decision, activations(state) if seen is None else seen
            state.guard.write(decision, seen, data=state.loader.state_dict())
    notes.pending.clear()
    return found


def warn_at_chance(state: TrainState, notes: Notes, row: Row) -> None:
    """Says once, in the log, in the line (``note``) and in the result's hint, that the loss stays at that of guessing with
    a vanishing gradient.

    Guessing is ln N among the N pairs of a batch (losses that have a ``loss_gap``) or ln V among V tokens.
    """
    if state.run.model.kind == "clip":
        n, at_chance = row["targets"], abs(row.get("loss_gap", math.inf)) <= CHANCE_GAP
        why = (
            "pairs, as the features of all are alike. Usual causes are a learning rate that is too high or without a "
            "warm-up, and a temperature that ran away"
        )
    else:
        n = state.model.language.config.get_text_config().vocab_size
        at_chance = abs(row["loss"] - math.log(n)) <= CHANCE_BAND * math.log(n)
        why = (
            "tokens. Usual causes are a language model without its weights (model.language.source: random), and trained "
            "parts that do not reach it"
        )
    notes.idle = notes.idle + 1 if at_chance and row["grad_norm"] < VANISHED and not row["skipped"] else 0
    if notes.warned or notes.idle < min(CHANCE_STEPS, max(state.total_steps // 4, 5)):
        return
    notes.warned = row["note"] = (
        f"step {row['step']}: for {notes.idle} steps the loss has stayed at chance (ln {n} = {math.log(n):.4g}) with a "
        f"vanishing gradient (norm {row['grad_norm']:.1e}), so nothing is being learnt: it is that of guessing among "
        f"{n} {why}"
    )
    log.warning("%s", notes.warned)


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
    save_checkpoint(state, numbers)
    notes.held_up += state.checkpoints.last_save_seconds
    notes.last = notes.last | {"compiles": state.backend.compiles()}  # programs that gather from several hosts are no surprise in the next step
    tell_saved(state, notes)


def settle(state: TrainState, notes: Notes) -> None:
    """Waits for the checkpoint that is being written. All processes; the errors of `Checkpoints.save`."""
    state.checkpoints.wait()
    tell_saved(state, notes)


def tell_saved(state: TrainState, notes: Notes) -> None:
    """Tells of a checkpoint once it is on the disk: one written in the background when the next is due or at the end."""
    written = state.checkpoints.written
    if written < 0 or written == notes.saved:
        return
    notes.saved = written
    if notes.hooks.on_save and state.backend.is_main:
        notes.hooks.on_save(written)
