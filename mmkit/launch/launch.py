"""Starts a run where it belongs: in this process, or as a child with several processes or an XLA environment.

A child is watched through the run folder's ``metrics.jsonl``, so a notebook shows the same progress either way. An interrupt
(the stop button, Ctrl-C, a scheduler's SIGTERM or SIGUSR1) reaches the training processes themselves: they write a checkpoint after
the step in hand and end.
Clusters are not started from here: see `slurm.py` and `tpu.py`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

import psutil

from mmkit.config import BackendConfig, ConfigError, RunConfig, to_yaml
from mmkit.errors import InputError, UserError
from mmkit.storage import Store
from mmkit.notebook.tables import html
from mmkit.training.interrupt import Interrupt

Record = dict[str, Any]
WORKER = "MMKIT_WORKER"  # set in a child: train here, start nothing; the process id of whoever watches it, 1 where nobody does
ORPHAN_GRACE = 60.0  # seconds that a training process has for its last checkpoint once its launcher is gone
ERROR_PREFIX = "mmkit: error: "  # how the command line prints a user's error
ERROR_OF_CHILD = "mmkit: error as JSON: "  # how a child of `launch` does: one line, however many lines the message has
POLL = 0.5  # seconds between looks at metrics.jsonl
log = logging.getLogger(__name__)


class LaunchError(UserError, RuntimeError):
    """A training process ended with an error that is not the user's; the message ends with its last lines."""


