"""The one type every reader yields.

An `Example` is a conversation about zero or more pictures. In the text of its turns ``<image>`` stands for the next picture
and ``<region>`` for the next region: a user's ``<region>`` becomes its coordinates followed by the region token, an
assistant's becomes coordinates alone (Ferret's convention). A ``<region_fea>`` written by the data's author stands for the next
region too, without coordinates. The k-th marker belongs to ``images[k]`` or ``regions[k]``.
"""

from __future__ import annotations

import hashlib
import html
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mmkit.errors import InputError

if TYPE_CHECKING:
    from mmkit.data.boxes import Box

IMAGE = "<image>"
REGION = "<region>"
REGION_FEATURE = "<region_fea>"
REGION_MARKER = re.compile(f"{re.escape(REGION)}|{re.escape(REGION_FEATURE)}")

Role = Literal["system", "user", "assistant"]
TOO_LONG = "too long"  # the one reason of a BadRecord that is no damage: `data.too_long` drops it, counted apart


class BadRecord(InputError):
    """A record that cannot be used. ``key`` and ``source`` name it, ``reason`` is a short word for counting."""

    def __init__(self, message: str, *, key: str = "", source: str = "", reason: str = "bad"):
        super().__init__(f"{source or 'data'}: sample {key!r}: {message}")
        self.message, self.key, self.source, self.reason = message, key, source, reason

    def __reduce__(self):
        return (_rebuild, (self.message, self.key, self.source, self.reason))


def _rebuild(message: str, key: str, source: str, reason: str) -> BadRecord:
    return BadRecord(message, key=key, source=source, reason=reason)


@dataclass(frozen=True, eq=False)
class ImageRef:
    """A picture not yet decoded: a path or URL, encoded bytes, a PIL image or an (H, W[, C]) array.

    ``name`` identifies it where ``data`` is not a path; references of one name share one copy of the picture.
    """

    data: Any
    name: str = ""

    @property
    def identity(self) -> str:
        """What makes two references the same picture: the name, the path, or a hash of the content."""
        if self.name:
            return self.name
        if isinstance(self.data, (str, Path)):
            return str(self.data)
        if isinstance(self.data, bytes):
            return hashlib.sha1(self.data).hexdigest()
        array = np.asarray(self.data)
        return hashlib.sha1(repr(array.shape).encode() + array.tobytes()).hexdigest()

    @property
    def told(self) -> str:
        """How a message names it: by at most 200 characters of its name or path, or by its type."""
        name = str(self.name or (self.data if isinstance(self.data, str | Path) else type(self.data).__name__))
        return repr(name) if len(name) <= 200 else f"{name[:40]!r}... ({len(name):,} characters)"

    def __eq__(self, other) -> bool:
        return isinstance(other, ImageRef) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


@dataclass(frozen=True)
class Turn:
    """One message. ``trained`` False keeps an assistant's message out of the loss."""

    role: Role
    text: str
    trained: bool = True


@dataclass(frozen=True, eq=False)
class Region:
    """A part of picture ``image``: a point, a box, or a free-form mask with its bounding box.

    ``mask`` is a bool array (H, W) of the original picture or COCO run lengths ``{"size": [h, w], "counts": ...}``; a point or
    box may carry one too, then only pixels of both belong to the region (Ferret section 3).
    """

    kind: Literal["point", "box", "mask"]
    box: Box
    mask: Any = None
    image: int = 0

    @property
    def text(self) -> str:
        """Its coordinates inside the picture on the whole-number grid: two numbers for a point, else four (a mask's bounding box)."""
        return self.box.clamped().text(point=self.kind == "point")


@dataclass(frozen=True)
class Example:
    """A conversation, its pictures and regions, and where it came from.

    ``meta`` holds what tasks and figures need besides (answer, question type, category, concept ...). ``notes`` say what of its
    record was not read or was chosen, each in words that follow a count: "records have key 'lecture' that is not read".
    """

    key: str
    images: tuple[ImageRef, ...] = ()
    turns: tuple[Turn, ...] = ()
    regions: tuple[Region, ...] = ()
    source: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        pictures = ", ".join(image.identity for image in self.images) or "none"
        said = "\n".join(f"  {turn.role}: {turn.text}" for turn in self.turns)
        return f"example {self.key!r} of {self.source or 'no source'}; pictures: {pictures}; regions: {len(self.regions)}\n{said}"

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre-wrap">{html.escape(str(self))}</pre>'

    @property
    def caption(self) -> str:
        """The first assistant text: the caption of an image-text pair."""
        return next((turn.text for turn in self.turns if turn.role == "assistant"), "")

    @property
    def question(self) -> str:
        """The first user text without image markers."""
        text = next((turn.text for turn in self.turns if turn.role == "user"), "")
        return text.replace(IMAGE, "").strip()


def checked(example: Example) -> Example:
    """The example itself, or BadRecord naming both counts where markers and pictures or regions disagree."""
    text = "".join(turn.text for turn in example.turns)
    for what, markers, things in (
        ("image", text.count(IMAGE), len(example.images)),
        ("region", len(REGION_MARKER.findall(text)), len(example.regions)),
    ):
        if markers != things:
            raise BadRecord(
                f"{things} {what}s but {markers} {what} placeholders; give one placeholder for each",
                key=example.key, source=example.source, reason=f"{what} count",
            )  # fmt: skip
    if outside := [region.image for region in example.regions if not 0 <= region.image < len(example.images)]:
        raise BadRecord(
            f"a region points at image {outside[0]} of {len(example.images)}", key=example.key, source=example.source, reason="region count"
        )
    return example


def checked_pair(example: Example) -> Example:
    """The example itself, or BadRecord where a contrastive model has no picture or no words of it to learn from."""
    if not example.images or not example.caption.strip():
        what = "image" if not example.images else "caption"
        raise BadRecord(f"has no {what}", key=example.key, source=example.source, reason=f"missing {what}")
    return example
