"""What data held out of training say of a run while it trains: ``eval_loss``, and for language ``eval_accuracy``.

Every sample of ``data.validation`` counts exactly once, in evaluation mode, without augmentation and without a gradient:

* vlm: the mean over all supervised tokens of all samples, so neither batches nor devices change it.
* clip: the run's own loss on consecutive ``train.global_batch`` pairs at a time, as many negatives as training has; the mean over pairs
  (the last batch is smaller). For softmax losses that is open_clip's ``clip_val_loss`` with the global batch as its batch size.

Every process makes the same number of forwards of the wrapped objective. Rows that fill the last batch, and samples that cannot be
used, count nothing; of the latter the loader tells and stops above ``data.max_bad_share``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkit.config import ConfigError, RunConfig, SourceConfig
from mmkit.data.recipe import sources_of
from mmkit.errors import InputError
from mmkit.training.accumulate import SHARED, joined
from mmkit.training.contrastive import ContrastiveLoss
from mmkit.training.metrics import totals
from mmkit.training.schedule import VALIDATION_LOSS, watched

if TYPE_CHECKING:
    from mmkit.training.assemble import TrainState

MEASURED = {"vlm": (VALIDATION_LOSS, "eval_accuracy"), "clip": (VALIDATION_LOSS,)}  # what data.validation gives
OF_MODEL = (*SHARED, "teacher_scale")  # features that belong to no pair


# ---------------------------------------------------------------- before the run


def check(run: RunConfig, tasks: bool) -> None:
    """ConfigError where ``run`` watches what nobody measures, or holds out what it trains on. ``tasks``: others measure something too."""
    train, best, held_out = run.train, run.train.checkpoint, len(run.data.validation) > 0
    name, plateau = watched(train)[0], train.optimizer.schedule == "plateau"
    asks = "train.optimizer.schedule 'plateau'" if plateau else f"train.checkpoint.best_metric {name!r}"
    if best.best_mode == "max" and best.best_metric in (None, VALIDATION_LOSS):
        raise ConfigError(
            f"train.checkpoint.best_mode 'max' goes with a best_metric of which more is better, not {best.best_metric!r}; set one, or min"
        )
    if plateau and not name.startswith("eval_"):
        raise ConfigError(f"{asks} watches validation, but train.checkpoint.best_metric {name!r} is one of training; name an eval_... one")
    asked = plateau or (best.best_metric is not None and name.startswith("eval_"))
    if asked and not train.eval_every:
        raise ConfigError(f"{asks} needs a measurement, but train.eval_every is 0: set it, and data.validation to held-out sources")
    if train.eval_every and not (held_out or tasks):
        raise ConfigError(
            f"train.eval_every is {train.eval_every}, but nothing is measured: name held-out sources in data.validation, or use 0"
        )
    if best.best_metric is not None and not (train.eval_every or best.save_every or best.save_samples):
        raise ConfigError(
            f"{asks} chooses among checkpoints, but only that of the end is written: set train.checkpoint.save_every or train.eval_every"
        )
    known = MEASURED[run.model.kind] if held_out else ()
    if asked and name not in known and (not tasks or name == VALIDATION_LOSS):
        there = f"measured are {', '.join(known)}" if known else "name held-out sources in data.validation, or another best_metric"
        raise ConfigError(f"{asks} watches {name!r}, which is not measured: {there}")
    for source in run.data.validation:
        check_source(source, run)


def check_source(source: SourceConfig, run: RunConfig) -> None:
    """ConfigError for a held-out source that is drawn by shares, or of which a part is trained on as well."""
    if given := next((field for field in ("weight", "multiple") if getattr(source, field) is not None), None):
        raise ConfigError(
            f"data.validation {source.name!r} has a {given}, but every held-out sample counts once; remove it (cap takes fewer)"
        )
    for other in sources_of(run.data):
        if common := places(source) & places(other):
            raise ConfigError(
                f"data.validation {source.name!r} is trained on too: data.sources {other.name!r} has {min(common)[0]} as well; hold out "
                "another split, file or shards"
            )


def places(source: SourceConfig) -> set[tuple[str, str]]:
    """The files or tar shards of a source, or the data set's name, each with its split where its format has splits."""
    from mmkit.data.tar_files import expand

    found = expand(source.path) if source.format == "webdataset" else [source.path]
    files = [os.path.realpath(path) if os.path.exists(path) else path for path in found]
    split = source.split if source.format == "pack" or (source.format == "parquet" and not os.path.exists(source.path)) else ""
    return {(file, split) for file in files}


