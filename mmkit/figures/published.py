"""The published plots of Cambrian-1 and Ferret, redrawn from data that carries its source line.

Tables lie in ``figures/data``; `DRAWINGS` lists every figure by name. Nothing is interpolated: an empty cell is not drawn.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.patches import Patch

from mmkit.errors import InputError
from mmkit.figures.drawn import Drawn, blank

DATA = Path(__file__).resolve().parent / "data"
CATEGORIES = {"general": "General", "knowledge": "Knowledge", "ocr_chart": "OCR & Chart", "vision_centric": "Vision-Centric"}


def table(name: str) -> pd.DataFrame:
    """A published table by file name; ValueError naming the tables there are."""
    path = DATA / f"{name}.csv"
    if not path.is_file():
        raise InputError(f"no published table {name!r}; there are {', '.join(sorted(p.stem for p in DATA.glob('*.csv')))}")
    return pd.read_csv(path, comment="#", dtype={"t_k": str})


def source(name: str) -> str:
    """The source line of a published table."""
    first = (DATA / f"{name}.csv").read_text(encoding="utf8").splitlines()[0]
    return first.removeprefix("#").strip()


def bars(ax, labels, columns: dict[str, np.ndarray]) -> None:
    """Grouped bars: one group a label, one bar a column; empty cells leave a gap."""
    width = 0.8 / len(columns)
    for i, (name, values) in enumerate(columns.items()):
        ax.bar(np.arange(len(labels)) + (i - (len(columns) - 1) / 2) * width, values, width, label=name)
    ax.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    ax.legend(fontsize=8)


def _category_bars(name: str, labels: pd.Series, rows: pd.DataFrame, title: str) -> Drawn:
    figure, ax = blank(9, 4.5)
    bars(ax, list(labels), {shown: rows[column].to_numpy() for column, shown in CATEGORIES.items()})
    ax.set(title=title, ylabel="mean score of the category")
    low = np.nanmin(rows[list(CATEGORIES)].to_numpy())
    ax.set_ylim(max(0, low - 8))
    return Drawn(name, figure, rows.reset_index(drop=True), source(name))


def cambrian_benchmarks() -> Drawn:
    """Cambrian-1 beside other models: category averages (project page Table 5)."""
    rows = table("cambrian_benchmarks").dropna(subset=["general_avg"])
    figure, ax = blank(9, 4.5)
    bars(ax, list(rows.model), {shown: rows[f"{column}_avg"].to_numpy() for column, shown in CATEGORIES.items()})
    ax.set(title="Cambrian-1 against other models", ylabel="category average", ylim=(40, 95))
    return Drawn("cambrian_benchmarks", figure, rows, source("cambrian_benchmarks"))


def cambrian_encoder_comparison() -> Drawn:
    """Single vision encoders as backbones, by category (project page, tuning recipes plot)."""
    rows = table("cambrian_encoder_comparison").sort_values("mean_of_4", ascending=False)
    figure, axes = blank(11, 6, columns=4, sharey=True)
    colours = {group: f"C{i}" for i, group in enumerate(rows.group.unique())}
    for ax, (column, shown) in zip(axes, CATEGORIES.items(), strict=True):
        ax.barh(rows.encoder, rows[column], color=rows.group.map(colours))
        ax.set(title=shown, xlim=(rows[column].min() - 3, rows[column].max() + 1))
    axes[0].invert_yaxis()
    handles = [Patch(color=colour, label=group) for group, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    return Drawn("cambrian_encoder_comparison", figure, rows, source("cambrian_encoder_comparison"))


def cambrian_encoder_ensemble() -> Drawn:
    """Combining encoders by channel concatenation: average over benchmarks, one bar a published row."""
    rows = table("cambrian_encoder_ensemble")
    figure, ax = blank(8, 4)
    ax.barh([f"{r.row}. {r.encoders}" for r in rows.itertuples()], rows.average)
    ax.invert_yaxis()
    ax.set(title="Combining vision encoders", xlabel="average over 16 benchmarks", xlim=(rows.average.min() - 2, rows.average.max() + 1))
    return Drawn("cambrian_encoder_ensemble", figure, rows, source("cambrian_encoder_ensemble"))


def cambrian_connector() -> Drawn:
    """Connectors joining four encoders: concatenation, resampler, SVA variants (paper Tables 1 and 2)."""
    rows = table("cambrian_connector")
    return _category_bars("cambrian_connector", rows.setting + ": " + rows.connector, rows, "Connectors")


def cambrian_data_curation() -> Drawn:
    """LLaVA-665K, Cambrian-10M and Cambrian-7M as tuning data (v2 numbers of the project page)."""
    rows = table("cambrian_data_curation").query("version == 'v2'")
    return _category_bars("cambrian_data_curation", rows.data, rows, "Instruction data")


def cambrian_threshold() -> Drawn:
    """Data balancing: the cap t of samples a source, score by category (project page Table 3)."""
    rows = table("cambrian_threshold")
    figure, ax = blank()
    for column, shown in {"average": "Average", **CATEGORIES}.items():
        ax.plot(rows.t_k, rows[column], marker="o", label=shown)
    ax.set(title="Cap on samples a source", xlabel="t (thousand samples)", ylabel="score")
    ax.legend(fontsize=8)
    return Drawn("cambrian_threshold", figure, rows, source("cambrian_threshold"))


def cambrian_threshold_cumulative() -> Drawn:
    """Cumulative samples over sources sorted by size, for each cap t (paper Figure 10, computed from source counts)."""
    rows = table("cambrian_threshold_cumulative")
    figure, ax = blank()
    for cap, group in rows.groupby("t_k", sort=False):
        ax.plot(group["rank"], group.cumulative_k, label="no cap" if cap == "none" else f"t = {cap}k")
    ax.set(title="Data balancing", xlabel="sources, smallest first", ylabel="cumulative samples (thousand)")
    ax.legend(fontsize=8)
    return Drawn("cambrian_threshold_cumulative", figure, rows, source("cambrian_threshold_cumulative"))


def cambrian_mixture() -> Drawn:
    """Data-ratio pilot: share of each category and the average of the paper's table."""
    rows = table("cambrian_mixture_ratio").merge(table("cambrian_mixture_full")[["exp", "average"]], on="exp")
    figure, ax = blank()
    bottom = np.zeros(len(rows))
    for column in ("language", "general", "ocr", "counting", "math", "code", "science"):
        ax.bar(rows.exp, rows[column], bottom=bottom, label=column)
        bottom += rows[column].to_numpy()
    ax.set(title="Data ratio pilot (1,350k samples)", ylabel="share of samples (%)", ylim=(0, 135))
    other = ax.twinx()
    other.plot(rows.exp, rows.average, "k-o", label="average score")
    other.set(ylabel="average score (paper table)", ylim=(46, 49.5))
    ax.legend(fontsize=7, ncols=4, loc="upper left")
    return Drawn("cambrian_mixture", figure, rows, source("cambrian_mixture_ratio"))


