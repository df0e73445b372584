"""A figure with its numbers: shown in a notebook, saved as PNG beside CSV."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Drawn:
    """A matplotlib figure and the table it was drawn from; ``source`` says where the numbers come from."""

    name: str
    figure: Figure
    table: pd.DataFrame
    source: str

    def save(self, folder: str | Path) -> Path:
        """Write ``name.png`` and ``name.csv`` (first line: the source) into ``folder``; the path of the PNG."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        picture = folder / f"{self.name}.png"
        self.figure.savefig(picture, dpi=120, bbox_inches="tight")
        text = f"# {self.source}\n" + self.table.to_csv(index=False)
        (folder / f"{self.name}.csv").write_text(text, encoding="utf8")
        return picture

    def _repr_png_(self) -> bytes:
        import io

        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=90, bbox_inches="tight")
        return buffer.getvalue()


def blank(width: float = 7.0, height: float = 4.2, columns: int = 1, rows: int = 1, **options):
    """A figure without pyplot's global state, and its axes (one, or an array of them)."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)
