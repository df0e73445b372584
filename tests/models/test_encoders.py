"""Vision encoders: sizes, layers, resizing and weights against arithmetic and the libraries' own outputs."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from mmkit.config import ConfigError, EncoderConfig
from mmkit.models.encoders import (
    ENCODERS,
    build_encoder,
    load_encoder,
    resize_grid,
    resize_positions,
    resolution_of,
    source_readers,
    spec_of,
)
from tests.models.twins import CLIP, DINO


def vit_layer(d: int, mlp: int) -> int:
    """Parameters of a pre-norm transformer layer with biases: two norms, four square projections, two of the MLP."""
    return 4 * d + 4 * (d * d + d) + (d * mlp + mlp) + (mlp * d + d)


def convnext(depths: tuple[int, ...], dims: tuple[int, ...]) -> int:
    """Stem (4x4 convolution, norm), per stage a norm and a 2x2 convolution before it (not the first), blocks of a 7x7 depthwise
    convolution, a norm, two linear layers (4x) and a layer scale."""
    total = 3 * 16 * dims[0] + dims[0] + 2 * dims[0]
    for index, (depth, d) in enumerate(zip(depths, dims, strict=True)):
        total += depth * (49 * d + d + 2 * d + (4 * d * d + 4 * d) + (4 * d * d + d) + d)
        total += 2 * dims[index - 1] + 4 * dims[index - 1] * d + d if index else 0
    return total


COUNTS = {
    # patch 14x14x3 + bias, 27*27 positions, 27 layers, final norm
    "siglip-so400m-384": 588 * 1152 + 1152 + 729 * 1152 + 27 * vit_layer(1152, 4304) + 2 * 1152,
    # class token, patch without bias, 24*24+1 positions, pre-norm, 23 of 24 layers (the last is not read)
    "clip-l-336": 1024 + 588 * 1024 + 577 * 1024 + 2 * 1024 + 23 * vit_layer(1024, 4096),
    # class token, patch, 37*37+1 positions, 40 layers with SwiGLU (hidden 2/3 of 4d = 4096, gate and value in one), final norm
    "dinov2-g-378": 1536 + 588 * 1536 + 1536 + 1370 * 1536 + 2 * 1536
    + 40 * (2 * 2 * 1536 + 4 * (1536 * 1536 + 1536) + 2 * 1536 + (1536 * 8192 + 8192) + (4096 * 1536 + 1536)),
    "convnext-xxl-1024": convnext((3, 4, 30, 3), (384, 768, 1536, 3072)),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_published_encoders_have_their_size_and_grid(name):
    spec = ENCODERS[name]
    encoder = build_encoder(EncoderConfig(name=name, side=24), "meta")
    assert sum(p.numel() for p in encoder.parameters()) == COUNTS[name]
    assert encoder.width == spec.width
    tokens = encoder(torch.zeros(2, 3, spec.resolution, spec.resolution, device="meta"))
    assert tokens.shape == (2, 576, spec.width)
    assert not any(p.requires_grad for p in encoder.parameters())


def test_pad_colours_are_the_released_ones():
    """Section 1.6 of the facts: CLIP's colour for SigLIP and ConvNeXt too, ImageNet's for DINOv2; normalisation is each encoder's own."""
    colours = {name: tuple(int(255 * value) for value in spec.pad_mean) for name, spec in ENCODERS.items()}
    assert colours["siglip-so400m-384"] == colours["clip-l-336"] == colours["convnext-xxl-1024"] == (122, 116, 104)
    assert colours["dinov2-g-378"] == (123, 116, 103)
    assert ENCODERS["siglip-so400m-384"].mean == ENCODERS["siglip-so400m-384"].std == (0.5, 0.5, 0.5)


def test_clip_gives_the_hidden_states_before_its_last_layer():
    from transformers import CLIPVisionConfig, CLIPVisionModel

    settings = {**CLIP.architecture, "image_size": 28, "hidden_act": "quick_gelu"}
    whole = CLIPVisionModel(CLIPVisionConfig(**settings)).eval()
    ours = build_encoder(CLIP)
    ours.trunk.load_state_dict(whole.state_dict(), strict=False)
    images = torch.randn(2, 3, 28, 28)
    expected = whole(images, output_hidden_states=True).hidden_states[-2][:, 1:]
    torch.testing.assert_close(ours(images), expected, atol=0, rtol=0)


def test_dinov2_equals_the_library_when_its_resize_is_chosen_and_differs_a_little_otherwise():
    from dataclasses import replace

    from transformers import Dinov2Config, Dinov2Model

    library = Dinov2Model(Dinov2Config(**DINO.architecture, use_swiglu_ffn=True)).eval()
    outputs = {}
    for name in ("dinov2-g-378-exact-size", "dinov2-g-378"):
        ours = build_encoder(DINO.model_copy(update={"name": name, "side": 4}))
        ours.trunk.load_state_dict(library.state_dict(), strict=False)
        outputs[name] = ours(images := torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1)))
    expected = library(images).last_hidden_state[:, 1:]
    torch.testing.assert_close(outputs["dinov2-g-378-exact-size"], expected, atol=1e-6, rtol=1e-6)
    difference = (outputs["dinov2-g-378"] - expected).abs().mean()
    assert 1e-4 < difference < 0.5 * expected.std()
    assert replace(ENCODERS["dinov2-g-378"], positions="size") == ENCODERS["dinov2-g-378-exact-size"]


