"""Vision encoders: one table of those we reproduce, and any open_clip, timm or Hugging Face encoder by name.

An encoder maps normalised images (n, 3, h, w) to a token grid (n, side * side, C). The networks are the libraries' own; here
is which layer is read, how its grid is resized, and with which numbers images are prepared (reference: Cambrian-1 section 3
and its released code; LLaVA-1.5). Layers behind the one that is read are not built, so every parameter receives a gradient
when an encoder is trained. Nothing here knows of connectors or language models.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmkit.config import ConfigError, EncoderConfig, nearest
from mmkit.errors import InputError, given_to_library
from mmkit.models import packs
from mmkit.models.convert import files
from mmkit.models.hollow import Reader

Triple = tuple[float, float, float]
CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)
HALF: Triple = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class EncoderSpec:
    """What the table knows of an encoder.

    ``pad_mean`` is the colour of letter-box borders; ``levels`` are the stages whose maps are joined on channels (shallow to
    deep); ``layer`` counts from the end: -2 reads the input of the last block. ``positions`` says how a DINOv2 position table
    meets another grid (see `resize_positions`). ``width`` is C at full size.
    """

    family: str
    model: str
    resolution: int
    width: int
    mean: Triple
    std: Triple
    pad_mean: Triple
    source: str | None = None
    levels: tuple[int, ...] = ()
    layer: int = -1
    positions: str = "scale_factor"
    architecture: dict[str, Any] = field(default_factory=dict)


_CLIP_L = dict(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, patch_size=14, hidden_act="quick_gelu"
)
_DINOV2_G = dict(hidden_size=1536, num_hidden_layers=40, num_attention_heads=24, patch_size=14, image_size=518, use_swiglu_ffn=True)

ENCODERS: dict[str, EncoderSpec] = {
    # The CLIP pad colour of SigLIP is the released wrapper's, not SigLIP's own mean.
    "siglip-so400m-384": EncoderSpec(
        "timm", "vit_so400m_patch14_siglip_384", 384, 1152, HALF, HALF, CLIP_MEAN, "timm/ViT-SO400M-14-SigLIP-384"
    ),
    "clip-l-336": EncoderSpec(
        "clip", "clip_vision_model", 336, 1024, CLIP_MEAN, CLIP_STD, CLIP_MEAN, "openai/clip-vit-large-patch14-336",
        layer=-2, architecture=_CLIP_L,
    ),
    "dinov2-g-378": EncoderSpec(
        "dinov2", "dinov2", 378, 1536, IMAGENET_MEAN, IMAGENET_STD, IMAGENET_MEAN, "facebook/dinov2-giant", architecture=_DINOV2_G
    ),
    # As above with the resize of transformers 5: for models trained with it, not for the published ones.
    "dinov2-g-378-exact-size": EncoderSpec(
        "dinov2", "dinov2", 378, 1536, IMAGENET_MEAN, IMAGENET_STD, IMAGENET_MEAN, "facebook/dinov2-giant",
        positions="size", architecture=_DINOV2_G,
    ),
    "convnext-xxl-1024": EncoderSpec(
        "timm", "convnext_xxlarge", 1024, 5760, CLIP_MEAN, CLIP_STD, CLIP_MEAN,
        "laion/CLIP-convnext_xxlarge-laion2B-s34B-b82K-augreg-soup", levels=(0, 1, 2, 3),
    ),
    "lite0": EncoderSpec("timm", "tf_efficientnet_lite0", 128, 152, HALF, HALF, HALF, "pack:lite0", levels=(2, 3)),
    "mobilenet": EncoderSpec(
        "timm", "mobilenetv2_100", 128, 128, IMAGENET_MEAN, IMAGENET_STD, IMAGENET_MEAN, "pack:mobilenet", levels=(2, 3)
    ),
}  # fmt: skip


class Encoder(nn.Module):
    """A trunk whose maps are resized to ``side`` x ``side`` tokens and joined on channels.

    ``dropped`` names trunk tensors that published files hold and we do not build. An encoder without a trainable parameter
    stays in eval mode, so the statistics of its batch norms never move.
    """

    def __init__(self, trunk: nn.Module, width: int, side: int, dropped: frozenset[str] = frozenset()):
        super().__init__()
        self.trunk, self.width, self.side, self.dropped = trunk, width, side, dropped

    def forward(self, images: Tensor) -> Tensor:
        """images (n, 3, h, w), normalised -> tokens (n, side * side, C), row by row."""
        images = images.to(next(self.trunk.parameters()).dtype)
        grid = torch.cat([resize_grid(one, self.side) for one in self.maps(images)], 1)  # (n, C, side, side)
        return grid.flatten(2).transpose(1, 2)  # (n, C, side, side) -> (n, side * side, C)

    def maps(self, images: Tensor) -> list[Tensor]:
        """The feature maps (n, C_k, s_k, s_k) that are joined."""
        raise NotImplementedError

    def train(self, mode: bool = True):
        """Sets training mode, but never on a frozen encoder."""
        return super().train(mode and any(parameter.requires_grad for parameter in self.parameters()))


class TimmEncoder(Encoder):
    """Any timm network: the maps of its stages ``levels``, or its final features without prefix tokens."""

    levels: tuple[int, ...] = ()
    standard: tuple[list[float], list[float]] | None = None  # mean and deviation of each channel

    def forward(self, images: Tensor) -> Tensor:
        """As every encoder; with ``standard`` each channel has about mean 0 and deviation 1 over usual pictures, in fp32 also under autocast."""
        if self.standard is None:
            return super().forward(images)
        # channels far from 0 are small differences of close numbers: half precision leaves noise of them
        with torch.autocast("cpu" if images.is_meta else images.device.type, enabled=False):
            tokens = super().forward(images).float()
            mean, deviation = (tokens.new_tensor(values) for values in self.standard)
            return (tokens - mean) / deviation

    def maps(self, images: Tensor) -> list[Tensor]:
        """Maps of the chosen stages, or the final one."""
        if self.levels:
            return self.trunk.forward_intermediates(images, indices=list(self.levels), stop_early=True, intermediates_only=True)
        out = self.trunk.forward_features(images)
        if out.ndim == 3:  # (n, prefix + s * s, C)
            return [to_map(out[:, self.trunk.num_prefix_tokens :])]
        channels_last = getattr(self.trunk, "output_fmt", "NCHW") == "NHWC"
        return [out.permute(0, 3, 1, 2) if channels_last else out]


class OpenClipEncoder(Encoder):
    """The tokens of the last block of an open_clip vision transformer, after its final norm."""

    def maps(self, images: Tensor) -> list[Tensor]:
        """The one map of the last block."""
        out = self.trunk.forward_intermediates(images, indices=1, normalize_intermediates=True, intermediates_only=True)
        return [out["image_intermediates"][-1]]


class HuggingFaceEncoder(Encoder):
    """The last hidden state of a Hugging Face vision model, without the tokens before the grid."""

    def maps(self, images: Tensor) -> list[Tensor]:
        """The one map of the last layer that was built."""
        hidden = self.trunk(pixel_values=images).last_hidden_state
        if hidden.ndim == 4:  # convolutional models: (n, C, s, s)
            return [hidden]
        n_cells = math.isqrt(hidden.shape[1]) ** 2
        return [to_map(hidden[:, hidden.shape[1] - n_cells :])]


class Dinov2Encoder(Encoder):
    """DINOv2 with its position table resized as the named option says."""

    positions: str = "scale_factor"

    def maps(self, images: Tensor) -> list[Tensor]:
        """The one map after the final norm."""
        embeddings = self.trunk.embeddings
        patches = embeddings.patch_embeddings(images)  # (n, s * s, C)
        tokens = torch.cat([embeddings.cls_token.expand(len(images), -1, -1), patches], 1)
        side = images.shape[-1] // embeddings.patch_size
        tokens = tokens + resize_positions(embeddings.position_embeddings, side, self.positions)
        hidden = self.trunk.layernorm(self.trunk.encoder(embeddings.dropout(tokens)).last_hidden_state)
        return [to_map(hidden[:, 1:])]


def to_map(tokens: Tensor) -> Tensor:
    """tokens (n, s * s, C), row by row -> map (n, C, s, s); ValueError where the count is no square."""
    n, count, width = tokens.shape
    side = math.isqrt(count)
    if side * side != count:
        raise InputError(f"encoder gave {count} tokens an image, which is no square grid; the nearest are {side**2} and {(side + 1) ** 2}")
    return tokens.transpose(1, 2).reshape(n, width, side, side)


def resize_grid(grid: Tensor, side: int) -> Tensor:
    """grid (n, C, s, s) -> (n, C, side, side), bilinear in fp32 without corner alignment; the same tensor where s = side."""
    if grid.shape[-2:] == (side, side):
        return grid
    return nn.functional.interpolate(grid.float(), size=(side, side), mode="bilinear", align_corners=False).to(grid.dtype)


def resize_positions(table: Tensor, side: int, how: str) -> Tensor:
    """A DINOv2 position table (1, 1 + S * S, C) for a side x side grid -> (1, 1 + side * side, C), bicubic in fp32.

    ``scale_factor`` is the form of transformers 4.37, with which the published models were trained: the sampling step is
    S / (side + 0.1). ``size`` is that of transformers 5: the step is S / side. For 37 -> 27 the sampled places differ by up
    to 0.13 of a cell (a random table moves by 0.12 of its standard deviation on average).
    """
    old = math.isqrt(table.shape[1] - 1)
    if old == side:
        return table
    weights = _bicubic(old, side, how).to(table.device)  # (side, S)
    grid = table[0, 1:].float().view(old, old, -1)  # (S, S, C)
    grid = torch.einsum("yr,rsc,xs->yxc", weights, grid, weights)  # (side, side, C)
    return torch.cat([table[:, :1], grid.flatten(0, 1)[None].to(table.dtype)], 1)


@functools.cache
def _bicubic(old: int, side: int, how: str) -> Tensor:
    """(side, old) fp32: what one axis of torch's bicubic resize adds up. As a product it runs on devices without that kernel (XLA)."""
    impulses = torch.eye(old, device="cpu")[None, :, :, None]  # channel c is 1 in row c
    if how == "scale_factor":
        scale = (side + 0.1) / old  # the 0.1 keeps floor(S * scale) from falling to side - 1
        out = nn.functional.interpolate(impulses, scale_factor=(scale, 1.0), mode="bicubic", align_corners=False)
    elif how == "size":
        out = nn.functional.interpolate(impulses, size=(side, 1), mode="bicubic", align_corners=False)
    else:
        raise InputError(f"no position resize {how!r}; there are 'scale_factor' and 'size'")
    return out[0, :, :, 0].T.contiguous()


