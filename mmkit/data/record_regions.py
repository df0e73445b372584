"""Boxes and points of records: the placeholders of Ferret's GRIT and of ms-swift, and the coordinates that
Qwen-VL and InternVL write.

Each becomes a ``<region>`` of the text and a `Region` of the example, checked against its picture. Schemas:
ml-ferret ``ferret/train/train.py`` (box_x1y1x2y2, masks, ``<bbox_location0>``), ms-swift
``docs/source_en/Customization/Custom-dataset.md`` (objects, ``<bbox>``, ``<ref-object>``), Qwen-VL
``README.md`` (``<ref>``, ``<box>(x1,y1),(x2,y2)</box>`` in thousandths).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np

from mmkit.data.boxes import Box, Frame, pixels
from mmkit.data.example import REGION, REGION_MARKER, ImageRef, Region, Turn
from mmkit.data.images import ImageError, image_size
from mmkit.data.record import Record, holds_nothing, parsed, shown
from mmkit.data.regions import decode_mask

POINT_NOISE, MASK_PIXELS = (
    0.15,
    1000,
)  # of a training point: spread as a share of the box, pixels looked at (Ferret, section 3)
_THOUSANDTHS, _SHARES = Frame("thousandths", 1000, 1000), Frame("shares", 1, 1)
# ms-swift's bbox_type, of this version and of those before
_FRAMES = {
    "real": None,
    "norm1": _SHARES,
    "norm_1": _SHARES,
    "norm1000": _THOUSANDTHS,
    "norm_1000": _THOUSANDTHS,
}
_WRITTEN = r"<box>(?P<box>[\s\d.,()\[\]-]+)</box>|<\|box_start\|>(?P<qwen2>[\s\d.,()\[\]-]+)<\|box_end\|>"
_PLACE = re.compile(
    rf"<bbox_location(?P<grit>\d+)>|(?P<bbox><bbox>(?![^<]*</bbox>))|(?P<ref><ref-object>)|{_WRITTEN}"
)
_REFERENCE = re.compile(r"</?ref>|<\|object_ref_(?:start|end)\|>")


class Boxes:
    """All boxes that a record has in fields of its own: GRIT's by message and number, ms-swift's in the
    order of their placeholders.
    """

    def __init__(self, record: Record, images: Sequence[ImageRef], first: int):
        self.record, self.images, self.first = (
            record,
            images,
            first,
        )  # first: turns before the record's own messages
        self.grit, self.masks = (self._by_message(name) for name in ("box_x1y1x2y2", "masks"))
        self.references, self.boxes = self._objects()
        self.used = [0, 0]  # references and boxes, so far
        self.frames: dict[int, Frame] = {}

    def place(self, turn: Turn, number: int, rng: np.random.Generator | None) -> tuple[Turn, list[Region]]:
        """Turn ``number`` with ``<region>`` in place of its boxes, and the regions; with ``rng`` those of
        GRIT are points.
        """
        found: list[Region] = []

        def put(match: re.Match) -> str:
            before = match.string[match.start() - 1 : match.start()]
            gap = (
                " " if before.isalnum() or before == ">" else ""
            )  # "sheep<box>": coordinates are words of their own
            if match["grit"]:
                found.append(self._of_grit(number, int(match["grit"]), rng))
                return REGION
            if match["ref"]:
                return self._next_reference()
            if match["bbox"]:
                regions = self._next_boxes()
            else:
                regions = self._written(match["box"] or match["qwen2"])
            found.extend(regions)
            return gap + " ".join([REGION] * len(regions))

        return replace(turn, text=_PLACE.sub(put, turn.text)), found

    def all_used(self) -> None:
        """BadRecord where ms-swift's objects are more than their placeholders: the rest would be lost."""
        counts = (("reference", len(self.references), "<ref-object>"), ("box", len(self.boxes), "<bbox>"))
        for (what, there, mark), used in zip(counts, self.used, strict=True):
            if used != there:
                many = {"reference": "references", "box": "boxes"}[what] if there != 1 else what
                raise self.record.bad(
                    f"its objects have {there} {many}, but the text has {used} {mark}", "region count"
                )

    def _by_message(self, name: str) -> Sequence[Any]:
        value = self.record.take(name)
        if value is not None and not isinstance(value, list | tuple | np.ndarray):
            raise self.record.bad(
                f"its {name} is {shown(value)}, not a list with an entry for each message", "box"
            )
        return [] if value is None else value

    def _objects(self) -> tuple[list[str], list[tuple[Any, str, int]]]:
        """(references, boxes as (corners, type, picture)) of ms-swift's ``objects``, a mapping of lists or
        before that a list of objects.
        """
        record, objects = self.record, self.record.take("objects")
        objects = parsed(objects) if isinstance(objects, str) else objects
        if objects is None:
            return [], []
        rows: list[Any] = objects if isinstance(objects, list) else [objects]
        references, boxes = [], []
        for row in rows:
            if not isinstance(row, Mapping):
                raise record.bad(
                    f"its objects are {shown(objects)}; give {{ref: [...], bbox: [[x1, y1, x2, y2], ...]}}",
                    "box",
                )
            record.note_unread(row, ("ref", "caption", "bbox", "bbox_type", "image_id", "image"), "objects.")
            refs, corners = row.get("ref", row.get("caption")), row.get("bbox")
            places = row.get("image_id", row.get("image"))
            refs = refs if isinstance(refs, list) else [] if holds_nothing(refs) else [refs]
            corners = [] if holds_nothing(corners) else corners if isinstance(objects, Mapping) else [corners]
            if not isinstance(corners, list):
                raise record.bad(f"its objects have bbox {shown(corners)}, not a list of boxes", "box")
            places = places if isinstance(places, list) else [places] * len(corners)
            if len(places) != len(corners) or not all(
                one is None or (isinstance(one, int) and one >= 0) for one in places
            ):
                raise record.bad(
                    f"its objects have image_id {shown(places)} for {len(corners)} boxes, not a number each",
                    "box",
                )
            kind = row.get("bbox_type") or "real"
            if not isinstance(kind, str) or kind not in _FRAMES:
                raise record.bad(
                    f"its objects have bbox_type {shown(kind)}; it is one of {', '.join(_FRAMES)}", "box"
                )
            references += [record.text(one, "reference") for one in refs]
            boxes += [(one, kind, place or 0) for one, place in zip(corners, places, strict=True)]
        return references, boxes

    def _next_reference(self) -> str:
        self.used[0] += 1
        if self.used[0] > len(self.references):
            raise self.record.bad(
                f"has {len(self.references)} references for <ref-object> number {self.used[0]}",
                "region count",
            )
        return self.references[self.used[0] - 1]

    def _next_boxes(self) -> list[Region]:
        """The boxes of the next ``<bbox>``: one, or in ms-swift's older form several."""
        self.used[1] += 1
        if self.used[1] > len(self.boxes):
            raise self.record.bad(
                f"has {len(self.boxes)} boxes for <bbox> number {self.used[1]}", "region count"
            )
        corners, kind, place = self.boxes[self.used[1] - 1]
        nested = (
            isinstance(corners, list) and len(corners) > 0 and all(isinstance(one, list) for one in corners)
        )
        return [self._region(one, _FRAMES[kind], place) for one in (corners if nested else [corners])]

    def _written(self, text: str) -> list[Region]:
        """The boxes of four numbers, or the point of two, that a text has in thousandths of the picture."""
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
        size = 2 if len(numbers) == 2 else 4
        if not numbers or len(numbers) % size:
            raise self.record.bad(
                f"has a box of {len(numbers)} numbers, {text[:40]!r}; give (x1,y1),(x2,y2)", "box"
            )
        values = [float(number) for number in numbers]
        if max(values) > 1000 or min(values) < 0:
            raise self.record.bad(
                f"has a box outside 0 to 1000, {text[:40]!r}; <box> holds thousandths of the picture", "box"
            )
        return [self._region(values[k : k + size], _THOUSANDTHS, 0) for k in range(0, len(values), size)]

    def _of_grit(self, turn: int, number: int, rng: np.random.Generator | None) -> Region:
        mine, masks = (_at(rows, turn - self.first) for rows in (self.grit, self.masks))
        for rows, what in ((mine, "boxes"), (masks, "masks")):
            if not isinstance(rows, list | tuple | np.ndarray):
                raise self.record.bad(f"the {what} of a message are {shown(rows)}, not a list", "box")
        if number >= len(mine):
            raise self.record.bad(f"mentions box {number} of a message with {len(mine)}", "region count")
        region = self._region(mine[number], None, 0, points=False)
        mask = _at(masks, number) or None
        try:
            return replace(region, mask=mask) if rng is None else point_in(region.box.clamped(), mask, rng)
        except ValueError as error:
            raise self.record.bad(str(error), "region mask") from None

    def _region(self, corners: Any, frame: Frame | None, place: int, points: bool = True) -> Region:
        """A region of picture ``place``, in pixels where there is no frame; BadRecord where it is no place
        inside the picture.
        """
        record = self.record
        listed = isinstance(corners, list | tuple | np.ndarray) and len(corners) in (
            (2, 4) if points else (4,)
        )
        if not listed or not all(
            isinstance(one, Real) and not isinstance(one, bool) and math.isfinite(one) for one in corners
        ):
            wanted = "four numbers, [x1, y1, x2, y2]" + (", or two for a point" if points else "")
            raise record.bad(f"a box is {shown(corners)}; give {wanted}", "box")
        frame = frame or self._pixels(place)
        point = len(corners) == 2
        box = Box.point(*corners, frame) if point else Box(*corners, frame)
        if fault := box.fault(point):
            raise record.bad(f"a box {fault}", "box")
        return Region("point" if point else "box", box, image=place)

    def _pixels(self, place: int) -> Frame:
        """The frame of a picture: as the record says for a single one, else as its file does."""
        if place in self.frames:
            return self.frames[place]
        record = self.record
        size = record.fields.get("image_w"), record.fields.get("image_h")
        if len(self.images) > 1 or all(map(holds_nothing, size)):
            if place >= len(self.images):
                raise record.bad(f"has a box on picture {place + 1} of {len(self.images)}", "region count")
            try:
                size = image_size(self.images[place])
            except ImageError as error:
                raise record.bad(error.message, error.reason) from None
        for name, value in zip(("image_w", "image_h"), size, strict=True):
            if (
                isinstance(value, bool)
                or not isinstance(value, Real)
                or not 1 <= value < math.inf
                or value != int(value)
            ):
                raise record.bad(
                    f"its {name} is {shown(value)}; give the picture's size in whole pixels", "box"
                )
        self.frames[place] = pixels(int(size[0]), int(size[1]))
        return self.frames[place]


