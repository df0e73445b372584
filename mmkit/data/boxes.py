"""Boxes and points that carry their frame, and the one conversion between frames.

A frame says in which coordinates numbers are written: pixels of the original image, pixels of the picture a model was fed
(after letter-boxing, cropping or stretching), the integer 0..N-1 grid a language model speaks, or 0..1. Every frame is an
affine image of the original picture, so a conversion is one multiplication and one addition per axis.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from mmkit.errors import InputError


@dataclass(frozen=True)
class Frame:
    """Coordinates: the original picture covers ``width`` x ``height`` units starting at (``left``, ``top``).

    ``steps`` > 0 means whole numbers 0..steps-1, truncated as Ferret writes them (section 3 of its paper, size 1000).
    """

    name: str
    width: float
    height: float
    left: float = 0.0
    top: float = 0.0
    steps: int = 0


def pixels(width: int, height: int) -> Frame:
    """Pixels of the original picture."""
    return Frame("pixels", width, height)


def grid(steps: int = 1000) -> Frame:
    """Whole numbers 0..steps-1 on each axis, whatever the picture's shape."""
    return Frame(f"grid {steps}", steps, steps, steps=steps)


def model_pixels(side: int, width: int, height: int, fit: str = "pad") -> Frame:
    """Pixels of the ``side`` x ``side`` picture that a ``width`` x ``height`` original became by ``fit``.

    ``pad`` letter-boxes (offset ``(long - short) // 2`` as the published preprocessing), ``square`` resizes the shorter edge
    and crops the centre, ``stretch`` resizes each axis on its own.
    """
    if fit == "stretch":
        return Frame(f"model {side} stretch", side, side)
    short, long = sorted((width, height))
    if fit == "pad":
        scale = side / long
        return Frame(f"model {side} pad", width * scale, height * scale, (long - width) // 2 * scale, (long - height) // 2 * scale)
    if fit == "square":
        scale = side / short
        return Frame(f"model {side} square", width * scale, height * scale, (side - width * scale) / 2, (side - height * scale) / 2)
    raise InputError(f"image fit {fit!r} is not known; use pad, square or stretch")


@dataclass(frozen=True)
class Box:
    """A box (or, with equal corners, a point) and the frame its numbers belong to."""

    x1: float
    y1: float
    x2: float
    y2: float
    frame: Frame

    @classmethod
    def point(cls, x: float, y: float, frame: Frame) -> Box:
        """A point: a box without extent."""
        return cls(x, y, x, y, frame)

    @property
    def is_point(self) -> bool:
        """Whether both corners are the same."""
        return self.x1 == self.x2 and self.y1 == self.y2

    @property
    def corners(self) -> tuple[float, float, float, float]:
        """(x1, y1, x2, y2) in this box's own frame."""
        return (self.x1, self.y1, self.x2, self.y2)

    @property
    def area(self) -> float:
        """Area in this box's own frame."""
        return max(self.x2 - self.x1, 0.0) * max(self.y2 - self.y1, 0.0)

    def to(self, frame: Frame) -> Box:
        """The same place of the picture in another frame; whole-number frames truncate and clamp."""
        if frame == self.frame:
            return self
        # The quotient comes first, as in Ferret's training and evaluation: x * 1000 / width may round to the
        # next whole number where x * (1000 / width) stays below it, and then truncation writes what the
        # weights have not seen.
        scale_x, scale_y = frame.width / self.frame.width, frame.height / self.frame.height
        xs = [(x - self.frame.left) * scale_x + frame.left for x in (self.x1, self.x2)]
        ys = [(y - self.frame.top) * scale_y + frame.top for y in (self.y1, self.y2)]
        if frame.steps:
            xs, ys = ([min(max(int(value), 0), frame.steps - 1) for value in axis] for axis in (xs, ys))
        return Box(xs[0], ys[0], xs[1], ys[1], frame)

    def clamped(self) -> Box:
        """The box with its corners moved inside the picture: 0..size-1 in pixel frames, 0..size elsewhere."""
        last = 1 if self.frame.name == "pixels" else 0
        low_x, high_x = self.frame.left, self.frame.left + self.frame.width - last
        low_y, high_y = self.frame.top, self.frame.top + self.frame.height - last
        return replace(
            self,
            x1=min(max(self.x1, low_x), high_x),
            y1=min(max(self.y1, low_y), high_y),
            x2=min(max(self.x2, low_x), high_x),
            y2=min(max(self.y2, low_y), high_y),
        )

    def fault(self, point: bool) -> str:
        """What makes this no part of its picture ("" where it is one): inverted, empty, or nothing of it inside."""
        left, top = self.frame.left, self.frame.top
        right, bottom = left + self.frame.width, top + self.frame.height
        numbers = "[" + ", ".join(f"{corner:g}" for corner in (self.corners[:2] if point else self.corners)) + "]"
        if self.x2 < self.x1 or self.y2 < self.y1:
            return f"{numbers} is inverted: its second corner lies before the first; boxes are [x1, y1, x2, y2], not x, y, width, height"
        if not point and (self.x2 == self.x1 or self.y2 == self.y1):
            return f"{numbers} is empty"
        inside = left <= self.x1 <= right and top <= self.y1 <= bottom
        if not point:
            inside = self.x1 < right and self.x2 > left and self.y1 < bottom and self.y2 > top
        return "" if inside else f"{numbers} lies outside its picture of {self.frame.width:g}x{self.frame.height:g} {self.frame.name}"

    def iou(self, other: Box) -> float:
        """Intersection over union; both boxes must be in one frame."""
        if self.frame != other.frame:
            raise InputError(f"boxes of different frames ({self.frame.name}, {other.frame.name}) cannot be compared; convert one with .to()")
        width = min(self.x2, other.x2) - max(self.x1, other.x1)
        height = min(self.y2, other.y2) - max(self.y1, other.y1)
        shared = max(width, 0.0) * max(height, 0.0)
        union = self.area + other.area - shared
        return shared / union if union > 0 else 0.0

    def text(self, steps: int = 1000, point: bool | None = None) -> str:
        """``[x1, y1, x2, y2]`` or, for a point, ``[x, y]`` on the whole-number grid (Ferret section 3).

        ``point`` False writes four numbers for a box of one pixel too; None goes by the corners.
        """
        box = self.to(grid(steps))
        numbers = (box.x1, box.y1) if (self.is_point if point is None else point) else box.corners
        return "[" + ", ".join(str(int(number)) for number in numbers) + "]"


_GROUP = re.compile(r"\[\s*([-+\d.eE]+(?:\s*,\s*[-+\d.eE]+)*)\s*\]")


def boxes_in(text: str, frame: Frame) -> list[Box]:
    """All ``[x1, y1, x2, y2]`` and ``[x, y]`` groups of a text, in order, read in ``frame``."""
    found = []
    for group in _GROUP.findall(text):
        try:
            numbers = [float(number) for number in group.split(",")]
        except ValueError:
            continue
        if len(numbers) == 4:
            found.append(Box(*numbers, frame))
        elif len(numbers) == 2:
            found.append(Box.point(*numbers, frame))
    return found
