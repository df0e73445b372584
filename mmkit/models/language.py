"""Any Hugging Face causal language model, by config: loaded, checked, and run on positions that may be padded, packed or cached.

What a position may attend to is data (`Places`), not a property of the family: padding, several conversations in a row, parallel
questions about one image and cached keys are all one comparison between query and key places.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mmkit.config import LanguageConfig, nearest
from mmkit.errors import InputError, given_to_library
from mmkit.models.convert import files
from mmkit.models.hollow import Reader, same_tensor, without_memory

if TYPE_CHECKING:
    from transformers import Cache, PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


class Places(NamedTuple):
    """Where positions are: index in the sequence, conversation (0 = not real), branch (0 = shared), position id; all (B, L)."""

    index: Tensor
    segments: Tensor
    branches: Tensor
    positions: Tensor

    @classmethod
    def of(cls, batch: Mapping[str, Tensor]) -> Places:
        """Of a batch; without ``segments`` every position is real, without ``positions`` real ones count up from 0."""
        ids = batch["input_ids"]
        segments = batch["segments"] if "segments" in batch else batch.get("attention_mask", torch.ones_like(ids)).long()
        positions = batch["positions"] if "positions" in batch else ((segments > 0).long().cumsum(1) - 1).clamp(min=0)
        branches = batch["branches"] if "branches" in batch else torch.zeros_like(ids)
        return cls(torch.arange(ids.shape[1], device=ids.device).expand_as(ids), segments, branches, positions)

    def then(self, other: Places) -> Places:
        """These places followed by others."""
        return Places(*(torch.cat(pair, dim=1) for pair in zip(self, other, strict=True)))

    def empty(self, count: int) -> Places:
        """``count`` places behind these that are not real yet."""
        index = self.index[:, -1:] + torch.arange(1, count + 1, device=self.index.device)
        nothing = torch.zeros_like(index)
        return Places(index, nothing, nothing, nothing)

    def at(self, other: Places) -> Places:
        """These places with ``other`` where its indices say."""
        return Places(*(mine.scatter(1, other.index, new.to(mine.dtype)) for mine, new in zip(self, other, strict=True)))


def visible(query: Places, key: Places) -> Tensor:
    """(B, Q, K) bool: same conversation, not later, and of the shared part or the same branch; each position sees itself.

    The last rule keeps rows that see nothing (padding) free of NaN.
    """
    q, k = Places(*(part[:, :, None] for part in query)), Places(*(part[:, None, :] for part in key))
    together = (q.segments == k.segments) & (k.segments > 0) & ((k.branches == 0) | (k.branches == q.branches))
    return (together & (k.index <= q.index)) | (k.index == q.index)


def load_language(config: LanguageConfig, device: str | torch.device = "cpu", weights: bool = True, folder: str | Path | None = None):
    """The causal language model of ``config``: full architecture, and its weights unless ``weights`` is False or nothing is to be read.

    ``folder`` replaces ``config.source`` where the caller knows a local copy. Raises ValueError where the weights do not fit the
    architecture; a larger vocabulary in the architecture adds rows (the mean of the old ones).
    """
    from transformers import AutoModelForCausalLM

    wanted = hf_config(config.architecture)
    if str(device) == "meta" or not weights or config.source == "random":
        with torch.device(device), given_to_library("model.language.architecture"):
            return AutoModelForCausalLM.from_config(wanted, attn_implementation=attention(wanted), dtype=torch.float32)
    return _from_weights(str(folder or config.source), wanted).to(device)


def hollow_language(config: LanguageConfig, folder: Path) -> tuple[PreTrainedModel, dict[str, Reader]]:
    """The model of ``config`` built under `hollow.without_memory`, and for each of its tensors a function that reads it from ``folder``.

    Where the files have other names, shapes or ties than the model (transformers converts some families while it loads them), the whole
    model with its weights, and no functions. ValueError as of `load_language`.
    """
    wanted = hf_config(config.architecture)
    old = _stored_config(str(folder), wanted).vocab_size
    with without_memory():
        language = load_language(config, weights=False)
    tables = [table.weight for table in (language.get_input_embeddings(), language.get_output_embeddings()) if table is not None]
    parameters = language.named_parameters(remove_duplicate=False)
    grown = {name for name, value in parameters if wanted.vocab_size > old and any(value is table for table in tables)}
    stored, state, readers = files.readers(folder), language.state_dict(), {}
    for names in same_tensor(language):
        found = [stored[name] for name in names if name in stored]
        shape = (old, *state[names[0]].shape[1:]) if names[0] in grown else state[names[0]].shape
        if len(found) != 1 or found[0]().shape != shape:
            logger.info("%s is read by transformers as a whole: it has no tensor %s as this model has it", folder, names[0])
            return load_language(config, folder=folder), {}
        read = functools.partial(_grown, found[0], wanted.vocab_size) if names[0] in grown else found[0]
        readers |= dict.fromkeys(names, read)
    return language, readers


def _grown(read: Reader, size: int) -> Tensor:
    """A table (V, D) in fp32 with rows added up to ``size``, each the mean of the old ones (as `grow_vocabulary`)."""
    table = read().float()
    return torch.cat([table, table.mean(0).expand(size - len(table), -1)])


def hf_config(architecture: Mapping[str, Any]) -> PretrainedConfig:
    """The transformers config of an ``architecture`` mapping; ValueError for a model type or activation it does not have."""
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.activations import ACT2FN

    fields = dict(architecture)
    if "model_type" not in fields:
        raise InputError("language.architecture has no model_type; add the transformers name, e.g. model_type: llama")
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        value = fields.get(name)
        if value is not None and value not in ACT2FN:
            raise InputError(f"language.architecture.{name} {value!r} is not an activation of transformers{nearest(value, ACT2FN)}")
    kind = fields.pop("model_type")
    if kind not in CONFIG_MAPPING:
        raise InputError(f"language.architecture.model_type {kind!r} is no model of transformers{nearest(kind, CONFIG_MAPPING)}")
    with given_to_library("model.language.architecture"):
        return AutoConfig.for_model(kind, **fields)


def attention(config: PretrainedConfig) -> str:
    """``sdpa``, or ``eager`` for families that cap attention scores, which sdpa cannot."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"


