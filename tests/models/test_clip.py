"""Contrastive models on open_clip: features, locking, caching, tokenizer, transforms, weights and their activation."""

from __future__ import annotations

import json
import random
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mmkit.config import ClipConfig, ConfigError
from mmkit.models import pretrained
from mmkit.models.build import build, image_transforms, tokenizer
from mmkit.models.clip import architecture_of, load_weights, resolved
from mmkit.models.convert import export, published
from tests.models import twins


def batch(model, side: int = 32) -> dict[str, torch.Tensor]:
    """Three images and texts."""
    texts = tokenizer(model.config)(["a red square", "two blue circles", "nothing"])
    return {"image": torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(0)), "text": texts}


def test_features_are_open_clips_own_and_normalised():
    model = build(twins.clip()).eval()
    inputs = batch(model)
    out = model(inputs)
    expected = torch.nn.functional.normalize(model.clip.encode_text(inputs["text"]), dim=-1)
    torch.testing.assert_close(out["text_features"], expected)
    torch.testing.assert_close(out["image_features"].norm(dim=-1), torch.ones(3))
    assert out["logit_scale"].item() == pytest.approx(1 / 0.07) and out["logit_bias"] is None
    assert set(model({"image": inputs["image"]}, mode="encode")) == {"image_features"}
    with pytest.raises(ValueError, match="no mode 'embed'; modes are loss, encode, trunk"):
        model(inputs, mode="embed")


def test_siglip_starts_with_its_own_scale_and_bias():
    model = build(twins.clip(init_logit_scale=2.302585, init_logit_bias=-10.0))
    out = model(batch(model))
    assert out["logit_scale"].item() == pytest.approx(10, abs=1e-4) and out["logit_bias"].item() == -10


def test_locked_towers_train_their_heads_only_and_stay_in_eval_mode():
    model = build(twins.lit()).train()
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    assert trained == [
        "clip.logit_scale", "clip.visual.head.mlp.fc1.weight", "clip.visual.head.mlp.fc1.bias", "clip.visual.head.mlp.fc2.weight",
        "clip.text.proj.weight",
    ]  # fmt: skip
    before = {name: value.clone() for name, value in model.clip.visual.trunk.state_dict().items()}
    model(batch(model, 64))["image_features"].sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.clip.visual.trunk.state_dict().items())
    model.requires_grad_(True)
    model.lock()
    assert [name for name, value in model.named_parameters() if value.requires_grad] == trained


def test_features_of_locked_trunks_may_be_computed_once():
    model = build(twins.lit()).train()
    assert model.cacheable == ("image", "text")
    inputs = batch(model, 64)
    with torch.no_grad():
        cached = model(inputs, mode="trunk")
    assert {name: tuple(value.shape) for name, value in cached.items()} == {"image_features": (3, 1280), "text_features": (3, 384)}
    fresh, again = model(inputs), model(cached)
    for name in ("image_features", "text_features"):
        torch.testing.assert_close(again[name], fresh[name])
    plain = build(twins.clip())
    assert plain.cacheable == ()
    with pytest.raises(ValueError, match="image tower VisionTransformer has no separate head"):
        plain({"image_features": torch.zeros(1, 32)})


def test_tower_packs_bring_sentences_of_one_meaning_together():
    model = build(twins.lit()).eval()
    words = tokenizer(model.config)(["a small dog", "a little puppy", "an airplane at the gate"])
    with torch.no_grad():
        dog, puppy, plane = torch.nn.functional.normalize(model({"text": words}, mode="trunk")["text_features"], dim=-1)
    assert dog @ puppy > 0.7 and dog @ plane < 0.4


def test_a_tower_pack_for_another_tower_is_refused():
    with pytest.raises(ConfigError, match="'lite0', which fills a timm image tower; model 'twin' has none"):
        build(twins.clip(tower_packs=("lite0",)))
    other = json.loads(json.dumps(twins.lit().architecture))
    other["vision_cfg"]["timm_model_name"] = "resnet18"
    with pytest.raises(ConfigError, match="tower pack 'lite0' does not fit model 'lit': it lacks"):
        build(twins.lit(architecture=other))


def test_patch_dropout_is_for_training_and_can_be_switched_off_for_the_last_steps():
    model = build(twins.clip(patch_dropout=0.5)).train()
    inputs = batch(model)
    assert not torch.equal(model(inputs)["image_features"], model(inputs)["image_features"])
    model.set_patch_dropout(0.0)
    assert torch.equal(model(inputs)["image_features"], model(inputs)["image_features"])
    with pytest.raises(ValueError, match="built without patch dropout and cannot drop 0.5"):
        build(twins.clip()).set_patch_dropout(0.5)


