"""Which device a process takes among those it sees, and that no two take one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mmkit.config import ConfigError
from mmkit.sharding.devices import CudaHardware
from mmkit.sharding.processes import check_own_devices


@pytest.mark.parametrize(
    ("visible", "local_ranks", "numbers"),
    [(4, (0, 1, 2, 3), [0, 1, 2, 3]), (1, (0, 1, 2, 3), [0] * 4), (2, (2, 3), [0, 1])],
)
def test_a_process_counts_among_the_devices_it_sees(monkeypatch, visible, local_ranks, numbers):
    """A stand-in for the driver: `srun --gpus-per-task=1` shows each task one device, number 0."""
    taken = []

    def set_device(device):
        if device.index >= visible:
            raise RuntimeError("CUDA error: invalid device ordinal")
        taken.append(device.index)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}")
    )
    hardware = CudaHardware()
    found = [hardware.device(rank) for rank in local_ranks]
    assert [device.index for device in found] == taken == numbers
    assert hardware.identity(found[0]) == f"GPU-{numbers[0]}"


def test_processes_that_have_one_device_are_told_before_they_work():
    check_own_devices([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")])
    check_own_devices([("a", ""), ("a", ""), ("a", "")])  # CPU cores are shared
    with pytest.raises(
        ConfigError,
        match=r"ranks 1, 2 have one device of b \(GPU-7\): 3 processes there see 2 device\(s\)\. .*gpus-per-task",
    ):
        check_own_devices([("a", "GPU-1"), ("b", "GPU-7"), ("b", "GPU-7"), ("b", "GPU-8")])
