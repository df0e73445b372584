"""The training loop.

    state = assemble(run); restore the checkpoint there is
    while step < total_steps and nobody asked to stop:
        take the window's micro-batches           count targets over all devices
        forward, backward each                    the loss is a sum over targets / that count, whatever the window or the devices
        clip, update, count                       a non-finite gradient leaves the update out everywhere
        note the step                             values stay on the device until a log step
        evaluate, save when due                   stop, skip or rewind as the stability guard decides
    save, export

Accumulation and device count do not change the result. An interrupt ends the step, saves, and tells how to go on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mmkit.config import RunConfig, TrainConfig, changed
from mmkit.training.assemble import TrainState, assemble
from mmkit.training.contrastive import unmask_when_due
from mmkit.training.exporting import export
from mmkit.training.gradients import check_reached
from mmkit.training.interrupt import Interrupt
from mmkit.training.metrics import totals
from mmkit.training.notes import Hooks, Notes, Row, is_best, read_steps, save, settle
from mmkit.storage import Store
from mmkit.training.run_folder import (
    alone_in_folder, leave_behind, note_end, open_folder, precision_in_force, restore, resume_path,
)  # fmt: skip
from mmkit.training.same_run import already_done
from mmkit.training.stability import Decision

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """What a run left: ``reason`` is done, already done, interrupted, or the stability guard's cause."""

    folder: str
    steps: int
    last: Row
    reason: str
    export: str | None = None
    hint: str = ""

    @property
    def stopped(self) -> bool:
        """True where the run is to be gone on with."""
        return self.reason not in ("done", "already done")


@dataclass(frozen=True)
class Rewind:
    """What survives going back: the checkpoint to resume from, the guard with its counts, and the data position, so that
    the batches at fault are not read again."""

    decision: Decision
    path: str
    guard: dict[str, Any]
    position: dict[str, Any]


def train(
    run: RunConfig,
    on_log: Callable[[Row], None] | None = None,
    on_save: Callable[[int], None] | None = None,
    on_eval: Callable[[TrainState], dict[str, float]] | None = None,
    on_assemble: Callable[[TrainState], None] | None = None,
) -> TrainResult:
    """Trains one stage and leaves checkpoints, metrics.jsonl and export/ in ``run.folder``.

    ``on_assemble`` sees each state before its first step: at the beginning and after every rewind.

    Raises ConfigError for wrong settings before any work, CheckpointError for a damaged or unsuitable checkpoint or a full disk.
    """
    hooks, rewind = Hooks(on_log, on_save, on_eval), None
    hooks.check(run)
    with Interrupt() as interrupt, contextlib.ExitStack() as held:
        state, path = assembled(run, held)
        while True:
            if on_assemble:
                on_assemble(state)
            try:
                outcome = run_from(state, hooks, interrupt, path, rewind)
            finally:
                state.loader.close()
                state.checkpoints.close()
            if isinstance(outcome, TrainResult):
                return outcome
            rewind, path = outcome, outcome.path
            changes = {"train__precision": rewind.decision.precision} if rewind.decision.precision else {}
            state.backend.clear(keep_programs=True)
            lock = state.lock
            state = assemble(changed(state.run, resume=path, **changes))
            state.asked, state.lock = run, lock


def assembled(run: RunConfig, held: contextlib.ExitStack) -> tuple[TrainState, str | None]:
    """The state of ``run`` before its first step here, and the checkpoint it is to resume from. ``held`` keeps others out of its folder.

    Which one that is, and so in which precision, the processes can agree on only once they are connected: where a rewind
    had changed the precision, the state is built a second time.
    """
    state = assemble(run)
    state.lock = lock = held.enter_context(alone_in_folder(state))
    path = resume_path(state)
    precision = precision_in_force(state, path)
    if precision != run.train.precision:
        state.loader.close()
        state.backend.clear(keep_programs=True)
        state = assemble(changed(run, train__precision=precision))
        state.asked, state.lock = run, lock
    return state, path


def run_from(
    state: TrainState, hooks: Hooks, interrupt: Interrupt, path: str | None, rewind: Rewind | None
) -> TrainResult | Rewind:
    """Resumes ``path``, runs to the end, saves and exports; or says how to rewind."""
    if path:
        restore(state, path, rewind.position if rewind else None)
    if rewind:
        leave_behind(state, state.step)  # only now: the checkpoint gone back to has proved whole
        state.guard.load_state_dict(rewind.guard)
        state.guard.rewound(state.step)
        state.schedule.lr_factor = rewind.decision.lr_factor
    if path and state.step >= state.total_steps:
        return TrainResult(state.run.folder, state.step, {}, "already done", export(state), already_done(state.step, state.total_steps))
    notes = Notes(hooks, open_folder(state, first=rewind is None), saved=state.step)
    with notes.metrics or contextlib.nullcontext():
        decision = run_steps(state, notes, interrupt)
        settle(state, notes)
        if decision.action == "rewind":
            target = state.checkpoints.at_or_before(decision.rewind_to)
            return Rewind(decision, target, state.guard.state_dict(), state.loader.state_dict())
        stopped = decision.action == "stop"
        reason = decision.cause if stopped else "done" if state.step >= state.total_steps else "interrupted"
        if not stopped and notes.saved != state.step:
            save(state, notes)
            settle(state, notes)
    folder, told = export(state) if reason == "done" else None, hint(state, notes, reason, decision)
    note_end(state, reason, told)
    return TrainResult(state.run.folder, state.step, notes.last, reason, folder, told)


