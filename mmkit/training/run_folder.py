"""The run folder: what training reads from it and writes to it.

    runs/<preset>/<stage>/<name>/   config.yaml  environment.json  metrics.jsonl  checkpoints/  export/
"""

from __future__ import annotations

import json
import logging
import random
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from mmkit.config import ConfigError, RunConfig, to_yaml
from mmkit.training.assemble import TrainState, seed_everything
from mmkit.training.checkpoint import CheckpointError, open_verified, trained_buffers
from mmkit.training.foreign import is_foreign, restore_foreign
from mmkit.training.metrics import MetricsFile, environment
from mmkit.storage import Store

log = logging.getLogger(__name__)

MUST_AGREE = ("model", "seed", "train.trainable", "train.lora", "train.bits", "train.global_batch", "train.optimizer.kind")


def save_checkpoint(state: TrainState, metrics: dict[str, float] | None = None) -> bool:
    """Writes the checkpoint of this step. All processes."""
    values = {
        "step": state.step, "samples": state.samples, "tokens": state.tokens, "total_steps": state.total_steps,
        "data": state.loader.state_dict(), "schedule": state.schedule.state_dict(), "guard": state.guard.state_dict(),
        "backend": state.backend.extra_state(), "backend_kind": state.backend.name, "precisions": state.precisions,
        "random": state.backend.all_objects(random_state(state)),
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
    """Takes back this rank's random state; a rank the saving run did not have gets a seed of its own."""
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
    """
    if is_foreign(path):
        restore_foreign(state, path)
        return
    saved = open_verified(path, state.backend)
    values = saved.state
    if saved.manifest["frozen"] != state.frozen and state.run.train.bits == 16:
        raise CheckpointError(
            f"{path} was trained on other frozen weights ({saved.manifest['frozen'].get('parameters')} parameters, "
            f"{str(saved.manifest['frozen'].get('sha256'))[:12]}) than this run has ({state.frozen['parameters']}, {state.frozen['sha256'][:12]}); "
            "start from the same export and sources, or use resume=never"
        )
    saved.require(state.trained)
    state.backend.import_state(saved.get, values["backend"]["optimizer_step"])
    state.backend.load_extra_state(values["backend"])
    buffers = trained_buffers(state.model)
    for name, tensor in saved.buffers().items():
        buffers[name].copy_(tensor)
    state.loader.load_state_dict(keep_data_position or values["data"])
    state.schedule.load_state_dict(values["schedule"])
    state.guard.load_state_dict(values["guard"])
    state.step, state.samples, state.tokens = values["step"], values["samples"], values["tokens"]
    now = state.run.train.precision
    if values["precisions"][-1]["precision"] != now:
        log.warning("precision changes from %s to %s at step %d", values["precisions"][-1]["precision"], now, state.step)
        values["precisions"].append({"step": state.step, "precision": now})
    state.precisions = values["precisions"]
    set_random_state(state, values["random"])
    log.info("resumed %s", path)


def resume_path(state: TrainState) -> str | None:
    """The checkpoint ``run.resume`` asks for, the same on all processes; with ``never`` earlier results are moved aside."""
    run = state.run
    if run.resume == "auto":
        return state.checkpoints.latest()
    if run.resume == "never":
        if state.backend.is_main:
            set_aside(run.folder)
        state.backend.barrier()
        return None
    if Store(run.resume).size("manifest.json") is None and not is_foreign(run.resume):
        raise ConfigError(
            f"resume = {run.resume!r} is no complete checkpoint (it has no manifest.json); give auto, never, a step-XXXXXXXX folder or a "
            "DeepSpeed checkpoint"
        )
    return run.resume


def set_aside(folder: str) -> None:
    """Renames the checkpoints of an earlier run of this name, so that ``resume=never`` neither loses them nor finds them later."""
    store = Store(folder)
    if "checkpoints" not in store.folders():
        return
    number = 1 + sum(name.startswith("checkpoints.before-") for name in store.folders())
    store.move("checkpoints", f"checkpoints.before-{number}")
    log.warning("earlier checkpoints of %s are now in checkpoints.before-%d", folder, number)


def check_same_run(run: RunConfig) -> None:
    """ConfigError where the folder holds a run with other settings than those a resume may change."""
    store = Store(run.folder)
    if run.resume == "never" or store.size("config.yaml") is None:
        return
    before, now = _with_defaults(yaml.safe_load(store.read("config.yaml"))), run.model_dump(mode="json")
    for path in MUST_AGREE:
        old, new = _at(before, path), _at(now, path)
        if old != new:
            what, old, new = _first_difference(path, old, new)
            raise ConfigError(
                f"{store.path()} holds a run with {what} = {_short(old)}, this one has {_short(new)}: give it another name (name=...), or start anew "
                "with resume=never"
            )


def _with_defaults(tree: dict) -> dict:
    """A saved config with the settings that were added since; as it is where it no longer fits."""
    try:
        return RunConfig.model_validate(tree).model_dump(mode="json")
    except ValidationError:
        return tree


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = (tree or {}).get(key)
    return tree


def _first_difference(path: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *new]:
            if old.get(key) != new.get(key):
                return _first_difference(f"{path}.{key}", old.get(key), new.get(key))
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new)):
            if a != b:
                return _first_difference(f"{path}.{index}", a, b)
    return path, old, new


def open_folder(state: TrainState, first: bool = True) -> MetricsFile | None:
    """Opens metrics.jsonl behind the last step kept, having written config.yaml and environment.json where this is the ``first`` time.

    None on other than the main process.
    """
    if not state.backend.is_main:
        return None
    if not first:
        return MetricsFile(state.run.folder, state.step)
    store = Store(state.run.folder)
    store.make()
    store.write("config.yaml", to_yaml(state.run).encode())
    facts = {
        "tables": state.tables, "backend": {"name": state.backend.name, "world": state.backend.world, "devices": state.backend.devices},
        "data": {"fingerprint": state.loader.state_dict().get("fingerprint"), "summary": state.loader.summary()}, "frozen": state.frozen,
    }  # fmt: skip
    store.write("environment.json", json.dumps(environment(**facts), indent=1, default=str).encode())
    return MetricsFile(state.run.folder, state.step)
