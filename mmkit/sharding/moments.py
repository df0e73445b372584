"""Adam's two moments of one parameter, read from and written into a torch or bitsandbytes optimizer.

8-bit states are dequantised block by block on the way out and quantised again on the way in; a round trip gives back the same codes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkit.sharding.backend import MOMENTS

QUANTISED = dict(zip(MOMENTS, ("state1", "state2"), strict=True))  # bitsandbytes' names


def read(optimizer: torch.optim.Optimizer | None, parameter: Tensor, moment: str) -> Tensor:
    """The moment as a float tensor shaped and sharded like ``parameter``; zeros before its first step."""
    state = optimizer.state.get(parameter, {}) if optimizer else {}
    if moment in state:
        return state[moment]
    if QUANTISED[moment] in state:
        return _dequantise(state, QUANTISED[moment][-1])
    return torch.zeros_like(parameter)


def write(optimizer: torch.optim.Optimizer, parameter: Tensor, values: Mapping[str, Tensor], step: int) -> None:
    """Set both moments and the step count of ``parameter``, before the optimizer's first step."""
    index, group = next((i, g) for i, g in enumerate(optimizer.param_groups) if any(p is parameter for p in g["params"]))
    if hasattr(optimizer, "init_state"):
        _quantise(optimizer, index, group, parameter, values, step)
        return
    on_device = group.get("capturable") or group.get("fused")
    count = torch.tensor(float(step), device=parameter.device if on_device else "cpu")
    optimizer.state[parameter] = {"step": count, **{key: value.clone() for key, value in values.items()}}


def count(optimizer: torch.optim.Optimizer | None) -> int:
    """Steps the optimizer has taken; skipped updates are not among them."""
    states = optimizer.state.values() if optimizer else ()
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def _dequantise(state: Mapping, number: str) -> Tensor:
    stored = state[f"state{number}"]
    if f"absmax{number}" not in state:  # small tensors are kept in fp32
        return stored
    from bitsandbytes import functional

    return functional.dequantize_blockwise(
        stored, absmax=state[f"absmax{number}"], code=state[f"qmap{number}"], blocksize=_blocksize(stored, state[f"absmax{number}"])
    )


def _blocksize(stored: Tensor, absmax: Tensor) -> int:
    return next(size for size in (64, 128, 256, 512, 1024, 2048, 4096) if -(-stored.numel() // size) == absmax.numel())


def _quantise(optimizer, index: int, group: Mapping, parameter: Tensor, values: Mapping[str, Tensor], step: int) -> None:
    place = next(i for i, p in enumerate(group["params"]) if p is parameter)
    optimizer.init_state(group, parameter, index, place)
    state = optimizer.state[parameter]
    state["step"] = step
    for moment, value in values.items():
        number = QUANTISED[moment][-1]
        if f"absmax{number}" not in state:
            state[f"state{number}"].copy_(value)
            continue
        absmax = state[f"absmax{number}"]
        codes, scale = _codes(value, state[f"qmap{number}"], _blocksize(value, absmax))
        state[f"state{number}"].copy_(codes)
        absmax.copy_(scale)


def _codes(value: Tensor, code: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Codes shaped like ``value`` and each block's scale. The library's own rounding takes the largest magnitude as scale, and shrinks
    a block whose largest value is negative each time, because the signed code ends at -0.993."""
    blocks = F.pad(value.flatten().float(), (0, -value.numel() % size)).view(-1, size)
    scale = blocks.amax(1) / code.max()
    if code.min() < 0:
        scale = torch.maximum(scale, blocks.amin(1) / code.min())
    middles = (code[1:] + code[:-1]) / 2
    codes = torch.bucketize(blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None], middles)
    return codes.flatten()[: value.numel()].view_as(value), scale
