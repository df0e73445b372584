"""Runs tasks over a model: every document once, controls beside the score, results.json and one line a
sample.

A score of generated answers stands beside three others from the same documents: the same model with the
pictures shuffled between documents, the majority answer, and the most frequent training answer to the same
question text. What the model does not gain over them it did not see. Processes share the documents out by
number and join by key, so the scores of one process and of many are the same rows.

A folder's results.json keeps every result: one is replaced only by another of the same task, spec and number
of documents.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mmkit.data.example import REGION_MARKER, Example
from mmkit.errors import InputError
from mmkit.evaluation.metrics import majority, priors
from mmkit.evaluation.task import Task, Unit, differences
from mmkit.evaluation.zero_shot import Share
from mmkit.folder_lock import FolderLock
from mmkit.storage import Store, is_remote

Answer = Callable[[Sequence[Example], Any], list[str]]  # (requests, Decode) -> one generated text each
Progress = Callable[[str, int, int], None]  # (what, done, of)
PATIENCE = 60.0  # seconds to wait for another process that writes results
PACKAGES = ("torch", "transformers", "timm", "open_clip_torch", "peft")


@dataclass(frozen=True)
class Result:
    """What one task gave: metrics overall and by group, the controls' metrics in the same form, and the rows.

    ``unit`` is that of the main metric and ``interval`` its 95% interval (low, high) in that unit, None where
    it has none; groups hold theirs as ``low`` and ``high``. ``n`` of ``n_total`` documents were scored.
    ``notes`` say what a reader must know.
    """

    task: str
    spec: dict[str, Any]
    spec_hash: str
    n: int
    main_metric: str
    metrics: dict[str, float]
    groups: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    controls: dict[str, dict[str, Any]] = field(default_factory=dict)
    interval: tuple[float, float] | None = None
    unit: Unit = "fraction"
    n_total: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    rows: tuple[dict, ...] = ()
    submission: Any = None

    @property
    def score(self) -> float | None:
        """The main metric; None where only a server or a judge can score."""
        return self.metrics.get(self.main_metric)



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

    ValueError where the documents are not complete, or where processes together did not score each exactly
    once.
    """
    started = time.perf_counter()
    everything = task.checked_documents()
    documents = everything if limit is None else task.checked_documents(limit)
    targets = [target_of(example) for example in documents]
    rows = _scored(task, documents, documents, answer, batch, share, progress, "answers")
    controls, notes, submission = {}, [], None
    if len(documents) < len(everything):
        notes.append(f"{task.name}: {len(documents)} of {len(everything)} documents")
    if task.shuffled_control and (pictures := {example.images for example in documents if example.images}):
        if len(pictures) > 1:
            wrong = shuffled(documents, seed)
            seen = _scored(task, wrong, documents, answer, batch, share, progress, "shuffled pictures")
            controls["shuffled"] = summary(task, seen)
            rows = [row | {"shuffled_answer": other["answer"]} for row, other in zip(rows, seen, strict=True)]
        else:
            notes.append(f"{task.name}: no control with shuffled pictures, all documents show one picture")
    if task.prior is not None:
        controls |= _blind_controls(task, documents, targets)
    if task.submit and len(documents) == len(everything) and (submission := task.submit(rows)):
        notes.append(f"{task.name}: submission-{task.name}.json is what {task.scored_by} scores")
    elif task.submit and not task.main_metric:
        notes.append(
            f"{task.name}: {task.scored_by} scores complete sets only, so no submission file is written"
        )
    return Result(
        task=task.name,
        spec=task.spec,
        spec_hash=task.spec_hash,
        n=len(rows),
        main_metric=task.main_metric,
        **summary(task, rows),
        controls=controls,
        unit=task.unit,
        n_total=len(everything),
        notes=tuple(notes),
        seconds=time.perf_counter() - started,
        versions=versions(),
        rows=tuple(rows),
        submission=submission,
    )


def target_of(example: Example) -> str:
    """The text a right answer has: ``meta["answer"]``, else the last assistant turn, regions written as their
    coordinates.
    """
    if "answer" in example.meta:
        return str(example.meta["answer"])
    last = max((place for place, turn in enumerate(example.turns) if turn.role == "assistant"), default=None)
    if last is None:
        return ""
    before = sum(len(REGION_MARKER.findall(turn.text)) for turn in example.turns[:last])
    regions = iter(example.regions[before:])
    return REGION_MARKER.sub(lambda marker: next(regions).text, example.turns[last].text)


