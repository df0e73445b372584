"""Documents of the demo tasks: a fixed, seeded choice out of an offline pack's test split."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from typing import Any

from mmkit.data import demo
from mmkit.data.example import Example


@functools.lru_cache(maxsize=16)
def by_picture(pack: str, n: int, kind: str = "", seed: int = 0) -> tuple[Example, ...]:
    """``n`` test questions: pictures in a seeded order, all questions of a picture together; ``kind`` keeps one question type."""
    source = demo.open_pack(pack, "test")
    pictures = defaultdict(list)
    for place, line in enumerate(source.rows):
        if not kind or line["meta"].get("type") == kind:
            pictures[line["images"][0]].append(place)
    order = sorted(pictures)
    random.Random(f"documents {pack} {seed}").shuffle(order)
    places = [place for picture in order for place in pictures[picture]]
    return tuple(source[place] for place in places[:n])


@functools.lru_cache(maxsize=16)
def everything(pack: str) -> tuple[Example, ...]:
    """All test questions."""
    source = demo.open_pack(pack, "test")
    return tuple(source[place] for place in range(len(source)))


def is_made(pack: str) -> bool:
    """Whether a pack is in the cache already; else opening it makes it, which takes minutes."""
    return (demo.pack_folder(pack) / "record.json").is_file()


def not_made(pack: str) -> dict[str, Any]:
    """What is said of the documents of a pack that is not in the cache."""
    state = f"made when they are first asked, or by `mmkit data demo {pack}`"
    return {"documents": 0, "asked": 0, "pictures": 0, "state": state}


def training(pack: str, split: str = "train") -> list[tuple[str, str]]:
    """(question, answer) of every training question, for the question-only prior."""
    return [(line["meta"]["question"], line["meta"]["answer"]) for line in demo.open_pack(pack, split).rows if "answer" in line["meta"]]
