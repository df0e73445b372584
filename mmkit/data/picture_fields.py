"""The pictures of a record: paths, URLs, base64, encoded bytes, and the forms in which tools write them
into fields, parts and texts.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmkit.data.example import ImageRef
from mmkit.data.record import Record, holds_nothing, shown

IMAGE_FIELDS = (
    "image", "images", "image_path", "filepath", "file_name", "path", "img", "img_path", "image_file",
    "image_name", "imgname", "Figure_path", "image_base64_str", "image_url",
)  # fmt: skip
NUMBERED_FIELDS = tuple(
    f"image_{number}" for number in range(1, 10)
)  # MMMU has image_1 to image_7, filled from the front
# The beginnings of JPEG, PNG, GIF, WebP, BMP and TIFF files in base64; the first looks like an absolute path
_BASE64_STARTS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "Qk0", "Qk1", "SUkq", "TU0A")
_BASE64, _SHORTEST, _LONGEST_PATH = re.compile(r"[A-Za-z0-9+/]+={0,2}"), 40, 1024
Shown = list[
    ImageRef | int | None
]  # of each image marker of a text, in order: its own picture, a number of the record's, the next one


def images_of(record: Record) -> list[ImageRef]:
    """The pictures in the record's own fields; the field may be absent, empty, one or a list."""
    named = [name for name in IMAGE_FIELDS if name in record.fields]
    record.read.update(name for name in named if _absent(record.fields[name]))
    value = record.take(*(name for name in named if name not in record.read))
    if value is None and "image_1" not in record.fields:
        return []
    if value is None:
        numbered = [record.take(name) for name in NUMBERED_FIELDS]
        return [image_of(record, one) for one in numbered if one is not None]
    listed = isinstance(value, list | tuple | np.ndarray) and not (
        isinstance(value, np.ndarray) and value.dtype.kind in "buif"
    )
    return [image_of(record, one) for one in (value if listed else [value]) if not _absent(one)]


def in_order(record: Record, listed: Sequence[ImageRef], shown_ones: Shown) -> tuple[ImageRef, ...]:
    """The pictures in the order of their markers, then those that have none, which `example.checked` counts
    and refuses.
    """
    rest, used, found = iter(range(len(listed))), set(), []
    for one in shown_ones:
        if isinstance(one, ImageRef):
            found.append(one)
            continue
        number = one if one is not None else next((k for k in rest if k not in used), None)
        if number is None:
            continue
        if not 0 <= number < len(listed):
            raise record.bad(f"shows picture {number + 1} of {len(listed)}", "image count")
        used.add(number)
        found.append(listed[number])
    return (*found, *(ref for k, ref in enumerate(listed) if k not in used))


def image_of(record: Record, value: Any) -> ImageRef:
    """One picture: a path, a URL, base64, encoded bytes, pixels, or an object that holds one of them;
    BadRecord for all else.
    """
    data = value
    if isinstance(
        value, Mapping
    ):  # Hugging Face {bytes, path}, OpenAI {url, detail}, Anthropic {type, media_type, data}
        data = next(
            (value[name] for name in ("bytes", "path", "url", "data") if not holds_nothing(value.get(name))),
            None,
        )
        record.note_unread(value, ("bytes", "path", "url", "data", "detail", "media_type"), "image.")
    if isinstance(data, str) and data:
        content = _decoded(record, data)
        return ImageRef(joined(record.folder, data)) if content is None else ImageRef(content)
    if isinstance(data, bytes | Path | np.ndarray | Image.Image):
        return ImageRef(data)
    if isinstance(value, bool | int | float):
        raise record.bad(f"its image is the number {value}; give a path, a URL or encoded bytes", "image")
    raise record.bad(f"its image is {shown(value)}; give a path, a URL or encoded bytes", "image")


def _absent(value: Any) -> bool:
    return holds_nothing(value) or (isinstance(value, str) and value.strip().lower() in ("none", "null"))


def joined(folder: str | None, path: str) -> str:
    """A picture's path below ``folder``; absolute paths and URLs stay."""
    return path if folder is None or path.startswith("/") or "://" in path else f"{folder.rstrip('/')}/{path}"


def _decoded(record: Record, text: str) -> bytes | None:
    """The bytes of a ``data:`` URL or of base64; None for a path or another URL. BadRecord for what is
    neither whole base64 nor a path.
    """
    is_url, payload = text.startswith("data:"), text
    if is_url:
        header, _, payload = text.partition(",")
        if not header.endswith(";base64"):
            raise record.bad(
                f"its image is a data URL without base64, {text[:40]!r}; give a path or base64", "image"
            )
    payload = "".join(payload.split()).translate(str.maketrans("-_", "+/"))
    alphabet = len(payload) >= _SHORTEST and bool(_BASE64.fullmatch(payload))
    if not is_url and not (alphabet and (payload.startswith(_BASE64_STARTS) or len(payload) > _LONGEST_PATH)):
        if len(text) > 4 * _LONGEST_PATH:  # more than a path can have
            raise record.bad(
                f"its image is a text of {len(text):,} characters, no path and no base64: {text[:40]!r}",
                "image",
            )
        return None
    try:
        content = base64.b64decode(payload + "=" * (-len(payload) % 4), validate=True)
        with contextlib.suppress(
            OSError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning
        ):
            Image.open(io.BytesIO(content))
            return content
        why = "it holds no picture of a known format"
    except (binascii.Error, ValueError) as error:
        why = str(error)
    message = f"its image is {len(text):,} characters of base64 that cannot be used ({why}): {text[:40]!r}"
    raise record.bad(f"{message}; encode the file anew", "image")
