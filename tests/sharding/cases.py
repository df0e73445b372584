"""Tiny models with everything that can go wrong in them, and their batches: what every backend trains alike.

The multimodal one: two frozen encoders, SVA with samplers between decoder layers, region tokens, text-only rows among image rows,
micro-batches and ranks with very unequal target counts (one has none). The contrastive one: a tiny open_clip model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mmkit.config import (
    IGNORE_INDEX,
    IMAGE_TOKEN_INDEX,
    REGION_TOKEN_INDEX,
    ClipConfig,
    ContrastiveConfig,
    LanguageConfig,
    OptimizerConfig,
    TrainConfig,
    VlmConfig,
)
from mmkit.letterbox import visible_slots

ROWS, T, PLACES, VOCABULARY, SIDE = 8, 32, 16, 64, 2  # rows of one micro-batch over all devices
TARGETS = 8  # tokens that are ever a target: what there is to learn
MAX_NORM = 0.5


class Patches(nn.Module):
    """An encoder: one convolution, `width` channels on a side x side grid."""

    def __init__(self, side: int, width: int):
        super().__init__()
        self.side, self.width = side, width
        self.project = nn.Conv2d(3, width, 8 // side, 8 // side)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(images).flatten(2).transpose(1, 2)  # (n, 3, 8, 8) -> (n, side*side, width)


VLM = VlmConfig.model_validate(
    {
        "encoders": [{"name": "clip-l-336", "side": 4}, {"name": "clip-l-336", "side": 2}],
        "connector": {"width": 16, "heads": 2, "depth": 1, "query_sides": [SIDE]},
        "samplers": {"start": 0, "stride": 1, "count": 2},
        "regions": {"n_points": 12, "n_sub_points": [6, 3], "n_neighbors": [4, 2]},
        "language": LanguageConfig(
            source="random",
            architecture={
                "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
            },
        ).model_dump(),
    }
)  # fmt: skip
CLIP = ClipConfig(
    name="debug",
    architecture={
        "embed_dim": 16,
        "vision_cfg": {"image_size": 16, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8},
        "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 2},
    },
)


@dataclass
class Case:
    """A model wrapped in its objective, its tables, and how its batches are made."""

    objective: nn.Module
    rules: tuple
    blocks: tuple
    train: TrainConfig
    components: tuple
    window: int = 2
    made: dict = field(default_factory=dict)

    def micro_batch(self, index: int) -> dict[str, Tensor]:
        """The whole micro-batch ``index`` of all devices."""
        if index not in self.made:
            self.made[index] = vlm_batch(index) if hasattr(self.objective.model, "language") else clip_batch(index)
        return self.made[index]


def settings(**changes) -> TrainConfig:
    """Adam at a rate that moves these models in a few steps, with decay and clipping."""
    optimizer = OptimizerConfig(lr=5e-3, weight_decay=0.1, max_grad_norm=MAX_NORM)
    return TrainConfig(optimizer=optimizer, **{"precision": "fp32", "global_batch": 2 * ROWS, "device_batch": ROWS} | changes)


def vlm_case(backend, device: str = "cpu", tied: bool = False, **changes) -> Case:
    """Everything but the encoders is trained."""
    from mmkit.models.language import load_language
    from mmkit.models.vlm import COMPONENTS, SHARDING, VisionLanguageModel
    from mmkit.training.loss import LanguageObjective

    torch.manual_seed(0)
    config = VLM.language.model_copy(update={"architecture": VLM.language.architecture | {"tie_word_embeddings": tied}})
    with torch.device(device):
        model = VisionLanguageModel(VLM, load_language(config, device), [Patches(4, 12), Patches(2, 8)])
    for name, p in model.named_parameters():
        if name.endswith(("query", "queries", "newline")) or "up_proj" in name:
            nn.init.normal_(p, std=0.3)
    objective = LanguageObjective(model, chunk=24, checkpoint=backend.checkpoint)
    return Case(objective, SHARDING, model.blocks, settings(**changes), COMPONENTS)


ADDED = [2, 5, VOCABULARY - 1]  # two are targets; three rows divide by no number of processes


def lora_case(backend, **changes) -> Case:
    """A frozen language model under adapters (half of it stored in bf16 where that is the precision), a
    trained connector; of its tied embedding and head the rows `ADDED` train alone."""
    from peft import LoraConfig, inject_adapter_in_model

    from mmkit.models.vocabulary import train_rows_alone

    case = vlm_case(backend, tied=True, **changes)
    language = case.objective.model.language
    language.requires_grad_(False)
    for layer in language.model.layers if case.train.precision == "bf16" else ():
        layer.mlp.to(torch.bfloat16)
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False), language)
    train_rows_alone(case.objective.model, ADDED, lambda name: None)
    return case


def qlora_case(backend, **changes) -> Case:
    """Adapters over 4-bit weights of the language model."""
    from peft import LoraConfig, inject_adapter_in_model

    from mmkit.training.adapters import quantise

    case = vlm_case(backend, **changes)
    language = case.objective.model.language
    language.requires_grad_(False)
    quantise(language, 4, torch.float32, skip=case.objective.model.head)
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False), language)
    return case


def clip_case(backend, **changes) -> Case:
    """Image and text tower, temperature included."""
    from mmkit.models.clip import COMPONENTS, SHARDING, ClipModel
    from mmkit.training.contrastive import ContrastiveObjective

    torch.manual_seed(0)
    objective = ContrastiveObjective(ClipModel(CLIP), backend, ContrastiveConfig())
    return Case(objective, SHARDING, objective.model.blocks, settings(**changes), COMPONENTS)


CASES = {"vlm": vlm_case, "lora": lora_case, "qlora": qlora_case, "clip": clip_case}


def vlm_batch(index: int) -> dict[str, Tensor]:
    """Rows 4-7 are text only in every third micro-batch and without any target in every fourth; row 1 is mostly hidden padding."""
    g = torch.Generator().manual_seed(index)
    slots = SIDE * (SIDE + 1)
    real = torch.ones(ROWS, 1, dtype=torch.bool)
    real[torch.randint(0, ROWS, (1,), generator=g)] = False
    if index % 3 == 1:
        real[ROWS // 2 :] = False
    sizes = torch.tensor([[336, 336], [336, 100], [50, 300], [64, 64]])[torch.randint(0, 4, (ROWS,), generator=g)][:, None]
    sizes = torch.where(real[..., None], sizes, 336)
    ids = torch.randint(1, VOCABULARY, (ROWS, T), generator=g)
    segments = torch.ones(ROWS, T, dtype=torch.long)
    lengths = torch.randint(slots + 6, T + 1, (ROWS,), generator=g)
    ids[:, 1 : 1 + slots] = torch.where(real, IMAGE_TOKEN_INDEX, ids[:, 1 : 1 + slots])
    ids[:, slots + 2] = torch.where(real[:, 0], REGION_TOKEN_INDEX, ids[:, slots + 2])
    segments[:, 1 : 1 + slots] = torch.where(real, visible_slots(sizes, SIDE, True)[:, 0].long(), 1)
    segments[torch.arange(T) >= lengths[:, None]] = 0
    ids[torch.arange(T) >= lengths[:, None]] = 0
    positions = (segments.cumsum(1) - 1).clamp(min=0)
    counts = torch.randint(0, 2, (ROWS,), generator=g) + torch.tensor([0, 0, 8, 0, 1, 0, 0, 6])
    if index % 4 == 2:
        counts[ROWS // 2 :] = 0
    places = (slots + 3 + torch.arange(PLACES)).expand(ROWS, -1).clamp(max=T - 1)
    targets = torch.randint(1, TARGETS, (ROWS, PLACES), generator=g)
    targets[(torch.arange(PLACES) >= counts[:, None]) | (places >= lengths[:, None] - 1)] = IGNORE_INDEX
    return {
        "input_ids": ids, "segments": segments, "positions": positions, "branches": torch.zeros_like(ids),
        "target_positions": places, "targets": targets, "image_sizes": sizes, "image_real": real,
        "images.0": torch.randn(ROWS, 1, 3, 8, 8, generator=g), "images.1": torch.randn(ROWS, 1, 3, 8, 8, generator=g),
        "region_points": torch.rand(ROWS, 1, 12, 2, generator=g), "region_image": torch.zeros(ROWS, 1, dtype=torch.long),
        "region_starts": torch.randint(0, 6, (ROWS, 1, 2), generator=g), "region_real": real.clone(),
    }  # fmt: skip


def clip_batch(index: int) -> dict[str, Tensor]:
    """Random pictures and captions."""
    g = torch.Generator().manual_seed(index)
    text = torch.randint(1, 63, (ROWS, 8), generator=g)
    text[:, -1] = 63
    return {"image": torch.randn(ROWS, 3, 16, 16, generator=g), "text": text}