def test_gradients_are_equal_with_recomputed_activations():
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = build(twins.clip())
        model.set_checkpointing(recompute)
        (model(batch(model))["image_features"] ** 3).sum().backward()
        gradients.append(model.clip.visual.conv1.weight.grad)
    torch.testing.assert_close(*gradients)


def test_tokenizer_and_transforms_follow_the_config():
    config = twins.clip(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    assert tokenizer(config)(["a cat", "b"]).shape == (2, 12)
    (evaluate,) = image_transforms(config)
    grey = evaluate(Image.new("RGB", (64, 40), (255, 255, 255)))
    assert grey.shape == (3, 32, 32) and bool((grey == 1).all())
    (train,) = image_transforms(config, train=True, augment_scale=(0.9, 1.0))
    gradient = Image.linear_gradient("L").convert("RGB")
    torch.manual_seed(0)
    first, second = train(gradient), train(gradient)
    torch.manual_seed(0)
    assert torch.equal(train(gradient), first) and not torch.equal(first, second)


def test_coca_gives_caption_logits_beside_its_features():
    towers = twins.clip().architecture
    vision = towers["vision_cfg"] | dict(attentional_pool=True, attn_pooler_heads=2, attn_pooler_queries=8, output_tokens=True)
    decoder = dict(context_length=12, vocab_size=49408, width=32, heads=2, layers=1)
    words = towers["text_cfg"] | dict(embed_cls=True, output_tokens=True)
    coca = towers | dict(embed_dim=32, vision_cfg=vision, text_cfg=words, multimodal_cfg=decoder, custom_text=True)
    model = build(twins.clip(architecture=coca))
    inputs = batch(model)
    out = model(inputs)
    assert out["image_features"].shape == out["text_features"].shape == (3, 32)
    assert out["logits"].shape[-1] == 49408 and out["labels"].shape == out["logits"].shape[:-1]
    torch.testing.assert_close(model(inputs, mode="encode")["text_features"], out["text_features"])


def test_unknown_names_and_settings_are_refused():
    with pytest.raises(ConfigError, match="open_clip has no model 'ViT-L-15' and no `architecture` is given; did you mean 'ViT-L-1"):
        build(ClipConfig(name="ViT-L-15"), "meta")
    with pytest.raises(ConfigError, match="cannot be built: TypeError: .*vision"):
        build(ClipConfig(name="x", architecture=dict(embed_dim=4, vision=dict(), vision_cfg=dict(), text_cfg=dict())), "meta")


def test_the_activation_is_saved_with_the_weights_and_another_is_refused(tmp_path):
    """U58: OpenAI's weights belong to quick GELU; a path must not lose that."""
    quick = twins.clip(architecture=twins.clip().architecture | {"quick_gelu": True})
    model = build(quick).eval()
    folder = pretrained.save_pretrained(model, tmp_path / "any-name", quick)
    again, config = pretrained.from_pretrained(folder)
    inputs = batch(model)
    assert torch.equal(again.eval()(inputs)["image_features"], model(inputs)["image_features"])
    assert config.architecture["quick_gelu"] is True
    with pytest.raises(ConfigError, match="architecture.quick_gelu is False, the weights in .* have True"):
        pretrained.hollow(twins.clip(), folder)
    content = json.loads((folder / "config.json").read_text())
    del content["model"]["architecture"]["quick_gelu"]
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="does not say which activation"):
        pretrained.from_pretrained(folder)


def test_a_pretrained_tag_of_another_activation_is_refused_before_any_download():
    config = ClipConfig(name="ViT-B-32", weights="openai")
    with pytest.raises(ConfigError, match="'openai' was trained with quick_gelu=True, model 'ViT-B-32' has quick_gelu=False"):
        load_weights(build(config, "meta"), "openai")


