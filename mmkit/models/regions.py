"""Region features: what a point, box or free-form shape covers becomes one language-model token (Ferret, paper section 3.2).

A region arrives as points inside it, drawn by the data pipeline, so the model itself has no randomness. `GeoRegionSampler` is the
spatial-aware visual sampler: twice it keeps the farthest points, gathers each one's nearest neighbours and pools their features;
what is left is flattened into one vector. `MeanRegionSampler` is the simpler variant that averages the points' features.

Alphabet: B rows, R regions a row, P points a region, C encoder width, D language width, s side of the encoder's token grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmkit.config import RegionConfig
from mmkit.errors import InputError


def read_points(features: Tensor, points: Tensor, image: Tensor, side: int, transposed: bool) -> Tensor:
    """Bilinear lookup (corners aligned, zero outside) of ``points`` (B, R, P, 2), (x, y) in [0, 1], in fp32 -> (B, R, P, C).

    ``features`` (B, I*side*side, C) holds the grids of all images of a row, ``image`` (B, R) says which one a region is in.
    ``transposed`` looks at (y, x) instead, as Ferret's published weights were trained.
    """
    place = points.float() * (side - 1)
    column, row = place.flip(-1).unbind(-1) if transposed else place.unbind(-1)
    left, top = column.floor(), row.floor()
    out = 0.0
    for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
        x, y = left + dx, top + dy
        weight = (1 - (column - x).abs()) * (1 - (row - y).abs())
        inside = (x >= 0) & (x < side) & (y >= 0) & (y < side)
        cell = y.clamp(0, side - 1).long() * side + x.clamp(0, side - 1).long()
        index = image[..., None] * side * side + cell  # (B, R, P)
        out = out + rows_at(features, index.flatten(1)).float().unflatten(1, index.shape[1:]) * (weight * inside)[..., None]
    return out


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """x (B, M, C), index (B, K) -> (B, K, C)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """(n, A, 2), (n, Q, 2) -> (n, A, Q) in fp32, summed as -2ab + |a|^2 + |b|^2.

    Points of a region lie on the pixel lattice, so many distances tie; which neighbours win depends on rounding, and the published
    weights saw this order of operations.
    """
    with torch.autocast("cpu" if a.is_meta else a.device.type, enabled=False):  # meta: a dry run checks shapes
        a, b = a.float(), b.float()
        out = -2 * torch.matmul(a, b.transpose(1, 2))
        out = out + (a**2).sum(-1)[:, :, None]
        return out + (b**2).sum(-1)[:, None, :]


def farthest_points(points: Tensor, count: int, start: Tensor) -> Tensor:
    """Indices (n, count) of points (n, P, 2): ``start`` (n,) first, then always the one farthest from all chosen."""
    chosen = [start]
    nearest = torch.full(points.shape[:2], 1e10, device=points.device)
    for _ in range(count - 1):
        latest = rows_at(points, chosen[-1][:, None])  # (n, 1, 2)
        nearest = torch.minimum(nearest, ((points - latest) ** 2).sum(-1))
        chosen.append(nearest.argmax(-1))
    return torch.stack(chosen, dim=1)


def nearest_points(points: Tensor, centres: Tensor, count: int) -> Tensor:
    """Indices (n, A, count) of the points (n, P, 2) nearest to each of the centres (n, A, 2), in no particular order."""
    return squared_distances(centres, points).topk(count, dim=-1, largest=False, sorted=False).indices


