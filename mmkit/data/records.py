"""Records of files (dictionaries) to examples: the field names that LLaVA, Cambrian, Ferret and Hugging Face data use."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Number, Real
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmkit.data.boxes import Box, Frame, pixels
from mmkit.data.example import IMAGE, BadRecord, Example, ImageRef, Region, Turn
from mmkit.data.images import ImageError, image_size
from mmkit.data.regions import decode_mask
from mmkit.data.templates import image_first

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "bot": "assistant", "system": "system"}
NO_IMAGE = {"", "none", "nan", "null"}
IMAGE_FIELDS = ("image", "images", "image_path", "filepath", "file_name", "path")
CAPTION_FIELDS = ("caption", "text", "title", "txt")
POINT_NOISE, MASK_PIXELS = 0.15, 1000  # of a training point: spread as a share of the box, pixels looked at (Ferret, section 3)


def example_of(record: Mapping[str, Any], key: str, source: str, folder: str | None) -> Example:
    """An example from ``conversations``/``messages``, ``question`` + ``answer``, or a caption; BadRecord where it has none of them."""
    images = images_of(record, folder)
    turns = turns_of(record, key, source)
    if len(images) == 1 and sum(turn.text.count(IMAGE) for turn in turns) == 1:
        turns = tuple(Turn(turn.role, image_first(turn.text), turn.trained) if turn.role == "user" else turn for turn in turns)
    elif images and not any(IMAGE in turn.text for turn in turns) and "conversations" not in record and "messages" not in record:
        turns = _with_images(turns, len(images))
    known = {"conversations", "messages", "question", "answer", *IMAGE_FIELDS, *CAPTION_FIELDS}
    meta = {name: value for name, value in record.items() if name not in known and isinstance(value, str | int | float | bool)}
    return Example(key, images, turns, (), source, meta)


def key_of(record: Mapping[str, Any], number: int) -> str:
    """The record's id, or its place in the file counted from 1."""
    name = next((record[field] for field in ("id", "question_id", "key") if record.get(field) not in (None, "")), None)
    return f"record {number + 1}" if name is None else str(name)


def images_of(record: Mapping[str, Any], folder: str | None) -> tuple[ImageRef, ...]:
    """The record's pictures; the field may be absent, empty, one or a list of paths, encoded bytes or Hugging Face image dictionaries."""
    value = next((record[field] for field in IMAGE_FIELDS if field in record), None)
    values = list(value) if isinstance(value, list | tuple | np.ndarray) and not _is_pixels(value) else [value]
    return tuple(_image(one, folder) for one in values if not _absent(one))


def turns_of(record: Mapping[str, Any], key: str, source: str) -> tuple[Turn, ...]:
    """The record's turns. A leading answer, as some LLaVA records have, is dropped."""
    messages = next((record[field] for field in ("conversations", "messages") if record.get(field) is not None), None)
    if messages is not None:
        turns = _turns(messages, key, source)
        while turns and turns[0].role == "assistant":
            turns = turns[1:]
        return tuple(turns)
    asked = [field for field in ("question", "answer", "answers") if record.get(field) is not None]  # all null: a caption among questions
    if asked and ("answer" in record or "answers" in record):
        answer = next((record[field] for field in asked if field != "question"), None)
        question = _text(record.get("question", ""), "question", key, source)
        return Turn("user", question), Turn("assistant", _text(_first(answer), "answer", key, source))
    caption = next((record[field] for field in CAPTION_FIELDS if record.get(field) is not None), None)
    if caption is None:
        found = ", ".join(sorted(f"{field}{'' if value is not None else ' (null)'}" for field, value in record.items())) or "nothing"
        wanted = "conversations, messages, question + answer, or one of " + ", ".join(CAPTION_FIELDS)
        raise BadRecord(f"has no text: it has {found}; it needs {wanted}", key=key, source=source, reason="no text")
    return Turn("user", ""), Turn("assistant", _text(_first(caption), "caption", key, source))


