"""The run folder: what training reads from it and writes to it.

    runs/<preset>/<stage>/<name>/   config.yaml  environment.json  metrics.jsonl  checkpoints/  export/
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import numpy as np

from mmkit.config import ConfigError, OptimizerConfig, Precision, RunConfig, asked, to_yaml
from mmkit.folder_lock import FolderLock
from mmkit.models.vocabulary import row_tables
from mmkit.storage import Store
from mmkit.training.agreement import by_main
from mmkit.training.assemble import TrainState, seed_everything
from mmkit.training.checkpoint import Checkpoint, folder_name, open_verified
from mmkit.training.foreign import is_foreign, restore_foreign
from mmkit.training.metrics import MetricsFile, environment
from mmkit.training.same_run import TOLD, differences, first_difference, refuse_other_start, short, told
from mmkit.training.schedule import factor
from mmkit.training.weights import adapter_record, started_with, trained_buffers

log = logging.getLogger(__name__)

OF_A_TRAINING = (  # what a training leaves in its run folder beside checkpoints, and other parts of the kit make of it
    "export", "figures", "stability", "tensorboard", "config.yaml", "environment.json", "metrics.jsonl", "results.json",
    "samples.jsonl", "submission-*.json", "record-*.json",
)  # fmt: skip
LIVES_ON = ("stability", "tensorboard", "config.yaml", "environment.json", "metrics.jsonl")  # of these a branch in the same folder goes on with its own
PLACE = re.compile(r"(step|epoch)-(\d+)")


@contextlib.contextmanager
def alone_in_folder(state: TrainState) -> Iterator[FolderLock]:
    """Within it no other process trains in the run folder: two of one name would clear away each other's checkpoints and lines. All
    processes; ConfigError on all where somebody does."""
    lock = FolderLock(Store(state.run.folder), "trains in it")
    by_main(state.backend, lock.take)
    try:
        yield lock
    finally:
        if state.backend.is_main:
            lock.release()


def requeued() -> bool:
    """Whether SLURM has started this job before."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0


def save_checkpoint(state: TrainState, metrics: dict[str, float] | None = None) -> bool:
    """Writes the checkpoint of this step. All processes; ConfigError on all where the folder is another
    process's by now."""
    if state.lock is not None:
        by_main(state.backend, state.lock.check)
    values = {
        "step": state.step, "samples": state.samples, "tokens": state.tokens, "total_steps": state.total_steps,
        "data": state.loader.state_dict(), "schedule": state.schedule.state_dict(), "guard": state.guard.state_dict(),
        "backend": state.backend.extra_state(), "backend_kind": state.backend.name, "precisions": state.precisions,
        "asked_precision": asked(state.asked).train.precision,
        "history": state.history, "global_batch": state.run.train.global_batch, "adapters": adapter_record(state.run),
        "added_tokens": added_ids(state),
        "random": state.backend.all_objects(random_state(state)), "settings": state.asked.model_dump(mode="json"),
        "started": started_with(state), "job": os.environ.get("SLURM_JOB_ID"),
    }  # fmt: skip
    buffers = trained_buffers(state.model)
    return state.checkpoints.save(state.step, values, buffers=buffers, frozen=state.frozen, metrics=metrics)


def random_state(state: TrainState) -> dict[str, Any]:
    """The random state of this process: torch's on every device, numpy's and Python's."""
    kind, words, place, *_ = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "torch": state.backend.rng_state(),
        "numpy": [kind, words.tolist(), place],
        "python": [version, list(internal), gauss],
    }


def set_random_state(state: TrainState, saved: list[dict]) -> None:
    """Takes back this rank's random state; with another seed, or on a rank the saving run did not have, it starts anew."""
    place = state.backend.rank
    if place >= len(saved):
        seed_everything(state.run.seed + 1 + place + 1000 * state.step)
        return
    own = saved[place]
    kind, words, index = own["numpy"]
    np.random.set_state((kind, np.array(words, dtype=np.uint32), index))
    version, internal, gauss = own["python"]
    random.setstate((version, tuple(internal), gauss))
    state.backend.set_rng_state(own["torch"])


