"""Bar charts of real tables: how many bars, the colour of the tallest and the shortest, which of two is taller. Exact answers.

Test charts come from other tables than the training charts.
"""

from __future__ import annotations

import functools

from mmkit.data.example import Example
from mmkit.evaluation.metrics import exact_match
from mmkit.evaluation.runner import target_of
from mmkit.evaluation.task import Decode, Scores, Task
from mmkit.evaluation.tasks import pack_documents

N = 200


def process(example: Example, answer: str) -> Scores:
    """Exact match with the one right answer."""
    return {"exact_match": exact_match(answer, target_of(example))}


CHARTS = Task(
    name="charts",
    version=1,
    n_expected=N,
    documents=functools.partial(pack_documents.by_picture, "charts", N),
    pack="charts",
    process=process,
    main_metric="exact_match",
    decode=Decode(max_new_tokens=6),
    groups=("type",),
    prior=functools.partial(pack_documents.training, "charts"),
    facts={"source": "vega_datasets 0.9.0", "split": "test"},
)
