"""The full-size model of a run on the meta device, and its parameters counted: once a model, whoever asks."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import TypeAdapter

from mmkit.config import ModelConfig, RunConfig
from mmkit.launch.plan import Part, count_parts

MODEL = TypeAdapter(ModelConfig)


def build_meta(run: RunConfig) -> Any:
    """The full-size model of ``run`` without memory for its weights; nothing is downloaded. The same object for the same model:
    look at it, leave it as it is."""
    return _built(MODEL.dump_json(run.model))


# two: a notebook plans one model, and a change of it; a meta model is small, but its thousands of modules take seconds to make
@functools.lru_cache(maxsize=2)
def _built(model: bytes) -> Any:
    from mmkit.models.build import build

    return build(MODEL.validate_json(model), device="meta", weights=False)


def spelt_out(run: RunConfig) -> RunConfig:
    """The run with a contrastive model's architecture written out, which names like ViT-B-32 stand for."""
    from mmkit.models import clip

    return run.model_copy(update={"model": clip.resolved(run.model)}) if run.model.kind == "clip" else run


def count(run: RunConfig) -> tuple[Part, ...]:
    """Parameters by component of the full-size model of ``run``, and what trains of them: found by training's own rules."""
    lora = run.train.lora.model_dump_json() if run.train.lora else ""
    key = (MODEL.dump_json(run.model), run.stage == "eval", run.train.trainable, run.train.new_tokens, lora)
    if key not in _COUNTED:
        _COUNTED[key] = _count(run)
    return _COUNTED[key]


_COUNTED: dict[tuple, tuple[Part, ...]] = {}  # a few numbers a model


def _count(run: RunConfig) -> tuple[Part, ...]:
    from mmkit.models.hollow import cast_at_use
    from mmkit.models.vocabulary import tables_of
    from mmkit.training import adapters, weights
    from mmkit.training.optim import component_of

    module = build_meta(run)
    components, train = weights.model_file(run).COMPONENTS, run.train
    if run.stage == "eval":
        return count_parts(module, components, halved=cast_at_use(module))
    locks = run.model.kind == "clip"  # a locked tower stays locked
    named = list(module.named_parameters(remove_duplicate=False))
    trained = {name for name, p in named if p.requires_grad or not locks}
    trained = {name for name in trained if component_of(name, components) in train.trainable}
    layers: list[str] = []
    if train.lora:
        layers = adapters.targets_of(module, train.lora, components, getattr(module, "head", None))
        whole = tuple(f"{name}." for name in adapters.modules_to_save(module, train.lora.modules_to_save, layers))
        trained |= {name for name, _ in named if name.startswith(whole)}
    if train.new_tokens == "rows":  # how many rows train is read with the weights; beside the rest they are few
        tables = tuple(f"{name}." for name in tables_of(module))
        trained = {name for name in trained if not name.startswith(tables)}
    return count_parts(module, components, trained, set(layers), train.lora)
