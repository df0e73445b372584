"""config.json of the published Cambrian, Ferret and LLaVA models <-> our VlmConfig.

The published files disagree about ``model_type`` (cambrian-8b says "llava_llama"), so the system is told by the fields that only
it has. Names of folders are never looked at. Sources: the released config files and code, Cambrian-1 @ 539ffc3, ml-ferret @
3c9e5c9, LLaVA @ 0ea7185.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmkit.config import (
    ConfigError,
    ConnectorConfig,
    EncoderConfig,
    LanguageConfig,
    RegionConfig,
    SamplersConfig,
    VlmConfig,
    nearest,
)

ENCODER_NAMES: dict[str, str] = {  # original tower string -> ours
    "siglip/CLIP-ViT-SO400M-14-384": "siglip-so400m-384",
    "openai/clip-vit-large-patch14-336": "clip-l-336",
    "facebook/dinov2-giant-res378": "dinov2-g-378",
    "clip-convnext-XXL-multi-stage": "convnext-xxl-1024",
}
LANGUAGE_TYPES: dict[str, str] = {  # model_type in the file -> transformers' own
    "llava_llama": "llama",
    "llava": "llama",
    "LlavaLlamaForCausalLM": "llama",
    "cambrian_llama": "llama",
    "cambrian": "llama",
    "cambrian_phi3": "phi3",
    "cambrian_mistral": "mistral",
    "cambrian_gemma": "gemma",
    "ferret": "llama",
    "ferret_llama": "llama",
    "llama": "llama",
    "phi3": "phi3",
}
OURS = "mmkit"  # extra field of config.json files that we write
LANGUAGE_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "original_max_position_embeddings", "sliding_window", "rms_norm_eps", "rope_theta", "rope_scaling",
    "hidden_act", "attention_bias", "mlp_bias", "attention_dropout", "initializer_range", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """What a released model needs and its config.json does not say."""

    template: str
    source: str
    image_position: int
    stop_tokens: tuple[str, ...] = ()


# (system, hidden size, vocabulary) -> the rest (evaluation scripts of the systems).
PUBLISHED: dict[tuple[str, int, int], Published] = {
    ("cambrian", 4096, 128256): Published("llama_3", "meta-llama/Meta-Llama-3-8B-Instruct", 91, ("<|eot_id|>",)),
    ("cambrian", 5120, 32000): Published("vicuna_v1", "lmsys/vicuna-13b-v1.5", 35),
    ("cambrian", 7168, 64000): Published("chatml_direct", "NousResearch/Nous-Hermes-2-Yi-34B", 87, ("<|im_end|>",)),
    ("cambrian", 3072, 32064): Published("phi3", "microsoft/Phi-3-mini-4k-instruct", 13, ("<|end|>",)),
    ("ferret", 4096, 32001): Published("ferret_v1", "lmsys/vicuna-7b-v1.3", 0),
    ("ferret", 5120, 32001): Published("ferret_v1", "lmsys/vicuna-13b-v1.3", 0),
    ("llava", 4096, 32000): Published("vicuna_v1", "lmsys/vicuna-7b-v1.5", 0),
    ("llava", 5120, 32000): Published("vicuna_v1", "lmsys/vicuna-13b-v1.5", 0),
}
TEMPLATES = {"cambrian": "vicuna_v1", "ferret": "ferret_v1", "llava": "vicuna_v1"}  # the systems' own defaults
MODEL_CLASSES = {"cambrian": "Cambrian{}ForCausalLM", "ferret": "FERRETLlamaForCausalLM", "llava": "LlavaLlamaForCausalLM"}


def system_of(original: Mapping[str, Any]) -> str:
    """"cambrian", "ferret" or "llava", by the fields of its config.json; ConfigError where it is none of them."""
    if "text_config" in original:
        raise ConfigError("config.json has text_config: a transformers-native conversion; use the authors' own release")
    if any(key in original for key in ("mm_vision_tower_aux_list", "vision_tower_aux_list", "mm_vision_tower_aux_token_len_list")):
        return "cambrian"
    if any(original.get(key) for key in ("region_geo_sampler", "region_fea_adapter")) or original.get("model_type") == "ferret":
        return "ferret"
    if "mm_vision_tower" in original or "mm_projector_type" in original or "mm_hidden_size" in original:
        return "llava"
    raise ConfigError(
        f"config.json (model_type {original.get('model_type')!r}) is no Cambrian, Ferret or LLaVA model: "
        "it has none of mm_vision_tower_aux_list, region_geo_sampler, mm_vision_tower"
    )


def vlm_config(original: Mapping[str, Any], encoders: Sequence[EncoderConfig] | None = None) -> VlmConfig:
    """Our config of a published model's config.json. ``encoders`` replaces its tower names; unknown fields are harmless.

    A file that `original_config` wrote for a model the published format cannot describe holds our config whole.
    """
    if OURS in original:
        config = VlmConfig(**original[OURS])
        return config.model_copy(update={"encoders": tuple(encoders)}) if encoders else config
    system = system_of(original)
    known = PUBLISHED.get((system, original["hidden_size"], original["vocab_size"]))
    llava_fit = "pad" if original.get("image_aspect_ratio") == "pad" else "square"
    return VlmConfig(
        encoders=tuple(encoders) if encoders else _encoders(original),
        connector=_connector(original, system),
        samplers=_samplers(original),
        language=_language(original, known),
        regions=_regions(original),
        template=known.template if known else TEMPLATES[system],
        image_fit={"cambrian": "pad", "ferret": "stretch", "llava": llava_fit}[system],
    )


def _first(original: Mapping[str, Any], *names: str):
    return next((original[name] for name in names if original.get(name) is not None), None)


def _encoders(original: Mapping[str, Any]) -> tuple[EncoderConfig, ...]:
    towers = _first(original, "mm_vision_tower_aux_list", "vision_tower_aux_list") or [_first(original, "mm_vision_tower", "vision_tower")]
    lengths = _first(original, "mm_vision_tower_aux_token_len_list", "vision_tower_aux_token_len_list") or [576] * len(towers)
    if len(towers) != len(lengths):
        raise ConfigError(f"config.json names {len(towers)} vision towers but {len(lengths)} token counts")
    out = []
    for tower, length in zip(towers, lengths, strict=True):
        name = re.sub(r"-interp\d+$", "", str(tower))
        if name not in ENCODER_NAMES:
            raise ConfigError(
                f"vision tower {tower!r} of config.json is not known{nearest(name, ENCODER_NAMES)}; known: "
                f"{', '.join(ENCODER_NAMES)}"
            )
        out.append(EncoderConfig(name=ENCODER_NAMES[name], side=_side(length, f"token count of {tower}")))
    layer = original.get("mm_vision_select_layer", -2)
    if any(encoder.name == "clip-l-336" for encoder in out) and layer != -2:
        raise ConfigError(f"mm_vision_select_layer is {layer} in config.json, encoder clip-l-336 reads layer -2")
    return tuple(out)


def _side(count: int, what: str) -> int:
    side = math.isqrt(count)
    if side * side != count:
        raise ConfigError(f"{what} is {count}, which is no square; the nearest are {side**2} and {(side + 1) ** 2}")
    return side


def _connector(original: Mapping[str, Any], system: str) -> ConnectorConfig:
    kind, newline = original.get("mm_projector_type") or "linear", system == "cambrian"
    if kind == "sva":
        sides = tuple(_side(count, "query_num_list entry") for count in original["query_num_list"])
        grid = _side(original["image_token_len"], "image_token_len") if "image_token_len" in original else None
        return ConnectorConfig(
            kind="sva", width=original["vision_hidden_size"], depth=original["connector_depth"], query_sides=sides, newline=newline,
            grid_side=None if grid == max(sides) else grid,
        )  # fmt: skip
    if kind in ("linear", "identity"):
        return ConnectorConfig(kind=kind, newline=newline)
    if match := re.fullmatch(r"mlp(\d+)x_gelu", kind):
        return ConnectorConfig(kind="mlp", depth=int(match[1]), newline=newline)
    raise ConfigError(f"mm_projector_type {kind!r} of config.json is not known; known: sva, linear, identity, mlp1x_gelu, mlp2x_gelu, ...")


def _samplers(original: Mapping[str, Any]) -> SamplersConfig | None:
    count = original.get("num_of_vision_sampler_layers") or 0
    if original.get("mm_projector_type") != "sva" or original.get("connector_only", True) or not count:
        return None
    return SamplersConfig(
        start=original["start_of_vision_sampler_layers"], stride=original["stride_of_vision_sampler_layers"], count=count
    )


def _regions(original: Mapping[str, Any]) -> RegionConfig | None:
    if original.get("region_geo_sampler"):
        return RegionConfig(kind="geo", pool=original.get("sampler_pooler_mode") or "mean", transposed=True)
    return RegionConfig(kind="mean", transposed=True) if original.get("region_fea_adapter") else None


def _language(original: Mapping[str, Any], known: Published | None) -> LanguageConfig:
    kind = original.get("model_type", "llama")
    if kind not in LANGUAGE_TYPES:
        raise ConfigError(
            f"model_type {kind!r} of config.json is not known{nearest(kind, LANGUAGE_TYPES)}; known: "
            f"{', '.join(LANGUAGE_TYPES)}"
        )
    fields = {name: original[name] for name in LANGUAGE_FIELDS if original.get(name) is not None}
    return LanguageConfig(
        source=known.source if known else "random",
        architecture={"model_type": LANGUAGE_TYPES[kind], "hidden_act": "silu", "tie_word_embeddings": False} | fields,
        stop_tokens=known.stop_tokens if known else (),
        padding_side=original.get("tokenizer_padding_side") or "right",
    )


# ---------------------------------------------------------------- ours -> original


def original_config(config: VlmConfig, system: str) -> dict[str, Any]:
    """config.json of ``system`` for our config: what the original code reads, and what `vlm_config` reads back unchanged."""
    language = dict(config.language.architecture)
    kind = language.pop("model_type")
    known = PUBLISHED.get((system, language["hidden_size"], language["vocab_size"]))
    common = {
        "architectures": [MODEL_CLASSES[system].format(kind.capitalize())],
        "model_type": {"cambrian": f"cambrian_{kind}", "ferret": "ferret", "llava": "llava_llama"}[system],
        **language,
        "mm_projector_type": _projector_type(config.connector),
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "patch",
        "mm_use_im_start_end": False,
        "mm_use_im_patch_token": False,
        "use_mm_proj": True,
        "image_aspect_ratio": "pad" if config.image_fit == "pad" else "square",
        "tokenizer_padding_side": config.language.padding_side,
    }
    out = common | (_cambrian_fields(config, known) if system == "cambrian" else _single_tower_fields(config))
    return out if _describes(out, config) else out | {OURS: config.model_dump(mode="json")}


def _describes(original: Mapping[str, Any], config: VlmConfig) -> bool:
    """Whether a config.json alone gives ``config`` back; small twins, other encoders and region sizes have no fields in it."""
    try:
        back = vlm_config(original)
    except ConfigError:
        return False
    language = {"hidden_act": "silu", "tie_word_embeddings": False} | dict(config.language.architecture)
    same = back.language.architecture == language and back.language.source == config.language.source
    return same and back.model_copy(update={"language": config.language}) == config


def _projector_type(connector: ConnectorConfig) -> str:
    return f"mlp{connector.depth}x_gelu" if connector.kind == "mlp" else connector.kind


def _tower_names(config: VlmConfig) -> list[str]:
    """The originals' strings; an encoder they do not have keeps our name."""
    names = {ours: theirs for theirs, ours in ENCODER_NAMES.items()}
    return [names.get(encoder.name, encoder.name) for encoder in config.encoders]


