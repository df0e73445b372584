"""torch_xla SPMD: one program over a mesh (data, fsdp) of all devices, cut by the models' SHARDING rules.

One process a host feeds all devices of that host and the program sees the global batch: nothing is averaged or gathered by hand.
The step has no host decision in it (clip, finite check and skip are tensor selections), its shapes and graph stay the same from the first
step on, so it compiles once; `compiles` counts. Virtual CPU devices run the same code: those of ``backend.xla_devices`` are, unless
PJRT_DEVICE names others.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from mmkit.config import BackendConfig, ConfigError, TrainConfig
from mmkit.sharding.backend import MOMENTS, Entry, Factory, Rules
from mmkit.sharding.environment import init_distributed
from mmkit.sharding.devices import Hardware
from mmkit.sharding.processes import HostTalk
from mmkit.sharding.single import SingleBackend, check_shapes

AXES = ("data", "fsdp")
SMALLEST_RATE = 1e-30  # AdamW with its step on the device divides by the rate: 0, as at the start of a warm-up, would give NaN
CACHE_SIZE, DEFAULT_CACHE_SIZE = "XLA_COMPILATION_CACHE_SIZE", 2048  # programs torch_xla keeps, and how many where it is not told
PROGRAMS = 256  # many times what a run needs, few enough to push out
MATMUL = {"fp32": "highest", "tf32": "high", "bf16": "default"}


def runtime_variables(devices: int | None) -> dict[str, str]:
    """What a child process that runs this backend needs in its environment, before torch_xla is imported.

    Named devices are virtual ones of the CPU, unless PJRT_DEVICE already says what else they are: then they are only counted.
    """
    real = os.environ.get("PJRT_DEVICE", "CPU") != "CPU"
    virtual = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)} if devices and not real else {}
    return virtual | {"USE_TORCH_XLA": "1"}


class XlaBackend(HostTalk, SingleBackend):
    """All devices of a mesh as one; `rank` and `world` are hosts."""

    name = "xla"
    compiled = True

    def _connect(self) -> None:
        if self.precision not in MATMUL:
            raise ConfigError(f"train.precision = {self.precision!r} does not exist on backend xla; use bf16")
        _set_runtime(self.config)
        import numpy
        import torch_xla
        from torch_xla import backends, runtime
        from torch_xla.distributed import spmd

        runtime.use_spmd()
        self.hardware = Hardware()
        self._library, self._runtime, self._spmd = torch_xla, runtime, spmd
        self.device = torch_xla.device()
        self.devices = runtime.global_runtime_device_count()
        self.rank, self.world = runtime.process_index(), runtime.process_count()
        fsdp = mesh_shape(self.devices, self.config)[1]
        self.mesh = spmd.Mesh(numpy.arange(self.devices), (self.devices // fsdp, fsdp), AXES)
        spmd.set_global_mesh(self.mesh)
        if self.world > 1:  # host numbers, objects and barriers travel by gloo; device tensors by the program itself
            self._join_hosts()
        backends.set_mat_mul_precision(MATMUL[self.precision])

    def _join_hosts(self) -> None:
        place = init_distributed()
        agreed = (place.rank, place.world) == (self.rank, self.world)
        if not agreed:
            raise ConfigError(
                f"host {self.rank} of {self.world} for the TPU runtime is rank {place.rank} of {place.world} for {place.source}; "
                "start one process a host, in the order of TPU_WORKER_ID"
            )
        self._host_group = dist.group.WORLD

    # ------------------------------------------------------------ prepare

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
        """See `Backend.prepare`."""
        self._rules = [(re.compile(pattern), tuple(axes)) for pattern, axes in rules]
        self._split_window = accumulation > 1
        return super().prepare(
            module, factory, train=train, rules=rules, blocks=blocks, accumulation=accumulation, prefix=prefix, weights=weights
        )

    def _place(self, module: nn.Module, weights: Callable[[str], Tensor] | None) -> None:
        """Parameters that modules share stay one: torch makes a new one for each of their places on this
        device."""
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for part in module.modules():
            for key, p in part._parameters.items():
                places.setdefault(id(p), []).append((part, key))
        super()._place(module, weights)
        for (first, name), *others in places.values():
            for part, key in others:
                part._parameters[key] = first._parameters[name]

    def _wrap(self, module: nn.Module, blocks: Sequence[str], train: TrainConfig) -> nn.Module:
        self._axes = {id(p): self.axes(name, p.shape) for name, p in self.parameters().items()}
        for p in self.parameters().values():
            self._mark(p, self._axes[id(p)])
        return module

    def _build_optimizer(self, factory: Factory | None) -> None:
        super()._build_optimizer(factory)
        self.skipped = torch.zeros((), dtype=torch.bool, device=self.device)
        self.n_skipped = torch.zeros((), dtype=torch.int64, device=self.device)
        if factory:
            for group in self.optimizer.param_groups:
                group["capturable"], group["foreach"], group["fused"] = True, False, False
            self.set_learning_rates([group["lr"] for group in self.optimizer.param_groups])
            self._begin_states()
        self.sync()

    def _begin_states(self) -> None:
        """Moments, steps and (in a window of several micro-batches) gradients exist from the start: step 1 is step 2's graph."""
        for p in self.trained().values():
            axes = self._axes[id(p)]
            # in fp32 1 - 0.999 has an error of 5e-5, and every first update with it
            self.optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float64, device=self.device)}
            for moment in MOMENTS:
                self.optimizer.state[p][moment] = self._mark(torch.zeros_like(p, requires_grad=False), axes)
            if self._split_window:
                p.grad = self._mark(torch.zeros_like(p, requires_grad=False), axes)

    def axes(self, name: str, shape: Sequence[int]) -> tuple[str | None, ...]:
        """Mesh axis of each dimension of a parameter: its first matching rule, where the sizes divide; else every device has it all."""
        name = name.replace(".base_layer.", ".")  # a linear layer under an adapter
        rule = next((axes for pattern, axes in self._rules if pattern.search(name)), ())
        rule = (*rule, *(None,) * len(shape))[: len(shape)]
        sizes = self.mesh.shape()
        return tuple(axis if axis and size % sizes[axis] == 0 else None for axis, size in zip(rule, shape, strict=True))

    def _mark(self, tensor: Tensor, axes: Sequence) -> Tensor:
        self._spmd.mark_sharding(tensor, self.mesh, tuple(axes))
        return tensor

    # ------------------------------------------------------------ a step

    def shard(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Backend.shard`; rows that do not divide by the devices are copied to all of them."""
        from torch_xla.core import xla_model

        out = {}
        for name, tensor in tensors.items():
            cut = tensor.dim() > 0 and tensor.shape[0] % (self.devices // self.world) == 0
            spec = (AXES if cut else None, *(None,) * (tensor.dim() - 1)) if tensor.dim() else ()
            sharding = self._spmd.ShardingSpec(self.mesh, spec, minibatch=cut and self.world > 1)
            out[name] = xla_model.send_cpu_data_to_device([tensor.cpu()], self.device, sharding)[0]
        return out

    def backward(self, loss: Tensor, last: bool) -> None:
        """See `Backend.backward`; each micro-batch of a longer window runs as the same program."""
        super().backward(loss, last)
        if self._split_window:
            self.sync()

    def update(self, max_norm: float | None) -> Tensor:
        """See `Backend.update`; the skip is a selection between old and new tensors, without asking the host."""
        with_gradient = [p for p in self.trained().values() if p.grad is not None]
        norm = self._gradient_norm()
        finite = torch.isfinite(norm)
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm)
        changing = [tensor for p in with_gradient for tensor in (p.data, *self.optimizer.state[p].values())]
        before = [tensor.clone() for tensor in changing]
        self.optimizer.step()
        with torch.no_grad():
            for tensor, old in zip(changing, before, strict=True):
                tensor.copy_(torch.where(finite, tensor, old))
        self.skipped = ~finite
        self.n_skipped = self.n_skipped + self.skipped
        for p in with_gradient:
            p.grad = torch.zeros_like(p.data) if self._split_window else None
            if self._split_window:
                self._mark(p.grad, self._axes[id(p)])
        self.sync()
        self._record_reached(True)
        return norm

    def _record_reached(self, finite: bool) -> None:
        if self.reached is None and not bool(self.skipped):
            flags = torch.stack([(self.optimizer.state[p][MOMENTS[0]] != 0).any() for p in self.trained().values()]).cpu()
            self.reached = dict(zip(self.trained(), map(bool, flags), strict=True))

    def set_learning_rates(self, rates: Sequence[float]) -> None:
        """See `Backend.set_learning_rates`; the rate is data of the program, not a constant in it."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = self._upload(torch.tensor(max(float(rate), SMALLEST_RATE)))

    def _upload(self, tensor: Tensor) -> Tensor:
        """On the device as data. ``.to`` makes 0 and 1 constants of the program, and the next value compiles another one."""
        from torch_xla.core import xla_model

        return xla_model.send_cpu_data_to_device([tensor], self.device)[0]

    def checkpoint(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """See `Backend.checkpoint`; torch_xla's own, which is re-entrant: every tensor goes in as an argument of its own."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        from torch_xla.utils.checkpoint import checkpoint

        leaves, form = tree_flatten((args, kwargs))

        def run(_, *flat):
            inner_args, inner_kwargs = tree_unflatten(list(flat), form)
            with AttentionCasts():  # in backward the forward's mode has ended
                return function(*inner_args, **inner_kwargs)

        anchor = torch.zeros((), device=self.device, requires_grad=True)  # frozen inputs must not cut the gradient
        return checkpoint(run, anchor, *leaves)

    def sync(self) -> None:
        """See `Backend.sync`."""
        self._library.sync()

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """See `Backend.autocast`."""
        with AttentionCasts(), super().autocast():
            yield

    # ------------------------------------------------------------ between hosts

    def sum_over_devices(self, value: Tensor | float) -> Tensor:
        """See `Backend.sum_over_devices`."""
        if isinstance(value, Tensor) and value.device == self.device:
            return value.detach()
        total = torch.as_tensor(value).detach().clone()
        if self.world > 1:
            dist.all_reduce(total)
        return self._upload(total)

    # ------------------------------------------------------------ state

    def _full(self, tensor: Tensor) -> Tensor:
        if self.world > 1:
            return tensor.detach().cpu()  # a program of its own gathers the parts of all hosts, each of which takes part
        if "devices=" not in self._library._XLAC._get_xla_sharding_spec(tensor):
            return tensor.detach().cpu()  # every device has it all, or nothing was said of it, as of a buffer no step has written
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for shard in self._spmd.XLAShardedTensor(tensor.detach()).local_shards:
            whole[tuple(shard.indices)] = shard.data  # sizes divide (`axes`), so there is no padding
        return whole

    @torch.no_grad()
    def import_state(self, get: Callable[[str], Entry], step: int) -> None:
        """See `Backend.import_state`; each tensor is cut on its way to the devices, so no program is compiled for it."""
        for name, p in self.trained().items():
            entry = get(name)
            check_shapes(name, entry, p)
            p.data = self._placed(entry["param"], p)
            if self.optimizer:
                state = self.optimizer.state[p]
                state["step"] = self._upload(torch.tensor(float(step), dtype=torch.float64))
                for moment in MOMENTS:
                    state[moment] = self._placed(entry[moment], p)
        self.sync()

    def _placed(self, whole: Tensor, p: nn.Parameter) -> Tensor:
        """A tensor of the host on the devices, in the type of ``p`` and cut as it is."""
        return self._mark(whole.to(p.dtype).to(self.device), self._axes[id(p)])

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """See `Backend.load_extra_state`; the count goes up as data, or the next program would have one result more and be another."""
        self.n_skipped = self._upload(torch.tensor(state.get("n_skipped", 0)))

    def rng_state(self) -> dict[str, Any]:
        """See `Backend.rng_state`."""
        from torch_xla.core import xla_model

        return super().rng_state() | {"xla": int(xla_model.get_rng_state())}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """See `Backend.set_rng_state`."""
        from torch_xla.core import xla_model

        super().set_rng_state(state)
        seed = state.get("xla")
        if seed is not None:
            xla_model.set_rng_state(seed)

    # ------------------------------------------------------------ resources

    def compiles(self) -> int:
        """See `Backend.compiles`."""
        from torch_xla.debug import metrics

        data = metrics.metric_data("CompileTime")
        return data[0] if data else 0

    def peak_memory(self) -> int:
        """See `Backend.peak_memory`; the SPMD device does not report it, its parts on a TPU do."""
        from torch_xla.core import xla_model

        try:
            return max(xla_model.get_memory_info(f"xla:{i}").get("peak_bytes_used", 0) for i in range(self.devices // self.world))
        except RuntimeError:
            return 0

    def clear(self, keep_programs: bool = False) -> None:
        """See `Backend.clear`: parameters go back to the host, buffers and programs of the device and the cache on disk go away."""
        self.optimizer = None
        self.plain._apply(self._full)
        super().clear(keep_programs)
        gc.collect()
        self.sync()
        self._library._XLAC._clear_pending_irs(str(self.device))
        if keep_programs:
            return
        self._drop_programs()
        if folder := os.environ.get("XLA_PERSISTENT_CACHE_PATH"):
            shutil.rmtree(folder, ignore_errors=True)

    def _drop_programs(self) -> None:
        """torch_xla 2.9 has no call for it (pytorch/xla#9712): as many small programs as its cache holds push out all others, the least
        recently used first."""
        for length in range(1, int(os.environ.get(CACHE_SIZE, DEFAULT_CACHE_SIZE)) + 1):
            small = torch.zeros(length, device=self.device).neg()
            self.sync()  # what nobody holds would not be computed


class AttentionCasts(TorchFunctionMode):
    """Casts queries and keys to the values' dtype: XLA's autocast leaves attention out, CUDA's and the CPU's do this themselves.

    Rotary embeddings make queries and keys fp32 while values come out of a half-precision product.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """The call, with (query, key, value) in one dtype where it is attention under autocast."""
        halved = func is F.scaled_dot_product_attention and torch.is_autocast_enabled("xla")
        if halved:
            dtype = torch.get_autocast_dtype("xla")
            args = (*(x.to(dtype) for x in args[:3]), *args[3:])
        return func(*args, **(kwargs or {}))


def mesh_shape(devices: int, config: BackendConfig) -> tuple[int, int]:
    """Sizes of the axes (data, fsdp). ConfigError where ``backend.fsdp_axis`` does not divide the devices."""
    size = config.fsdp_axis or devices
    if devices % size:
        raise ConfigError(f"backend.fsdp_axis = {size} does not divide the {devices} devices of the mesh; use a divisor")
    return devices // size, size


def _set_runtime(config: BackendConfig) -> None:
    """The runtime's variables, as long as torch_xla has not read them; ConfigError where it is too late."""
    wanted, count = runtime_variables(config.xla_devices), config.xla_devices
    read_at_import = {name: value for name, value in wanted.items() if name != "USE_TORCH_XLA"}
    loaded = "torch_xla" in sys.modules
    late = [name for name, value in read_at_import.items() if loaded and os.environ.get(name) != value]
    if late:
        has = ", ".join(f"{name}={os.environ.get(name)}" for name in late)
        raise ConfigError(
            f"torch_xla is already loaded in this process with {has}, the run wants {count} virtual devices; "
            "restart the kernel or start the run through launch"
        )
    os.environ.update({name: value for name, value in wanted.items() if not loaded})
    os.environ.setdefault("PJRT_DEVICE", "TPU")
    if not loaded:
        os.environ.setdefault(CACHE_SIZE, str(PROGRAMS))
    import torch_xla
    from torch_xla import runtime

    one_device_mode = torch_xla._XLAC._xla_get_spmd_config_is_locked() and not runtime.is_spmd()
    if one_device_mode:
        raise ConfigError("this process has used an XLA device outside SPMD; restart the kernel or start the run through launch")
