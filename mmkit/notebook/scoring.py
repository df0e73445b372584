"""What the evaluation notebook and ``mmkit eval`` show: scores beside their controls, headline numbers, documents for pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmkit.config import RunConfig
from mmkit.notebook.progress import Progress
from mmkit.notebook.tables import html, text


@dataclasses.dataclass(frozen=True)
class Scored:
    """Results of one evaluation, their table and headline, and the documents by key for pictures of answers."""

    run: RunConfig
    results: tuple[Any, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    headline: Mapping[str, float] = dataclasses.field(default_factory=dict)
    documents: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def numbers(self) -> dict[str, Any]:
        """What a notebook records: the headline, and how many documents each task had."""
        counts = {f"{result.task}_n": result.n for result in self.results}
        return {name: round(value, 4) for name, value in self.headline.items()} | counts

    def title(self) -> str:
        """One line for people."""
        if self.run.dry_run:
            return f"dry run: would score {', '.join(self.run.evaluation.tasks)}"
        return f"{self.run.preset}/{self.run.name}; results.json and samples.jsonl in {self.run.folder}"

    def _repr_html_(self) -> str:
        return html(list(self.rows), self.title())

    def __str__(self) -> str:
        return f"{self.title()}\n{text(list(self.rows))}"

    __repr__ = __str__


def score(run: RunConfig) -> Scored:
    """Scores the newest export of the run's model and name, or ``run.start_from``, on ``run.evaluation.tasks``.

    ConfigError for an unknown task, or where there is no export, with the command that makes one. A dry run checks the tasks alone.
    """
    from mmkit.evaluation.runner import table
    from mmkit.evaluation.scoring import check_tasks, evaluate_run, headline

    check_tasks(run)
    if run.dry_run:
        return Scored(run)
    with Progress(1, "scoring") as progress:
        results = evaluate_run(run, progress=lambda what, done, of: _tell(progress, what, done, of))
    return Scored(run, tuple(results), tuple(table(results)), headline(results), _documents(run, results))


def _tell(progress: Progress, what: str, done: int, of: int) -> None:
    progress.label = what
    progress(step=done, total_steps=of)


def _documents(run: RunConfig, results: list[Any]) -> dict[str, Any]:
    """The documents of the scored tasks that come out of offline packs, by key."""
    from mmkit.evaluation.tasks import clip_demo, pack_documents
    from mmkit.evaluation.tasks.table import TASKS

    found = {}
    for result in results:
        if result.task in TASKS:
            found |= {example.key: example for example in TASKS[result.task].documents()[: run.evaluation.limit]}
        elif result.task in clip_demo.CLIP_TASKS:
            found |= {example.key: example for example in pack_documents.everything(clip_demo.PACK)}
    return found