def restore(state: TrainState, path: str, keep_data_position: dict | None = None) -> None:
    """Takes over weights, moments, data position, random states and schedule of the checkpoint at ``path``. All processes.

    ``keep_data_position``: a loader state to go on from instead of the checkpoint's (after a rewind). ``path`` may be DeepSpeed's.
    With another batch the share of training done stays (see `step_after`), with another seed or other rows the data goes on from the
    nearest epoch.
    """
    if by_main(state.backend, lambda: is_foreign(path)):
        restore_foreign(state, path)
        return
    saved = open_verified(path, state.backend)
    values = saved.state
    check_adapters(path, values, state.run)
    if values.get("added_tokens", now := added_ids(state)) != now:
        what = "trained the rows of other added tokens than this run adds"
        raise ConfigError(f"{path} {what}; use the same tokenizer, or resume=never")
    check_start(path, values, state)
    saved.require(state.trained)
    saved.require_frozen(state.frozen)
    state.backend.import_state(saved.get, values["backend"]["optimizer_step"])
    state.backend.load_extra_state(values["backend"])
    buffers = trained_buffers(state.model)
    for name, tensor in saved.buffers().items():
        buffers[name].copy_(tensor)
    state.loader.load_state_dict(keep_data_position or data_position(state, values))
    state.schedule.load_state_dict(values["schedule"])
    state.guard.load_state_dict(values["guard"])
    if state.guard.precision != state.run.train.precision:
        state.guard.precision = None  # the user has asked for another one since
    state.step, state.samples, state.tokens = step_after(values, state.run), values["samples"], values["tokens"]
    now = state.run.train.precision
    if values["precisions"][-1]["precision"] != now:
        log.warning("precision changes from %s to %s at step %d", values["precisions"][-1]["precision"], now, state.step)
        values["precisions"].append({"step": state.step, "precision": now})
    state.precisions, state.history = values["precisions"], values.get("history", [])
    set_random_state(state, values["random"] if values["data"]["seed"] == state.run.seed else [])
    log.info("resumed %s", path)
    if keep_data_position is None:
        note_changes(state, path, values)


def check_adapters(path: str, values: dict, run: RunConfig) -> None:
    """ConfigError where the trained tensors of a checkpoint belong to other settings of adapters: they would fit and compute something
    else. The dropout may be another."""
    now = adapter_record(run)
    saved = values.get("adapters", now)  # an older checkpoint does not say
    both = [{**record, "lora": record["lora"] and {**record["lora"], "dropout": None}} for record in (saved, now)]
    if both[0] != both[1]:
        what, old, new = first_difference("train", *both)
        raise ConfigError(f"{path} was trained with {what} = {short(old)}, this run has {short(new)}; use the same, or resume=never")


def added_ids(state: TrainState) -> list[int]:
    """Ids of the added tokens whose rows train alone: rows of other tokens would fit the same tensors."""
    return next((table.ids.tolist() for table in row_tables(state.model).values()), [])


def check_start(path: str, values: dict, state: TrainState) -> None:
    """CheckpointError where the run began with other weights than it would now, unless the user names this checkpoint to resume from: its
    tensors came of what the stage before held then."""
    if not branches(values, state.asked):
        refuse_other_start(path, values.get("started", {}), started_with(state), state.started_from)


def data_position(state: TrainState, values: dict) -> dict:
    """The saved position; the nearest beginning of an epoch where the order is another now (seed, or settings that rows are made by)."""
    saved, now = values["data"], state.loader.state_dict()
    changed = {name: now[name] for name in ("seed", "rows_of") if saved.get(name) != now[name]}
    if branches(values, state.asked) and saved["fingerprint"] != now["fingerprint"]:  # other data, asked for by name
        changed |= {name: now[name] for name in ("fingerprint", "sources")}
    if not changed:
        return saved
    counted = {"epoch": round(saved["samples"] / state.loader.samples_per_epoch), "rows": saved["rows"], "samples": saved["samples"]}
    return saved | changed | state.loader.plan.begin | counted


def batch_of(values: dict, run: RunConfig) -> int:
    """The global batch a checkpoint was trained with."""
    return values.get("global_batch", run.train.global_batch)


def step_after(values: dict, run: RunConfig) -> int:
    """The step that is as far on the way in ``run`` as the saved one was in its own: the same number where ``train.steps`` counts the
    way, as many samples where epochs do. Warmup is counted in steps and so ends after other samples (as in open_clip)."""
    same = run.train.steps is not None
    return values["step"] if same else round(values["step"] * batch_of(values, run) / run.train.global_batch)