# ---------------------------------------------------------------- building


def spec_of(config: EncoderConfig) -> EncoderSpec:
    """The table's entry of ``config.name``, or one made for an ``open_clip:``, ``timm:`` or ``hf:`` name."""
    if config.name in ENCODERS:
        return ENCODERS[config.name]
    library, _, name = config.name.partition(":")
    if not name or library not in _GENERIC:
        raise ConfigError(
            f"no encoder {config.name!r}{nearest(config.name, ENCODERS)}; encoders are {', '.join(ENCODERS)}, "
            "or open_clip:NAME, timm:NAME, hf:NAME"
        )
    return _GENERIC[library](name, config)


def resolution_of(config: EncoderConfig) -> int:
    """Pixels of the square image the encoder is given."""
    return config.resolution or spec_of(config).resolution


def build_encoder(config: EncoderConfig, device: str | torch.device = "cpu") -> Encoder:
    """The encoder of ``config`` with untrained weights, frozen, on ``device``. No file is read, except an ``hf:`` name's config."""
    spec = spec_of(config)
    if config.resolution:
        spec = replace(spec, resolution=config.resolution)
    own = given_to_library(f"model.encoders: {config.name} with architecture {config.architecture}")
    with torch.device(device), own if config.architecture else contextlib.nullcontext():
        encoder = _FAMILIES[spec.family](spec, config)
    return encoder.requires_grad_(False).eval()


