"""A figure with its numbers: shown in a notebook, saved as PNG beside CSV."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from mmkit.storage import Store


@dataclass(frozen=True)
class Drawn:
    """A matplotlib figure and the table it was drawn from; ``source`` says where the numbers come from."""

    name: str
    figure: Figure
    table: pd.DataFrame
    source: str

    def save(self, folder: str | Path) -> str:
        """Write ``name.png`` and ``name.csv`` (first line: the source) into ``folder``, a path or URL; the path or URL of the PNG."""
        store = Store(folder)
        store.write(f"{self.name}.png", self._png(120))
        store.write(f"{self.name}.csv", f"# {self.source}\n{self.table.to_csv(index=False)}".encode())
        return store.path(f"{self.name}.png")

    def __repr__(self) -> str:
        return f"figure {self.name}, {len(self.table):,} rows of numbers ({self.source})"

    def _repr_png_(self) -> bytes:
        return self._png(90)

    def _png(self, dpi: int) -> bytes:
        buffer = io.BytesIO()
        # on white whatever the user's style: dark text on a notebook's dark ground cannot be read
        self.figure.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight", facecolor="white")
        return buffer.getvalue()


def blank(width: float = 7.0, height: float = 4.2, columns: int = 1, rows: int = 1, **options):
    """A figure without pyplot's global state, and its axes (one, or an array of them)."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)
