"""Integer arithmetic of letter-boxed images on token grids (reference: Cambrian-1, unpadding of image features).

An image of width x height is padded to a square before encoding. On a grid of side x side tokens the padding covers whole rows
(wide images) or columns (tall ones) on both sides. Truncations follow the published code, since trained weights saw these grids;
the one change is that at least one row or column always survives (the original crashes beyond side:1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkit.errors import InputError


def padding(side: int, width: int, height: int) -> tuple[int, int]:
    """Padded (rows at top and bottom, columns at left and right), each on both sides, of a ``side`` x ``side`` grid."""
    if width <= 0 or height <= 0:
        raise InputError(f"image size {width}x{height} is empty; both sides must be at least 1 pixel")
    if width / height > 1:
        return min((side - int(height * (side / width))) // 2, (side - 1) // 2), 0
    return 0, min((side - int(width * (side / height))) // 2, (side - 1) // 2)


def cropped(side: int, width: int, height: int) -> tuple[int, int]:
    """(rows, columns) of the grid that show the image."""
    rows, columns = padding(side, width, height)
    return side - 2 * rows, side - 2 * columns


def n_slots(side: int, width: int, height: int, newline: bool = True) -> int:
    """Visible image tokens of one image: its cropped grid, plus one newline a row."""
    rows, columns = cropped(side, width, height)
    return rows * (columns + int(newline))


def paddings(sizes: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """`padding` for a tensor: sizes (..., 2) of (width, height) -> (rows, columns), each (...) int64. Static shapes, no loop."""
    width, height = sizes.long().unbind(-1)
    shown = scaled(torch.minimum(width, height), torch.maximum(width, height), side)
    hidden = ((side - shown) // 2).clamp(max=(side - 1) // 2)
    wide = width > height
    return torch.where(wide, hidden, 0), torch.where(wide, 0, hidden)


def scaled(short: Tensor, long: Tensor, side: int) -> Tensor:
    """``int(short * (side / long))`` as IEEE doubles give it, by int64 arithmetic alone (sizes below 2^24).

    TPUs emulate doubles with fewer bits and some devices have none, yet every grid must be the one the data pipeline counted. The
    double result differs from the exact quotient k only where k is whole and the product rounds below it: side / long was rounded
    down, by rem / long units in its last place, and ``short`` times that is more than half a step of the doubles below k.
    """
    k = short * side // long
    up, down = (torch.arange(n, device=long.device) for n in (11, 25))
    exponent = (side >= long[..., None] << up[1:]).sum(-1) - ((side << down) < long[..., None]).sum(-1)  # of side / long
    rem = side * _power_of_two(52 - exponent, long) % long
    step = (k[..., None] > (1 << up)).sum(-1) - 1  # k is in (2^step, 2^(step + 1)]
    more = step - exponent - 1
    error, half = (short * rem) << (-more).clamp(min=0), long << more.clamp(min=0)
    below = (short * side % long == 0) & (2 * rem < long) & (error > half)
    return k - below.long()


def _power_of_two(exponent: Tensor, modulus: Tensor) -> Tensor:
    """2^exponent mod modulus for exponents below 128, by repeated squaring."""
    out, square = torch.ones_like(modulus), torch.full_like(modulus, 2)
    for bit in range(7):
        out = torch.where((exponent >> bit) & 1 == 1, out * square % modulus, out % modulus)
        square = square * square % modulus
    return out


def visible_cells(sizes: Tensor, side: int) -> Tensor:
    """sizes (..., 2) of (width, height) -> (..., side, side) bool, True where the cell shows the image."""
    rows, columns = (count[..., None] for count in paddings(sizes, side))
    place = torch.arange(side, device=sizes.device)
    in_rows = (place >= rows) & (place < side - rows)
    in_columns = (place >= columns) & (place < side - columns)
    return in_rows[..., :, None] & in_columns[..., None, :]


def visible_slots(sizes: Tensor, side: int, newline: bool = True) -> Tensor:
    """sizes (..., 2) -> (..., side * (side + newline)) bool over an image's slots, row by row.

    Padded rows are hidden with their newline; in padded columns only the cells are hidden, each visible row keeps its newline.
    """
    cells = visible_cells(sizes, side)  # (..., side, side)
    if newline:
        cells = torch.cat([cells, cells.any(-1, keepdim=True)], dim=-1)  # (..., side, side + 1)
    return cells.flatten(-2)
