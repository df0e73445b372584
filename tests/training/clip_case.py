"""A sharded CLIP model: train, encode on all processes, push the temperature out of its range, train on, encode again."""

from __future__ import annotations

import json
import sys

import torch
from tiny_clip import ARCHITECTURE  # a script's own folder comes first on its path

from mmkit.config import BackendConfig, ClipConfig, ContrastiveConfig, OptimizerConfig, TrainConfig
from mmkit.models.clip import COMPONENTS, SHARDING, build_clip
from mmkit.sharding.backend import create
from mmkit.training.contrastive import ContrastiveObjective
from mmkit.training.optim import optimizer_factory

N = 8


def batch():
    g = torch.Generator().manual_seed(1)
    return {"image": torch.randn(N, 3, 16, 16, generator=g), "text": torch.randint(1, 400, (N, 8), generator=g)}


def main():
    kind, strategy = sys.argv[1:]
    backend = create(BackendConfig(kind=kind, strategy=strategy), "fp32")
    torch.manual_seed(0)
    model = build_clip(ClipConfig(name="small", architecture=ARCHITECTURE))
    objective = ContrastiveObjective(model, backend, ContrastiveConfig())
    factory = optimizer_factory(model, COMPONENTS, OptimizerConfig(lr=1e-3, weight_decay=0.1))
    wrapped = backend.prepare(objective, factory, train=TrainConfig(precision="fp32"), rules=SHARDING, blocks=model.blocks)
    mine = backend.shard({name: value.chunk(backend.world)[backend.rank] for name, value in batch().items()})
    found = {"norms": [], "encoded": [], "scale": [], "saved": []}

    def step():
        out = wrapped(mine, mode="loss")
        backend.backward(out["loss_sum"] / N, last=True)
        backend.update(None)
        found["norms"].append({name: float(norm) for name, norm in backend.norms.items()})
        found["scale"].append([float(entry["param"]) for name, entry in backend.export_state() if name.endswith("logit_scale")][0])

    def encode():
        wrapped.eval()
        with torch.no_grad():
            found["encoded"].append(float(wrapped({"text": mine["text"]}, mode="encode")["text_features"].abs().sum()))
        wrapped.train()

    step()
    with torch.no_grad():
        next(p for name, p in backend.trained().items() if name.endswith("logit_scale")).fill_(10.0)
    step()
    encode()
    saved = {name: entry["exp_avg"] for name, entry in backend.export_state()}  # a checkpoint right after an evaluation
    found["saved"] = [len(saved), float(sum(moment.abs().sum() for moment in saved.values()))]
    step()
    encode()
    found["encoded"] = [sum(parts) for parts in zip(*backend.all_objects(found["encoded"]), strict=True)]
    backend.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
