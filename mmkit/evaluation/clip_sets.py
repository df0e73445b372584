"""CLIP models on datasets that lie on disk or in a bucket, in the tar layout clip-benchmark publishes, and while they train.

A set is a folder: ``classnames.txt``, ``test/nshards.txt``, ``test/0.tar`` ... with a picture and ``cls`` (or, for retrieval, ``txt``
with one caption a line). A missing shard count, a missing shard or another number of documents than the published one is an error (U59).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import fsspec
import torch
from torch import Tensor

from mmkit.config import DataConfig, SourceConfig
from mmkit.data.images import open_image
from mmkit.data.shards import ShardSource, open_shards
from mmkit.evaluation import collections, retrieval, zero_shot
from mmkit.evaluation.zero_shot import Share
from mmkit.storage import Store

if TYPE_CHECKING:
    from mmkit.evaluation.tasks.clip_demo import Towers

RECALLS = (1, 5, 10)


class TarSet(Sequence):
    """(key, image (3, h, w), target) of one set, opened picture by picture; target is a class number, a list of them, or captions."""

    def __init__(self, source: ShardSource, transform: Callable, target: Callable[[str], Any]):
        self.source, self.transform, self.target = source, transform, target

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> tuple[str, Tensor, Any]:
        example = self.source[i]
        return example.key, self.transform(open_image(example.images[0])), self.target(example.caption)


def folder_of(name: str, root: str) -> str:
    """Where a task's set lies: ``root`` with ``{dataset}`` filled in, or ``root/wds_NAME`` as clip-benchmark names its sets."""
    slug = name.replace("/", "-")
    return root.format(dataset=slug) if "{dataset}" in root else f"{root.rstrip('/')}/wds_{slug}"


def open_set(name: str, root: str, transform: Callable, limit_check: bool = True) -> tuple[TarSet, tuple[str, ...]]:
    """The test documents of a task and its class names (none for retrieval). ValueError where the set is not complete."""
    task = collections.tasks()[collections.members(name)[0]]
    folder, classify = folder_of(name, root), task.kind == "zeroshot_classification"
    n_shards = int(_text(f"{folder}/test/nshards.txt", f"{name}: the number of shards is not known, so completeness cannot be checked"))
    path = f"{folder}/test/{{0..{n_shards - 1}}}.tar"
    kind = "cls" if classify else "txt"
    source = open_shards(SourceConfig(name=name, format="webdataset", path=path), DataConfig(caption_key=kind, max_bad_share=0.0))
    if limit_check and len(source) != task.n:
        raise ValueError(f"{name}: {len(source)} documents in {folder}, a complete set has {task.n}")
    if not classify:
        return TarSet(source, transform, lambda text: [line.strip() for line in text.splitlines() if line.strip()]), ()
    names = tuple(_text(f"{folder}/classnames.txt", f"{name}: the class names are missing").splitlines())
    return TarSet(source, transform, _classes if name == collections.MULTI_LABEL else int), names


def _classes(text: str) -> list[int]:
    return [int(number) for number in text.replace(",", " ").split()]


def _text(path: str, problem: str) -> str:
    try:
        with fsspec.open(path, "r", encoding="utf8") as file:
            return file.read().strip()
    except FileNotFoundError:
        raise ValueError(f"{problem}; {path} does not exist") from None


def score(
    name: str, root: str, towers: Towers, *, model: str, pretrained: str, batch: int = 64, share: Share = Share(), check: bool = True
) -> dict:
    """One task's result under clip-benchmark's keys. All processes call this; each gets the whole result."""
    documents, names = open_set(name, root, towers.transform, check)
    if names:
        task = collections.zero_shot_task(name, names)
        task = zero_shot.ZeroShotTask(name, names, task.templates, len(documents), task.multi_label)
        metrics, _ = zero_shot.evaluate(towers.encode, towers.tokenize, task, documents, batch=batch, share=share)
    else:
        metrics = retrieval_scores(documents, towers, batch, share)
    return collections.result(name, metrics, model=model, pretrained=pretrained)


def retrieval_scores(documents: TarSet, towers: Towers, batch: int = 64, share: Share = Share()) -> dict[str, float]:
    """Benchmark recalls (see `retrieval.benchmark_recall`) of a set with several captions a picture."""
    captions = [documents.target(documents.source[i].caption) for i in range(len(documents))]
    owner = torch.tensor([i for i, found in enumerate(captions) for _ in found])
    tokens = towers.tokenize([caption for found in captions for caption in found])
    image = zero_shot.features_of(towers.encode, "image", lambda i: documents[i][1], len(documents), batch=batch, share=share)
    text = zero_shot.features_of(towers.encode, "text", lambda i: tokens[i], len(tokens), batch=batch, share=share)
    return retrieval.benchmark_recall(image, text, owner, ks=RECALLS)


def score_all(names: str | Iterable[str], root: str, towers: Towers, output: str, **options: Any) -> dict[str, dict]:
    """Every task of collections or names; one JSON a task at ``output``, which holds ``{dataset}``. Returns task -> metrics."""
    found = {}
    for name in collections.members(names):
        row = score(name, root, towers, **options)
        found[name] = row["metrics"]
        if options.get("share", Share()).rank == 0:
            folder, _, file = output.format(dataset=name.replace("/", "_")).rpartition("/")
            Store(folder or ".").write(file, json.dumps(row).encode())
    return found


def during_training(tokenizer: Callable, transforms: Sequence[Callable], names: Sequence[str] = (), batch: int = 64) -> Callable:
    """An ``on_eval`` of `training.loop.train` that scores offline tasks (all without ``names``) every ``train.eval_every`` steps,
    shared over processes.

    It calls the wrapped objective, so sharded weights are whole where they are used (U48).
    """
    from mmkit.evaluation.tasks.clip_demo import CLIP_TASKS, Towers

    def scores(state: Any) -> dict[str, float]:
        backend = state.backend

        def encode(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return state.objective(backend.shard(tensors), mode="encode")

        towers = Towers(encode, tokenizer, transforms[0])
        share = Share(backend.rank, backend.world, backend.all_objects)
        rows = -(-batch // backend.devices) * backend.devices
        results = [CLIP_TASKS[name](towers, batch=rows, share=share) for name in names or CLIP_TASKS]
        return {f"{result.task}_{metric}": value for result in results for metric, value in result.metrics.items()}

    return scores
