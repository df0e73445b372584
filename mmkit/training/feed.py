"""The training data of a run as batches for this process, with the features of frozen encoders cached where the run wants it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from mmkit.config import ConfigError, RunConfig
from mmkit.sharding.backend import Backend
from mmkit.training.checkpoint import fingerprint

log = logging.getLogger(__name__)


def frozen_encoder(model: nn.Module) -> Callable | None:
    """The function whose results `data.cache_features` keeps: images of each encoder -> their features."""
    if hasattr(model, "encode"):
        return model.encode
    if "image" in getattr(model, "cacheable", ()):
        return lambda images: [model({"image": images[0]}, mode="trunk")["image_features"]]
    return None


def make_loader(run: RunConfig, model: nn.Module, backend: Backend) -> Any:
    """The training data, cut for this process, with cached features where the run wants them."""
    from mmkit.data.loader import loader
    from mmkit.data.readers import open_mixture
    from mmkit.models.build import image_transforms, tokenizer

    clip = run.model.kind == "clip"
    source = open_mixture(run.data)
    augmented = clip and not run.data.cache_features
    transforms = image_transforms(run.model, train=augmented, augment_scale=run.data.augment_scale)
    features = None
    if run.data.cache_features:
        features = cached_features(run, model, backend, frozen_encoder(model), source, transforms)
    rows = run.train.device_batch * backend.devices // backend.world
    made = loader(
        run.data, run.model, tokenizer(run.model), transforms, train=True, seed=run.seed, rank=backend.rank, world=backend.world,
        device_batch=rows, accumulation=run.accumulation, features=features, source=source,
    )  # fmt: skip
    log.info("%s", made.summary())
    return made


def cached_features(run: RunConfig, model: nn.Module, backend: Backend, encode: Callable | None, source, transforms) -> Any:
    """The feature cache of this data, filled by the main process before the others open it."""
    from mmkit.data.features import precompute

    if encode is None:
        raise ConfigError("data.cache_features needs a frozen image tower with a separate head; this model has none")
    encoders = getattr(model, "encoders", model)
    key = fingerprint(encoders)["sha256"] + repr([encoder.model_dump() for encoder in getattr(run.model, "encoders", ())])
    cache = None
    for turn in (True, False):
        if backend.is_main == turn:
            model.eval()
            cache = precompute(source, transforms, encode, key, folder=run.data.cache_dir)
        backend.barrier()
    return cache
