"""The whole multimodal model: vision encoders -> connector -> any causal language model, on one device and with static shapes.

Image slots are found in ``input_ids``: the r-th -200 of a row is the r-th slot of the row's images that is present. All slots of
an image may be in the sequence, the padded ones hidden from attention (fixed shapes), or only the visible ones (cropped): both
run through the same lines and give the same text logits. Samplers between decoder layers (Cambrian-1 section 3) are forward hooks
on the layers of an unchanged Hugging Face model.

Alphabet: B rows, I images a row, E encoders, N slots an image, S slots a row, T positions, R regions, D width, q grid side.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from mmkit.config import IMAGE_TOKEN_INDEX, REGION_TOKEN_INDEX, VlmConfig
from mmkit.errors import InputError
from mmkit.letterbox import visible_slots
from mmkit.models.connectors import LAYERS, TokenSampler, VisionMemory, build_connector, check_features, each_cell, match_embeddings
from mmkit.models.encoders import block_names
from mmkit.models.language import Places, adjust_logits, decoder_layers, layer_names, run, text_config
from mmkit.models.regions import build_regions, rows_at

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


class Vision(NamedTuple):
    """What in-LLM samplers need of one forward: where the grid cells are in the sequence, and what they may look at."""

    cells: Tensor  # (B, I*q*q) position of each cell, T where it has none
    memory: VisionMemory


class VisionLanguageModel(nn.Module):
    """``forward(batch)`` gives hidden states after the final norm; ``head`` turns those that predict something into logits.

    A batch is a dict of tensors: input_ids (B, T) with -200 at image slots and -300 at region tokens, segments, branches and
    positions (B, T), image_sizes (B, I, 2) original (width, height), image_real (B, I), and ``images.{e}`` (B, I, 3, h, w) or
    ``features.{e}`` (B, I, side*side, C) for each encoder e. With regions also region_points (B, R, P, 2), region_image and
    region_real (B, R), and region_starts (B, R, stages) or region_point_real (B, R, P).
    """

    def __init__(self, config: VlmConfig, language: PreTrainedModel, encoders: Sequence[nn.Module], table: Tensor | None = None):
        super().__init__()
        _check_parts(config, language, encoders)
        self.config = config
        self.widths = [encoder.width for encoder in encoders]
        self.sides = [encoder.side for encoder in encoders]
        d_language = text_config(language).hidden_size
        self.encoders = nn.ModuleList(encoders)
        self.encoders.requires_grad_(False)
        self.connector = build_connector(config.connector, self.widths, self.sides, d_language)
        if config.connector.match_embeddings:
            table = language.get_input_embeddings().weight if table is None else table
            match_embeddings(self.connector, self.widths, self.sides, table)
        self.samplers = nn.ModuleList()
        self.regions = build_regions(config.regions, self.widths, self.sides, d_language) if config.regions else None
        self.language = language
        self._vision: Vision | None = None
        if config.samplers:
            self._attach_samplers(d_language)

    def _attach_samplers(self, d_language: int) -> None:
        samplers, connector = self.config.samplers, self.config.connector
        windows = [side // self.config.grid_side for side in self.sides]
        layers = decoder_layers(self.language)
        for k in range(samplers.count):
            self.samplers.append(TokenSampler(d_language, connector.width, windows, 1, connector.heads, LAYERS[connector.layer]))
            layers[samplers.start + k * samplers.stride].register_forward_hook(functools.partial(self._after_layer, k))

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_vision": None}  # tensors of the last forward are no part of a copy

    @property
    def head(self) -> nn.Module:
        """The module from hidden states to vocabulary; call it, never its weight (sharded weights are whole only inside it)."""
        return self.language.get_output_embeddings()

    @property
    def blocks(self) -> tuple[str, ...]:
        """Class names of what backends shard and recompute one by one: decoder layers, samplers, blocks of the encoders."""
        return tuple(sorted({TokenSampler.__name__, *layer_names(self.language), *block_names(self.encoders)}))

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V), with what the family does to the head's output."""
        return adjust_logits(self.language, self.head(hidden))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Hidden states (B, T, D) after the final norm."""
        embeds, vision = self.embed(batch)
        return self.run(embeds, self.places(batch), vision=vision)

    def places(self, batch: Mapping[str, Tensor]) -> Places:
        """Where the batch's positions are. Without ``segments``, ``attention_mask`` (or nothing) says what is real, less hidden slots."""
        if "segments" in batch:
            return Places.of(batch)
        ids, sizes = batch["input_ids"], batch["image_sizes"]
        slots = match(ids == IMAGE_TOKEN_INDEX, self.present(sizes, batch["image_real"]))
        shown = shown_slots(self.config, sizes).flatten(1)
        real = batch.get("attention_mask", torch.ones_like(ids)).long()
        hide = torch.zeros_like(real[..., None])
        real = real * (1 - put(hide, slots, (~shown).long()[..., None])[..., 0])
        return Places.of({**batch, "attention_mask": real})

    def run(
        self, embeds: Tensor, query: Places, key: Places | None = None, cache: Cache | None = None, vision: Vision | None = None
    ) -> Tensor:
        """Hidden states (B, Q, D) of embeddings; ``vision`` is given where the images' slots are among them (never in decode steps)."""
        self._vision = vision
        hidden = run(self.language, embeds, query, key, cache)
        if not torch.is_grad_enabled():  # else kept: a checkpointed layer runs its hook again in backward
            self._vision = None
        return hidden

    def embed(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Vision | None]:
        """Embeddings (B, T, D) with image and region tokens in place, and what in-LLM samplers need (None without any)."""
        ids, sizes = batch["input_ids"], batch["image_sizes"]
        embeds = self.language.get_input_embeddings()(ids.clamp(min=0))
        features = self.features(batch)
        bordered = sizes if self.config.image_fit == "pad" else torch.ones_like(sizes)  # other fits leave no border to mask
        out = self.connector(features, bordered.flatten(0, 1))
        n = sizes.shape[1] * out.tokens.shape[1]
        slots = match(ids == IMAGE_TOKEN_INDEX, self.present(sizes, batch["image_real"]))  # (B, I*N)
        embeds = put(embeds, slots, out.tokens.reshape(-1, n, out.tokens.shape[-1]))
        if self.regions is not None:
            embeds = self._put_regions(embeds, batch, features)
        if not self.samplers:
            return embeds, None
        q = self.config.grid_side
        cells = slots.unflatten(1, (-1, q, out.tokens.shape[1] // q))[..., :q].flatten(1)  # without newlines
        return embeds, Vision(cells, out.memory)

    def features(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Encoder grids (B*I, side*side, C) of the batch's images, or its cached ``features.{e}``."""
        if "features.0" in batch:
            found = [batch[f"features.{e}"].flatten(0, 1) for e in range(_count(batch, "features"))]
        else:
            found = self.encode([batch[f"images.{e}"].flatten(0, 1) for e in range(_count(batch, "images"))])
        check_features(found, self.widths, self.sides)
        dtype = next(self.connector.parameters(), found[0]).dtype
        return [grid.to(dtype) for grid in found]

    def encode(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Per encoder (n, 3, h, w) -> (n, side*side, C); without a graph where the encoder is frozen."""
        if len(images) != len(self.encoders):
            wanted = len(self.encoders)
            raise InputError(f"{len(images)} image tensors for {wanted} encoders; give images.0 to images.{wanted - 1}")
        out = []
        for encoder, pixels in zip(self.encoders, images, strict=True):
            trained = any(parameter.requires_grad for parameter in encoder.parameters())
            with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
                out.append(encoder(pixels))
        return out

    def present(self, sizes: Tensor, real: Tensor) -> Tensor:
        """(B, I, 2), (B, I) -> (B, I*N) bool: slots that the sequence has."""
        shown = shown_slots(self.config, sizes)
        there = shown if self.config.crop_padding else torch.ones_like(shown)
        return (there & real.bool()[..., None]).flatten(1)

    def _put_regions(self, embeds: Tensor, batch: Mapping[str, Tensor], features: Sequence[Tensor]) -> Tensor:
        config = self.config.regions
        wanted = "region_starts" if config.kind == "geo" else "region_point_real"
        if missing := [name for name in ("region_points", "region_image", "region_real", wanted) if name not in batch]:
            raise InputError(f"the model has regions but the batch has no {', '.join(missing)}; set data.max_regions to at least 1")
        grid = features[config.encoder].unflatten(0, batch["image_real"].shape).flatten(1, 2)  # (B, I*side*side, C)
        tokens = self.regions(grid, batch["region_points"], batch["region_image"], batch[wanted])
        places = match(batch["input_ids"] == REGION_TOKEN_INDEX, batch["region_real"].bool())
        return put(embeds, places, tokens)

    def _after_layer(self, k: int, layer: nn.Module, args: tuple, out):
        """Hook: after its decoder layer, sampler k refines the hidden states of all grid cells."""
        if self._vision is None:
            return None
        cells, memory = self._vision
        hidden = out[0] if isinstance(out, tuple) else out
        x = take(hidden, cells)  # (B, I*q*q, D)
        context = each_cell(memory.context, self.config.grid_side)
        new = self.samplers[k](x.reshape(-1, 1, x.shape[-1]), context, memory.mask, *memory.windows)
        hidden = put(hidden, cells, new.reshape(x.shape))
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden


def match(marks: Tensor, present: Tensor) -> Tensor:
    """Pairs the r-th mark of a row with its r-th present entry: marks (B, T), present (B, S) bool -> position (B, S), T where none."""
    last = marks.shape[1]
    place = torch.arange(last, device=marks.device).expand_as(marks)
    rank = torch.where(marks, marks.long().cumsum(1) - 1, last)
    found = torch.full_like(marks[:, :1], 0, dtype=torch.long).expand(-1, last + 1) + last  # (B, T + 1), all T
    found = found.scatter(1, rank, place)[:, :last]  # entry T took every position without a mark
    found = torch.cat([found, torch.full_like(found[:, :1], last)], dim=1)
    wanted = (present.long().cumsum(1) - 1).clamp(0, last)
    return torch.where(present, found.gather(1, wanted), last)


def take(x: Tensor, index: Tensor) -> Tensor:
    """x (B, T, D), index (B, K) in 0..T -> (B, K, D); zeros where the index is T."""
    return rows_at(torch.cat([x, torch.zeros_like(x[:, :1])], dim=1), index)


def put(x: Tensor, index: Tensor, new: Tensor) -> Tensor:
    """x (B, T, D) with new (B, K, D) at index (B, K) in 0..T; what has index T is dropped and gets a zero gradient."""
    padded = torch.cat([x, torch.zeros_like(x[:, :1])], dim=1)
    return padded.scatter(1, index[..., None].expand(-1, -1, x.shape[-1]), new.to(x.dtype))[:, :-1]


def shown_slots(config: VlmConfig, sizes: Tensor) -> Tensor:
    """(..., 2) sizes -> (..., N) bool: slots that are not border. Only letter-boxed pictures have one, and LLaVA keeps its 576 tokens all."""
    bordered = config.image_fit == "pad" and (config.connector.newline or config.crop_padding)
    return visible_slots(sizes if bordered else torch.ones_like(sizes), config.grid_side, config.connector.newline)


def check_batch(config: VlmConfig, batch: Mapping[str, Tensor]) -> None:
    """ValueError where image slots or region tokens of a row do not fit its images and regions; reads values, so not for each step."""
    ids, sizes, real = batch["input_ids"], batch["image_sizes"], batch["image_real"].bool()
    shown = shown_slots(config, sizes)
    there = shown if config.crop_padding else torch.ones_like(shown)
    _same_counts((ids == IMAGE_TOKEN_INDEX).sum(1), (there & real[..., None]).sum((1, 2)), "image slots (-200)", "the row's images need")
    regions = batch["region_real"].sum(1) if config.regions else torch.zeros(len(ids), dtype=torch.long)
    _same_counts((ids == REGION_TOKEN_INDEX).sum(1), regions, "region tokens (-300)", "the row's regions need")


def _same_counts(found: Tensor, needed: Tensor, what: str, why: str) -> None:
    for row, (f, n) in enumerate(zip(found.tolist(), needed.tolist(), strict=True)):
        if f != n:
            raise InputError(f"row {row} has {f} {what}, {why} {n}; crop_padding and grid must be those the batch was made with")


def _count(batch: Mapping[str, Tensor], stem: str) -> int:
    return sum(name.startswith(stem + ".") for name in batch)


def _check_parts(config: VlmConfig, language: PreTrainedModel, encoders: Sequence[nn.Module]) -> None:
    if len(encoders) != len(config.encoders):
        raise InputError(f"config.encoders lists {len(config.encoders)} encoders, {len(encoders)} were given")
    for index, (encoder, wanted) in enumerate(zip(encoders, config.encoders)):
        if encoder.side != wanted.side:
            side = encoder.side
            raise InputError(f"encoder {index} ({wanted.name}) has a {side}x{side} grid, the config says side {wanted.side}")
    layers = text_config(language).num_hidden_layers
    samplers = config.samplers
    if samplers and (last := samplers.start + (samplers.count - 1) * samplers.stride) >= layers:
        raise InputError(
            f"the last in-LLM sampler would follow layer {last}, the language model has layers 0 to {layers - 1}; use fewer samplers"
        )


SHARDING = (
    (r".*\.(o_proj|down_proj|attention\.out)\.weight", (None, "fsdp")),
    (r"connector\.queries", ("fsdp", None)),
    (r".*\.weight", ("fsdp", None)),
)
COMPONENTS = (
    (r"encoders\..*", "encoders"),
    (r"connector\.(queries|groups\..*)", "samplers"),  # what Cambrian's mm_vision_sampler_lr covers: before and inside the language model
    (r"samplers\..*", "samplers"),
    (r"connector\..*", "connector"),
    (r"regions\..*", "regions"),
    (r"language\..*", "language"),
)
