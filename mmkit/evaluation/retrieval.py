"""Image-text retrieval in its two published readings, named apart, in memory O(N x chunk).

`paired_recall` is what open_clip logs in training: one caption an image, R@1/5/10, mean and median rank. `benchmark_recall` is what
papers report (COCO, Flickr): several captions an image, the nearest captions of an image count when ANY of them is its own.
They differ by several points on the same features, so their keys differ too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mmkit.errors import InputError


def paired_recall(image: Tensor, text: Tensor, ks: Sequence[int] = (1, 5, 10), chunk: int = 1024) -> dict[str, float]:
    """``image``, ``text`` (N, D), row i of one belonging to row i of the other. Keys ``image_to_text_R@1``,
    ``image_to_text_mean_rank``, ``image_to_text_median_rank`` and the same for ``text_to_image``; ranks start at 1."""
    if image.shape != text.shape:
        raise InputError(f"paired retrieval needs one caption an image, not {len(text)} captions of {len(image)}; use benchmark_recall")
    metrics = {}
    for name, rows, columns in (("image_to_text", image, text), ("text_to_image", text, image)):
        ranks = torch.cat([_ranks(scores, start) for start, scores in _chunks(rows, columns, chunk)])
        metrics |= {f"{name}_R@{k}": (ranks < k).double().mean().item() for k in ks}
        metrics[f"{name}_mean_rank"] = ranks.double().mean().item() + 1
        metrics[f"{name}_median_rank"] = ranks.double().quantile(0.5).floor().item() + 1
    return metrics


def benchmark_recall(image: Tensor, text: Tensor, image_of_text: Tensor, ks: Sequence[int] = (5,), chunk: int = 1024) -> dict[str, float]:
    """``image`` (N, D), ``text`` (M, D), ``image_of_text`` (M,) the row of each caption's image. Keys as clip-benchmark's:
    ``image_retrieval_recall@5`` (share of captions whose image is among the k nearest images) and ``text_retrieval_recall@5``
    (share of images with an own caption among the k nearest captions)."""
    if image_of_text.shape != text.shape[:1]:
        raise InputError(f"{len(text)} captions but {len(image_of_text)} image numbers")
    if missing := sorted(set(range(len(image))) - set(image_of_text.tolist())):
        raise InputError(f"{len(missing)} of {len(image)} images have no caption, first image {missing[0]}")
    own = torch.arange(len(image), device=image.device)
    hits = {
        "image_retrieval": _hits(text, image, image_of_text.to(text.device), own, ks, chunk),
        "text_retrieval": _hits(image, text, own, image_of_text.to(text.device), ks, chunk),
    }
    return {f"{name}_recall@{k}": found[k] for name, found in hits.items() for k in ks}


def _chunks(rows: Tensor, columns: Tensor, chunk: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, scores (c, M)) chunk by chunk."""
    for start in range(0, len(rows), chunk):
        yield start, rows[start : start + chunk] @ columns.T


def _ranks(scores: Tensor, start: int) -> Tensor:
    """Rank from 0 of column start + i in row i; equal scores count in the order of columns, as a stable sort would have them."""
    own = torch.arange(start, start + len(scores), device=scores.device)[:, None]
    mine = scores.gather(1, own)
    before = torch.arange(scores.shape[1], device=scores.device)[None] < own
    return (scores > mine).sum(1) + ((scores == mine) & before).sum(1)


def _hits(rows: Tensor, columns: Tensor, group: Tensor, group_of_column: Tensor, ks: Sequence[int], chunk: int) -> dict[int, float]:
    """For each k the share of rows with a column of their own group among their k nearest."""
    counts = dict.fromkeys(ks, 0)
    for start, scores in _chunks(rows, columns, chunk):
        nearest = scores.topk(min(max(ks), scores.shape[1]), dim=1).indices  # (c, k)
        right = group_of_column[nearest] == group[start : start + len(scores), None]
        for k in ks:
            counts[k] += int(right[:, :k].any(1).sum())
    return {k: count / len(rows) for k, count in counts.items()}
