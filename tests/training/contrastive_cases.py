"""Runs one optimizer step of each case on this process's share of a fixed batch and saves the gradients of the whole.

``python contrastive_cases.py OUT KIND STRATEGY STAGE CASES``; rank and world come from the environment as torchrun sets them. Gradients
are read from Adam's first moment after one step, which every backend can export.
"""

from __future__ import annotations

import gc
import json
import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from open_clip.transformer import PatchDropout
from torch import nn

from mmkit.config import BackendConfig, ContrastiveConfig, TrainConfig
from mmkit.sharding.backend import create
from mmkit.training import contrastive
from mmkit.training.accumulate import contrastive_step
from mmkit.training.contrastive import ContrastiveObjective, check
from mmkit.training.validation import of_pairs

N, PARTIAL = 24, 13  # pairs of the joined batch: 2 or 3 micro-batches on each of 4 devices; of the last batch of held-out pairs


class Toy(nn.Module):
    """Two small towers with the interface of ClipModel."""

    def __init__(self, seed=0, dropout=0.0, patch_dropout=0.0, bias=None, caption=False, width=5):
        super().__init__()
        torch.manual_seed(seed)
        self.places = nn.Parameter(torch.eye(6))  # each of the 6 numbers of an image is a patch
        self.drop_patches = PatchDropout(patch_dropout)
        self.image = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, width))
        self.words = nn.Embedding(20, 8)
        self.text = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, width))
        self.logit_scale = nn.Parameter(torch.tensor([1.5]))
        self.logit_bias = nn.Parameter(torch.tensor([bias])) if bias is not None else None
        self.head = nn.Linear(width, 20) if caption else None

    def forward(self, batch, mode="loss"):
        patches = self.drop_patches(batch["image"][..., None] * self.places)  # (N, patches kept, 6)
        image = F.normalize(self.image(patches.sum(1)), dim=-1)
        words = self.text(self.words(batch["text"]))
        bias = self.logit_bias * 1 if self.logit_bias is not None else None
        out = {"image_features": image, "text_features": F.normalize(words.mean(1), dim=-1)}
        out |= {"logit_scale": self.logit_scale.exp(), "logit_bias": bias}
        if self.head is not None:
            out |= {"logits": self.head(words + image[:, None]), "labels": batch["text"]}
        return out


def joined_batch():
    g = torch.Generator().manual_seed(7)
    text = torch.randint(0, 20, (N, 4), generator=g)
    text[3] = text[9]  # one caption twice
    return {"image": torch.randn(N, 6, generator=g), "text": text}


def teacher_of(config):
    return Toy(seed=5, width=3) if config.kind == "distill" else None


def model_of(config, **dropouts):
    return Toy(**dropouts, bias=-3.0 if config.kind == "siglip" else None, caption=config.kind == "coca")


class Spliced:
    """A gather without gradient but for the process's own rows, as open_clip's global mode has it."""

    def __init__(self, backend):
        self.backend, self.rank = backend, backend.rank

    def gather(self, x, with_grad=False):
        parts = list(self.backend.gather(x).split(len(x)))
        parts[self.rank] = x
        return torch.cat(parts)


def held_out_loss(config, backend, wrapped, train, micro):
    """The validation loss of the joined batch and its first `PARTIAL` pairs, this process having its rows of each micro-batch."""
    whole, numbers, batches = joined_batch(), [*range(N), *range(PARTIAL), *[None] * (N - PARTIAL)], []
    blank = {name: torch.zeros_like(value[0]) for name, value in whole.items()}
    for start in range(0, len(numbers), N // micro):
        mine = numbers[start : start + N // micro][backend.rank :: backend.world]
        tensors = {name: torch.stack([blank[name] if i is None else value[i] for i in mine]) for name, value in whole.items()}
        batches.append(SimpleNamespace(tensors=tensors, keys=["" if i is None else f"pair {i}" for i in mine]))
    run = SimpleNamespace(train=train.model_copy(update={"contrastive": config}))
    with torch.no_grad():
        return of_pairs(SimpleNamespace(run=run, backend=backend, objective=wrapped, held_out=batches, accumulation=micro))["eval_loss"]


def run(case, backend):
    """Gradients of every parameter and what the loss reported, for one case on one backend. A case with random draws also has
    ``one_graph``: the gradients of one loss with one graph over all micro-batches, from the same draws."""
    config, micro = ContrastiveConfig(**case["contrastive"]), case.get("micro", 1)
    contrastive.check = (lambda config: None) if case.get("unchecked") else check
    seam = Spliced(backend) if case.get("unchecked") and not config.local_loss else backend
    drawn = {name: case[name] for name in ("dropout", "patch_dropout") if name in case}
    objective, unwrapped = (ContrastiveObjective(model_of(config, **drawn), seam, config, teacher_of(config)) for _ in range(2))
    train = TrainConfig(precision="fp32", global_batch=N, device_batch=N // backend.devices // micro)
    factory = lambda named: torch.optim.AdamW(named.values(), lr=1e-3, weight_decay=0.0)
    wrapped = backend.prepare(objective, factory, train=train, blocks=("Sequential",), accumulation=micro)
    mine = {name: value.chunk(backend.world)[backend.rank] for name, value in joined_batch().items()}
    parts = [backend.shard({name: value.chunk(micro)[i] for name, value in mine.items()}) for i in range(micro)]
    count = backend.sum_over_devices(torch.tensor(float(len(mine["image"]))))
    torch.manual_seed(3 + backend.rank)
    draws = backend.rng_state()
    if drawn:
        facts = {"one_graph": one_graph(unwrapped.to(backend.device), parts, backend)}
    else:
        facts = {"validation": held_out_loss(config, backend, wrapped, train, micro)}
    backend.set_rng_state(draws)
    if micro > 1:
        out = contrastive_step(wrapped, objective.loss, parts, backend, count)
    else:
        out = wrapped(parts[0], mode="loss")
        backend.backward(out["loss_sum"] / count, last=True)
    loss = backend.sum_over_devices(out["loss_sum"].detach()) / count
    backend.update(None)
    backend.sync()
    facts["gradients"] = {name: entry["exp_avg"] / 0.1 for name, entry in backend.export_state()}
    facts |= {name: float(out[name]) for name in ("max_logit", "logit_scale", "duplicate_share") if name in out}
    backend.clear(keep_programs=True)  # the cases that follow share programs, and count them
    return facts | {"loss": float(loss), "compiles": backend.compiles()}


def one_graph(objective, parts, backend):
    """Gradients over all devices of one loss whose graph holds every micro-batch, which is what cached accumulation must equal."""
    features = [objective(part, mode="features") for part in parts]
    joined = features[0] | {name: torch.cat([each[name] for each in features]) for name in ("image_features", "text_features")}
    (objective.loss(joined)["loss_sum"] / N).backward()
    backend.sync()  # on XLA every gradient read from here would else compile a program of its own
    named = {name: p.grad for name, p in objective.model.named_parameters()}
    return {name: backend.sum_over_devices(gradient).cpu() for name, gradient in named.items()}


def main():
    out, kind, strategy, stage, cases = sys.argv[1:]
    backend = create(BackendConfig(kind=kind, strategy=strategy, zero_stage=int(stage)), "fp32")
    gc.freeze()  # DeepSpeed collects garbage in each case; it need not look through the libraries 20 times
    results = {name: run(case, backend) for name, case in json.loads(cases).items()}
    if backend.is_main:
        torch.save(results, out)
    backend.close()


if __name__ == "__main__":
    main()
