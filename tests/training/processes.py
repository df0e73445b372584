"""Starts a test script in several processes joined by gloo, or in one process with virtual XLA devices."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.sharding.launches import QUICK_COMPILES

ROOT = Path(__file__).resolve().parents[2]


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def run_processes(script, arguments, world=1, xla_devices=None, timeout=540):
    """Standard output of every rank; AssertionError with the output of the first rank that fails."""
    common = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    if xla_devices:
        common |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(xla_devices), "XLA_FLAGS": QUICK_COMPILES}
    else:
        common |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    children = []
    for rank in range(world):
        place = {} if xla_devices else {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        children.append(subprocess.Popen(command, env=common | place, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        outputs = [child.communicate(timeout=timeout)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    for child, output in zip(children, outputs, strict=True):
        assert child.returncode == 0, output[-6000:]
    return outputs