def _build_timm(spec: EncoderSpec, config: EncoderConfig) -> Encoder:
    import timm

    settings = dict(spec.architecture) | dict(config.architecture or {})
    if timm.get_pretrained_cfg_value(spec.model, "fixed_input_size"):
        settings.setdefault("img_size", spec.resolution)
    trunk = timm.create_model(spec.model, **settings)
    names = set(trunk.state_dict())
    trunk.reset_classifier(0)
    if hasattr(trunk, "prune_intermediate_layers"):  # what lies behind the maps we read would only cost memory
        trunk.prune_intermediate_layers(list(spec.levels) or 1, prune_norm=bool(spec.levels), prune_head=True)
    channels = [trunk.feature_info[level]["num_chs"] for level in spec.levels] or [trunk.num_features]
    encoder = TimmEncoder(trunk, sum(channels), config.side, frozenset(names - set(trunk.state_dict())))
    encoder.levels = spec.levels
    if config.standardise:
        encoder.standard = channel_statistics(config.name, encoder.width)
    return encoder


def channel_statistics(name: str, width: int) -> tuple[list[float], list[float]]:
    """Measured (mean, deviation) of an encoder's channels; ConfigError where none are known or the width is another."""
    known = json.loads(Path(__file__).with_name("encoder_statistics.json").read_text(encoding="utf8"))["encoders"]
    if name not in known or len(known[name]["mean"]) != width:
        raise ConfigError(f"encoders.standardise: no channel statistics of {name!r} at width {width}; known are {', '.join(known)}")
    return known[name]["mean"], known[name]["deviation"]


