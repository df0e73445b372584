"""Whole runs with and without cached features: the same losses, gradient norms and weights, to the last bit."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmkit import config
from mmkit.config import changed
from mmkit.training.checkpoint import Checkpoint
from mmkit.training.loop import train
from tests.models import twins
from tests.training.tiny_clip import clip_run
from tests.training.tiny_run import MODEL, tiny_run

ENCODERS = config.load("8b-debug").model.model_dump(mode="json")["encoders"]
LORA = {"rank": 2, "alpha": 4, "dropout": 0.1, "targets": ["q_proj$", "v_proj$"]}


def outcome(run):
    """(step, loss, gradient norm) of each step, and every trained tensor with its moments."""
    assert train(run).reason == "done"
    rows = [json.loads(line) for line in Path(run.folder, "metrics.jsonl").read_text().splitlines()]
    saved = Checkpoint(str(max(Path(run.folder, "checkpoints").iterdir())))
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows], {name: saved.get(name) for name in saved.names()}


def assert_equal_with_and_without(run, folder):
    plain = changed(run, name="plain", data__cache_features=False)
    kept = changed(run, name="kept", data__cache_features=True, data__cache_dir=str(folder / "kept"))
    rows, tensors = outcome(plain)
    cached_rows, cached_tensors = outcome(kept)
    assert len(list(Path(folder, "kept").rglob("features.0.bin"))) >= 1
    assert cached_rows == rows and len({loss for _, loss, _ in rows}) == len(rows) >= 3
    assert cached_tensors.keys() == tensors.keys() and tensors
    for name, entry in tensors.items():
        assert all(torch.equal(value, cached_tensors[name][kind]) for kind, value in entry.items()), name


PACKED = {"pack": True, "share_image": True, "max_images": 2, "max_length": 640}


@pytest.mark.parametrize("data, precision", [({}, "fp32"), ({"share_image": True}, "fp32"), (PACKED, "fp32"), (PACKED, "bf16")])
def test_two_encoders(tmp_path, data, precision):
    model = MODEL | {"encoders": [ENCODERS[0], ENCODERS[3]], "connector": MODEL["connector"] | {"query_sides": [4]}}
    run = tiny_run(tmp_path, model=model, precision=precision, lora=LORA, trainable=["connector"], steps=3)
    settings = {f"data__{name}": value for name, value in data.items()}
    assert_equal_with_and_without(changed(run, **settings), tmp_path)


def test_samplers_inside_the_language_model(tmp_path):
    model = MODEL | {"encoders": ENCODERS[:2], "connector": MODEL["connector"] | {"query_sides": [4]}, "samplers": {"start": 0, "stride": 1, "count": 1}}
    assert_equal_with_and_without(tiny_run(tmp_path, model=model, steps=3), tmp_path)


@pytest.fixture
def pairs(tmp_path):
    """Square pictures with captions: at scale 1 a training crop of one is the whole of it."""
    rows = ["filepath,title"]
    for k in range(20):
        pixels = np.random.default_rng(k).integers(0, 255, (70 + k, 70 + k, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{k}.png")
        rows.append(f"{k}.png,picture number {k}")
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    return [{"name": "pairs", "format": "csv", "path": str(tmp_path / "pairs.csv")}]


@pytest.mark.parametrize("precision, accumulation", [("fp32", 1), ("bf16", 2)])
def test_locked_towers(tmp_path, pairs, caplog, precision, accumulation):
    model = twins.lit().model_dump(mode="json")
    run = clip_run(tmp_path, "", model=model, precision=precision, global_batch=4 * accumulation, device_batch=4, steps=3)
    with caplog.at_level(logging.INFO):
        assert_equal_with_and_without(changed(run, data__sources=pairs), tmp_path)
    assert "not cropped at random" in caplog.text
