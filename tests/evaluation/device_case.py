"""Answers, a conversation and scores of three small exports on one kind of backend, as JSON: ``device_case.py KIND FOLDER``."""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from mmkit.config import BackendConfig, load
from mmkit.data.boxes import Box, pixels
from mmkit.data.example import Example, ImageRef, Region, Turn
from mmkit.evaluation.answering import VlmAnswerer
from mmkit.evaluation.chat import open_chat
from mmkit.evaluation.scoring import evaluate_model, opened
from mmkit.evaluation.task import Decode
from mmkit.models.build import build, tokenizer
from mmkit.models.pretrained import save_pretrained
from mmkit.sharding.backend import create

PRESETS = ("8b-debug", "ferret-7b-debug", "clip-vit-l-14-debug")
WORDS = ("what?", "why?", "is it so", "or?", "hm", "no way")


def write(folder: str, preset: str) -> str:
    """An export with random weights; layers are scaled so that answers differ between pictures and questions."""
    config = load(preset, "eval").model
    torch.manual_seed(0)
    model = build(config)
    for name, p in model.named_parameters():
        if p.ndim > 1 and name.startswith("language") and "layers" in name:
            p.data *= 16
    words = tokenizer(config)
    save_pretrained(model, f"{folder}/{preset}", config, words)
    return f"{folder}/{preset}"


def request(number: int, region: bool) -> Example:
    """A question about a picture of its own, or about a box in it."""
    size = (60 + 10 * number, 40)
    noise = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), np.uint8)
    box = (Region("box", Box(3, 4, 20, 25 + number, pixels(*size))),) if region else ()
    text = f"<image>\n{'<region> ' if region else ''}{WORDS[number]}"
    return Example(f"q{number}", (ImageRef(noise, name=f"picture {number}"),), (Turn("user", text),), box)


def scored(kind: str, folder: str) -> dict:
    """Answers of three batches (the last is smaller) with the programs compiled after each, longer answers, a chat, contrastive metrics."""
    backend = create(BackendConfig(kind=kind, xla_devices=1 if kind == "xla" else None), "fp32")
    found: dict = {"device": backend.device.type}
    for preset in PRESETS[:2]:
        model, config, words, transforms = opened(f"{folder}/{preset}", backend)
        begun, row = backend.compiles(), {"answers": [], "programs": []}
        answer = VlmAnswerer(model, config, words, transforms, backend)
        for numbers in ((0, 1), (2, 3), (5,)):
            batch = [request(number, config.regions is not None) for number in numbers]
            row["answers"] += answer(batch, Decode(max_new_tokens=4))
            row["programs"].append(backend.compiles() - begun)
        begun = backend.compiles()
        row["long answer"] = answer(batch, Decode(max_new_tokens=8))[0]
        row["programs of longer answers"] = backend.compiles() - begun
        found[preset] = row
    asked, begun = request(0, region=True), backend.compiles()
    chat = open_chat(model, config, words, transforms, backend, max_new_tokens=5)
    found["chat"], found["programs of turns"], history = [], [], []
    for text in ("What is <region>?", "And?"):  # two prompts of one bucket
        said, history = chat(asked.images[0].data, text, history, regions=asked.regions)
        found["chat"].append(said)
        found["programs of turns"].append(backend.compiles() - begun)
    run = load(PRESETS[2], "eval", {"tasks": ["clip_retrieval", "clip_zero_shot"], "evaluation.limit": 24})
    results = evaluate_model(run, *opened(f"{folder}/{PRESETS[2]}", backend), backend)
    found["clip"] = {result.task: result.metrics for result in results}
    return found


if __name__ == "__main__":
    print(json.dumps(scored(*sys.argv[1:])))
