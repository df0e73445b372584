"""What processes say to each other through torch.distributed; shared by the kinds with one process a device."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor

from mmkit.errors import ConfigError
from mmkit.sharding.environment import init_distributed
from mmkit.sharding.exchange import exchange
from mmkit.sharding.devices import hardware_here


class HostTalk:
    """Mixin of a Backend: flags, Python objects and barriers between processes, over gloo; nothing to do for one process."""

    world: int
    _host_group: dist.ProcessGroup

    def any_device(self, flag: bool | Tensor) -> bool:
        """See `Backend.any_device`."""
        return self._any_each([bool(flag)])[0]

    def _any_each(self, flags: list[bool]) -> list[bool]:
        if self.world == 1:
            return flags
        seen = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._host_group)
        return [bool(flag) for flag in seen]

    def broadcast(self, value: Any) -> Any:
        """See `Backend.broadcast`."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._host_group, device=torch.device("cpu"))
        return box[0]

    def all_objects(self, value: Any) -> list[Any]:
        """See `Backend.all_objects`."""
        if self.world == 1:
            return [value]
        boxes: list[Any] = [None] * self.world
        dist.all_gather_object(boxes, value, group=self._host_group)
        return boxes

    def barrier(self, timeout: float | None = None) -> None:
        """See `Backend.barrier`."""
        if self.world == 1:
            return
        wait = datetime.timedelta(seconds=timeout) if timeout else None
        dist.monitored_barrier(group=self._host_group, timeout=wait, wait_all_ranks=True)

    def close(self) -> None:
        """See `Backend.close`."""
        if dist.is_initialized():
            dist.destroy_process_group()
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if self.world == 1 else ():
                os.environ.pop(name, None)


def check_own_devices(places: Sequence[tuple[str, str]]) -> None:
    """ConfigError where two processes have one device: NCCL would refuse it later, or each wait for the
    other's memory. ``places`` is (host, `Hardware.identity`) of every rank."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(rank)
    for (host, serial), sharing in ranks.items():
        if serial and len(sharing) > 1:
            here = [place for place in places if place[0] == host]
            raise ConfigError(
                f"ranks {', '.join(map(str, sharing))} have one device of {host} ({serial}): {len(here)} "
                f"processes there see {len(set(here))} "
                "device(s). Start one process a device, or let each see its own (srun --gpus-per-task=1, or "
                "no CUDA_VISIBLE_DEVICES)"
            )


class Processes(HostTalk):
    """Mixin of a Backend with one process a device: its place among them and the collectives over device tensors."""

    averages: int

    def _connect(self) -> None:
        self.hardware = hardware_here()
        place = init_distributed(self.hardware.transport)
        self.rank, self.local_rank, self.world = place.rank, place.local_rank, place.world
        self.devices = self.averages = self.world
        self.device = self.hardware.device(self.local_rank)
        self._host_group = dist.new_group(backend="gloo")
        check_own_devices(self.all_objects((socket.gethostname(), self.hardware.identity(self.device))))

    def sum_over_devices(self, value: Tensor | float) -> Tensor:
        """See `Backend.sum_over_devices`."""
        total = torch.as_tensor(value).detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total

    def gather(self, x: Tensor, with_grad: bool = False) -> Tensor:
        """See `Backend.gather`."""
        if with_grad and torch.is_grad_enabled():
            return torch.cat(differentiable.all_gather(x))
        parts = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(parts, x.detach().contiguous())
        return torch.cat(parts)

    def rotate(self, x: Tensor, by: int = 1) -> Tensor:
        """See `Backend.rotate`."""
        return exchange((x,), (by,))[0] if by % self.world else x
