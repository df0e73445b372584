"""One record of a data file, with a tick at each key that was read: what has no tick is told, never lost in
silence.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping
from numbers import Number
from typing import Any

import numpy as np

from mmkit.data.example import BadRecord

# texts with which tables write that a cell holds nothing; "none" may be an answer
NOTHING = {"", "nan", "[]", "{}"}
LISTED = 12  # keys of a record that a message names
# Keys that say where a record comes from or how it is filed; a model has nothing to learn from them. Names
# are compared in lower case with "_" between words; what ends in "_id" or "_url" belongs here too.
METADATA = frozenset(
    "id key index idx qid pid uid uuid imageid questionid url source source_dataset data_source "
    "dataset dataset_name origin split set set_name version category l2_category subcategory class "
    "task tasks task_type type question_type question_types answer_type data_type img_type image_type "
    "topic topic_difficulty subject subfield skill grade level difficulty difficult_direct_answer "
    "language lang license licence author model generator width height image_width image_height "
    "image_w image_h sha256 md5 hash score similarity clip_score clipscore punsafe pwatermark "
    "timestamp date created_at meta metadata human_or_machine n_turns num_turns length".split()
)


class Record:
    """The fields of a record and which of them were read. ``key`` and ``source`` name it in messages,
    relative picture paths start from ``folder``.
    """

    def __init__(self, fields: Mapping[str, Any], key: str, source: str, folder: str | None):
        self.fields, self.key, self.source, self.folder = fields, key, source, folder
        self.read: set[str] = set()
        self.notes: list[
            str
        ] = []  # what was chosen or left out, in words that follow a count: "records have ..."

    def take(self, *names: str) -> Any:
        """The first of these fields that holds something, from now on read; None where none does."""
        name = next((name for name in names if not holds_nothing(self.fields.get(name))), None)
        if name is None:
            return None
        self.read.add(name)
        return self.fields[name]

    def bad(self, message: str, reason: str) -> BadRecord:
        """The error that says why this record cannot be used."""
        return BadRecord(message, key=self.key, source=self.source, reason=reason)

    def note(self, what: str) -> None:
        """Remembers, once, what became of a part of the record."""
        if what not in self.notes:
            self.notes.append(what)

    def note_unread(self, fields: Mapping[str, Any], read: Collection[str], inside: str = "") -> None:
        """Notes every field that holds something, was not ``read`` and is no metadata."""
        for name, value in fields.items():
            if name in read or holds_nothing(value):
                continue
            plain = str(name).lower().replace("-", "_").replace(" ", "_")
            filed = (
                plain in METADATA
                or plain.endswith(("_id", "_ids", "_url"))
                or str(name).endswith(("Id", "ID"))
            )
            if not filed:
                self.note(f"records have key {inside + str(name)[:60]!r} that is not read")

    def text(self, value: Any, what: str) -> str:
        """A text, or a number as it is written; BadRecord for all else: a model must not learn words such
        as None.
        """
        if isinstance(value, str) or (isinstance(value, Number) and value == value):
            text = str(value)
            if text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text):
                return text
            raise self.bad(
                f"its {what} has half of a surrogate pair, which no tokenizer reads: {value!a:.60}", "no text"
            )
        raise self.bad(f"its {what} is {shown(value)}, not text", "no text")

    def field_names(self) -> str:
        """The record's keys for a message, the empty ones marked."""
        names = [
            f"{str(name)[:40]}{' (null)' if value is None else ''}" for name, value in self.fields.items()
        ]
        more = f", ... {len(names):,} in all" if len(names) > LISTED else ""
        return (", ".join(sorted(names)[:LISTED]) or "nothing") + more


def holds_nothing(value: Any) -> bool:
    """Whether a field is null, not a number, empty, a list of nothing, or one of the texts with which
    tables write that.
    """
    if isinstance(value, str):
        return value.strip().lower() in NOTHING
    if isinstance(value, list | tuple):
        return all(map(holds_nothing, value))
    if isinstance(value, dict | bytes | np.ndarray):
        return not (value.size if isinstance(value, np.ndarray) else value)
    return value is None or (isinstance(value, float) and value != value)


def shown(value: Any) -> str:
    """At most 40 characters of a value, for a message."""
    return "null" if value is None else f"{str(value)[:80] if isinstance(value, str) else value!r:.40}"


def parsed(text: str) -> Any:
    """What a text holds that is written as JSON or as a Python literal; the text itself where it is
    neither.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
