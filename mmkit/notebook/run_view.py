"""What notebooks show of a trained run and of figures: parameter groups, adapters, a gallery of saved pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mmkit.config import RunConfig
from mmkit.launch.launch import Launched
from mmkit.notebook.record import save
from mmkit.storage import Store


def trained_groups(result: Launched) -> list[dict[str, Any]]:
    """Parameter groups and adapted layers of a run, as its environment.json keeps them; empty after a dry run. An adapter's tensors are
    among those of its component's group, whose learning rate and decay it has."""
    store = Store(result.folder)
    if result.run.dry_run or store.size("environment.json") is None:
        return []
    tables = json.loads(store.read("environment.json")).get("tables", {})
    groups, rows = tables.get("groups", ()), []
    for row in tables.get("adapters", ()):
        own = [group for group in groups if group["group"].split(" ")[0] == row["component"]]
        group = max(own, key=lambda group: group["weight_decay"])  # adapters are matrices, which decay where anything does
        text = f"adapter of {row['layer']} ({row['layers']} layers, {row['trained']:,} parameters)"
        tensors = row["layers"] * (3 if result.run.train.lora.use_dora else 2)
        rows.append(group | {"group": text, "tensors": tensors})
    return [*groups, *rows]


class Gallery:
    """Figures that are saved already, shown below one another with the path of each PNG."""

    def __init__(self, figures: dict[str, Any]):
        self.figures = figures

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        import base64

        parts = []
        for path, figure in self.figures.items():
            picture = base64.b64encode(figure._repr_png_()).decode()
            parts.append(
                f"<p><b>{figure.name}</b> <small>{figure.source}; {str(path).rpartition('/')[2]}</small><br><img src='data:image/png;base64,{picture}'></p>"
            )
        return {"text/html": "".join(parts), "text/plain": str(self)}

    def __str__(self) -> str:
        return "\n".join(map(str, self.figures))

    __repr__ = __str__


def gallery(figures: Iterable[Any], run: RunConfig) -> Gallery:
    """Saves each figure as PNG and CSV in the run's ``figures/`` and shows them all."""
    return Gallery({save(figure, run): figure for figure in figures})
