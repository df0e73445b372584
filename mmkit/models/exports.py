"""Which export of a run may be used: that of a run that ended, of its last step. What else there is says how to go on.

Not here: what an export holds (`pretrained`), and writing one (`training.exporting`).
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mmkit.config import ConfigError, RunConfig
from mmkit.errors import in_notebook
from mmkit.storage import Store

COMPLETE = re.compile(r"step-(\d{8})")  # a checkpoint's folder; it is complete once it has a manifest.json
PROVENANCE = "training.json"  # of an export: step, parent and hashes of the trained tensors
NOTEBOOKS = {"pretrain": "02_pretrain", "finetune": "03_finetune"}


class UnfinishedError(ConfigError):
    """The export of a run is wanted that has not ended, or went on after it."""


class Progress(NamedTuple):
    """How far a run folder's training is, read from its newest complete checkpoint."""

    step: int
    state: dict[str, Any]  # the checkpoint's state.json, empty where it cannot be read
    total: int | None  # steps of the whole run, as far as the folder says

    @property
    def done(self) -> bool:
        """Whether all steps are made."""
        return self.total is not None and self.step >= self.total


def progress(folder: str) -> Progress | None:
    """How far the run in ``folder`` is; None where it has no complete checkpoint."""
    store = Store(f"{folder}/checkpoints")
    steps = [int(found[1]) for name in store.folders() if (found := COMPLETE.fullmatch(name))]
    step = next((step for step in sorted(steps, reverse=True) if store.size(f"step-{step:08d}/manifest.json") is not None), None)
    if step is None:
        return None
    state: dict[str, Any] = {}
    with contextlib.suppress(ValueError, OSError):  # damaged: whoever loads it says so by name
        state = json.loads(store.read(f"step-{step:08d}/state.json"))
    # a finished run that was resumed for more steps and stopped before its next checkpoint: only config.yaml knows
    asked = (config_of(folder).get("train") or {}).get("steps") or 0
    return Progress(step, state, max(state.get("total_steps") or 0, asked) or None)


def config_of(folder: str) -> dict[str, Any]:
    """The settings in ``config.yaml`` of a run folder, empty where it has none."""
    store = Store(folder)
    found = yaml.safe_load(store.read("config.yaml")) if store.size("config.yaml") is not None else None
    return found if isinstance(found, dict) else {}


def provenance(export: str) -> dict[str, Any]:
    """What training wrote beside an export's weights (step, hashes of what was trained); empty for one it did not make."""
    store = Store(export)
    return json.loads(store.read(PROVENANCE)) if store.size(PROVENANCE) is not None else {}


def finished_export(folder: str, go_on: str) -> str | None:
    """The export in ``folder``, which is a run folder or an export itself; None where there is neither an export nor a run.

    UnfinishedError, ending with ``go_on`` (what to do), where the run is unfinished or its export is of another step than its newest
    checkpoint: the weights would be those of an earlier training, or of half of one. An export named itself is taken as it is.
    """
    folder = folder.rstrip("/")
    found = f"{folder}/export" if Store(f"{folder}/export").size("config.json") is not None else None
    if found is None and Store(folder).size("config.json") is not None:
        return folder
    at = progress(folder)
    if found is None and at is None and not config_of(folder):
        return None
    if found is None or (at and at.total and not at.done):
        where = f"at step {at.step} of {at.total or 'an unknown number'}" if at else "it has no checkpoint yet"
        state = f"has made all its {at.step} steps but has no export" if at and at.done else f"is unfinished: {where}"
        raise UnfinishedError(f"the run in {folder} {state}; {go_on}")
    step = provenance(found).get("step")
    if at and step is not None and step != at.step:
        raise UnfinishedError(
            f"{found} is of step {step}, but the run in {folder} is at step {at.step}; {go_on}; or take the export as it is with "
            f"start_from={found}"
        )
    return found


def train_command(run: RunConfig, stage: str) -> str:
    """The command that trains ``stage`` for the model, name and root of ``run``."""
    options = {"name": "--name", "root": "--run-dir"}
    chosen = "".join(f" {option} {shlex.quote(_chosen(run)[key])}" for key, option in options.items() if key in _chosen(run))
    return f"mmkit train --model {run.preset} --stage {stage}{chosen}"


def _chosen(run: RunConfig) -> dict[str, str]:
    """Of name and root those that are not what they are without being said."""
    root, here = run.root.rstrip("/"), Path.cwd()
    usual = ("runs", *(str(folder / "runs") for folder in (here, *here.parents)))
    return ({} if run.name == "default" else {"name": run.name}) | ({} if root in usual else {"root": root})


def how_to_train(run: RunConfig, stage: str, verb: str) -> str:
    """What makes the export of ``stage`` for the model and name of ``run``: a command after ``verb``, before it in a notebook's kernel the
    notebook that does the same."""
    told = f"{verb}: {train_command(run, stage)}"
    if not in_notebook():
        return told
    values = {"model": run.preset} | _chosen(run)
    return f"run {NOTEBOOKS[stage]} with {', '.join(f'{key}={value!r}' for key, value in values.items())}, or {told}"
