"""Losses and gradients of packed rows equal those of the same conversations in rows of their own, through whole models."""

import numpy as np
import pytest
import torch

from mmkit import config
from mmkit.config import DataConfig
from mmkit.data.boxes import Box, pixels
from mmkit.data.example import Example, ImageRef, Region, Turn
from mmkit.data.loader import loader
from mmkit.data.mixture import mixture_of
from mmkit.models.build import build, image_transforms, tokenizer
from mmkit.training.loss import LanguageObjective

SIZES = [(40, 40), (64, 24), (20, 60), (50, 30)]


def picture(number: int) -> ImageRef:
    width, height = SIZES[number % len(SIZES)]
    return ImageRef(np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8), name=f"p{number}")


def vqa() -> list[Example]:
    """Seven questions about two pictures, one with two pictures, two without any."""
    out = [
        Example(f"q{k}", (picture(k // 4),), (Turn("user", f"<image>\nwhat is {k * 7}?"), Turn("assistant", "ab" * (k % 3 + 1)))) for k in range(7)
    ]
    out.append(Example("two", (picture(2), picture(3)), (Turn("user", "<image> or <image>?"), Turn("assistant", "both"))))
    chat = (Turn("user", "hi"), Turn("assistant", "yo"), Turn("user", "so?"), Turn("assistant", "no"))
    return [*out, *(Example(f"text{k}", (), chat) for k in range(2))]


def referring() -> list[Example]:
    """Six questions about regions of two pictures."""
    out = []
    for k in range(6):
        ref = picture(k // 3)
        height, width = ref.data.shape[:2]
        frame = pixels(width, height)
        regions = (Region("box", Box(2 + k, 3, 15, 18, frame)), Region("point", Box.point(9, 9 + k, frame)))
        turns = (Turn("user", f"<image>\nis <region> like <region> {k}?"), Turn("assistant", "yes" * (k % 2 + 1)))
        out.append(Example(f"r{k}", (ref,), turns, regions))
    return out


def settings(preset: str, **overrides):
    return config.load(preset, "finetune", {"model.language.architecture.num_hidden_layers": 3} | overrides).model


def loss_and_gradients(objective, batches):
    objective.zero_grad()
    total = sum(objective(batch.tensors)["loss_sum"] for batch in batches)
    n_targets = sum(batch.n_targets for batch in batches)
    (total / n_targets).backward()
    gradients = {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}
    return total.item() / n_targets, gradients, n_targets


def batches(found, model, words, transforms, **data):
    options = {"max_length": 1024, "max_images": 8, "max_regions": 16} | data
    return list(loader(DataConfig(**options), model, words, transforms, train=False, device_batch=3, source=mixture_of(found)))


@pytest.mark.parametrize(
    "preset, overrides, found",
    [
        ("8b-debug", {"model.samplers": "{start: 0, stride: 1, count: 2}"}, vqa()),
        ("8b-debug", {"model.samplers": "{start: 0, stride: 2, count: 2}", "model.crop_padding": True}, vqa()),
        ("llava-7b-debug", {}, vqa()),
        ("ferret-7b-debug", {}, referring()),
    ],
    ids=["samplers", "samplers, cropped padding", "mlp connector", "regions"],
)
def test_packed_losses_and_gradients_equal_unpacked_ones(preset, overrides, found):
    model_config = settings(preset, **overrides)
    torch.manual_seed(0)
    objective = LanguageObjective(build(model_config))
    objective.requires_grad_(True)
    words, transforms = tokenizer(model_config), image_transforms(model_config)
    loss, gradients, count = loss_and_gradients(objective, batches(found, model_config, words, transforms))
    for data in ({"pack": True}, {"share_image": True}, {"pack": True, "share_image": True}):
        packed = batches(found, model_config, words, transforms, **data)
        other, other_gradients, other_count = loss_and_gradients(objective, packed)
        assert other_count == count and other == pytest.approx(loss, abs=1e-5)
        assert other_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(other_gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert sum(len(row.split(",")) > 1 for batch in packed for row in batch.keys) >= 1
