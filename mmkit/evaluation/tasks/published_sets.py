"""Cambrian-1's benchmarks as tasks over documents on disk: ``$MMKIT_EVAL_DATA/NAME.jsonl`` (default
``data/eval``), pictures beside it.

One JSON line a question: ``key``, ``image`` (a path from the file's folder; of a list the first, as in the
originals; or absent), ``question``, for multiple choice ``options``, where the set has one ``hint``, and the
fields the scorer and the prompt need (`cambrian.Benchmark.needs`: ``gt_answer``, ``category``, TextVQA's
``ocr_tokens`` ...). Another number of lines than the complete split's, or a line without one of these fields,
is an error. Prompts, decode lengths and scorers are those of `cambrian.BENCHMARKS`. Where the original only
writes a file for a server or a judge (docvqa, infovqa, stvqa, mmvet; VizWiz's test rows), so does mmkit:
``submission-NAME.json`` beside the results, and no score. Licences are the benchmarks' own; mmkit carries
none of their files.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmkit.config import ConfigError
from mmkit.data.example import IMAGE, Example, ImageRef, Turn
from mmkit.errors import InputError
from mmkit.evaluation.task import Decode, Scores, Task
from mmkit.evaluation.tasks.cambrian import BENCHMARKS


def path_of(name: str) -> Path:
    """Where the documents of a benchmark lie."""
    return Path(os.environ.get("MMKIT_EVAL_DATA", "data/eval")) / f"{name}.jsonl"


def available(name: str) -> None:
    """ConfigError that says what to put where, when the documents are not here."""
    if not path_of(name).is_file():
        raise ConfigError(
            f"task {name!r}: no documents at {path_of(name)}; write one JSON line a question of {BENCHMARKS[name].dataset} "
            f"({BENCHMARKS[name].split}) with key, image, question, {', '.join(BENCHMARKS[name].needs)}, or set MMKIT_EVAL_DATA"
        )


def documents(name: str) -> tuple[Example, ...]:
    """All documents of a benchmark; InputError naming the line that is not one."""
    path = path_of(name)
    return _read(name, path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=2)  # a task reads its documents again for every group it scores
def _read(name: str, path: Path, changed: int) -> tuple[Example, ...]:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf8").splitlines(), start=1):
        try:
            found.append(_example(name, json.loads(line), path.parent))
        except (ValueError, KeyError) as error:
            needed = ", ".join(
                ("key", *(() if BENCHMARKS[name].question else ("question",)), *BENCHMARKS[name].needs)
            )
            raise InputError(
                f"{path}, line {number}: {type(error).__name__} {error}; a line of {name} holds at least {needed}"
            ) from None
    return tuple(found)


def _example(name: str, row: Mapping[str, Any], folder: Path) -> Example:
    for field in BENCHMARKS[name].needs:
        row[field]  # a missing one is a KeyError now, not after hours of answering
    paths = row.get("image") or []
    images = tuple(ImageRef(folder / path) for path in ([paths] if isinstance(paths, str) else paths)[:1])
    turns = (
        Turn("user", f"{IMAGE}\n" * len(images) + question_of(name, row)),
        Turn("assistant", str(row.get("gt_answer", ""))),
    )
    return Example(str(row["key"]), images, turns, source=name, meta=dict(row))


def question_of(name: str, row: Mapping[str, Any]) -> str:
    """The question as the original asks it: hint, text, lettered options or OCR tokens, newline, the
    benchmark's suffix.

    MMMU's "<image 1>" tags are dropped; MMMU's open questions and MathVista's multiple choice have a suffix
    of their own.
    """
    bench = BENCHMARKS[name]
    asked = bench.question or row["question"]
    if bench.hint and row.get("hint") not in (None, "", "nan"):  # "nan": how MMBench writes none
        asked = row["hint"] + bench.hint + asked
    if bench.options is not None and row.get("options"):
        asked += bench.options + "".join(
            f"\n{letter}. {text}" for letter, text in zip("ABCDEFGHI", row["options"], strict=False)
        )
    if "ocr_tokens" in bench.needs:
        asked += "\nReference OCR tokens:" + ",".join(f" {token}" for token in row["ocr_tokens"])
    kind, own = bench.suffix_of or ("", "")
    suffix = own if kind and row["type"] == kind else bench.suffix
    asked = f"{asked}\n{suffix}" if suffix else asked
    return re.sub(r"<image \d+>", "", asked).rstrip() if name == "mmmu" else asked


def process(name: str, example: Example, answer: str) -> Scores:
    """How right the answer is, 0 to 1; nothing where only others can score."""
    right = BENCHMARKS[name].right
    return (
        {}
        if right is None
        else {"correct": float(right(example.meta | {"answer": answer, "prediction": answer}))}
    )


def joined(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict], list[float]]:
    """Rows as the original scorer reads them, documents' fields and answers, and how right each is."""
    by_key = {example.key: example.meta for example in documents(name)}
    answered = [
        by_key[row["key"]] | {"answer": row["answer"], "prediction": row["answer"], "picture": row["picture"]}
        for row in rows
    ]
    return answered, [row["scores"].get("correct", 0.0) for row in rows]


def aggregate(name: str, rows: Sequence[Mapping[str, Any]]) -> Scores:
    """The benchmark's metrics by their original names; categories as ``accuracy of NAME``."""
    bench = BENCHMARKS[name]
    if bench.right is None:
        return {"total": float(len(rows))}
    out: Scores = {}
    for key, value in bench.reduce(*joined(name, rows)).items():
        if isinstance(value, Mapping):
            headline = value.get("score", value.get("accuracy"))
            out[key if key == bench.main else f"accuracy of {key}"] = float(headline)
        else:
            out[key] = float(value)
    return out


def trials(name: str, rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    """What the main metric is the mean of (questions, pairs, rotations), with the picture of each."""
    return [(value, row["picture"]) for value, row in BENCHMARKS[name].trials(*joined(name, rows))]


def submission(name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    """The file the benchmark's server or judge takes, as the original writes it."""
    return BENCHMARKS[name].submit(joined(name, rows)[0])


def _task(name: str) -> Task:
    bench = BENCHMARKS[name]
    facts = {
        "source": bench.dataset,
        "split": bench.split,
        "suffix": bench.suffix,
        "options": bench.options,
        "hint": bench.hint,
    }
    return Task(
        name=name,
        # 1: other prompts for five sets, half of MMVP's score; 2: MMMU's and MathVista's 5% were of the truth,
        # ScienceQA's options kept their punctuation, AI2D took no numbers
        version=3,
        n_expected=bench.n,
        documents=functools.partial(documents, name),
        process=functools.partial(process, name),
        main_metric=bench.main,
        decode=Decode(max_new_tokens=bench.max_new_tokens),
        aggregate=functools.partial(aggregate, name),
        unit=bench.unit,
        trials=functools.partial(trials, name) if bench.trials else None,
        submit=functools.partial(submission, name) if bench.submit else None,
        scored_by=bench.scored_by,
        shuffled_control=False,
        available=functools.partial(available, name),
        facts=facts
        | {
            "suffix_of": bench.suffix_of,
            "question": bench.question,
            "asked": sorted({"ocr_tokens"} & set(bench.needs)),
        },
    )


PUBLISHED_SETS = {name: _task(name) for name in BENCHMARKS}
