"""PyTorch's own data parallelism: DDP (whole copies) and FSDP2 (parameters, gradients and moments cut block by block).

In bf16 and fp16 the sharded weights stay fp32 and autocast makes half-precision copies for the products. Without
``checkpoint_blocks`` these copies live until backward: 2 bytes a parameter on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mmkit.config import BackendConfig, Precision, TrainConfig
from mmkit.sharding.backend import Entry
from mmkit.sharding.processes import Processes
from mmkit.sharding.single import Filler, SingleBackend, blocks_of, move_buffers


class CopiesBackend(Processes, SingleBackend):
    """DDP: one process a device, each with a whole copy."""

    name = "torch"

    def _wrap(self, module: nn.Module, blocks: Sequence[str], train: TrainConfig) -> nn.Module:
        if not self._trained:
            return module
        self._copies = DistributedDataParallel(
            module,
            device_ids=self.hardware.wrapper_ids(self.device),
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=bool(train.allow_no_grad),
        )
        self._copies.require_backward_grad_sync = False  # `backward` asks for the sync, when it knows which one is the last
        return self._copies

    def backward(self, loss: Tensor, last: bool) -> None:
        """See `Backend.backward`."""
        copies = self._copies
        learns = last and self.config.static_graph and not copies.static_graph
        if learns:  # not before: DDP would count the uses of parameters in the window's other micro-batches too
            copies._set_static_graph()
            copies._static_graph_delay_allreduce_enqueued = True  # by the last line here
        if last:
            copies.reducer.prepare_for_backward([loss] if copies.find_unused_parameters and not copies.static_graph else [])
        super().backward(loss, last)
        if learns:
            copies.reducer._delay_all_reduce()


class CutBackend(Processes, SingleBackend):
    """FSDP2: one process a device, each with its part of every parameter."""

    name = "torch"

    def _place(self, module: nn.Module, weights: Callable[[str], Tensor] | None) -> None:
        """Placed when cut, so that no device holds it whole."""
        self._filler = Filler(self.device, weights, self.prefix, place=self._like)

    def _wrap(self, module: nn.Module, blocks: Sequence[str], train: TrainConfig) -> nn.Module:
        mesh = init_device_mesh(self.device.type, (self.world,))
        policy = self.hardware.offload(self.config.offload)
        found = blocks_of(module, blocks, "backend.strategy = fsdp shards block by block")
        for part in reversed(found):  # inner units before those that hold them
            fully_shard(part, mesh=mesh, offload_policy=policy)
        fully_shard(module, mesh=mesh, offload_policy=policy)
        self._filler.fill(module)
        move_buffers(module, self.device)  # FSDP places parameters only
        return module

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
        """The part of a whole tensor that this process holds; every process has the same whole one."""
        if not isinstance(parameter, DTensor):
            return tensor.to(self.device, parameter.dtype)
        part = distribute_tensor(
            tensor.to(self.device, parameter.dtype), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        part = part.clone()  # a view would keep the whole tensor
        return part if parameter.is_meta else part.to(parameter.device)

    def export_state(self, owner: Callable[[int], int] | None = None) -> Iterator[tuple[str, Entry | None]]:
        """See `Backend.export_state`."""
        self._cut_again()
        yield from super().export_state(owner)

    def full_parameters(self, owner: Callable[[int], int] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """See `Backend.full_parameters`."""
        self._cut_again()
        yield from super().full_parameters(owner)

    def _cut_again(self) -> None:
        """After a forward without backward (an evaluation) the outermost parameters are still whole and are not those Adam knows."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def clear(self, keep_programs: bool = False) -> None:
        """See `Backend.clear`; a cut module stays cut."""
        super().clear(keep_programs)
        self.plain = nn.Identity()


STRATEGIES: dict[str, type[SingleBackend]] = {"ddp": CopiesBackend, "fsdp": CutBackend}


def build(config: BackendConfig, precision: Precision) -> SingleBackend:
    """The backend of ``config.strategy``."""
    return STRATEGIES[config.strategy](config, precision)

