"""Published benchmark scores beside reached ones, with the difference and what it may be compared on.

The numbers are those of the Cambrian-1 main results table (``cambrian_benchmarks.csv``, source in its first lines). Nothing is
copied into code: a model or benchmark that the table lacks is refused by name.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

from mmkit.config import nearest
from mmkit.errors import InputError

TABLE = ("mmkit.figures.data", "cambrian_benchmarks.csv")
PRESETS = MappingProxyType({"8b": "Cambrian-1-8B", "13b": "Cambrian-1-13B", "34b": "Cambrian-1-34B"})
NO_SCORE = ("model", "base_llm", "vis_tokens", "general_avg", "knowledge_avg", "ocr_chart_avg", "vision_centric_avg")


@functools.cache
def benchmarks() -> Mapping[str, Mapping[str, float]]:
    """model -> benchmark -> published score, benchmarks that were not reported left out."""
    text = resources.files(TABLE[0]).joinpath(TABLE[1]).read_text(encoding="utf8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    table = {}
    for record in csv.DictReader(lines):
        scores = {name: float(value) for name, value in record.items() if name not in NO_SCORE and value}
        table[record["model"]] = MappingProxyType(scores)
    return MappingProxyType(table)


def published(model: str) -> Mapping[str, float]:
    """Published scores of a preset (``8b``) or of a model by its printed name; ValueError naming the nearest one otherwise."""
    name = PRESETS.get(model, model)
    if name not in benchmarks():
        raise InputError(f"no published scores of {model!r}{nearest(model, (*PRESETS, *benchmarks()))}")
    return benchmarks()[name]


def beside(reached: Mapping[str, float], model: str) -> list[dict[str, Any]]:
    """A row a benchmark: the published score, the reached one (None where not run) and their difference, as in the table's scale."""
    known = published(model)
    if unknown := sorted(set(reached) - set(known)):
        raise InputError(f"{model} has no published score on {unknown[0]!r}{nearest(unknown[0], known)}")
    rows = []
    for name, score in known.items():
        got = reached.get(name)
        rows.append({"benchmark": name, "published": score, "reached": got, "difference": None if got is None else got - score})
    return rows
