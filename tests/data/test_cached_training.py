"""Runs with and without cached features: the same to the bit on one thread, within the stated bound on any number."""

import json
import logging
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmkit import config
from mmkit.config import changed
from mmkit.data.features import BOUND, HALF_BOUND
from mmkit.models.build import build, image_transforms
from mmkit.sharding.backend import autocast
from mmkit.training.checkpoint import Checkpoint
from mmkit.training.loop import train
from tests.models import twins
from tests.training.tiny_clip import clip_run
from tests.threads import COUNTS, threads
from tests.training.tiny_run import MODEL, tiny_run

ENCODERS = config.load("8b-debug").model.model_dump(mode="json")["encoders"]
LORA = {"rank": 2, "alpha": 4, "dropout": 0.1, "targets": ["q_proj$", "v_proj$"]}


def outcome(run):
    """(step, loss, gradient norm) of each step, and every trained tensor with its moments."""
    assert train(run).reason == "done"
    rows = [json.loads(line) for line in Path(run.folder, "metrics.jsonl").read_text().splitlines()]
    saved = Checkpoint(str(max(Path(run.folder, "checkpoints").iterdir())))
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows], {name: saved.get(name) for name in saved.names()}


def assert_equal_with_and_without(run, folder, count=1):
    """To the bit on one thread. On more, features may differ by the order of sums: losses and gradients are near."""
    plain = changed(run, name="plain", data__cache_features=False)
    kept = changed(run, name="kept", data__cache_features=True, data__cache_dir=str(folder / "kept"))
    with threads(count):
        rows, tensors = outcome(plain)
        cached_rows, cached_tensors = outcome(kept)
    assert len(list(Path(folder, "kept").rglob("features.0.bin"))) >= 1
    assert (
        len({loss for _, loss, _ in rows}) == len(rows) >= 3
        and cached_tensors.keys() == tensors.keys()
        and tensors
    )
    if count > 1:
        assert np.array(cached_rows) == pytest.approx(
            np.array(rows), rel=1e-3 if run.train.precision == "bf16" else 1e-5
        )
        return
    assert cached_rows == rows
    for name, entry in tensors.items():
        assert all(torch.equal(value, cached_tensors[name][kind]) for kind, value in entry.items()), name


PACKED = {"pack": True, "share_image": True, "max_images": 2, "max_length": 640}


ON_THREADS = [
    *(({}, "fp32", count) for count in COUNTS), ({"share_image": True}, "fp32", 1),
    *((PACKED, precision, count) for precision in ("fp32", "bf16") for count in COUNTS),
]  # fmt: skip


@pytest.mark.parametrize("data, precision, count", ON_THREADS)
def test_two_encoders(tmp_path, data, precision, count):
    model = MODEL | {"encoders": [ENCODERS[0], ENCODERS[3]], "connector": MODEL["connector"] | {"query_sides": [4]}}
    run = tiny_run(tmp_path, model=model, precision=precision, lora=LORA, trainable=["connector"], steps=3)
    settings = {f"data__{name}": value for name, value in data.items()}
    assert_equal_with_and_without(changed(run, **settings), tmp_path, count)


@pytest.mark.parametrize("count", COUNTS)
def test_samplers_inside_the_language_model(tmp_path, count):
    model = MODEL | {"encoders": ENCODERS[:2], "connector": MODEL["connector"] | {"query_sides": [4]}, "samplers": {"start": 0, "stride": 1, "count": 1}}
    assert_equal_with_and_without(tiny_run(tmp_path, model=model, steps=3), tmp_path, count)


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


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("precision, accumulation", [("fp32", 1), ("bf16", 2)])
def test_locked_towers(tmp_path, pairs, caplog, precision, accumulation, count):
    model = twins.lit().model_dump(mode="json")
    run = clip_run(tmp_path, "", model=model, precision=precision, global_batch=4 * accumulation, device_batch=4, steps=3)
    with caplog.at_level(logging.INFO):
        assert_equal_with_and_without(changed(run, data__sources=pairs), tmp_path, count)
    assert "not cropped at random" in caplog.text


def published(preset: str):
    """(pictures to one tensor an encoder, the transforms) of a preset's frozen encoders, or of a locked image tower."""
    torch.manual_seed(0)
    described = twins.lit() if preset == "lit" else config.load(preset, "finetune").model
    model = build(described, weights=preset in ("lit", "tiny")).eval()
    encode = (
        model.encode
        if described.kind == "vlm"
        else lambda images: [model({"image": images[0]}, mode="trunk")["image_features"]]
    )
    return encode, image_transforms(described)


@pytest.mark.parametrize("precision, bound", [("fp32", BOUND), ("bf16", HALF_BOUND)])
@pytest.mark.parametrize("preset", ["lit", "tiny", "8b-debug"])
def test_features_of_any_batch_and_place_on_any_threads_lie_within_the_bound(preset, precision, bound):
    encode, transforms = published(preset)
    noise = np.random.default_rng(0)
    pictures = [
        Image.fromarray(noise.integers(0, 255, (9, 9, 3), dtype=np.uint8)).resize((160, 120))
        for _ in range(16)
    ]
    tensors = [torch.stack([transform(picture) for picture in pictures]) for transform in transforms]
    with torch.no_grad(), autocast(precision, torch.device("cpu")):
        whole = [grid.float() for grid in encode(tensors)]
        most = [grid.abs().max() for grid in whole]
        for count, size in product(COUNTS, (1, 3, 16)):
            with threads(count):
                parts = [
                    encode([one[place : place + size] for one in tensors]) for place in range(0, 16, size)
                ]
            for encoder, grids in enumerate(zip(*parts, strict=True)):
                assert (torch.cat(grids).float() - whole[encoder]).abs().max() <= bound * most[encoder], (
                    count,
                    size,
                    encoder,
                )
