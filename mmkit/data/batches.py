"""Rows of packed conversations as tensors of static shape.

A row's tokens: each `Item` is one segment (numbered from 1); its common beginning has branch 0, its conversations branches 1, 2, ...
Every picture takes its slots whole. Slots that show padding stay in the row with segment 0 (or are left out with
``model.crop_padding``) and count for no position, so text is numbered as if they were cropped (reference: Cambrian-1, 1.4).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmkit.config import IGNORE_INDEX, IMAGE_TOKEN_INDEX, ConfigError, VlmConfig
from mmkit.data.packing import Item, Member, Row
from mmkit.letterbox import n_slots, visible_slots

DUMMY_SIZE = (336, 336)  # of the zero picture in rows without one, as published
N_TARGETS = 16  # least number of target places


@dataclass(frozen=True)
class Problem:
    """One example that could not be used, or ``count`` of a shard for the same reason."""

    key: str
    source: str
    reason: str
    message: str
    count: int = 1


@dataclass(frozen=True)
class Batch:
    """Tensors of one micro-batch (docs: architecture, section 3) and what they hold.

    keys: one text a row, its examples' keys joined by commas. n_tokens of n_positions are real.
    """

    tensors: dict[str, Tensor]
    keys: list[str]
    n_targets: int
    n_samples: int
    n_tokens: int
    n_positions: int
    epoch: int = 0
    problems: tuple[Problem, ...] = ()
    duplicates: float = 0.0  # contrastive: share of rows whose caption stands in this batch more than once
    sources: dict[str, int] = field(default_factory=dict)  # samples of each source
    examined: int = 0  # examples looked at since the batch before, usable or not
    shards: tuple[dict[str, Any], ...] = ()  # opened for this batch: `ShardIndex.row` and the source's name
    truncated: int = 0  # samples whose end was cut off


@dataclass(frozen=True)
class Shape:
    """Static sizes of a vlm batch: rows, positions, targets, pictures a row, regions a row (0 = model without regions)."""

    rows: int
    tokens: int
    targets: int = N_TARGETS
    images: int = 1
    regions: int = 0


@dataclass(frozen=True)
class Slots:
    """How pictures appear in a row's ids."""

    side: int
    newline: bool
    hides: bool  # padded cells of a letter-boxed picture are no part of the sequence
    crops: bool  # ... and have no place in it either

    @classmethod
    def of(cls, model: VlmConfig) -> Slots:
        """Of a model. Grids without newlines keep all their cells, as LLaVA-1.5 does."""
        if model.crop_padding and model.image_fit != "pad":
            raise ConfigError(f"model.crop_padding needs image_fit 'pad'; {model.image_fit!r} has no padding to crop")
        hides = model.image_fit == "pad" and (model.connector.newline or model.crop_padding)
        return cls(model.grid_side, model.connector.newline, hides, model.crop_padding)

    @property
    def full(self) -> int:
        """Slots of a picture that is not cropped."""
        return self.side * (self.side + int(self.newline))

    def count(self, size: tuple[int, int]) -> int:
        """Places a picture of (width, height) takes in a row."""
        return n_slots(self.side, *size, newline=self.newline) if self.crops else self.full

    def visible(self, size: tuple[int, int]) -> np.ndarray:
        """(count,) bool: which of these places are real."""
        if self.crops or not self.hides:
            return np.ones(self.count(size), dtype=bool)
        return _visible(self.side, self.newline, *size)


@functools.lru_cache(maxsize=4096)
def _visible(side: int, newline: bool, width: int, height: int) -> np.ndarray:
    return visible_slots(torch.tensor([[width, height]]), side, newline)[0].numpy()


@dataclass(eq=False)
class RowArrays:
    """A row before padding; arrays of one length except targets."""

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    branches: np.ndarray
    target_positions: np.ndarray
    targets: np.ndarray


@dataclass(eq=False)
class Part:
    """A run of ids with its pictures unfolded to slots."""

    ids: np.ndarray
    labels: np.ndarray
    real: np.ndarray

    @classmethod
    def of(cls, member: Member, start: int, end: int | None, visible: Sequence[np.ndarray]) -> Part:
        """Ids ``start:end`` of a member; ``visible`` has one array for each picture among them."""
        ids, trained = member.encoded.ids[start:end], member.encoded.trained[start:end]
        pictures = ids == IMAGE_TOKEN_INDEX
        counts = np.ones(len(ids), dtype=np.int64)
        counts[pictures] = [len(flags) for flags in visible]
        unfolded = np.repeat(ids, counts)
        real = np.ones(len(unfolded), dtype=bool)
        if visible:
            real[unfolded == IMAGE_TOKEN_INDEX] = np.concatenate(visible)
        return cls(unfolded, np.repeat(np.where(trained, ids, IGNORE_INDEX), counts), real)