def test_position_table_of_the_originals_samples_with_a_tenth_of_a_cell_more():
    """scale_factor (27 + 0.1) / 37 against size 27. By hand, torch maps output i to (i + 0.5) * step - 0.5 with step 37/27.1 and
    37/27: on a table that is linear in x bicubic returns the place itself,
    within 0.05 and on average exactly, away from the border. A random table moves by 0.12 sigma."""
    row = torch.arange(37.0).expand(37, 37)
    table = torch.cat([torch.zeros(1, 1, 1), row.reshape(1, -1, 1)], 1)
    steps = {"scale_factor": 37 / 27.1, "size": 37 / 27}
    for how in steps:
        out = resize_positions(table, 27, how)[0, 1:, 0].view(27, 27)[13, 3:24]
        wrong = {other: (out - torch.tensor([(i + 0.5) * s - 0.5 for i in range(3, 24)])).mean().abs() for other, s in steps.items()}
        assert wrong[how] < 0.01 and max(wrong.values()) > 0.06, (how, wrong)
    grid = torch.randn(1, 8, 37, 37)  # torch's own two-dimensional resize gives the same
    for how, options in (("scale_factor", dict(scale_factor=(27.1 / 37, 27.1 / 37))), ("size", dict(size=(27, 27)))):
        whole = F.interpolate(grid, mode="bicubic", align_corners=False, **options).flatten(2).transpose(1, 2)
        flat = torch.cat([torch.zeros(1, 1, 8), grid.flatten(2).transpose(1, 2)], 1)
        torch.testing.assert_close(resize_positions(flat, 27, how)[:, 1:], whole, atol=1e-5, rtol=1e-5)
    random = torch.randn(1, 1370, 64, generator=torch.Generator().manual_seed(0))
    moved = resize_positions(random, 27, "scale_factor") - resize_positions(random, 27, "size")
    assert moved[:, 1:].abs().mean().item() == pytest.approx(0.12, abs=0.02)
    assert torch.equal(moved[:, 0], torch.zeros_like(moved[:, 0]))
    assert resize_positions(random, 37, "size") is random
    with pytest.raises(ValueError, match="no position resize 'nearest'"):
        resize_positions(random, 27, "nearest")


def test_grids_are_resized_bilinearly_in_fp32_and_left_alone_when_equal():
    grid = torch.randn(1, 2, 27, 27)
    assert resize_grid(grid, 27) is grid
    expected = F.interpolate(grid.bfloat16().float(), (24, 24), mode="bilinear", align_corners=False)
    got = resize_grid(grid.bfloat16(), 24)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected.bfloat16(), atol=0, rtol=0)


def test_a_multi_stage_encoder_joins_resized_stages_from_shallow_to_deep():
    config = EncoderConfig(name="convnext-xxl-1024", side=12, resolution=64, architecture=dict(depths=[1, 1, 1, 1], dims=[4, 6, 8, 10]))
    encoder = build_encoder(config)
    images, parts = torch.randn(1, 3, 64, 64), []
    hidden = encoder.trunk.stem(images)
    for stage in encoder.trunk.stages:
        hidden = stage(hidden)  # sides 16, 8, 4, 2
        parts.append(F.interpolate(hidden, (12, 12), mode="bilinear", align_corners=False))
    expected = torch.cat(parts, 1).permute(0, 2, 3, 1).reshape(1, 144, 28)
    torch.testing.assert_close(encoder(images), expected)
    assert encoder.width == 28


def test_demo_encoders_give_grids_of_pretrained_features():
    for name, width in (("lite0", 40 + 112), ("mobilenet", 32 + 96)):
        config = EncoderConfig(name=name, side=8)
        encoder = load_encoder(build_encoder(config), config)
        tokens = encoder(torch.randn(1, 3, resolution_of(config), resolution_of(config)))
        assert tokens.shape == (1, 64, width) and bool(torch.isfinite(tokens).all())


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("timm:resnet18", 512),
        ("timm:vit_tiny_patch16_224", 192),
        ("timm:swin_tiny_patch4_window7_224", 768),
        ("open_clip:ViT-B-32", 768),
        ("open_clip:ViT-B-16-SigLIP", 768),
        ("open_clip:convnext_base", 1024),
    ],
)
def test_any_library_encoder_works_by_name_and_is_trained_whole(name, width):
    """On the meta device forward gives shapes; every parameter that exists takes part in the output."""
    config = EncoderConfig(name=name, side=7)
    encoder = build_encoder(config, "meta").requires_grad_(True)
    size = resolution_of(config)
    tokens = encoder(torch.zeros(1, 3, size, size, device="meta"))
    assert tokens.shape == (1, 49, width) and encoder.width == width
    tokens.sum().backward()
    assert [key for key, value in encoder.named_parameters() if value.grad is None] == []


