"""Boxes keep their place through every frame (user report U13)."""

import pytest

from mmkit.data.boxes import UNIT, Box, boxes_in, grid, model_pixels, pixels


@pytest.mark.parametrize("fit", ["pad", "stretch", "square"])
@pytest.mark.parametrize("size", [(900, 600), (600, 900), (640, 640), (1001, 333)])
def test_box_through_model_pixels_and_back_is_the_same_box(fit, size):
    box = Box(224, 184, 262, 300, pixels(*size))
    back = box.to(model_pixels(336, *size, fit=fit)).to(pixels(*size))
    assert back.corners == pytest.approx(box.corners, abs=1e-6)


def test_padding_moves_one_axis_only():
    box = Box(0, 0, 900, 600, pixels(900, 600)).to(model_pixels(336, 900, 600, "pad"))
    assert box.corners == pytest.approx((0, 56, 336, 280))


def test_grid_uses_a_different_scale_for_each_axis_and_truncates():
    box = Box(224, 184, 662, 300, pixels(900, 600))
    assert box.text() == "[248, 306, 735, 500]"
    assert box.to(grid(1000)).corners == (248, 306, 735, 500)
    back = box.to(grid(1000)).to(pixels(900, 600))
    assert all(abs(a - b) <= 1 for a, b in zip(back.corners, box.corners, strict=True))


def test_grid_never_writes_its_own_size():
    assert Box(0, 0, 900, 600, pixels(900, 600)).text() == "[0, 0, 999, 999]"


def test_point_text_has_two_numbers():
    assert Box.point(0.5, 0.25, UNIT).text() == "[500, 250]"


def test_boxes_of_two_frames_are_not_compared():
    with pytest.raises(ValueError, match="different frames"):
        Box(0, 0, 1, 1, UNIT).iou(Box(0, 0, 1, 1, grid()))


def test_iou_of_half_overlap():
    assert Box(0, 0, 2, 2, UNIT).iou(Box(1, 0, 3, 2, UNIT)) == pytest.approx(1 / 3)


def test_clamped_stays_inside_the_picture():
    assert Box(-5, 3, 200, 90, pixels(100, 50)).clamped().corners == (0, 3, 99, 49)


def test_texts_with_boxes_and_points_are_read_back():
    found = boxes_in("a [1, 2, 3, 4] and [5,6] but not [x, y] or [1, 2, 3]", grid())
    assert [box.corners for box in found] == [(1, 2, 3, 4), (5, 6, 5, 6)]
