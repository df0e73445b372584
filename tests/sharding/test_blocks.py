"""Every block of every family is an FSDP unit and is recomputed; where there is none, or it would change numbers, that is said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mmkit.config import BackendConfig, ConfigError, TrainConfig
from mmkit.models.build import build
from mmkit.models.encoders import block_names
from mmkit.sharding.backend import create
from mmkit.sharding.environment import free_port
from tests.models import twins

FAMILIES = (
    "llama", "granite", "cohere", "olmo2", "smollm3", "starcoder2", "glm", "mixtral", "gpt_neox", "phi", "phi3", "qwen2",
    "qwen3", "mistral", "gemma", "gemma2", "gemma3_text",
)  # fmt: skip


@pytest.fixture(scope="module")
def examined() -> dict:
    """What happened in one child for all families: joining processes is left to it."""
    command = [sys.executable, str(Path(__file__).with_name("block_units.py")), str(free_port()), *FAMILIES]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    found = re.search(r"BLOCKS (\{.*\})", done.stdout)
    assert found, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(found[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_decoder_layer_and_encoder_block_is_a_unit_and_is_recomputed(examined, family):
    found = examined[family]
    assert found["layers"] == 3 + 2 and found["units"] == found["layers"], "three decoder layers, two of the encoder's that are read"
    assert found["ran"] == [2] * found["layers"] and found["norm"] > 0


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (twins.cambrian(), {"TokenSampler", "LlamaDecoderLayer", "CLIPEncoderLayer", "Dinov2Layer"}),
        (twins.clip(), {"ResidualAttentionBlock"}),
        (twins.lit(), {"BertLayer", "InvertedResidual"}),
    ],
)
def test_towers_of_every_library_tell_their_blocks(config, wanted):
    assert set(build(config, device="meta").blocks) == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("vit_tiny_patch16_224", "Block"),
        ("convnext_atto", "ConvNeXtBlock"),
        ("eva02_tiny_patch14_224", "EvaBlock"),
        ("swin_tiny_patch4_window7_224", "SwinTransformerBlock"),
    ],
)
def test_inner_blocks_are_taken_before_the_stages_around_them(name, wanted):
    import timm

    with torch.device("meta"):
        tower = timm.create_model(name, pretrained=False)
    assert block_names(tower) == {wanted}


def test_adapters_on_linear_layers_are_no_blocks():
    from peft import LoraConfig, inject_adapter_in_model

    model = build(twins.clip())
    before = model.blocks
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["c_fc", "c_proj"]), model)
    assert model.blocks == before


class Block(nn.Module):
    """A convolution with a batch norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x):
        """x and its normalised convolution."""
        return x + self.norm(self.conv(x))


@pytest.mark.parametrize(
    ("module", "names", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2)), (), "recomputes block by block, but Sequential has no such block .*turn it off"),
        (nn.Sequential(Block(), Block()), ("Block",), "a trained Block has batch norms.*set checkpoint_blocks false"),
    ],
)
def test_recomputation_that_would_do_nothing_or_change_numbers_is_refused(module, names, message):
    backend = create(BackendConfig(), "fp32")
    with pytest.raises(ConfigError, match=message):
        backend.prepare(module, None, train=TrainConfig(precision="fp32", checkpoint_blocks=True), blocks=names, prefix="")


def test_batch_norms_of_a_frozen_tower_are_no_reason_to_refuse():
    module = nn.Sequential(Block(), Block()).requires_grad_(False)
    backend = create(BackendConfig(), "fp32")
    backend.prepare(module, None, train=TrainConfig(precision="fp32", checkpoint_blocks=True), blocks=("Block",), prefix="")
    backend.clear()
