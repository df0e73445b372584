"""Runs tasks over a model: every document once, controls beside the score, results.json and one line a sample.

A score of generated answers stands beside three others from the same documents: the same model with the pictures shuffled
between documents, the majority answer, and the most frequent training answer to the same question text. What the model does not
gain over them it did not see. Processes share the documents out by number and join by key, so the scores of one process and of
many are the same rows (U64).
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mmkit.errors import InputError
from mmkit.storage import Store
from mmkit.data.example import Example
from mmkit.evaluation.metrics import interval, majority, priors
from mmkit.evaluation.task import Task
from mmkit.evaluation.zero_shot import Share

log = logging.getLogger(__name__)
Answer = Callable[[Sequence[Example], Any], list[str]]  # (requests, Decode) -> one generated text each
Progress = Callable[[str, int, int], None]  # (what, done, of)
PACKAGES = ("torch", "transformers", "timm", "open_clip_torch", "peft")


@dataclass(frozen=True)
class Result:
    """What one task gave: metrics overall and by group, the controls' metrics in the same form, and the rows."""

    task: str
    spec: dict[str, Any]
    spec_hash: str
    n: int
    main_metric: str
    metrics: dict[str, float]
    groups: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    controls: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    rows: tuple[dict, ...] = ()

    @property
    def score(self) -> float:
        """The main metric."""
        return self.metrics[self.main_metric]