class SamplerStage(nn.Module):
    """Keep the farthest points, mix each one's features with its neighbours' and pool."""

    def __init__(self, width: int, n_points: int, n_neighbors: int, pool: str):
        super().__init__()
        self.n_points, self.n_neighbors, self.pool = n_points, n_neighbors, pool
        self.difference = nn.Linear(width + 2, width + 2)
        self.aggregate = nn.Conv1d(2 * (width + 2), width, 1)
        self.norm = nn.LayerNorm(width)

    def forward(self, features: Tensor, points: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """features (n, P, C), points (n, P, 2), start (n,) -> (n, A, C), (n, A, 2) for the A points that are kept."""
        centres = farthest_points(points, self.n_points, start)  # (n, A)
        kept = rows_at(points, centres)
        near = nearest_points(points, kept, self.n_neighbors)  # (n, A, K)
        return self.mix(features, points, centres, near), kept

    def mix(self, features: Tensor, points: Tensor, centres: Tensor, near: Tensor) -> Tensor:
        """Features (n, A, C) of the centres, from given indices (n, A) and (n, A, K)."""
        placed = torch.cat([features, points.to(features.dtype)], dim=-1)  # (n, P, C + 2)
        anchor = rows_at(placed, centres)[:, :, None]  # (n, A, 1, C + 2)
        local = rows_at(placed, near.flatten(1)).unflatten(1, near.shape[1:])  # (n, A, K, C + 2)
        change = self.difference(local - anchor)
        pair = torch.cat([change, anchor.expand_as(change)], dim=-1)  # (n, A, K, 2(C + 2))
        mixed = self.aggregate(pair.flatten(0, 1).transpose(1, 2)).relu()  # (n*A, C, K)
        mixed = self.norm(mixed.transpose(1, 2))  # the rectifier comes before the norm
        pooled = mixed.amax(1) if self.pool == "max" else mixed.mean(1)
        return pooled.unflatten(0, near.shape[:2])


class GeoRegionSampler(nn.Module):
    """The spatial-aware visual sampler: P points -> A_1 -> A_2 ... -> one token."""

    def __init__(self, config: RegionConfig, width: int, side: int, d_language: int):
        super().__init__()
        if len(config.n_sub_points) != len(config.n_neighbors):
            raise InputError(f"regions.n_sub_points {config.n_sub_points} and n_neighbors {config.n_neighbors} must have one entry a stage")
        self.side, self.transposed = side, config.transposed
        self.stages = nn.ModuleList(
            SamplerStage(width, kept, near, config.pool) for kept, near in zip(config.n_sub_points, config.n_neighbors, strict=True)
        )
        self.flatten = nn.Linear(config.n_sub_points[-1] * width, width)
        self.output = nn.Linear(width, d_language)

    def forward(self, features: Tensor, points: Tensor, image: Tensor, starts: Tensor) -> Tensor:
        """features (B, I*s*s, C), points (B, R, P, 2), image (B, R), starts (B, R, stages) -> (B, R, D)."""
        seen = read_points(features, points, image, self.side, self.transposed).flatten(0, 1)  # (B*R, P, C)
        seen, points = seen.to(self.output.weight.dtype), points.flatten(0, 1).float()
        for stage, start in zip(self.stages, starts.flatten(0, 1).unbind(-1), strict=True):
            seen, points = stage(seen, points, start)
        return self.output(self.flatten(seen.flatten(1))).unflatten(0, image.shape)


class MeanRegionSampler(nn.Module):
    """The mean of the projected features at a region's points."""

    def __init__(self, config: RegionConfig, width: int, side: int, d_language: int):
        super().__init__()
        self.side, self.transposed = side, config.transposed
        self.output = nn.Linear(width, d_language)

    def forward(self, features: Tensor, points: Tensor, image: Tensor, real: Tensor) -> Tensor:
        """features (B, I*s*s, C), points (B, R, P, 2), image (B, R), real (B, R, P) bool -> (B, R, D); no real point gives the bias."""
        seen = read_points(features, points, image, self.side, self.transposed)
        weight = real.to(seen.dtype)
        mean = torch.einsum("brpc,brp->brc", seen, weight) / weight.sum(-1, keepdim=True).clamp(min=1)
        return self.output(mean.to(self.output.weight.dtype))


def build_regions(config: RegionConfig, widths: Sequence[int], sides: Sequence[int], d_language: int) -> nn.Module:
    """The region sampler of ``config``, reading the unprojected grid of encoder ``config.encoder``."""
    if not 0 <= config.encoder < len(widths):
        raise InputError(f"regions.encoder {config.encoder} but there are {len(widths)} encoders; use 0 to {len(widths) - 1}")
    kind = GeoRegionSampler if config.kind == "geo" else MeanRegionSampler
    return kind(config, widths[config.encoder], sides[config.encoder], d_language)