def shuffled(documents: Sequence[Example], seed: int = 0) -> list[Example]:
    """The documents, each picture replaced by another document's: all questions of one picture get the same
    wrong one.

    ValueError where all documents show one picture, which leaves nothing to shuffle.
    """
    pictures = list(dict.fromkeys(example.images for example in documents if example.images))
    if len(pictures) < 2:
        raise InputError(f"{len(pictures)} different pictures cannot be shuffled; the control needs two")
    order = list(range(len(pictures)))
    random.Random(f"shuffled {seed}").shuffle(order)
    following = {
        order[i]: order[(i + 1) % len(order)] for i in range(len(order))
    }  # one cycle: nobody keeps its own
    replacement = {picture: pictures[following[place]] for place, picture in enumerate(pictures)}
    return [
        replace(example, images=replacement[example.images]) if example.images else example
        for example in documents
    ]


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
    scores = task.process(example, text)
    right = task.correctness(scores)
    return {
        "task": task.name,
        "key": example.key,
        "picture": example.images[0].identity if example.images else example.key,
        "question": example.question,
        "answer": text,
        "target": target_of(example),
        "scores": scores,
        "right": None if right is None else right >= 0.5,
        "meta": {name: example.meta[name] for name in task.groups if name in example.meta},
    }


def summary(task: Task, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``metrics`` and ``interval`` of all rows and ``groups``: field -> value -> metrics of those rows, their
    count n, low and high.
    """
    groups: dict[str, dict] = {}
    for name in task.groups:
        members = defaultdict(list)
        for row in rows:
            if name in row["meta"]:
                members[str(row["meta"][name])].append(row)
        groups[name] = {}
        for value, part in sorted(members.items()):
            found = task.interval(part)
            bounds = {} if found is None else {"low": found[0], "high": found[1]}
            groups[name][value] = task.aggregate(part) | {"n": len(part)} | bounds
    return {"metrics": task.aggregate(rows), "groups": groups, "interval": task.interval(rows)}


def _blind_controls(task: Task, documents: Sequence[Example], targets: Sequence[str]) -> dict[str, dict]:
    """Scores of two answerers that see no picture: the majority training answer, and the prior of each
    question text.
    """
    training = task.prior()
    always = majority(answer for _, answer in training)
    by_question = priors(training)
    out = {}
    for name, say in (
        ("majority", lambda example: always),
        ("prior", lambda example: by_question.get(example.question, always)),
    ):
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


def write_results(
    folder: str | Path, results: Sequence[Result], extra: Mapping[str, Any] | None = None
) -> str:
    """Adds ``results`` to ``results.json`` and ``samples.jsonl`` (a line a document) in ``folder``; each
    appears whole or not at all.

    ``extra`` is kept with each of them; its ``export`` says what was scored. A stored result of the same task,
    spec, number of documents and export is replaced, all others stay. Files for servers and judges are
    ``submission-TASK.json``. Returns the path of results.json. One process writes at a time; ConfigError
    where another does not end.
    """
    store, extra = Store(folder), dict(extra or {})
    named = {
        result.task: {"task": result.task, "spec_hash": result.spec_hash, "n": result.n}
        | {name: extra[name] for name in ("export",) if name in extra}
        for result in results
    }
    replaced = {_key(tree) for tree in named.values()}
    lock = FolderLock(store, "writes results in it")
    # two evaluations of one run may end a task in the same second: each would write over the other's
    lock.take(patience=PATIENCE)
    try:
        kept = [tree for tree in read_results(folder)["results"] if _key(tree) not in replaced]
        lines = [
            json.dumps(row, ensure_ascii=False) for row in _read_samples(folder) if _key(row) not in replaced
        ]
        new = []
        for result in results:
            tree = asdict(replace(result, rows=(), submission=None))
            tree = {name: value for name, value in tree.items() if name not in ("rows", "submission")}
            new.append(tree | extra | {"when": time.strftime("%Y-%m-%d %H:%M:%S")})
            lines += [json.dumps(named[result.task] | row, ensure_ascii=False) for row in result.rows]
            if result.submission:
                text = json.dumps(result.submission, ensure_ascii=False)
                store.write(f"submission-{result.task}.json", text.encode())
        store.write("samples.jsonl", "".join(line + "\n" for line in lines).encode())
        text = json.dumps({"results": kept + new}, indent=1, ensure_ascii=False)
        store.write("results.json", text.encode())
    finally:
        lock.release()
    return store.path("results.json")


def read_results(path: str | Path) -> dict[str, Any]:
    """What `write_results` wrote, {"results": [one tree a result]}; none where nothing was. ``path`` is the
    file or its folder.

    Files of earlier versions, which held one result a task, are read in the same form. InputError where the
    file is damaged.
    """
    store = Store(str(path).removesuffix("/results.json"))
    if store.size("results.json") is None:
        return {"results": []}
    try:
        stored = json.loads(store.read("results.json"))
        if "tasks" in stored:  # of an earlier version: the headline is computed anew
            shared = {name: stored[name] for name in ("export", "preset") if name in stored}
            stored = {"results": [tree | shared for tree in stored["tasks"].values()]}
        for tree in stored["results"]:
            _key(tree)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{store.path('results.json')} cannot be read ({type(error).__name__}: {error}), so new results cannot be added to it; "
            "move it away"
        ) from None
    return stored


def _read_samples(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of samples.jsonl, each with the spec, number and export of its result, which files of earlier
    versions had once a task.
    """
    store = Store(folder)
    if store.size("samples.jsonl") is None:
        return []
    results = read_results(folder)["results"]
    of_task = {
        tree["task"]: {name: tree[name] for name in ("spec_hash", "n", "export") if name in tree}
        for tree in results
    }
    exports = {_key(tree)[:3]: tree["export"] for tree in results if "export" in tree}
    rows = [json.loads(line) for line in store.read("samples.jsonl").decode().splitlines() if line.strip()]
    unknown = {"spec_hash": "", "n": 0}
    rows = [row if "spec_hash" in row else of_task.get(row["task"], unknown) | row for row in rows]
    return [
        row if "export" in row or _key(row)[:3] not in exports else {"export": exports[_key(row)[:3]]} | row
        for row in rows
    ]


def _key(tree: Mapping[str, Any]) -> tuple[str, str, int, str | None]:
    """What makes two results the same measurement: task, spec, number of documents, and what was scored."""
    export = tree.get("export")
    local = export is not None and not is_remote(export)
    return (tree["task"], tree["spec_hash"], tree["n"], os.path.abspath(export) if local else export)


def compared(result: Result, stored: Sequence[Mapping[str, Any]]) -> Result:
    """The result with a note for the last stored one of its task that has another spec: what differs, so that
    nobody compares them.
    """
    spec = json.loads(json.dumps(result.spec, default=str))
    others = [
        tree for tree in stored if tree["task"] == result.task and tree["spec_hash"] != result.spec_hash
    ]
    if not others:
        return result
    lines = differences(spec, others[-1].get("spec", {}))
    note = f"{result.task}: not comparable with the stored result of {others[-1]['n']:,} documents: {'; '.join(lines)}"
    return replace(result, notes=(*result.notes, note))


def table(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Rows for a table: task, group, n, the main metric's name, score, unit and 95% interval (low, high), and
    each control's score.
    """
    lines = []
    for result in results:
        low, high = result.interval or (None, None)
        overall = {key: part["metrics"] for key, part in result.controls.items()}
        lines.append(_line(result, "all", result.n, result.metrics | {"low": low, "high": high}, overall))
        for kind, values in result.groups.items():
            for value, metrics in values.items():
                controls = {
                    key: part["groups"].get(kind, {}).get(value, {}) for key, part in result.controls.items()
                }
                lines.append(_line(result, value, int(metrics["n"]), metrics, controls))
    return lines


def _line(
    result: Result, group: str, n: int, metrics: Mapping, controls: Mapping[str, Mapping]
) -> dict[str, Any]:
    name = result.main_metric
    line = {
        "task": result.task,
        "group": group,
        "n": n,
        "metric": name,
        "score": metrics.get(name),
        "unit": result.unit if name else "",
    }
    return (
        line
        | {"low": metrics.get("low"), "high": metrics.get("high")}
        | {key: part.get(name) for key, part in controls.items()}
    )
