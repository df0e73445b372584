"""Figures of a run on this machine: its curves, its scores beside their controls, its data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mmkit.config import ConfigError, RunConfig
from mmkit.figures.drawn import Drawn, blank
from mmkit.figures.examples import answers as draw_answers
from mmkit.launch.launch import Launched, read_metrics

HELD_OUT = "eval_loss"
CONTROLS = {
    "shuffled": "same model, pictures shuffled",
    "prior": "best answer to the question alone",
    "majority": "majority answer",
    "chance": "chance",
    "published": "published model of this preset",
    "laion2b_l14": "LAION-2B ViT-L/14",
    "openai_l14": "OpenAI ViT-L/14",
}


def curves(runs: str | Path | Mapping[str, str | Path], smooth: int = 0, name: str = "training") -> Drawn:
    """Loss (dots: of held-out data), gradient norm and learning rate over steps of one run folder, or of
    several by label.

    ``smooth`` steps are averaged for the thick line (0 = a twentieth of the run). Where a run's batch was
    changed, which numbers its steps anew, all are drawn over samples instead. ConfigError where a folder has
    no metrics yet.
    """
    folders = runs if isinstance(runs, Mapping) else {"/".join(str(runs).split("/")[-3:-1]): runs}
    table = pd.concat([_metrics(label, folder) for label, folder in folders.items()], ignore_index=True)
    renumbered = any(part["step"].diff().dropna().ne(1).any() for _, part in table.groupby("run"))
    over = "total_samples" if renumbered else "step"
    figure, axes = blank(10.5, 3.4, columns=3)
    for axis, column, title in zip(axes, ("loss", "grad_norm", "lr"), ("loss", "gradient norm", "learning rate"), strict=True):
        for number, (label, part) in enumerate(table.groupby("run", sort=False)):
            window = smooth or max(len(part) // 20, 1)
            mean = part[column].rolling(window, min_periods=1, center=True).mean()
            axis.plot(part[over], part[column], color=f"C{number}", linewidth=0.6, alpha=0.35)
            axis.plot(part[over], mean, color=f"C{number}", linewidth=1.6, label=label)
            if column == "loss" and (held_out := part[part[HELD_OUT].notna()] if HELD_OUT in part else part[:0]).size:
                axis.plot(held_out[over], held_out[HELD_OUT], "o", color=f"C{number}", markersize=4, label=f"{label}, held out")
        axis.set(title=title, xlabel="samples" if renumbered else "step")
        axis.grid(alpha=0.25)
    axes[0].legend(fontsize=8)
    return Drawn(name, figure, table, f"metrics.jsonl of {', '.join(map(str, folders.values()))}")


def training(result: Launched) -> Drawn | None:
    """The curves of what `launch` returned; None after a dry run, which has none."""
    return None if result.run.dry_run else curves(result.folder)


def stages(run: RunConfig) -> Drawn | None:
    """The curves of all stages of this run's model and name that were trained here; None, with a hint in
    print, where there are none.
    """
    folders = {stage: f"{run.root}/{run.preset}/{stage}/{run.name}" for stage in ("pretrain", "finetune")}
    there = {stage: folder for stage, folder in folders.items() if read_metrics(folder)}
    if not there:
        print(f"no run of {run.preset!r} named {run.name!r} yet; make one with: mmkit train --model {run.preset} --stage pretrain")
        return None
    return curves(there, name="stages")


def _metrics(label: str, folder: str | Path) -> pd.DataFrame:
    records = read_metrics(folder)
    if not records:
        raise ConfigError(f"{folder} has no metrics.jsonl yet; train it first (notebooks 02_pretrain and 03_finetune, or mmkit train)")
    keep = ["step", "loss", "grad_norm", "lr", "targets", "samples", "total_samples", "seconds"]
    keep += [HELD_OUT] if any(HELD_OUT in record for record in records) else []
    rows = [{key: _number(record.get(key)) for key in keep} for record in records]
    return pd.DataFrame(rows).assign(run=label)


def _number(value: Any) -> float:
    """A number, also where JSON had to spell it as text (nan, inf)."""
    return math.nan if value is None else float(value)


def scores(rows: Sequence[Mapping[str, Any]], name: str = "scores") -> Drawn:
    """Bars of each task's and group's score beside its controls, with 95% intervals; ``rows`` as
    `evaluation.runner.table` gives them.

    Fractions and percent share a panel in percent, points have their own; the saved table keeps each score's
    own unit.
    """
    table = pd.DataFrame([row for row in rows if row.get("score") is not None])
    if table.empty:
        raise ConfigError("there is no score to draw; run the evaluation first")
    shown = [control for control in CONTROLS if control in table and table[control].notna().any()]
    in_points = table["unit"] == "points"
    panels = [(table[~in_points], "%"), (table[in_points], "points")]
    panels = [(part, label) for part, label in panels if len(part)]
    widths = [len(part) + 1 for part, _ in panels]
    wide = max(6.0, 0.9 * sum(widths) + 2)
    figure, axes = blank(wide, 4.0, columns=len(panels), squeeze=False, width_ratios=widths)
    for axis, (part, label) in zip(axes[0], panels, strict=True):
        _score_bars(axis, part, shown)
        metrics = ", ".join(dict.fromkeys(part["metric"]))
        axis.set(ylabel=f"{metrics} ({label})")
    # above the panel: inside it would hide bars
    axes[0][0].legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    return Drawn(name, figure, table, "results.json of this run")


def _score_bars(axis: Any, part: pd.DataFrame, shown: Sequence[str]) -> None:
    scale = part["unit"].map({"fraction": 100.0}).fillna(1.0)
    score = part["score"].astype(float) * scale
    below, above = (part["score"] - part["low"]).astype(float), (part["high"] - part["score"]).astype(float)
    # without an interval NaN, which draws no line
    half = [(side * scale).clip(lower=0) for side in (below, above)]
    width, places = 0.8 / (len(shown) + 1), range(len(part))
    axis.bar(places, score, width, yerr=half, label="model", color="C0", capsize=2)
    for number, control in enumerate(shown, 1):
        offset = [place + number * width for place in places]
        colour = "0.75" if control == "majority" else f"C{number}"
        axis.bar(offset, part[control].astype(float) * scale, width, label=CONTROLS[control], color=colour)
    labels = [f"{row.task}\n{row.group} (n={row.n:,})" for row in part.itertuples()]
    axis.set_xticks([place + 0.4 - width / 2 for place in places], labels, fontsize=8)
    if (part["unit"] != "points").all():
        axis.set_ylim(0, 105)
    axis.grid(axis="y", alpha=0.25)


def scores_of(scored: Any) -> Drawn | None:
    """The bars of an evaluation (`notebook.scoring.Scored`); None after a dry run, and where nothing was
    scored here.
    """
    if not any(row["score"] is not None for row in scored.rows):
        return None
    return scores(scored.rows, f"scores{scored.suffix}")


def answers_of(scored: Any, count: int) -> Drawn | None:
    """``count`` answers of an evaluation under their pictures, some of every task; None where no text was
    generated.

    Tasks take turns, so that with fewer answers than tasks the first ones have one each; a task's are spread
    over its documents.
    """
    there = scored.documents
    found = [[row for row in result.rows if (row["task"], row["key"]) in there] for result in scored.results]
    found = [part for part in found if part]
    chosen = []
    for place, part in enumerate(found):
        wanted = min(len(range(place, count, len(found))), len(part))
        chosen += [part[i * len(part) // wanted] for i in range(wanted)]
    return draw_answers(chosen, scored.documents, name=f"answers{scored.suffix}") if chosen else None


def mixture(lines: Sequence[Mapping[str, Any]], name: str = "mixture") -> Drawn:
    """Samples of each source and how many of them one epoch takes (`data.mixture.Mixture.lines`)."""
    table = pd.DataFrame(list(lines))
    figure, axis = blank(8.0, 0.6 * len(table) + 1.6)
    places = range(len(table))
    axis.barh(places, table["samples"], 0.36, label="samples there are", color="0.75")
    axis.barh([place + 0.38 for place in places], table["wanted"], 0.36, label="samples of one epoch", color="C0")
    axis.set_yticks([place + 0.19 for place in places], [f"{row.source}\n({row.share:.0%} of an epoch)" for row in table.itertuples()])
    axis.invert_yaxis()
    axis.set(xlabel="samples")
    axis.legend(fontsize=8)
    return Drawn(name, figure, table, "the data of this config")


def shares(rows: Sequence[Mapping[str, Any]], name: str = "shares") -> Drawn:
    """Wished and realised share of each source (`data.recipe.realised`)."""
    table = pd.DataFrame(list(rows))
    figure, axis = blank(8.0, 0.6 * len(table) + 1.6)
    places = range(len(table))
    axis.barh(places, 100 * table["wished"], 0.36, label="wished", color="0.75")
    axis.barh([place + 0.38 for place in places], 100 * table["realised"], 0.36, label=f"realised in {table['seen'].sum():,} samples", color="C0")
    axis.set_yticks([place + 0.19 for place in places], table["source"])
    axis.invert_yaxis()
    axis.set(xlabel="% of the samples")
    axis.legend(fontsize=8)
    return Drawn(name, figure, table, "the order of this config's data")


def lengths(counted: Mapping[str, Sequence[int]], limit: int, name: str = "lengths") -> Drawn:
    """How long the conversations of each source are in tokens, pictures included, and where the row limit
    lies.
    """
    table = pd.DataFrame([{"source": source, "tokens": count} for source, counts in counted.items() for count in counts])
    figure, axis = blank(8.0, 3.6)
    for source, part in table.groupby("source", sort=False):
        axis.hist(part["tokens"], bins=40, histtype="step", linewidth=1.5, label=f"{source}, median {part['tokens'].median():.0f}")
    if limit <= 4 * table["tokens"].max():
        axis.axvline(limit, color="k", linestyle=":", label=f"data.max_length {limit}")
    axis.set(xlabel="tokens of one conversation", ylabel="conversations")
    axis.legend(fontsize=8)
    return Drawn(name, figure, table, "a sample of this config's data")