def joined(folder: str | None, path: str) -> str:
    """A picture's path below ``folder``; absolute paths and URLs stay."""
    return path if folder is None or path.startswith("/") or "://" in path else f"{folder.rstrip('/')}/{path}"


def _turns(messages: Any, key: str, source: str) -> list[Turn]:
    if not isinstance(messages, list | tuple | np.ndarray):
        kind = "null" if messages is None else f"a {type(messages).__name__}"
        raise BadRecord(f"its conversation is {kind}, not a list of messages", key=key, source=source, reason="turns")
    return [_turn(message, key, source) for message in messages]


def _turn(message: Any, key: str, source: str) -> Turn:
    message = _parsed(message) if isinstance(message, str) else message
    if not isinstance(message, Mapping):
        raise BadRecord(f"a message is {message!r:.40}, not an object with from and value", key=key, source=source, reason="turns")
    role, text = message.get("from", message.get("role")), message.get("value", message.get("content"))
    if not isinstance(role, str) or role not in ROLES:
        raise BadRecord(f"a message is from {role!r}; it must be one of {', '.join(ROLES)}", key=key, source=source, reason="turns")
    if isinstance(text, list):  # chat form: a list of typed parts
        text = "".join(_part(part, key, source) for part in text)
    return Turn(ROLES[role], "" if text is None else _text(text, "message", key, source))


def _part(part: Any, key: str, source: str) -> str:
    if not isinstance(part, Mapping):
        raise BadRecord(f"a part of a message is {_shown(part)}, not an object with type and text", key=key, source=source, reason="turns")
    return IMAGE if part.get("type") == "image" else _text(part.get("text", ""), "message part", key, source)


def _text(value: Any, what: str, key: str, source: str) -> str:
    """A text, or a number as it is written; nothing else is turned into words that a model would learn, such as None."""
    if isinstance(value, str) or (isinstance(value, Number) and value == value):
        text = str(value)
        if text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text):
            return text
        message = f"its {what} has half of a surrogate pair, which no tokenizer reads: {value!a:.60}"
        raise BadRecord(message, key=key, source=source, reason="no text")
    raise BadRecord(f"its {what} is {_shown(value)}, not text", key=key, source=source, reason="no text")


def _first(value: Any) -> Any:
    """The first of several answers or captions."""
    return value[0] if isinstance(value, list | tuple | np.ndarray) and len(value) else value


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value!r:.40}"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_images(turns: Sequence[Turn], count: int) -> tuple[Turn, ...]:
    first = next(number for number, turn in enumerate(turns) if turn.role == "user")
    text = f"{IMAGE * count}\n{turns[first].text}".strip()
    return (*turns[:first], Turn("user", text), *turns[first + 1 :])


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in NO_IMAGE) or (isinstance(value, float) and value != value)


