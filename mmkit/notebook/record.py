"""What the last cell of a notebook writes down: the run, its results and where its files are, as JSON beside the run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from mmkit.config import RunConfig
from mmkit.notebook.tables import Table
from mmkit.storage import Store


def record(notebook: str, run: RunConfig, results: Mapping[str, Any] | None = None, figures: Mapping[str, Any] | None = None) -> Table:
    """Writes ``record-<notebook>.json`` into the run folder and shows it as a table.

    ``results`` are the numbers the notebook reached; ``figures`` map a name to the path of its PNG or to the figure itself,
    which is saved. A dry run reached none, so it leaves the record of a real one as it is.
    """
    store, name = Store(run.folder), f"record-{notebook}.json"
    saved = {
        title: str(save(figure, run)) if hasattr(figure, "save") else str(figure) for title, figure in (figures or {}).items() if figure
    }
    values = {
        "notebook": notebook,
        "model": run.preset,
        "stage": run.stage,
        "dry_run": run.dry_run,
        "folder": run.folder,
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "results": dict(results or {}),
        "figures": saved,
    }
    if not run.dry_run or read_record(notebook, run).get("dry_run", True):
        store.write(name, (json.dumps(values, indent=1, default=str) + "\n").encode())
    rows = [{"what": what, "value": value} for what, value in {**values["results"], **saved, "record": store.path(name)}.items()]
    return Table(rows, f"{run.preset}/{run.stage}")


def save(figure: Any, run: RunConfig) -> str:
    """Saves a figure as PNG and CSV in the run's ``figures/``; the PNG's path or URL."""
    return figure.save(f"{run.folder}/figures")


def read_record(notebook: str, run: RunConfig) -> dict[str, Any]:
    """What `record` wrote, empty where it has not run yet."""
    store, name = Store(run.folder), f"record-{notebook}.json"
    return json.loads(store.read(name)) if store.size(name) is not None else {}
