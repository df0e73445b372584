"""The model a stage starts from, and what of it is trained: source weights or the stage before, freezing, quantising, adapters."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from mmkit.config import ConfigError, RunConfig
from mmkit.sharding.backend import COMPUTE_DTYPE
from mmkit.training import adapters
from mmkit.training.optim import component_of
from mmkit.storage import Store

log = logging.getLogger(__name__)


def build_model(run: RunConfig) -> tuple[nn.Module, Any]:
    """The model with the weights this stage starts from, and its file (COMPONENTS, SHARDING, BLOCKS)."""
    from mmkit.models.build import build
    from mmkit.models.pretrained import load_into

    parent = parent_export(run)
    model = build(run.model, weights=parent is None)
    if parent is not None:
        load_into(model, run.model, parent)
    return model, model_file(run)


def model_file(run: RunConfig) -> Any:
    """The file that holds the model's COMPONENTS, SHARDING and BLOCKS."""
    from mmkit.models import clip, vlm

    return {"vlm": vlm, "clip": clip}[run.model.kind]


def parent_export(run: RunConfig) -> str | None:
    """The export this run starts from: ``start_from``, or the pretrain stage of the same preset and name for a finetune stage.

    None where a run starts from its sources' weights (a pretrain stage, or ``start_from: source``). ConfigError, with the command that
    makes it, where it is missing.
    """
    if run.start_from == "source" or (run.start_from is None and run.stage != "finetune"):
        return None
    if run.start_from is None:
        folder = f"{run.root.rstrip('/')}/{run.preset}/pretrain/{run.name}"
        named = f" --name {run.name}" if run.name != "default" else ""
        makes = f"make it with: mmkit train --model {run.preset} --stage pretrain{named}"
    else:
        folder, makes = run.start_from.rstrip("/"), "it is what start_from names; give a run folder with an export/, or an export"
    for candidate in (f"{folder}/export", folder):
        if Store(candidate).size("config.json") is not None:
            return candidate
    raise ConfigError(f"stage {run.stage!r} starts from {folder}/export, which does not exist; {makes} (or set start_from=source)")


def prepare_model(model: nn.Module, run: RunConfig, components) -> dict[str, Any]:
    """Freezes, quantises and puts adapters as ``run.train`` says; returns tables for people. Nothing is wrapped yet."""
    train, tables = run.train, {}
    open_as_built = {name for name, p in model.named_parameters() if p.requires_grad}
    model.requires_grad_(False)
    head = getattr(model, "head", None)
    if train.bits != 16:
        adapters.quantise(model.language, train.bits, COMPUTE_DTYPE[train.precision] or torch.float32, skip=head)
    if train.lora:
        tables["adapters"] = adapters.inject(model, train.lora, components, head)
        log.info("adapters\n%s", adapters.table_text(tables["adapters"]))
    for name, parameter in model.named_parameters():
        locked = run.model.kind == "clip" and name not in open_as_built  # a locked tower stays locked
        if component_of(name, components) in train.trainable and not locked:
            parameter.requires_grad_(True)
            parameter.data = parameter.data.float()
    if hasattr(model, "lock"):
        model.lock()
    tables["components"] = component_table(model, components)
    if not any(row["trainable"] for row in tables["components"]):
        present = ", ".join(row["component"] for row in tables["components"])
        raise ConfigError(f"train.trainable {list(train.trainable)} trains nothing in this model; its components are {present}")
    return tables


def component_table(model: nn.Module, components) -> list[dict]:
    """Parameters of each component, trainable and frozen."""
    rows: dict[str, dict] = {}
    for name, parameter in model.named_parameters():
        component = component_of(name, components)
        row = rows.setdefault(component, {"component": component, "trainable": 0, "frozen": 0})
        row["trainable" if parameter.requires_grad else "frozen"] += parameter.numel()
    return list(rows.values())