def test_the_saved_config_is_complete():
    config = resolved(ClipConfig(name="ViT-L-14", weights="laion2b_s32b_b82k"))
    assert config.architecture["vision_cfg"]["layers"] == 24 and config.architecture["quick_gelu"] is False
    assert config.mean == config.std == (0.5, 0.5, 0.5)
    assert architecture_of(ClipConfig(name="ViT-B-16-SigLIP"))["init_logit_bias"] == -10


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_open_clip_training_files_load_with_any_wrapper(tmp_path, prefix):
    model = build(twins.clip())
    state = {prefix + name.removeprefix("clip."): value for name, value in model.state_dict().items()}
    state[prefix + "logit_scale"] = state[prefix + "logit_scale"].reshape(())  # as OpenCLIP holds it
    torch.save({"epoch": 3, "name": "run", "state_dict": state, "optimizer": {"state": {}}}, tmp_path / "epoch_3.pt")
    (tmp_path / "twin.json").write_text(json.dumps(twins.clip().architecture))
    again, _ = published.load(tmp_path / "epoch_3.pt", base=tmp_path / "twin.json")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="has no open_clip_config.json, so its architecture is unknown"):
        published.load(tmp_path / "epoch_3.pt")


def test_what_we_write_open_clip_reads_and_so_do_we(tmp_path):
    import open_clip

    model = build(twins.clip(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))).eval()
    folder = export.write(model, tmp_path / "out", "openclip")
    theirs = open_clip.create_model(f"local-dir:{folder}").eval()
    inputs = batch(model)
    torch.testing.assert_close(theirs.encode_image(inputs["image"], normalize=True), model(inputs)["image_features"])
    again, config = pretrained.from_pretrained(folder)
    assert config.mean == (0.5, 0.5, 0.5)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    state = load_file(folder / "open_clip_model.safetensors")
    assert state["logit_scale"].shape == ()
    state["visual.more"] = state.pop("ln_final.bias")
    save_file(state, folder / "open_clip_model.safetensors")
    with pytest.raises(ValueError, match="2 tensors: missing clip.ln_final.bias; unexpected clip.visual.more"):
        published.load(folder)


LONG = "one two three four five six seven eight nine ten eleven twelve"


def test_captions_longer_than_the_context_lose_words_as_the_config_says():
    whole = tokenizer(twins.clip(context_length=20))([LONG])[0, 1:13].tolist()
    for kind in ("simple", "random", "shuffle"):
        config = twins.clip(context_length=6, token_reduction=kind)
        torch.manual_seed(0)
        random.seed(0)
        found = tokenizer(config)([LONG] * 20)
        assert found.shape == (20, 6) and (found[:, 0] == 49406).all() and (found[:, -1] == 49407).all()
        kept = {tuple(row) for row in found[:, 1:-1].tolist()}
        assert len(kept) > 3
        places = [[whole.index(token) for token in row if token in whole] for row in kept]
        assert all(row == sorted(row) for row in places) == (kind != "shuffle")
        assert all(row[-1] - row[0] == len(row) - 1 for row in places if row) == (kind == "simple")
        assert tokenizer(config)(["short one"]).equal(tokenizer(twins.clip(context_length=6))(["short one"]))
    assert build(twins.clip(context_length=6)).clip.positional_embedding.shape[0] == 6


def test_reductions_that_cannot_work_here_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "nltk", None)
    with pytest.raises(ConfigError, match="'syntax' needs nltk .* use 'simple'"):
        tokenizer(twins.clip(token_reduction="syntax"))
    architecture = twins.clip().architecture
    words = {"hf_tokenizer_name": "pack:minilm"}
    with pytest.raises(ConfigError, match="not for 'pack:minilm'"):
        tokenizer(twins.clip(architecture=architecture | {"text_cfg": architecture["text_cfg"] | words}, token_reduction="random"))


def test_int8_layers_take_the_place_of_the_mlps_linear_layers_alone(monkeypatch):
    import bitsandbytes

    class Int8(torch.nn.Linear):
        pass

    torch.manual_seed(0)
    plain = build(twins.clip())
    with pytest.raises(ConfigError, match="'Nothing': bitsandbytes .* has no such layer"):
        build(twins.clip(int8_linear="Nothing"))
    monkeypatch.setattr(bitsandbytes.nn, "Int8Fake", Int8, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="CUDA devices only"):
        build(twins.clip(int8_linear="Int8Fake"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = build(twins.clip(int8_linear="Int8Fake"))
    replaced = {name for name, layer in model.named_modules() if isinstance(layer, Int8)}
    linear = {name for name, layer in plain.named_modules() if isinstance(layer, torch.nn.Linear)}
    assert replaced and replaced == {name for name in linear if name.endswith((".mlp.c_fc", ".mlp.c_proj"))} != linear
    model.load_state_dict(plain.state_dict())  # the same names and shapes
    assert torch.equal(model(batch(model))["image_features"], plain(batch(plain))["image_features"])