def _stored_config(folder: str, wanted: PretrainedConfig) -> PretrainedConfig:
    """The config beside the weights; ValueError where ``wanted`` has other sizes."""
    from transformers import AutoConfig

    stored = AutoConfig.from_pretrained(folder)
    for name in ("model_type", *SIZES):
        here, there = getattr(wanted, name, None), getattr(stored, name, None)
        if here != there:
            raise InputError(f"language.architecture.{name} is {here}, the weights in {folder} have {there}; set it to {there}")
    if wanted.vocab_size < stored.vocab_size:
        raise InputError(
            f"language.architecture.vocab_size {wanted.vocab_size} is smaller than the {stored.vocab_size} of the weights in {folder}; "
            f"use at least {stored.vocab_size}"
        )
    return stored


def _from_weights(folder: str, wanted: PretrainedConfig) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    stored = _stored_config(folder, wanted)
    vocabulary = wanted.vocab_size
    wanted.vocab_size = stored.vocab_size
    language, report = AutoModelForCausalLM.from_pretrained(
        folder, config=wanted, attn_implementation=attention(wanted), dtype=torch.float32, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise InputError(f"weights in {folder} lack {len(missing)} tensors: {', '.join(missing[:8])}")
    if vocabulary > stored.vocab_size:
        grow_vocabulary(language, vocabulary)
    return language


def grow_vocabulary(language: PreTrainedModel, size: int) -> None:
    """Adds rows to the embedding and the head, each the mean of the old rows."""
    old = language.get_input_embeddings().weight.shape[0]
    language.resize_token_embeddings(size, mean_resizing=False)
    tables = (language.get_input_embeddings(), language.get_output_embeddings())
    with torch.no_grad():
        for table in tables:
            table.weight[old:] = table.weight[:old].mean(0)


def decoder_layers(language: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers, whatever the family calls it."""
    count = text_config(language).num_hidden_layers
    for module in language.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise InputError(f"no list of {count} decoder layers found in {type(language).__name__}")


def layer_names(language: PreTrainedModel) -> set[str]:
    """Class names of the decoder layers, of which some families have several kinds."""
    return {type(layer).__name__ for layer in decoder_layers(language)}


def text_config(language: PreTrainedModel) -> PretrainedConfig:
    """The config of the text decoder (some families nest it)."""
    return language.config.get_text_config(decoder=True)


def run(language: PreTrainedModel, embeds: Tensor, query: Places, key: Places | None = None, cache: Cache | None = None) -> Tensor:
    """Hidden states (B, Q, D) after the final norm of embeddings (B, Q, D) at ``query``; ``key`` covers cached positions too."""
    masks = attention_masks(language, query, key or query, embeds.dtype)
    options = {"cache": cache} if cache is not None else {}
    return language.get_decoder()(
        inputs_embeds=embeds, attention_mask=masks, position_ids=query.positions, use_cache=cache is not None, **options
    ).last_hidden_state


def attention_masks(language: PreTrainedModel, query: Places, key: Places, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """(B, 1, Q, K) masks in the form the family wants: one, or one per type of layer where some see a sliding window only."""
    config = text_config(language)
    full = visible(query, key)[:, None]
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise InputError(
            f"language model {config.model_type!r} has layers of type {min(unknown)!r}; only attention layers can be packed and padded"
        )
    window = getattr(config, "sliding_window", None)
    masks = {"full_attention": full}
    if window and kinds != {"full_attention"}:
        near = query.positions[:, :, None] - key.positions[:, None, :] < window
        masks["sliding_attention"] = full & near[:, None]
    if language.config._attn_implementation == "eager":  # adds its mask to the scores
        masks = {name: torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min) for name, mask in masks.items()}
    if "sliding_attention" in kinds:
        return masks
    return masks.get("sliding_attention", masks["full_attention"])


def adjust_logits(language: PreTrainedModel, logits: Tensor) -> Tensor:
    """What some families do to the head's output: Gemma caps it, Cohere and Granite scale it."""
    config = text_config(language)
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits
