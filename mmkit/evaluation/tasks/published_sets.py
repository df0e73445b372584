"""Cambrian-1's benchmarks as tasks over documents on disk: ``$MMKIT_EVAL_DATA/NAME.jsonl`` (default
``data/eval``), pictures beside it.

One JSON line a question: ``key``, ``image`` (a path from the file's folder; of a list the first, as in the
originals; null where there is none), ``question``, for multiple choice ``options``, where the set has one
``hint``, and the fields the scorer and the prompt need (`cambrian.Benchmark.needs`: ``gt_answer``,
``category``, TextVQA's ``ocr_tokens`` ...). Another number of lines than the complete split's, or a line
whose fields are missing or not what they must be, is an error before anything is asked. Prompts, decode
lengths and scorers are those of `cambrian.BENCHMARKS`. Where the original only writes a file for a server or
a judge (docvqa, infovqa, stvqa, mmvet; VizWiz's test rows), so does mmkit: ``submission-NAME.json`` beside
the results, and no score. Licences are the benchmarks' own; mmkit carries none of their files.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmkit.config import ConfigError
from mmkit.data.example import IMAGE, Example, ImageRef, Turn
from mmkit.errors import InputError
from mmkit.evaluation.documents import LETTERS, SHOWN, Kind, field_faults, listed, option_fault
from mmkit.evaluation.task import SCALE, Decode, Scores, Task
from mmkit.evaluation.tasks.cambrian import BENCHMARKS


def path_of(name: str) -> Path:
    """Where the documents of a benchmark lie."""
    return Path(os.environ.get("MMKIT_EVAL_DATA", "data/eval")) / f"{name}.jsonl"


def available(name: str) -> None:
    """ConfigError that says what to put where, when the documents are not here."""
    if not path_of(name).is_file():
        raise ConfigError(
            f"task {name!r}: no documents at {path_of(name).absolute()}; write one JSON line a question of "
            f"{BENCHMARKS[name].dataset} "
            f"({BENCHMARKS[name].split}) with {a_line_of(name)}, or set MMKIT_EVAL_DATA"
        )


def fields_of(name: str) -> dict[str, Kind]:
    """The fields that each line of a benchmark holds, with what they must be."""
    question = {} if BENCHMARKS[name].question else {"question": "text"}
    return {"key": "name", "image": "pictures"} | question | dict(BENCHMARKS[name].needs)


def a_line_of(name: str) -> str:
    """The fields of a line, for people."""
    return ", ".join(fields_of(name) | ({} if BENCHMARKS[name].options is None else {"options": "options"}))


def documents(name: str) -> tuple[Example, ...]:
    """All documents of a benchmark; InputError naming the lines that are none, and where their order has lost
    what belongs together."""
    path = path_of(name)
    return _read(name, path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=2)  # a task reads its documents again for every group it scores
def _read(name: str, path: Path, changed: int) -> tuple[Example, ...]:
    found, faults, n = [], [], 0
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        what_to_do = "write one JSON line a document"
        raise InputError(f"{path.absolute()} is no text in UTF-8 ({error}); {what_to_do}") from None
    # not splitlines: texts may hold its other line ends
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        n += 1
        try:
            row = json.loads(line)
            is_row = isinstance(row, dict)
            wrong = faults_of(name, row) if is_row else [f"a {type(row).__name__}, not an object"]
        except ValueError as error:
            wrong = [f"no JSON ({error})"]
        if wrong:
            faults.append(f"line {number}: {', '.join(wrong)}")
        else:
            found.append(_example(name, row, path.parent))
    if faults:
        told = listed(faults, n, "documents")
        raise InputError(f"{path.absolute()}: {told}. A line of {name} holds {a_line_of(name)}")
    if fault := order_fault(name, found):
        raise InputError(f"{path.absolute()}: {fault}")
    return tuple(found)


def faults_of(name: str, row: Mapping[str, Any]) -> list[str]:
    """What is wrong with a line: its fields, and the option that the truth names."""
    bench, fields = BENCHMARKS[name], fields_of(name)
    if bench.truth_of and row.get(bench.truth_of[0]) == bench.truth_of[1]:
        fields["gt_answer"] = bench.truth_of[2]
    found = field_faults(row, fields, {"options": "options", "hint": "hint"})
    if found:
        return found
    apart = bench.options is not None
    return [fault for fault in [option_fault(row, fields.get("gt_answer", ""), apart)] if fault]


def order_fault(name: str, found: Sequence[Example]) -> str:
    """What is wrong with the documents of a set whose questions count in pairs, "" where nothing is.

    MME asks two questions about each picture. MMVP asks each of its questions about two pictures, in lines
    that follow each other.
    """
    if name == "mme":
        pairs = Counter(groups_of(name, found))
        odd = [f"{kind}: {Path(picture).name} ({n})" for (kind, picture), n in pairs.items() if n != 2]
        count = f"{len(odd)} of {len(pairs)} pictures have not two questions: {'; '.join(odd[:SHOWN])}"
        rule = "In mme a picture of a category has two questions, and both name the same file"
        return f"{count}. {rule}" if odd else ""
    if name == "mmvp":
        asked = [example.meta["question"].strip().lower() for example in found]
        same = sum(one == other for one, other in zip(asked[::2], asked[1::2], strict=False))
        count = f"only {same} of {len(found) // 2} pairs of lines ask one question"
        rule = (
            "In mmvp lines 1 and 2, 3 and 4, ... ask one question about two pictures; put them in the order "
            "of Questions.csv (Index)"
        )
        return f"{count}. {rule}" if same * 2 < len(found) // 2 else ""
    return ""


def groups_of(name: str, found: Sequence[Example]) -> list[Any]:
    """For each document what names those it counts together with."""
    pictures = [example.images[0].identity if example.images else example.key for example in found]
    rows = [each.meta | {"picture": picture} for each, picture in zip(found, pictures, strict=True)]
    return BENCHMARKS[name].together(rows)


def _example(name: str, row: Mapping[str, Any], folder: Path) -> Example:
    paths = row["image"] or []
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
            f"\n{letter}. {text}" for letter, text in zip(LETTERS, row["options"], strict=False)
        )
    if "ocr_tokens" in bench.needs:
        asked += "\nReference OCR tokens:" + ",".join(f" {token}" for token in row["ocr_tokens"])
    kind, own = bench.suffix_of or ("", "")
    suffix = own if kind and row["type"] == kind else bench.suffix
    asked = f"{asked}\n{suffix}" if suffix else asked
    return re.sub(r"<image \d+>", "", asked).rstrip() if name == "mmmu" else asked


def process(name: str, example: Example, answer: str) -> Scores:
    """How right the answer is, 0 to 1, and the set's further scores; nothing where only others can score."""
    bench, row = BENCHMARKS[name], example.meta | {"answer": answer, "prediction": answer}
    rules = {} if bench.right is None else {"correct": bench.right} | dict(bench.also)
    return {score: float(rule(row)) for score, rule in rules.items()}


