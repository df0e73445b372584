"""What the kit's own benchmarks measured, beside what is claimed for each technique."""

from __future__ import annotations

from mmkit.figures.drawn import Drawn, blank
from mmkit.figures.published import source, table


def techniques() -> Drawn:
    """Savings of ZeRO, LoRA, 4-bit weights, recomputation, lazy data, fast init, mixed precision and chunked loss, in percent."""
    rows = table("measured_techniques")
    figure, ax = blank(9, 0.34 * len(rows) + 1)
    labels = [f"{row.technique}: {row.quantity}" for row in rows.itertuples()]
    ax.barh(labels, rows.saved_percent, color=["C0" if saved >= 0 else "C3" for saved in rows.saved_percent])
    for place, row in enumerate(rows.itertuples()):
        claim = f", claimed {row.claimed_percent}" if isinstance(row.claimed_percent, str) and row.claimed_percent else ""
        ax.text(max(row.saved_percent, 0) + 1, place, f"{row.saved_percent:.0f}%{claim}", va="center", fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel="saved against the baseline (%; negative: costs more)", xlim=(min(-40, rows.saved_percent.min() - 5), 240))
    ax.tick_params(axis="y", labelsize=8)
    return Drawn("techniques", figure, rows, source("measured_techniques"))
