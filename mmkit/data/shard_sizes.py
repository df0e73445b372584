"""How many samples shards hold, from the small files that writers leave beside them."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec

from mmkit.data.tar_files import expand

log = logging.getLogger(__name__)

CONNECTIONS = 8  # small files read at the same time


def known_sizes(urls: Sequence[str]) -> list[int] | None:
    """Samples of each shard as ``sizes.json`` or img2dataset's ``NAME_stats.json`` say; None where they do not say it of all."""
    folders = _by_folder(urls)
    found = {folder: None if folder.startswith("pipe:") else _sizes(folder, names) for folder, names in folders.items()}
    if None in found.values():
        return None
    places = {folder: iter(sizes) for folder, sizes in found.items()}
    return [next(places[_folder(url)]) for url in urls]


def known_samples(urls: Sequence[str]) -> int | None:
    """Samples of all shards together, which ``__len__`` of a whole folder says too."""
    counts = [None if folder.startswith("pipe:") else _count(folder, names) for folder, names in _by_folder(urls).items()]
    return None if None in counts else sum(counts)


def _folder(url: str) -> str:
    return url.rpartition("/")[0] or "."


def _by_folder(urls: Sequence[str]) -> dict[str, list[str]]:
    folders: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        folders[_folder(url)].append(url.rpartition("/")[2])
    return folders


def _count(folder: str, names: Sequence[str]) -> int | None:
    if listed := _listed(folder, names):
        return sum(listed)
    whole = _number(_json_of(f"{folder}/__len__"), f"{folder}/__len__")
    if whole is not None and len(expand(f"{folder}/")) == len(names):
        return whole
    stats = _stats(folder, names)
    return None if stats is None else sum(stats)


def _sizes(folder: str, names: Sequence[str]) -> list[int] | None:
    return _listed(folder, names) or _stats(folder, names)


def _listed(folder: str, names: Sequence[str]) -> list[int] | None:
    sizes = _json_of(f"{folder}/sizes.json")
    if not isinstance(sizes, dict) or not all(name in sizes for name in names):
        return None
    numbers = [_number(sizes[name], f"{folder}/sizes.json, {name}") for name in names]
    return None if None in numbers else numbers


def _stats(folder: str, names: Sequence[str]) -> list[int] | None:
    if _successes(folder, names[0]) is None:
        return None
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        found = list(pool.map(lambda name: _successes(folder, name), names))
    return None if None in found else found


def _successes(folder: str, name: str) -> int | None:
    path = f"{folder}/{name.removesuffix('.tar')}_stats.json"
    facts = _json_of(path)
    return _number(facts.get("successes"), path) if isinstance(facts, dict) else None


def _number(value: Any, place: str) -> int | None:
    """A number of samples; None, with a warning, for what is none: the shards are then counted themselves."""
    if type(value) is int and value >= 0:
        return value
    if value is not None:
        log.warning("%s says %.40r, which is no number of samples; the shards are counted instead", place, value)
    return None


def _json_of(url: str) -> Any:
    """The content of a small JSON file, None where there is none; with a warning where it cannot be read."""
    try:
        with fsspec.open(url, "rb") as file:
            return json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        log.warning("%s is no JSON (%s); the shards are counted instead", url, error)
        return None