def hint(state: TrainState, notes: Notes, reason: str, decision: Decision) -> str:
    """What the user is to know of how a run ended, beside its reason."""
    if decision.action == "stop":
        return decision.message
    told = [notes.warned] if notes.warned else []
    if notes.saved != state.step:  # a full disk, and on_disk_full=continue
        failed = f"the checkpoint of step {state.step} could not be written"
        told.append(f"{failed}; the same command goes on from the one before")
    elif reason == "interrupted":
        told.append(f"stopped after step {state.step}; the same command or cell goes on from there (resume=auto)")
    if state.guard.n_rewinds:
        told.append(f"it went back to an earlier checkpoint {state.guard.n_rewinds} time(s); why is in {Store(state.run.folder).path('stability')}")
    return ". ".join(told)


def run_steps(state: TrainState, notes: Notes, interrupt: Interrupt) -> Decision:
    """Step after step until the end, an interrupt, or a decision of the guard to stop or rewind."""
    train, decision = state.run.train, Decision("continue", state.step)
    eval_every = train.eval_every * (state.loader.steps_per_epoch if train.eval_unit == "epochs" else 1)
    while state.step < state.total_steps and not decision.ends:
        notes.pending.append(one_step(state))
        stop = state.backend.any_device(interrupt.asked)
        evaluated = due(state.step, eval_every)
        saving = save_due(state.step, train)
        if not (due(state.step, train.log_every) or evaluated or saving or stop or state.step == state.total_steps):
            continue
        decision = read_steps(state, notes, evaluated)
        if decision.ends:
            continue
        if stop:
            break
        # also after a skip, which left the weights as they were
        if saving or (evaluated and is_best(state, notes)):
            save(state, notes)
    return decision


def one_step(state: TrainState) -> Row:
    """Window, forward, backward, update; what there is to note, still on the device."""
    begin, backend, train = time.monotonic(), state.backend, state.run.train
    unmask_when_due(state.model, state.step, state.total_steps, train.contrastive)
    window = state.window = take_window(state)
    waited = time.monotonic() - begin
    # whole numbers: fp32 has none between 2**24 and 2**24 + 2, which the tokens of a large batch exceed
    numbers = [[b.n_targets, b.n_samples, b.n_tokens, b.n_positions] for b in window]
    counts = backend.sum_over_devices(torch.tensor(numbers, dtype=torch.int64).sum(0))
    groups = backend.optimizer.param_groups
    rates = state.schedule.rates(groups, state.step)
    backend.set_learning_rates(rates)
    limit = state.guard.limit if train.stability.action == "skip" else math.inf
    outs = state.accumulate(window, counts[0].clamp(min=1), limit)
    norm = backend.update(train.optimizer.max_grad_norm)
    names, values = totals(outs, backend.device)
    state.step += 1
    shares = first_report(state)
    return {
        "step": state.step, "names": names, "values": backend.sum_over_devices(values), "counts": counts, "grad_norm": norm,
        "lr": state.schedule.share(state.step - 1) * train.optimizer.lr,
        "lrs": {group["title"]: rate for group, rate in zip(groups, rates, strict=True)}, "skipped": backend.skipped,
        "epoch": window[-1].epoch, "limit": limit,
        **{f"grad_norm_{name}": norm for name, norm in backend.norms.items() if len(backend.norms) > 1}, **shares,
        "seconds": time.monotonic() - begin, "data_seconds": waited, "keys": [key for batch in window for key in batch.keys],
    }  # fmt: skip


def first_report(state: TrainState) -> dict[str, float]:
    """``reached_COMPONENT``: the share of its trained tensors that a gradient reaches, in the step where that is first known."""
    if state.reached is not None or state.backend.reached is None:
        return {}
    state.reached = check_reached(state, state.backend.reached)
    shares = {row["component"]: row["share"] for row in state.reached or []}
    if shares:
        log.info("share of trained tensors with a gradient: %s", ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    return {f"reached_{name}": share for name, share in shares.items()}


def take_window(state: TrainState) -> list:
    """The next step's micro-batches; fewer where the data ends, never none."""
    window = []
    for _ in range(state.run.accumulation):
        if (batch := next(state.loader, None)) is None:
            break
        window.append(batch)
    assert window, "the loader of a training run is endless"
    return window


def save_due(step: int, train: TrainConfig) -> bool:
    """Whether a checkpoint is to be written after ``step``: by steps, or in the first step that completes another ``save_samples``."""
    samples, batch = train.checkpoint.save_samples, train.global_batch
    return due(step, train.checkpoint.save_every) or (samples > 0 and step * batch // samples > (step - 1) * batch // samples)


def due(step: int, every: int) -> bool:
    """Whether something done each ``every`` steps (0: never) is to be done after ``step``."""
    return every > 0 and step % every == 0
