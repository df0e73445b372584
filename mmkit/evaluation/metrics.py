"""Scores of one generated answer, and of many: exact match, boxes, fractions and their uncertainty.

Reading rules of published benchmarks are in `answers`; here is what the demo's own tasks and the controls
need.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from mmkit.data.boxes import Box, boxes_in, grid

DRAWS = 2000  # of a bootstrap


def exact_match(answer: str, target: str) -> float:
    """1 where the generated string is the target, apart from case and surrounding space; no part of it
    counts.
    """
    return float(answer.strip().lower() == target.strip().lower())


def contains_word(answer: str, word: str) -> float:
    """1 where ``word`` is one of the answer's words."""
    return float(word.lower() in answer.lower().replace(",", " ").replace(".", " ").split())


def box_overlap(answer: str, target: Box, steps: int = 1000) -> float | None:
    """Intersection over union of the first box in ``answer`` and ``target``; None where the answer holds no
    box.
    """
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


def wilson(fraction: float, n: int) -> tuple[float, float]:
    """95% interval (low, high) of a fraction over ``n`` independent documents (Wilson 1927): never of width
    0, never outside 0 to 1.
    """
    z = 1.959964
    centre = (fraction + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(max(fraction * (1 - fraction), 0.0) / n + z * z / (4 * n * n))
    return (0.0 if fraction == 0 else max(centre - half, 0.0)), (
        1.0 if fraction == 1 else min(centre + half, 1.0)
    )


def interval(values: Sequence[float], pictures: Sequence[str], seed: int = 0) -> tuple[float, float]:
    """95% interval (low, high) of the mean of ``values``, each between 0 and 1; ``pictures`` names the
    picture of each.

    Questions about one picture are right or wrong together, so pictures are what is drawn anew: a bootstrap
    of whole pictures with a fixed seed (percentiles of 2,000 draws). Where every picture has one question and
    every value is 0 or 1 Wilson's formula says the same without draws. It also serves where all values are
    equal, or there is one picture: a bootstrap would claim a width of 0, so the pictures count as the
    documents.
    """
    values, (_, picture) = (
        np.asarray(values, dtype=float),
        np.unique(np.asarray(pictures, dtype=str), return_inverse=True),
    )
    counts, sums = np.bincount(picture), np.bincount(picture, values)
    n = len(counts)
    if n == 1 or (values == values[0]).all() or (n == len(values) and np.isin(values, (0, 1)).all()):
        return wilson(float(values.mean()), n)
    generator, means = np.random.default_rng(seed), []
    for _ in range(20):  # in parts: 100 draws of some 10,000 pictures are 8 MB
        drawn = generator.multinomial(n, np.full(n, 1 / n), size=DRAWS // 20)
        means.append(drawn @ sums / (drawn @ counts))
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)
