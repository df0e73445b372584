"""From a model's config to the model, its tokenizer and its image transforms: the one place that puts the parts together."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mmkit.config import ClipConfig, ConfigError, EncoderConfig, ModelConfig, VlmConfig
from mmkit.models import packs
from mmkit.models.convert import files
from mmkit.models.encoders import build_encoder, load_encoder, resolution_of, source_of, source_readers, spec_of
from mmkit.models.hollow import Reader, SkipInit, without_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase


def build(config: ModelConfig, device: str | torch.device = "cpu", weights: bool = True) -> nn.Module:
    """The model of ``config`` with its source weights.

    ``weights=False`` or ``device="meta"`` reads no file: the same module tree, untrained or without memory. Encoders come
    frozen; what else is trained is the training stage's choice.
    """
    read = weights and str(device) != "meta"
    if isinstance(config, ClipConfig):
        from mmkit.models.clip import build_clip

        return build_clip(config, device, read)
    from mmkit.models.language import load_language
    from mmkit.models.vlm import VisionLanguageModel

    encoders = [_encoder(encoder, device, read) for encoder in config.encoders]
    folder = pack_folder(config.language.source) if read else None
    language = load_language(config.language, device, weights=read, folder=folder)
    with torch.device(device):
        return VisionLanguageModel(config, language, encoders)


def build_hollow(config: VlmConfig) -> tuple[nn.Module, dict[str, Reader]]:
    """As `build`, but what source files hold stays on the meta device; and name -> function that reads it, for each of these tensors."""
    from mmkit.models.language import hollow_language, load_language
    from mmkit.models.vlm import VisionLanguageModel

    readers, encoders = {}, []
    for index, settings in enumerate(config.encoders):
        drawn = settings.weights == "random"
        with contextlib.nullcontext() if drawn else without_memory():
            encoders.append(build_encoder(settings))
        found = {} if drawn else source_readers(encoders[-1], settings)
        readers |= {f"encoders.{index}.{name}": read for name, read in found.items()}
    source = config.language.source
    if source == "random":
        language, found = load_language(config.language), {}
    else:
        language, found = hollow_language(config.language, pack_folder(source) or files.locate(source))
    readers |= {f"language.{name}": read for name, read in found.items()}
    table = language.get_input_embeddings().weight
    name = next(name for name, value in language.named_parameters() if value is table)
    return VisionLanguageModel(config, language, encoders, found[name]() if name in found else table), readers


def units_of(config: VlmConfig) -> dict[str, str | None]:
    """Parts that have a source of their own, and that source (None: untrained)."""
    language = config.language.source
    out = {f"encoders.{index}": source_of(encoder) for index, encoder in enumerate(config.encoders)}
    return out | {"language": None if language == "random" else language}


def unit_readers(config: VlmConfig, unit: str, source: str) -> dict[str, Reader]:
    """Our name -> function that reads a tensor of part ``unit`` from its ``source``."""
    if unit == "language":
        readers = files.readers(pack_folder(source) or files.locate(source))
    else:
        settings = config.encoders[int(unit.split(".")[1])]
        readers = source_readers(build_encoder(settings, "meta"), settings)
    return {f"{unit}.{name}": read for name, read in readers.items()}


def _encoder(config: EncoderConfig, device: str | torch.device, read: bool) -> nn.Module:
    if not read or config.weights == "random":
        return build_encoder(config, device)
    with SkipInit():
        encoder = build_encoder(config, device)
    return load_encoder(encoder, config)


def pack_folder(source: str | None) -> Path | None:
    """The cache folder of a ``pack:NAME`` language model, None for any other source."""
    return packs.language_folder(source.removeprefix("pack:")) if source and source.startswith("pack:") else None


# ---------------------------------------------------------------- tokenizer


def tokenizer(config: ModelConfig, folder: str | Path | None = None):
    """The tokenizer of ``config``, from ``folder`` (an export's ``tokenizer/``) where one is given.

    For language models: a fast Hugging Face tokenizer with the region token added where regions are configured and a pad token
    set. ConfigError where it has more entries than the model's vocabulary.
    """
    if isinstance(config, ClipConfig):
        from mmkit.models.clip import clip_tokenizer

        return clip_tokenizer(config)
    source = str(folder) if folder else config.language.tokenizer or config.language.source
    out = source_tokenizer(source)
    if config.regions and config.regions.token not in out.get_vocab():
        out.add_tokens([config.regions.token], special_tokens=True)
    if out.pad_token is None:
        out.pad_token = out.unk_token or out.eos_token
    out.padding_side = config.language.padding_side
    size = config.language.architecture.get("vocab_size")
    if size is not None and len(out) > size:
        raise ConfigError(
            f"tokenizer {source!r} has {len(out)} entries, language.architecture.vocab_size is {size}; "
            f"use at least {len(out)}"
        )
    return out


def source_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of ``source`` (pack, folder, URL, hub repository or ``bytes``) as it is; ConfigError
    where there is no fast one."""
    from transformers import AutoTokenizer

    if source == "random":
        raise ConfigError("language.source 'random' brings no tokenizer; set language.tokenizer, e.g. to 'bytes'")
    if source == "bytes":
        return packs.byte_tokenizer()
    path = pack_folder(source) or files.locate(source, weights=False)
    try:
        out = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no tokenizer could be read from {source!r}: {error}") from None
    if not out.is_fast:
        raise ConfigError(f"tokenizer {source!r} is a slow one and gives no character offsets; add its tokenizer.json")
    return out


# ---------------------------------------------------------------- images


def image_transforms(config: ModelConfig, train: bool = False, augment_scale: tuple[float, float] = (0.9, 1.0)) -> list[Callable]:
    """One callable an encoder: PIL image -> normalised float tensor (3, h, w).

    ``train`` and ``augment_scale`` matter to contrastive models only, whose training crops at random.
    """
    if isinstance(config, ClipConfig):
        from mmkit.models.clip import clip_transform

        return [clip_transform(config, train, augment_scale)]
    return [encoder_transform(encoder, config.image_fit) for encoder in config.encoders]


def encoder_transform(config: EncoderConfig, fit: str = "pad") -> ImageTransform:
    """The transform of one encoder (reference: Cambrian-1's released code; pad colours as published)."""
    spec = spec_of(config)
    return ImageTransform(resolution_of(config), spec.mean, spec.std, tuple(int(255 * value) for value in spec.pad_mean), fit)


class ImageTransform:
    """PIL image -> (3, side, side): fitted to a square, resized with Pillow's bicubic filter, scaled to 0..1, normalised."""

    def __init__(self, side: int, mean, std, pad: tuple[int, int, int], fit: str):
        self.side, self.pad, self.fit = side, pad, FITS[fit]
        self.mean, self.std = (torch.tensor(value, dtype=torch.float32)[:, None, None] for value in (mean, std))

    def __call__(self, image: Image.Image) -> Tensor:
        """image of any size and mode -> (3, side, side) float32."""
        image = self.fit(image.convert("RGB"), self.side, self.pad)
        if image.size != (self.side, self.side):
            image = image.resize((self.side, self.side), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)  # (h, w, 3) -> (3, h, w)
        return (pixels.float() / 255 - self.mean) / self.std


def letter_box(image: Image.Image, side: int, pad: tuple[int, int, int]) -> Image.Image:
    """``image`` in the middle of a square of its longer side, borders in colour ``pad``."""
    width, height = image.size
    if width == height:
        return image
    long = max(width, height)
    square = Image.new("RGB", (long, long), pad)
    square.paste(image, ((long - width) // 2, (long - height) // 2))
    return square


def centre_crop(image: Image.Image, side: int, pad: tuple[int, int, int]) -> Image.Image:
    """``image`` with its shorter side resized to ``side``, then the middle square (the CLIP processor's order)."""
    width, height = image.size
    short = min(width, height)
    image = image.resize((width * side // short, height * side // short), Image.Resampling.BICUBIC)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def stretch(image: Image.Image, side: int, pad: tuple[int, int, int]) -> Image.Image:
    """``image`` itself: the resize to a square that follows does not keep its aspect."""
    return image


FITS: dict[str, Callable] = {"pad": letter_box, "square": centre_crop, "stretch": stretch}