# ---------------------------------------------------------------- while it trains


@torch.no_grad()
def measure(state: TrainState) -> dict[str, float]:
    """``eval_...`` of the held-out data with the weights as they are, the objective being in evaluation mode. All processes."""
    state.held_out.load_state_dict(state.held_out.state_dict() | state.held_out.plan.begin)
    try:
        return of_tokens(state) if state.run.model.kind == "vlm" else of_pairs(state)
    finally:
        state.held_out.close()


def of_tokens(state: TrainState) -> dict[str, float]:
    """Mean loss of supervised tokens, and the share of them that is predicted right. ValueError where there is none."""
    backend, sums, names = state.backend, [], []
    for batch in state.held_out:
        names, values = totals([state.objective(backend.shard(batch.tensors), mode="loss")], backend.device)
        sums.append(backend.sum_over_devices(values))
        backend.sync()  # one program a batch shape on lazy devices
    rows = [dict(zip(names, values.tolist(), strict=True)) for values in sums]  # whole ones: an index is a program of its own there
    loss, correct, count = (sum(row[name] for row in rows) for name in ("loss_sum", "n_correct", "n_targets"))
    if not count:
        raise InputError("data.validation has no supervised token")
    return {VALIDATION_LOSS: loss / count, "eval_accuracy": correct / count}


def of_pairs(state: TrainState) -> dict[str, float]:
    """Mean loss of pairs among ``train.global_batch`` of them, taken by every process on all features. ValueError where there is none."""
    config, backend = state.run.train.contrastive, state.backend
    loss = ContrastiveLoss(config.model_copy(update={"chunk": config.chunk or state.run.train.device_batch}), Alone())
    sums, n_pairs, group, real = [], 0, [], []

    def close() -> None:
        nonlocal n_pairs
        if any(real):
            sums.append(loss(only(joined(group), real))["loss_sum"])
            n_pairs += sum(real)
        backend.sync()
        group.clear()
        real.clear()

    for batch in state.held_out:
        features = state.objective(backend.shard(batch.tensors), mode="features")
        group.append({name: everywhere(name, value, backend) for name, value in features.items()})
        real += [bool(key) for keys in backend.all_objects(batch.keys) for key in keys]  # as gathered: process after process
        backend.sync()
        if len(group) == state.accumulation:
            close()
    close()
    if not n_pairs:
        raise InputError("data.validation has no usable pair")
    return {VALIDATION_LOSS: sum(value.item() for value in sums) / n_pairs}


class Alone:
    """One process that has every pair: what the loss asks of a backend."""

    rank = 0

    def gather(self, x: Tensor, with_grad: bool = False) -> Tensor:
        """Its own rows."""
        return x


def everywhere(name: str, value: Tensor, backend) -> Tensor:
    """Rows of all processes of a feature of pairs, the sum of a caption's, the scalar itself of what is the model's."""
    if name.startswith("caption_"):
        return backend.sum_over_devices(value)
    return value if name in OF_MODEL else backend.gather(value.float() if value.is_floating_point() else value)


def only(features: dict[str, Tensor], real: list[bool]) -> dict[str, Tensor]:
    """Features (b, ...) of the pairs that count; scalars as they are."""
    rows = torch.tensor([row for row, counts in enumerate(real) if counts])
    whole = {name: value for name, value in features.items() if name in OF_MODEL or name.startswith("caption_")}
    return whole | {name: value.index_select(0, rows.to(value.device)) for name, value in features.items() if name not in whole}