def _build_open_clip(spec: EncoderSpec, config: EncoderConfig) -> Encoder:
    import open_clip
    from open_clip.model import _build_vision_tower  # the public constructors build the text tower as well

    settings = open_clip.get_model_config(spec.model)
    vision = {**settings["vision_cfg"], **spec.architecture, **(config.architecture or {}), "image_size": spec.resolution}
    tower = _build_vision_tower(settings["embed_dim"], vision, settings.get("quick_gelu", False))
    if hasattr(tower, "trunk"):
        inner = replace(spec, family="timm", model=vision["timm_model_name"], architecture={})
        return _build_timm(inner, config.model_copy(update={"architecture": None}))
    if not hasattr(tower, "transformer"):
        raise ConfigError(f"encoder {config.name!r}: a {type(tower).__name__} gives no token grid here; use a transformer or timm tower")
    names = set(tower.state_dict())
    tower.proj = None  # the joint space is not read
    return OpenClipEncoder(tower, tower.transformer.width, config.side, frozenset(names - set(tower.state_dict())))


def _build_clip(spec: EncoderSpec, config: EncoderConfig) -> Encoder:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    settings = CLIPVisionConfig(**(spec.architecture | (config.architecture or {}) | {"image_size": spec.resolution}))
    full = settings.num_hidden_layers
    settings.num_hidden_layers = full + 1 + spec.layer
    trunk = CLIPVisionModel(settings)
    layer = [name.removeprefix("encoder.layers.0.") for name in trunk.state_dict() if name.startswith("encoder.layers.0.")]
    dropped = {f"encoder.layers.{index}.{name}" for index in range(settings.num_hidden_layers, full) for name in layer}
    dropped |= {f"post_layernorm.{name}" for name in trunk.post_layernorm.state_dict()} | {"embeddings.position_ids"}
    trunk.post_layernorm = nn.Identity()
    return HuggingFaceEncoder(trunk, settings.hidden_size, config.side, frozenset(dropped))


