"""What differs between the CPU and CUDA devices of a process, so that backends need not ask which one they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import OffloadPolicy


class Hardware:
    """The CPU, and what others change."""

    kind = "cpu"
    transport = "gloo"  # of torch.distributed
    engine = "cpu"  # DeepSpeed's word for the device

    @staticmethod
    def present() -> bool:
        """Whether this process can use such a device."""
        return True

    def device(self, index: int | None = None) -> torch.device:
        """The device of this process; number ``index`` of this machine where several processes share it."""
        return torch.device(self.kind)

    def identity(self, device: torch.device) -> str:
        """What no other device in the world is called; "" where processes may share one."""
        return ""

    def wrapper_ids(self, device: torch.device) -> list[int] | None:
        """What DDP calls device_ids."""
        return None

    def offload(self, wanted: bool) -> OffloadPolicy:
        """FSDP's policy; on the CPU everything is there already."""
        from torch.distributed.fsdp import OffloadPolicy

        return OffloadPolicy()

    def rng_state(self, device: torch.device) -> dict[str, Any]:
        """Random state of the device beside the host's."""
        return {}

    def set_rng_state(self, device: torch.device, state: Mapping[str, Any]) -> None:
        """Take back `rng_state`; another kind of device's is ignored."""

    def peak_memory(self, device: torch.device) -> int:
        """Most bytes used so far; 0 where nobody counts."""
        return 0

    def free(self) -> None:
        """Give cached memory back."""


class CudaHardware(Hardware):
    """NVIDIA and AMD devices."""

    kind = "cuda"
    transport = "cpu:gloo,cuda:nccl"
    engine = "cuda"

    @staticmethod
    def present() -> bool:
        """See `Hardware`."""
        return torch.cuda.is_available()

    def device(self, index: int | None = None) -> torch.device:
        """See `Hardware`; it becomes the current one. A process that sees fewer devices than its machine has
        processes (`srun --gpus-per-task=1`: one, number 0) counts among those it sees."""
        index = torch.cuda.current_device() if index is None else index % torch.cuda.device_count()
        device = torch.device(self.kind, index)
        torch.cuda.set_device(device)
        return device

    def identity(self, device: torch.device) -> str:
        """See `Hardware`."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def wrapper_ids(self, device: torch.device) -> list[int] | None:
        """See `Hardware`."""
        return [device.index]

    def offload(self, wanted: bool) -> OffloadPolicy:
        """See `Hardware`."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        return CPUOffloadPolicy() if wanted else super().offload(wanted)

    def rng_state(self, device: torch.device) -> dict[str, Any]:
        """See `Hardware`."""
        return {self.kind: torch.cuda.get_rng_state(device).tolist()}

    def set_rng_state(self, device: torch.device, state: Mapping[str, Any]) -> None:
        """See `Hardware`."""
        saved = state.get(self.kind)
        if saved:
            torch.cuda.set_rng_state(torch.tensor(saved, dtype=torch.uint8), device)

    def peak_memory(self, device: torch.device) -> int:
        """See `Hardware`."""
        return torch.cuda.max_memory_allocated(device)

    def free(self) -> None:
        """See `Hardware`."""
        torch.cuda.empty_cache()


HARDWARE = (CudaHardware, Hardware)  # the first present one is used


def hardware_here() -> Hardware:
    """The best kind of device here. Apple's (MPS) is none of them: it has no collectives, no float64 and no bitsandbytes, so a
    Mac computes on its CPU cores."""
    return next(kind for kind in HARDWARE if kind.present())()
