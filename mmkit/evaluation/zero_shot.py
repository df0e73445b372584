"""Zero-shot classification with prompt ensembles (CLIP section 3.1): names x templates -> a classifier of
norm-1 columns -> top-k.

A task carries its own names and templates as tuples: nothing here is a mutable table that one task could
leave changed for the next. Documents are shared out over processes and joined by number, so any number of
processes scores each exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkit.errors import InputError

Template = str | Callable[[str], str]
Encode = Callable[[dict[str, Tensor]], dict[str, Tensor]]  # a batch of one tower -> {"image_features"} or {"text_features"}


@dataclass(frozen=True)
class ZeroShotTask:
    """What is classified: class names, templates with ``{}`` or ``{c}`` for the name, how many documents a
    complete set has.
    """

    name: str
    names: tuple[str, ...]
    templates: tuple[Template, ...]
    n_expected: int | None = None
    multi_label: bool = False

    def __post_init__(self):
        if not self.names or not self.templates:
            raise InputError(f"task {self.name}: {len(self.names)} class names and {len(self.templates)} templates; both are needed")
        if bad := [t for t in self.templates if isinstance(t, str) and "{}" not in t and "{c}" not in t]:
            raise InputError(f"task {self.name}: template {bad[0]!r} has no place for the class name; write {{}} or {{c}}")

    def prompts(self, name: str) -> list[str]:
        """Every template filled with one class name."""
        return [t.replace("{c}", name).replace("{}", name) if isinstance(t, str) else t(name) for t in self.templates]


def imagenet() -> ZeroShotTask:
    """ImageNet-1k: the 1000 names and 80 templates that open_clip ships."""
    import open_clip

    names, templates = open_clip.IMAGENET_CLASSNAMES, open_clip.OPENAI_IMAGENET_TEMPLATES
    return ZeroShotTask("imagenet1k", tuple(names), tuple(templates), 50_000)


@dataclass(frozen=True)
class Share:
    """Which documents a process scores, and how results of all processes come together; the default is one
    process.

    ``all_objects`` returns every process's object in the order of ranks (`Backend.all_objects`).
    """

    rank: int = 0
    world: int = 1
    all_objects: Callable[[Any], list[Any]] = field(default=lambda value: [value])

    def numbers(self, n: int, batch: int) -> list[list[tuple[int, bool]]]:
        """Batches of (document number, counts): equally many and equally large on every process, filled up
        with repeats that do not count, since every process must call a sharded model equally often."""
        n_batches = math.ceil(n / (self.world * batch))
        mine = list(range(self.rank, n, self.world))
        padded = [(i, True) for i in mine] + [(0, False)] * (n_batches * batch - len(mine))
        return [padded[start : start + batch] for start in range(0, len(padded), batch)]

    def joined(self, rows: dict[int, Any], n: int) -> list[Any]:
        """The rows of all processes in the order of documents; ValueError unless there are exactly ``n``."""
        everything = {number: row for part in self.all_objects(rows) for number, row in part.items()}
        if len(everything) != n:
            raise InputError(f"{len(everything)} of {n} documents were scored")
        return [everything[number] for number in range(n)]


@torch.no_grad()
def classifier(encode: Encode, tokenize: Callable[[list[str]], Tensor], task: ZeroShotTask, classes_per_batch: int = 10) -> Tensor:
    """(D, C): for each class the mean of its prompts' norm-1 features, of norm 1 again. Batches have one
    shape.
    """
    columns = []
    for start in range(0, len(task.names), classes_per_batch):
        names = list(task.names[start : start + classes_per_batch])
        filled = names + names[:1] * (classes_per_batch - len(names))
        tokens = tokenize([prompt for name in filled for prompt in task.prompts(name)])
        features = F.normalize(encode({"text": tokens})["text_features"].float(), dim=-1)
        means = features.view(classes_per_batch, len(task.templates), -1).mean(1)  # (C * P, D) -> (C, D)
        columns.append(F.normalize(means, dim=-1)[: len(names)].cpu())
    return torch.cat(columns).T


@torch.no_grad()
def evaluate(
    encode: Encode,
    tokenize: Callable[[list[str]], Tensor],
    task: ZeroShotTask,
    documents: Sequence[tuple[str, Tensor, Any]],
    *,
    batch: int = 64,
    share: Share = Share(),
) -> tuple[dict[str, float | None], list[dict]]:
    """Metrics and one row a document. ``documents[i]`` is (key, image (3, h, w), class number or a list of
    them).

    ValueError where a complete set has another number of documents.
    """
    n = len(documents)
    if n != (task.n_expected or n):
        raise InputError(f"task {task.name}: {n} documents found, {task.n_expected} expected; the split is wrong or files are missing")
    weights = classifier(encode, tokenize, task)
    rows: dict[int, dict] = {}
    for numbers in share.numbers(n, batch):
        chosen = [documents[i] for i, _ in numbers]
        features = encode({"image": torch.stack([image for _, image, _ in chosen])})["image_features"]
        logits = 100 * F.normalize(features.float().cpu(), dim=-1) @ weights
        for (i, counts), (key, _, target), scores in zip(numbers, chosen, logits, strict=True):
            # of a set in a bucket the classes are first read here
            if not all(0 <= c < len(task.names) for c in (target if isinstance(target, list) else [target])):
                n_names = len(task.names)
                raise InputError(f"task {task.name}: {key} has class {target}, but there are {n_names} names")
            if counts:
                rows[i] = {"key": key, "target": target} | _row(scores, target, task.multi_label)
    ordered = share.joined(rows, n)
    metrics = multi_label_scores(ordered) if task.multi_label else class_scores(ordered, len(task.names))
    return metrics, ordered


def _row(scores: Tensor, target: Any, multi_label: bool) -> dict:
    if multi_label:
        return {"scores": scores.tolist()}
    return {"top5": scores.topk(min(5, len(scores))).indices.tolist()}


def class_scores(rows: Sequence[dict], n_classes: int) -> dict[str, float | None]:
    """acc1, acc5 (None below five classes) and the mean over classes of each class's recall, under
    clip-benchmark's keys.
    """
    right = torch.tensor([row["top5"][0] == row["target"] for row in rows], dtype=torch.float64)
    target = torch.tensor([row["target"] for row in rows])
    recalls = [right[target == c].mean() for c in target.unique()]
    top5 = sum(row["target"] in row["top5"] for row in rows) / len(rows) if n_classes >= 5 else None
    return {"acc1": right.mean().item(), "acc5": top5, "mean_per_class_recall": torch.stack(recalls).mean().item()}


def multi_label_scores(rows: Sequence[dict]) -> dict[str, float | None]:
    """Mean over classes of the average precision (rows in the order of score); classes that never occur do
    not count.
    """
    scores = torch.tensor([row["scores"] for row in rows], dtype=torch.float64)  # (N, C)
    truth = torch.zeros_like(scores, dtype=torch.bool)
    for i, row in enumerate(rows):
        truth[i, torch.as_tensor(row["target"], dtype=torch.long)] = True
    hits = truth.gather(0, scores.argsort(dim=0, descending=True, stable=True)).double()
    precision = hits.cumsum(0) / torch.arange(1, len(rows) + 1)[:, None]
    count = hits.sum(0)
    average = (precision * hits).sum(0)[count > 0] / count[count > 0]
    return {"mean_average_precision": average.mean().item()}


@torch.no_grad()
def features_of(
    encode: Encode, kind: str, load: Callable[[int], Tensor], n: int, *, batch: int = 64, share: Share = Share()
) -> Tensor:
    """Norm-1 features (n, D) of ``load(i)`` for every i, on every process; ``kind`` is ``image`` or
    ``text``.
    """
    rows: dict[int, Tensor] = {}
    for numbers in share.numbers(n, batch):
        out = encode({kind: torch.stack([load(i) for i, _ in numbers])})[f"{kind}_features"]
        features = F.normalize(out.float(), dim=-1).cpu()
        rows |= {i: row for (i, counts), row in zip(numbers, features, strict=True) if counts}
    return torch.stack(share.joined(rows, n))
