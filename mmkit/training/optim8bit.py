"""AdamW whose two moments are kept in 8 bits (bitsandbytes), with the moments readable and settable as fp32.

The portable checkpoint knows only fp32 ``exp_avg`` and ``exp_avg_sq``. Writing dequantises, reading quantises again. Nearly every
value goes back to its own byte; a block whose largest moment is negative may come back up to 1% of that moment away, because
bitsandbytes' signed codes end at -0.993.
"""

from __future__ import annotations

import bitsandbytes as bnb
import torch
from bitsandbytes import functional

BLOCK = 256  # values that share one scale in bitsandbytes' 8-bit optimizers
MOMENTS = {"exp_avg": ("state1", "qmap1", "absmax1"), "exp_avg_sq": ("state2", "qmap2", "absmax2")}


class AdamW8bit(bnb.optim.AdamW8bit):
    """bitsandbytes' AdamW8bit that speaks of its moments by torch's names."""

    @torch.no_grad()
    def moments(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """fp32 ``exp_avg`` and ``exp_avg_sq`` of ``parameter``, zeros before its first step."""
        state = self.state.get(parameter, {})
        out = {}
        for name, (values, code, scale) in MOMENTS.items():
            if values not in state:
                out[name] = torch.zeros_like(parameter, dtype=torch.float32)
            elif state[values].dtype == torch.uint8:
                out[name] = functional.dequantize_blockwise(
                    state[values], absmax=state[scale], code=state[code], blocksize=BLOCK
                ).to(torch.float32)
            else:
                out[name] = state[values].float().clone()
        return out

    @torch.no_grad()
    def set_moments(self, parameter: torch.nn.Parameter, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: int) -> None:
        """Replaces the state of ``parameter``; works before the first step too."""
        group_index, index, group = next(
            (i, j, g) for i, g in enumerate(self.param_groups) for j, p in enumerate(g["params"]) if p is parameter
        )
        if not self.initialized:
            self.check_overrides()
            self.to_gpu()
            self.initialized = True
        if parameter not in self.state or not self.state[parameter]:
            self.init_state(group, parameter, group_index, index)
        state = self.state[parameter]
        state["step"] = step
        for name, full in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            values, code, scale = MOMENTS[name]
            full = full.to(parameter.device, torch.float32)
            if state[values].dtype == torch.uint8:
                quantised, quantisation = functional.quantize_blockwise(full, code=state[code], blocksize=BLOCK)
                state[values].copy_(quantised)
                state[scale].copy_(quantisation.absmax)
            else:
                state[values].copy_(full)
