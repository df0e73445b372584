"""Regions as pixels and as sampled points (Ferret section 3 and its supplement).

A point is an 11 x 11 window, a box its whole area, a free-form region its mask inside its bounding box; a mask given with a
point or box cuts it. Points are pixels of the region divided by (width, height), so they lie in [0, 1).
"""

from __future__ import annotations

import numpy as np

from mmkit.data.boxes import pixels
from mmkit.data.example import Region
from mmkit.errors import InputError

POINT_SPAN = 5  # pixels on each side of a point


def region_mask(region: Region, width: int, height: int) -> np.ndarray:
    """(H, W) bool: the pixels of a region on a ``width`` x ``height`` picture. Never empty: a mask that leaves nothing is ignored."""
    box = region.box.to(pixels(width, height)).clamped()
    shape = np.zeros((height, width), dtype=bool)
    if region.kind == "point":
        low_x, low_y = max(0, int(box.x1 - POINT_SPAN)), max(0, int(box.y1 - POINT_SPAN))
        shape[low_y : int(box.y1 + POINT_SPAN + 1), low_x : int(box.x1 + POINT_SPAN + 1)] = True
    else:
        shape[int(box.y1) : int(box.y2) + 1, int(box.x1) : int(box.x2) + 1] = True
    if region.mask is None:
        return shape
    mask = decode_mask(region.mask)
    if mask.shape != shape.shape:
        raise InputError(f"region mask is {mask.shape[1]}x{mask.shape[0]} but the image is {width}x{height}; masks are (height, width)")
    cut = shape & mask
    return cut if cut.any() else shape


def region_points(mask: np.ndarray, count: int, rng: np.random.Generator, repeat: bool = True) -> np.ndarray:
    """(P, 2) float32 of (x, y) in [0, 1): ``count`` pixels of ``mask`` (H, W).

    More pixels than ``count``: a random subset. Fewer: all of them, then random repeats, or with ``repeat`` False fewer points.
    """
    height, width = mask.shape
    ys, xs = np.nonzero(mask)
    if len(xs) > count:
        chosen = rng.choice(len(xs), size=count, replace=False)
    elif repeat:
        chosen = np.concatenate([np.arange(len(xs)), rng.integers(0, len(xs), size=count - len(xs))])
    else:
        chosen = np.arange(len(xs))
    return np.stack([xs[chosen] / width, ys[chosen] / height], axis=-1).astype(np.float32)


def decode_mask(mask) -> np.ndarray:
    """(H, W) bool from an array or COCO run lengths (a list, or COCO's compressed text). ValueError where it is neither."""
    try:
        return _decoded(mask)
    except (LookupError, TypeError, AttributeError):
        raise InputError(f"a mask is {mask!r:.60}; give an array or {{size: [height, width], counts: run lengths}}") from None


def _decoded(mask) -> np.ndarray:
    if not isinstance(mask, dict):
        return np.asarray(mask).astype(bool)
    height, width = mask["size"]
    counts = mask["counts"]
    runs = _decompressed(counts if isinstance(counts, str) else counts.decode("ascii")) if isinstance(counts, str | bytes) else list(counts)
    if sum(runs) != height * width:
        raise InputError(f"mask runs add up to {sum(runs)} pixels but its size {width}x{height} has {height * width}")
    values = np.arange(len(runs)) % 2 == 1
    return np.repeat(values, runs).reshape(width, height).T  # COCO counts down columns


def encode_mask(mask: np.ndarray) -> dict:
    """COCO run lengths (uncompressed) of a (H, W) bool mask."""
    flat = np.asarray(mask).astype(bool).T.reshape(-1)
    changes = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff(np.concatenate([[0], changes, [flat.size]])).tolist()
    return {"size": list(mask.shape), "counts": [0, *runs] if flat[:1].any() else runs}


def box_of_mask(mask: np.ndarray) -> tuple[int, int, int, int]:
    """(x1, y1, x2, y2) of the outermost True pixels, inclusive; ValueError for an empty mask."""
    ys, xs = np.nonzero(mask)
    if not len(xs):
        raise InputError("a region mask has no pixel")
    return int(xs.min()), int(ys.min()), int(xs.max()), int(ys.max())


def _decompressed(text: str) -> list[int]:
    """COCO's text form: 6 bits a character, 5 of value and one that says more follow; from the third on, differences two back."""
    runs: list[int] = []
    place = 0
    while place < len(text):
        value = shift = 0
        more = True
        while more:
            bits = ord(text[place]) - 48
            value |= (bits & 0x1F) << shift
            more = bool(bits & 0x20)
            place, shift = place + 1, shift + 5
            if not more and bits & 0x10:
                value |= -1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
    return runs