def test_hugging_face_encoders_work_from_an_architecture():
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=7, image_size=28)
    for architecture in (dict(model_type="siglip_vision_model", **vision), dict(model_type="clip", vision_config=vision)):
        encoder = build_encoder(EncoderConfig(name="hf:any/name", side=2, architecture=architecture))
        assert encoder(torch.randn(1, 3, 28, 28)).shape == (1, 4, 16)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("clip-l-336", {"hidden_size": 33}), ("dinov2-g-378", {"num_hidden_layers": "x"}), ("convnext-xxl-1024", {"dephts": [1]}),
     ("hf:any/name", {"model_type": "siglip_vision_model", "hidden_size": "x"}), ("open_clip:ViT-B-32", {"layers": "x"})],
)  # fmt: skip
def test_an_architecture_that_a_library_does_not_take_is_told_in_one_line(name, architecture):
    with pytest.raises(ConfigError, match=f"^model.encoders: {name} with architecture .* cannot be built: ") as told:
        build_encoder(EncoderConfig(name=name, side=4, architecture=architecture), "meta")
    assert "\n" not in str(told.value)


def test_unknown_encoders_are_named_with_the_nearest_right_name():
    with pytest.raises(ConfigError, match="no encoder 'clip-l-366'; did you mean 'clip-l-336'"):
        spec_of(EncoderConfig(name="clip-l-366", side=24))
    with pytest.raises(ConfigError, match="timm has no model 'resnet19'; did you mean"):
        spec_of(EncoderConfig(name="timm:resnet19", side=7))
    with pytest.raises(ConfigError, match="open_clip has no model 'ViT-B-33'; did you mean"):
        spec_of(EncoderConfig(name="open_clip:ViT-B-33", side=7))
    with pytest.raises(ConfigError, match="a ModifiedResNet gives no token grid"):
        build_encoder(EncoderConfig(name="open_clip:RN50", side=7), "meta")


def test_a_frozen_encoder_keeps_its_batch_statistics_in_training():
    encoder = build_encoder(EncoderConfig(name="lite0", side=4)).train()
    before = encoder.trunk.bn1.running_mean.clone()
    encoder(torch.randn(2, 3, 64, 64))
    assert torch.equal(before, encoder.trunk.bn1.running_mean)
    encoder.requires_grad_(True).train()
    encoder(torch.randn(2, 3, 64, 64))
    assert not torch.equal(before, encoder.trunk.bn1.running_mean)


def saved_clip(path, change=lambda state: state):
    """A whole CLIP model's file with a vision tower of three layers and a text tower, as on the hub."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    tower = CLIPVisionModel(CLIPVisionConfig(**CLIP.architecture, image_size=28))
    state = {f"vision_model.{name}": tensor for name, tensor in tower.state_dict().items()}
    state |= {"text_model.final_layer_norm.weight": torch.ones(4), "logit_scale": torch.ones(())}
    save_file(change(state), path)
    return tower


def test_weights_are_found_inside_files_that_hold_more(tmp_path):
    tower = saved_clip(tmp_path / "model.safetensors")
    config = CLIP.model_copy(update={"weights": str(tmp_path)})
    encoder = load_encoder(build_encoder(config), config)
    for name, tensor in encoder.trunk.state_dict().items():
        assert torch.equal(tensor, tower.state_dict()[name]), name


def test_missing_unexpected_and_misshapen_encoder_tensors_are_named(tmp_path):
    def broken(state):
        state["vision_model.extra"] = torch.zeros(1)
        del state["vision_model.pre_layrnorm.bias"]
        return state

    saved_clip(tmp_path / "model.safetensors", broken)
    config = CLIP.model_copy(update={"weights": str(tmp_path)})
    with pytest.raises(ValueError, match=r"missing \['pre_layrnorm.bias'\]; unexpected \['extra'\]"):
        load_encoder(build_encoder(config), config)
    saved_clip(tmp_path / "model.safetensors")
    wider = config.model_copy(update={"architecture": CLIP.architecture | {"intermediate_size": 40}})
    with pytest.raises(ValueError, match=r"mlp.fc1.\w+ has shape \(32.*, the model needs \(40"):
        source_readers(build_encoder(wider, "meta"), wider)


def test_an_encoder_that_gives_no_square_grid_says_so():
    encoder = build_encoder(EncoderConfig(name="timm:vit_tiny_patch16_224", side=3))
    encoder.trunk.num_prefix_tokens = 0  # as if the class token were a cell: 197 tokens
    with pytest.raises(ValueError, match="197 tokens an image, which is no square grid; the nearest are 196 and 225"):
        encoder(torch.randn(1, 3, 224, 224))
    assert math.isqrt(197) == 14