def joined(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict], list[float]]:
    """Rows as the original scorer reads them, documents' fields and answers, and how right each is. Those
    that count together follow each other, as they do in the original's files."""
    by_key = {example.key: example.meta for example in documents(name)}
    answered = [
        by_key[row["key"]] | {"answer": row["answer"], "prediction": row["answer"], "picture": row["picture"]}
        for row in rows
    ]
    right = [row["scores"].get("correct", 0.0) for row in rows]
    if BENCHMARKS[name].together:
        groups = BENCHMARKS[name].together(answered)
        first = {group: place for place, group in reversed(list(enumerate(groups)))}
        order = sorted(range(len(rows)), key=lambda place: first[groups[place]])
        answered, right = [answered[place] for place in order], [right[place] for place in order]
    return answered, right


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
    for score in bench.also:
        out[score] = SCALE[bench.unit] * sum(row["scores"][score] for row in rows) / len(rows)
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
        together=functools.partial(groups_of, name) if bench.together else None,
        available=functools.partial(available, name),
        facts=facts
        | {
            "suffix_of": bench.suffix_of,
            "question": bench.question,
            "asked": sorted({"ocr_tokens"} & set(bench.needs)),
        },
    )


PUBLISHED_SETS = {name: _task(name) for name in BENCHMARKS}
