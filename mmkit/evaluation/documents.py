"""Documents looked at whole before a model is: fields and types of a benchmark's lines, and every picture
decoded.

A fault that only the scorer of the last question would meet costs hours of answers; one that no scorer meets
costs a score that is wrong.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mmkit.data.example import ImageRef
from mmkit.data.images import ImageError, open_image

SHOWN = 5  # faults that a message spells out
LETTERS = "ABCDEFGHI"  # of the options
THREADS = min(os.cpu_count() or 1, 16)  # Pillow decodes without the interpreter's lock


def is_text(value: Any) -> bool:
    """A text that is not empty."""
    return isinstance(value, str) and bool(value.strip())


def is_number(value: Any) -> bool:
    """A whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def letter_of(value: Any, brackets: bool = True) -> int | None:
    """The place of the option that a letter names, from 0: "B", and with ``brackets`` "(B)"; None for
    anything else."""
    text = value.strip().upper() if isinstance(value, str) else ""
    text = text.strip("()") if brackets else text
    return LETTERS.index(text) if len(text) == 1 and text in LETTERS else None


def _all(value: Any, is_one: Callable[[Any], bool], least: int = 1) -> bool:
    return isinstance(value, list) and len(value) >= least and all(map(is_one, value))


# what a field holds -> (in words, whether a value is it). A tuple instead of a kind: one of its values.
Kind = str | tuple
KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("a text", is_text),
    "texts": ("a list of texts", lambda value: _all(value, is_text)),
    "words": (
        "a list of texts (an empty one where there are none)",
        lambda value: _all(value, lambda one: isinstance(one, str), 0),
    ),
    "two texts": ("a list of two texts", lambda value: _all(value, is_text) and len(value) == 2),
    "name": ("a text or a whole number", lambda value: is_text(value) or is_number(value)),
    "digits": (
        "a whole number",
        lambda value: is_number(value) or (is_text(value) and value.strip().isdecimal()),
    ),
    "yes or no": ("yes or no", lambda value: is_text(value) and value.lower() in ("yes", "no")),
    "flag": (
        "true or false",
        lambda value: isinstance(value, bool) or (is_number(value) and value in (0, 1)),
    ),
    "letter": ("the letter of an option, as B or (B)", lambda value: letter_of(value) is not None),
    "bare letter": (
        "the letter of an option without brackets, as B",
        lambda value: letter_of(value, brackets=False) is not None,
    ),
    "option": (
        "the number of an option, from 0",
        lambda value: str(value).strip() in tuple("012345678") and not isinstance(value, bool),
    ),
    "options": (
        f"a list of 1 to {len(LETTERS)} texts or numbers",
        lambda value: (
            _all(value, lambda one: is_text(one) or isinstance(one, float) or is_number(one))
            and len(value) <= len(LETTERS)
        ),
    ),
    "pictures": (
        "a path, a list of paths or null",
        lambda value: value is None or is_text(value) or _all(value, is_text),
    ),
    "hint": ("a text or null", lambda value: value is None or isinstance(value, str)),
    "anything": ("anything", lambda value: True),
}


def field_faults(
    row: Mapping[str, Any], fields: Mapping[str, Kind], optional: Mapping[str, Kind]
) -> list[str]:
    """What is wrong with a line: fields that are missing, or of another kind than they must be."""
    found = [f"no {name}" for name in fields if name not in row]
    for name, kind in (optional | fields).items():
        words, fits = (
            KINDS[kind]
            if isinstance(kind, str)
            else (" or ".join(map(repr, kind)), lambda value, kind=kind: value in kind)
        )
        if name in row and not fits(row[name]):
            value = repr(row[name])
            found.append(f"{name} is {value if len(value) <= 60 else f'{value[:57]}...'}, not {words}")
    return found


def option_fault(row: Mapping[str, Any], truth: Kind, apart: bool) -> str:
    """Where ``truth`` names an option by letter or number: what is wrong with that option. ``apart``: options
    are no part of the question."""
    if truth not in ("letter", "bare letter", "option"):
        return ""
    if "options" not in row:
        return "no options" if apart else ""
    place = int(row["gt_answer"]) if truth == "option" else letter_of(row["gt_answer"])
    n = len(row["options"])
    return "" if place < n else f"gt_answer {row['gt_answer']!r} is none of the {n} options"


def picture_faults(refs: Iterable[ImageRef]) -> list[str]:
    """A line for every picture that does not decode: each is opened as it will be for the model."""
    with ThreadPoolExecutor(THREADS) as pool:
        return [fault for fault in pool.map(picture_fault, refs) if fault]


def picture_fault(ref: ImageRef) -> str:
    """What is wrong with a picture, "" where it decodes."""
    if isinstance(ref.data, str | Path) and "://" not in str(ref.data) and Path(ref.data).is_file():
        found = Path(ref.data).stat()
        return _file_fault(str(ref.data), found.st_mtime_ns, found.st_size)
    return _decoded(ref)


@functools.lru_cache(
    maxsize=1 << 16
)  # several tasks ask about the same pictures, and a command may look twice
def _file_fault(path: str, changed: int, size: int) -> str:
    return _decoded(ImageRef(Path(path)))


def _decoded(ref: ImageRef) -> str:
    try:
        open_image(ref)
    except ImageError as error:
        return error.message
    return ""


def listed(faults: list[str], of: int, what: str) -> str:
    """``3 of 200 documents cannot be used: line 5: no gt_answer; ...``."""
    more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return f"{len(faults)} of {of} {what} cannot be used: {'; '.join(faults[:SHOWN])}{more}"
