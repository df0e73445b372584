"""Batches of prompts for generation, made by the same code as training batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmkit.config import VlmConfig
from mmkit.data.batches import Batch, Shape
from mmkit.data.building import Pictures, Task, VlmBuilder
from mmkit.data.conversation import Formatter
from mmkit.data.example import BadRecord, Example
from mmkit.data.images import image_size
from mmkit.data.mixture import mixture_of
from mmkit.data.packing import Item, Member, power_of_two, row_length


def prompt_batch(
    examples: Sequence[Example],
    formatter: Formatter,
    model: VlmConfig,
    transforms: Sequence[Callable],
    *,
    seed: int = 0,
    buckets: Sequence[int] = (),
    features=None,
    pad: str = "right",
) -> Batch:
    """One prompt a row, up to where the next answer begins; no targets.

    Rows are as long as the smallest of ``buckets`` that holds the longest, else as the longest. Region points are always the same
    for one ``seed``. A picture that does not decode is a BadRecord: an evaluation may not lose documents.
    """
    builder = VlmBuilder(mixture_of(examples), model, Pictures(transforms, features), seed=seed, train=False, pad=pad)
    rows = []
    for index, example in enumerate(examples):
        crops = builder.slots.crops
        slots = tuple(builder.slots.count(image_size(ref)) if crops else builder.slots.full for ref in example.images)
        rows.append((Item((Member(index, formatter.prompt(example), (), slots),)),))
    longest = max(map(row_length, rows))
    n_images = max(item.n_images for (item,) in rows)
    n_regions = max(item.n_regions for (item,) in rows)
    shape = Shape(
        rows=len(rows),
        tokens=min((bucket for bucket in buckets if bucket >= longest), default=longest),
        images=power_of_two(n_images, 1, 2**30),
        regions=power_of_two(n_regions, 1, 2**30) if model.regions else 0,
    )
    batch = builder[Task(tuple(rows), shape, (0,) * len(rows))]
    if batch.problems:
        first = batch.problems[0]
        raise BadRecord(first.message, key=first.key, source=examples[0].source, reason=first.reason)
    return batch
