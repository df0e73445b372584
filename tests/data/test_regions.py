"""Regions: published masks and texts, run lengths, sampled points."""

from pathlib import Path

import numpy as np
import pytest

from mmkit.data.boxes import Box, pixels
from mmkit.data.example import Region
from mmkit.data.regions import box_of_mask, decode_mask, encode_mask, region_mask, region_points
from tests.golden_checks import region_masks

GOLDEN = Path(__file__).parents[1] / "golden"


def test_masks_and_texts_equal_the_published_ones():
    assert region_masks.check(*region_masks.load(GOLDEN)) == 7


def test_run_lengths_round_trip_and_count_down_columns():
    mask = np.random.default_rng(3).random((5, 7)) > 0.5
    assert np.array_equal(decode_mask(encode_mask(mask)), mask)
    assert decode_mask({"size": [2, 2], "counts": [1, 1, 2]}).tolist() == [[False, False], [True, False]]


def test_compressed_run_lengths_are_read():
    # written by hand: 6 zeros, 3 ones, 40 zeros, then 1 = 3 - 2 and so on (differences from the third value on)
    def character_groups(value):
        out = ""
        while True:
            bits, value = value & 0x1F, value >> 5
            done = (value == 0 and not bits & 0x10) or (value == -1 and bits & 0x10)
            out += chr((bits | (0 if done else 0x20)) + 48)
            if done:
                return out

    runs = [6, 3, 40, 1, 14]
    coded = [value - (runs[i - 2] if i > 2 else 0) for i, value in enumerate(runs)]
    text = "".join(character_groups(value) for value in coded)
    mask = decode_mask({"size": [8, 8], "counts": text})
    assert np.array_equal(mask, decode_mask({"size": [8, 8], "counts": runs}))


def test_runs_of_another_size_are_refused():
    with pytest.raises(ValueError, match="add up to 5 pixels but its size 2x3 has 6"):
        decode_mask({"size": [3, 2], "counts": [2, 3]})


def test_mask_of_another_picture_is_refused():
    region = Region("mask", Box(0, 0, 3, 3, pixels(4, 4)), mask=np.ones((4, 5), bool))
    with pytest.raises(ValueError, match="5x4 but the image is 4x4"):
        region_mask(region, 4, 4)


@pytest.mark.parametrize("size, repeat, expected", [(30, True, 64), (30, False, 64), (3, True, 64), (3, False, 9)])
def test_points_are_pixels_of_the_region(size, repeat, expected):
    mask = np.zeros((40, 50), bool)
    mask[5 : 5 + size, 7 : 7 + size] = True
    points = region_points(mask, 64, np.random.default_rng(0), repeat)
    assert points.shape == (expected, 2) and points.dtype == np.float32
    xs, ys = np.rint(points[:, 0] * 50).astype(int), np.rint(points[:, 1] * 40).astype(int)
    assert mask[ys, xs].all()
    if size * size <= 64:
        assert len(np.unique(points, axis=0)) == size * size


def test_points_follow_the_generator():
    mask = np.ones((30, 30), bool)
    first, again = (region_points(mask, 16, np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, region_points(mask, 16, np.random.default_rng(6)))


def test_box_of_mask():
    mask = np.zeros((6, 8), bool)
    mask[2:4, 3:7] = True
    assert box_of_mask(mask) == (3, 2, 6, 3)
    with pytest.raises(ValueError, match="no pixel"):
        box_of_mask(np.zeros((2, 2), bool))