def _build_dinov2(spec: EncoderSpec, config: EncoderConfig) -> Encoder:
    from transformers import Dinov2Config, Dinov2Model

    settings = Dinov2Config(**(spec.architecture | (config.architecture or {})), use_mask_token=False)
    encoder = Dinov2Encoder(Dinov2Model(settings), settings.hidden_size, config.side, frozenset({"embeddings.mask_token"}))
    encoder.positions = spec.positions
    return encoder


def _build_hugging_face(spec: EncoderSpec, config: EncoderConfig) -> Encoder:
    from transformers import AutoModel

    trunk = AutoModel.from_config(_hf_config(spec.model, config))
    trunk = getattr(trunk, "vision_model", trunk)
    return HuggingFaceEncoder(trunk, _hf_width(trunk.config), config.side)


_FAMILIES: dict[str, Callable[[EncoderSpec, EncoderConfig], Encoder]] = {
    "timm": _build_timm,
    "open_clip": _build_open_clip,
    "clip": _build_clip,
    "dinov2": _build_dinov2,
    "hf": _build_hugging_face,
}


# ---------------------------------------------------------------- weights

# Where an encoder sits inside a file that holds more than it; longest first. Names without the prefix are another tower's.
_PREFIXES: dict[str, tuple[str, ...]] = {
    "timm": ("visual.trunk.",),
    "open_clip": ("visual.",),
    "clip": ("model.vision_tower.vision_tower.vision_model.", "vision_model."),
    "dinov2": ("dinov2.",),
    "hf": ("vision_model.",),
}


def load_encoder(encoder: Encoder, config: EncoderConfig) -> Encoder:
    """``encoder`` with the weights that ``config`` names copied in; "random" leaves it untrained."""
    if config.weights != "random":
        state = encoder.state_dict()
        for name, read in source_readers(encoder, config).items():
            state[name].copy_(read())
    return encoder


def source_of(config: EncoderConfig) -> str | None:
    """Where the weights come from: a local path, a hub repository, ``pack:NAME``, or None for untrained ones."""
    source = config.weights or spec_of(config).source
    if source is None:
        raise ConfigError(f"encoder {config.name!r} has no known weights; set `weights` to a file, a folder or 'random'")
    return None if source == "random" else source


def source_readers(encoder: Encoder, config: EncoderConfig) -> dict[str, Reader]:
    """Name in ``encoder`` -> function that reads it from the source; ValueError naming what is missing, unexpected or of another shape."""
    source, family = source_of(config), spec_of(config).family
    wanted = {name.removeprefix("trunk."): tensor.shape for name, tensor in encoder.state_dict().items()}
    stored = _in_trunk_names(source, family)
    found = {name: read for name, read in stored.items() if name in wanted}
    for name, read in found.items():
        if (shape := read().shape) != wanted[name]:
            raise InputError(
                f"encoder {config.name!r} from {source}: {name} has shape {tuple(shape)}, the model needs {tuple(wanted[name])}"
            )
    unexpected = sorted(set(stored) - set(wanted) - encoder.dropped)
    missing = sorted(name for name in set(wanted) - set(found) if not name.endswith("num_batches_tracked"))
    if missing or unexpected:
        raise InputError(
            f"encoder {config.name!r} from {source}: missing {missing or 'nothing'}; unexpected {unexpected or 'nothing'}"
        )
    return {f"trunk.{name}": read for name, read in found.items()}


def _in_trunk_names(source: str, family: str) -> dict[str, Reader]:
    if source.startswith("pack:"):
        state = packs.encoder_state(source.removeprefix("pack:"))
        return {name: functools.partial(state.__getitem__, name) for name in state}
    stored = files.readers(files.locate(source))
    prefix = next((prefix for prefix in _PREFIXES[family] if any(name.startswith(prefix) for name in stored)), "")
    return {name.removeprefix(prefix): read for name, read in stored.items() if name.startswith(prefix)}


# ---------------------------------------------------------------- open_clip:, timm:, hf: names


