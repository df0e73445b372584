"""Tensors passed between neighbouring processes, with gradients: the ring of the sigmoid loss (clip-training section 2).

Where one process drives every device (single, SPMD) there is no neighbour and nothing here is called.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def exchange(tensors: tuple[torch.Tensor, ...], shifts: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Sends tensor i to the process ``shifts[i]`` places on, and returns what arrives from as many places back.

    All transfers run at once. The gradient travels the opposite way. Every process must call this with the same shapes.
    """
    return _Exchange.apply(shifts, *tensors)


def from_process(tensor: torch.Tensor, source: int) -> torch.Tensor:
    """Process ``source``'s tensor on every process, by an all-reduce; its gradient is the sum over processes."""
    return _FromProcess.apply(tensor, source)


def _send_all(tensors, shifts) -> tuple[torch.Tensor, ...]:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors)
    transfers = []
    for tag, (tensor, arrival, shift) in enumerate(zip(tensors, received, shifts, strict=True)):
        transfers.append(dist.P2POp(dist.isend, tensor.contiguous(), (rank + shift) % size, tag=tag))
        transfers.append(dist.P2POp(dist.irecv, arrival, (rank - shift) % size, tag=tag))
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shifts, *tensors):
        ctx.shifts = shifts
        return _send_all(tensors, shifts)

    @staticmethod
    def backward(ctx, *gradients):
        return None, *_send_all(gradients, tuple(-shift for shift in ctx.shifts))


class _FromProcess(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, source):
        ctx.mine = dist.get_rank() == source
        shared = tensor.detach().clone() if ctx.mine else torch.zeros_like(tensor)
        dist.all_reduce(shared)
        return shared

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return (total if ctx.mine else torch.zeros_like(total)), None
