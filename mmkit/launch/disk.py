"""What a run fills on disks: checkpoints, export, caches, and what is fetched for it, beside the free space
there.

Checkpoints are whole tensors with both moments in fp32, 12 bytes a trained parameter, whatever the backend
(`training.checkpoint`); one is written before the oldest goes.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkit.cache import cache_root
from mmkit.config import ConfigError, RunConfig
from mmkit.launch.plan import Plan
from mmkit.storage import is_remote

if TYPE_CHECKING:
    from mmkit.launch.requirements import Requirement

CHECKPOINT_BYTES = 12  # of a trained parameter: itself and Adam's two moments in fp32


class DiskError(ConfigError):
    """The disk of the run folder cannot hold the run's checkpoints; the message says what it takes, what is
    free and what to do."""


def gb(count: float) -> str:
    """Bytes for people, in decimal units as disks are sold."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def existing(path: str | os.PathLike) -> Path:
    """``path``, or the nearest folder above it that is there."""
    place = Path(str(path).removeprefix("file://")).expanduser().absolute()
    return next(parent for parent in (place, *place.parents) if parent.exists())


def free_bytes(path: str | os.PathLike) -> int | None:
    """Free bytes of the disk that ``path`` is or would be on; None behind a URL."""
    return None if is_remote(path) else shutil.disk_usage(existing(path)).free


def shown_free(path: str | os.PathLike) -> str:
    """`free_bytes` for people."""
    free = free_bytes(path)
    return "no limit" if free is None else gb(free)


def disk_of(path: str | os.PathLike) -> int | None:
    """The device that ``path`` is or would be on; None behind a URL."""
    return None if is_remote(path) else os.stat(existing(path)).st_dev


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of one checkpoint."""
    return CHECKPOINT_BYTES * sum(part.trained + part.adapters for part in plan.parts)


def checkpoints_at_once(run: RunConfig, steps: int | None) -> int:
    """The most checkpoints of a run that are on the disk together: those that are kept, and the one being
    written.

    Where the number of ``steps`` is not known, those that ``keep_every`` keeps are not in it.
    """
    keep, batch = run.train.checkpoint, run.train.global_batch
    every = (
        keep.save_every
        or math.ceil(keep.save_samples / batch)
        or (run.train.eval_every if keep.best_metric else 0)
    )
    kept = keep.keep_last + bool(keep.best_metric) + 1
    if not every:
        return 1  # that of the end
    if steps is None:
        return kept
    forever = steps // math.lcm(every, keep.keep_every) if keep.keep_every else 0
    return min(kept + forever, math.ceil(steps / every))


def export_bytes(plan: Plan) -> int:
    """Bytes of the export: what was trained, and what no source holds, in fp32; frozen parts are named by
    their source."""
    referred = {"encoders", "language"} if plan.run.model.kind == "vlm" else set()
    whole = sum(part.parameters for part in plan.parts if part.trained or part.component not in referred)
    return 4 * (whole + sum(part.adapters for part in plan.parts))


def feature_bytes(run: RunConfig) -> int:
    """At most so many bytes of cached features an example takes: the grids of all encoders for each picture,
    or what locked towers give for its picture and caption, in fp32."""
    if run.model.kind == "vlm":
        from mmkit.models.encoders import build_encoder

        grids = [encoder.side**2 * build_encoder(encoder, "meta").width for encoder in run.model.encoders]
        return 4 * run.data.max_images * sum(grids)
    from mmkit.models.build import build

    model = build(run.model, device="meta", weights=False)
    widths = {
        "image": lambda: model.clip.visual.trunk.num_features,
        "text": lambda: model.clip.text.transformer.config.hidden_size,
    }
    return 4 * sum(widths[tower]() for tower in model.cacheable)


def disk_rows(plan: Plan, needs: Sequence[Requirement] = ()) -> list[dict[str, Any]]:
    """One row for each thing that ``plan``'s run writes or fetches: bytes, where, free space there; and one
    for each disk with several."""
    run, entries = plan.run, []
    if run.stage != "eval":
        one, count = checkpoint_bytes(plan), checkpoints_at_once(run, plan.steps)
        keep, more = run.train.checkpoint, ""
        if keep.keep_every and plan.steps is None:
            more = f", and one more for each {keep.keep_every} steps"
        entries.append((f"checkpoints: {count} x {gb(one)}{more}", count * one, f"{run.folder}/checkpoints"))
        entries.append(("export", export_bytes(plan), f"{run.folder}/export"))
        if is_remote(run.folder):
            entries.append(("export, before it is uploaded", export_bytes(plan), tempfile.gettempdir()))
        if run.data.cache_features:
            one, folder = feature_bytes(run), str(Path(run.data.cache_dir or cache_root()) / "features")
            entries.append(
                (f"feature cache: at most {gb(one)} an example", plan.samples and one * plan.samples, folder)
            )
    for kind in ("weights", "data"):
        group = [need for need in needs if need.kind == kind and (need.fetch or need.known.size)]
        for place in dict.fromkeys(
            need.to if kind == "weights" else str(Path(need.to).parent) for need in group
        ):
            here = [need.known.size for need in group if place in (need.to, str(Path(need.to).parent))]
            unknown = f" and {here.count(None)} of unknown size" if None in here else ""
            entries.append((f"{kind} to fetch{unknown}", sum(size or 0 for size in here) or None, place))
    rows = []
    for what, size, where in entries:
        rows.append(
            {
                "disk": what,
                "takes": "unknown" if size is None else gb(size),
                "where": where,
                "free there": shown_free(where),
            }
        )
    for disk in dict.fromkeys(disk_of(where) for *_, where in entries):
        shared = [
            (size or 0, where) for _, size, where in entries if disk is not None and disk_of(where) == disk
        ]
        if len(shared) > 1:
            total, where = sum(size for size, _ in shared), shared[0][1]
            verdict = "fits" if total <= free_bytes(where) else "does NOT fit"
            row = {
                "disk": f"together: {verdict}",
                "takes": gb(total),
                "where": str(existing(where)),
                "free there": shown_free(where),
            }
            rows.append(row)
    return rows


def check_disk(plan: Plan) -> None:
    """DiskError where the run folder's disk cannot hold two checkpoints (one, where the run writes no more):
    the next one is written before an old one is removed, so such a run would stop at its second save.
    Those this run has written before count as free: they give way."""
    run = plan.run
    if run.stage == "eval" or is_remote(run.folder) or run.train.checkpoint.on_disk_full == "continue":
        return
    count, one = min(checkpoints_at_once(run, plan.steps), 2), checkpoint_bytes(plan)
    old = Path(run.folder.removeprefix("file://")) / "checkpoints"
    held = sum(path.stat().st_size for path in old.rglob("*") if path.is_file()) if old.is_dir() else 0
    free = free_bytes(run.folder)
    if free + held < count * one:
        every = "" if count == 1 else ", and the next is written before an old one is removed"
        raise DiskError(
            f"{run.preset}/{run.stage}: a checkpoint takes {gb(one)}{every}; "
            f"{existing(run.folder)} has {gb(free)} free"
            + (f" and {gb(held)} of this run's older checkpoints" if held else "")
            + ". Free some space, or keep runs elsewhere: root=/larger/disk, or root=s3://BUCKET/runs or "
            + f"gs://BUCKET/runs (now root={run.root})"
        )