def _is_pixels(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "buif"


def _image(value: Any, folder: str | None) -> ImageRef:
    if isinstance(value, bool | int | float):
        raise BadRecord(f"its image is the number {value}; give a path, a URL or encoded bytes", reason="image")
    data = value
    if isinstance(value, Mapping):  # Hugging Face: {"bytes": ..., "path": ...}
        data = value.get("bytes") or value.get("path")
    if isinstance(data, str) and data:
        return ImageRef(joined(folder, data))
    if isinstance(data, bytes | Path | np.ndarray | Image.Image):
        return ImageRef(data)
    raise BadRecord(f"its image is {_shown(value)}; give a path, a URL or encoded bytes", reason="image")


# ---------------------------------------------------------------- GRIT


def grit_example(record: Mapping[str, Any], key: str, source: str, folder: str | None, rng: np.random.Generator | None) -> Example:
    """A Ferret record: ``<bbox_location{k}>`` of a message stands for its k-th box.

    With ``rng`` each user message shows its regions as points or as boxes, half and half, as in training; without it as boxes.
    """
    images = images_of(record, folder)
    frame = _frame(record, images, key, source)
    turns, regions = [], []
    boxes, masks = record.get("box_x1y1x2y2") or [], record.get("masks") or []
    for number, turn in enumerate(_turns(record.get("conversations", []), key, source)):
        as_point = rng is not None and turn.role == "user" and rng.random() < 0.5
        text, found = _with_regions(turn, _at(boxes, number), _at(masks, number), frame, rng if as_point else None, key, source)
        turns.append(Turn(turn.role, image_first(text) if turn.role == "user" and len(images) == 1 else text))
        regions += found
    while turns and turns[0].role == "assistant":
        turns, regions = turns[1:], regions[turns[0].text.count("<region>") :]
    return Example(key, images, tuple(turns), tuple(regions), source)


def _with_regions(turn: Turn, boxes, masks, frame: Frame, rng, key: str, source: str) -> tuple[str, list[Region]]:
    import re

    regions: list[Region] = []

    def place(match) -> str:
        number = int(match[1])
        if number >= len(boxes):
            raise BadRecord(f"mentions box {number} of a message with {len(boxes)}", key=key, source=source, reason="region count")
        box = _box(boxes[number], frame, key, source)
        mask = _at(masks, number) or None
        try:
            regions.append(Region("box", box, mask) if rng is None else point_in(box.clamped(), mask, rng))
        except ValueError as error:
            raise BadRecord(str(error), key=key, source=source, reason="region mask") from None
        return "<region>"

    return re.sub(r"<bbox_location(\d+)>", place, turn.text), regions


def _box(corners: Any, frame: Frame, key: str, source: str) -> Box:
    listed = isinstance(corners, list | tuple | np.ndarray) and len(corners) == 4
    if not listed or not all(isinstance(corner, Real) and math.isfinite(corner) for corner in corners):
        raise BadRecord(f"a box is {_shown(corners)}; give four numbers, [x1, y1, x2, y2]", key=key, source=source, reason="box")
    return Box(*corners, frame)


def point_in(box: Box, mask: Any, rng: np.random.Generator) -> Region:
    """A training point of an object: of up to 1000 random pixels of its mask the one nearest the box's centre; without a mask the
    centre moved by noise, but inside the box. The region is then cut by the mask, or by the box."""
    width, height = int(box.frame.width), int(box.frame.height)
    centre = np.array([(box.x1 + box.x2) / 2, (box.y1 + box.y2) / 2])
    if mask is not None and (pixels_of := np.argwhere(decode_mask(mask).T)).size:
        chosen = pixels_of[rng.permutation(len(pixels_of))[:MASK_PIXELS]]
        # squared distances from the whole-number centre, as the original
        x, y = chosen[((chosen - centre.astype(int)) ** 2).sum(1).argmin()]
        return Region("point", Box.point(float(x), float(y), box.frame), mask)
    spread = POINT_NOISE * np.array([box.x2 - box.x1, box.y2 - box.y1])
    low, high = np.array([box.x1, box.y1]), np.array([box.x2, box.y2])
    point = next((p for p in centre + spread * rng.standard_normal((100, 2)) if (p >= low).all() and (p <= high).all()), centre)
    inside = _box_runs(box, width, height)
    return Region("point", Box.point(float(point[0]), float(point[1]), box.frame), inside)


def _box_runs(box: Box, width: int, height: int) -> dict:
    """Run lengths (down columns) of a box's pixels."""
    x1, y1, x2, y2 = (int(corner) for corner in box.corners)
    tall, columns = y2 - y1 + 1, x2 - x1 + 1
    runs = [x1 * height + y1, *([tall, height - tall] * columns)]
    runs[-1] = width * height - sum(runs[:-1])
    return {"size": [height, width], "counts": runs}


def _frame(record: Mapping[str, Any], images: Sequence[ImageRef], key: str, source: str) -> Frame:
    width, height = record.get("image_w"), record.get("image_h")
    if (not width or not height) and images:
        try:
            width, height = image_size(images[0])
        except ImageError as error:
            raise BadRecord(error.message, key=key, source=source, reason=error.reason) from None
    return pixels(int(width or 1), int(height or 1))


def _at(values: Sequence, number: int):
    return values[number] if number < len(values) and values[number] is not None else []
