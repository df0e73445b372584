"""A vlm run small enough to train in a second: random weights, pictures and answers written by the test."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pydantic import TypeAdapter

from mmkit.config import LanguageConfig, ModelConfig, RunConfig

ENCODER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LANGUAGE = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MODEL = {
    "kind": "vlm",
    "encoders": [{"name": "clip-l-336", "side": 4, "resolution": 56, "weights": "random", "architecture": ENCODER}],
    "connector": {"kind": "sva", "width": 16, "heads": 2, "depth": 1, "query_sides": [2]},
    "language": {"source": "random", "tokenizer": "bytes", "architecture": LANGUAGE},
}


def llava_file(folder: Path, n: int = 12) -> Path:
    """``n`` conversations with answers of very different length; every third has no picture."""
    rng = np.random.default_rng(0)
    records = []
    for i in range(n):
        question, answer = f"What is number {i}?", "so " * int(rng.integers(1, 9)) + str(i)
        record = {"id": f"r{i}", "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        if i % 3:
            pixels = rng.integers(0, 255, (int(rng.integers(20, 60)), int(rng.integers(20, 60)), 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
            record["image"] = f"{i}.png"
            record["conversations"][0]["value"] = "<image>\n" + question
        records.append(record)
    path = folder / "data.json"
    path.write_text(json.dumps(records), encoding="utf8")
    return path


def sourced(folder: Path, kind: torch.dtype = torch.bfloat16, vocabulary: int = 320, **architecture) -> dict:
    """A model section whose language model (in ``kind``, with ``vocabulary`` rows) and encoder lie in files below ``folder``."""
    from mmkit.models.encoders import build_encoder
    from mmkit.models.language import load_language

    settings = MODEL["language"]["architecture"] | architecture
    torch.manual_seed(7)
    small = LanguageConfig(source="random", architecture=settings | {"vocab_size": vocabulary})
    load_language(small).to(kind).save_pretrained(folder / "language")
    model = json.loads(json.dumps(MODEL))
    model["language"] |= {"source": str(folder / "language"), "architecture": settings}
    encoder = TypeAdapter(ModelConfig).validate_python(MODEL).encoders[0]
    state = {name.removeprefix("trunk."): tensor for name, tensor in build_encoder(encoder).state_dict().items()}
    torch.save(state, folder / "encoder.bin")
    model["encoders"][0]["weights"] = str(folder / "encoder.bin")
    return model


def other_file(folder: Path, n: int) -> Path:
    """``n`` of the conversations in ``folder``, with other questions, from the last on."""
    path = folder / f"other-{n}.json"
    records = json.loads((folder / "data.json").read_text(encoding="utf8"))[::-1][:n]
    for record in records:
        record["conversations"][0]["value"] += " And why?"
    path.write_text(json.dumps(records), encoding="utf8")
    return path


def tiny_run(folder: Path, **train) -> RunConfig:
    """A pretrain run in ``folder``; ``train`` replaces settings of TrainConfig, and ``stage``, ``resume`` and the like of the run.

    ``held_out`` conversations of another file are its validation data; ``pack`` and the like replace settings of DataConfig.
    """
    folder.mkdir(exist_ok=True)
    data = folder / "data.json"
    if not data.exists():
        llava_file(folder)
    top = {name: train.pop(name) for name in ("stage", "resume", "start_from", "name", "model", "backend", "seed", "data") if name in train}
    read = {name: train.pop(name) for name in ("pack", "workers") if name in train}
    if held_out := train.pop("held_out", 0):
        read["validation"] = [{"name": "other", "format": "llava", "path": str(other_file(folder, held_out)), "images": str(folder)}]
    made = {"name": "made", "format": "llava", "path": str(data), "images": str(folder)}
    tree = {
        "preset": "test", "stage": "pretrain", "root": str(folder / "runs"), "model": MODEL,
        "data": {"sources": [made], "max_length": 320, "buckets": [256, 320], **read},
        "train": {
            "trainable": ["connector", "samplers"], "precision": "fp32", "global_batch": 4, "device_batch": 2, "steps": 4,
            "optimizer": {"lr": 1e-3, "warmup": 0, "schedule": "cosine"}, **train,
        },
    }  # fmt: skip
    return TypeAdapter(RunConfig).validate_python(tree | top)
