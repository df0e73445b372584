"""CLIP models on datasets that lie on disk or in a bucket, in the tar layout clip-benchmark publishes, and
while they train.

A set is a folder: ``classnames.txt``, ``test/nshards.txt``, ``test/0.tar`` ... with a picture and ``cls``
(or, for retrieval, ``txt`` with one caption a line). A missing shard count, a missing shard or another number
of documents than the published one is an error.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import fsspec
import torch
from torch import Tensor

from mmkit.config import ConfigError, DataConfig, SourceConfig, nearest
from mmkit.data.images import open_image
from mmkit.data.shards import ShardSource, open_shards
from mmkit.errors import InputError
from mmkit.evaluation import collections, retrieval, zero_shot
from mmkit.evaluation.documents import THREADS, listed, picture_fault, picture_faults
from mmkit.evaluation.metrics import wilson
from mmkit.evaluation.zero_shot import Share
from mmkit.storage import Store

if TYPE_CHECKING:
    from mmkit.evaluation.runner import Result
    from mmkit.evaluation.tasks.clip_demo import Towers

log = logging.getLogger(__name__)
RECALLS = (1, 5, 10)
MAIN = ("acc1", "mean_average_precision", "image_retrieval_recall@5")  # the first of them that a set has


class TarSet(Sequence):
    """(key, image (3, h, w), target) of one set, opened picture by picture; target is a class number, a list
    of them, or captions.
    """

    def __init__(self, source: ShardSource, transform: Callable, target: Callable[[str], Any]):
        self.source, self.transform, self.target = source, transform, target

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> tuple[str, Tensor, Any]:
        example = self.source[i]
        return example.key, self.transform(open_image(example.images[0])), self.target(example.caption)


def folder_of(name: str, root: str) -> str:
    """Where a task's set lies: ``root`` with ``{dataset}`` filled in, or ``root/wds_NAME`` as clip-benchmark
    names its sets.
    """
    slug, root = name.replace("/", "-"), Store(root).path()
    return root.format(dataset=slug) if "{dataset}" in root else f"{root.rstrip('/')}/wds_{slug}"


def open_set(name: str, root: str, transform: Callable) -> tuple[TarSet, tuple[str, ...]]:
    """The test documents of a task and its class names (none for retrieval). ValueError where the set is not
    complete.
    """
    task = collections.tasks()[collections.members(name)[0]]
    folder, classify = folder_of(name, root), task.kind == "zeroshot_classification"
    n_shards = int(_text(f"{folder}/test/nshards.txt", f"{name}: the number of shards is not known, so completeness cannot be checked"))
    path = f"{folder}/test/{{0..{n_shards - 1}}}.tar"
    kind = "cls" if classify else "txt"
    source = open_shards(SourceConfig(name=name, format="webdataset", path=path), DataConfig(caption_key=kind, max_bad_share=0.0))
    if len(source) != task.n:
        raise InputError(f"{name}: {len(source)} documents in {folder}, a complete set has {task.n}")
    if not classify:
        return TarSet(source, transform, lambda text: [line.strip() for line in text.splitlines() if line.strip()]), ()
    names = class_names(name, root)
    return TarSet(source, transform, _classes if name == collections.MULTI_LABEL else int), names


def class_names(name: str, root: str) -> tuple[str, ...]:
    """The class names of a set, a line each; InputError where one is empty or comes twice."""
    path = f"{folder_of(name, root)}/classnames.txt"
    names = tuple(line.strip() for line in _text(path, f"{name}: the class names are missing").splitlines())
    if empty := [number for number, one in enumerate(names, start=1) if not one]:
        what = "each line is the name of a class, the first of class 0"
        raise InputError(f"{name}: line {empty[0]} of {path} is empty; {what}")
    # ImageNet's own list has two names twice, and its variants take theirs from it
    of_imagenet = name in (*collections.IMAGENET_NAMES, *collections.ROBUSTNESS)
    known = collections.repeated_imagenet_names() if of_imagenet else set()
    for number, one in enumerate(names):
        if one in names[:number] and one not in known:
            raise InputError(
                f"{name}: lines {names.index(one) + 1} and {number + 1} of {path} are both {one!r}; two "
                f"classes of one name cannot be told apart"
            )
    return names


def _classes(text: str) -> list[int]:
    return [int(number) for number in text.replace(",", " ").split()]


def look(names: Iterable[str], limit: int | None = None) -> dict[str, Callable[[], dict[str, Any]]]:
    """What looks at the documents of each demo task and each set of ``names``, before a model is there
    (`check_set`)."""
    from mmkit.evaluation.tasks import pack_documents
    from mmkit.evaluation.tasks.clip_demo import CLIP_TASKS, PACK

    def demo() -> dict[str, Any]:
        if not pack_documents.is_made(PACK):
            return pack_documents.not_made(PACK)
        everything = pack_documents.everything(PACK)
        asked = everything[:limit]
        if wrong := picture_faults(example.images[0] for example in asked):
            raise InputError(f"pack {PACK}: {listed(wrong, len(asked), 'pictures')}")
        return {"documents": len(everything), "asked": len(asked), "pictures": len(asked)}

    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in names:
        if name in CLIP_TASKS:
            found[name] = demo
        elif limit is not None:
            why = f"set {name!r} is scored whole or not at all; remove the limit"
            raise ConfigError(f"evaluation.limit = {limit}: {why}")
        else:
            members = collections.members(name)
            found |= {member: functools.partial(check_set, member, data_root()) for member in members}
    return found


def check_set(name: str, root: str) -> dict[str, int]:
    """Looks at every sample of a set: its class is one of the names, or it has captions, and its picture
    decodes. InputError otherwise; a warning where classes have no sample. Of a set in a bucket the names
    alone are looked at: it would be fetched twice."""
    folder = folder_of(name, root)
    if Store(folder).size("test/nshards.txt") is None:
        raise absent(name, folder)
    documents, names = open_set(name, root, lambda image: image)
    n = len(documents)
    if Store(folder).remote:
        return {"documents": n, "asked": n, "pictures": 0}

    def sample(i: int) -> tuple[list[int], str]:
        example, place = documents.source[i], documents.source.group(i)
        try:
            target = documents.target(example.caption)
        except ValueError:
            return [], f"{place}: cls is {example.caption[:60]!r}, no class number"
        if not names:  # captions, of which the index has left out the empty ones
            return [], picture_fault(example.images[0])
        found = target if isinstance(target, list) else [target]
        if wrong := [number for number in found if not 0 <= number < len(names)]:
            return found, f"{place}: cls is {wrong[0]}"
        return found, picture_fault(example.images[0])

    with ThreadPoolExecutor(THREADS) as pool:
        samples = list(pool.map(sample, range(n)))
    seen = {number for found, _ in samples for number in found}
    faults = [fault for _, fault in samples if fault]
    if outside := sorted(number for number in seen if not 0 <= number < len(names)):
        shifted = min(seen) == 1 and outside == [len(names)]
        from_one = "; the classes seem to be counted from 1" if shifted else ""
        raise InputError(
            f"{name}: {listed(faults, n, 'samples')}. {folder}/classnames.txt has {len(names)} names, of the "
            f"classes 0 to {len(names) - 1}, and "
            f"cls goes from {min(seen)} to {max(seen)}{from_one}"
        )
    if faults:
        raise InputError(f"{name}: {listed(faults, n, 'samples')}")
    if names and (unused := [one for number, one in enumerate(names) if number not in seen]):
        log.warning(
            "%s: %d of the %d classes of %s/classnames.txt have no sample (%s); names that belong to no "
            "class lower the score",
            name, len(unused), len(names), folder, ", ".join(unused[:5]),
        )  # fmt: skip
    return {"documents": n, "asked": n, "pictures": n}


def _text(path: str, problem: str) -> str:
    try:
        with fsspec.open(path, "r", encoding="utf8") as file:
            return file.read().rstrip()  # not its beginning: an empty first line is a class without a name
    except FileNotFoundError:
        raise InputError(f"{problem}; {path} does not exist") from None


def score(name: str, root: str, towers: Towers, *, batch: int = 64, share: Share = Share()) -> dict[str, float]:
    """One task's metrics under clip-benchmark's names. All processes call this; each gets all of them."""
    documents, names = open_set(name, root, towers.transform)
    if not names:
        return retrieval_scores(documents, towers, batch, share)
    task = collections.zero_shot_task(name, names)
    task = zero_shot.ZeroShotTask(name, names, task.templates, len(documents), task.multi_label)
    metrics, _ = zero_shot.evaluate(towers.encode, towers.tokenize, task, documents, batch=batch, share=share)
    return metrics


def retrieval_scores(documents: TarSet, towers: Towers, batch: int = 64, share: Share = Share()) -> dict[str, float]:
    """Benchmark recalls (see `retrieval.benchmark_recall`) of a set with several captions a picture."""
    captions = [documents.target(documents.source[i].caption) for i in range(len(documents))]
    owner = torch.tensor([i for i, found in enumerate(captions) for _ in found])
    tokens = towers.tokenize([caption for found in captions for caption in found])
    image = zero_shot.features_of(towers.encode, "image", lambda i: documents[i][1], len(documents), batch=batch, share=share)
    text = zero_shot.features_of(towers.encode, "text", lambda i: tokens[i], len(tokens), batch=batch, share=share)
    return retrieval.benchmark_recall(image, text, owner, ks=RECALLS)


def check_names(names: Iterable[str], present: bool = True) -> None:
    """ConfigError for a name that is neither a demo task nor a set or collection, or (``present``) a set that
    is not on the disk.
    """
    from mmkit.evaluation.tasks.clip_demo import CLIP_TASKS

    for name in names:
        known = (*CLIP_TASKS, *collections.COLLECTIONS, *collections.tasks())
        if name not in known:
            groups = ", ".join((*CLIP_TASKS, *collections.COLLECTIONS))
            raise ConfigError(f"no task {name!r}{nearest(name, known)}; tasks are {groups} and the sets of these collections")
    for name, folder in absent_sets(names).items() if present else ():
        raise absent(name, folder)


def absent(name: str, folder: str) -> ConfigError:
    """What is said of a set that is not on the disk."""
    what_to_do = "put clip-benchmark's tar set there, or set MMKIT_EVAL_DATA to where it is"
    return ConfigError(f"task {name!r}: no set at {folder}; {what_to_do}")


def absent_sets(names: Iterable[str]) -> dict[str, str]:
    """Task or collection of ``names`` -> the folder of its first set that is not on the disk."""
    from mmkit.evaluation.tasks.clip_demo import CLIP_TASKS

    found: dict[str, str] = {}
    for name in (name for name in names if name not in CLIP_TASKS):
        for folder in (folder_of(member, data_root()) for member in collections.members(name)):
            if Store(folder).size("test/nshards.txt") is None:
                found.setdefault(name, folder)
    return found


def check_metric(metric: str | None, names: Sequence[str]) -> None:
    """ConfigError where ``metric``, a value to be watched in training, is of none of the tasks scored there
    (the demo's without names).
    """
    from mmkit.evaluation.tasks.clip_demo import CLIP_TASKS

    if metric is None or not metric.startswith("eval_") or metric == "eval_loss":
        return
    scored = list(names or CLIP_TASKS)
    scored += [member for name in names if name not in CLIP_TASKS for member in collections.members(name)]
    if not any(metric.startswith(f"eval_{task}_") for task in scored):
        near = nearest(metric, [f"eval_{task}" for task in scored])
        raise ConfigError(
            f"train.checkpoint.best_metric {metric!r} is of no task of evaluation.tasks{near}; "
            f"they give eval_TASK_METRIC, for {', '.join(scored[:8])}{' ...' if len(scored) > 8 else ''}"
        )


def data_root() -> str:
    """The folder or URL that holds ``wds_NAME`` folders."""
    return os.environ.get("MMKIT_EVAL_DATA", "data/eval")


def results_of(
    names: Iterable[str], towers: Towers, *, batch: int = 64, share: Share = Share(), limit: int | None = None
) -> Iterator[Result]:
    """Demo tasks (``limit`` documents of each), and sets or collections under `data_root` beside the two
    public ViT-L/14; each result when its task ends. All processes call this.

    A collection whose average is published (VTAB, VTAB+, ImageNet robustness) has it as a result of its own
    behind its sets.
    """
    from mmkit.evaluation.tasks.clip_demo import CLIP_TASKS

    for name in names:
        if name in CLIP_TASKS:
            yield CLIP_TASKS[name](towers, batch=batch, share=share, limit=limit)
            continue
        sets = []
        for member in collections.members(name):
            sets.append(_result(member, towers, batch, share))
            yield sets[-1]
        if name in collections.COLLECTIONS and name != "retrieval":
            yield _average(name, sets)


def _result(name: str, towers: Towers, batch: int, share: Share) -> Result:
    from mmkit.evaluation.runner import Result, versions
    from mmkit.evaluation.task import hash_of

    begun, task = time.perf_counter(), collections.tasks()[name]
    metrics = score(name, data_root(), towers, batch=batch, share=share)
    metrics = {key: value for key, value in metrics.items() if value is not None}
    main = next(key for key in MAIN if key in metrics)
    # of retrieval the captions are counted, several a picture and found or missed together: the pictures are
    # the independent ones; an average precision is no fraction of documents
    bounds = None if main == "mean_average_precision" else wilson(metrics[main], task.n)
    public = {"laion2b_l14": task.laion2b, "openai_l14": task.openai}
    spec = {"name": name, "version": 1, "source": "clip-benchmark's tar sets", "split": "test"}
    if task.kind == "zeroshot_classification":
        names, templates = class_names(name, data_root()), collections.templates(name)
        written = [template if isinstance(template, str) else template("{c}") for template in templates]
        spec |= {"classes": len(names), "names": hash_of(list(names)), "templates": hash_of(written)}
    return Result(
        name, spec, hash_of(spec), task.n, main, metrics, interval=bounds, n_total=task.n,
        controls={key: {"metrics": dict(values), "groups": {}} for key, values in public.items()},
        seconds=time.perf_counter() - begun, versions=versions(),
    )  # fmt: skip


def _average(name: str, sets: Sequence[Result]) -> Result:
    """The published average of a collection: top-1 over its sets, each counting once; ``n`` is the number of
    sets.
    """
    from mmkit.evaluation.runner import Result, versions
    from mmkit.evaluation.task import hash_of

    rule = "mean of acc1, multi-label sets left out"
    members = {result.task: result.spec_hash for result in sets}
    spec = {"name": name, "version": 1, "sets": members, "rule": rule}
    controls = {}
    for key in ("laion2b_l14", "openai_l14"):
        public = {result.task: result.controls[key]["metrics"] for result in sets}
        controls[key] = {"metrics": {"acc1": collections.average(public, name)}, "groups": {}}
    ours = {"acc1": collections.average({result.task: result.metrics for result in sets}, name)}
    n = len(sets)
    return Result(
        name, spec, hash_of(spec), n, "acc1", ours, controls=controls, n_total=n, versions=versions()
    )


def during_training(tokenizer: Callable, transforms: Sequence[Callable], names: Sequence[str] = (), batch: int = 64) -> Callable:
    """An ``on_eval`` of `training.loop.train` that scores tasks (the demo's without ``names``, else as
    `results_of`) every ``train.eval_every`` steps or epochs, shared over processes.

    It calls the wrapped objective, so sharded weights are whole where they are used.
    """
    from mmkit.evaluation.tasks.clip_demo import CLIP_TASKS, Towers

    def scores(state: Any) -> dict[str, float]:
        backend = state.backend

        def encode(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return state.objective(backend.shard(tensors), mode="encode")

        towers = Towers(encode, tokenizer, transforms[0])
        share = Share(backend.rank, backend.world, backend.all_objects)
        rows = -(-batch // backend.devices) * backend.devices
        results = results_of(names or CLIP_TASKS, towers, batch=rows, share=share)
        return {f"{result.task}_{metric}": value for result in results for metric, value in result.metrics.items()}

    return scores
