"""Records of files (dictionaries) to examples: the field names that LLaVA, Cambrian, Ferret and Hugging Face data use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
    try:
        images = images_of(record, folder)
    except BadRecord as error:
        raise BadRecord(error.message, key=key, source=source, reason=error.reason) from None
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
        if not isinstance(messages, list | tuple | np.ndarray):
            raise BadRecord(f"its conversation is a {type(messages).__name__}, not a list of messages", key=key, source=source, reason="turns")
        turns = [_turn(message, key, source) for message in messages]
        while turns and turns[0].role == "assistant":
            turns = turns[1:]
        return tuple(turns)
    if "answer" in record or "answers" in record:
        answer = record.get("answer", record.get("answers"))
        answer = answer[0] if isinstance(answer, list | tuple | np.ndarray) and len(answer) else answer
        return Turn("user", str(record.get("question", ""))), Turn("assistant", str(answer))
    caption = next((record[field] for field in CAPTION_FIELDS if record.get(field) is not None), None)
    if caption is None:
        found = ", ".join(sorted(record)) or "nothing"
        wanted = "conversations, messages, question + answer, or one of " + ", ".join(CAPTION_FIELDS)
        raise BadRecord(f"has no text: it has {found}; it needs {wanted}", key=key, source=source, reason="no text")
    return Turn("user", ""), Turn("assistant", str(caption))


def joined(folder: str | None, path: str) -> str:
    """A picture's path below ``folder``; absolute paths and URLs stay."""
    return path if folder is None or path.startswith("/") or "://" in path else f"{folder.rstrip('/')}/{path}"


def _turn(message: Any, key: str, source: str) -> Turn:
    message = _parsed(message) if isinstance(message, str) else message
    if not isinstance(message, Mapping):
        raise BadRecord(f"a message is {message!r:.40}, not an object with from and value", key=key, source=source, reason="turns")
    role, text = message.get("from", message.get("role")), message.get("value", message.get("content"))
    if role not in ROLES:
        raise BadRecord(f"a message is from {role!r}; it must be one of {', '.join(ROLES)}", key=key, source=source, reason="turns")
    if isinstance(text, list):  # chat form: a list of typed parts
        text = "".join(IMAGE if part.get("type") == "image" else str(part.get("text", "")) for part in text)
    return Turn(ROLES[role], "" if text is None else str(text))


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
    return isinstance(value, np.ndarray) and value.dtype != object


def _image(value: Any, folder: str | None) -> ImageRef:
    if isinstance(value, bool | int | float):
        raise BadRecord(f"its image is the number {value}; give a path, a URL or encoded bytes", reason="image")
    if isinstance(value, Mapping):  # Hugging Face: {"bytes": ..., "path": ...}
        path = str(value.get("path") or "")
        return ImageRef(value["bytes"]) if value.get("bytes") else ImageRef(joined(folder, path))
    return ImageRef(joined(folder, value)) if isinstance(value, str) else ImageRef(value)


# ---------------------------------------------------------------- GRIT


def grit_example(record: Mapping[str, Any], key: str, source: str, folder: str | None, rng: np.random.Generator | None) -> Example:
    """A Ferret record: ``<bbox_location{k}>`` of a message stands for its k-th box.

    With ``rng`` each user message shows its regions as points or as boxes, half and half, as in training; without it as boxes.
    """
    images = images_of(record, folder)
    frame = _frame(record, images, key, source)
    turns, regions = [], []
    boxes, masks = record.get("box_x1y1x2y2") or [], record.get("masks") or []
    messages = record["conversations"] if "conversations" in record else []
    for number, turn in enumerate(_turn(message, key, source) for message in messages):
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
        box = Box(*boxes[number], frame)
        mask = _at(masks, number) or None
        regions.append(Region("box", box, mask) if rng is None else point_in(box.clamped(), mask, rng))
        return "<region>"

    return re.sub(r"<bbox_location(\d+)>", place, turn.text), regions


def point_in(box: Box, mask: Any, rng: np.random.Generator) -> Region:
    """A training point of an object: of up to 1000 random pixels of its mask the one nearest the box's centre; without a mask the
    centre moved by noise, but inside the box. The region is then cut by the mask, or by the box."""
    width, height = int(box.frame.width), int(box.frame.height)
    centre = np.array([(box.x1 + box.x2) / 2, (box.y1 + box.y2) / 2])
    if mask is not None and (pixels_of := np.argwhere(decode_mask(mask).T)).size:
        chosen = pixels_of[rng.permutation(len(pixels_of))[:MASK_PIXELS]]
        x, y = chosen[np.abs(chosen - centre).sum(1).argmin()]
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
