"""A benchmark as a value: which documents, what is asked, how it is decoded, how an answer becomes numbers.

Everything that can change a score is in the spec, whose hash is stored with every result: two results may be
compared where the hashes agree, and `differences` says where they do not.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mmkit.config import nearest
from mmkit.data.example import Example, ImageRef, Turn
from mmkit.errors import InputError
from mmkit.evaluation.metrics import interval

Scores = dict[str, float]
Unit = Literal[
    "fraction", "percent", "points"
]  # of a main metric: 0 to 1, 0 to 100, or a sum that is no mean of documents
SCALE: Mapping[str, float] = {"fraction": 1.0, "percent": 100.0}


@dataclass(frozen=True)
class Decode:
    """How an answer is generated; temperature 0 is greedy."""

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0


def own_visuals(example: Example) -> tuple[ImageRef, ...]:
    """The example's pictures."""
    return example.images


def own_prompt(example: Example) -> tuple[Turn, ...]:
    """The example's turns up to the answer that is asked for."""
    turns = example.turns
    return turns[:-1] if turns and turns[-1].role == "assistant" else turns


def means(rows: Sequence[Mapping[str, Any]]) -> Scores:
    """The mean of every score over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row["scores"])
    values = {name: [row["scores"][name] for row in rows if name in row["scores"]] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}


@dataclass(frozen=True)
class Task:
    """One benchmark of generated answers.

    ``documents()`` gives all of them; ``n_expected`` is how many a complete set has (one of several numbers,
    where its scorer takes several), another number is an error. ``process(example, answer)`` scores one
    answer, ``aggregate(rows)`` all of them (rows hold key, picture, answer, target, scores, meta); the main
    metric is in ``unit``, in the scale of the original scorer. ``trials(rows)`` says what the main metric is
    the mean of, as (value between 0 and 1, picture): by default every row. ``groups`` names meta fields whose
    values are scored apart. ``prior`` gives the (question, answer) pairs of training, for controls that see
    no picture. ``submit(rows)`` makes the file ``scored_by`` takes where this benchmark is not scored here
    (main metric "").
    """

    name: str
    version: int
    n_expected: int | tuple[int, ...]
    documents: Callable[[], Sequence[Example]]
    process: Callable[[Example, str], Scores]
    main_metric: str
    decode: Decode = Decode()
    visuals: Callable[[Example], tuple[ImageRef, ...]] = own_visuals
    prompt: Callable[[Example], tuple[Turn, ...]] = own_prompt
    aggregate: Callable[[Sequence[Mapping[str, Any]]], Scores] = means
    unit: Unit = "fraction"
    trials: Callable[[Sequence[Mapping[str, Any]]], list[tuple[float, str]]] | None = None
    submit: Callable[[Sequence[Mapping[str, Any]]], Any] | None = None
    scored_by: str = ""
    groups: tuple[str, ...] = ()
    prior: Callable[[], Sequence[tuple[str, str]]] | None = None
    shuffled_control: bool = True
    pack: str = ""  # the offline pack that the documents come from, which is made when it is first opened
    # for each document what names those it counts together with
    together: Callable[[Sequence[Example]], Sequence[Hashable]] | None = None
    available: Callable[[], None] = lambda: (
        None
    )  # raises ConfigError, before weights are read, where documents must be put somewhere first
    facts: Mapping[str, Any] = field(
        default_factory=dict
    )  # split, prompt suffix, normaliser, source ... : part of the spec

    def checked_documents(self, limit: int | None = None) -> list[Example]:
        """All documents, or ``limit`` of them in their order; InputError where the set is not complete.

        Where a control shuffles pictures, or kinds of question are scored apart, the limited ones are the
        first of a fixed shuffle: the first in order would be questions about one picture. Documents that
        count together come together, so there may be some more than ``limit``.
        """
        found = list(self.documents())
        wanted = self.n_expected if isinstance(self.n_expected, tuple) else (self.n_expected,)
        if len(found) not in wanted:
            raise InputError(
                f"task {self.name}: {len(found)} documents found, {' or '.join(map(str, wanted))} expected; "
                f"the split is wrong or files are missing"
            )
        if len({example.key for example in found}) != len(found):
            raise InputError(f"task {self.name}: keys of documents repeat; results are joined by key")
        if limit is None or limit >= len(found):
            return found
        order = list(range(len(found)))
        if self.shuffled_control or self.groups:
            random.Random(f"limit {self.name}").shuffle(order)
        chosen = set(order[:limit])
        if self.together:
            groups = self.together(found)
            wanted = {groups[place] for place in chosen}
            chosen = {place for place, group in enumerate(groups) if group in wanted}
        return [found[place] for place in sorted(chosen)]

    def correctness(self, scores: Mapping[str, float]) -> float | None:
        """How right one row is by the scores that `process` gave it, 0 to 1; None where rows have no score of
        their own.
        """
        return scores.get(self.main_metric, scores.get("correct"))

    def interval(self, rows: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
        """95% interval (low, high) of the main metric over these rows, in its unit; None for points, which
        are no mean.
        """
        if self.unit not in SCALE:
            return None
        trials = (
            self.trials(rows)
            if self.trials
            else [(self.correctness(row["scores"]), row["picture"]) for row in rows]
        )
        trials = [(value, picture) for value, picture in trials if value is not None]
        if not trials:
            return None
        low, high = interval([value for value, _ in trials], [picture for _, picture in trials])
        return low * SCALE[self.unit], high * SCALE[self.unit]

    @property
    def spec(self) -> dict[str, Any]:
        """Everything a score depends on but the model: plain values, functions as name and hash of their
        source.
        """
        functions = {
            name: _fingerprint(getattr(self, name))
            for name in ("documents", "process", "visuals", "prompt", "aggregate")
        }
        return {
            "name": self.name,
            "version": self.version,
            "n_expected": self.n_expected,
            "main_metric": self.main_metric,
            "unit": self.unit,
            "decode": vars(self.decode),
            "groups": list(self.groups),
            **functions,
            **self.facts,
        }

    @property
    def spec_hash(self) -> str:
        """Twelve hex digits that change with anything in the spec."""
        return hash_of(self.spec)

    def request(self, example: Example) -> Example:
        """The example as it is asked: the task's pictures and prompt, without the answer."""
        turns = self.prompt(example)
        asked = sum(turn.text.count("<region") for turn in turns)
        return Example(
            example.key, self.visuals(example), turns, example.regions[:asked], example.source, example.meta
        )


def hash_of(spec: Mapping[str, Any]) -> str:
    """Twelve hex digits of a spec."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _fingerprint(function: Callable) -> str:
    inner = getattr(function, "func", function)
    try:
        source = inspect.getsource(inner)
    except (OSError, TypeError):
        source = ""
    bound = [getattr(function, "args", ()), getattr(function, "keywords", {})]
    digest = hashlib.sha256(f"{source}{bound}".encode()).hexdigest()[:8]
    return f"{inner.__module__.rsplit('.', 1)[-1]}.{inner.__qualname__} {digest}"


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """One line for each field in which two specs differ; empty where their scores may be compared."""
    lines = []
    for name in dict.fromkeys((*one, *other)):
        here, there = one.get(name, "(absent)"), other.get(name, "(absent)")
        if here != there:
            lines.append(f"{name}: {here!r} against {there!r}")
    return lines


def find(name: str, table: Mapping[str, Any]) -> Any:
    """The task of that name; ValueError naming the nearest one otherwise."""
    if name not in table:
        raise InputError(f"no task {name!r}{nearest(name, table)}; tasks are {', '.join(table)}")
    return table[name]
