"""Contrastive models on the offline pairs: retrieval among held-out concepts, and zero-shot classes, each beside chance.

No test concept was in any training picture or caption. The zero-shot test holds those test pictures that have a class; country
flags are in neither split. The set is small (about a hundred pictures), so read the interval beside each number.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmkit.data.example import Example
from mmkit.data.images import open_image
from mmkit.evaluation import retrieval, zero_shot
from mmkit.evaluation.metrics import wilson
from mmkit.evaluation.runner import Result, versions
from mmkit.evaluation.task import hash_of
from mmkit.evaluation.tasks import pack_documents
from mmkit.evaluation.zero_shot import Share, ZeroShotTask
from mmkit.sharding.backend import Backend

PACK = "clip_pairs"
TEMPLATES = ("{}", "a {}", "a photo of a {}", "a picture of a {}", "one {}", "the {}", "a kind of {}")
KS = (1, 5, 10)


@dataclass(frozen=True, eq=False)
class Towers:
    """What scoring needs of a contrastive model: its encode function, tokenizer and image transform."""

    encode: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    tokenize: Callable[[list[str]], Tensor]
    transform: Callable[[Any], Tensor]

    @classmethod
    def of(cls, model: torch.nn.Module, tokenizer: Callable, transforms: Sequence[Callable], backend: Backend) -> Towers:
        """Of a `ClipModel` that was put on the device of ``backend``; every call goes through its one forward.

        Without autocast in every precision: rounding moves near captions past each other, and two towers are small.
        """

        def encode(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            found = model(backend.shard(batch), mode="encode")
            backend.sync()  # one program a tower and shape on lazy devices
            return found

        return cls(encode, tokenizer, transforms[0])

    def pixels(self, example: Example) -> Tensor:
        """The example's picture as the image tower takes it, (3, h, w)."""
        return self.transform(open_image(example.images[0]))


def retrieve(towers: Towers, *, batch: int = 64, share: Share = Share(), limit: int | None = None) -> Result:
    """Recall of captions from pictures and pictures from captions among all test pairs; every caption is there once."""
    started = time.perf_counter()
    documents = list(pack_documents.everything(PACK))[:limit]
    captions = [example.caption for example in documents]
    n = len(documents)
    image = zero_shot.features_of(towers.encode, "image", lambda i: towers.pixels(documents[i]), n, batch=batch, share=share)
    tokens = towers.tokenize(captions)
    text = zero_shot.features_of(towers.encode, "text", lambda i: tokens[i], n, batch=batch, share=share)
    metrics = retrieval.paired_recall(image, text, ks=[k for k in KS if k <= n])
    best = (image @ text.T).argmax(1).tolist()
    rows = [
        {"task": "clip_retrieval", "key": example.key, "answer": captions[found], "target": example.caption,
         "scores": {"R@1": float(found == i)}, "right": found == i, "meta": {}}
        for i, (example, found) in enumerate(zip(documents, best, strict=True))
    ]  # fmt: skip
    recall = metrics.get("image_to_text_R@5")
    chance = {f"{way}_R@{k}": min(k / n, 1.0) for way in ("image_to_text", "text_to_image") for k in KS}
    controls = {"chance": _control(chance)}
    result = Result(
        "clip_retrieval", _spec("clip_retrieval"), "", n, "image_to_text_R@5", metrics, controls=controls,
        interval=None if recall is None else wilson(recall, n), n_total=len(pack_documents.everything(PACK)), rows=tuple(rows),
    )  # fmt: skip
    return _finished(result, started)


def classify(towers: Towers, *, batch: int = 64, share: Share = Share(), limit: int | None = None) -> Result:
    """Zero-shot accuracy over the classes of the test pictures, beside the largest class and one over their number."""
    started = time.perf_counter()
    pairs = pack_documents.everything(PACK)
    everything = [example for example in pairs if example.meta.get("label") or "label" not in example.meta]
    documents = everything[:limit]
    labels = [example.meta.get("label") or example.meta["concept"] for example in documents]
    names = tuple(sorted(set(labels)))
    task = ZeroShotTask("clip_zero_shot", names, TEMPLATES)
    prepared = Prepared(towers, documents, [names.index(label) for label in labels])
    metrics, scored = zero_shot.evaluate(towers.encode, towers.tokenize, task, prepared, batch=batch, share=share)
    rows = [
        {"task": task.name, "key": row["key"], "answer": names[row["top5"][0]], "target": names[row["target"]],
         "scores": {"acc1": float(row["top5"][0] == row["target"])}, "right": row["top5"][0] == row["target"],
         "meta": {}}
        for row in scored
    ]  # fmt: skip
    counts = Counter(labels)
    controls = {
        "majority": _control({"acc1": max(counts.values()) / len(labels)}),
        "chance": _control({"acc1": 1 / len(names), "mean_per_class_recall": 1 / len(names)}),
    }
    spec = _spec(task.name) | {"classes": list(names), "templates": list(TEMPLATES)}
    metrics = {name: value for name, value in metrics.items() if value is not None}
    result = Result(
        task.name, spec, "", len(rows), "acc1", metrics, controls=controls,
        interval=wilson(metrics["acc1"], len(rows)), n_total=len(everything), rows=tuple(rows),
    )  # fmt: skip
    return _finished(result, started)


class Prepared(Sequence):
    """Documents in the form zero-shot evaluation reads: (key, image, class number), pictures opened when asked for."""

    def __init__(self, towers: Towers, documents: Sequence[Example], targets: Sequence[int]):
        self.towers, self.documents, self.targets = towers, documents, targets

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, place: int) -> tuple[str, Tensor, int]:
        example = self.documents[place]
        return example.key, self.towers.pixels(example), self.targets[place]


def _control(metrics: Mapping[str, float]) -> dict[str, Any]:
    return {"metrics": dict(metrics), "groups": {}}


def _spec(name: str) -> dict[str, Any]:
    return {"name": name, "version": 1, "source": "clip_pairs pack", "split": "test, held out by concept"}


def _finished(result: Result, started: float) -> Result:
    notes = (f"{result.task}: {result.n} of {result.n_total} documents",) if result.n < result.n_total else ()
    seconds, spec_hash = time.perf_counter() - started, hash_of(result.spec)
    return replace(result, notes=notes, spec_hash=spec_hash, seconds=seconds, versions=versions())


CLIP_TASKS = {"clip_retrieval": retrieve, "clip_zero_shot": classify}
