"""Runs a test on a given number of threads, so that what it compares does not hang on the machine's cores."""

import contextlib
from collections.abc import Iterator

import torch

COUNTS = (1, 2, 16)  # where libraries choose different kernels


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """``count`` threads for torch's operations; the former number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
