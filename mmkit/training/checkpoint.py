"""Checkpoints that any backend at any world size resumes: whole tensors by parameter name.

    step-00000100/
        rank-00000-00000.safetensors   param.NAME, exp_avg.NAME, exp_avg_sq.NAME of every world-th trained parameter, fp32
        buffers.safetensors            running statistics of trained modules, where there are any
        state.json                     step, samples, data position, random states, schedule, scaler, precision history
        manifest.json                  names, shapes, dtypes, files, hashes; frozen weights by source and hash; its own hash

Parameters stream one at a time and ranks take turns, so no process holds more than its share. The folder is written as
``step-00000100.tmp``, flushed and renamed (on object stores the manifest is written last). The latest checkpoint is found, not
stored. Not here: weights for use (`models.pretrained`), and files of other programs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from mmkit.config import CheckpointConfig
from mmkit.errors import InputError
from mmkit.models.exports import COMPLETE
from mmkit.storage import Store
from mmkit.training.agreement import by_each

log = logging.getLogger(__name__)

VERSION = 2  # 1 told frozen weights apart by a sample of their values only
MOMENTS = ("exp_avg", "exp_avg_sq")
SHARD_BYTES = 256 << 20  # a rank flushes its tensors to a file when it holds this much
POLL_SECONDS = 0.05
CLOSE_SECONDS = 60.0  # that a failed run gives a save in hand which waits for other ranks: they may be gone


class CheckpointError(InputError):
    """A checkpoint could not be written or must not be loaded; the message names the file or tensor and what to do."""


def folder_name(step: int) -> str:
    """``step-00000100``."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """100 of ``step-00000100``."""
    return int(name.removeprefix("step-"))


# ---------------------------------------------------------------- writing


class Writer:
    """One rank's part of one checkpoint: collects tensors and writes them in files of bounded size.

    A failure of any kind is remembered, not raised, so that the rank goes on taking part in the collective export and
    the others hear of it: `Checkpoints` raises it on all of them.
    """

    def __init__(self, store: Store, folder: str, rank: int, keep_in_memory: bool = False):
        self.store, self.folder, self.rank, self.keep = store, folder, rank, keep_in_memory
        self.error: BaseException | None = None
        self.complete = False  # it has its final name; known to the main process
        self.pending: dict[str, Tensor] = {}
        self.held = 0
        self.shards: list[tuple[str, dict[str, Tensor]]] = []
        self.files: dict[str, dict] = {}
        self.tensors: dict[str, dict] = {}

    def add(self, name: str, entry: Mapping[str, Tensor]) -> None:
        """One trained parameter with its moments: fp32 tensors on the CPU that nobody changes later."""
        for kind in ("param", *MOMENTS):
            self.pending[f"{kind}.{name}"] = entry[kind]
            self.held += entry[kind].numel() * 4
        kind = str(entry["param"].dtype).removeprefix("torch.")
        self.tensors[name] = {"file": self._next_file(), "shape": list(entry["param"].shape), "dtype": kind}
        if self.held >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Ends the current file."""
        if self.pending:
            self.shards.append((self._next_file(), self.pending))
            self.pending, self.held = {}, 0
        if not self.keep:
            self.write_all()

    def write_all(self) -> None:
        """Writes the files ended so far and forgets their tensors."""
        while self.shards:
            name, tensors = self.shards.pop(0)
            # making the bytes can fail as well as writing them: it takes as much memory again
            self.attempt(lambda name=name, tensors=tensors: self.write(name, safetensors.torch.save(tensors)))

    def write(self, name: str, data: bytes) -> None:
        """One file, with its size and hash noted. Raises what the store raises."""
        self.store.write(f"{self.folder}/{name}", data)
        self.files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def attempt(self, function: Callable, *args) -> None:
        """``function(*args)`` unless something failed before; an error is remembered."""
        if self.error is None:
            try:
                function(*args)
            except Exception as error:
                self.error = error

    def finish(self) -> None:
        """Writes what is left, then this rank's mark: all its files are on the disk."""
        self.flush()
        self.write_all()
        mark = lambda: json.dumps({"files": self.files, "tensors": self.tensors}).encode()  # noqa: E731
        self.attempt(lambda: self.write(_mark(self.rank), mark()))

    def _next_file(self) -> str:
        return f"rank-{self.rank:05d}-{len(self.files) + len(self.shards):05d}.safetensors"


