"""Scores of one generated answer, and of many: exact match, boxes, shares and their uncertainty.

Reading rules of published benchmarks are in `answers`; here is what the demo's own tasks and the controls need.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from mmkit.data.boxes import Box, boxes_in, grid


def exact_match(answer: str, target: str) -> float:
    """1 where the generated string is the target, apart from case and surrounding space; no part of it counts."""
    return float(answer.strip().lower() == target.strip().lower())


def contains_word(answer: str, word: str) -> float:
    """1 where ``word`` is one of the answer's words."""
    return float(word.lower() in answer.lower().replace(",", " ").replace(".", " ").split())


def box_overlap(answer: str, target: Box, steps: int = 1000) -> float | None:
    """Intersection over union of the first box in ``answer`` and ``target``; None where the answer holds no box."""
    frame = grid(steps)
    found = [box for box in boxes_in(answer, frame) if not box.is_point]
    return found[0].iou(target.to(frame)) if found else None


def majority(targets: Iterable[str]) -> str:
    """The most frequent target, the first in the alphabet among equals."""
    counts = Counter(targets)
    if not counts:
        raise ValueError("no targets to take a majority of")
    return min(counts, key=lambda target: (-counts[target], target))


def priors(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The most frequent answer to each question text in ``pairs`` of (question, answer)."""
    answers: dict[str, list[str]] = {}
    for question, answer in pairs:
        answers.setdefault(question, []).append(answer)
    return {question: majority(given) for question, given in answers.items()}


def interval(share: float, n: int) -> float:
    """Half width of the 95% interval of a share over ``n`` independent documents (normal approximation)."""
    return 1.96 * math.sqrt(max(share * (1 - share), 0.0) / n) if n else math.nan


def mean(values: Sequence[float]) -> float:
    """The mean; ValueError of an empty list, which would be a score of nothing."""
    if not values:
        raise ValueError("the mean of no scores is asked for")
    return sum(values) / len(values)