def cambrian_composition() -> Drawn:
    """Cambrian-7M by category and source (paper Figure 9)."""
    rows = table("cambrian_7m_sources").query("in_7m == 1")
    totals = rows.groupby("category").samples_k.sum().sort_values(ascending=False)
    figure, ax = blank(6.5, 5)
    wedges, _ = ax.pie(totals, wedgeprops={"width": 0.45}, startangle=90)
    ax.legend(wedges, [f"{name} {100 * value / totals.sum():.1f}%" for name, value in totals.items()], loc="center left", bbox_to_anchor=(1, 0.5))
    ax.set_title(f"Cambrian-7M: {totals.sum() / 1000:.2f}M samples, {len(rows)} sources")
    return Drawn("cambrian_composition", figure, rows, source("cambrian_7m_sources"))


def cambrian_two_stage() -> Drawn:
    """Box plots of the two-stage study: adapter data and frozen or unfrozen encoders, by group and category (paper Figure 5)."""
    rows = table("cambrian_two_stage_full").query("tuning_data == '737K'")
    settings = [("0M", "frozen"), ("0.5M", "frozen"), ("1.2M", "frozen"), ("1.2M", "unfrozen")]
    groups = ["Language Supervised", "Self-Supervised", "Other"]
    figure, axes = blank(12, 2.6 * len(groups), columns=4, rows=len(groups), squeeze=False)
    for line, group in zip(axes, groups, strict=True):
        for ax, (column, shown) in zip(line, CATEGORIES.items(), strict=True):
            inside = rows[rows.group == group]
            boxes = [inside[(inside.adapter_data == a) & (inside.vision_encoder == v)][column].dropna() for a, v in settings]
            ax.boxplot(boxes, tick_labels=[f"{a}\n{v}" for a, v in settings])
            ax.tick_params(labelsize=7)
            ax.set_title(f"{group}: {shown}", fontsize=9)
    return Drawn("cambrian_two_stage", figure, rows, source("cambrian_two_stage_full"))


