"""OpenCLIP checkpoints: training files (``epoch_n.pt``), plain state dicts, safetensors and hub folders, to our names and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mmkit.errors import InputError
from mmkit.models.convert import files

if TYPE_CHECKING:
    from torch import nn

    from mmkit.config import ClipConfig

WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod)\.)+")
CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
# Buffers that older libraries stored and newer ones compute.
COMPUTED = re.compile(r"(^|\.)(position_ids|attn_mask|embeddings\.token_type_ids)$")


def ours(name: str) -> str:
    """Our name of an open_clip tensor; prefixes of DDP and torch.compile fall off in any order."""
    return "clip." + WRAPPERS.sub("", name)


def original(name: str) -> str:
    """The open_clip name of our tensor."""
    return name.removeprefix("clip.")


def tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor) of an OpenCLIP file or folder, one at a time."""
    for name, tensor in files.tensors(_weights(Path(path))):
        if not COMPUTED.search(name):
            yield ours(name), tensor.reshape(1) if tensor.dim() == 0 and "logit_" in name else tensor


def originals(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(open_clip name, tensor) of our state; temperature and bias without a dimension, as releases hold them."""
    for name, tensor in state.items():
        yield original(name), tensor.reshape(()) if "logit_" in name and tensor.numel() == 1 else tensor


def _weights(path: Path) -> Path:
    """Hub folders hold the same weights several times; the open_clip file is the one of this format."""
    found = [path / name for name in (WEIGHTS_FILE, "open_clip_pytorch_model.bin") if (path / name).is_file()]
    return found[0] if found else path


def load(model: nn.Module, path: Path) -> None:
    """Copies the tensors of ``path`` into ``model``; ValueError naming all that are missing, unexpected or of another shape."""
    files.fill(model, tensors(path), str(path))


def config_of(folder: Path) -> ClipConfig:
    """The config of a hub folder, from its ``open_clip_config.json``. Without ``quick_gelu`` in it the format means exact GELU."""
    from mmkit.config import ClipConfig

    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise InputError(
            f"{folder} has no {CONFIG_FILE}, so its architecture is unknown; name it (base=NAME of open_clip, "
            "or a JSON config)"
        )
    stored = json.loads(path.read_text(encoding="utf8"))
    preprocess = stored.get("preprocess_cfg", {})
    architecture = {"quick_gelu": False} | stored["model_cfg"]
    images = {key: tuple(preprocess[key]) for key in ("mean", "std") if preprocess.get(key)}
    bias = architecture.get("init_logit_bias")
    return ClipConfig(name=Path(folder).name, architecture=architecture, init_logit_bias=bias, **images)


def write_config(config: ClipConfig, folder: Path) -> None:
    """``open_clip_config.json`` as open_clip's ``local-dir:`` names read it. ``config`` has its architecture written out."""
    preprocess = {"mean": config.mean, "std": config.std}
    text = json.dumps({"model_cfg": config.architecture, "preprocess_cfg": preprocess}, indent=2)
    (Path(folder) / CONFIG_FILE).write_text(text + "\n", encoding="utf8")
