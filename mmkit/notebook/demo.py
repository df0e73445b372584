"""``make demo``: offline data, all notebooks headless, one table of results and ``runs/demo.json``.

Each notebook is a step; a later one needs what an earlier one left. The run stops at the first that fails, with its message and the
path of the executed copy, and what was reached so far is in the table.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from mmkit.cache import atomic_write
from mmkit.config import load
from mmkit.notebook.parameters import workspace
from mmkit.notebook.record import read_record
from mmkit.notebook.runner import Outcome, find_notebook, run_notebook
from mmkit.notebook.scoring import suffix_of
from mmkit.notebook.tables import text


@dataclasses.dataclass(frozen=True)
class Step:
    """One notebook of the demo."""

    notebook: str
    parameters: dict[str, Any]
    stage: str = "eval"  # whose run folder its record is in

    @property
    def title(self) -> str:
        """For the table."""
        return f"{self.notebook} {self.parameters.get('model', '')}".strip()


def plan(model: str, clip: str) -> tuple[Step, ...]:
    """The notebooks in order: look, train and score the vision-language model, train and score the contrastive one, figures."""
    return (
        Step("00_setup", {"model": model}, "finetune"),
        Step("01_data", {"model": model}, "finetune"),
        Step("02_pretrain", {"model": model}, "pretrain"),
        Step("03_finetune", {"model": model}, "finetune"),
        Step("04_eval", {"model": model}),
        Step("02_pretrain", {"model": clip}, "pretrain"),
        Step("04_eval", {"model": clip}),
        Step("05_figures", {"model": model}, "finetune"),
    )


def demo(model: str = "tiny", clip: str = "clip-tiny", settings: dict[str, dict[str, Any]] | None = None, root: str | None = None) -> int:
    """Runs the whole demo and returns the exit code of the first notebook that failed, 0 otherwise.

    ``settings`` gives further parameters by notebook name (tests shorten the stages with it); ``root`` is where runs are kept.
    """
    from mmkit.data.demo import prepare

    started = time.monotonic()
    base = Path(root) if root else workspace() / "runs"
    packs = prepare(progress=lambda line: print(line, flush=True))
    rows, values, outcome = [], {}, None
    for step in plan(model, clip):
        print(f"\n== {step.title}", flush=True)
        outcome, results = _run_step(step, base, (settings or {}).get(step.notebook, {}))
        values |= results
        rows.append(
            {"notebook": step.title, "seconds": round(outcome.seconds), "state": outcome.message or "ok", "executed": str(outcome.notebook)}
        )
        if outcome.code:
            break
    seconds = time.monotonic() - started
    values |= {"seconds": round(seconds, 1), "complete": not outcome.code, "notebooks": rows}
    values["packs"] = {record.name: record.status for record in packs}
    write(base / "demo.json", values)
    print_results(rows, values, base)
    return outcome.code


def _run_step(step: Step, base: Path, more: dict[str, Any]) -> tuple[Outcome, dict[str, Any]]:
    """Runs one notebook; returns how it ended and the numbers it recorded."""
    parameters = {**step.parameters, **more, "root": str(base)}
    output = base / "notebooks" / f"{step.notebook}-{step.parameters['model']}.ipynb"
    outcome = run_notebook(find_notebook(f"{step.notebook}.ipynb"), output, parameters)
    known = {"name": "name", "tasks": "evaluation.tasks", "limit": "evaluation.limit", "start_from": "start_from"}
    asked = {known[key]: value for key, value in more.items() if key in known and value}
    run = load(step.parameters["model"], step.stage, {"root": str(base), **asked})
    suffix = suffix_of(run) if step.notebook == "04_eval" else ""
    found = {} if outcome.code else read_record(f"{step.notebook}{suffix}", run)
    if found:
        print(text([{"result": name, "value": value} for part in ("results", "figures") for name, value in found[part].items()]))
    return outcome, found.get("results", {})


def write(path: Path, values: dict[str, Any]) -> None:
    """The results as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as target:
        Path(target).write_text(json.dumps(values, indent=1, default=str) + "\n", encoding="utf8")


def print_results(rows: list[dict[str, Any]], values: dict[str, Any], base: Path) -> None:
    """The two tables at the end: notebooks, then numbers and where the files are."""
    numbers = [{"result": name, "value": value} for name, value in values.items() if isinstance(value, (int, float))]
    places = {
        "executed notebooks": "notebooks",
        "checkpoints": "*/*/*/checkpoints",
        "figures": "*/*/*/figures",
        "the same numbers": "demo.json",
    }
    print("\n" + text(rows) + "\n\n" + text(numbers) + "\n")
    print(text([{"files": what, "where": str(found)} for what, pattern in places.items() for found in sorted(base.glob(pattern))]))
