"""What the last cell of a notebook writes down: the run, its results and where its files are, as JSON beside the run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmkit.cache import atomic_write
from mmkit.config import RunConfig
from mmkit.notebook.tables import Table


def record(notebook: str, run: RunConfig, results: Mapping[str, Any] | None = None, figures: Mapping[str, Any] | None = None) -> Table:
    """Writes ``record-<notebook>.json`` into the run folder and shows it as a table.

    ``results`` are the numbers the notebook reached; ``figures`` map a name to the path of its PNG or to the figure itself,
    which is saved.
    """
    folder = Path(run.folder)
    saved = {name: str(save(figure, run)) if hasattr(figure, "save") else str(figure) for name, figure in (figures or {}).items() if figure}
    values = {
        "notebook": notebook,
        "model": run.preset,
        "stage": run.stage,
        "dry_run": run.dry_run,
        "folder": str(folder),
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "results": dict(results or {}),
        "figures": saved,
    }
    path = folder / f"record-{notebook}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as target:
        Path(target).write_text(json.dumps(values, indent=1, default=str) + "\n", encoding="utf8")
    rows = [{"what": name, "value": value} for name, value in {**values["results"], **saved, "record": str(path)}.items()]
    return Table(rows, f"{run.preset}/{run.stage}")


def save(figure: Any, run: RunConfig) -> Path:
    """Saves a figure as PNG and CSV in the run's ``figures/``; the PNG's path."""
    return figure.save(Path(run.folder) / "figures")


def read_record(notebook: str, run: RunConfig) -> dict[str, Any]:
    """What `record` wrote, empty where it has not run yet."""
    path = Path(run.folder) / f"record-{notebook}.json"
    return json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
