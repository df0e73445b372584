"""Published checkpoints of Cambrian-1, Ferret, LLaVA-1.5 and OpenCLIP: read into our names and loaded into a model.

What a folder holds is told by its files and their fields, never by its name. Tensors are streamed: at most the model and a few
tensors are in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmkit.config import ClipConfig, EncoderConfig, ModelConfig, VlmConfig
from mmkit.errors import InputError
from mmkit.models.build import build
from mmkit.models.convert import cambrian, ferret, files, llava, names, openclip
from mmkit.models.convert.config import system_of, vlm_config
from mmkit.models.encoders import load_encoder
from mmkit.models.hollow import SkipInit, cast_at_use

KINDS = ("full", "delta", "lora", "projector", "shards", "openclip")
PROJECTOR_FILES = ("mm_projector.bin", "region_geo_sampler.bin", "region_fea_adapter.bin")
Stream = Iterator[tuple[str, Tensor]]

_TOWER = re.compile(r"^model\.vision_tower(?:_aux_list\.(\d+))?\.vision_tower\.(?:vision_model\.|visual\.trunk\.|trunk\.)?(.+)$")
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|embeddings\.position_ids$")


def kind_of(path: Path) -> str:
    """One of `KINDS`, by the files of ``path``; ValueError where it is none of them. A delta is never told from full weights."""
    candidates = path.iterdir() if path.is_dir() else [path]
    sliced = any(cambrian.SHARD_FILE.fullmatch(file.name) for file in candidates)
    if sliced:
        return "shards"
    if path.is_dir():
        for file, kind in ((openclip.CONFIG_FILE, "openclip"), ("adapter_config.json", "lora")):
            if (path / file).is_file():
                return kind
        if any((path / name).is_file() for name in PROJECTOR_FILES):
            return "projector"
        if (path / "config.json").is_file():
            return "full"
        raise InputError(
            f"{path} is no published checkpoint: it has no config.json, {openclip.CONFIG_FILE}, "
            "adapter_config.json or rank files"
        )
    found = [names.unwrapped(name) for name in files.names(path)]
    if any(name.startswith("visual.") for name in found):
        return "openclip"
    if any(names.PART.match(name) for name in found) and not any(".self_attn." in name for name in found):
        return "projector"
    raise InputError(f"{path} holds neither an OpenCLIP model nor a connector; first tensors: {', '.join(found[:4])}")


def read(
    path: str | Path,
    kind: str | None = None,
    base: str | Path | ClipConfig | None = None,
    encoders: Sequence[EncoderConfig] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[ModelConfig, Stream]:
    """(our config, stream of (our name, tensor)) of a published checkpoint.

    ``path``: a local file or folder, or a hub repository. ``base``: the language model's weights, which a delta or LoRA folder
    needs, and a projector may have; for an OpenCLIP file the model name, a JSON config file or a ClipConfig, since a state dict
    does not say its activation. ``encoders`` replaces the vision towers that config.json names. Adapters are merged into ``dtype``
    (None: the type of each weight).
    """
    path = files.locate(str(path))
    kind = kind or ("delta" if base and kind_of(path) == "full" else kind_of(path))
    if kind not in KINDS:
        raise InputError(f"no checkpoint kind {kind!r}; kinds are {', '.join(KINDS)}")
    if kind == "openclip":
        return _clip_config(path, base), openclip.tensors(path)
    original = _original(path)
    config = vlm_config(original, encoders)
    return config, _ours(_streams(kind, path, files.locate(str(base)) if base else None, original, dtype), config)


def _original(path: Path) -> dict[str, Any]:
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json, so the model's shape is unknown; put the release's config.json beside {path.name}")
    return json.loads((folder / "config.json").read_text(encoding="utf8"))


def _clip_config(path: Path, base: str | Path | ClipConfig | None) -> ClipConfig:
    if isinstance(base, ClipConfig):
        return base
    if base is None:
        return openclip.config_of(path if path.is_dir() else path.parent)
    if Path(base).is_file():
        return ClipConfig(name=Path(base).stem, architecture={"quick_gelu": False} | json.loads(Path(base).read_text(encoding="utf8")))
    return ClipConfig(name=str(base))


def _streams(kind: str, path: Path, base: Path | None, original: Mapping[str, Any], dtype: torch.dtype | None) -> Stream:
    """(original name, tensor) of a checkpoint of the language-model systems."""
    if kind in ("delta", "lora") and base is None:
        raise InputError(f"{path} holds a {kind}: give the weights of its base model as base" + _base_hint(path))
    if kind == "shards":
        return cambrian.consolidated(path)
    if kind == "delta":
        return ferret.apply_delta(files.tensors(path), base)
    if kind == "lora":
        return llava.merged(path, base, dtype)
    if kind == "projector":
        return _projector(path, base)
    if system_of(original) == "ferret":
        ferret.check_not_delta(files.Lookup(path), path)
    return files.tensors(path)


def _base_hint(path: Path) -> str:
    if not (path / "adapter_config.json").is_file():
        return ""
    name = json.loads((path / "adapter_config.json").read_text(encoding="utf8")).get("base_model_name_or_path")
    return f" (adapter_config.json names {name})" if name else ""


def _projector(path: Path, base: Path | None) -> Stream:
    """Connector and region tensors of adapter-only files, whatever stands before their names, then the base's."""
    found = [path] if path.is_file() else [path / name for name in PROJECTOR_FILES if (path / name).is_file()]
    for file in found:
        for name, tensor in files.tensors(file):
            yield "model." + names.PART.sub("", name), tensor
    if base:
        yield from files.tensors(base)