def evaluate(
    task: Task,
    answer: Answer,
    *,
    batch: int = 16,
    limit: int | None = None,
    share: Share = Share(),
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Scores ``answer`` on the task's documents and its controls.

    ValueError where the documents are not complete, or where processes together did not score each exactly once.
    """
    started = time.perf_counter()
    documents = task.checked_documents(limit)
    targets = [target_of(example) for example in documents]
    rows = _scored(task, documents, documents, answer, batch, share, progress, "answers")
    controls = {}
    if task.shuffled_control and any(example.images for example in documents):
        wrong = shuffled(documents, seed)
        seen = _scored(task, wrong, documents, answer, batch, share, progress, "shuffled pictures")
        controls["shuffled"] = summary(task, seen)
        rows = [row | {"shuffled_answer": other["answer"]} for row, other in zip(rows, seen, strict=True)]
    if task.prior is not None:
        controls |= _blind_controls(task, documents, targets)
    return Result(
        task=task.name,
        spec=task.spec,
        spec_hash=task.spec_hash,
        n=len(rows),
        main_metric=task.main_metric,
        **summary(task, rows),
        controls=controls,
        seconds=time.perf_counter() - started,
        versions=versions(),
        rows=tuple(rows),
    )


def target_of(example: Example) -> str:
    """The text a right answer has: ``meta["answer"]``, else the last assistant turn."""
    if "answer" in example.meta:
        return str(example.meta["answer"])
    return next((turn.text for turn in reversed(example.turns) if turn.role == "assistant"), "")


def shuffled(documents: Sequence[Example], seed: int = 0) -> list[Example]:
    """The documents, each picture replaced by another document's: all questions of one picture get the same wrong one.

    ValueError where all documents show one picture, which leaves nothing to shuffle.
    """
    pictures = list(dict.fromkeys(example.images for example in documents if example.images))
    if len(pictures) < 2:
        raise InputError(f"{len(pictures)} different pictures cannot be shuffled; the control needs two")
    order = list(range(len(pictures)))
    random.Random(f"shuffled {seed}").shuffle(order)
    following = {order[i]: order[(i + 1) % len(order)] for i in range(len(order))}  # one cycle: nobody keeps its own
    replacement = {picture: pictures[following[place]] for place, picture in enumerate(pictures)}
    return [replace(example, images=replacement[example.images]) if example.images else example for example in documents]


def _scored(
    task: Task,
    asked: Sequence[Example],
    truth: Sequence[Example],
    answer: Answer,
    batch: int,
    share: Share,
    progress: Progress | None,
    what: str,
) -> list[dict]:
    """A row a document: ``asked`` is put to the model, ``truth`` scores it."""
    rows: dict[int, dict] = {}
    batches = share.numbers(len(asked), batch)
    for done, numbers in enumerate(batches, start=1):
        texts = answer([task.request(asked[i]) for i, _ in numbers], task.decode)
        for (i, counts), text in zip(numbers, texts, strict=True):
            if counts:
                rows[i] = sample_row(task, truth[i], text)
        if progress:
            progress(f"{task.name}: {what}", done, len(batches))
    return share.joined(rows, len(asked))


def sample_row(task: Task, example: Example, text: str) -> dict:
    """Everything known of one answered document, as JSON holds it."""
    return {
        "task": task.name,
        "key": example.key,
        "question": example.question,
        "answer": text,
        "target": target_of(example),
        "scores": task.process(example, text),
        "meta": {name: example.meta[name] for name in task.groups if name in example.meta},
    }


def summary(task: Task, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``metrics`` of all rows and ``groups``: field -> value -> metrics of those rows, with their count n."""
    groups: dict[str, dict] = {}
    for name in task.groups:
        members = defaultdict(list)
        for row in rows:
            if name in row["meta"]:
                members[str(row["meta"][name])].append(row)
        groups[name] = {value: task.aggregate(part) | {"n": len(part)} for value, part in sorted(members.items())}
    return {"metrics": task.aggregate(rows), "groups": groups}


def _blind_controls(task: Task, documents: Sequence[Example], targets: Sequence[str]) -> dict[str, dict]:
    """Scores of two answerers that see no picture: the majority training answer, and the prior of each question text."""
    training = task.prior()
    always = majority(answer for _, answer in training)
    by_question = priors(training)
    out = {}
    for name, say in (("majority", lambda example: always), ("prior", lambda example: by_question.get(example.question, always))):
        rows = [sample_row(task, example, say(example)) for example in documents]
        out[name] = summary(task, rows)
    return out


def versions() -> dict[str, str]:
    """Versions of the packages a score may depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


# ---------------------------------------------------------------- files


def write_results(folder: str | Path, results: Sequence[Result], extra: Mapping[str, Any] | None = None) -> str:
    """``results.json`` (all tasks) and ``samples.jsonl`` (a line a document) in ``folder``; each appears whole or not at all."""
    store = Store(folder)
    tree = {result.task: {name: value for name, value in asdict(result).items() if name != "rows"} for result in results}
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for result in results for row in result.rows)
    store.write("samples.jsonl", lines.encode())
    store.write("results.json", json.dumps({"tasks": tree, **(extra or {})}, indent=1, ensure_ascii=False).encode())
    return store.path("results.json")


def read_results(path: str | Path) -> dict[str, Any]:
    """The tree `write_results` wrote; ``path`` is the file or its folder."""
    return json.loads(Store(str(path).removesuffix("/results.json")).read("results.json"))


def table(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Rows for a table: task, group, n, the model's main metric with its 95% half width, and each control's."""
    lines = []
    for result in results:
        name = result.main_metric
        lines.append(_line(result, "all", result.n, result.metrics, {key: part["metrics"] for key, part in result.controls.items()}, name))
        for kind, values in result.groups.items():
            for value, metrics in values.items():
                controls = {key: part["groups"].get(kind, {}).get(value, {}) for key, part in result.controls.items()}
                lines.append(_line(result, value, int(metrics["n"]), metrics, controls, name))
    return lines


def _line(result: Result, group: str, n: int, metrics: Mapping, controls: Mapping[str, Mapping], name: str) -> dict[str, Any]:
    score = metrics.get(name)
    line = {"task": result.task, "group": group, "n": n, name: score, "+-": None if score is None else interval(score, n)}
    return line | {key: part.get(name) for key, part in controls.items()}


