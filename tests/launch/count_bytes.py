"""Run by torchrun in test_plan: bytes that ZeRO 0-3 and FSDP really keep on rank 0 for a toy, as JSON."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

from mmkit.config import BackendConfig, TrainConfig
from mmkit.sharding.backend import create

WIDTH, LAYERS = 128, 8
COPIES = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")  # ZeRO-1 and 2, ZeRO-3


class Toy(nn.Module):
    """Frozen first half, trained second half; the model is `.model` of an objective, as everywhere."""

    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict({f"layer{i}": nn.Linear(WIDTH, WIDTH) for i in range(LAYERS)})
        for i in range(LAYERS // 2):
            self.model[f"layer{i}"].requires_grad_(False)

    def forward(self, batch, mode="loss"):
        """The sum of squares after all layers."""
        x = batch["x"]
        for layer in self.model.values():
            x = layer(x).tanh()
        return {"loss_sum": x.square().sum()}


def adamw(named):
    """Plain AdamW over the trainable parameters."""
    return torch.optim.AdamW(named.values(), lr=1e-3)


def size(tensors) -> int:
    """Bytes of distinct storages of the local parts."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if t.numel()}.values())


def count(config: BackendConfig) -> dict[str, int]:
    """Bytes of weights and of optimizer state (with ZeRO's own copy of the weights) after a step."""
    backend = create(config, "fp32")
    torch.manual_seed(0)
    module = backend.prepare(Toy(), adamw, train=TrainConfig(trainable=("connector",), precision="fp32"), blocks=("Linear",))
    backend.backward(module(backend.shard({"x": torch.ones(2, WIDTH)}))["loss_sum"] / 2, last=True)
    backend.update(1.0)
    weights = size([getattr(p, "ds_tensor", p) for p in module.parameters()])
    optimizer = backend.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value) and value.numel() > 1]
    copies = [flat for name in COPIES for flat in getattr(optimizer, name, ())]
    return {"weights": weights, "optimizer": size([*states, *copies])}


def main() -> None:
    """Counts every backend and prints the table on rank 0."""
    cases = {f"zero{stage}": BackendConfig(kind="deepspeed", zero_stage=stage, processes=2) for stage in range(4)}
    cases["fsdp"] = BackendConfig(kind="torch", strategy="fsdp", processes=2)
    cases["ddp"] = BackendConfig(kind="torch", strategy="ddp", processes=2)
    chosen = sys.argv[1:] or list(cases)
    found = {name: count(cases[name]) for name in chosen}
    if torch.distributed.get_rank() == 0:
        print("COUNTED " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
