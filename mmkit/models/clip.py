"""Contrastive image-text models. The networks, tokenizers and transforms are open_clip's, used as a library; here is what a
training kit needs around them: every call goes through one `forward`, locked towers stay locked, what a locked tower computes
can be cached, and every choice that changes the numbers (activation included) is part of the config.

ViT-L/14 of the laion2B run: 24 x 1024 image tower, 12 x 768 text tower, 427.62M parameters (open_clip's model profile).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmkit.config import ClipConfig, ConfigError, nearest
from mmkit.errors import InputError, given_to_library
from mmkit.models import packs
from mmkit.models.convert import files
from mmkit.models.encoders import block_names


class ClipModel(nn.Module):
    """Two towers into one space. Parameter names are ``clip.`` + open_clip's own."""

    def __init__(self, config: ClipConfig):
        super().__init__()
        self.config = config
        self.clip = _network(config)
        self.lock()

    def forward(self, batch: Mapping[str, Tensor], mode: str = "loss") -> dict[str, Tensor | None]:
        """One entry for all uses, so a wrapper around the model (FSDP, ZeRO) sees every access.

        ``batch`` holds image (B, 3, h, w) or image_features (B, C), and text (B, L) or text_features (B, C); the features are
        what mode "trunk" gave. Modes: "loss" -> normalised image_features and text_features (B, D), logit_scale (already
        exponentiated) and logit_bias (or None), for CoCa also its caption logits and labels; "encode" -> the features of what
        the batch holds; "trunk" -> unprojected (B, C) features of what the batch holds, where a tower has a separate head.
        """
        if mode == "loss" and hasattr(self.clip, "text_decoder"):
            return self.clip(batch["image"], batch["text"])
        if mode not in ("loss", "encode", "trunk"):
            raise InputError(f"ClipModel has no mode {mode!r}; modes are loss, encode, trunk")
        if mode == "trunk":
            return self._trunks(batch)
        out: dict[str, Tensor | None] = {}
        if "image" in batch or "image_features" in batch:
            out["image_features"] = self._image(batch)
        if "text" in batch or "text_features" in batch:
            out["text_features"] = self._text(batch)
        if mode == "loss":
            bias = getattr(self.clip, "logit_bias", None)
            out |= {"logit_scale": self.clip.logit_scale.exp().squeeze(), "logit_bias": None if bias is None else bias.squeeze()}
        return out

    def _image(self, batch: Mapping[str, Tensor]) -> Tensor:
        if "image_features" in batch:
            return F.normalize(self._visual_head()(batch["image_features"]), dim=-1)
        return self.clip.encode_image(batch["image"], normalize=True)

    def _text(self, batch: Mapping[str, Tensor]) -> Tensor:
        if "text_features" in batch:
            return F.normalize(self._text_head()(batch["text_features"]), dim=-1)
        return self.clip.encode_text(batch["text"], normalize=True)

    def _trunks(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        out: dict[str, Tensor | None] = {}
        if "image" in batch:
            self._visual_head()
            out["image_features"] = self.clip.visual.trunk(batch["image"])
        if "text" in batch:
            self._text_head()
            mask = (batch["text"] != self.clip.text.config.pad_token_id).long()
            hidden = self.clip.text.transformer(input_ids=batch["text"], attention_mask=mask)
            out["text_features"] = self.clip.text.pooler(hidden, mask)
        return out

    @property
    def cacheable(self) -> tuple[str, ...]:
        """Which of "image", "text" have a frozen trunk with a separate head, so that "trunk" features may be computed once."""
        out = []
        visual, text = self.clip.visual, getattr(self.clip, "text", None)
        if hasattr(visual, "trunk") and hasattr(visual, "head") and _frozen(visual.trunk):
            out.append("image")
        if hasattr(text, "pooler") and _frozen(text.transformer):
            out.append("text")
        return tuple(out)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Class names of what backends shard and recompute one by one: the blocks of both towers."""
        return tuple(sorted(block_names(self.clip)))

    def _visual_head(self) -> nn.Module:
        if not hasattr(self.clip.visual, "trunk"):
            raise InputError(f"image tower {type(self.clip.visual).__name__} has no separate head; its features cannot be cached")
        return self.clip.visual.head

    def _text_head(self) -> nn.Module:
        if not hasattr(getattr(self.clip, "text", None), "pooler"):
            raise InputError("this text tower has no separate head; only Hugging Face text towers have, their features can be cached")
        return self.clip.text.proj

    def lock(self) -> None:
        """Freezes the locked towers (LiT), except the last groups or layers the config leaves open. Call it after any thawing."""
        if self.config.lock_image:
            # never freeze_bn_stats: it swaps timm's fused norm + activation for a bare norm; `train` holds the statistics instead
            self.clip.lock_image_tower(unlocked_groups=self.config.lock_image_unlocked_groups)
        if self.config.lock_text:
            self.clip.lock_text_tower(unlocked_layers=self.config.lock_text_unlocked_layers)
        self.train(self.training)

    def train(self, mode: bool = True):
        """Sets training mode; modules whose parameters are all frozen stay in eval mode (dropout off, norms unmoved)."""
        super().train(mode)
        for module in self.modules() if mode else ():
            if _frozen(module):
                module.eval()
        return self

    def set_patch_dropout(self, share: float) -> None:
        """Share of image patches dropped in training from now on; ValueError where the tower was built without patch dropout."""
        dropout = getattr(self.clip.visual, "patch_dropout", None) or getattr(getattr(self.clip.visual, "trunk", None), "patch_drop", None)
        if not hasattr(dropout, "prob"):
            if share:
                raise InputError(f"the image tower was built without patch dropout and cannot drop {share}; set model.patch_dropout")
            return
        dropout.prob = share

    def set_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations block by block in the backward pass."""
        self.clip.set_grad_checkpointing(enable)


def _frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


# ---------------------------------------------------------------- config


def architecture_of(config: ClipConfig) -> dict[str, Any]:
    """The complete open_clip settings of ``config`` (a new dict): its own ``architecture`` or the library's, with our settings laid over.

    ``quick_gelu`` is always in it, so a saved config says which activation the weights belong to.
    """
    import open_clip

    settings = copy.deepcopy(config.architecture) or open_clip.get_model_config(config.name)
    if settings is None:
        raise ConfigError(
            f"open_clip has no model {config.name!r} and no `architecture` is "
            f"given{nearest(config.name, open_clip.list_models())}"
        )
    settings.setdefault("quick_gelu", False)
    if config.context_length:
        settings["text_cfg"]["context_length"] = config.context_length
    if config.init_logit_scale != ClipConfig.model_fields["init_logit_scale"].default or "init_logit_scale" not in settings:
        settings["init_logit_scale"] = config.init_logit_scale
    if config.init_logit_bias is not None:
        settings["init_logit_bias"] = config.init_logit_bias
    if config.patch_dropout:
        settings["vision_cfg"]["patch_dropout"] = config.patch_dropout
    return settings


def resolved(config: ClipConfig) -> ClipConfig:
    """``config`` with the whole architecture and the image normalisation written out: what is saved beside weights."""
    preprocess = _preprocess(config)
    return config.model_copy(update={"architecture": architecture_of(config), "mean": preprocess["mean"], "std": preprocess["std"]})


def _network(config: ClipConfig) -> nn.Module:
    import open_clip
    from open_clip.utils import replace_linear

    settings = architecture_of(config)
    text = settings["text_cfg"]
    if "hf_model_name" in text:
        text["hf_model_name"] = _local(text["hf_model_name"])
        text["hf_model_pretrained"] = False  # weights are read by us, streamed and checked
    settings["vision_cfg"]["timm_model_pretrained"] = False
    custom = settings.pop("custom_text", False) or "hf_model_name" in text
    kind = open_clip.CoCa if "multimodal_cfg" in settings else open_clip.CustomTextCLIP if custom else open_clip.CLIP
    layer = int8_layer(config.int8_linear) if config.int8_linear else None
    with given_to_library(f"model.architecture of {config.name!r}"):
        network = kind(**settings, nonscalar_logit_scale=True)  # FSDP2 and DeepSpeed refuse 0-dim parameters
    return replace_linear(network, layer, INT8_LAYERS) if layer else network


def int8_layer(name: str) -> type[nn.Module]:
    """The layer of bitsandbytes that multiplies in int8 and trains; ConfigError where this machine or version has none."""
    import bitsandbytes

    found = getattr(bitsandbytes.nn, name, None) or getattr(getattr(bitsandbytes.nn, "triton_based_modules", None), name, None)
    if found is None:
        raise ConfigError(f"model.int8_linear = {name!r}: bitsandbytes {bitsandbytes.__version__} has no such layer; set it to none")
    if not torch.cuda.is_available():
        raise ConfigError(f"model.int8_linear = {name!r} computes on CUDA devices only and there is none; set it to none")
    return found


def _local(name: str) -> str:
    """A ``pack:NAME`` as the folder it is installed in; other names as they are."""
    return str(packs.text_folder(name.removeprefix("pack:"))) if name.startswith("pack:") else name


def build_clip(config: ClipConfig, device: str | torch.device = "cpu", read: bool = True) -> ClipModel:
    """The model of ``config`` on ``device``, with pack weights and ``config.weights`` where ``read`` allows files."""
    with torch.device(device):
        model = ClipModel(config)
    if read:
        for name in config.tower_packs:
            _load_tower_pack(model, name)
        if config.weights:
            load_weights(model, config.weights)
    return model


def _load_tower_pack(model: ClipModel, name: str) -> None:
    if name == "minilm":
        tower, owner = getattr(getattr(model.clip, "text", None), "transformer", None), "a Hugging Face text tower"
        stored = dict(files.tensors(packs.text_folder(name) / "model.safetensors")) if tower is not None else {}
    else:
        tower, owner = getattr(model.clip.visual, "trunk", None), "a timm image tower"
        stored = packs.encoder_state(name)
    if tower is None:
        raise ConfigError(f"model.tower_packs names {name!r}, which fills {owner}; model {model.config.name!r} has none")
    wanted = tower.state_dict()
    if missing := sorted(set(wanted) - set(stored)):
        raise ConfigError(
            f"tower pack {name!r} does not fit model {model.config.name!r}: it lacks {len(missing)} tensors, "
            f"first {missing[0]}"
        )
    for key, value in wanted.items():
        if value.shape != stored[key].shape:
            raise ConfigError(f"tower pack {name!r}: {key} has shape {tuple(stored[key].shape)}, the model needs {tuple(value.shape)}")
        value.copy_(stored[key])


def load_weights(model: ClipModel, weights: str) -> None:
    """Reads ``weights`` into ``model``: an open_clip pretrained tag, a file, a folder or a hub repository.

    ConfigError where a tag was trained with another activation; ValueError naming missing or unexpected tensors.
    """
    from mmkit.models.convert import openclip

    config = model.config
    tag = _tag(config)
    if tag:
        here, there = architecture_of(config)["quick_gelu"], bool(tag.get("quick_gelu"))
        if here != there:
            raise ConfigError(
                f"model.weights {weights!r} was trained with quick_gelu={there}, model {config.name!r} has quick_gelu={here}; "
                f"use the -quickgelu variant of the name or set architecture.quick_gelu"
            )
        path = Path(download(tag, weights))
    else:
        path = files.locate(weights)
    openclip.load(model, path)


def _tag(config: ClipConfig) -> dict[str, Any]:
    import open_clip

    return open_clip.get_pretrained_cfg(config.name, config.weights) if config.weights and not Path(config.weights).exists() else {}


def download(tag: dict[str, Any], weights: str) -> str:
    """File of an open_clip ``tag``, from its cache or downloaded; InputError naming ``weights`` where neither works."""
    import open_clip

    try:
        return open_clip.download_pretrained(tag)
    except Exception as error:  # hub, URL and disk errors of three libraries; the cause is kept
        raise InputError(
            f"open_clip weights {weights!r} are neither cached nor reachable ({type(error).__name__}); "
            "give a local file"
        ) from error


# ---------------------------------------------------------------- tokenizer, transforms


def clip_tokenizer(config: ClipConfig) -> Callable:
    """open_clip's tokenizer for this model: list of texts -> (B, L) int64, padded or cut to the context length."""
    from open_clip import tokenizer as library

    text = architecture_of(config)["text_cfg"]
    length, options = text.get("context_length", 77), dict(text.get("tokenizer_kwargs") or {})
    name = text.get("hf_tokenizer_name") or text.get("hf_model_name")
    if config.token_reduction:
        _check_reduction(config.token_reduction, name)
        options["reduction_mask"] = config.token_reduction
    if name is None:
        return library.SimpleTokenizer(context_length=length, **options)
    try:
        return library.HFTokenizer(_local(name), context_length=length, tokenizer_mode=text.get("tokenizer_mode"), **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer {name!r} of model {config.name!r} is neither local nor reachable: {error}") from None


def _check_reduction(kind: str, tokenizer: str | None) -> None:
    """ConfigError where captions cannot be cut by ``kind``: "syntax" asks nltk for parts of speech, which must be installed already."""
    if tokenizer is not None:
        raise ConfigError(f"model.token_reduction = {kind!r} is for open_clip's own tokenizer, not for {tokenizer!r}; set it to none")
    if kind != "syntax":
        return
    try:
        import nltk

        for resource in ("tokenizers/punkt_tab", "taggers/averaged_perceptron_tagger_eng"):
            nltk.data.find(resource)
    except (ImportError, LookupError) as error:
        cause = str(error).strip().splitlines()[0].strip(" *")
        raise ConfigError(f"model.token_reduction = 'syntax' needs nltk with its punkt and tagger data ({cause}); use 'simple'") from None


def clip_transform(config: ClipConfig, train: bool = False, augment_scale: tuple[float, float] = (0.9, 1.0)) -> Callable:
    """open_clip's transform: PIL image -> (3, h, w).

    ``train``: RandomResizedCrop with area share ``augment_scale``, by torch's global generator.
    """
    import open_clip

    settings = _preprocess(config)
    return open_clip.image_transform(
        settings["size"], is_train=train, mean=settings["mean"], std=settings["std"], resize_mode=settings.get("resize_mode"),
        interpolation=settings.get("interpolation"), aug_cfg=open_clip.AugmentationCfg(scale=augment_scale),
    )  # fmt: skip


def _preprocess(config: ClipConfig) -> dict[str, Any]:
    import open_clip

    tag = _tag(config)
    return {
        "size": architecture_of(config)["vision_cfg"].get("image_size", 224),
        "mean": config.mean or tuple(tag.get("mean") or open_clip.OPENAI_DATASET_MEAN),
        "std": config.std or tuple(tag.get("std") or open_clip.OPENAI_DATASET_STD),
        "resize_mode": tag.get("resize_mode"),
        "interpolation": tag.get("interpolation"),
    }


# ---------------------------------------------------------------- plain data for backends

INT8_LAYERS = ("c_fc", "c_proj")  # the linear layers of the MLPs, which open_clip replaces too

SHARDING = (
    (r"(^|\.)(ln_\w+|norm\d?|LayerNorm|bn\d?)\.(weight|bias)$", (None,)),
    (r"\.(bias|in_proj_bias|class_embedding|running_mean|running_var|gamma)$", (None,)),
    (r"\.(out_proj|c_proj|proj)\.weight$", (None, "fsdp")),
    (r"\.positional_embedding$", (None, "fsdp")),
    (r"\.(in_proj_weight|text_projection|proj|weight)$", ("fsdp", None)),
)
COMPONENTS = (
    (r"^clip\.visual\.", "image"),
    (r"^clip\.logit_(scale|bias)$", "scale"),
    (r"^clip\.", "text"),
)
