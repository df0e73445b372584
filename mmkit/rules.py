"""Rules between settings, and of names that become folders: what no single field's type can say.

`check` runs once, where a config is made (`mmkit.config`); what lies below relies on it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mmkit.errors import ConfigError
from mmkit.values import shortened

if TYPE_CHECKING:
    from mmkit.config import RunConfig, VlmConfig

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")  # a folder of its own on any disk and in any bucket
CHOOSABLE = (  # settings that are chosen for a machine unless given by name
    "backend.kind", "backend.strategy", "backend.zero_stage", "backend.processes", "backend.nodes", "backend.xla_devices", "backend.offload",
    "train.precision", "train.device_batch", "train.checkpoint_blocks",
)  # fmt: skip
READ_WITH: dict[str, dict[str, str]] = {  # a setting that only some runs read -> what these have beside it
    "strategy": {"kind": "torch"}, "static_graph": {"kind": "torch", "strategy": "ddp"}, "zero_stage": {"kind": "deepspeed"},
    "cooldown": {"schedule": "const-cooldown"}, "rewind_precision": {"action": "rewind"}, "rewind_lr_factor": {"action": "rewind"},
}  # fmt: skip

SCORED_BY: dict[str, tuple] = {  # settings of a backend that one process on one device has, and their values
    "kind": ("auto", "single", "xla"), "processes": (None, 1), "nodes": (None, 1), "xla_devices": (None, 1), "fsdp_axis": (None, 1),
}  # fmt: skip


def check(run: RunConfig, source: str) -> None:
    """ConfigError for a name that cannot be a folder, a batch that its devices cannot share, or answers of a model that gives none."""
    check_name("name", run.name, source)
    check_name("preset", run.preset, source)
    if not run.root.strip():
        raise ConfigError(f"root = {run.root!r} (from {source}): runs need a folder, as runs, or a URL, as gs://BUCKET/runs")
    if run.resume.lower() in ("latest", "true", "false", "yes", "no", ""):
        word = "never" if run.resume.lower() in ("false", "no") else "auto"
        raise ConfigError(f"resume = {run.resume!r} (from {source}): write {word}; or step-N, epoch-N, a checkpoint's path")
    if run.train.tensorboard and "://" in run.root:
        raise ConfigError(
            f"train.tensorboard with root = {shortened(run.root)} (from {source}): TensorBoard's files are written to a disk only; metrics.jsonl, "
            "which has the same numbers, goes to the bucket"
        )
    if run.model.kind == "clip" and run.evaluation.max_new_tokens is not None:
        raise ConfigError(
            f"evaluation.max_new_tokens = {run.evaluation.max_new_tokens} (from {source}): {shortened(run.preset)} is contrastive and generates no "
            "text; leave it out"
        )
    if run.data.augment_scale[0] > run.data.augment_scale[1]:
        raise ConfigError(f"data.augment_scale = {run.data.augment_scale} (from {source}): the smaller area comes first, as [0.9, 1.0]")
    _ = run.accumulation if run.stage != "eval" and run.resolved else 1


def check_name(setting: str, name: str, source: str) -> None:
    """ConfigError for a name that would not be one folder: a run lies in ``root/preset/stage/name``."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{setting} = {shortened(name)} (from {source}): a name has letters a-z, digits, '.', '_' and '-', at most 100, "
            "and begins with a letter, a digit or '_', as lr-1e-4; another place for runs is set by root"
        )


def check_vlm(model: VlmConfig) -> VlmConfig:
    """``model``; ValueError where the parts of a vision-language model do not fit together."""
    sides = [encoder.side for encoder in model.encoders]
    connector = model.connector
    if connector.kind == "sva":
        if connector.width % connector.heads:
            raise ValueError(f"connector.width {connector.width} does not divide by heads {connector.heads}")
        for query in (*connector.query_sides, model.grid_side):
            if bad := [side for side in sides if side % query]:
                raise ValueError(f"encoder side {bad[0]} does not divide by query side {query}; use a multiple of {query}")
    elif len(set(sides)) > 1:
        raise ValueError(f"connector {connector.kind!r} joins encoders on channels: their sides {sides} must be equal")
    if model.samplers and connector.kind != "sva":
        raise ValueError(f"samplers need connector.kind 'sva', not {connector.kind!r}")
    return model


def check_read(run: RunConfig, paths: Iterable[tuple[str, ...]], source: str) -> None:
    """ConfigError for a setting given by hand, by its path, that ``run`` does not read. What a preset brings along may lie idle."""
    paths = tuple(paths)
    if ("data", "mixture_root") in paths and run.data.mixture is None:
        raise ConfigError(f"data.mixture_root (from {source}) is read with data.mixture, which is not set; leave it out")
    for *above, name in (path for path in paths if path[-1] in READ_WITH):
        section, needs = functools.reduce(getattr, above, run), READ_WITH[name]
        value, has = getattr(section, name), {key: getattr(section, key) for key in needs}
        could = has | {"kind": needs.get("kind")} if has.get("kind") == "auto" else has  # chosen among those that read it
        if could != needs and value != type(section).model_fields[name].default:
            raise ConfigError(f"{'.'.join((*above, name))} = {shortened(value)} (from {source}) is read with {needs} only, not {has}; leave it out")
    if run.stage == "eval":
        _check_scored_by(run, paths, source)


def _check_scored_by(run: RunConfig, paths: Iterable[tuple[str, ...]], source: str) -> None:
    """ConfigError for a setting given by hand of a backend that scoring cannot use; a preset's is that of its training."""
    fields = type(run.backend).model_fields
    given = [name for path in paths if path[0] == "backend" for name in (path[1:2] or fields)]
    for name in given:
        value, fine = getattr(run.backend, name), SCORED_BY.get(name, (fields[name].default,))
        if value not in fine:
            raise ConfigError(
                f"backend.{name} = {shortened(value)} (from {source}): scoring runs in one process on one device, by backend single or xla; leave it out"
            )
