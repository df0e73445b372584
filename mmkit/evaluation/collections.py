"""The collections CLIP models are compared on: VTAB (19), VTAB+ (36), ImageNet robustness (5), retrieval (3).

Which tasks belong together, how many documents a complete one has, its prompts, and what ViT-L/14 reached on it
(``clip_tasks.json`` beside this file, with sources). Metrics have clip-benchmark's names.
Not here: the datasets themselves; their class names come with them.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Literal

from mmkit.config import nearest
from mmkit.errors import InputError
from mmkit.evaluation.zero_shot import ZeroShotTask, imagenet

MULTI_LABEL = "voc2007_multilabel"
ROBUSTNESS = ("imagenetv2", "imagenet-r", "imagenet_sketch", "objectnet", "imagenet-a")
RETRIEVAL = ("flickr30k", "flickr8k", "mscoco_captions")
VTAB = (
    "vtab/caltech101", "vtab/cifar100", "vtab/clevr_count_all", "vtab/clevr_closest_object_distance", "vtab/diabetic_retinopathy",
    "vtab/dmlab", "vtab/dsprites_label_orientation", "vtab/dsprites_label_x_position", "vtab/dtd", "vtab/eurosat",
    "vtab/kitti_closest_vehicle_distance", "vtab/flowers", "vtab/pets", "vtab/pcam", "vtab/resisc45", "vtab/smallnorb_label_azimuth",
    "vtab/smallnorb_label_elevation", "sun397", "vtab/svhn",
)  # fmt: skip
VTAB_PLUS = VTAB + ("imagenet1k", *ROBUSTNESS) + (
    "fer2013", "voc2007", MULTI_LABEL, "cars", "vtab/cifar10", "fgvc_aircraft", "mnist", "stl10", "gtsrb", "country211", "renderedsst2",
)  # fmt: skip
COLLECTIONS = MappingProxyType({"vtab": VTAB, "vtab+": VTAB_PLUS, "imagenet_robustness": ROBUSTNESS, "retrieval": RETRIEVAL})
IMAGENET_NAMES = ("imagenet1k", "imagenetv2", "imagenet_sketch")  # all 1000 classes; the others have a subset of them


@dataclass(frozen=True)
class CollectionTask:
    """One dataset: documents of a complete test split, and what the two public ViT-L/14 reached (metric -> value)."""

    name: str
    kind: Literal["zeroshot_classification", "zeroshot_retrieval"]
    n: int
    laion2b: MappingProxyType
    openai: MappingProxyType


@functools.cache
def tasks() -> MappingProxyType:
    """Every task by name; nothing in it can be changed."""
    rows = _facts()["tasks"]
    made = {}
    for name, row in rows.items():
        kind = "zeroshot_retrieval" if name in RETRIEVAL else "zeroshot_classification"
        made[name] = CollectionTask(name, kind, row["n"], MappingProxyType(row["laion2b_s32b_b82k"]), MappingProxyType(row["openai"]))
    return MappingProxyType(made)


def members(names: str | Iterable[str]) -> tuple[str, ...]:
    """Task names of collections and tasks given by name, each once. ValueError for an unknown one."""
    out: dict[str, None] = {}
    for name in [names] if isinstance(names, str) else names:
        if name not in COLLECTIONS and name not in tasks():
            raise InputError(f"no task or collection {name!r}{nearest(name, (*COLLECTIONS, *tasks()))}")
        out |= dict.fromkeys(COLLECTIONS.get(name, (name,)))
    return tuple(out)


def templates(name: str) -> tuple:
    """A task's prompts: ImageNet's 80 for ImageNet and its variants, else the dataset's own."""
    short = name.removeprefix("vtab/")
    if short in (*IMAGENET_NAMES, *ROBUSTNESS):
        return imagenet().templates
    return tuple(_facts()["templates"][short])


def repeated_imagenet_names() -> set[str]:
    """Names that ImageNet's own list has for two classes each ("missile", "sunglasses")."""
    return {name for name, n in Counter(imagenet().names).items() if n > 1}


def zero_shot_task(name: str, class_names: Sequence[str] = ()) -> ZeroShotTask:
    """The task of a collection, with the class names its dataset ships; the full ImageNet sets know theirs."""
    task = tasks()[members(name)[0]]
    if task.kind != "zeroshot_classification":
        raise InputError(f"{name} is a retrieval task; score it with benchmark_recall")
    names = tuple(class_names) or (imagenet().names if name in IMAGENET_NAMES else ())
    return ZeroShotTask(name, names, templates(name), task.n, multi_label=name == MULTI_LABEL)


def average(metrics_of: Mapping[str, Mapping[str, float]], collection: str, metric: str = "acc1") -> float:
    """The collection's published average: the mean of ``metric`` over its tasks but the multi-label one, each counting once.

    ValueError naming the missing tasks: a mean over fewer is not comparable.
    """
    wanted = [name for name in members(collection) if name != MULTI_LABEL]
    if missing := [name for name in wanted if metrics_of.get(name, {}).get(metric) is None]:
        raise InputError(f"{collection}: {metric} of {len(missing)} of {len(wanted)} tasks is missing: {', '.join(missing)}")
    return sum(metrics_of[name][metric] for name in wanted) / len(wanted)


@functools.cache
def _facts() -> dict:
    return json.loads(resources.files("mmkit.evaluation").joinpath("clip_tasks.json").read_text(encoding="utf8"))
