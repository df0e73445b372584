"""From a RunConfig to everything a training loop holds: model, data, objective, optimizer, schedule, guard, checkpoints.

Order matters: check the settings, read weights (`weights.py`), freeze and add adapters, open the data (`feed.py`), wrap. Not here:
the loop itself, and the run folder (`run_folder.py`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from mmkit.config import ClipConfig, ConfigError, RunConfig
from mmkit.data.recipe import sources_of
from mmkit.folder_lock import FolderLock
from mmkit.models.vocabulary import row_tables
from mmkit.sharding.backend import Backend, create
from mmkit.training.agreement import by_each, by_main
from mmkit.training.checkpoint import Checkpoints
from mmkit.training.contrastive import ContrastiveObjective, check_model
from mmkit.training.feed import make_loaders
from mmkit.training.loss import LanguageObjective
from mmkit.training.optim import optimizer_factory
from mmkit.training.same_run import check_same_run
from mmkit.training.schedule import Schedule, check_lengths, watched
from mmkit.training.stability import StabilityGuard
from mmkit.training.weights import (
    build_model, check_exportable, check_patterns, frozen_record, materialise, parent_export, prepare_model, reader, start_digests,
)  # fmt: skip



@dataclass
class TrainState:
    """All that a step needs and changes."""

    run: RunConfig
    backend: Backend
    model: nn.Module  # as built, for names and files
    objective: nn.Module  # as wrapped by the backend: the one to call
    loader: Any
    schedule: Schedule
    guard: StabilityGuard
    checkpoints: Checkpoints
    total_steps: int
    accumulate: Callable  # window of batches, count -> what the objective returned for each
    stored: dict[str, Any]  # name -> where the file it came from is
    frozen: dict[str, Any]  # component -> sources and hashes of its frozen weights
    trained: dict[str, torch.Size]  # name -> whole shape of every trained parameter
    tables: dict[str, Any]  # for people: parameter groups, adapters, components
    started_with: dict[str, str] = field(default_factory=dict)  # hashes of the trained tensors before the first step
    started_from: str | None = None  # the export whose weights it began with
    components: tuple = ()  # the model file's table: name pattern -> component
    blocks: tuple = ()  # names of the classes it is made of
    held_out: Any = None  # loader of data.validation, where it is measured
    window: list = field(default_factory=list)  # micro-batches of the last step
    reached: list[dict] | None = None  # the gradient report of the first update
    step: int = 0
    samples: int = 0
    tokens: int = 0
    precisions: list[dict] = field(default_factory=list)  # from which step on which precision was used
    history: list[dict] = field(default_factory=list)  # every resume from a checkpoint the user named, with what was changed
    lock: FolderLock | None = None  # of the run folder, while it trains there
    asked: RunConfig | None = None  # as the user asked for it: a rewind may have changed the precision of `run`

    def __post_init__(self):
        self.asked = self.asked or self.run

    @property
    def accumulation(self) -> int:
        """Micro-batches of one step."""
        return self.run.accumulation


def assemble(run: RunConfig) -> TrainState:
    """The state before step 0 of ``run``. Wrong settings, another run in its folder and missing files are refused before weights
    are read."""
    from mmkit.sharding.environment import check_devices

    check(run)
    backend = create(run.backend, run.train.precision)
    check_devices(run, backend.devices)
    # one look at the disk for all: a process with an older list of it would refuse alone, and leave the others waiting
    by_main(backend, lambda: check_same_run(run))
    parent = by_main(backend, lambda: parent_export(run))
    seed_everything(run.seed)
    model, stored, parts = by_each(backend, parent, lambda: build_model(run, parent)) if parent else build_model(run, None)
    tables = prepare_model(model, run, parts.COMPONENTS, stored)
    digests = start_digests(model, stored, backend)
    frozen = frozen_record(model, stored, digests, parts.COMPONENTS)
    trained = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    # what an export compares holds the rows of added tokens in their tables
    grown = {f"{path}.weight": f"{path}.base_layer.weight" for path in row_tables(model)}
    started_with = {name: digests[name] for name in trained}
    started_with |= {table: digests[name] for table, name in grown.items() if name in digests}
    objective = make_objective(model, run, backend)
    factory = optimizer_factory(model, parts.COMPONENTS, run.train.optimizer)
    if run.data.cache_features:
        encoders = getattr(model, "encoders", model)
        materialise(encoders, stored, "" if encoders is model else "encoders.")
    data, held_out = make_loaders(run, model, backend, frozen)
    wrapped = backend.prepare(
        objective, factory, train=run.train, rules=parts.SHARDING, blocks=model.blocks, accumulation=run.accumulation,
        weights=reader(stored),
    )  # fmt: skip
    wrapped.train()
    seed_everything(run.seed + 1 + backend.rank)
    total = run.train.steps or max(math.ceil(run.train.epochs * data.steps_per_epoch), 1)
    tables["groups"] = [
        {"group": g["title"], "lr": g["base_lr"], "weight_decay": g["weight_decay"], "tensors": len(g["params"])}
        for g in backend.optimizer.param_groups
    ]
    checkpoints = Checkpoints(f"{run.folder}/checkpoints", run.train.checkpoint, backend)
    guard = StabilityGuard(
        run.train.stability, run.folder, backend.any_device, backend.is_main, backend.all_objects,
        can_go_back=lambda step: checkpoints.at_or_before(step) is not None,
    )  # fmt: skip
    return TrainState(
        run, backend, model, wrapped, data, Schedule(run.train.optimizer, total, watched=watched(run.train)), guard, checkpoints, total,
        accumulator(run, wrapped, objective, backend), stored, frozen, trained, tables, started_with,
        started_from=parent, components=parts.COMPONENTS,
        blocks=model.blocks, held_out=held_out, precisions=[{"step": 0, "precision": run.train.precision}],
    )  # fmt: skip


def check(run: RunConfig) -> None:
    """ConfigError for settings that cannot work together, before anything is read or downloaded; `check_scope` sees to what needs a model."""
    from mmkit.sharding.combinations import check_combination

    if run.stage == "eval":
        raise ConfigError("stage 'eval' trains nothing; use mmkit eval, or stage pretrain or finetune")
    check_combination(run)
    lora = run.train.lora
    if lora and (both := sorted(set(lora.components) & set(run.train.trainable))):
        raise ConfigError(f"component {both[0]!r} is in train.trainable and in train.lora.components: train it whole or by adapters")
    if run.train.new_tokens == "rows" and run.model.kind != "vlm":
        raise ConfigError("train.new_tokens 'rows' is for models of kind vlm; a clip model's vocabulary never grows")
    if run.train.bits != 16 and (lora is None or "language" in run.train.trainable):
        raise ConfigError(f"train.bits {run.train.bits} freezes the language model: set train.lora, take language out of train.trainable")
    check_exportable(run)
    for setting, names in (("train.trainable", run.train.trainable), ("lora.components", lora.components if lora else ())):
        if run.data.cache_features and "encoders" in names:
            raise ConfigError(f"data.cache_features keeps what frozen encoders give, but {setting} has 'encoders'; turn one of them off")
    check_patterns(run.train)
    if run.model.kind == "clip":
        from mmkit.models.clip import architecture_of

        check_model(run.train.contrastive, architecture_of(run.model))
    if not sources_of(run.data):
        which = f"data.sources of {run.preset!r} stage {run.stage!r}"
        raise ConfigError(f"{which} is empty; name at least one source, or a data.mixture")
    if run.train.steps:
        check_lengths(run.train.optimizer, run.train.steps)
    _ = run.accumulation if run.resolved else 1


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# ---------------------------------------------------------------- objective


def make_objective(model: nn.Module, run: RunConfig, backend: Backend) -> nn.Module:
    """The model with its loss."""
    if run.model.kind == "vlm":
        return LanguageObjective(model, run.train.loss_chunk, backend.checkpoint)
    from mmkit.models.build import build

    contrastive = run.train.contrastive
    teacher = None
    if contrastive.kind == "distill" and contrastive.distill_from:
        settings = {"name": contrastive.distill_from, "weights": contrastive.distill_weights}
        teacher = build(ClipConfig(**settings, mean=run.model.mean, std=run.model.std))
    return ContrastiveObjective(model, backend, contrastive, teacher)


def accumulator(run: RunConfig, wrapped: nn.Module, objective: nn.Module, backend: Backend) -> Callable:
    """How a window of micro-batches becomes gradients: one by one, or for contrastive losses with every negative kept."""
    if run.model.kind == "clip" and run.accumulation > 1:
        from mmkit.training.accumulate import contrastive_step

        def cached(window: list, count: torch.Tensor, limit: float) -> list[dict]:
            parts = [backend.shard(batch.tensors) for batch in window]
            return [contrastive_step(wrapped, objective.loss, parts, backend, count, limit)]

        return cached

    def one_by_one(window: list, count: torch.Tensor, limit: float) -> list[dict]:
        outs = []
        for i, batch in enumerate(window):
            out = wrapped(backend.shard(batch.tensors), mode="loss")
            outs.append({name: value.detach() if torch.is_tensor(value) else value for name, value in out.items() if value is not None})
            last = i == len(window) - 1
            loss = out["loss_sum"] / count
            backend.backward(_spoilt(loss, outs, count, limit, backend) if last and limit < math.inf else loss, last=last)
        return outs

    return one_by_one


def _spoilt(loss: torch.Tensor, outs: Iterable[dict], count: torch.Tensor, limit: float, backend: Backend) -> torch.Tensor:
    """NaN where the whole step's loss is a spike, so that every backend leaves the update out as it does for any non-finite gradient."""
    total = backend.sum_over_devices(torch.stack([out["loss_sum"] for out in outs]).sum()) / count
    return loss * torch.where(total > limit, math.nan, 1.0).to(loss.device)