def asked_of(run: RunConfig) -> dict[str, Any]:
    """What a resume from a named checkpoint asks for; a precision that was chosen for a machine is not asked for."""
    return {"asked": run.resume, "precision": asked(run).train.precision, "global_batch": run.train.global_batch, "seed": run.seed}


def went_on(values: dict, run: RunConfig) -> bool:
    """Whether a checkpoint already descends from what ``run.resume`` names, with the same changes: a requeued job goes on from it."""
    branched = [entry for entry in values.get("history") or () if "from" in entry]
    changed = [each for each in differences(values["settings"], run) if each.kind != TOLD] if "settings" in values else []
    return not changed and asked_of(run).items() <= (branched or [{}])[-1].items()


def branches(values: dict, run: RunConfig) -> bool:
    """Whether ``run`` leaves the way of the run that wrote a checkpoint: the user names it, and may change what `NAMED` settings say."""
    return run.resume not in ("auto", "never") and not went_on(values, run)


def note_changes(state: TrainState, path: str, values: dict) -> None:
    """Records in the history, and says, with which settings other than before training goes on from ``path``. All processes."""
    found = differences(values["settings"], state.run) if "settings" in values else []
    length = [values["total_steps"], state.total_steps]
    # `precisions` records one; steps that equal the epochs are the same length in other words
    untold = ("train.precision",) if length[0] != length[1] else ("train.precision", "train.steps", "train.epochs")
    changes = {each.path: [each.old, each.new] for each in found if each.path not in untold}
    if length[0] != length[1] and "train.steps" not in changes:
        changes["steps of the run"] = length
    trains_on = state.step < state.total_steps
    if not trains_on and branches(values, state.asked) and (idle := [each for each in found if each.kind != TOLD]):
        # a config.yaml with them would claim a training that never was
        raise ConfigError(
            f"resume = {state.asked.resume!r} is at step {state.step} of {state.total_steps}, so nothing would be trained with "
            f"{'; '.join(f'{each.path} = {short(each.new)}' for each in idle[:4])}: raise train.steps, or name an earlier checkpoint"
        )
    entry = {"changes": changes} | ({"lr": rates_around(state, values)} if trains_on else {})
    if branches(values, state.asked):
        branch(state, path, values, entry)
    elif changes and trains_on:
        state.history.append({"asked": state.asked.resume, "step": state.step, "samples": state.samples} | entry)
    if changes and trains_on:
        log.warning("%s", told(state.history[-1]))


def rates_around(state: TrainState, values: dict) -> list[float]:
    """The learning rate of the last step before a checkpoint and of the next one."""
    then = values.get("settings", state.run.model_dump(mode="json"))["train"]["optimizer"]
    known = {name: value for name, value in then.items() if name in OptimizerConfig.model_fields}
    optimizer, total, step = OptimizerConfig.model_validate(known), values["total_steps"], values["step"]
    cuts = values["schedule"]["plateau"]["scale"] * values["schedule"]["lr_factor"]
    last = optimizer.lr * factor(max(step - 1, 0), total, optimizer) * cuts
    return [last, state.run.train.optimizer.lr * state.schedule.share(state.step)]


def branch(state: TrainState, path: str, values: dict, entry: dict[str, Any]) -> None:
    """Records (beside ``entry``) that training goes on from ``path``, and moves what came after it out of the way. All processes."""
    own = Store(path.rstrip("/").rpartition("/")[0] or ".").path() == state.checkpoints.store.path()
    now = state.loader.state_dict()
    changes = entry | {"data": {name: now[name] for name in ("epoch", "rows", "seed")}, "step_there": values["step"]}
    if any(now[name] != values["data"].get(name) for name in ("seed", *state.loader.plan.begin)):  # begun at the nearest epoch
        again = round(now["samples"] - now["epoch"] * state.loader.samples_per_epoch)
        changes |= {"samples_read_again": max(again, 0), "samples_left_out": max(-again, 0)}
    state.history.append(asked_of(state.asked) | {"from": path, "step": state.step, "samples": state.samples} | changes)
    log.warning("going on from %s at step %d of %d: %s", path, state.step, state.total_steps, state.history[-1])
    leave_behind(state, min(values["step"], state.step) if own else -1)
    if any(name.startswith(("data.", "train.global_batch", "train.contrastive")) for name in entry["changes"]):
        state.guard.losses.clear()  # of steps with other numbers, and for contrastive losses of another level
        state.guard.last_event = state.guard.last_target = None
    ends_here = state.step >= state.total_steps
    if not own or state.step != values["step"] or ends_here:
        save_checkpoint(state)
    if ends_here and state.backend.is_main:  # nothing is trained that would write it
        Store(state.run.folder).write("config.yaml", to_yaml(asked(state.asked)).encode())


