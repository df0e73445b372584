"""What planning asks of every record before an epoch: which picture it is about, and how long it is.

Reading all records for it costs minutes where there are millions, so for JSONL files the answers are kept beside the index of lines,
16 bytes a record, memory-mapped and shared by all processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mmkit.data.jsonl_index import HEADER, JsonLines, kept_beside

SUFFIX = ".mmkit-facts"
_VERSION = 2  # of what the numbers mean; another one builds them anew
_BAR = 100_000  # records from here on show a progress bar
Describe = Callable[[int], tuple[Any, int]]  # number of a record -> identity of its pictures (empty: none), length


def facts(records, describe: Describe, depends: str) -> dict[str, np.ndarray]:
    """``groups`` and ``lengths``, (n,) int64 each: the number of every record's picture by first appearance (records without one are
    alone), and its length, as ``describe`` tells. ``depends`` names what else than the file they follow from."""
    if not isinstance(records, JsonLines):
        return dict(zip(("groups", "lengths"), _described(len(records), describe, ""), strict=True))

    def build(path: Path, work: Path, stamp: np.ndarray) -> None:
        n = len(records)
        with work.open("wb") as out:
            for part in (np.array([*stamp, n], np.int64), *_described(n, describe, f"lengths of {path.name}")):
                part.tofile(out)

    magic = int.from_bytes(hashlib.sha256(f"{_VERSION} {depends}".encode()).digest()[:7], "big")
    place = kept_beside(records.path, SUFFIX, magic, lambda n: 2 * n, build)
    words = np.memmap(place, dtype=np.int64, mode="r")[HEADER:]
    return {"groups": words[: len(words) // 2], "lengths": words[len(words) // 2 :]}


def numbered(digests: np.ndarray) -> np.ndarray:
    """(n,) any -> (n,) int64: equal values get one number, counted by first appearance."""
    _, first, group = np.unique(digests, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[group]


def _described(n: int, describe: Describe, title: str) -> tuple[np.ndarray, np.ndarray]:
    """(groups, lengths). Identities are compared by 64 bits: of 7 million pictures two fall together in one of 700,000 files."""
    from tqdm import tqdm

    digests, lengths = np.empty(n, np.uint64), np.empty(n, np.int64)
    for number in tqdm(range(n), desc=title, disable=not title or n < _BAR, mininterval=0.5):
        identity, lengths[number] = describe(number)
        text = repr(identity if identity else ("alone", number)).encode("utf8", "surrogatepass")
        digests[number] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return numbered(digests), lengths