def with_regions(
    record: Record,
    turns: Sequence[Turn],
    images: Sequence[ImageRef],
    first: int,
    rng: np.random.Generator | None,
) -> tuple[list[Turn], list[Region]]:
    """(turns with a ``<region>`` for each box, the regions in their order). ``first`` turns stand before
    the record's own messages.
    """
    # <ref> alone may as well be a tag that a text is about
    if any("box" in turn.text and re.search(_WRITTEN, turn.text) for turn in turns):
        turns = [replace(turn, text=_REFERENCE.sub("", turn.text)) for turn in turns]
    boxes, out, regions = Boxes(record, images, first), [], []
    for number, turn in enumerate(turns):
        as_point = rng is not None and turn.role == "user" and rng.random() < 0.5
        if "box" in turn.text or "<ref-object>" in turn.text:
            turn, found = boxes.place(turn, number, rng if as_point else None)
            regions += found
        out.append(turn)
    boxes.all_used()
    begin = int(bool(out) and out[0].role == "system")
    before = sum(len(REGION_MARKER.findall(turn.text)) for turn in out[:begin])
    while len(out) > begin and out[begin].role == "assistant":  # as some LLaVA records do
        record.note("records begin with an answer, which is left out")
        del regions[before : before + len(REGION_MARKER.findall(out.pop(begin).text))]
    return out, regions


