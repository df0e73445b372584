"""Run by test_blocks in a process of its own: which blocks of many families FSDP makes units of and recomputes, as JSON.

FSDP of one process shards like that of many: a unit is a unit, whatever the number of ranks.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch.distributed.fsdp import FSDPModule

from mmkit.config import BackendConfig, ConnectorConfig, EncoderConfig, LanguageConfig, TrainConfig, VlmConfig
from mmkit.models.build import build
from mmkit.models.language import decoder_layers
from mmkit.sharding.backend import create
from mmkit.training.loss import LanguageObjective

ENCODER = EncoderConfig(
    name="clip-l-336", side=2, resolution=28, weights="random",
    architecture=dict(hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, patch_size=7),
)  # fmt: skip
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
MORE = {"gemma3_text": {"head_dim": 8}, "glm": {"head_dim": 8}, "mixtral": {"num_local_experts": 2}}


def batch(n: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    """Rows of one picture (four slots) and four words."""
    ids = torch.tensor([[1, *[-200] * 4, *range(5, length)]] * n)
    sizes, real = torch.full((n, 1, 2), 28), torch.ones(n, 1, dtype=torch.bool)
    places = torch.arange(4, length - 1).expand(n, -1)
    images = torch.randn(n, 1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    targets = {"target_positions": places, "targets": ids.gather(1, places + 1)}
    return {"input_ids": ids, "image_sizes": sizes, "image_real": real, "images.0": images, **targets}


def examine(family: str) -> dict:
    """How many decoder layers and encoder blocks there are, how many are FSDP units, and how often each ran for one gradient."""
    backend = create(BackendConfig(kind="torch", strategy="fsdp"), "fp32")
    torch.manual_seed(0)
    architecture = SIZES | MORE.get(family, {}) | {"model_type": family}
    language = LanguageConfig(source="random", tokenizer="bytes", architecture=architecture)
    connector = ConnectorConfig(kind="mlp", depth=2, newline=False)
    model = build(VlmConfig(encoders=(ENCODER,), connector=connector, language=language, image_fit="stretch"))
    model.encoders.requires_grad_(True)
    objective = LanguageObjective(model, 0, backend.checkpoint)
    layers = [*decoder_layers(model.language), *model.encoders[0].trunk.encoder.layers]
    ran = [0] * len(layers)
    for index, layer in enumerate(layers):  # the first part of a layer runs whenever the layer does
        first = next(part for part in layer.modules() if part is not layer and not any(part.children()))
        first.register_forward_hook(lambda *_, index=index: ran.__setitem__(index, ran[index] + 1))
    trained = ("encoders", "connector", "language")
    train = TrainConfig(trainable=trained, precision="fp32", checkpoint_blocks=True)
    wrapped = backend.prepare(objective, lambda named: torch.optim.AdamW(named.values()), train=train, blocks=model.blocks)
    out = wrapped(backend.shard(batch()), mode="loss")
    backend.backward(out["loss_sum"] / 8, last=True)
    norm = backend.update(1.0)
    return {"layers": len(layers), "units": sum(isinstance(layer, FSDPModule) for layer in layers), "ran": ran, "norm": float(norm)}


def main() -> None:
    """Examines the families of the command line."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
    print("BLOCKS " + json.dumps({family: examine(family) for family in sys.argv[2:]}), flush=True)


if __name__ == "__main__":
    main()
