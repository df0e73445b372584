"""easy-VQA: one coloured shape a picture, 13 answers, exact match on the generated string, per question type.

``easy_vqa`` asks 600 of the 9,673 test questions (all questions of some 62 pictures), ``easy_vqa_full`` all. The test pictures
are in no training split. Two thirds are yes/no questions, and their wording alone gives most of those answers away: read the
score only beside its shuffled control.
"""

from __future__ import annotations

import functools

from mmkit.data.example import Example
from mmkit.evaluation.metrics import exact_match
from mmkit.evaluation.runner import target_of
from mmkit.evaluation.task import Decode, Scores, Task
from mmkit.evaluation.tasks import pack_documents

N = 600
N_FULL = 9673
FACTS = {"source": "easy-vqa 1.0", "split": "test", "normaliser": "lower case, outer spaces"}


def process(example: Example, answer: str) -> Scores:
    """Exact match with the one right answer."""
    return {"exact_match": exact_match(answer, target_of(example))}


EASY_VQA = Task(
    name="easy_vqa",
    version=1,
    n_expected=N,
    documents=functools.partial(pack_documents.by_picture, "easy_vqa", N),
    pack="easy_vqa",
    process=process,
    main_metric="exact_match",
    decode=Decode(max_new_tokens=6),
    groups=("type",),
    prior=functools.partial(pack_documents.training, "easy_vqa"),
    facts=FACTS | {"choice": "pictures in seeded order, seed 0"},
)
EASY_VQA_FULL = Task(
    name="easy_vqa_full",
    version=1,
    n_expected=N_FULL,
    documents=functools.partial(pack_documents.everything, "easy_vqa"),
    pack="easy_vqa",
    process=process,
    main_metric="exact_match",
    decode=Decode(max_new_tokens=6),
    groups=("type",),
    prior=functools.partial(pack_documents.training, "easy_vqa"),
    facts=FACTS,
)