def _ours(stream: Stream, config: VlmConfig) -> Stream:
    for name, tensor in stream:
        if _COMPUTED.search(name):
            continue
        tower = _TOWER.match(names.unwrapped(name))
        if tower:
            yield f"encoders.{tower[1] or 0}.trunk.{tower[2]}", tensor
        else:
            yield names.ours(name), tensor


# ---------------------------------------------------------------- into a model


def load(
    path: str | Path,
    kind: str | None = None,
    base: str | Path | ClipConfig | None = None,
    encoders: Sequence[EncoderConfig] | None = None,
    dtype: torch.dtype | None = None,
    half: torch.dtype | None = None,
) -> tuple[nn.Module, ModelConfig]:
    """(model with the published weights, its config), in ``dtype`` or the type they are stored in; fp32 for a LoRA folder, since half
    precision may round the adapter away. With ``half`` in that type where autocast casts to it anyway (`hollow.cast_at_use`).

    Encoders come from the checkpoint where it has them, else from their own source; so does the language model of a projector
    without ``base``. ValueError naming every missing or unexpected tensor.
    """
    found = kind or kind_of(files.locate(str(path)))
    if found == "lora":
        dtype = dtype or torch.float32
    config, stream = read(path, kind, base, encoders, dtype)
    first = next(stream, None)
    if first is None:
        raise InputError(f"{path} holds no tensors")
    dtype, stream = dtype or first[1].dtype, itertools.chain([first], stream)
    if isinstance(config, ClipConfig):
        with SkipInit():
            model = build(config, weights=False).to(dtype=dtype)
        files.fill(model, stream, str(path))
        return model, config
    partial = found == "projector" and base is None
    drawn = partial or any(encoder.weights == "random" for encoder in config.encoders)
    with contextlib.nullcontext() if drawn else SkipInit():
        model = build(config, weights=partial).to(dtype=dtype)
    for p in cast_at_use(model) if half else ():  # before they are filled: the whole model in fp32 is never there
        p.data = p.data.to(half)
    filled: set[str] = set()
    own = ("encoders.", "language.") if partial else ("encoders.",)
    files.fill(model, _noting(_buildable(stream, model), filled), str(path), optional=lambda name: name.startswith(own))
    _complete_encoders(model, config, filled, loaded=partial)
    model.weights_from = str(path)
    return model, config


def _buildable(stream: Stream, model: nn.Module) -> Stream:
    """``stream`` without the encoder tensors behind the layer we read, which our encoders do not have."""
    dropped = {f"encoders.{index}.trunk.{name}" for index, encoder in enumerate(model.encoders) for name in encoder.dropped}
    return ((name, tensor) for name, tensor in stream if name not in dropped)


def _noting(stream: Stream, seen: set[str]) -> Stream:
    for name, tensor in stream:
        seen.add(name)
        yield name, tensor


def _complete_encoders(model: nn.Module, config: VlmConfig, filled: set[str], loaded: bool) -> None:
    for index, (encoder, settings) in enumerate(zip(model.encoders, config.encoders, strict=True)):
        wanted = {f"encoders.{index}.{name}" for name in encoder.state_dict()}
        missing = sorted(name for name in wanted - filled if not name.endswith("num_batches_tracked"))
        if len(missing) < len(wanted) and missing:
            raise InputError(f"the checkpoint holds part of encoder {index} ({settings.name}); missing: {', '.join(missing)}")
        if missing and not loaded:
            load_encoder(encoder, settings)