def leave_behind(state: TrainState, step: int) -> None:
    """Moves the run's checkpoints after ``step`` and what was made of its end to ``checkpoints.before-N``. All processes."""
    state.backend.barrier()  # everyone has read what may be moved
    by_main(state.backend, lambda: set_aside(state.run, [found for found in state.checkpoints.steps() if found > step], lives_on=step >= 0))


def checkpoint_at(state: TrainState, place: str) -> str:
    """The run's checkpoint that ``step-N`` (that one or the last before) or ``epoch-N`` (the nearest to N epochs of data) means.
    ConfigError where there is none. What this process sees: the main one decides."""
    kind, number = PLACE.fullmatch(place).groups()
    path, found = state.checkpoints.store.path, state.checkpoints.steps()
    if kind == "step":
        found = [step for step in found if step <= int(number)]
    elif found:
        samples = {step: Checkpoint(path(folder_name(step))).state["data"]["samples"] for step in found}
        found = [min(found, key=lambda step: abs(samples[step] - int(number) * state.loader.samples_per_epoch))]
    if not found:
        raise ConfigError(f"resume = {place!r}: {path()} has no checkpoint there or before; name one that is kept, or give its path")
    return path(folder_name(found[-1]))


def resume_path(state: TrainState) -> str | None:
    """The checkpoint ``run.resume`` asks for, the same on all processes; with ``never`` earlier results are moved aside."""
    if state.run.resume == "auto":
        return state.checkpoints.latest()
    if state.run.resume == "never":
        if requeued() and (path := by_main(state.backend, lambda: _of_this_job(state))):
            log.warning("this job began anew and was requeued; it goes on from %s", path)
            return path
        by_main(state.backend, lambda: set_aside(state.run, state.checkpoints.steps()))
        return None
    # a process that looks for itself may have an old list of a shared folder and resume another step than the rest
    return by_main(state.backend, lambda: _named(state))


def _of_this_job(state: TrainState) -> str | None:
    """The newest checkpoint where this SLURM job wrote it: its command says ``resume=never`` each time it is requeued. Main process."""
    steps = state.checkpoints.steps()
    path = state.checkpoints.store.path(folder_name(steps[-1])) if steps else None
    return path if path and Checkpoint(path).state.get("job") == os.environ.get("SLURM_JOB_ID") else None


def _named(state: TrainState) -> str:
    """The checkpoint that ``run.resume`` names, or a later one that descends from it already. Main process."""
    run, steps = state.run, state.checkpoints.steps()
    latest = state.checkpoints.store.path(folder_name(steps[-1])) if steps else None
    if latest and went_on(Checkpoint(latest).state, run):
        log.warning("this run already went on from %s with these settings; it goes on from %s", run.resume, latest)
        return latest
    path = checkpoint_at(state, run.resume) if PLACE.fullmatch(run.resume) else run.resume
    if Store(path).size("manifest.json") is None and not is_foreign(path):
        raise ConfigError(
            f"resume = {path!r} is no complete checkpoint (it has no manifest.json); give auto, never, step-N, epoch-N, a step-XXXXXXXX "
            "folder or a DeepSpeed checkpoint"
        )
    return path


def precision_in_force(state: TrainState, path: str | None) -> Precision:
    """The precision in which ``path`` is resumed: the one a rewind changed to, until the user asks for another one than
    when it was written. All processes.

    A requeued job asks for what it asked for before; going back to that would end where the rewind began.
    """

    def find() -> Precision:
        now, wanted = state.run.train.precision, asked(state.run).train.precision  # what a machine lacks is not asked for otherwise
        saved = {} if path is None or is_foreign(path) else Checkpoint(path).state
        kept = saved.get("guard", {}).get("precision")
        if kept in (None, now) or saved["asked_precision"] != wanted:
            return now
        log.warning("resuming in %s, to which a rewind changed from %s; another precision changes it", kept, wanted)
        return kept

    return by_main(state.backend, find)


