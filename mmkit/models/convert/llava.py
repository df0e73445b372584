"""LoRA folders of LLaVA, Ferret and Cambrian: an adapter by peft plus ``non_lora_trainables.bin`` (connector and the like).

Adapters are merged in fp32: W + scale * B A.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mmkit.models.convert import files

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
OTHERS = "non_lora_trainables.bin"
_LORA = re.compile(r"^(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<half>A|B)(?:\.default)?\.weight$")


def adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a peft folder; ValueError for kinds whose merge is not a plain product."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf8"))
    if config.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"{folder}: adapter of type {config['peft_type']!r}; only LORA is read")
    for name in ("use_dora", "alpha_pattern", "modules_to_save"):
        if config.get(name):
            raise ValueError(
                f"{folder}: adapter_config.json has {name} = {config[name]!r}, which cannot be merged here; "
                "merge it with peft first"
            )
    return config


def adapter_halves(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Layer name -> {"A": (r, in), "B": (out, r)} of a peft folder; ValueError for tensors of another kind or a half alone."""
    file = next((folder / name for name in ADAPTER_FILES if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(f"{folder} has none of {', '.join(ADAPTER_FILES)}")
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in files.tensors(file):
        match = _LORA.match(name)
        if not match:
            raise ValueError(f"{file}: {name} is no LoRA weight")
        halves.setdefault(match["layer"], {})[match["half"]] = tensor
    whole = {layer for layer, pair in halves.items() if set(pair) == {"A", "B"} and all(half.numel() for half in pair.values())}
    if broken := sorted(set(halves) - whole):
        raise ValueError(
            f"{file}: {len(broken)} layers lack a half or have an empty one (a ZeRO-3 save without gathering?): "
            f"{', '.join(broken)}"
        )
    return halves


def merge(weights: Iterator[tuple[str, Tensor]], halves: Mapping[str, Mapping[str, Tensor]], config: Mapping[str, Any], source: str):
    """``weights`` with the adapter folded in, in fp32 and back to each weight's own type; ValueError for layers without a weight."""
    left = set(halves)
    for name, tensor in weights:
        layer = name.removesuffix(".weight")
        if layer in left:
            left.discard(layer)
            pair = halves[layer]
            rank = pair["A"].shape[0]
            scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
            change = scale * (pair["B"].float() @ pair["A"].float())
            tensor = (tensor.float() + (change.T if config.get("fan_in_fan_out") else change)).to(tensor.dtype)
        yield name, tensor
    if left:
        raise ValueError(f"{source}: {len(left)} adapted layers have no weight in the base: {', '.join(sorted(left))}")


def merged(folder: Path, base: Path) -> Iterator[tuple[str, Tensor]]:
    """(original name, tensor) of base + adapter, then the trainables that are no adapter; those replace base tensors of their name."""
    others = dict(files.tensors(folder / OTHERS)) if (folder / OTHERS).is_file() else {}
    others = {name.removeprefix("base_model.model."): tensor for name, tensor in others.items()}
    weights = ((name, tensor) for name, tensor in files.tensors(base) if name not in others)
    yield from merge(weights, adapter_halves(folder), adapter_config(folder), str(folder))
    yield from others.items()
