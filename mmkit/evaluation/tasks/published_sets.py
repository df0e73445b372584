"""Cambrian-1's benchmarks as tasks over documents on disk: ``$MMKIT_EVAL_DATA/NAME.jsonl`` (default ``data/eval``), pictures beside it.

One JSON line a question: ``key``, ``image`` (a path from the file's folder, a list of them, or absent), ``question``, for multiple choice
``options``, and the fields the scorer reads (``gt_answer``; where the benchmark has them ``category``, ``type``, ``source_id``,
``text_options``, ``text_answer``). Prompts, decode lengths and scorers are those of `cambrian.BENCHMARKS`; another number of lines than
the published one is an error. Licences are the benchmarks' own; mmkit carries none of their files.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmkit.config import ConfigError
from mmkit.data.example import IMAGE, Example, ImageRef, Turn
from mmkit.errors import InputError
from mmkit.evaluation.task import Decode, Scores, Task
from mmkit.evaluation.tasks.cambrian import BENCHMARKS

# Questions of the complete split: arXiv 2406.16860 Table 20, GQA from its own release (testdev_balanced).
PUBLISHED_N = {
    "gqa": 12578, "scienceqa": 2017, "textvqa": 5000, "pope": 9000, "mme": 2374, "mmbench_en": 4377, "seed": 17990, "mmmu": 900,
    "mathvista": 1000, "ai2d": 3088, "chartqa": 2500, "ocrbench": 1000, "mmvp": 300, "realworldqa": 765,
}  # fmt: skip
MAIN = {"mmbench_en": "circular_accuracy", "mme": "Perception", "scienceqa": "multimodal_acc", "ocrbench": "total_accuracy"}


def path_of(name: str) -> Path:
    """Where the documents of a benchmark lie."""
    return Path(os.environ.get("MMKIT_EVAL_DATA", "data/eval")) / f"{name}.jsonl"


def available(name: str) -> None:
    """ConfigError that says what to put where, when the documents are not here."""
    if not path_of(name).is_file():
        raise ConfigError(
            f"task {name!r}: no documents at {path_of(name)}; write one JSON line a question of {BENCHMARKS[name].dataset} "
            f"({BENCHMARKS[name].split}) with key, image, question, gt_answer, or set MMKIT_EVAL_DATA"
        )


def documents(name: str) -> list[Example]:
    """All documents of a benchmark; ValueError naming the line that is not one."""
    path, found = path_of(name), []
    for number, line in enumerate(path.read_text(encoding="utf8").splitlines(), start=1):
        try:
            row = json.loads(line)
            found.append(_example(name, row, path.parent))
        except (ValueError, KeyError) as error:
            raise InputError(f"{path}, line {number}: {type(error).__name__} {error}; a line holds at least key and question") from None
    return found


def _example(name: str, row: Mapping[str, Any], folder: Path) -> Example:
    paths = row.get("image") or []
    images = tuple(ImageRef(folder / path) for path in ([paths] if isinstance(paths, str) else paths))
    turns = (Turn("user", IMAGE * len(images) + "\n" + question_of(name, row)), Turn("assistant", str(row.get("gt_answer", ""))))
    return Example(str(row["key"]), images, turns, source=name, meta=dict(row))


def question_of(name: str, row: Mapping[str, Any]) -> str:
    """The question as the originals ask it: text, lettered options, newline, the benchmark's suffix."""
    bench = BENCHMARKS[name]
    options = "".join(f"\n{letter}. {text}" for letter, text in zip("ABCDEFGHI", row.get("options") or (), strict=False))
    asked = row["question"] + (bench.options if options else "") + options
    return f"{asked}\n{bench.suffix}" if bench.suffix else asked


def nothing(example: Example, answer: str) -> Scores:
    """Rows carry no score of their own: these benchmarks are scored over all rows at once."""
    return {}


def aggregate(name: str, rows: Sequence[Mapping[str, Any]]) -> Scores:
    """The benchmark's metrics by their original names; categories as ``accuracy of NAME``."""
    by_key = {example.key: example.meta for example in documents(name)}
    scored = [by_key[row["key"]] | {"answer": row["answer"], "prediction": row["answer"]} for row in rows]
    out: Scores = {}
    for key, value in BENCHMARKS[name].score(scored).items():
        if isinstance(value, Mapping):
            headline = value.get("score", value.get("accuracy"))
            out[key if key == "total_accuracy" else f"accuracy of {key}"] = float(headline)
        else:
            out[key] = float(value)
    return out


def _task(name: str) -> Task:
    bench = BENCHMARKS[name]
    return Task(
        name=name,
        version=1,
        n_expected=PUBLISHED_N[name],
        documents=functools.partial(documents, name),
        process=nothing,
        main_metric=MAIN.get(name, "accuracy"),
        decode=Decode(max_new_tokens=bench.max_new_tokens),
        aggregate=functools.partial(aggregate, name),
        shuffled_control=False,
        available=functools.partial(available, name),
        facts={"source": bench.dataset, "split": bench.split, "suffix": bench.suffix, "options": bench.options},
    )


PUBLISHED_SETS = {name: _task(name) for name in PUBLISHED_N}
