"""The data of a run as batches for this process, with the features of frozen encoders cached where the run wants it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import ConcatDataset

from mmkit.config import ConfigError, RunConfig
from mmkit.sharding.backend import Backend, autocast
from mmkit.sharding.devices import hardware_here

log = logging.getLogger(__name__)

MOST_PICTURES, MOST_TEXTS = 64, 256  # of one forward that fills a cache: with more, kernels stay, memory grows


def make_loaders(run: RunConfig, model: nn.Module, backend: Backend, frozen: dict[str, Any]) -> tuple[Any, Any]:
    """The training data and the held-out data (None where nothing is measured on any), cut for this process, in batches of one size.

    Held-out data come in one pass, in their order, without augmentation; `validation.measure` begins it anew each time. ``frozen`` as of
    `frozen_record`.
    """
    from mmkit.data.loader import loader, training_source
    from mmkit.data.readers import held_out, open_validation
    from mmkit.models.build import image_transforms, tokenizer

    measured = run.train.eval_every > 0 and len(run.data.validation) > 0
    source, other, words = training_source(run.data, run.model), open_validation(run.data) if measured else None, tokenizer(run.model)
    random_crops = run.model.kind == "clip" and not run.data.cache_features
    transforms = image_transforms(run.model, train=random_crops, augment_scale=run.data.augment_scale)
    caches: dict[str, Any] = {}
    if run.data.cache_features:
        everything = ConcatDataset([source, other]) if measured else source
        caches = cached_features(run, model, everything, transforms, words, frozen)
    place = {
        "seed": run.seed, "rank": backend.rank, "world": backend.world, "accumulation": run.accumulation,
        "device_batch": run.train.device_batch * backend.devices // backend.world, **caches,
    }  # fmt: skip
    made = loader(run.data, run.model, words, transforms, train=True, source=source, **place)
    log.info("%s", made.summary())
    if not measured:
        return made, None
    once = loader(held_out(run.data), run.model, words, image_transforms(run.model), train=False, source=other, **place)
    log.info("held out: %s", once.summary())
    return made, once


def cached_features(run: RunConfig, model: nn.Module, source, transforms, words, frozen) -> dict[str, Any]:
    """``features`` (and ``text_features``) for the loader: what the frozen towers give for this data, computed now where it is missing.

    They are computed in the run's precision, as the run itself and its evaluation would, and in forwards of
    as many pictures as one of its micro-batches has places, so that they have its kernels and fit in its
    memory. ConfigError where nothing is frozen that could be kept.
    """
    device = hardware_here().device()
    model.eval()
    with autocast(run.train.precision, device):
        if run.model.kind == "vlm":
            return _encoder_features(run, model, source, transforms, device, frozen)
        log.info("data.cache_features: pictures are fitted as in evaluation, not cropped at random; data.augment_scale is not used")
        return _tower_features(run, model, source, transforms, words, device, frozen)


def _encoder_features(run: RunConfig, model: nn.Module, source, transforms, device: torch.device, frozen: dict) -> dict[str, Any]:
    from mmkit.data.features import precompute

    key = frozen["encoders"]["sha256"] + repr([encoder.model_dump() for encoder in run.model.encoders]) + run.train.precision
    model.encoders.to(device)
    encode = lambda images: [grid.cpu() for grid in model.encode([pixels.to(device) for pixels in images])]  # noqa: E731
    options = {"folder": run.data.cache_dir, "progress": log_progress("features of pictures")}
    options["batch"] = min(run.train.device_batch * run.data.max_images, MOST_PICTURES)
    return {"features": precompute(source, transforms, encode, key, **options)}


def _tower_features(run: RunConfig, model: nn.Module, source, transforms, words, device: torch.device, frozen: dict) -> dict[str, Any]:
    from mmkit.data.features import precompute, precompute_texts

    folder, before = run.data.cache_dir, log_progress("features of pictures")
    if not model.cacheable:
        raise ConfigError("data.cache_features needs a locked tower with a head of its own; lock one (model.lock_image) or turn it off")
    model.to(device)
    key, made = " ".join([*(f"{component} {row['sha256']}" for component, row in frozen.items()), run.train.precision]), {}
    if "image" in model.cacheable:
        encode = lambda images: [model({"image": images[0].to(device)}, mode="trunk")["image_features"].cpu()]  # noqa: E731
        options = {"folder": folder, "progress": before, "batch": min(run.train.device_batch, MOST_PICTURES)}
        made["features"] = precompute(source, transforms, encode, key, **options)
    if "text" in model.cacheable:
        encode = lambda ids: model({"text": ids.to(device)}, mode="trunk")["text_features"].cpu()  # noqa: E731
        batch = min(run.train.device_batch, MOST_TEXTS)
        made["text_features"] = precompute_texts(source, words, encode, key, folder=folder, batch=batch)
    return made


def log_progress(what: str, every: float = 10.0) -> Callable[[int, int], None]:
    """A progress function that logs a line each ``every`` seconds."""
    last = [time.monotonic()]

    def progress(done: int, total: int) -> None:
        if time.monotonic() - last[0] > every or done == total:
            last[0] = time.monotonic()
            log.info("%s: %d of %d", what, done, total)

    return progress
