"""Letter-box arithmetic: tensors agree with integers, extremes keep a row or column, slots follow cells."""

from __future__ import annotations

import pytest
import torch

from mmkit.letterbox import cropped, n_slots, padding, paddings, scaled, visible_cells, visible_slots

SIZES = [(640, 480), (480, 640), (336, 336), (1000, 130), (200, 1000), (7, 5), (300, 299)]
SIZES += [(1333, 1), (1, 4000), (499, 500), (3, 1), (2048, 85)]
SIDES = (1, 2, 4, 6, 7, 24, 96)


@pytest.mark.parametrize("side", SIDES)
def test_tensor_arithmetic_equals_the_integers_for_every_size(side):
    many = SIZES + [(w, h) for w in range(1, 60, 7) for h in range(1, 60, 5)]
    rows, columns = paddings(torch.tensor(many), side)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == [padding(side, *size) for size in many]


@pytest.mark.parametrize("side", (3, 24, 27, 96, 1000))
def test_integer_arithmetic_equals_doubles_also_where_they_round_below_a_whole_number(side):
    long = torch.arange(1, 700)[:, None].expand(-1, 699)
    short = torch.arange(1, 700)[None].expand(699, -1).minimum(long)
    generator = torch.Generator().manual_seed(side)
    big = torch.randint(1, 2**23, (20_000,), generator=generator)
    whole = big // side * side  # short * side / long is often whole for these
    long = torch.cat([long.flatten(), big, (whole * 3).clamp(min=1)])
    short = torch.cat([short.flatten(), torch.randint(1, 2**23, (20_000,), generator=generator).minimum(big), whole.clamp(min=1)])
    want = [int(s * (side / n)) for s, n in zip(short.tolist(), long.tolist(), strict=True)]
    assert scaled(short, long, side).tolist() == want
    if side != 1000:
        assert any(w != s * side // n for w, s, n in zip(want, short.tolist(), long.tolist(), strict=True))


@pytest.mark.parametrize("side", SIDES)
def test_visible_slots_are_the_cropped_rows_each_with_its_newline(side):
    cells, slots = visible_cells(torch.tensor(SIZES), side), visible_slots(torch.tensor(SIZES), side)
    bare = visible_slots(torch.tensor(SIZES), side, newline=False)
    for index, size in enumerate(SIZES):
        top, left = padding(side, *size)
        height, width = cropped(side, *size)
        grid = slots[index].view(side, side + 1)
        for y in range(side):
            in_rows = top <= y < top + height
            assert cells[index, y].tolist() == [in_rows and left <= x < left + width for x in range(side)]
            assert bool(grid[y, side]) == in_rows
        assert torch.equal(bare[index], cells[index].flatten())
        assert n_slots(side, *size) == int(slots[index].sum()) and n_slots(side, *size, newline=False) == int(bare[index].sum())


def test_extreme_images_keep_at_least_one_row_or_column():
    for size in [(100_000, 1), (1, 100_000)]:
        assert min(cropped(24, *size)) == 2 and visible_cells(torch.tensor([size]), 24).sum() == 48
        assert min(cropped(27, *size)) == 1


def test_square_images_have_no_padding():
    assert padding(24, 500, 500) == (0, 0) and cropped(24, 500, 500) == (24, 24) and n_slots(24, 500, 500) == 600


def test_an_empty_image_is_refused_with_its_size():
    with pytest.raises(ValueError, match="0x10"):
        padding(24, 0, 10)
