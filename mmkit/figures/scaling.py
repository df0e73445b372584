"""The published plots of large-scale CLIP training, redrawn from data: scaling laws, learning curves, the L/14 run and its instability.

Sources: LAION-AI/scaling-laws-openclip @ 652b1e74 (arXiv 2212.07143), mlfoundations/open_clip @ 64ba2172, LAION-AI/laion.ai blog.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from mmkit.errors import InputError
from mmkit.figures.drawn import Drawn, blank
from mmkit.figures.published import source, table

FIT_BINS = 5  # the published fit takes the best point of each of five equal bins of log compute


def power_law(compute: np.ndarray, error: np.ndarray, binned: bool) -> tuple[float, float]:
    """(a, b) of E = a * C^b by least squares in log10-log10.

    ``binned`` follows the published fit of the OpenCLIP points: log10 C is split into five equal bins (upper edge + 0.1), the smallest
    error of each bin is kept at the bin's centre. Otherwise all points are fitted.
    """
    x, y = np.log10(compute), np.log10(error)
    if binned:
        edges = np.linspace(x.min(), x.max() + 0.1, FIT_BINS + 1)
        inside = [(x >= low) & (x < high) for low, high in zip(edges[:-1], edges[1:], strict=True)]
        centres = (edges[:-1] + edges[1:]) / 2
        kept = [(centre, y[members].min()) for centre, members in zip(centres, inside, strict=True) if members.any()]
        x, y = np.array(kept).T
    slope, intercept = np.polyfit(x, y, 1)
    return float(10**intercept), float(slope)


def scaling_points(dataset: str = "imagenet1k") -> pd.DataFrame:
    """Compute (total GMACs), error and family of every published model on one downstream set."""
    rows = table("scaling_laws_zeroshot").query("downstream_dataset == @dataset").copy()
    if rows.empty:
        known = sorted(table("scaling_laws_zeroshot").downstream_dataset.unique())
        raise InputError(f"no scaling data for {dataset!r}; there is {', '.join(known)}")
    score = rows.image_recall5 if rows.task.iloc[0] == "zeroshot_retrieval" else rows.acc1
    rows["error"] = 1 - score
    rows["family"] = np.where(rows.upstream_dataset == "CLIP-WIT", "OpenAI CLIP", "OpenCLIP")
    return rows.dropna(subset=["error"])


def scaling_law(dataset: str = "imagenet1k") -> Drawn:
    """Zero-shot error against compute with our fit; on ImageNet it gives the printed 5.86 C^-0.11 and 23.18 C^-0.16."""
    rows = scaling_points(dataset)
    figure, ax = blank()
    for colour, (family, group) in zip(("C0", "C1"), rows.groupby("family", sort=False), strict=False):
        a, b = power_law(group.gmacs_total.to_numpy(), group.error.to_numpy(), binned=family == "OpenCLIP")
        line = np.geomspace(group.gmacs_total.min(), group.gmacs_total.max(), 50)
        ax.scatter(group.gmacs_total, group.error, color=colour, s=18, label=family)
        ax.plot(line, a * line**b, color=colour, linestyle="--", label=f"E = {a:.2f} C^{b:.2f}")
    ax.set(xscale="log", yscale="log", xlabel="total compute (GMACs x samples seen)", ylabel="error", title=f"Zero-shot scaling: {dataset}")
    ax.legend(fontsize=8)
    return Drawn(f"scaling_law_{dataset}", figure, rows[["arch", "upstream_dataset", "samples_seen", "gmacs_total", "error", "family"]], source("scaling_laws_zeroshot"))


def learning_curves() -> Drawn:
    """ImageNet zero-shot accuracy over samples seen, 34B-sample runs on LAION-2B."""
    rows = table("scaling_laws_learning_curves").query("upstream_dataset == 'LAION-2B' and samples_seen_total == '34B'")
    figure, ax = blank()
    for arch, group in rows.groupby("arch"):
        ax.plot(group.samples_seen / 1e9, 100 * group.top1, label=arch)
    ax.set(xlabel="samples seen (billion)", ylabel="ImageNet zero-shot top-1 (%)", title="Learning curves")
    ax.legend(fontsize=8)
    return Drawn("learning_curves", figure, rows, source("scaling_laws_learning_curves"))


def stability_timeline() -> Drawn:
    """The L/14 run: the surviving branch's accuracy with the published facts about the failure marked on it.

    No loss, gradient-norm or scale curve of the failed branch is published, so none is drawn.
    """
    rows = table("scaling_laws_learning_curves").query("arch == 'ViT-L-14' and upstream_dataset == 'LAION-2B' and samples_seen_total == '34B'")
    figure, ax = blank(9, 4.2)
    ax.plot(rows.epoch, 100 * rows.top1, color="C0")
    ax.axvspan(1, 68, color="C1", alpha=0.12)
    ax.axvspan(69, rows.epoch.max(), color="C2", alpha=0.12)
    ax.axvline(75, color="C3", linestyle=":")
    notes = ((20, "fp16 AMP, batch 79,872"), (95, "fp32 + tf32, batch 86,016"))
    for where, text in notes:
        ax.text(where, 30, text, fontsize=9)
    ax.annotate("fp16 branch: spike, then NaN near 75", (75, 62), (82, 48), arrowprops={"arrowstyle": "->"}, fontsize=9)
    ax.annotate("restart from 68 in fp32", (68, 100 * rows[rows.epoch == 68].top1.iloc[0]), (28, 72), arrowprops={"arrowstyle": "->"}, fontsize=9)
    ax.set(xlabel="virtual epoch (200M samples)", ylabel="ImageNet zero-shot top-1 (%)", title="ViT-L/14 on LAION-2B, 384 GPUs")
    return Drawn("stability_timeline", figure, rows, source("clip_l14_stability"))


def l14_results() -> Drawn:
    """The laion2B ViT-L/14 beside OpenAI's on each zero-shot set."""
    rows = table("clip_l14_laion2b_results").query("source == 'scaling-laws'").dropna(subset=["acc1", "openai_l14_acc1"])
    figure, ax = blank(6.5, 8)
    order = rows.assign(gap=rows.acc1 - rows.openai_l14_acc1).sort_values("gap")
    ax.barh(order.dataset, 100 * order.gap, color=np.where(order.gap > 0, "C2", "C3"))
    ax.set(xlabel="laion2B minus OpenAI, zero-shot top-1 (points)", title="ViT-L/14")
    ax.tick_params(axis="y", labelsize=7)
    return Drawn("l14_results", figure, order, source("clip_l14_laion2b_results"))


def model_profile() -> Drawn:
    """ImageNet zero-shot accuracy against the cost of one image-text pair, OpenCLIP's model collection."""
    rows = table("openclip_zeroshot").dropna(subset=["gflops_profile", "imagenet1k_top1"])
    figure, ax = blank()
    for family, group in rows.groupby("data_family"):
        ax.scatter(group.gflops_profile, 100 * group.imagenet1k_top1, s=14, label=family)
    ax.set(xscale="log", xlabel="GFLOPs a pair", ylabel="ImageNet zero-shot top-1 (%)", title="OpenCLIP models")
    ax.legend(fontsize=6, ncols=2)
    return Drawn("model_profile", figure, rows, source("openclip_zeroshot"))


def training_speed() -> Drawn:
    """Samples a second and GPU of LAION's large runs (A100 40 GB, gradient checkpointing)."""
    rows = table("laion_large_clip_speed")
    figure, ax = blank(6, 3.5)
    ax.bar(rows.model + "\n" + rows.precision, rows.samples_per_s_per_gpu)
    ax.set(ylabel="samples / s / GPU", title="Training speed")
    return Drawn("training_speed", figure, rows, source("laion_large_clip_speed"))