def cambrian_clip_vs_dinov2() -> Drawn:
    """CLIP and DINOv2 with 0.7M and 5M tuning data; drawn from the paper's tables, not from the figure that disagrees with them."""
    rows = table("cambrian_clip_vs_dinov2").query("basis == 'table'")
    figure, axes = blank(11, 3.2, columns=4)
    for ax, shown in zip(axes, CATEGORIES.values(), strict=True):
        for key, group in rows[rows.category == shown].groupby(["encoder", "vision_encoder"]):
            ax.plot(group.tuning_data, group.score, marker="o", label=f"{key[0].split()[0]} {key[1]}")
        ax.set_title(shown, fontsize=9)
    axes[0].legend(fontsize=6)
    return Drawn("cambrian_clip_vs_dinov2", figure, rows, source("cambrian_clip_vs_dinov2"))


def cambrian_linear_probe() -> Drawn:
    """ImageNet linear probing of the encoders."""
    rows = table("cambrian_linear_probe").sort_values("linear_probe")
    figure, ax = blank(6.5, 4)
    ax.barh(rows.model, rows.linear_probe)
    ax.set(title="ImageNet-1k linear probe", xlabel="top-1 (%)", xlim=(rows.linear_probe.min() - 5, 90))
    return Drawn("cambrian_linear_probe", figure, rows, source("cambrian_linear_probe"))


def cambrian_attention() -> Drawn:
    """Share of SVA attention each encoder receives, by benchmark."""
    rows = table("cambrian_attention_share")
    figure, ax = blank(6, 4)
    bars(ax, list(rows.encoder), {column: rows[column].to_numpy() for column in ("gqa", "docvqa", "scienceqa")})
    ax.set(title="Where SVA looks", ylabel="share of attention (%)")
    return Drawn("cambrian_attention", figure, rows, source("cambrian_attention_share"))


def ferret_referring() -> Drawn:
    """Referring object classification on LVIS: point, box, free-form; chance is 50%."""
    rows = table("ferret_roc_lvis")
    figure, ax = blank(8, 4)
    bars(ax, list(rows.model), {shape: rows[f"lvis_{shape}"].to_numpy() for shape in ("point", "box", "free_form")})
    ax.axhline(50, color="grey", linestyle=":")
    ax.set(title="Referring object classification (LVIS)", ylabel="accuracy (%)", ylim=(40, None))
    return Drawn("ferret_referring", figure, rows, source("ferret_roc_lvis"))


def ferret_grounding() -> Drawn:
    """Visual grounding, accuracy at IoU 0.5 on RefCOCO, RefCOCO+, RefCOCOg and Flickr30k Entities."""
    rows = table("ferret_grounding")
    figure, ax = blank(10, 4.5)
    bars(ax, list(rows.model), {name: rows[name].to_numpy() for name in ("refcoco_val", "refcocop_val", "refcocog_val", "flickr30k_val")})
    ax.set(title="Visual grounding", ylabel="accuracy at IoU 0.5 (%)", ylim=(50, None))
    return Drawn("ferret_grounding", figure, rows, source("ferret_grounding"))


def ferret_pope() -> Drawn:
    """POPE accuracy for random, popular and adversarial sampling; cells as printed in the source table."""
    rows = table("ferret_pope")
    wide = rows.pivot_table(index="model", columns="sampling", values="accuracy", sort=False)
    figure, ax = blank(9, 4)
    bars(ax, list(wide.index), {name: wide[name].to_numpy() for name in wide.columns})
    ax.set(title="Object hallucination (POPE)", ylabel="accuracy (%)", ylim=(45, None))
    return Drawn("ferret_pope", figure, rows, source("ferret_pope"))


def ferret_bench() -> Drawn:
    """Ferret-Bench, judged by GPT-4."""
    rows = table("ferret_bench")
    figure, ax = blank(8, 4)
    columns = ("referring_description", "referring_reasoning", "grounding_in_conversation", "average")
    bars(ax, list(rows.model), {name: rows[name].to_numpy() for name in columns})
    ax.set(title="Ferret-Bench", ylabel="relative score (%)")
    return Drawn("ferret_bench", figure, rows, source("ferret_bench"))
