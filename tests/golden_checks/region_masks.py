"""Golden kind ``ferret_region_masks``: coordinate texts and the pixels of each region."""

from pathlib import Path

import numpy as np

from mmkit.data.boxes import Box, pixels
from mmkit.data.example import Region
from mmkit.data.regions import region_mask


def check(spec: dict, tensors: dict) -> int:
    """Compares every row; returns how many."""
    for row in spec["rows"]:
        k, (width, height) = row["k"], row["image_wh"]
        frame = pixels(width, height)
        box = Box(*row["raw_box"], frame).clamped()
        assert list(box.corners) == row["clamped_box"]
        segment = tensors.get(f"in.segment_hw.{k}")
        segment = None if segment is None else np.asarray(segment).astype(bool)
        if row["point_or_box"] == "point":
            region = Region("point", Box.point(*row["raw_coor"], frame), mask=_within(box, segment, height, width))
        else:
            region = Region("box", box, mask=segment)
        assert region.text == row["text"], k
        mask = region_mask(region, width, height)  # (H, W)
        assert mask.sum() == row["mask_true"], k
        assert np.array_equal(mask.T, np.asarray(tensors[f"out.mask.{k}"]).astype(bool)), k
    return len(spec["rows"])


def _within(box: Box, segment, height: int, width: int) -> np.ndarray:
    """What a training point is cut by: the object's segment, or its box where there is none."""
    if segment is not None:
        return segment
    inside = np.zeros((height, width), dtype=bool)
    x1, y1, x2, y2 = (int(corner) for corner in box.corners)
    inside[y1 : y2 + 1, x1 : x2 + 1] = True
    return inside


def load(folder: Path, name: str = "ferret_region_masks") -> tuple[dict, dict]:
    """The file's description and tensors."""
    import json

    from safetensors.numpy import load_file

    return json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors")
