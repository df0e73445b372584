"""The captions of tar shards: which file of a sample holds one (``data.caption_key``), and what that file
says.

A caption is text in UTF-8. Whatever else stands in its place (another encoding, JSON, a number, nothing) is a
BadRecord: replaced letters or the text of a JSON object would be learned as if somebody had written them
under a picture.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from mmkit.config import ConfigError
from mmkit.data.example import BadRecord

IMAGE_EXTENSIONS = ("jpg", "png", "jpeg", "webp")  # those that open_clip reads from shards
ENDING = re.compile(r"[^\s/\\]+")
SURROGATE = re.compile("[\ud800-\udfff]")
DEPTH = 3  # of the fields that are offered for captions


@functools.cache
def caption_place(caption_key: str) -> tuple[str, str]:
    """(extension, field) of ``data.caption_key``: ``txt`` is a file of text, ``json:caption`` the field of a
    JSON file, whose name may lead into objects (``json:meta.caption``). ConfigError where it can be
    neither."""
    extension, colon, field = (part.strip() for part in caption_key.partition(":"))
    extension = extension.lower().removeprefix(".")
    given = f"data.caption_key = {caption_key!r}"
    if not ENDING.fullmatch(extension) or extension in IMAGE_EXTENSIONS:
        raise ConfigError(f"{given} is no ending of a text file; write txt, or json:FIELD for a field in json")
    if colon and not field:
        raise ConfigError(f"{given} names no field; write {extension}:FIELD, as {extension}:caption")
    return extension, field


def caption_of(data: bytes, caption_key: str) -> str:
    """The caption in a file's bytes. BadRecord, whose reason counts it, where there is none that a model
    could learn."""
    extension, field = caption_place(caption_key)
    text = _decoded(data)
    value: Any = text
    if field or extension.rpartition(".")[2] == "json":
        value = json_of(text)
        if field and not isinstance(value, dict):
            said = f"the {extension} file holds no JSON object to take field {field!r} from"
            raise BadRecord(said, reason="bad json")
        value = _inside(value, field) if field else value
    elif text[:1] in ("{", "["):
        value = _structure(text)
    what = f"field {field!r}" if field else "the caption"
    if isinstance(value, dict | list) and not field:
        reason = "caption is JSON"
        said = f"the {extension} file holds JSON, not text; name the field, as {extension}:caption"
    elif field and value is None:
        reason, said = "missing field", f"has no field {field!r}"
    elif not isinstance(value, str):
        reason, said = "caption is no text", f"{what} is {json.dumps(value)[:40]}, not text"
    elif not value.strip():
        reason, said = "empty text", f"{what} is empty"
    elif SURROGATE.search(value):
        reason, said = "not UTF-8", f"{what} has half of a character (a lone surrogate)"
    elif "\0" in value:
        reason, said = "not UTF-8", f"{what} has zero bytes among its letters, as UTF-16; save it as UTF-8"
    else:
        return value.strip()
    raise BadRecord(said, reason=reason)


def json_of(data: bytes | str) -> Any:
    """What a JSON text says; BadRecord where it is none, or where an object has a key twice, of which one
    would be lost."""
    try:
        return json.loads(data if isinstance(data, str) else _decoded(data), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"its json cannot be read ({error})", reason="bad json") from None


def text_fields(value: Any, depth: int = DEPTH, before: str = "") -> Iterator[str]:
    """Names of the fields that hold text, as ``caption_key`` names them."""
    for name, inside in value.items() if isinstance(value, dict) and depth else ():
        if isinstance(inside, str) and inside.strip():
            yield before + name
        yield from text_fields(inside, depth - 1, f"{before}{name}.")


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig").strip()  # the mark that Windows programs put first is no letter
    except UnicodeDecodeError as error:
        place = f"byte 0x{data[error.start]:02x} at {error.start}"
        raise BadRecord(f"its text is not UTF-8 ({place}); save it as UTF-8", reason="not UTF-8") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {max(names, key=names.count)!r} stands there twice")
    return found


def _structure(text: str) -> Any:
    """The object of a text that is JSON, or its list of texts or objects; else the text: a caption may be
    ``[1]``."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) or any(isinstance(each, str | dict) for each in value) else text


def _inside(value: Any, field: str) -> Any:
    """The value of a field: of the whole name where an object has it, else of the name up to a dot and the
    rest inside."""
    if not isinstance(value, dict):
        return None
    if field in value:
        return value[field]
    head, _, rest = field.partition(".")
    return _inside(value.get(head), rest) if rest else None
