"""Modules whose weights stay in files: built without memory for them, or at least without drawing random numbers first; and where in
files their tensors are."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from mmkit.errors import InputError

Reader = Callable[[], Tensor]
DIGEST_STEP = 1 << 22  # values that are converted and hashed at a time


class SkipInit(TorchFunctionMode):
    """While active, random initialisation does nothing: every weight is read from a file afterwards, and 10^9 draws take a minute."""

    NAMES = frozenset(
        ("normal_", "uniform_", "trunc_normal_", "_no_grad_trunc_normal_", "erfinv_", "kaiming_uniform_", "kaiming_normal_",
         "xavier_uniform_", "xavier_normal_", "orthogonal_")
    )  # fmt: skip

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Returns the tensor untouched where ``func`` would fill it with random numbers."""
        if getattr(func, "__name__", "") in self.NAMES:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """While active, modules that are built have parameters on the meta device only. Buffers have their values (rotary frequencies, position
    ids, masks: no file holds them)."""
    handle = register_module_parameter_registration_hook(_to_meta)
    try:
        with SkipInit():
            yield
    finally:
        handle.remove()


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """What a module registers instead of ``parameter``, whose memory nothing has touched so far; None: itself."""
    if type(parameter) is not nn.Parameter or parameter.is_meta:  # tied weights stay one
        return None
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def allocate(
    module: nn.Module, device: str | torch.device, dtype: torch.dtype | None = None, half: torch.dtype | None = None
) -> None:
    """Gives parameters on the meta device memory on ``device``, still without values, and moves buffers there.

    In ``dtype`` (None: their own); with ``half`` in that type where `cast_at_use` has them. Tied weights stay one.
    """
    halved = {id(p) for p in cast_at_use(module)} if half else set()
    # the old ones stay alive until all are replaced, or a new one could have the number of one that is gone
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is None or not p.is_meta:
                continue
            if id(p) not in made:
                kind = half if id(p) in halved else dtype or p.dtype
                made[id(p)] = p, nn.Parameter(torch.empty(p.shape, dtype=kind, device=device), requires_grad=p.requires_grad)
            part._parameters[name] = made[id(p)][1]
    module.to(device=device, dtype=dtype)


def cast_at_use(module: nn.Module) -> list[nn.Parameter]:
    """Weights of a vision-language model that autocast casts to half precision whenever they are used, so that keeping them cast changes
    no result: those of linear layers and convolutions of its encoders and its language model.

    What stays in fp32, because its rounding would be new:

    * norms, biases, position tables and embeddings, and a head that is tied to embeddings: autocast leaves them, and the sums of the
      residual stream that starts from them, in fp32.
    * encoders whose features are standardised: they run without autocast, since half precision leaves noise of small differences.
    * connector, samplers and regions: their code looks at the type of its weights, and they are small.
    * contrastive models: open_clip computes a tower in the type of its weights, and they are scored without autocast.
    """
    matrices, others = {}, set()
    exact = [name for name, part in module.named_modules() if getattr(part, "standard", None) is not None]
    for path, part in module.named_modules():
        inside = path.startswith(("encoders.", "language.")) and not any(path.startswith(f"{name}.") for name in exact)
        for name, p in part._parameters.items():
            if name == "weight" and inside and type(part) in (nn.Linear, nn.Conv1d, nn.Conv2d):
                matrices[id(p)] = p
            else:
                others.add(id(p))
    return [p for key, p in matrices.items() if key not in others]


def same_tensor(module: nn.Module) -> list[list[str]]:
    """The names in ``module.state_dict()`` of each parameter and persistent buffer: several where it is tied."""
    groups: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def base_name(name: str) -> str:
    """The name without adapters: peft puts ``base_layer`` between a layer and its weight."""
    return name.replace(".base_layer.", ".")


def digest_of(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    """``dtype:sha256`` of a tensor's shape and bytes, as they are or would be in ``dtype``."""
    dtype = dtype or tensor.dtype
    digest = hashlib.sha256(str(tuple(tensor.shape)).encode())
    for part in tensor.detach().reshape(-1).split(DIGEST_STEP):
        digest.update(part.to("cpu", dtype).contiguous().view(torch.uint8).numpy())
    return f"{str(dtype).removeprefix('torch.')}:{digest.hexdigest()}"


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor in a file: what it belongs to, how it is read (copy what you keep), and what an export that refers to it wants.

    ``dtype`` None: as in the file.
    """

    source: str
    read: Reader
    dtype: torch.dtype | None = None
    digest: str = ""
    referred: str = ""  # who refers to it: words for the error

    def verify(self) -> None:
        """ValueError where an export refers to the tensor and it has changed since."""
        if self.digest and digest_of(self.read(), self._kind) != self.digest:
            raise InputError(f"{self.referred} is taken from {self.source}, which has changed since the export (sha256 differs)")

    def checked(self) -> Tensor:
        """The tensor, verified, in the type an export refers to it."""
        self.verify()
        return self.read().to(self._kind) if self.digest else self.read()

    @property
    def _kind(self) -> torch.dtype:
        return getattr(torch, self.digest.split(":")[0])
