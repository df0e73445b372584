"""The mechanism of the ViT-L/14 story on this machine, to stand beside the published facts (`scaling.stability_timeline`)."""

from __future__ import annotations

import pandas as pd

from mmkit.config import RunConfig, load
from mmkit.figures.drawn import Drawn, blank
from mmkit.training.rehearsal import Rehearsal, rehearse

PRESET, LAYER, GAIN, CLIPPED = "clip-vit-l-14-debug", "clip.visual.conv1", 2.0**28, 6
SETTINGS = {  # enough for the debug twin to learn within 80 steps what it then loses
    "data.sources": [{"name": "clip_pairs", "format": "pack", "path": "clip_pairs", "cap": 128}],
    "data.samples_per_epoch": None, "data.augment_scale": [1.0, 1.0], "train.global_batch": 64, "train.device_batch": 64,
    "train.checkpoint_blocks": False, "train.optimizer.lr": 2.0e-3, "train.optimizer.warmup": 8, "train.optimizer.max_grad_norm": 1.0,
    "train.stability.threshold": 6,
}  # fmt: skip


def stability_story(run: RunConfig, steps: int) -> Drawn | None:
    """Rehearses the story in ``run.root`` with three runs of up to ``steps`` steps, strained after three fifths of them; the picture of it.
    They are of the preset of ``run`` where it is a contrastive one, else of ViT-L/14's debug twin. None for 0 steps."""
    if not steps:
        return None
    own = run.model.kind == "clip"
    preset, layer, settings = (run.preset, "", {"train.stability.threshold": 6}) if own else (PRESET, LAYER, SETTINGS)
    here = {"root": run.root, "name": "story", "seed": run.seed, "train.steps": steps, "backend.kind": "single"}  # all in this process
    told = load(preset, "pretrain", settings | here)
    return drawn(rehearse(told, at_step=3 * steps // 5, gain=GAIN, layer=layer, clipped=CLIPPED))


def drawn(story: Rehearsal) -> Drawn:
    """Loss over steps of the clean, the unguarded and the guarded run, with the guard's decisions marked."""
    labels = {"clean": "clean, fp32", "unguarded": "fp16, left to itself", "strained": "fp16, guarded"}
    rows = [{"run": labels[name], "step": line["step"], "loss": line["loss"]} for name, lines in story.lines.items() for line in lines]
    table = pd.DataFrame(rows)
    figure, axis = blank(9, 4.2)
    for colour, (label, part) in zip(("0.55", "C3", "C0"), table.groupby("run", sort=False), strict=True):
        axis.plot(part["step"], part["loss"], color=colour, label=label, linewidth=1.4)
    for event in story.events:
        decision = event["decision"]
        tried = [row for row in event["last_steps"] if row["step"] > decision["rewind_to"] and isinstance(row["loss"], float)]
        axis.plot([row["step"] for row in tried], [row["loss"] for row in tried], "x", color="C0")
        axis.axvline(decision["rewind_to"], color="C0", linestyle=":")
        text = f"step {decision['step']}: {decision['cause']};\nback to {decision['rewind_to']}, on in {decision['precision']}"
        axis.annotate(text, (decision["rewind_to"], 0.97), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    lost = story.lines["unguarded"][-1]["step"]
    axis.axvline(lost, color="C3", linestyle=":")
    axis.annotate(f"step {lost}: {story.unguarded.reason}", (lost, 0.03), xycoords=("data", "axes fraction"), fontsize=8, color="C3")
    axis.set(xlabel="step", ylabel="loss", title=f"guarded minus clean at the end: {story.gap:+.3f} (noise of a step {story.noise:.3f})")
    axis.legend(fontsize=8, loc="lower left")
    folders = ", ".join(result.folder for result in (story.clean, story.unguarded, story.strained))
    return Drawn("stability_story", figure, table, f"metrics.jsonl and stability/ of {folders}")