def _mark(rank: int) -> str:
    return f"rank-{rank:05d}.json"


class Checkpoints:
    """The checkpoints of one run: saves, finds, keeps some and removes the rest.

    ``backend`` gives rank, world, is_main, export_state, any_device, all_objects, broadcast, barrier; every rank calls every method that
    says so.
    """

    def __init__(self, folder: str, config: CheckpointConfig, backend: Any):
        self.store = Store(folder)
        self.config = config
        self.backend = backend
        self.thread: threading.Thread | None = None
        self.abort = threading.Event()
        self.writer: Writer | None = None
        self.step = -1  # of the last save begun
        self.written = -1  # of the last save that is on the disk
        self.last_save_seconds = 0.0  # how long the last save held up training

    # ------------------------------------------------------------ all ranks

    def save(
        self, step: int, state: dict[str, Any], *, buffers: Mapping[str, Tensor] | None = None,
        frozen: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None,
    ) -> bool:  # fmt: skip
        """Writes the checkpoint of ``step``. All ranks. ``state`` is JSON, the same on every rank but for nothing the resume needs.

        Returns whether it was written (in the background: whether the one before was); where it was not, older
        checkpoints stay as they were. A storage that does not take it (OSError: full, over quota, read-only, out of reach)
        raises CheckpointError, or with ``on_disk_full: continue`` is logged and returns False. Anything else raises on
        every rank, whichever it happened on: too little memory CheckpointError, a fault of the program RuntimeError.
        """
        begin = time.monotonic()
        earlier_ok = self.wait()
        self.step = step
        folder = folder_name(step) + ("" if self.store.remote else ".tmp")
        writer = Writer(self.store, folder, self.backend.rank, keep_in_memory=self.config.background)
        if self.backend.is_main:
            writer.attempt(self._clear_leftovers, folder)
        self.backend.barrier()
        writer.attempt(self.store.make, folder)  # on every rank: one that sees another disk is told from the others later
        for name, entry in self.backend.export_state(owner=lambda index: index % self.backend.world):
            if entry is not None:
                writer.add(name, entry)
        writer.flush()
        if self.backend.is_main and buffers:
            writer.shards.append(("buffers.safetensors", {name: tensor.detach().cpu().clone() for name, tensor in buffers.items()}))
        head = {"step": step, "world": self.backend.world, "frozen": dict(frozen or {}), "metrics": dict(metrics or {})}
        self.writer = writer
        if self.config.background:
            self.abort.clear()
            self.thread = threading.Thread(target=self._write_and_commit, args=(writer, state, head), daemon=False)
            self.thread.start()
            self.last_save_seconds = time.monotonic() - begin
            return earlier_ok
        writer.finish()
        failed = self.backend.any_device(writer.error is not None)
        if self.backend.is_main and not failed:
            writer.attempt(self._commit, writer, state, head)
        done = self._settle()
        self.last_save_seconds = time.monotonic() - begin
        return done

    def wait(self) -> bool:
        """Waits for a save that is still being written. All ranks. The same errors as `save`."""
        if self.thread is None:
            return True
        if not self.backend.is_main:
            self.thread.join()
        others_failed = self.backend.any_device(not self.backend.is_main and self.writer.error is not None)
        if others_failed:
            self.abort.set()
        self.thread.join()
        self.thread = None
        return self._settle()

    def close(self) -> None:
        """Ends this rank's part of a save that nobody waits for: the next run here would clear it away half written. No
        collective."""
        if self.thread is None:
            return
        self.thread.join(CLOSE_SECONDS if self.backend.world > 1 else None)
        self.abort.set()
        self.thread.join()
        self.thread = None
        if self.writer.error is not None:
            log.error("the checkpoint of step %d was not written: %r", self.step, self.writer.error)

    def latest(self) -> str | None:
        """Path of the newest complete checkpoint, the main process's answer on every rank."""
        return self.at_or_before(sys.maxsize)

    def at_or_before(self, step: int) -> str | None:
        """Path of the newest complete checkpoint of ``step`` or earlier, the main process's answer on every rank.

        Removes nothing. Waits for a save in hand first: it may be the one, and must not become the newest after the run
        has gone back behind it.
        """
        self.wait()
        kept = [found for found in self.steps() if found <= step] if self.backend.is_main else []
        return self.backend.broadcast(self.store.path(folder_name(kept[-1])) if kept else None)

    def is_best(self, value: float) -> bool:
        """Whether ``value`` is finite and beats the metric of every kept checkpoint; decided on the main process for all (U38)."""
        better = min if self.config.best_mode == "min" else max
        known = [] if not self.backend.is_main else list(self._metric_values().values())
        return self.backend.broadcast(math.isfinite(value) and better([value, *known]) == value and value not in known)

    # ------------------------------------------------------------ this process

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending; incomplete folders are skipped with a note."""
        out = []
        for name in self.store.folders():
            if not COMPLETE.fullmatch(name):
                continue
            if self.store.size(f"{name}/manifest.json") is None:
                log.warning("skipping %s: it has no manifest, so its writing was cut short", self.store.path(name))
                continue
            out.append(step_of(name))
        return sorted(out)

    def _clear_leftovers(self, folder: str) -> None:
        """Removes what a killed run left, and ``folder``."""
        for name in self.store.folders():
            if name.endswith(".tmp") or name == folder:
                self.store.remove(name)

    def _write_and_commit(self, writer: Writer, state: dict, head: dict) -> None:
        """The thread of a save in the background. An error that left it would be printed and forgotten."""
        try:
            writer.finish()
            if not self.backend.is_main or writer.error is not None:
                return
            waiting = set(range(self.backend.world))
            while waiting and not self.abort.is_set():
                marked = {rank for rank in waiting if self.store.size(f"{writer.folder}/{_mark(rank)}") is not None}
                waiting -= marked
                if waiting:
                    time.sleep(POLL_SECONDS)
            if not waiting:
                writer.attempt(self._commit, writer, state, head)
        except BaseException as error:
            writer.error = writer.error or error

    def _commit(self, writer: Writer, state: dict, head: dict) -> None:
        """Main process, when every rank has finished: joins the marks, writes state and manifest, gives the folder its name."""
        writer.files, tensors = self._join_marks(writer.folder)
        writer.write("state.json", json.dumps(state).encode())
        manifest = {"format": "mmkit-checkpoint", "version": VERSION, **head, "tensors": tensors, "files": writer.files}
        manifest["sha256"] = _own_hash(manifest)
        writer.write("manifest.json", json.dumps(manifest, indent=1).encode())
        if not self.store.remote:
            self.store.rename(writer.folder, folder_name(head["step"]))
        writer.complete = True
        self._remove_old()

    def _join_marks(self, folder: str) -> tuple[dict, dict]:
        files, tensors, missing = {}, {}, []
        for rank in range(self.backend.world):
            if self.store.size(f"{folder}/{_mark(rank)}") is None:
                missing.append(rank)
                continue
            mark = json.loads(self.store.read(f"{folder}/{_mark(rank)}"))
            files |= mark["files"]
            tensors |= mark["tensors"]
        if missing:
            raise FileNotFoundError(
                f"missing rank {', '.join(map(str, missing))} of {self.backend.world}: its files are not in {self.store.path(folder)}; "
                "the run folder must be on a disk that every host shares, or an object store"
            )
        return files, tensors

    def _settle(self) -> bool:
        """After a save, all ranks together: True, or the error of one of them raised on all, or logged."""
        own, writer = self.writer.error, self.writer
        kind = 2 if isinstance(own, OSError) else 1 if isinstance(own, MemoryError) else 0
        everyone = self.backend.all_objects(own and (kind, str(own) if kind == 2 else repr(own)))
        problems = [(*problem, rank) for rank, problem in enumerate(everyone) if problem]
        if not problems:
            self.written = self.step
            return True
        kept = ""
        with contextlib.suppress(OSError):  # a storage that does not answer must not end a run that may go on
            steps = self.steps() if self.backend.is_main else []
            kept = f" (latest: {folder_name(steps[-1])})" if steps else " (there are none yet)"
        complete, kept = self.backend.broadcast((writer.complete, kept))
        failed = "could not be written to"
        if complete:
            self.written, failed = self.step, "is written, but older ones could not be removed from"
        else:
            with contextlib.suppress(OSError):  # the next save clears it away
                self.store.remove(writer.folder)
        kind, text, rank = min(problems)  # what is not the storage's stops the run, whatever else happened
        where = f"rank {rank} of {self.backend.world}: " if self.backend.world > 1 else ""
        message = f"checkpoint of step {self.step} {failed} {self.store.path()}: {where}{text}"
        message += f"; older checkpoints are intact{kept}"
        if kind == 1:
            advice = "The host ran out of memory; train.checkpoint.background=false needs less of it"
            raise CheckpointError(f"{message}. {advice}") from own
        if kind == 0:
            raise RuntimeError(message) from own
        if self.config.on_disk_full == "stop":
            raise CheckpointError(f"{message}. Free some space and resume, or set train.checkpoint.on_disk_full=continue to train on")
        if self.backend.is_main:
            log.error("%s; training goes on because train.checkpoint.on_disk_full is 'continue'", message)
        return complete

    def _metric_values(self) -> dict[int, float]:
        """Step -> value of the watched metric, for checkpoints that have a finite one: NaN compares as neither better nor worse."""
        out = {}
        for step in self.steps() if self.config.best_metric else []:
            metrics = json.loads(self.store.read(f"{folder_name(step)}/manifest.json"))["metrics"]
            if math.isfinite(metrics.get(self.config.best_metric, math.nan)):
                out[step] = metrics[self.config.best_metric]
        return out

    def _remove_old(self) -> None:
        steps = self.steps()
        keep = set(steps[-self.config.keep_last :])
        if self.config.keep_every:
            keep |= {step for step in steps if step % self.config.keep_every == 0}
        if values := self._metric_values():
            keep.add((min if self.config.best_mode == "min" else max)(values, key=values.get))
        for step in set(steps) - keep:
            self.store.remove(folder_name(step))


def _own_hash(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------- reading


class Checkpoint:
    """A complete checkpoint opened for reading: ``manifest``, ``state``, and whole tensors by name.

    Raises CheckpointError where the manifest is damaged, of a newer version, or names a file that is missing or of another size.
    """

    def __init__(self, path: str):
        self.store = Store(path)
        self.path = self.store.path()
        self.manifest = self._read_manifest()
        for name, facts in self.manifest["files"].items():
            size = self.store.size(name)
            if size != facts["bytes"]:
                found = "is missing" if size is None else f"has {size} bytes, not {facts['bytes']}"
                raise CheckpointError(f"{self.store.path(name)} {found}; {self._advice()}")
        self.state: dict[str, Any] = json.loads(self._checked("state.json"))
        self.headers: dict[str, tuple[int, dict]] = {}

    @property
    def step(self) -> int:
        """Optimizer steps done when it was written."""
        return self.manifest["step"]

    def names(self) -> list[str]:
        """Names of the trained parameters it holds."""
        return list(self.manifest["tensors"])

    def verify(self, rank: int = 0, world: int = 1) -> str | None:
        """Hashes every world-th file; None, or a message that names the damaged one."""
        for name in list(self.manifest["files"])[rank::world]:
            try:
                self._checked(name)
            except (OSError, CheckpointError) as error:
                return f"{self.store.path(name)}: {error}" if isinstance(error, OSError) else str(error)
        return None

    def require(self, names: Iterable[str]) -> None:
        """CheckpointError where the checkpoint lacks one of ``names`` or holds others."""
        names, held = set(names), set(self.names())
        if missing := sorted(names - held):
            raise CheckpointError(f"{self.path} lacks {len(missing)} trained parameters of this run, first {missing[0]!r}; {_OTHER_RUN}")
        if unknown := sorted(held - names):
            raise CheckpointError(f"{self.path} holds {len(unknown)} parameters unknown to this run, first {unknown[0]!r}; {_OTHER_RUN}")

    def require_frozen(self, frozen: Mapping[str, Mapping[str, Any]]) -> None:
        """CheckpointError where it was trained on other frozen weights than ``frozen`` (component -> sources, hash, tensors)."""
        nothing = {"tensors": {}, "sources": ["nothing"]}
        for component in sorted({*self.manifest["frozen"], *frozen}):
            there, here = self.manifest["frozen"].get(component, nothing), frozen.get(component, nothing)
            if there.get("sha256") == here.get("sha256"):
                continue
            old, new = there["tensors"], here["tensors"]
            first = next((name for name in {**old, **new} if old.get(name) != new.get(name)), "their order")
            raise CheckpointError(
                f"{self.path} was trained on other frozen weights of component {component!r} ({', '.join(there['sources'])}) than this run "
                f"has ({', '.join(here['sources'])}), first {first!r}; start from the same export and sources, or use resume=never"
            )

    def get(self, name: str) -> dict[str, Tensor]:
        """param, exp_avg and exp_avg_sq of one trained parameter, fp32 on the CPU."""
        file = self.manifest["tensors"][name]["file"]
        return {kind: self._tensor(file, f"{kind}.{name}") for kind in ("param", *MOMENTS)}

    def buffers(self) -> dict[str, Tensor]:
        """Running statistics that were saved, by name."""
        if "buffers.safetensors" not in self.manifest["files"]:
            return {}
        return safetensors.torch.load(self.store.read("buffers.safetensors"))

    def _tensor(self, file: str, key: str) -> Tensor:
        start, header = self._header(file)
        if key not in header:
            raise CheckpointError(f"{self.store.path(file)} has no tensor {key!r} though the manifest lists it; {self._advice()}")
        begin, end = header[key]["data_offsets"]
        data = bytearray(self.store.read(file, start + begin, end - begin))
        flat = torch.frombuffer(data, dtype=torch.float32) if data else torch.empty(0)
        return flat.reshape(header[key]["shape"])

    def _header(self, file: str) -> tuple[int, dict]:
        """Where a safetensors file's data starts, and its table of tensors."""
        if file not in self.headers:
            length = int.from_bytes(self.store.read(file, 0, 8), "little")
            self.headers[file] = (8 + length, json.loads(self.store.read(file, 8, length)))
        return self.headers[file]

    def _checked(self, name: str) -> bytes:
        data = self.store.read(name)
        if hashlib.sha256(data).hexdigest() != self.manifest["files"][name]["sha256"]:
            raise CheckpointError(f"{self.store.path(name)} is damaged: its hash differs from the manifest's; {self._advice()}")
        return data

    def _read_manifest(self) -> dict:
        name = self.store.path("manifest.json")
        try:
            manifest = json.loads(self.store.read("manifest.json"))
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is no complete checkpoint: it has no manifest.json") from None
        except ValueError:
            raise CheckpointError(f"{name} is damaged: it is not JSON; {self._advice()}") from None
        if not isinstance(manifest, dict) or manifest.get("sha256") != _own_hash(manifest):
            raise CheckpointError(f"{name} is damaged: its content differs from its own hash; {self._advice()}")
        if (found := manifest["version"]) != VERSION:
            how = "update mmkit" if found > VERSION else "go on with the mmkit that wrote it, or start anew with resume=never"
            raise CheckpointError(f"{name} has version {found}, this mmkit reads version {VERSION}; {how}")
        return manifest

    def _advice(self) -> str:
        return f"resume from another checkpoint (resume=PATH), or remove {self.path} to let resume=auto take the one before"


_OTHER_RUN = "it belongs to a run with another model, other trained components or another adapter: use another name, or resume=never"


def open_verified(path: str, backend: Any) -> Checkpoint:
    """Opens a checkpoint on every rank; the ranks share the hashing and all raise where one finds damage or sees nothing."""
    checkpoint = by_each(backend, path, lambda: Checkpoint(path))
    problems = [found for found in backend.all_objects(checkpoint.verify(backend.rank, backend.world)) if found]
    if problems:
        raise CheckpointError(problems[0])
    return checkpoint
