"""LoRA folders of LLaVA, Ferret and Cambrian: an adapter by peft plus ``non_lora_trainables.bin`` (connector and the like).

The product with the weights is `models.merging`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmkit.errors import InputError
from mmkit.models.convert import files
from mmkit.models.merging import Merging

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
OTHERS = "non_lora_trainables.bin"
_LORA = re.compile(r"^(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<part>A|B|magnitude)(?:_vector)?(?:\.default)?(?:\.weight)?$")


def adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a peft folder; ValueError for kinds whose merge is not that of `models.merging`."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf8"))
    if config.get("peft_type", "LORA") != "LORA":
        raise InputError(f"{folder}: adapter of type {config['peft_type']!r}; only LORA is read")
    for name in ("alpha_pattern", "modules_to_save"):
        if config.get(name):
            raise InputError(
                f"{folder}: adapter_config.json has {name} = {config[name]!r}, which cannot be merged here; "
                "merge it with peft first"
            )
    return config


def adapter_halves(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Layer name -> {"A": (r, in), "B": (out, r)} of a peft folder, with DoRA {"magnitude": (out,)} too; ValueError for tensors of another
    kind or a part alone."""
    file = next((folder / name for name in ADAPTER_FILES if (folder / name).is_file()), None)
    if file is None:
        raise InputError(f"{folder} has none of {', '.join(ADAPTER_FILES)}")
    parts = {"A", "B", "magnitude"} if adapter_config(folder).get("use_dora") else {"A", "B"}
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in files.tensors(file):
        match = _LORA.match(name)
        if not match or match["part"] not in parts:
            raise InputError(f"{file}: {name} is no {'DoRA' if len(parts) > 2 else 'LoRA'} weight")
        halves.setdefault(match["layer"], {})[match["part"]] = tensor
    whole = {layer for layer, found in halves.items() if set(found) == parts and all(part.numel() for part in found.values())}
    if broken := sorted(set(halves) - whole):
        raise InputError(
            f"{file}: {len(broken)} layers lack a half or have an empty one (a ZeRO-3 save without gathering?): "
            f"{', '.join(broken)}"
        )
    return halves


def merged(folder: Path, base: Path, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(original name, tensor) of base + adapter, then the trainables that are no adapter; those replace base tensors of their name.

    Adapted weights come in ``dtype`` (None: their own). ValueError for adapted layers without a weight in the base.
    """
    others = dict(files.tensors(folder / OTHERS)) if (folder / OTHERS).is_file() else {}
    others = {name.removeprefix("base_model.model."): tensor for name, tensor in others.items()}
    halves = adapter_halves(folder)
    merging, left = Merging(halves, adapter_config(folder), str(folder), dtype), set(halves)
    for name, tensor in files.tensors(base):
        if name in others:
            continue
        layer = name.removesuffix(".weight")
        yield name, merging.fold(layer, tensor) if layer in left else tensor
        left.discard(layer)
    if left:
        raise InputError(f"{folder}: {len(left)} adapted layers have no weight in the base: {', '.join(sorted(left))}")
    yield from others.items()
