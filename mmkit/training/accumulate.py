"""Gradient accumulation that keeps every negative (clip-training section 5).

Plain micro-batches would compare a pair only with its own micro-batch. Here pass 1 computes all features without a graph, one
loss is taken on the whole batch of every device, and pass 2 runs each micro-batch again with a graph and hands it the loss's
gradient of its features. Two forwards a sample, ONE loss a step (open_clip takes k of them), and the temperature's gradient is exact
because it enters once. Dropout, patch dropout and stochastic depth repeat their draws: the random state of pass 1 is put back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmkit.training.contrastive import ContrastiveLoss

SHARED = ("logit_scale", "logit_bias")  # one a model, not one a pair
FROM_TEACHER = ("teacher_image", "teacher_text", "teacher_scale")


def contrastive_step(
    model: nn.Module, loss: ContrastiveLoss, batches: Sequence[dict[str, Tensor]], backend, n_pairs, limit: float = math.inf
) -> dict[str, Tensor]:
    """Adds the gradients of one optimizer step over ``batches`` (on the device, equal sizes) to the parameters.

    ``model`` is what ``backend.prepare`` made of a `ContrastiveObjective`, ``loss`` that objective's ``.loss``, ``n_pairs`` the pairs
    of the global batch. A mean loss above ``limit`` makes every gradient NaN, so that no backend applies the update. Returns what
    the loss returns: loss_sum of this process's pairs, n_targets, metrics. Afterwards call ``backend.update``.
    """
    cached, states = [], []
    with torch.no_grad(), frozen_statistics(model):
        for batch in batches:
            states.append(backend.rng_state())
            cached.append(model(batch, mode="features"))
    features = joined(cached)
    trained = [name for name, value in features.items() if value.is_floating_point() and name not in FROM_TEACHER]
    for name in trained:
        features[name] = features[name].float().requires_grad_()
    out = loss(features)
    share = out["loss_sum"] / n_pairs
    if limit < math.inf:
        share = share * torch.where(backend.sum_over_devices(share.detach()) > limit, math.nan, 1.0).to(share.device)
    share.backward()
    for i, (batch, state) in enumerate(zip(batches, states, strict=True)):
        backend.set_rng_state(state)
        last = i == len(batches) - 1
        gradients = {name: _share(features[name], name, i, len(batches), last) for name in trained}
        surrogate = model(batch, mode="surrogate", gradients=gradients)["loss_sum"]
        backend.backward(surrogate, last=last)
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in out.items()}


def joined(cached: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Features of all micro-batches: pairs concatenated, caption sums added, the shared scalars once."""
    joined = {}
    for name, first in cached[0].items():
        values = [features[name] for features in cached]
        if name in SHARED or name == "teacher_scale":
            joined[name] = first.detach().clone()
        elif name.startswith("caption_"):
            joined[name] = torch.stack(values).sum(0)
        else:
            joined[name] = torch.cat(values)
    return joined


def _share(feature: Tensor, name: str, i: int, n: int, last: bool) -> Tensor:
    """Micro-batch i's part of a feature's gradient; the shared scalars' goes to the last micro-batch alone."""
    gradient = torch.zeros_like(feature) if feature.grad is None else feature.grad
    if name in SHARED:
        return gradient if last else torch.zeros_like(gradient)
    return gradient if name.startswith("caption_") else gradient.chunk(n)[i]


@contextlib.contextmanager
def frozen_statistics(model: nn.Module):
    """Batch norms normalise as in training but leave their running statistics alone, which pass 2 then updates once."""
    norms = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats]
    saved = [(layer.momentum, layer.num_batches_tracked.clone()) for layer in norms]
    for layer in norms:
        layer.momentum = 0.0
    try:
        yield
    finally:
        for layer, (momentum, count) in zip(norms, saved, strict=True):
            layer.momentum = momentum
            layer.num_batches_tracked.copy_(count)
