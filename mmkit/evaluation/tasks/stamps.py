"""Regions of composites: name what is in a region, and say where a named object is. Test objects are in no training picture.

``refer``: exact match of the name, and whether the head noun is in the answer; ``ground``: the first box of the answer against
the exact one, right above half overlap. An answer without a box counts as overlap 0 and is counted (``no_box``).
"""

from __future__ import annotations

import functools

from mmkit.data.example import Example
from mmkit.evaluation.metrics import box_overlap, contains_word, exact_match
from mmkit.evaluation.runner import target_of
from mmkit.evaluation.task import Decode, Scores, Task
from mmkit.evaluation.tasks import pack_documents

N = 100
FACTS = {"source": "regions pack", "split": "test", "boxes": "[x1, y1, x2, y2] on a 0-999 grid"}


def refer(example: Example, answer: str) -> Scores:
    """Scores of a name."""
    return {"exact_match": exact_match(answer, target_of(example)), "names_concept": contains_word(answer, example.meta["concept"])}


def ground(example: Example, answer: str) -> Scores:
    """Scores of a box."""
    overlap = box_overlap(answer, example.regions[-1].box)
    return {"iou": overlap or 0.0, "iou_above_half": float((overlap or 0.0) > 0.5), "no_box": float(overlap is None)}


REFER = Task(
    name="regions_refer",
    version=1,
    n_expected=N,
    documents=functools.partial(pack_documents.by_picture, "regions", N, "refer"),
    pack="regions",
    process=refer,
    main_metric="exact_match",
    decode=Decode(max_new_tokens=10),
    facts=FACTS,
)
GROUND = Task(
    name="regions_ground",
    version=1,
    n_expected=N,
    documents=functools.partial(pack_documents.by_picture, "regions", N, "ground"),
    pack="regions",
    process=ground,
    main_metric="iou",
    # a box is 20 tokens where digits are tokens of their own; words before it must not cut its bracket off
    decode=Decode(max_new_tokens=48),
    facts=FACTS,
)