@dataclasses.dataclass(frozen=True)
class Launched:
    """What a run left behind, read from its folder: of the whole training, however often it was resumed, and of this call."""

    run: RunConfig
    folder: str  # a path or URL
    steps: int  # made in all, by this call and those it resumed
    last: Record  # the last line of metrics.jsonl
    export: str | None  # the folder that `from_pretrained` reads
    seconds: float  # of this call, with all that is done beside training
    stopped: bool = False  # before its last step: interrupted, or by the stability guard
    told: str = ""  # what the user is to know of how it ended
    made: int = 0  # steps of this call
    trained_seconds: float = 0.0  # of all steps, with their evaluations and checkpoints
    mean_loss: float | None = None  # over the last tenth of the steps
    changes: tuple[str, ...] = ()  # settings that changed where this call resumed

    def numbers(self) -> dict[str, Any]:
        """What a notebook records of it, named by model and stage: of the whole training, so that a call that found it finished records
        the same. Empty for a dry run."""
        if self.run.dry_run:
            return {}
        start = f"{self.run.preset}_{self.run.stage}"
        found = {
            "steps": self.steps,
            "loss": self.last.get("loss"),
            "loss_last_tenth": self.mean_loss,
            "seconds": round(self.trained_seconds, 1),
            "export": self.export,
        }
        return {f"{start}_{name}": value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        if self.run.dry_run:
            return f"{self.run.preset}/{self.run.stage}: dry run: no steps were made; in {self.folder}"
        what = f"{self.made} steps in {self.seconds:.0f} s"
        if not self.made and self.steps and not self.stopped:
            from mmkit.training.same_run import already_done

            what = already_done(self.steps, self.run.train.steps or self.last.get("total_steps", self.steps))
        elif self.made != self.steps:
            what += f", {self.steps} in all"
        if isinstance(self.last.get("loss"), (int, float)):
            what += f", loss {self.last['loss']:.4f}" + (f" (last tenth {self.mean_loss:.4f})" if self.mean_loss is not None else "")
        ending = ", stopped early" if self.stopped else ""
        told = self.told or ("the same command or cell resumes it" if self.stopped else "")
        changes = "".join(f"\n{change}" for change in self.changes)
        return f"{self.run.preset}/{self.run.stage}: {what}{ending}; in {self.folder}" + (f"\n{told}" if told else "") + changes

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [{"what": name.removeprefix(f"{self.run.preset}_{self.run.stage}_"), "value": value} for name, value in self.numbers().items()]
        return f"<p>{escape(str(self))}</p>{html(rows)}"


def launch(run: RunConfig, on_log: Callable[[Record], None] | None = None) -> Launched:
    """Runs the training of ``run`` to its end, wherever its backend belongs, and returns what it left.

    ``on_log`` gets each new record of metrics.jsonl. Raises InputError (ConfigError among them) for what cannot work here and
    LaunchError when a process fails otherwise.
    """
    started = time.monotonic()
    if run.dry_run:
        return _left_by(run, started, [], stopped=False)
    before = read_metrics(run.folder)
    here = for_this_machine(run)
    command = child_command(here)
    if command is None:
        end_with(int(os.environ.get(WORKER, "1")))
        stopped = _train_here(here, on_log)
    else:
        _refuse_held_devices(here)
        stopped = _watch_child(here, command, on_log)
    return _left_by(run, started, before, stopped)


def for_this_machine(run: RunConfig) -> RunConfig:
    """``run`` resolved for the machine found here; a worker's stays as its launcher resolved it.

    Workers that torchrun, srun or mpirun started on a run which leaves something open choose for as many
    devices as there are workers: each finds the same machine, so all choose the same.
    """
    from mmkit.launch.choose import for_machine
    from mmkit.launch.machine import check_is_here, machine_of
    from mmkit.sharding.environment import process_environment, started_by, started_here

    if is_worker():
        # says what is missing of a launcher's variables before anything is decided by them
        process_environment(os.environ)
        if run.resolved:
            return run
    machine, world = machine_of(), started_by(os.environ)[1]
    check_is_here(machine)
    choice = for_machine(run, machine.for_workers(world, started_here(os.environ)))
    choice.plan.check()
    return choice.run


def is_worker() -> bool:
    """Whether this process was itself started by `launch`, torchrun, srun or mpirun and so trains in place.

    A kernel in which one DeepSpeed process ran has torchrun's variables too, with a world of 1: that is no worker. Nor is a batch
    script of SLURM (`started_by`).
    """
    from mmkit.sharding.environment import started_by

    return WORKER in os.environ or started_by(os.environ)[1] != 1


def child_command(run: RunConfig) -> list[str] | None:
    """The command that starts the run's processes, less its ``--config``; None where it trains in this process."""
    backend = run.backend
    if is_worker():
        return None
    if (backend.nodes or 1) > 1:
        raise ConfigError(
            f"backend.nodes = {backend.nodes}: several machines are started by their scheduler; use `mmkit launch --target slurm` or "
            "`--target tpu`, or run torchrun on each machine with `-m mmkit train --config FILE`; backend.nodes=1 uses this one alone"
        )
    train = ["-m", "mmkit", "train"]
    if (backend.processes or 1) > 1:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={backend.processes}", *train]
    return [sys.executable, *train] if child_environment(run) else None


def child_environment(run: RunConfig) -> dict[str, str]:
    """Variables that must be set before the training process imports anything; empty where none are needed."""
    return VARIABLES.get(run.backend.kind, lambda backend: {})(run.backend)


def _xla_variables(backend: BackendConfig) -> dict[str, str]:
    """What torch_xla reads on import and the environment does not say yet: the device that PJRT_DEVICE names, else a TPU where there is
    one, else virtual devices of the CPU."""
    host = Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists() or "TPU_NAME" in os.environ
    told, count = os.environ.get("PJRT_DEVICE"), backend.xla_devices
    wanted = {"PJRT_DEVICE": told or ("TPU" if host else "CPU")}
    if wanted["PJRT_DEVICE"] == "CPU" and (count or not told):
        wanted["CPU_NUM_DEVICES"] = str(count or 1)
    return {name: value for name, value in wanted.items() if os.environ.get(name) != value}


VARIABLES: dict[str, Callable[[BackendConfig], dict[str, str]]] = {"xla": _xla_variables}


def _refuse_held_devices(run: RunConfig) -> None:
    """An XLA device belongs to one process: a kernel that has touched it cannot start a child that needs it."""
    if not child_environment(run):
        return
    core = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    touched = getattr(core, "_xla_runtime_is_initialized", lambda: False)()
    if touched:
        raise ConfigError(
            "this kernel has already opened the XLA devices, so a training process could not; restart the kernel and launch before "
            "anything touches a device"
        )


def _train_here(run: RunConfig, on_log: Callable[[Record], None] | None) -> bool:
    from mmkit.training.loop import train

    on_eval = evaluation_of(run)
    result = train(run, on_log=on_log, **({"on_eval": on_eval} if on_eval else {}))
    return bool(getattr(result, "stopped", False))


def evaluation_of(run: RunConfig) -> Callable | None:
    """What is measured each ``train.eval_every`` steps or epochs: a contrastive run's tasks, or those of the demo where it names none.

    Tasks whose sets are not on the disk are left out with one warning; ConfigError for them where ``checkpoint.best_metric`` needs one.
    """
    if run.model.kind != "clip" or not run.train.eval_every:
        return None
    from mmkit.evaluation.clip_sets import absent_sets, check_metric, check_names, during_training
    from mmkit.models.build import image_transforms, tokenizer
    from mmkit.sharding.environment import process_environment
    from mmkit.training.schedule import VALIDATION_LOSS

    names, best = run.evaluation.tasks, run.train.checkpoint.best_metric
    decides = best is not None and best.startswith("eval_") and best != VALIDATION_LOSS
    check_names(names, present=decides)  # without a value that decides, nothing of the run depends on its sets
    check_metric(best, names)
    missing = absent_sets(names)
    speaks = process_environment(os.environ).rank == 0  # one warning, not one a process
    if missing and speaks:
        folders = ", ".join(f"{name} ({folder})" for name, folder in missing.items())
        log.warning(
            "not measured while training, since the set is not here: %s; put clip-benchmark's tar sets there, set MMKIT_EVAL_DATA to where "
            "they are, or silence this with train.eval_every=0", folders,
        )  # fmt: skip
    tools = tokenizer(run.model), image_transforms(run.model)

    def on_eval(state: Any) -> dict[str, float]:
        # all processes score what the main one found: on a network disk a set may show up on one of them first, and a task that only
        # some of them score would wait for the others for ever
        there = state.backend.broadcast([name for name in names if name not in missing])
        return during_training(*tools, there, run.evaluation.batch)(state) if there or not names else {}

    return on_eval


# ---------------------------------------------------------------- a child and its metrics


def _watch_child(run: RunConfig, command: list[str], on_log: Callable[[Record], None] | None) -> bool:
    """Starts the child, passes its metrics on, and returns whether an interrupt stopped it."""
    from mmkit.sharding.environment import TORCHRUN

    folder = Path(tempfile.mkdtemp(prefix="mmkit-launch-"))
    config, output = folder / "config.yaml", folder / "output.log"
    config.write_text(to_yaml(run), encoding="utf8")
    inherited = {name: value for name, value in os.environ.items() if name not in TORCHRUN}  # a child gets its own
    environment = inherited | child_environment(run) | {WORKER: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    metrics = follow(f"{run.folder}/metrics.jsonl", from_end=True)
    with output.open("wb") as sink:
        child = subprocess.Popen(  # its own session, so that an interrupt of the kernel reaches it only through us
            [*command, "--config", str(config)], stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    stopping = False
    try:
        with Interrupt() as signals:
            while True:
                ended = child.poll() is not None
                for record in next(metrics):
                    if on_log:
                        on_log(record)
                if ended:
                    break
                if signals.asked and not stopping:
                    stopping = interrupt(child.pid)
                time.sleep(POLL)
    finally:
        end_tree(child.pid)
    _raise_for(child.wait(), output.read_text(encoding="utf8", errors="replace"), stopping)
    for left in (config, output):
        left.unlink()
    folder.rmdir()
    return stopping


def follow(path: str | Path, from_end: bool = False) -> Iterator[list[Record]]:
    """The complete new lines of a JSON-lines file (a path or URL) at each ``next``; a half-written last line waits for its end."""
    folder, _, name = str(path).rpartition("/")
    store = Store(folder or ".")
    position = (store.size(name) or 0) if from_end else 0
    while True:
        try:
            size = store.size(name) or 0
            if size < position:  # a rewound run starts its file anew
                position = 0
            block = store.read(name, position) if size > position else b""
        except OSError as error:  # who watches a run does not end it
            log.warning("%s cannot be read now: %s", path, error)
            block = b""
        whole = block[: block.rfind(b"\n") + 1]
        position += len(whole)
        yield [json.loads(line) for line in whole.splitlines() if line.strip()]


def interrupt(pid: int) -> bool:
    """Asks the training processes below ``pid`` to checkpoint and stop; torchrun itself is left alone, as it would kill them."""
    print("stopping after the step in hand, with a checkpoint; interrupt again to end at once", flush=True)
    children = psutil.Process(pid).children(recursive=True) if psutil.pid_exists(pid) else []
    for process in [each for each in children if _trains(each)] or [psutil.Process(pid)]:
        process.send_signal(signal.SIGINT)
    return True


def _trains(process: psutil.Process) -> bool:
    try:
        return "RANK" in process.environ() and "mmkit" in process.cmdline()
    except psutil.Error:  # ended meanwhile
        return False


def end_tree(pid: int) -> None:
    """Ends a process and all below it, where they still run."""
    if not psutil.pid_exists(pid):
        return
    top = psutil.Process(pid)
    tree = [top, *top.children(recursive=True)]
    for process in tree:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            process.terminate()
    for process in psutil.wait_procs(tree, timeout=15)[1]:
        process.kill()


def end_with(launcher: int) -> threading.Thread | None:
    """Ends this training process when process ``launcher`` has: by SIGTERM, which saves a checkpoint, then after a minute by SIGKILL.

    A kernel killed with -9 cannot end its children, and they are no part of its session, so that its Ctrl-C does not reach them.
    Torchrun passes nothing on but the environment, so its workers watch the kernel themselves; when they have ended it ends too.
    A launcher of 1 is watched by nobody.
    """
    if launcher == 1:
        return None

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(launcher).wait()  # that very process: psutil compares start times where the number is used again
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=watch, name="launcher", daemon=True)
    thread.start()
    return thread


def tell(error: Exception) -> None:
    """Writes a user's error to standard error: the message for people, one line of JSON for the process that `launch`ed this one."""
    # a job script and a TPU host name 1 as the launcher: nobody but people reads their output
    read_by_launch = os.environ.get(WORKER, "1") != "1"
    # one write, so that the lines of several processes do not mix
    sys.stderr.write((f"{ERROR_OF_CHILD}{json.dumps(str(error))}" if read_by_launch else f"{ERROR_PREFIX}{error}") + "\n")


def _raise_for(code: int, output: str, asked: bool) -> None:
    """InputError with the child's own message, all its lines, when the user's input was wrong, LaunchError otherwise, nothing on success."""
    if code == 0 or (asked and code in (-signal.SIGINT, 130)):
        return
    for line in output.splitlines():
        # torchrun may put the rank before a line; of several ranks the first to fail knows best
        if ERROR_OF_CHILD in line:
            raise InputError(json.loads(line.partition(ERROR_OF_CHILD)[2]))
    last = "\n".join(collections.deque(output.splitlines(), maxlen=30))
    raise LaunchError(f"training ended with exit code {code}; its last lines:\n{last}")


# ---------------------------------------------------------------- what a run left


def _left_by(run: RunConfig, started: float, before: list[Record], stopped: bool) -> Launched:
    """What lies in the run folder now; ``before`` is what metrics.jsonl held when the call began."""
    from mmkit.training.same_run import told

    records = [] if run.dry_run else read_metrics(run.folder)
    # lines that the call found and kept; those behind them are its own, whatever process wrote them (rewound lines are gone)
    kept = next((place for place, (old, new) in enumerate(zip(before, records)) if old != new), min(len(before), len(records)))
    losses = [float(record.get("loss", "nan")) for record in records[-max(len(records) // 10, 1) :]]
    mean = sum(losses) / max(len(losses), 1)
    spent = [float(record.get(name, 0)) for record in records for name in ("seconds", "eval_seconds", "save_seconds")]
    known = not run.dry_run and Store(run.folder).size("environment.json") is not None
    facts = json.loads(Store(run.folder).read("environment.json")) if known else {}
    history = facts.get("history", ()) if kept < len(records) else ()
    ended = facts.get("ended") or {}
    if not records or ended.get("step") != records[-1]["step"]:  # of a process that was ended before it could say how
        ended = {}
    export = f"{run.folder}/export"
    return Launched(
        run=run,
        folder=run.folder,
        steps=records[-1]["step"] if records else 0,
        last=records[-1] if records else {},
        export=export if not run.dry_run and Store(export).size("config.json") is not None else None,
        seconds=time.monotonic() - started,
        stopped=stopped or ended.get("reason", "done") != "done",
        told=ended.get("told", ""),
        made=len(records) - kept,
        trained_seconds=sum(spent),
        mean_loss=mean if losses and math.isfinite(mean) else None,
        changes=tuple(told(entry) for entry in history if entry["step"] == records[kept]["step"] - 1),
    )


def read_metrics(folder: str | Path) -> list[Record]:
    """Every record of a run's metrics.jsonl, empty where it has none; a half-written last line is left out."""
    return next(follow(f"{folder}/metrics.jsonl"))
