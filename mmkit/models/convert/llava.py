"""LoRA folders of LLaVA, Ferret and Cambrian: an adapter by peft plus ``non_lora_trainables.bin`` (connector and the like).

The product with the weights is `models.merging`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmkit.errors import InputError
from mmkit.models.convert import files
from mmkit.models.merging import Merging

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
OTHERS = "non_lora_trainables.bin"
TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"  # of chosen tokens, in peft: their values, not differences
_LORA = re.compile(r"^(?P<layer>.+)\.lora_(?P<part>A|B|magnitude)(?:_vector)?(?:\.default)?(?:\.weight)?$")

# Of peft's LoraConfig (0.21): what the merge reads, and what says nothing about the merged weights.
# Everything else that is set changes what an adapted layer computes (a bias, a product of its own, layers
# used twice), and would be lost without a word.
_MERGED = (
    "lora_alpha", "use_rslora", "use_dora", "fan_in_fan_out", "init_lora_weights", "trainable_token_indices",
    "modules_to_save",
)  # fmt: skip
_NEUTRAL = (
    "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "task_type",
    "inference_mode", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout",
    "ensure_weight_tying", "megatron_config", "megatron_core", "runtime_config", "qalora_group_size",
    "r", "rank_pattern",  # the rank is the tensors' own
    # how the first values were found: init_lora_weights names it
    "loftq_config", "eva_config", "corda_config", "lora_ga_config",
)  # fmt: skip
# first values whose product is zero, or is not taken off the base
_KEEPS_BASE = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
_CONVERTIBLE = ("pissa", "corda", "olora", "lora_ga")  # peft can save these as ordinary adapters


class Adapter(NamedTuple):
    """What a peft folder holds, by the names of the model it belongs to."""

    halves: dict[str, dict[str, Tensor]]  # layer -> A (r, in), B (out, r), with DoRA magnitude (out,)
    whole: dict[str, Tensor]  # tensors that stand in place of the base's: modules_to_save
    rows: dict[str, tuple[list[int], Tensor]]  # table -> token ids, their rows (n, D)


def adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a peft folder; InputError for kinds whose merge is not that of
    `models.merging`."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf8"))
    if config.get("peft_type", "LORA") != "LORA":
        raise InputError(f"{folder}: adapter of type {config['peft_type']!r}; only LORA is read")
    start = config.get("init_lora_weights", True)
    if (kind := str(start).lower()) not in _KEEPS_BASE:
        # pissa, pissa_niter_4, corda, olora, loftq, lora_ga take the adapter's first product off the base
        # (peft/tuners/lora/layer.py), so the adapter fits that other base alone
        saved = (
            "save it again with peft's save_pretrained(..., path_initial_model_for_weight_conversion=FIRST_VALUES), "
            "which makes it an ordinary adapter, or " if kind.startswith(_CONVERTIBLE) else ""
        )  # fmt: skip
        raise InputError(
            f"{folder}: adapter_config.json has init_lora_weights = {start!r}, which changes the base weights "
            f"before training, so the adapter does not fit the base as published; {saved}merge it with peft into "
            "the changed base that it was trained on (merge_and_unload) and convert the result"
        )
    for name, value in config.items():
        if name not in (*_MERGED, *_NEUTRAL) and value not in (None, False, "", "none", [], {}):
            raise InputError(
                f"{folder}: adapter_config.json has {name} = {value!r}, which cannot be merged here; merge it with "
                "peft first (merge_and_unload) and convert the result"
            )
    return config


def read_adapter(folder: Path) -> Adapter:
    """The tensors of a peft folder; InputError for one of another kind, or half of a pair."""
    file = next((folder / name for name in ADAPTER_FILES if (folder / name).is_file()), None)
    if file is None:
        raise InputError(f"{folder} has none of {', '.join(ADAPTER_FILES)}")
    config = adapter_config(folder)
    parts = {"A", "B", "magnitude"} if config.get("use_dora") else {"A", "B"}
    out = Adapter({}, {}, {})
    for name, tensor in files.tensors(file):
        name = name.removeprefix("base_model.model.")
        match = _LORA.match(name)
        if match and match["part"] in parts:
            out.halves.setdefault(match["layer"], {})[match["part"]] = tensor
        elif name.endswith(TOKEN_ROWS):
            layer = name.removesuffix(TOKEN_ROWS)
            chosen = config.get("trainable_token_indices") or []
            if isinstance(chosen, dict):
                chosen = next((ids for key, ids in chosen.items() if f".{layer}".endswith(f".{key}")), [])
            if len(chosen) != len(tensor):
                told = f"{len(tensor)} rows, trainable_token_indices names {len(chosen)} tokens"
                raise InputError(f"{file}: {name} has {told}")
            out.rows[f"{layer}.weight"] = list(chosen), tensor
        elif "lora_" in name:
            raise InputError(f"{file}: {name} is no {'DoRA' if len(parts) > 2 else 'LoRA'} weight")
        else:
            out.whole[name] = tensor
    whole = {layer: [half for half in found.values() if half.numel()] for layer, found in out.halves.items()}
    if broken := sorted(layer for layer, found in whole.items() if len(found) < len(parts)):
        raise InputError(
            f"{file}: {len(broken)} layers lack a half or have an empty one (a ZeRO-3 save without gathering?): "
            f"{', '.join(broken)}"
        )
    return out


def merged(folder: Path, base: Path, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(original name, tensor) of base + adapter, then the trainables that are no adapter; those replace base tensors of their name.

    Adapted weights come in ``dtype`` (None: their own). InputError for adapted layers and tables without a
    weight in the base, and for rows of tokens that it does not have.
    """
    adapter = read_adapter(folder)
    others = dict(files.tensors(folder / OTHERS)) if (folder / OTHERS).is_file() else {}
    others = {name.removeprefix("base_model.model."): tensor for name, tensor in others.items()}
    halves, rows, others = adapter.halves, adapter.rows, adapter.whole | others
    merging = Merging(halves, adapter_config(folder), str(folder), dtype)
    left = {*(f"{layer}.weight" for layer in halves), *rows}
    for name, tensor in files.tensors(base):
        if name in others:
            continue
        if name in rows:
            ids, new = rows[name]
            if max(ids, default=0) >= len(tensor):
                raise InputError(
                    f"{folder}: {name} has rows for tokens up to {max(ids)}, the base {base} has {len(tensor)}: grow "
                    "its vocabulary first, as it was grown for training (resize_token_embeddings of transformers)"
                )
            tensor = tensor.to(dtype or tensor.dtype, copy=True)
            tensor[ids] = new.to(tensor.dtype)
        elif name in left:
            tensor = merging.fold(name.removesuffix(".weight"), tensor)
        yield name, tensor
        left.discard(name)
    if left:
        layers = ", ".join(sorted(name.removesuffix(".weight") for name in left))
        raise InputError(f"{folder}: {len(left)} adapted layers have no weight in the base: {layers}")
    yield from others.items()
