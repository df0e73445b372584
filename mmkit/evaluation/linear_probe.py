"""Linear probe on frozen image features, by clip-benchmark's recipe: one linear layer on norm-1 features, AdamW without decay,
cosine from lr 0.1 over 10 epochs of batches of 64. Runs on features alone, so the model has already been put away.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmkit.errors import InputError
from mmkit.evaluation.zero_shot import class_scores


def few_shot(targets: Tensor, k: int, seed: int = 0) -> Tensor:
    """Row numbers of ``k`` random samples of each class, or of all samples for k < 0. ValueError where a class has fewer."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    if k < 0:
        return order
    chosen = []
    for c in targets.unique().tolist():
        rows = order[targets[order] == c]
        if len(rows) < k:
            raise InputError(f"class {c} has {len(rows)} samples, fewshot_k asks for {k}")
        chosen.append(rows[:k])
    return torch.cat(chosen)


def linear_probe(
    train: Tensor,
    train_targets: Tensor,
    test: Tensor,
    test_targets: Tensor,
    *,
    lr: float = 0.1,
    epochs: int = 10,
    batch: int = 64,
    fewshot_k: int = -1,
    seed: int = 0,
) -> dict[str, float | None]:
    """``train`` (N, D), ``test`` (M, D) features with class numbers. Metrics under clip-benchmark's keys, with the recipe beside them."""
    rows = few_shot(train_targets, fewshot_k, seed)
    train, train_targets = F.normalize(train[rows].float(), dim=-1), train_targets[rows]
    n_classes = int(max(train_targets.max(), test_targets.max())) + 1
    generator = torch.Generator().manual_seed(seed)
    probe = nn.Linear(train.shape[1], n_classes).to(train.device)
    with torch.no_grad():
        bound = train.shape[1] ** -0.5
        for parameter in probe.parameters():
            parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
    optimizer = torch.optim.AdamW(probe.parameters(), lr=lr, weight_decay=0)
    n_steps = epochs * -(-len(train) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(train), generator=generator).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(probe(train[chosen]), train_targets[chosen]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        top5 = probe(F.normalize(test.float(), dim=-1)).topk(min(5, n_classes)).indices.tolist()
    metrics = class_scores([{"top5": top, "target": target} for top, target in zip(top5, test_targets.tolist(), strict=True)], n_classes)
    return metrics | {"lr": lr, "epochs": epochs, "seed": seed, "fewshot_k": fewshot_k}
