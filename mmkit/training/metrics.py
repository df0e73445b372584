"""What a run writes down: metrics.jsonl, a line a step, and environment.json.

Values of a step stay on the device until a log step; sums over bf16 losses are taken in fp64, since a bf16 sum of ones
stops at 256. metrics.jsonl is the truth: progress bars and notebooks read it, and with ``train.tensorboard`` its numbers
stand in TensorBoard too.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmkit.storage import Store

log = logging.getLogger(__name__)

PACKAGES = (
    "mmkit", "torch", "torchvision", "torch_xla", "deepspeed", "transformers", "peft", "open_clip_torch", "timm", "bitsandbytes",
    "safetensors", "numpy",
)  # fmt: skip
REMOTE_SECONDS = 30.0  # between uploads of metrics.jsonl to an object store


def is_sum(name: str) -> bool:
    """Whether a value of the objective is a sum over targets (added up) rather than a reading (averaged)."""
    return name == "loss_sum" or name.startswith("n_")


def totals(outs: Sequence[Mapping[str, Any]], device: torch.device) -> tuple[list[str], Tensor]:
    """Names and the values of one step on this process: sums added over its micro-batches, readings averaged. The value
    ``ones`` becomes, summed with the others, the number of processes that added up: what readings are divided by.

    In fp64, which holds counts of any size (fp32 only up to 2**24) beside losses.
    """
    names = sorted({name for out in outs for name in out})
    values = []
    for name in names:
        parts = [torch.as_tensor(out[name], device=device).detach().double() for out in outs if name in out]
        whole = torch.stack(parts)
        values.append(whole.sum() if is_sum(name) else whole.mean())
    return [*names, "ones"], torch.stack([*values, torch.ones((), dtype=torch.float64, device=device)])


def number(value: Any) -> Any:
    """A plain number of a 0-dim tensor; anything else unchanged."""
    return value.item() if isinstance(value, Tensor) else value


def row_of(pending: Mapping[str, Any]) -> dict[str, Any]:
    """One line of a finished step.

    ``pending`` holds ``names`` and ``values`` of the objective, summed over processes; ``counts`` (targets, samples, tokens, positions) of
    the global batch; ``keys``; and host values or 0-dim tensors under their final names.
    """
    targets, samples, tokens, positions = (int(value) for value in pending["counts"].tolist())
    row = {name: number(value) for name, value in pending.items() if name not in ("names", "values", "counts", "keys")}
    row |= {"targets": targets, "samples": samples, "tokens": tokens, "fill": round(tokens / max(positions, 1), 4)}
    values = dict(zip(pending["names"], pending["values"].tolist(), strict=True))
    ones = values.pop("ones")
    count = max(targets, 1)
    for name, value in values.items():
        if name == "loss_sum":
            row["loss"] = value / count
        elif name == "n_correct":
            row["accuracy"] = value / count
        elif name == "n_empty":
            row["empty"] = int(value)
        elif not is_sum(name):
            row[name] = value / ones
    first = [name for name in ("step", "loss", "grad_norm", "lr") if name in row]
    return {name: row[name] for name in [*first, *(name for name in row if name not in first)]}


def device_facts(backend: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    """Peak memory, programs compiled, updates left out so far, the loss scale; warns where programs are still being compiled (U46)."""
    facts: dict[str, Any] = {"n_skipped": int(backend.n_skipped), "memory": backend.peak_memory(), "compiles": backend.compiles()}
    if backend.precision == "fp16":
        facts["scaler"] = backend.extra_state().get("scaler", {}).get("scale")
    warm = before.get("step", 0) > 2
    if warm and facts["compiles"] > before.get("compiles", 0):
        log.warning("step %d: the device compiled again (%d programs): a batch had a new shape", before["step"] + 1, facts["compiles"])
    return facts


class MetricsFile:
    """Appends lines to ``metrics.jsonl`` of a run folder; only the main process makes one.

    Object stores cannot append: there the lines collect in a local file, and the whole of it is uploaded every `REMOTE_SECONDS` (seldomer
    where an upload takes long), before each checkpoint (`flush`) and at the end. A kill loses at most the lines since then, never
    those of steps that a resume goes on from.
    """

    def __init__(self, folder: str, last_step: int = 0, last_samples: int = 0, tensorboard: bool = False):
        """Keeps the lines up to ``last_step``, or, as a change of the batch numbers steps anew, up to ``last_samples`` samples.

        ``tensorboard``: the numbers of each line go to ``tensorboard/`` of the folder as well.
        """
        self.store, self.name = Store(folder), "metrics.jsonl"
        column, last = ("total_samples", last_samples) if last_samples else ("step", last_step)
        kept = _text([line for line in self._read() if line.get(column, 0) <= last] if last else [])
        self.store.make()
        self.store.write(self.name, kept)
        self.uploaded, self.took = time.monotonic(), 0.0
        self.waiting = b""  # what a full disk has not taken yet
        if self.store.remote:
            self.file = tempfile.TemporaryFile()  # noqa: SIM115
            self.file.write(kept)
        else:
            self.file = open(self.store.path(self.name), "ab", buffering=0)  # noqa: SIM115
        self.board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # A run that begins anew begins its curves anew, as metrics.jsonl does; otherwise TensorBoard forgets (purge_step) the steps
            # that a resume or a rewind makes again.
            if not last:
                shutil.rmtree(f"{folder}/tensorboard", ignore_errors=True)
            self.board = SummaryWriter(f"{folder}/tensorboard", purge_step=last_step + 1 if last_step else None)

    def write(self, row: Mapping[str, Any]) -> None:
        """One more line, on the disk before this returns. A full disk does not end the run, which is for checkpoints to
        decide: the line is kept and written with a later one."""
        try:
            self._append(_text([row]))
        except OSError as error:
            log.warning("%s takes no line, the next is written with it: %s", self.store.path(self.name), error)
        try:
            self._draw(row)
        except OSError as error:  # its writer raises from then on what once failed in its thread
            log.warning("TensorBoard's curves end at step %s: %s", row.get("step"), error)
            self.board = None
        if self.store.remote and time.monotonic() - self.uploaded > max(REMOTE_SECONDS, 20 * self.took):
            self.flush()

    def flush(self) -> None:
        """Makes every line so far readable in the run folder. Where a store does not answer the run goes on: the lines are kept."""
        if self.board:
            self.board.flush()
        try:
            self._upload()
        except OSError as error:
            log.warning("%s was not uploaded, the next upload holds its lines: %s", self.store.path(self.name), error)

    def close(self) -> None:
        """Writes what is left."""
        try:
            self._append(b"")
            self._upload()
        finally:
            self.file.close()
            if self.board:
                self.board.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.close()
        except OSError as error:
            if kind is None:
                raise
            # what ended the run is the error to show
            log.error("%s lacks its last lines: %s", self.store.path(self.name), error)

    def _draw(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items() if self.board else ():
            if isinstance(value, (int, float)) and name != "step":
                self.board.add_scalar(name, value, row["step"])

    def _append(self, text: bytes) -> None:
        self.waiting += text
        while self.waiting:  # as much as there is room for may be taken
            self.waiting = self.waiting[self.file.write(self.waiting) :]
        self.file.flush()

    def _upload(self) -> None:
        if not self.store.remote:
            return
        self.uploaded = time.monotonic()
        self.file.seek(0)
        self.store.write(self.name, self.file.read())
        self.took = time.monotonic() - self.uploaded

    def _read(self) -> list[dict]:
        """The lines an earlier process wrote, without one it was killed in."""
        if self.store.size(self.name) is None:
            return []
        out = []
        for line in self.store.read(self.name).decode("utf8", "replace").splitlines():
            try:
                out.append(json.loads(line))
            except ValueError:
                continue
        return out


def _text(rows: Sequence[Mapping[str, Any]]) -> bytes:
    plain = [{name: _finite(value) for name, value in row.items()} for row in rows]
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in plain).encode()


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become text."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def environment(**facts: Any) -> dict[str, Any]:
    """Versions, commit and hardware of this process, with what else the caller knows (data fingerprints, table of groups)."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    hardware = {"cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), "machine": platform.machine()}
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": versions,
        "commit": _commit(),
        "hardware": hardware | {"devices": devices, "threads": torch.get_num_threads()},
        "command": sys.argv,
        **facts,
    }


def _commit() -> str | None:
    """The commit of this checkout, None where the package is installed without one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
