"""Boxes keep their place through every frame, and are written as the published models have read them."""

import random

import pytest

from mmkit.data.boxes import Box, Frame, boxes_in, grid, model_pixels, pixels
from mmkit.data.example import Region
from mmkit.evaluation.answers import decode_boxes

UNIT = Frame("unit", 1.0, 1.0)


def original_text(numbers, width, height):
    """Coordinates as apple/ml-ferret writes them: clamped, times the quotient, cut to whole numbers."""
    ratios = (1000 * 1.0 / width, 1000 * 1.0 / height)
    lasts = (width - 1, height - 1)
    written = [int(max(0, min(number, lasts[k % 2])) * ratios[k % 2]) for k, number in enumerate(numbers)]
    return "[" + ", ".join(map(str, written)) + "]"


def test_coordinates_are_those_of_the_original_for_every_size():
    generator = random.Random(7)
    assert (
        Region("point", Box.point(33.3, 12.9, pixels(90, 45))).text
        == original_text((33.3, 12.9), 90, 45)
        == "[369, 286]"
    )
    other_order = 0
    for _ in range(20_000):
        width, height = generator.randint(1, 2000), generator.randint(1, 2000)
        frame = pixels(width, height)
        whole = generator.random() < 0.5
        x1, x2 = sorted(generator.uniform(-5, width + 5) for _ in range(2))
        y1, y2 = sorted(generator.uniform(-5, height + 5) for _ in range(2))
        box = tuple(round(number) if whole else number for number in (x1, y1, x2, y2))
        assert Region("box", Box(*box, frame)).text == original_text(box, width, height)
        assert Region("point", Box.point(*box[:2], frame)).text == original_text(box[:2], width, height)
    for width in range(1, 1200):  # whole pixels, where the order of the arithmetic decides
        for x in range(0, width, 19):
            text = Region("point", Box.point(x, x, pixels(width, width))).text
            assert text == original_text((x, x), width, width)
            other_order += text != f"[{int(x * 1000 / width)}, {int(x * 1000 / width)}]"
    assert other_order > 10


def test_coordinates_are_read_back_as_the_original_reads_them():
    assert decode_boxes("cup [750, 0, 750, 999]", 36, 36)[1] == [(26, 0, 26, 35)]
    generator = random.Random(3)
    for _ in range(5000):
        width, height, box = (
            generator.randint(1, 2000),
            generator.randint(1, 2000),
            [generator.randint(0, 999) for _ in range(4)],
        )
        ratio_w, ratio_h = width * 1.0 / 1000, height * 1.0 / 1000
        expected = (
            int(box[0] * ratio_w),
            int(box[1] * ratio_h),
            int(box[2] * ratio_w),
            int(box[3] * ratio_h),
        )
        assert decode_boxes(f"a thing {box}", width, height)[1] == [expected]


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
