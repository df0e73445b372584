"""Going on from another program's checkpoint: a DeepSpeed folder gives weights, moments and step; the data begins anew."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mmkit.models.convert.names import ours
from mmkit.sharding.backend import plain_name
from mmkit.sharding.deepspeed_folder import Universal, convert, step_folder
from mmkit.storage import is_remote
from mmkit.training.agreement import by_each
from mmkit.training.checkpoint import CheckpointError

if TYPE_CHECKING:
    from mmkit.training.assemble import TrainState

log = logging.getLogger(__name__)


def is_foreign(path: str) -> bool:
    """Whether ``path`` is a checkpoint folder of DeepSpeed."""
    return "://" not in path and step_folder(path) is not None


def restore_foreign(state: TrainState, path: str) -> None:
    """Takes over trained parameters, both moments and the step of a DeepSpeed folder, under its names or the published models'.

    All processes; the main one joins the ranks' files below the run folder meanwhile. CheckpointError where parameters of this run are not
    in it, or it trained others.
    """
    work = Path(path if is_remote(state.run.folder) else state.run.folder, "imported.tmp")
    if state.backend.is_main:
        shutil.rmtree(work, ignore_errors=True)
        convert(path, work)
    state.backend.barrier()
    found = by_each(state.backend, str(work), lambda: Universal(work, path))
    names = _matched(found.names, set(state.trained), path)
    state.backend.import_state(lambda name: found.get(names[name], state.trained[name]), found.step)
    state.step = found.step
    state.backend.barrier()
    if state.backend.is_main:
        shutil.rmtree(work, ignore_errors=True)
    log.warning("%s: went on from DeepSpeed's step %d; it does not say which samples were seen, so the data begins anew", path, found.step)


def _matched(there: list[str], wanted: set[str], path: str) -> dict[str, str]:
    """Our name -> DeepSpeed's."""
    out = {}
    for name in there:
        for ours_now in (plain_name(name, "model."), plain_name(name), ours(name)):
            if ours_now in wanted:
                out[ours_now] = name
                break
        else:
            raise CheckpointError(f"{path} trained {name!r}, which this run does not; set train.trainable and train.lora as there")
    if missing := sorted(wanted - set(out)):
        raise CheckpointError(f"{path} lacks {len(missing)} trained parameters of this run, first {missing[0]!r}")
    return out
