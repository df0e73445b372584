"""Batches in our layout from the raw samples of golden files, which hold one -200 an image and the region token's own id."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmkit.config import IGNORE_INDEX, IMAGE_TOKEN_INDEX, VlmConfig
from mmkit.letterbox import visible_slots


def expand(config: VlmConfig, ids: Tensor, labels: Tensor, sizes: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """One row: each -200 becomes the slots of the next image -> ids, labels, and 1 where a position is visible."""
    out: list[tuple[int, int, int]] = []
    images = iter(sizes)
    for token, label in zip(ids.tolist(), labels.tolist(), strict=True):
        if token != IMAGE_TOKEN_INDEX:
            out.append((token, label, 1))
            continue
        shown = visible_slots(next(images), config.grid_side, config.connector.newline).tolist()
        out += [(IMAGE_TOKEN_INDEX, IGNORE_INDEX, int(s)) for s in shown if s or not config.crop_padding]
    return tuple(torch.tensor(column) for column in zip(*out, strict=True))


def collate(
    config: VlmConfig,
    samples: Sequence[tuple[Tensor, Tensor]],
    sizes: Sequence[Sequence[Tensor]],
    features: Sequence[Sequence[Tensor]],
    length: int | None = None,
) -> dict[str, Tensor]:
    """Right-padded batch. ``sizes[b]`` are the (width, height) of row b's images, ``features[e][b]`` their grids (I, S*S, C)."""
    rows = [tuple(column[:length] for column in expand(config, *sample, row)) for sample, row in zip(samples, sizes, strict=True)]
    longest = length or max(len(row[0]) for row in rows)
    images = max(1, *map(len, sizes))
    batch = {
        name: torch.stack([torch.nn.functional.pad(row[k], (0, longest - len(row[k])), value=fill) for row in rows])
        for k, (name, fill) in enumerate((("input_ids", 0), ("labels", IGNORE_INDEX), ("segments", 0)))
    }
    batch["positions"] = (batch["segments"].cumsum(1) - 1) * (batch["segments"].cumsum(1) > 0)
    batch["image_sizes"] = torch.full((len(rows), images, 2), 336)
    batch["image_real"] = torch.zeros(len(rows), images, dtype=torch.bool)
    for e, grids in enumerate(features):
        empty = torch.zeros(len(rows), images, *grids[0].shape[1:])
        batch[f"features.{e}"] = empty
        for b, grid in enumerate(grids):
            empty[b, : len(grid)] = grid
    for b, row in enumerate(sizes):
        for i, size in enumerate(row):
            batch["image_sizes"][b, i] = size
            batch["image_real"][b, i] = True
    return batch
