"""One process on one device (CPU or CUDA), and the eager PyTorch step that the process backends build on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmkit.config import BackendConfig, ConfigError, Precision, TrainConfig
from mmkit.errors import InputError
from mmkit.sharding import moments
from mmkit.sharding.backend import MOMENTS, Backend, Entry, Factory, Rules, named, plain_name
from mmkit.sharding.devices import hardware_here


class SingleBackend(Backend):
    """Forward, backward and update of plain PyTorch; `_wrap`, `_full` and `_like` are what sharded kinds change."""

    name = "single"
    averages = 1  # gradients of how many processes the wrapper averages: the loss is multiplied by it

    def __init__(self, config: BackendConfig, precision: Precision):
        self.config, self.precision = config, precision
        self._connect()
        self.skipped = torch.zeros((), dtype=torch.bool)
        self.n_skipped = torch.zeros((), dtype=torch.int64)
        self.scaler: torch.amp.GradScaler | None = None
        self._overridden: list[nn.Module] = []
        _set_matmul_precision(precision)

    def _connect(self) -> None:
        self.hardware = hardware_here()
        self.device = self.hardware.device()

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
        self._adopt(module, train, blocks, prefix)
        self._place(module, weights)
        self.module = self._wrap(module, blocks, train)
        self._build_optimizer(factory)
        return self.module

    def _adopt(self, module: nn.Module, train: TrainConfig, blocks: Sequence[str], prefix: str) -> None:
        """Remember the module's names and what is trained; install autocast and recomputation on its forwards."""
        self.plain, self.prefix, self.reached = module, prefix, None
        self._trained = {name for name, p in self.parameters().items() if p.requires_grad}
        for name, p in self.trained().items():
            if p.dtype != torch.float32:
                raise ConfigError(f"trained parameter {name} is {p.dtype}; trained weights are kept in fp32 (the precision setting casts)")
        if train.checkpoint_blocks:
            for block in blocks_of(module, blocks, "train.checkpoint_blocks = True recomputes block by block"):
                _refuse_running_statistics(block)
                self._override(block, functools.partial(self.checkpoint, block.forward))
        self._override(module, self._cast(module.forward))

    def _cast(self, forward: Callable) -> Callable:
        @functools.wraps(forward)
        def run(*args, **kwargs):
            with self.autocast():
                return forward(*args, **kwargs)

        return run

    def _override(self, module: nn.Module, forward: Callable) -> None:
        """Replace the forward of this one object (not of its class): names and hooks stay as they are."""
        module.forward = forward
        self._overridden.append(module)

    def _place(self, module: nn.Module, weights: Callable[[str], Tensor] | None) -> None:
        Filler(self.device, weights, self.prefix).fill(module)
        module.to(self.device)

    def _wrap(self, module: nn.Module, blocks: Sequence[str], train: TrainConfig) -> nn.Module:
        return module

    def _build_optimizer(self, factory: Factory | None) -> None:
        self.optimizer = factory(self.trained()) if factory else None
        if factory and self.precision == "fp16":
            self.scaler = torch.amp.GradScaler(self.device.type)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Plain name -> parameter as it is now (sharded where the backend shards)."""
        return named(self.plain.named_parameters(), self.prefix)

    def trained(self) -> dict[str, nn.Parameter]:
        """Plain name -> parameter, the trained ones."""
        return {name: p for name, p in self.parameters().items() if name in self._trained}

    def _check_unchanged(self) -> None:
        now = {name for name, p in self.parameters().items() if p.requires_grad}
        if changed := now ^ self._trained:
            name = min(changed)
            raise InputError(
                f"requires_grad of {name} became {name in now} after prepare(); freeze or unfreeze before it, where the optimizer "
                f"and the shards are made ({len(changed)} parameters changed)"
            )

    # ------------------------------------------------------------ a step

    def backward(self, loss: Tensor, last: bool) -> None:
        """See `Backend.backward`."""
        if last:
            self._check_unchanged()
        loss = loss * self.averages
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def update(self, max_norm: float | None) -> Tensor:
        """See `Backend.update`."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = self._gradient_norm()
        finite = bool(torch.isfinite(norm))
        if finite and max_norm is not None:
            nn.utils.clip_grads_with_norm_(self.trained().values(), max_norm, norm)
        self._record_reached(finite)
        if finite:
            self.scaler.step(self.optimizer) if self.scaler else self.optimizer.step()
        if self.scaler:
            self.scaler.update()
        self._count_skipped(not finite)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _gradient_norm(self) -> Tensor:
        """The norm of all gradients; that of each component (first word of its groups' titles) stays in `norms`."""
        parts: dict[str, list[Tensor]] = {}
        for group in self.optimizer.param_groups:
            found = parts.setdefault(group.get("title", "all").split(" ")[0], [])
            found += [p.grad for p in group["params"] if p.grad is not None]
        self.norms = {name: self._norm(gradients) for name, gradients in parts.items()}
        return torch.stack(list(self.norms.values())).norm()

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        return nn.utils.get_total_norm(gradients).to(self.device) if gradients else torch.zeros((), device=self.device)

    def _count_skipped(self, skipped: bool) -> None:
        self.skipped = torch.tensor(skipped)
        self.n_skipped = self.n_skipped + int(skipped)

    def _record_reached(self, finite: bool) -> None:
        if self.reached is None and finite:
            local = [p.grad is not None and bool(self._local(p.grad).count_nonzero()) for p in self.trained().values()]
            self.reached = dict(zip(self.trained(), self._any_each(local), strict=True))

    def _any_each(self, flags: list[bool]) -> list[bool]:
        return flags

    def _local(self, tensor: Tensor) -> Tensor:
        return tensor

    def checkpoint(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """See `Backend.checkpoint`; torch's non-reentrant kind, so frozen inputs do not cut the gradient."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)

    # ------------------------------------------------------------ state

    def _full(self, tensor: Tensor) -> Tensor:
        """The whole tensor; a collective where the backend shards."""
        return tensor.detach()

    def _like(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """A whole tensor cut and placed as ``parameter`` is."""
        return tensor.to(parameter.device, parameter.dtype)

    def _keeps(self, owner: Callable[[int], int] | None, index: int) -> bool:
        """Whether this process is the one that gets parameter ``index``."""
        return owner is None or owner(index) == self.rank

    def export_state(self, owner: Callable[[int], int] | None = None) -> Iterator[tuple[str, Entry | None]]:
        """See `Backend.export_state`."""
        for index, (name, p) in enumerate(self.trained().items()):
            whole = {"param": self._full(p)}
            for moment in MOMENTS:
                whole[moment] = self._full(moments.read(self.optimizer, p, moment))
            keep = self._keeps(owner, index)
            yield name, {key: host(tensor, torch.float32) for key, tensor in whole.items()} if keep else None

    @torch.no_grad()
    def import_state(self, get: Callable[[str], Entry], step: int) -> None:
        """See `Backend.import_state`."""
        for name, p in self.trained().items():
            entry = get(name)
            check_shapes(name, entry, p)
            p.copy_(self._like(entry["param"], p))
            if step and self.optimizer:
                moments.write(self.optimizer, p, {moment: self._like(entry[moment], p) for moment in MOMENTS}, step)

    def full_parameters(self, owner: Callable[[int], int] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """See `Backend.full_parameters`."""
        for index, (name, tensor) in enumerate((self.parameters() | persistent_buffers(self.plain, self.prefix)).items()):
            whole = self._full(tensor)
            yield name, host(whole) if self._keeps(owner, index) else None

    def extra_state(self) -> dict[str, Any]:
        """See `Backend.extra_state`."""
        state = {"optimizer_step": moments.count(self.optimizer), "n_skipped": int(self.n_skipped)}
        if self.scaler:
            saved = self.scaler.state_dict()
            state["scaler"] = {"scale": float(saved["scale"]), "good_steps": int(saved["_growth_tracker"])}
        return state

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """See `Backend.load_extra_state`."""
        self.n_skipped = torch.full_like(self.n_skipped, state.get("n_skipped", 0))
        if self.scaler and "scaler" in state:
            saved = self.scaler.state_dict()
            self.scaler.load_state_dict(saved | {"scale": state["scaler"]["scale"], "_growth_tracker": state["scaler"]["good_steps"]})

    def rng_state(self) -> dict[str, Any]:
        """See `Backend.rng_state`."""
        return super().rng_state() | self.hardware.rng_state(self.device)

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """See `Backend.set_rng_state`."""
        super().set_rng_state(state)
        self.hardware.set_rng_state(self.device, state)

    # ------------------------------------------------------------ resources

    def peak_memory(self) -> int:
        """See `Backend.peak_memory`."""
        return self.hardware.peak_memory(self.device)

    def clear(self, keep_programs: bool = False) -> None:
        """See `Backend.clear`; the plain module keeps its weights and gets its own forwards back."""
        for module in self._overridden:
            module.__dict__.pop("forward", None)
        self._overridden.clear()
        self.optimizer = self.scaler = None
        self.module = nn.Identity()
        self.hardware.free()


# ---------------------------------------------------------------- plain functions


def _set_matmul_precision(precision: Precision) -> None:
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def blocks_of(module: nn.Module, names: Sequence[str], why: str) -> list[nn.Module]:
    """The parts of ``module`` whose class is named in ``names``, outer ones first; ConfigError that begins with ``why`` without any."""
    found = [part for part in module.modules() if type(part).__name__ in names]
    if not found:
        asked = ", ".join(names) or "no class at all"
        raise ConfigError(f"{why}, but {type(module).__name__} has no such block (looked for {asked}); turn it off")
    return found


def _refuse_running_statistics(block: nn.Module) -> None:
    """ConfigError for a trained block whose batch norms a second forward would update twice."""
    norms = (part for part in block.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats)
    if any(p.requires_grad for norm in norms for p in norm.parameters()):
        raise ConfigError(
            f"train.checkpoint_blocks = True: a trained {type(block).__name__} has batch norms, whose running statistics a "
            "recomputed forward would update twice; set checkpoint_blocks false, or freeze that tower"
        )


def host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous CPU copy that later updates do not touch."""
    return tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()


def check_shapes(name: str, entry: Entry, parameter: Tensor) -> None:
    """ValueError where a saved tensor does not fit the parameter."""
    for key in ("param", *MOMENTS):
        if tuple(entry[key].shape) != tuple(parameter.shape):
            raise InputError(f"saved {key} of {name} has shape {tuple(entry[key].shape)}, the model's is {tuple(parameter.shape)}")


def persistent_buffers(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Plain name -> buffer, those that belong in a saved model."""
    found = {}
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found[plain_name(f"{path}.{name}" if path else name, prefix)] = buffer
    return found


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Every buffer onto ``device``; parameters stay where they are."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = buffer if buffer is None else buffer.to(device)


class Filler:
    """Gives parameters and buffers that are on the meta device their values, one tensor at a time.

    ``weights`` gives a full CPU tensor by plain name. ``place(full, meta)`` cuts it as a sharded meta tensor is; without it the
    whole tensor goes to ``device``. ConfigError where there are meta tensors and no ``weights``, or where a shape differs.
    """

    def __init__(self, device: torch.device, weights: Callable[[str], Tensor] | None, prefix: str, place: Callable | None = None):
        self.device, self.weights, self.prefix, self.place = device, weights, prefix, place
        self._done: dict[int, Tensor] = {}  # tied parameters stay tied

    def fill(self, module: nn.Module) -> None:
        """Every part of ``module``."""
        for path, part in module.named_modules():
            self.fill_part(path, part)

    @torch.no_grad()
    def fill_part(self, path: str, part: nn.Module) -> bool:
        """What ``part``, found at ``path``, holds itself; True where something was on the meta device."""
        touched = False
        for table in (part._parameters, part._buffers):
            for key, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    table[key] = self._value(f"{path}.{key}" if path else key, tensor)
                    touched = True
        return touched

    def _value(self, name: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._done:
            full = _weight(self.weights, plain_name(name, self.prefix), tensor)
            value = self.place(full, tensor) if self.place else full.to(self.device, copy=True)  # it may be a file's memory
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            self._done[id(tensor)] = value
        return self._done[id(tensor)]


def _weight(weights: Callable[[str], Tensor] | None, name: str, like: Tensor) -> Tensor:
    if weights is None:
        raise ConfigError(f"{name} is on the meta device; give prepare(weights=...) or build the model with its weights")
    full = weights(name)
    if tuple(full.shape) != tuple(like.shape):
        raise ConfigError(f"weight {name} has shape {tuple(full.shape)}, the model's is {tuple(like.shape)}")
    return full.to(like.dtype)