def _timm_spec(name: str, config: EncoderConfig) -> EncoderSpec:
    import timm

    known = timm.get_pretrained_cfg(name, allow_unregistered=False) if timm.is_model(name.split(".")[0]) else None
    if known is None:
        raise ConfigError(f"timm has no model {name!r}{nearest(name, timm.list_models())}")
    size = known.input_size[-1]
    source = known.hf_hub_id + name if known.hf_hub_id and known.hf_hub_id.endswith("/") else known.hf_hub_id
    return EncoderSpec("timm", name.split(".")[0], size, 0, tuple(known.mean), tuple(known.std), tuple(known.mean), source)


def _open_clip_spec(name: str, config: EncoderConfig) -> EncoderSpec:
    import open_clip

    model, _, tag = name.partition("/")
    settings = open_clip.get_model_config(model)
    if settings is None:
        raise ConfigError(f"open_clip has no model {model!r}{nearest(model, open_clip.list_models())}")
    known = open_clip.get_pretrained_cfg(model, tag) if tag else {}
    mean, std = tuple(known.get("mean") or CLIP_MEAN), tuple(known.get("std") or CLIP_STD)
    size = settings["vision_cfg"].get("image_size", 224)
    return EncoderSpec("open_clip", model, size, 0, mean, std, mean, known.get("hf_hub", "").rstrip("/") or None)


def _hf_spec(name: str, config: EncoderConfig) -> EncoderSpec:
    settings = _hf_config(name, config)
    settings = getattr(settings, "vision_config", settings)
    by_type = {"clip": (CLIP_MEAN, CLIP_STD), "dinov": (IMAGENET_MEAN, IMAGENET_STD), "convnext": (IMAGENET_MEAN, IMAGENET_STD)}
    mean, std = next((stats for kind, stats in by_type.items() if settings.model_type.startswith(kind)), (HALF, HALF))
    size = getattr(settings, "image_size", 224)
    return EncoderSpec("hf", name, size, _hf_width(settings), mean, std, mean, name, architecture=dict(config.architecture or {}))


def _hf_config(name: str, config: EncoderConfig):
    from transformers import AutoConfig

    settings = dict(config.architecture or {})
    if "model_type" in settings:
        with given_to_library(f"model.encoders: {config.name} with architecture {config.architecture}"):
            return AutoConfig.for_model(**settings)
    try:
        return AutoConfig.from_pretrained(config.weights or name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"encoder hf:{name}: its config is neither local nor reachable ({type(error).__name__}); "
            "set `architecture` (with model_type) or `weights` to a local folder"
        ) from None


def _hf_width(settings) -> int:
    return settings.hidden_size if hasattr(settings, "hidden_size") else settings.hidden_sizes[-1]


_GENERIC: dict[str, Callable[[str, EncoderConfig], EncoderSpec]] = {"timm": _timm_spec, "open_clip": _open_clip_spec, "hf": _hf_spec}

def block_names(tower: nn.Module) -> set[str]:
    """Class names of the blocks that a vision or text tower of any library repeats: what is sharded and recomputed one by one.

    They are found by structure, because a list of names would miss the next family without a word: modules with parts of their own
    that stand in a ModuleList or Sequential and of whose class the tower has several. Of blocks within blocks (the stages of a
    ConvNeXt) the inner ones.
    """
    lists = (nn.ModuleList, nn.Sequential)
    found: dict[type, list[nn.Module]] = {}
    for parts in (module for module in tower.modules() if isinstance(module, lists)):
        for part in parts:
            adapted = hasattr(part, "base_layer")  # a linear layer with an adapter has parts, but is no block
            if not isinstance(part, lists) and any(part.children()) and not adapted:
                found.setdefault(type(part), []).append(part)
    several = {kind: parts for kind, parts in found.items() if len(parts) > 1}
    outer = {kind for kind, (part, *_) in several.items() if any(type(m) in several for m in part.modules() if m is not part)}
    return {kind.__name__ for kind in several if kind not in outer}
