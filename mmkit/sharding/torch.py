"""PyTorch's own data parallelism: DDP (whole copies) and FSDP2 (parameters, gradients and moments cut by BLOCKS).

In bf16 and fp16 the sharded weights stay fp32 and autocast makes half-precision copies for the products. Without
``checkpoint_blocks`` these copies live until backward: 2 bytes a parameter on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mmkit.config import TrainConfig
from mmkit.sharding.processes import Processes
from mmkit.sharding.single import Filler, SingleBackend


class TorchBackend(Processes, SingleBackend):
    """One process a device; ``strategy`` says whether the model is copied (ddp) or cut (fsdp)."""

    name = "torch"

    def _place(self, module: nn.Module, weights: Callable[[str], Tensor] | None) -> None:
        self._weights = weights
        if self.config.strategy == "ddp":
            super()._place(module, weights)

    def _wrap(self, module: nn.Module, blocks: Sequence[str], train: TrainConfig) -> nn.Module:
        if self.config.strategy == "fsdp":
            return self._cut(module, blocks)
        if not self._trained:
            return module
        self._ddp = DistributedDataParallel(
            module,
            device_ids=[self.local_rank] if self.device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=bool(train.allow_no_grad),
        )
        self._ddp.require_backward_grad_sync = False  # `backward` asks for the sync, when it knows which one is the last
        return self._ddp

    def _cut(self, module: nn.Module, blocks: Sequence[str]) -> nn.Module:
        mesh = init_device_mesh(self.device.type, (self.world,))
        offload = CPUOffloadPolicy() if self.config.offload and self.device.type == "cuda" else OffloadPolicy()
        whole = {p for p in module.parameters() if not p.is_floating_point()}  # quantised: every device keeps its copy
        for p in whole:
            p.data = p.data.to(self.device)
        for part in reversed(list(module.modules())):  # inner units before those that hold them
            if type(part).__name__ in blocks:
                fully_shard(part, mesh=mesh, offload_policy=offload, ignored_params=whole)
        fully_shard(module, mesh=mesh, offload_policy=offload, ignored_params=whole)
        Filler(self.device, self._weights, self.prefix, place=_cut_like).fill(module)
        for part in module.modules():  # FSDP places parameters; buffers are ours to move
            for name, buffer in part._buffers.items():
                part._buffers[name] = buffer if buffer is None else buffer.to(self.device)
        return module

    def backward(self, loss: Tensor, last: bool) -> None:
        """See `Backend.backward`."""
        if last and isinstance(self.module, DistributedDataParallel):
            self._ddp.reducer.prepare_for_backward([loss] if self._ddp.find_unused_parameters else [])
        super().backward(loss, last)

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        norm = super()._norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _full(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        return tensor.detach().to(self.device).full_tensor()

    def _like(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        return _cut_like(tensor.to(parameter.dtype), parameter)

    def clear(self) -> None:
        """See `Backend.clear`; a cut module stays cut."""
        cut = isinstance(self.module, FSDPModule)
        super().clear()
        if cut:
            self.plain = nn.Identity()


def _cut_like(full: Tensor, sharded: Tensor) -> Tensor:
    """The part of ``full`` that this process holds, as a tensor sharded like ``sharded``; every process has the same ``full``."""
    if not isinstance(sharded, DTensor):
        return full.to(sharded.device)
    place = sharded.device_mesh.device_type
    cut = distribute_tensor(full.to(place), sharded.device_mesh, sharded.placements, src_data_rank=None)
    return cut if sharded.is_meta else cut.to(sharded.device)
