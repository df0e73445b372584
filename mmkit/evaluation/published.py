"""Published benchmark scores, to stand beside reached ones.

The numbers are those of the Cambrian-1 main results table (``cambrian_benchmarks.csv``, source in its first
lines). Nothing is copied into code.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

TABLE = ("mmkit.figures.data", "cambrian_benchmarks.csv")
PRESETS = MappingProxyType({"8b": "Cambrian-1-8B", "13b": "Cambrian-1-13B", "34b": "Cambrian-1-34B"})
COLUMNS = MappingProxyType({  # task -> column of the table, where the names differ
    "mme": "mme_p", "mmbench_en": "mmb", "seed": "seed_i", "scienceqa": "sqa_i", "mmmu": "mmmu_v",
    "mathvista": "mathvista_m", "omni": "cvbench_3d",
})  # fmt: skip
NO_SCORE = (
    "model",
    "base_llm",
    "vis_tokens",
    "general_avg",
    "knowledge_avg",
    "ocr_chart_avg",
    "vision_centric_avg",
)


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


def published_score(preset: str, task: str, unit: str) -> float | None:
    """What the published model of this preset scored on a task, in ``unit``; None for other presets and
    tasks.

    The table has percent, and MME's points; a fraction is a hundredth of its percent.
    """
    score = benchmarks().get(PRESETS.get(preset, ""), {}).get(COLUMNS.get(task, task))
    return score if score is None or unit != "fraction" else score / 100
