"""The seam between training code and the machinery that runs it: one class, one table.

A step, in the order every caller keeps::

    backend = create(run.backend, run.train.precision)          # starts processes' communication, picks the device
    model = backend.prepare(objective, factory, train=run.train, rules=SHARDING, blocks=model.blocks, accumulation=n)
    count = backend.sum_over_devices(sum(batch.n_targets for batch in window))     # a tensor on the device
    for i, batch in enumerate(window):                          # the last window may be shorter than `accumulation`
        out = model(backend.shard(batch.tensors), mode="loss")
        backend.backward(out["loss_sum"] / count, last=i == len(window) - 1)
    norm = backend.update(max_grad_norm)                        # clip, finite check, optimizer step, zero gradients
    backend.skipped                                             # 0-dim bool tensor: the update was left out on ALL devices

Nobody outside `mmkit.sharding` asks which backend runs. Not here: the loop, the loss, files.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmkit.config import BackendConfig, ConfigError, Precision, TrainConfig, nearest

Entry = dict[str, Tensor]  # {"param", "exp_avg", "exp_avg_sq"}: full fp32 tensors on the CPU
Factory = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]
Rules = Sequence[tuple[str, Sequence[str | None]]]  # (pattern of the full parameter name, mesh axis of each dimension)
MOMENTS = ("exp_avg", "exp_avg_sq")
COMPUTE_DTYPE: dict[str, torch.dtype | None] = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")


class Backend(abc.ABC):
    """What a training loop needs from one machine or many; see the module's docstring for the order of calls."""

    name: str
    rank: int = 0  # of this process among those that feed data
    local_rank: int = 0
    world: int = 1  # processes that feed data; each feeds device_batch * devices // world rows a micro-batch
    devices: int = 1  # devices that share a step
    device: torch.device
    precision: Precision
    compiled: bool = False  # each new shape or constant is a program to compile: work is recorded until `sync`
    module: nn.Module  # what `prepare` returned
    optimizer: torch.optim.Optimizer | None = None
    skipped: Tensor  # 0-dim bool: the last update was left out on all devices (non-finite gradient)
    n_skipped: Tensor  # 0-dim int64: how many were so far
    norms: Mapping[str, Tensor] = {}  # after an update: gradient norm before clipping of each component; empty under ZeRO
    reached: dict[str, bool] | None = None  # after the first update: parameter name -> it had a non-zero gradient

    @property
    def is_main(self) -> bool:
        """True on the one process that logs and writes common files."""
        return self.rank == 0

    # ------------------------------------------------------------ a step

    @abc.abstractmethod
    def prepare(
        self,
        module: nn.Module,
        factory: Factory | None,
        *,
        train: TrainConfig,
        rules: Rules = (),
        blocks: Sequence[str] = (),
        accumulation: int = 1,
        prefix: str = "model.",
        weights: Callable[[str], Tensor] | None = None,
    ) -> nn.Module:
        """Place and shard ``module``, build its optimizer, and return the module to call from now on.

        Freeze and add adapters before; a later change of ``requires_grad`` is an error. ``factory`` gets the trainable parameters
        as {name: parameter}, sharded, and returns the optimizer; None prepares for evaluation only. Names everywhere are those of
        ``module.named_parameters()`` without ``prefix`` (an objective holds the model as ``.model``). ``blocks`` are class names:
        FSDP units, and recomputed when ``train.checkpoint_blocks``. ``weights`` gives the full tensor of a name and is needed
        when ``module`` was built on the meta device. The returned module runs forward in the precision's autocast.
        """

    def shard(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This process's rows on the device; on a mesh of devices, cut along dimension 0."""
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}

    @abc.abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add this micro-batch's gradients; ``loss`` is already divided by the GLOBAL target count. ``last`` ends the window."""

    @abc.abstractmethod
    def update(self, max_norm: float | None) -> Tensor:
        """Clip, step, zero. Returns the norm of the one global gradient before clipping (0-dim float tensor on the device).

        A non-finite gradient anywhere leaves weights, moments and Adam's step count unchanged everywhere, sets `skipped` and adds
        one to `n_skipped`, in every precision.
        """

    def set_learning_rates(self, rates: Sequence[float]) -> None:
        """One learning rate for each of the optimizer's parameter groups, in their order."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    @abc.abstractmethod
    def checkpoint(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` with its activations recomputed in backward."""

    def autocast(self) -> contextlib.AbstractContextManager:
        """What forwards of the prepared module run under: half-precision products over fp32 weights, or nothing."""
        return autocast(self.precision, self.device)

    def sync(self) -> None:
        """Run what was recorded so far (lazy devices); nothing elsewhere."""

    # ------------------------------------------------------------ between processes (all of them must call)

    def sum_over_devices(self, value: Tensor | float) -> Tensor:
        """Sum over processes, as a tensor on the device. A device tensor of an SPMD program is a global value already.

        Divide the loss by this tensor, not by ``.item()`` of it: a Python number is part of the compiled program on XLA.
        """
        return torch.as_tensor(value, device=self.device)

    def any_device(self, flag: bool | Tensor) -> bool:
        """True everywhere when ``flag`` is true on any process."""
        return bool(flag)

    def broadcast(self, value: Any) -> Any:
        """The main process's Python object, everywhere."""
        return value

    def all_objects(self, value: Any) -> list[Any]:
        """Every process's Python object, in the order of ranks, everywhere."""
        return [value]

    def gather(self, x: Tensor, with_grad: bool = False) -> Tensor:
        """Rows of all processes, concatenated on dimension 0; with gradient, backward sums over processes."""
        return x if with_grad else x.detach()

    def rotate(self, x: Tensor, by: int = 1) -> Tensor:
        """The tensor of process ``rank - by`` (a ring); its backward rotates the other way."""
        return x

    def barrier(self, timeout: float | None = None) -> None:
        """Wait for all processes; an error naming the missing ranks after ``timeout`` seconds."""

    # ------------------------------------------------------------ state

    @abc.abstractmethod
    def export_state(self, owner: Callable[[int], int] | None = None) -> Iterator[tuple[str, Entry | None]]:
        """Stream (name, entry) of the trained parameters, one whole tensor at a time. ALL processes iterate, to the end.

        The entry is valid on rank ``owner(index)`` and None on the others; without ``owner`` it is valid everywhere.
        """

    @abc.abstractmethod
    def import_state(self, get: Callable[[str], Entry], step: int) -> None:
        """Set weights and moments of the trained parameters from full tensors; ``step`` is Adam's count. After `prepare`,
        before the first step; any world size."""

    @abc.abstractmethod
    def full_parameters(self, owner: Callable[[int], int] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """Stream every parameter and persistent buffer in its own dtype on the CPU; the same rules as `export_state`."""

    @abc.abstractmethod
    def extra_state(self) -> dict[str, Any]:
        """Plain numbers that belong in ``state.json``: Adam's step, skipped updates, the loss scaler."""

    @abc.abstractmethod
    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take back `extra_state` of any backend and precision; a scaler is ignored where none is used. Call after
        ``import_state(get, state["optimizer_step"])``."""

    def rng_state(self) -> dict[str, Any]:
        """This process's random state on host and device, as plain lists."""
        return {"cpu": torch.get_rng_state().tolist()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Take back `rng_state`; parts for absent devices are ignored."""
        torch.set_rng_state(torch.tensor(state["cpu"], dtype=torch.uint8))

    # ------------------------------------------------------------ resources

    def compiles(self) -> int:
        """Programs compiled so far by a lazy device; 0 elsewhere."""
        return 0

    def peak_memory(self) -> int:
        """Most bytes in use on this process's device so far; 0 where the device does not report it."""
        return 0

    def clear(self, keep_programs: bool = False) -> None:
        """Free device memory and, unless ``keep_programs``, what was compiled; the prepared module is unusable afterwards."""

    def close(self) -> None:
        """Leave the process group."""


# ---------------------------------------------------------------- the table

BACKENDS: dict[str, str] = {
    "single": "mmkit.sharding.single:SingleBackend",
    "torch": "mmkit.sharding.torch:build",
    "deepspeed": "mmkit.sharding.deepspeed:DeepSpeedBackend",
    "xla": "mmkit.sharding.xla:XlaBackend",
}


def create(config: BackendConfig, precision: Precision) -> Backend:
    """The backend of ``config``, with its processes connected. ConfigError for an unknown kind."""
    if config.kind not in BACKENDS:
        raise ConfigError(
            f"no backend {config.kind!r}{nearest(config.kind, BACKENDS)}; backends are {', '.join(BACKENDS)}; auto is one of them, "
            "chosen for the machine by `mmkit.launch.launch.launch`: call that"
        )
    module, name = BACKENDS[config.kind].split(":")
    return getattr(importlib.import_module(module), name)(config, precision)


# ---------------------------------------------------------------- names and dtypes, shared by all backends


def plain_name(name: str, prefix: str = "") -> str:
    """A parameter's name without what DDP, FSDP, compile and checkpoint wrappers put in, and without ``prefix``."""
    for wrapper in WRAPPERS[:-1]:
        name = name.replace(wrapper, "")
    while name.startswith(WRAPPERS[-1]):
        name = name.removeprefix(WRAPPERS[-1])
    return name.removeprefix(prefix)


def named(items: Iterable[tuple[str, Any]], prefix: str) -> dict[str, Any]:
    """{plain name: value} of ``named_parameters()`` or the like; our own mistake where two names fall together."""
    pairs = [(plain_name(name, prefix), value) for name, value in items]
    out = dict(pairs)
    assert len(out) == len(pairs), "two parameters share a name"
    return out


def autocast(precision: Precision, device: torch.device):
    """The precision's autocast context: half-precision products over fp32 weights, or nothing."""
    dtype = COMPUTE_DTYPE[precision]
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()