def build_row(row: Row, sizes: Sequence[Sequence[tuple[int, int]]], slots: Slots) -> RowArrays:
    """Arrays of a row; ``sizes`` has the (width, height) of each item's pictures.

    A supervised token is predicted by the real position before it in its own branch, else by the last real one of the shared
    beginning; without any it carries no loss.
    """
    parts: list[list[np.ndarray]] = []
    target_positions, targets, place = [], [], 0
    for segment, (item, item_sizes) in enumerate(zip(row, sizes, strict=True), 1):
        visible = [slots.visible(size) for size in item_sizes]
        before, offset = -1, 0  # last real position of the shared beginning; next position number
        for branch, part in _parts(item, visible):
            real_places = np.flatnonzero(part.real)
            positions = np.maximum(np.cumsum(part.real) - 1 + offset, 0)
            number = np.where(part.real, segment, 0)
            parts.append([part.ids, part.labels, positions, number, np.where(part.real, branch, 0)])
            trained = np.flatnonzero(part.labels != IGNORE_INDEX)
            rank = np.searchsorted(real_places, trained) - 1
            previous = np.where(rank >= 0, place + real_places[np.maximum(rank, 0)], before) if len(trained) else trained
            target_positions.append(previous[previous >= 0])
            targets.append(part.labels[trained][previous >= 0])
            if branch == 0:
                offset = len(real_places)
                before = place + int(real_places[-1]) if len(real_places) else -1
            place += len(part.ids)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.zeros(0, np.int64)] * 5
    joined = (np.concatenate(values).astype(np.int64) if values else np.zeros(0, np.int64) for values in (target_positions, targets))
    return RowArrays(*columns, *joined)


def _parts(item: Item, visible: Sequence[np.ndarray]):
    """(branch, part) of an item: all of it as branch 0, or the shared beginning and then branches 1, 2, ..."""
    first = item.members[0]
    if len(item.members) == 1:
        yield 0, Part.of(first, 0, None, visible)
        return
    yield 0, Part.of(first, 0, item.prefix, visible)
    for branch, member in enumerate(item.members, 1):
        yield branch, Part.of(member, item.prefix, None, ())


def stack_rows(rows: Sequence[RowArrays], shape: Shape, pad: str = "right") -> dict[str, Tensor]:
    """Token tensors (B, T) and target tensors (B, M), padded to ``shape``; ``pad`` "left" moves rows to the right end."""
    names = ("input_ids", "labels", "positions", "segments", "branches")
    out = {name: np.zeros((shape.rows, shape.tokens), dtype=np.int64) for name in names}
    out["labels"][:] = IGNORE_INDEX
    target_positions = np.zeros((shape.rows, shape.targets), dtype=np.int64)
    targets = np.full((shape.rows, shape.targets), IGNORE_INDEX, dtype=np.int64)
    for number, row in enumerate(rows):
        shift = shape.tokens - len(row.ids) if pad == "left" else 0
        span = slice(shift, shift + len(row.ids))
        for name, values in zip(names, (row.ids, row.labels, row.positions, row.segments, row.branches), strict=True):
            out[name][number, span] = values
        target_positions[number, : len(row.targets)] = row.target_positions + shift
        targets[number, : len(row.targets)] = row.targets
    return {name: torch.from_numpy(values) for name, values in (*out.items(), ("target_positions", target_positions), ("targets", targets))}


def stack_images(rows: Sequence[Sequence[Sequence[Tensor]]], sizes, shape: Shape, blanks: Sequence[Tensor], stem: str) -> dict[str, Tensor]:
    """``{stem}.{e}`` (B, I, ...) with zeros where a row has fewer pictures, image_sizes (B, I, 2), image_real (B, I).

    ``rows[b][i][e]`` is picture i's tensor for encoder e; ``blanks[e]`` gives shape and dtype.
    """
    out = {f"{stem}.{e}": blank.new_zeros((shape.rows, shape.images, *blank.shape)) for e, blank in enumerate(blanks)}
    real = torch.zeros((shape.rows, shape.images), dtype=torch.bool)
    image_sizes = torch.tensor(DUMMY_SIZE).expand(shape.rows, shape.images, 2).clone()
    for b, (images, row_sizes) in enumerate(zip(rows, sizes, strict=True)):
        for i, (tensors, size) in enumerate(zip(images, row_sizes, strict=True)):
            for e, tensor in enumerate(tensors):
                out[f"{stem}.{e}"][b, i] = tensor
            real[b, i], image_sizes[b, i] = True, torch.tensor(size)
    return out | {"image_sizes": image_sizes, "image_real": real}


@dataclass(frozen=True, eq=False)
class RegionPoints:
    """Sampled points of one region: points (P, 2), real (P,), starts (S,), and the number of its picture in the row."""

    points: np.ndarray
    real: np.ndarray
    starts: np.ndarray
    image: int


def stack_regions(rows: Sequence[Sequence[RegionPoints]], shape: Shape, n_points: int, n_stages: int) -> dict[str, Tensor]:
    """region_points (B, R, P, 2), region_point_real (B, R, P), region_starts (B, R, S), region_image (B, R), region_real (B, R)."""
    size = (shape.rows, shape.regions)
    points, real = np.zeros((*size, n_points, 2), np.float32), np.zeros((*size, n_points), bool)
    starts, image, there = np.zeros((*size, n_stages), np.int64), np.zeros(size, np.int64), np.zeros(size, bool)
    for b, regions in enumerate(rows):
        for r, region in enumerate(regions):
            points[b, r], real[b, r], starts[b, r] = region.points, region.real, region.starts
            image[b, r], there[b, r] = region.image, True
    names = ("region_points", "region_point_real", "region_starts", "region_image", "region_real")
    return {name: torch.from_numpy(values) for name, values in zip(names, (points, real, starts, image, there), strict=True)}


def counted(tensors: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """(targets, real tokens, positions) of vlm tensors."""
    segments = tensors["segments"]
    return int((tensors["targets"] != IGNORE_INDEX).sum()), int((segments > 0).sum()), segments.numel()
