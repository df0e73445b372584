"""A clip run small enough to train in a second: a few shards of coloured pictures with captions, written by the test."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from mmkit.config import RunConfig, TypeAdapter
from mmkit.data.tar_writer import ShardWriter

COLOURS = {
    "red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220),
    "white": (240, 240, 240), "black": (10, 10, 10), "yellow": (230, 220, 30),
}  # fmt: skip
SHAPES = ("wide", "tall", "square", "tiny")
ARCHITECTURE = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def shards(folder: Path, n: int = 48, per_shard: int = 12, broken: int = -1) -> str:
    """``n`` pairs, each caption once as long as there are colours and shapes enough; the picture of number ``broken`` does not open."""
    rng = np.random.default_rng(0)
    with ShardWriter(str(folder), max_samples=per_shard) as writer:
        for i in range(n):
            name, shape = list(COLOURS)[i % 6], SHAPES[i // 6 % 4]
            pixels = np.clip(np.array(COLOURS[name]) + rng.normal(0, 15, (16, 16, 3)), 0, 255).astype(np.uint8)
            pixels[: 4 * SHAPES.index(shape), :4] = 0
            out = io.BytesIO()
            Image.fromarray(pixels).save(out, "png")
            writer.write(f"{i:04d}", {"png": b"no picture" if i == broken else out.getvalue(), "txt": f"a {shape} {name} thing {i}"})
    return str(folder)


def clip_run(folder: Path, data: str, held_out: str = "", **train) -> RunConfig:
    """A pretrain run on the shards in ``data``, validated on those in ``held_out``; ``train`` replaces settings of TrainConfig, and a few
    of the run."""
    top = {name: train.pop(name) for name in ("resume", "name", "backend", "seed") if name in train}
    model = {"kind": "clip", "name": "small", "architecture": ARCHITECTURE, "mean": [0.5] * 3, "std": [0.5] * 3} | train.pop("model", {})
    tree = {
        "preset": "test", "stage": "pretrain", "root": str(folder / "runs"), "model": model,
        "data": {
            "sources": [{"name": "pairs", "format": "webdataset", "path": data}], "augment_scale": [1.0, 1.0],
            "validation": [{"name": "other", "format": "webdataset", "path": held_out}] if held_out else [], "max_bad_share": 0.1,
        },
        "train": {
            "trainable": ["image", "text", "scale"], "precision": "fp32", "global_batch": 12, "device_batch": 12, "steps": 8,
            "optimizer": {"lr": 3e-3, "warmup": 0, "schedule": "constant", "weight_decay": 0.1}, "stability": {"window": 8}, **train,
        },
    }  # fmt: skip
    return TypeAdapter(RunConfig).validate_python(tree | top)
