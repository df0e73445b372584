"""Random access to the lines of a JSONL file of any size: an index of line starts, built once beside the file and memory-mapped.

A 7-million-line file has a 56 MB index, of which only touched pages are in memory. The index belongs to one size and time of
modification of its file and is built again when they change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mmkit.cache import alone, atomic_write, cache_root
from mmkit.data.example import BadRecord


SUFFIX = ".mmkit-index"
_MAGIC, HEADER = 0x6D6D6B6974303031, 4  # "mmkit001"; words before the line starts: magic, size, time, number of lines
_BLOCK = 1 << 24  # bytes read at a time
_LARGE = 1 << 28  # files from here on show a progress bar


class JsonLines:
    """Map-style access to the records of a JSONL file; blank lines do not count. Each process opens the file for itself."""

    def __init__(self, path: str | os.PathLike):
        self.path = str(path)
        self.index_path = line_index(path)
        self._file: tuple[int, int] | None = None  # (process, file descriptor)
        self._starts: np.ndarray | None = None

    @property
    def starts(self) -> np.ndarray:
        """(lines + 1,) int64 memory map: where each line starts, then where the last ends."""
        if self._starts is None:
            self._starts = np.memmap(self.index_path, dtype=np.int64, mode="r")[HEADER:]
        return self._starts

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_file": None, "_starts": None}

    def __len__(self) -> int:
        return len(self.starts) - 1

    def line(self, number: int) -> bytes:
        """The bytes of a line."""
        if not 0 <= number < len(self):
            raise IndexError(f"line {number} of {len(self)} in {self.path}")
        if self._file is None or self._file[0] != os.getpid():
            self._file = (os.getpid(), os.open(self.path, os.O_RDONLY))
        start, end = int(self.starts[number]), int(self.starts[number + 1])
        return os.pread(self._file[1], end - start, start)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """The record of a line; BadRecord where it is no JSON object."""
        try:
            record = json.loads(self.line(number))
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"is no JSON ({error})", key=f"record {number + 1}", source=self.path, reason="no JSON") from None
        if not isinstance(record, dict):
            raise BadRecord(f"is a JSON {type(record).__name__}, not an object", key=f"record {number + 1}", source=self.path, reason="no JSON")
        return record


def line_index(path: str | os.PathLike) -> Path:
    """The index file of a JSONL file, built where there is none that fits."""
    return kept_beside(path, SUFFIX, _MAGIC, lambda lines: lines + 1, _build)


def kept_beside(path: str | os.PathLike, suffix: str, magic: int, words: Callable[[int], int], build: Callable) -> Path:
    """A file of int64 derived from ``path``: beside it, or in the cache where that is read-only; built once on a machine.

    It begins with ``magic`` (the kind and what else it depends on), the size and time of ``path`` and the number of its lines, and
    holds ``words(lines)`` more. Where one of these does not fit, ``build(path, work, stamp)`` writes it anew, the first three as given.
    """
    path = Path(path)
    facts = path.stat()
    stamp = np.array([magic, facts.st_size, facts.st_mtime_ns], dtype=np.int64)
    beside = path.with_name(path.name + suffix)
    absolute = str(path.resolve()).strip("/").replace("/", "-")
    hidden = cache_root() / "line-index" / (absolute + suffix)
    for place in (beside, hidden):
        if _fits(place, stamp, words):
            return place
    place = beside if os.access(path.parent, os.W_OK) else hidden
    with alone(place):
        if not _fits(place, stamp, words):  # else another process has built it meanwhile
            with atomic_write(place) as work:
                build(path, work, stamp)
    return place


def _fits(place: Path, stamp: np.ndarray, words: Callable[[int], int]) -> bool:
    if not place.exists() or place.stat().st_size < 8 * HEADER:
        return False
    header = np.fromfile(place, dtype=np.int64, count=HEADER)
    return bool((header[:3] == stamp).all()) and place.stat().st_size == 8 * (HEADER + words(int(header[3])))


def _build(path: Path, work: Path, stamp: np.ndarray) -> None:
    """Writes the index in one pass with constant memory."""
    from tqdm import tqdm

    size, count, start, blank = int(stamp[1]), 0, 0, True
    with (
        path.open("rb") as source,
        work.open("wb") as out,
        tqdm(total=size, unit="B", unit_scale=True, desc=f"index {path.name}", disable=size < _LARGE, mininterval=0.5) as bar,
    ):
        np.array([*stamp, 0], dtype=np.int64).tofile(out)
        offset = 0
        while block := source.read(_BLOCK):
            data = np.frombuffer(block, dtype=np.uint8)
            ends = np.flatnonzero(data == 10)
            content = np.flatnonzero(data > 32)  # where a line is more than blanks
            has = np.searchsorted(content, ends) > np.searchsorted(content, np.concatenate([[0], ends[:-1] + 1]))[: len(ends)]
            if len(ends):
                has[0] |= not blank
                starts = np.concatenate([[start], offset + ends[:-1] + 1])
                count += _append(out, starts[has])
                start, blank = offset + int(ends[-1]) + 1, True
            blank = blank and not (len(content) and content[-1] >= start - offset)
            offset += len(block)
            bar.update(len(block))
        if not blank:
            count += _append(out, np.array([start]))
        _append(out, np.array([size]))
        out.seek(8 * 3)
        np.array([count], dtype=np.int64).tofile(out)


def _append(out, starts: np.ndarray) -> int:
    starts.astype(np.int64).tofile(out)
    return len(starts)