def _cambrian_fields(config: VlmConfig, known: Published | None) -> dict[str, Any]:
    lengths, samplers = [encoder.side**2 for encoder in config.encoders], config.samplers
    out = {
        "mm_vision_tower_aux_list": _tower_names(config),
        "mm_vision_tower_aux_token_len_list": lengths,
        "image_token_len": config.grid_side**2,
        "query_num_list": [side**2 for side in config.connector.query_sides],
        "num_query_group": len(config.connector.query_sides),
        "connector_depth": config.connector.depth,
        "vision_hidden_size": config.connector.width,
        "connector_only": samplers is None,
        "num_of_vision_sampler_layers": samplers.count if samplers else 0,
        "start_of_vision_sampler_layers": samplers.start if samplers else 0,
        "stride_of_vision_sampler_layers": samplers.stride if samplers else 1,
    }
    return out | ({"image_position": known.image_position} if known else {})


def _single_tower_fields(config: VlmConfig) -> dict[str, Any]:
    out: dict[str, Any] = {"mm_vision_tower": _tower_names(config)[0], "mm_hidden_size": 1024}
    if config.regions and config.regions.kind == "geo":
        out |= {"region_geo_sampler": True, "sampler_pooler_mode": config.regions.pool}
    elif config.regions:
        out |= {"region_fea_adapter": True}
    if config.regions:
        out["im_region_fea_token"] = config.language.architecture["vocab_size"] - 1
    return out