def point_in(box: Box, mask: Any, rng: np.random.Generator) -> Region:
    """A training point of an object: of up to 1000 random pixels of its mask the one nearest the box's
    centre; without a mask the centre moved by noise, but inside the box. The region is then cut by the
    mask, or by the box.
    """
    width, height = int(box.frame.width), int(box.frame.height)
    centre = np.array([(box.x1 + box.x2) / 2, (box.y1 + box.y2) / 2])
    if mask is not None and (pixels_of := np.argwhere(decode_mask(mask).T)).size:
        chosen = pixels_of[rng.permutation(len(pixels_of))[:MASK_PIXELS]]
        # squared distances from the whole-number centre, as the original
        x, y = chosen[((chosen - centre.astype(int)) ** 2).sum(1).argmin()]
        return Region("point", Box.point(float(x), float(y), box.frame), mask)
    spread = POINT_NOISE * np.array([box.x2 - box.x1, box.y2 - box.y1])
    low, high = np.array([box.x1, box.y1]), np.array([box.x2, box.y2])
    point = next(
        (
            p
            for p in centre + spread * rng.standard_normal((100, 2))
            if (p >= low).all() and (p <= high).all()
        ),
        centre,
    )
    # run lengths, down columns, of the box's pixels
    x1, y1, x2, y2 = (int(corner) for corner in box.corners)
    tall, columns = y2 - y1 + 1, x2 - x1 + 1
    runs = [x1 * height + y1, *([tall, height - tall] * columns)]
    runs[-1] = width * height - sum(runs[:-1])
    inside = {"size": [height, width], "counts": runs}
    return Region("point", Box.point(float(point[0]), float(point[1]), box.frame), inside)


def _at(values: Any, number: int) -> Any:
    """Entry ``number`` of a list, [] where there is none."""
    there = (
        isinstance(values, list | tuple | np.ndarray)
        and 0 <= number < len(values)
        and values[number] is not None
    )
    return values[number] if there else []
