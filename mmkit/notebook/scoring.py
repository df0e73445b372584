"""What the evaluation notebook and ``mmkit eval`` show: scores beside their controls, headline numbers,
documents for pictures.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mmkit.config import RunConfig, load
from mmkit.notebook.progress import Progress
from mmkit.notebook.tables import html, text
from mmkit.storage import Store


@dataclasses.dataclass(frozen=True)
class Scored:
    """Results of one evaluation, their table and headline, and the documents by (task, key) for pictures of
    answers.

    ``suffix`` is "" for the preset's own tasks in full, else what tells this evaluation from it: figures and
    records are named by it.
    """

    run: RunConfig
    results: tuple[Any, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    headline: Mapping[str, float] = dataclasses.field(default_factory=dict)
    documents: Mapping[tuple[str, str], Any] = dataclasses.field(default_factory=dict)
    suffix: str = ""
    export: str = ""  # what was scored
    looked: tuple[dict[str, Any], ...] = ()  # of a dry run: one row a task, of its documents

    def numbers(self) -> dict[str, Any]:
        """What a notebook records: the headline, and how many documents each task had."""
        counts = {f"{result.task}_n": result.n for result in self.results}
        return {name: round(value, 4) for name, value in self.headline.items()} | counts

    def title(self) -> str:
        """One line for people."""
        if self.run.dry_run:
            return f"dry run: would score {', '.join(self.run.evaluation.tasks)}"
        return (
            f"{self.run.preset}/{self.run.name}: {self.export}; results.json and samples.jsonl in {self.run.folder}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the table must know: incomplete sets, controls left out, files for servers, other
        specs.
        """
        return tuple(note for result in self.results for note in result.notes)

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return html(list(self.rows or self.looked), self.title()) + notes

    def __str__(self) -> str:
        return "\n".join((self.title(), text(list(self.rows or self.looked)), *self.notes))

    __repr__ = __str__


def score(run: RunConfig, looked: Sequence[dict[str, Any]] = ()) -> Scored:
    """Scores the newest export of the run's model and name, or ``run.start_from``, on
    ``run.evaluation.tasks``.

    ConfigError for an unknown task, or where there is no export, with the command that makes one; InputError
    for documents that cannot be used. A dry run looks at the documents alone. ``looked``: what
    `evaluation.scoring.check_documents` gave, where it was called already.
    """
    from mmkit.evaluation.runner import table
    from mmkit.evaluation.scoring import check_documents, evaluate_run, export_of, headline
    from mmkit.launch.launch import for_this_machine

    looked = looked or check_documents(run)
    if run.dry_run:
        return Scored(run, looked=tuple(looked))
    with Progress(1, "scoring") as progress:
        results = evaluate_run(
            for_this_machine(run),
            progress=lambda what, done, of: _tell(progress, what, done, of),
            checked=True,
        )
    rows, documents = tuple(table(results)), _documents(results)
    return Scored(
        run, tuple(results), rows, headline(results), documents, suffix_of(run), export_of(run)
    )


def suffix_of(run: RunConfig) -> str:
    """What the names of figures and records of this evaluation end in: "" for the preset's own, so that a
    limited one, one of other tasks, or of another export does not replace them: "-charts-limit20"."""
    own, here = load(run.preset, "eval").evaluation, run.evaluation
    parts = ["+".join(here.tasks)] if here.tasks != own.tasks else []
    parts += [f"limit{here.limit or 0}"] if here.limit != own.limit else []
    parts += [f"tokens{here.max_new_tokens or 0}"] if here.max_new_tokens != own.max_new_tokens else []
    if run.start_from:
        place = Store(run.start_from).path()
        parts += ["from", *place.split("/")[-2:], hashlib.sha256(place.encode()).hexdigest()[:6]]
    name = re.sub(r"[^\w+-]", "_", "".join(f"-{part}" for part in parts))
    return name if len(name) <= 60 else f"{name[:50]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _tell(progress: Progress, what: str, done: int, of: int) -> None:
    progress.label = what
    progress(step=done, total_steps=of)


def _documents(results: list[Any]) -> dict[tuple[str, str], Any]:
    """The documents of the scored tasks, by task and key: keys of two tasks may be the same."""
    from mmkit.evaluation.tasks import clip_demo, pack_documents
    from mmkit.evaluation.tasks.table import TASKS

    found = {}
    for result in results:
        task = result.task
        if task in TASKS:
            found |= {(task, example.key): example for example in TASKS[task].documents()}
        elif task in clip_demo.CLIP_TASKS:
            found |= {(task, example.key): example for example in pack_documents.everything(clip_demo.PACK)}
    return found
