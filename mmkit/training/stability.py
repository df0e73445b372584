"""Watches every step for what killed the ViT-L/14 run, and decides what to do (clip-training section 7; U29-U31).

Watched: a non-finite loss on any process, a loss above median + threshold x MAD of the last steps, updates left out in a row, a
loss scaler that keeps halving. The decision is the same on every process, is written to the run folder with the last steps, the
keys of the offending batch and the activations of each block, and is never silent. Not here: loading checkpoints and changing the
precision, which the loop does as the `Decision` says.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmkit.config import Precision, StabilityConfig
from mmkit.storage import Store

log = logging.getLogger(__name__)

MIN_HISTORY = 3  # losses before the spike rule speaks, at the least
MAD_FLOOR = 0.01  # of the median, and absolute: a window of near equal losses is no reason to call noise a spike
HALVINGS = 5  # of the loss scaler within half a window, without a growth between them


@dataclass(frozen=True)
class Decision:
    """What the loop does next. ``rewind`` means: load the newest checkpoint of a step <= ``rewind_to``, keep the data position of now
    (so that the offending window is not read again), go on in ``precision`` (None: the same) with learning rates x ``lr_factor``."""

    action: Literal["continue", "stop", "skip", "rewind"]
    step: int
    cause: str = ""
    message: str = ""
    keys: tuple[str, ...] = ()
    rewind_to: int | None = None
    precision: Precision | None = None
    lr_factor: float = 1.0

    def __bool__(self) -> bool:
        """True where something has to be done."""
        return self.action != "continue"

    @property
    def ends(self) -> bool:
        """True where training does not go on from these weights."""
        return self.action in ("stop", "rewind")


@dataclass
class StabilityGuard:
    """One a run, on every process. ``folder`` is the run folder (any fsspec path); None writes nothing.

    ``any_device`` makes a flag true everywhere when it is true on one process, ``all_objects`` hands every process
    everyone's object, ``can_go_back`` (whether a checkpoint of a step or an earlier one is kept) says the same on all; all
    processes call `observe` and `write` equally often.
    """

    config: StabilityConfig
    folder: str | None = None
    any_device: Callable[[bool], bool] = bool
    is_main: bool = True
    all_objects: Callable[[Any], list] = field(default=lambda value: [value], repr=False)
    can_go_back: Callable[[int], bool] = field(default=lambda step: True, repr=False)
    losses: deque = field(init=False)
    ring: deque = field(init=False)
    n_rewinds: int = 0
    n_spikes: int = 0  # offending steps in a row
    n_skipped: int = 0  # updates the backend left out in a row
    total_skipped: int = 0
    lr_factor: float = 1.0  # product over all rewinds
    last_event: int | None = None  # step of the last rewind's cause
    last_target: int | None = None  # step it went back to
    precision: Precision | None = None  # that a rewind changed to and that is still in force

    def __post_init__(self):
        self.losses = deque(maxlen=self.config.window)
        self.ring = deque(maxlen=self.config.window)

    @property
    def limit(self) -> float:
        """The loss above which a step is a spike; inf while there is too little history."""
        if len(self.losses) < max(MIN_HISTORY, self.config.window // 4):
            return math.inf
        values = [loss for _, loss in self.losses]
        median = statistics.median(values)
        deviation = statistics.median(abs(value - median) for value in values)
        return median + self.config.threshold * max(deviation, MAD_FLOOR * abs(median), MAD_FLOOR)

    def observe(
        self, step: int, loss: float, *, keys: Sequence[str] = (), skipped: bool = False, limit: float = math.inf, **row: Any
    ) -> Decision:
        """Takes note of a finished step: ``loss`` over all devices, whether its update was left out, and anything worth
        keeping (grad_norm, lr, logit_scale, scaler, max_logit ...; tensors are read only when an event is written).
        Returns the decision.

        ``limit`` is the loss above which the step itself left its update out (action skip): the `limit` of when it was
        made, which between two log steps is older than the losses known now. Either one makes the step a spike.
        """
        self.ring.append({"step": step, "loss": loss, "skipped": bool(skipped), "keys": list(keys)} | row)
        self.n_skipped = self.n_skipped + 1 if skipped else 0
        self.total_skipped += bool(skipped)
        limit = min(limit, self.limit)
        cause = self._cause(loss, limit)
        if not self.any_device(bool(cause)):
            self.n_spikes = 0
            if math.isfinite(loss):
                self.losses.append((step, float(loss)))
            return Decision("continue", step)
        self.n_spikes += 1
        cause = cause or "another process stopped here"
        what = f"step {step}: {cause} (loss {loss:.6g}, limit {limit:.6g}"
        what += f", {self.n_skipped} updates skipped in a row)"
        return self._decide(step, cause, what, tuple(keys), bool(skipped))

    def _cause(self, loss: float, limit: float) -> str:
        if not math.isfinite(loss):
            return "non-finite loss"
        if loss > limit:
            return "loss spike"
        if self.n_skipped > self.config.max_skipped:
            return "overflow"
        return "loss scaler collapse" if self._halvings() >= HALVINGS and len(self.ring) == self.ring.maxlen else ""

    def _halvings(self) -> int:
        """How often the loss scaler has halved without growing again, in the later half of the ring: its first search for a
        scale, at the beginning of a run, lies before. Halvings between two log steps are seen as one fall: its size counts.
        """
        recent = list(self.ring)[-max(len(self.ring) // 2, HALVINGS + 1) :]
        scales = [float(row["scaler"]) for row in recent if row.get("scaler") is not None]
        falls = 0
        for before, after in zip(scales, scales[1:]):
            halved = max(round(math.log2(before / max(after, 1e-30))), 1) if after < before else 0
            falls = 0 if after > before else falls + halved
        return falls

    def _decide(self, step: int, cause: str, what: str, keys: tuple[str, ...], skipped: bool) -> Decision:
        action = self.config.action
        if action == "skip" and self.n_spikes <= self.config.max_skipped:
            done = "batch skipped"
            if not skipped:
                done = "its update was applied: a lower train.log_every knows the limit sooner"
            return Decision("skip", step, cause, f"{what}; {done}, {self.n_spikes} in a row", keys)
        if action == "rewind" and self.n_rewinds < self.config.max_rewinds:
            target = self._target(step)
            if not self.can_go_back(target):
                # starting anew would throw all training away, and a later checkpoint is of the state that failed
                advice = (
                    f"no checkpoint of step {target} or earlier is kept to go back to. Everything on the disk is as it was; "
                    "resume a checkpoint by name (resume=step-N or a path) with a lower learning rate or in bf16 or fp32, "
                    "and set train.checkpoint.save_every lower or keep_last higher, so that the next rewind finds one"
                )
                return Decision("stop", step, cause, f"{what}; stopped: {advice}", keys)
            self.n_rewinds += 1
            self.lr_factor *= self.config.rewind_lr_factor
            self.last_event = step
            precision = self.config.rewind_precision
            self.precision = precision or self.precision
            change = f", precision {precision}" if precision else ""
            change += f", learning rate x {self.lr_factor:g}" if self.lr_factor != 1 else ""
            message = f"{what}; going back to step {target} or earlier{change} (rewind {self.n_rewinds} of {self.config.max_rewinds})"
            return Decision("rewind", step, cause, message, keys, target, precision, self.lr_factor)
        tried = {"rewind": f" after {self.n_rewinds} rewinds", "skip": f" after {self.n_spikes - 1} skips"}.get(action, "")
        advice = (
            "resume in bf16 or fp32, or resume from a named checkpoint (resume=step-N) and lower the learning rate or set stability.action to "
            "skip or rewind"
        )
        return Decision("stop", step, cause, f"{what}; stopped{tried}: {advice}", keys)

    def _target(self, step: int) -> int:
        """The last step before the trouble; before the last target where that one failed again within a window."""
        if self.last_target is not None and step - self.last_event <= self.config.window:
            return min(self.last_target - 1, step - 1)
        return step - 1

    def rewound(self, step: int) -> None:
        """The loop has gone back to the checkpoint of ``step``: later losses are forgotten."""
        self.last_target = step
        self.n_skipped = self.n_spikes = 0
        self.losses = deque((pair for pair in self.losses if pair[0] <= step), maxlen=self.config.window)
        self.ring.clear()

    def write(self, decision: Decision, activations: list[dict] = (), **facts: Any) -> str | None:
        """The event file ``stability/step-XXXXXXXX.json``: decision, last steps, and what else the loop knows (the checkpoint used, the
        data position). The offending batch's keys and activations are those of every process, since any of them may hold the sample
        at fault; the last steps' keys are the main process's. Returns its path; the main process writes, the others return None."""
        everyone = self.all_objects((decision.keys, list(activations)))
        if not self.is_main:
            return None
        log.warning("%s", decision.message)
        if self.folder is None:
            return None
        store, name = Store(self.folder), f"stability/step-{decision.step:08d}-{self.n_rewinds}.json"
        keys = [list(of_process) for of_process, _ in everyone]
        event = {"decision": asdict(decision) | {"keys": sum(keys, [])}, "limit": _plain(self.limit), **facts, "keys_of_processes": keys}
        rows = [{"process": rank, **row} for rank, (_, found) in enumerate(everyone) for row in found]
        event |= {"last_steps": [_plain(row) for row in self.ring], "activations": _plain(rows)}
        try:
            store.write(name, json.dumps(event, indent=1).encode())
        except OSError as error:  # a full disk must not keep the run from what was decided
            log.error("%s could not be written: %s", store.path(name), error)
            return None
        return store.path(name)

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs: the window, the counts, and the precision of the last rewind."""
        counts = ("n_rewinds", "n_spikes", "n_skipped", "total_skipped", "lr_factor")
        names = (*counts, "last_event", "last_target", "precision")
        return {name: getattr(self, name) for name in names} | {"losses": [list(pair) for pair in self.losses]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over `state_dict` of an earlier run."""
        state = dict(state)
        self.losses = deque((tuple(pair) for pair in state.pop("losses")), maxlen=self.config.window)
        for name, value in state.items():
            setattr(self, name, value)


def events(folder: str) -> list[dict]:
    """Every event file of a run folder, in the order of steps."""
    store = Store(f"{folder.rstrip('/')}/stability")
    return [json.loads(store.read(name)) for name in store.files() if name.startswith("step-")]


def _plain(value: Any) -> Any:
    """JSON without NaN: numbers of tensors, and text for what is not finite."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def activation_statistics(module: nn.Module, blocks: Sequence[str], forward: Callable[[], Any]) -> list[dict]:
    """One row a block whose class is named in ``blocks``, in the order they ran: the largest finite |value|, the root mean square,
    and how many values are not finite. ``forward`` runs the model once on the offending batch; all processes call this."""
    rows: list[dict] = []

    def record(name: str):
        def hook(layer, inputs, output):
            found = _first_tensor(output)
            if found is not None:
                value = found.detach().float()
                finite = value.isfinite()
                kept = torch.where(finite, value, torch.zeros_like(value))
                row = {"block": name, "max": kept.abs().max(), "rms": kept.square().mean().sqrt()}
                rows.append(row | {"not_finite": (~finite).sum(), "values": value.numel(), "dtype": str(found.dtype)})

        return hook

    named = lambda layer: {kind.__name__ for kind in type(layer).__mro__}  # noqa: E731 - FSDP puts a class of its own before a block's
    handles = [layer.register_forward_hook(record(name)) for name, layer in module.named_modules() if named(layer) & set(blocks)]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return _read(rows)


def _read(rows: list[dict]) -> list[dict]:
    """The rows with plain numbers, read from the device at once: on XLA each reading of its own would compile a program."""
    if not rows:
        return []
    sizes = torch.stack([row[name] for row in rows for name in ("max", "rms")]).view(-1, 2).tolist()
    counts = torch.stack([row["not_finite"] for row in rows]).tolist()
    plain = zip(rows, sizes, counts, strict=True)
    return [_plain(row | {"max": largest, "rms": rms, "not_finite": count}) for row, (largest, rms), count in plain]


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return next((found for value in values if (found := _first_tensor(value)) is not None), None)


class Strain:
    """Makes one layer work near the edge of half precision, as the L/14 run did by itself after 13 billion samples.

    From training forward ``after`` on, the layer's output is multiplied by ``gain`` and divided by it again in its own dtype:
    nothing changes in fp32 or bf16. In fp16 every value above 65504 / gain is cut to that in the first ``clipped`` forwards, so that
    the loss rises, and then becomes inf and the loss NaN.
    """

    def __init__(self, layer: nn.Module, gain: float, after: int = 0, clipped: int = 0):
        self.gain, self.after, self.clipped, self.n_forwards = gain, after, clipped, 0
        self.handle = layer.register_forward_hook(self._strain)

    def _strain(self, layer, inputs, output):
        if layer.training:
            self.n_forwards += 1
        if self.n_forwards <= self.after:
            return output
        if self.n_forwards <= self.after + self.clipped:
            largest = torch.finfo(output.dtype).max / self.gain
            output = output.clamp(-largest, largest)
        return output * self.gain / self.gain

    def remove(self) -> None:
        """Leaves the layer as it was."""
        self.handle.remove()
