"""Our models under the names and in the files of the published systems; `convert.published` reads them back equal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from mmkit.cache import atomic_folder
from mmkit.config import VlmConfig
from mmkit.errors import InputError
from mmkit.models.convert import files, names, openclip
from mmkit.models.convert.config import original_config

WRITERS = ("cambrian", "ferret", "llava", "openclip", "projector")
Stream = Iterator[tuple[str, Tensor]]


def write(model: nn.Module, folder: str | Path, kind: str, tokenizer=None) -> Path:
    """Writes ``model`` as ``kind`` (one of `WRITERS`) would have published it, into a new ``folder``.

    "projector" writes ``mm_projector.bin`` (and ``region_geo_sampler.bin``) beside config.json. Frozen encoders are not written,
    as in the originals; trained ones, and those without a source, are. ``tokenizer`` is saved with the others where it is given.
    """
    if kind not in WRITERS:
        raise InputError(f"no published form {kind!r}; forms are {', '.join(WRITERS)}")
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty; name a new folder")
    with atomic_folder(folder) as work:
        if kind == "openclip":
            from mmkit.models.clip import resolved

            openclip.write_config(resolved(model.config), work)
            files.write(openclip.originals(dict(_untied(model))), work, "open_clip_model")
        else:
            _write_system(model, work, kind)
        if tokenizer is not None and hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(work)
    return folder


def _write_system(model: nn.Module, work: Path, kind: str) -> None:
    config: VlmConfig = model.config
    system = kind if kind != "projector" else "ferret" if config.regions else "cambrian" if config.connector.newline else "llava"
    (work / "config.json").write_text(json.dumps(original_config(config, system), indent=2) + "\n", encoding="utf8")
    stream = _original_names(model, system)
    if kind != "projector":
        files.write(stream, work)
        return
    kept = {name: tensor.detach().cpu().clone() for name, tensor in stream if names.PART.match(name)}
    regions = {name: tensor for name, tensor in kept.items() if "region_" in name}
    torch.save({name: tensor for name, tensor in kept.items() if name not in regions}, work / "mm_projector.bin")
    if regions:
        torch.save(regions, work / ("region_geo_sampler.bin" if config.regions.kind == "geo" else "region_fea_adapter.bin"))


def _original_names(model: nn.Module, system: str) -> Stream:
    linear, mean = model.config.connector.kind == "linear", bool(model.config.regions and model.config.regions.kind == "mean")
    trained = [any(parameter.requires_grad for parameter in encoder.parameters()) for encoder in model.encoders]
    own = {i for i, settings in enumerate(model.config.encoders) if trained[i] or settings.weights == "random"}
    for name, tensor in _untied(model):
        if not name.startswith("encoders."):
            yield names.original(name, linear=linear, mean=mean), tensor
        elif int(name.split(".")[1]) in own:
            index, rest = re.fullmatch(r"encoders\.(\d+)\.trunk\.(.+)", name).groups()
            above = f"model.vision_tower_aux_list.{index}" if system == "cambrian" else "model.vision_tower"
            yield f"{above}.vision_tower.{rest}", tensor


def _untied(model: nn.Module) -> Stream:
    """The state of ``model`` with each shared tensor once, under its first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.numel() and tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        yield name, tensor
