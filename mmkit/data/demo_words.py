"""Words of captions: the concept a caption is about, and the split by concept that all packs share.

The concept is the head noun of the caption in the singular ("A big eared rabbit." -> rabbit). Held-out concepts are drawn once
from the concepts of the stamps; an example of any training split whose words name a held-out concept is left out, so that no
test object was seen under another picture or style.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

HELD_OUT = 0.28  # share of concepts kept for test
_STOP = {"with", "in", "on", "at", "for", "from", "and", "that", "to", "by", "is", "are", "it", "as", "or", "used", "being", "s"}
_MEASURES = {"bunch", "pair", "slice", "piece", "group", "pile", "bowl", "cup", "set", "stack", "bag", "half", "part", "kind", "type",
             "picture", "photo", "view", "box", "basket", "plate", "bouquet", "head", "stalk", "cluster"}  # fmt: skip
_SAME = {"glasses", "scissors", "pants", "shorts", "bus", "cactus", "octopus", "hibiscus", "walrus", "asparagus", "crocus", "lens",
         "citrus", "platypus", "dress", "grass", "glass", "cross", "compass", "swiss"}  # fmt: skip


def words(text: str) -> list[str]:
    """Lower-case words of a text in the singular."""
    return [singular(word) for word in re.findall(r"[a-zà-öø-ÿ]+", text.lower())]


def singular(word: str) -> str:
    """A plain English singular: cherries -> cherry, boxes -> box, cats -> cat."""
    if word in _SAME or len(word) < 4 or not word.endswith("s") or word.endswith(("ss", "us", "is")):
        return word
    if word.endswith("ies") and len(word) > 5:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "toes", "goes")):
        return word[:-2]
    return word[:-3] + "f" if word in ("leaves", "wolves", "halves") else word[:-1]


def concept(caption: str) -> str:
    """The head noun of a caption; an empty text where there is none."""
    phrase = re.split(r"[.,;:!?()\u2013\u2014]|['\u2019]s\b", caption.strip())[0]
    tokens = [word for word in words(phrase) if word not in ("a", "an", "the", "some", "this", "these", "its")]
    for place, token in enumerate(tokens):
        if token == "of":
            if place and tokens[place - 1] in _MEASURES and tokens[place + 1 :]:
                return concept(" ".join(tokens[place + 1 :]))
            tokens = tokens[:place]
            break
        if token in _STOP and place:
            tokens = tokens[:place]
            break
    return tokens[-1] if tokens else ""


def held_out(concepts: Iterable[str], seed: int, kept: Iterable[str] = (), share: float = HELD_OUT) -> frozenset[str]:
    """The test concepts: the same set for the same concepts and seed, in whatever order they come; never one of ``kept``."""
    ordered = sorted(set(concepts) - set(kept) - {""})
    random.Random(f"held-out {seed}").shuffle(ordered)
    return frozenset(ordered[: round(len(ordered) * share)])


def names_held_out(text: str, test: frozenset[str]) -> bool:
    """Whether any word of ``text`` is a held-out concept."""
    return not test.isdisjoint(words(text))


def with_article(name: str) -> str:
    """``name`` with a or an, unless it is a plural or carries one."""
    first = name.split()[0].lower() if name.split() else ""
    if first in ("a", "an", "the", "some"):
        return name
    return f"{'an' if first[:1] in 'aeiou' else 'a'} {name}"