def set_aside(run: RunConfig, steps: list[int], lives_on: bool = False) -> None:
    """Moves the checkpoints of ``steps`` and all that belongs to an earlier training of this name to ``checkpoints.before-N``: its export,
    results, records and figures, and evaluations of that export. Nobody takes them for the new one's, and nothing is lost.

    ``lives_on``: that training goes on from an earlier checkpoint, so its metrics and settings are copied.
    """
    store = Store(run.folder)
    there = [name for name in (*store.folders(), *store.files()) if any(fnmatch(name, pattern) for pattern in OF_A_TRAINING)]
    if not steps and not ({"export"} if lives_on else {"export", "metrics.jsonl"}) & set(there):
        return
    taken = [int(found[1]) for name in store.folders() if (found := re.fullmatch(r"checkpoints\.before-(\d+)", name))]
    aside = f"checkpoints.before-{1 + max(taken, default=0)}"
    store.make(aside)
    for step in steps:
        store.move(f"checkpoints/{folder_name(step)}", f"{aside}/{folder_name(step)}")
    for name in there:
        if not lives_on or name not in LIVES_ON:
            store.move(name, f"{aside}/{name}")
        elif name not in ("stability", "tensorboard"):
            store.write(f"{aside}/{name}", store.read(name))
    log.warning("what was trained before as %s (steps %s) is now in %s", run.folder, ", ".join(map(str, steps)) or "none kept", store.path(aside))
    scores = Store(f"{run.root.rstrip('/')}/{run.preset}/eval/{run.name}")
    found = json.loads(scores.read("results.json")) if scores.size("results.json") is not None else {}
    scored = {each.get("export") for each in (found, *found.get("results", ()))} - {None}
    if store.path("export") not in {Store(each).path() for each in scored}:
        return
    before = f"before-{1 + sum(name.startswith('before-') for name in scores.folders())}"
    scores.make(before)
    for name in [name for name in (*scores.folders(), *scores.files()) if any(fnmatch(name, pattern) for pattern in OF_A_TRAINING)]:
        scores.move(name, f"{before}/{name}")
    log.warning("scores of its export are now in %s", scores.path(before))


def open_folder(state: TrainState, first: bool = True) -> MetricsFile | None:
    """Opens metrics.jsonl behind the last step kept, having written environment.json, and the first time config.yaml: after a rewind
    it still says what was asked for, and environment.json from which step on which precision was used.

    None on other than the main process.
    """
    if not state.backend.is_main:
        return None
    store = Store(state.run.folder)
    store.make()
    if first and not state.step and store.size("export/config.json") is not None:
        set_aside(state.run, [])  # of a training whose checkpoints are gone
    if first:
        store.write("config.yaml", to_yaml(asked(state.asked)).encode())
    facts = {
        "tables": state.tables, "backend": {"name": state.backend.name, "world": state.backend.world, "devices": state.backend.devices},
        "chosen": [row.model_dump(mode="json") for row in state.run.chosen], "accumulation": state.run.accumulation,
        "data": {"fingerprint": state.loader.state_dict().get("fingerprint"), "summary": state.loader.summary()},
        "frozen": {name: {key: value for key, value in row.items() if key != "tensors"} for name, row in state.frozen.items()},
        "validation": state.held_out and {"fingerprint": state.held_out.plan.mixture.fingerprint, "summary": state.held_out.summary()},
        "history": state.history, "precisions": state.precisions,
    }  # fmt: skip
    store.write("environment.json", json.dumps(environment(**facts), indent=1, default=str).encode())
    return MetricsFile(state.run.folder, state.step, state.samples, state.run.train.tensorboard)


def note_end(state: TrainState, reason: str, told: str) -> None:
    """Adds to environment.json how the training ended: whoever started its process, and opens the folder later, reads it there."""
    if not state.backend.is_main:
        return
    store = Store(state.run.folder)
    facts = json.loads(store.read("environment.json")) | {"ended": {"step": state.step, "reason": reason, "told": told}}
    store.write("environment.json", json.dumps(facts, indent=1).encode())
