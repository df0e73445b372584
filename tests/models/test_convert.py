"""Published checkpoints: configs, names, kinds of files, and every tensor back equal after a round trip."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmkit.config import ConfigError, load
from mmkit.models import pretrained
from mmkit.models.build import build
from mmkit.models.convert import cambrian, commands, export, ferret, llava, names, published
from mmkit.models.convert.config import ENCODER_NAMES, original_config, system_of, vlm_config
from mmkit.models.hollow import cast_at_use
from tests.models import twins

TWINS = {
    "cambrian": lambda: twins.cambrian(),
    "cambrian-phi3": lambda: twins.cambrian(language=twins.language(model_type="phi3")),
    "cambrian-mlp": lambda: twins.cambrian(
        encoders=(twins.CLIP,), connector=twins.ConnectorConfig(kind="mlp", depth=2, newline=True), samplers=None
    ),
    "ferret": lambda: twins.ferret(),
    "ferret-mean": lambda: twins.ferret("mean"),
    "llava": lambda: twins.llava(),
}


def without_encoders(state) -> dict[str, torch.Tensor]:
    """What the originals publish."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("encoders.")}


def same(model, other) -> bool:
    """Equal tensors, encoders included."""
    one, two = model.state_dict(), other.state_dict()
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.fixture
def release(tmp_path):
    """(model, folder in the published layout) of a twin."""

    def make(twin: str, kind: str | None = None):
        model = build(TWINS[twin]())
        return model, export.write(model, tmp_path / f"{twin}-release", kind or twin.split("-")[0])

    return make


# ---------------------------------------------------------------- config


@pytest.mark.parametrize("preset", ["8b", "13b", "34b", "phi3-3b", "ferret-7b", "ferret-13b", "llava-7b", "llava-13b"])
def test_a_published_config_gives_our_preset(preset):
    wanted = load(preset, "eval").model
    system = commands.system_of_config(wanted)
    original = original_config(wanted, system)
    assert "mmkit" not in original and system_of(original) == system
    found = vlm_config(original)
    exact = {"hidden_act": "silu", "tie_word_embeddings": False} | dict(wanted.language.architecture)
    assert found.language.architecture == exact
    assert found.model_copy(update={"language": wanted.language}) == wanted
    assert (found.language.source, found.language.stop_tokens) == (wanted.language.source, wanted.language.stop_tokens)


def test_the_8b_config_with_its_odd_model_type_and_leftovers_is_read():
    """Fields as in the hub file (facts, 1.7): model_type of LLaVA, duplicates, fields that mean nothing here."""
    original = dict(
        architectures=["CambrianLlamaForCausalLM"], model_type="llava_llama", hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=None,
        max_position_embeddings=8192, hidden_act="silu", bos_token_id=128000, eos_token_id=128001, tie_word_embeddings=False,
        connector_depth=3, connector_only=False, image_aspect_ratio="pad", image_position=91, image_token_len=576, mm_projector_type="sva",
        mm_patch_merge_type="flat", spmd_fsdp_sharding=None, mm_vision_select_layer=-2, num_query_group=1, query_num_list=[576],
        vision_hidden_size=1024, num_of_vision_sampler_layers=10, start_of_vision_sampler_layers=0, stride_of_vision_sampler_layers=3,
        mm_vision_tower_aux_list=list(ENCODER_NAMES), mm_vision_tower_aux_token_len_list=[576, 576, 576, 9216],
        vision_tower_aux_token_len_list=[576, 576, 576, 9216], tokenizer_padding_side="right", mm_projector_lr=None,
    )  # fmt: skip
    wanted = load("8b", "eval").model
    found = vlm_config(original)
    assert found.model_copy(update={"language": wanted.language}) == wanted
    assert found.template == "llama_3" and found.language.stop_tokens == ("<|eot_id|>",)
    older = {key.removeprefix("mm_") if "tower_aux" in key else key: value for key, value in original.items()}
    assert vlm_config(older) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(mm_vision_tower_aux_list=["siglip/CLIP-ViT-SO400M-14-385"] * 4), "did you mean 'siglip/CLIP-ViT"),
        (dict(mm_vision_tower_aux_token_len_list=[576, 577, 576, 9216]), "token count of openai/clip.* is 577, .* the nearest are 576"),
        (dict(mm_vision_tower_aux_token_len_list=[576]), "names 4 vision towers but 1 token counts"),
        (dict(mm_projector_type="resampler"), "mm_projector_type 'resampler' of config.json is not known"),
        (dict(model_type="cambrian_bert"), "model_type 'cambrian_bert' of config.json is not known"),
        (dict(mm_vision_select_layer=-1), "mm_vision_select_layer is -1 in config.json, encoder clip-l-336 reads layer -2"),
    ],
)
def test_a_config_we_cannot_follow_names_the_field_and_its_value(change, message):
    with pytest.raises(ConfigError, match=message):
        vlm_config(original_config(load("8b", "eval").model, "cambrian") | change)


def test_a_config_of_another_system_is_refused():
    with pytest.raises(ConfigError, match="model_type 'bert'. is no Cambrian, Ferret or LLaVA model"):
        system_of({"model_type": "bert"})
    with pytest.raises(ConfigError, match="a transformers-native conversion"):
        system_of({"model_type": "llava", "text_config": {}})


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("twin", TWINS)
def test_written_and_read_again_every_tensor_is_equal_under_original_names(release, twin):
    model, folder = release(twin)
    again, config = published.load(folder)
    assert same(model, again) and config == model.config
    state = model.state_dict()
    for original, tensor in load_file(folder / "model.safetensors").items():
        if "vision_tower" not in original:
            assert torch.equal(state[names.ours(original)], tensor), original
    assert folder.rename(folder.parent / "x").is_dir()  # the name of the folder says nothing (U16)
    assert same(model, pretrained.from_pretrained(folder.parent / "x")[0])


@pytest.mark.parametrize("twin", ["cambrian", "ferret"])
def test_for_scoring_matrices_are_read_in_half_precision_and_the_rest_in_full(release, twin):
    model, folder = release(twin)
    halved, _ = pretrained.from_pretrained(folder, half=torch.bfloat16)
    state, kinds = halved.state_dict(), {id(p) for p in cast_at_use(halved)}
    assert all(torch.equal(tensor.to(state[name].dtype), state[name]) for name, tensor in model.state_dict().items())
    in_half = {name for name, p in halved.named_parameters() if p.dtype == torch.bfloat16}
    assert in_half == {name for name, p in halved.named_parameters() if id(p) in kinds} and "language.lm_head.weight" in in_half


def test_original_names_of_a_cambrian_model(release):
    _, folder = release("cambrian")
    found = set(load_file(folder / "model.safetensors"))
    assert {
        "model.mm_projector_aux_0.3.weight", "model.vision_query", "model.image_newline", "model.mm_projector.2.bias", "lm_head.weight",
        "model.vision_sampler_0.layers.1.pos_embed_1", "model.vision_sampler_0.layers.0.cross_attn.k_proj_1.1.weight",
        "model.vision_sampler_layers.1.layers.0.proj_out.linear_2.weight", "model.layers.3.self_attn.q_proj.weight",
    } <= found  # fmt: skip


@pytest.mark.parametrize("twin", ["cambrian", "ferret", "llava"])
def test_a_torch_folder_in_half_precision_with_an_index_loads_in_its_own_type(release, tmp_path, twin):
    model, folder = release(twin)
    state = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # stored by old transformers
    (folder / "model.safetensors").unlink()
    half = sorted(state)[: len(state) // 2]
    parts = {"pytorch_model-00001-of-00002.bin": half, "pytorch_model-00002-of-00002.bin": sorted(set(state) - set(half))}
    for file, chosen in parts.items():
        torch.save({name: state[name] for name in chosen}, folder / file)
    index = {"weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    again, _ = published.load(folder)
    assert all(torch.equal(tensor, model.state_dict()[name].half()) for name, tensor in again.state_dict().items())
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ValueError, match="lists 2 weight files; missing: pytorch_model-00002-of-00002.bin"):
        published.load(folder)


def test_missing_and_unexpected_tensors_are_named(release):
    _, folder = release("cambrian")
    state = load_file(folder / "model.safetensors")
    state["model.mm_projector_aux_7.0.weight"] = torch.zeros(2, 2)
    del state["model.vision_query"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match="2 tensors: missing connector.queries; unexpected connector.projections.7.0.weight"):
        published.load(folder)


def test_a_checkpoint_with_more_words_than_its_config_names_both_shapes(release):
    _, folder = release("llava")
    original = json.loads((folder / "config.json").read_text())
    original["mmkit"]["language"]["architecture"]["vocab_size"] = 290
    (folder / "config.json").write_text(json.dumps(original))
    with pytest.raises(ValueError, match=r"language.lm_head.weight has shape \(300, 32\), the model needs \(290, 32\)"):
        published.load(folder)


def test_frozen_encoders_with_a_source_are_not_written_and_part_of_one_is_an_error(release, tmp_path):
    model, folder = release("llava")
    state = load_file(folder / "model.safetensors")
    towers = [name for name in state if "vision_tower" in name]
    assert towers  # random ones have no other place
    del state[towers[0]]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"the checkpoint holds part of encoder 0 \(clip-l-336\); missing: encoders.0.trunk"):
        published.load(folder)
    settings = twins.CLIP.model_copy(update={"weights": str(tmp_path / "somewhere")})
    sourced = build(twins.llava(encoders=(settings,)), weights=False)
    bare = load_file(export.write(sourced, tmp_path / "bare", "llava") / "model.safetensors")
    assert not any("vision_tower" in name for name in bare)


# ---------------------------------------------------------------- adapters, deltas, shards


@pytest.mark.parametrize("prefix", ["", "model.", "module.model.", "base_model.model.model."])
def test_a_stage_one_projector_joins_its_base_whatever_stands_before_its_names(release, tmp_path, prefix):
    model, folder = release("cambrian", "projector")
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "mm_projector.bin"]
    base = language_of(model, tmp_path / "base")
    stored = torch.load(folder / "mm_projector.bin", weights_only=True)
    torch.save({prefix + name.removeprefix("model."): tensor for name, tensor in stored.items()}, folder / "mm_projector.bin")
    again, _ = published.load(folder, base=base)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in without_encoders(model.state_dict()).items())
    config, stream = published.read(folder / "mm_projector.bin")
    assert set(dict(stream)) == {name for name in model.state_dict() if name.startswith(("connector.", "samplers."))}


def test_ferret_adapters_are_two_files(release, tmp_path):
    model, folder = release("ferret", "projector")
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "mm_projector.bin", "region_geo_sampler.bin"]
    again, _ = published.load(folder, base=language_of(model, tmp_path / "base"))
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in without_encoders(model.state_dict()).items())


def language_of(model, folder: Path, rows: int = 300, change=None) -> Path:
    """The language model of a twin as a base folder with the first ``rows`` words."""
    state = {name.removeprefix("language."): tensor for name, tensor in model.state_dict().items() if name.startswith("language.")}
    cut = ("lm_head.weight", "model.embed_tokens.weight")
    state = {name: (tensor[:rows] if name in cut else tensor).clone() for name, tensor in state.items()}
    folder.mkdir()
    save_file(change(state) if change else state, folder / "model.safetensors")
    return folder


def as_delta(folder: Path, base: Path) -> Path:
    """The release with the base taken off, on the rows that overlap."""
    below = load_file(base / "model.safetensors")
    state = load_file(folder / "model.safetensors")
    for name, tensor in below.items():
        state[name][: tensor.shape[0]] -= tensor
    save_file(state, folder / "model.safetensors")
    return folder


def test_ferret_delta_and_base_give_the_target_and_new_rows_stay(release, tmp_path):
    model, folder = release("ferret")
    base = language_of(model, tmp_path / "base", rows=299)
    again, _ = published.load(as_delta(folder, base), base=base)
    for name, tensor in without_encoders(model.state_dict()).items():
        torch.testing.assert_close(again.state_dict()[name], tensor, atol=1e-6, rtol=0)
    assert torch.equal(again.language.lm_head.weight[299], model.language.lm_head.weight[299])


def test_a_delta_without_base_or_with_the_wrong_one_is_refused(release, tmp_path):
    model, folder = release("ferret")
    as_delta(folder, base := language_of(model, tmp_path / "base"))
    with pytest.raises(ValueError, match="holds a difference to a base model"):
        published.load(folder)
    with pytest.raises(ValueError, match="holds a delta: give the weights of its base model as base"):
        published.load(folder, kind="delta")
    more = language_of(model, tmp_path / "more", change=lambda state: state | {"model.layers.4.mlp.up_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="the delta lacks 1 tensors of the base .*: model.layers.4.mlp.up_proj.weight"):
        published.load(folder, base=more)
    other = language_of(model, tmp_path / "other", change=lambda state: state | {"model.norm.weight": torch.zeros(8)})
    with pytest.raises(ValueError, match=r"model.norm.weight: the delta has shape \(32,\), the base \(8,\)"):
        list(ferret.apply_delta(iter(load_file(folder / "model.safetensors").items()), other))
    assert base.is_dir()


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_a_lora_folder_is_merged_as_peft_does(release, tmp_path, kind):
    import peft

    model, folder = release("llava")
    base = language_of(model, tmp_path / "base")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **kind)
    wrapped = peft.get_peft_model(build(twins.llava()).language, settings)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    lora = tmp_path / "lora"
    wrapped.save_pretrained(lora)
    shutil.copy(folder / "config.json", lora)
    others = {f"base_model.model.{name}": t for name, t in load_file(folder / "model.safetensors").items() if "mm_projector" in name}
    torch.save(others, lora / "non_lora_trainables.bin")
    again, _ = published.load(lora, base=base)
    target = build(twins.llava()).language
    target.load_state_dict(model.language.state_dict())
    expected = peft.PeftModel.from_pretrained(target, lora).merge_and_unload().state_dict()
    for name, tensor in again.language.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-5)
    assert torch.equal(again.connector.output[2].weight, model.connector.output[2].weight)
    half = language_of(model, tmp_path / "half", change=lambda state: {name: tensor.bfloat16() for name, tensor in state.items()})
    again, _ = published.load(lora, base=half)
    weight = again.language.model.layers[0].self_attn.q_proj.weight
    assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float()), "not rounded to the base's type"
    (lora / "adapter_config.json").write_text(json.dumps(llava.adapter_config(lora) | {"base_model_name_or_path": "vicuna"}))
    with pytest.raises(ValueError, match=r"holds a lora: give .* base \(adapter_config.json names vicuna\)"):
        published.load(lora)


def test_rows_of_tokens_and_whole_modules_of_an_adapter_are_merged_as_peft_does(release, tmp_path):
    import peft

    model, folder = release("llava")
    base = language_of(model, tmp_path / "base")
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["norm"], init_lora_weights="gaussian",
        trainable_token_indices={"embed_tokens": [3, 299], "lm_head": [299]},
    )  # fmt: skip
    wrapped = peft.get_peft_model(build(twins.llava()).language, settings)
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    wrapped.save_pretrained(lora := tmp_path / "lora")
    shutil.copy(folder / "config.json", lora)
    others = {name: t for name, t in load_file(folder / "model.safetensors").items() if "mm_projector" in name}
    torch.save(others, lora / "non_lora_trainables.bin")
    target = build(twins.llava()).language
    target.load_state_dict(model.language.state_dict())
    expected = peft.PeftModel.from_pretrained(target, lora).merge_and_unload().state_dict()
    again, _ = published.load(lora, base=base)
    for name, tensor in again.language.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"has rows for tokens up to 299, the base .* has 299: grow its vocabulary first"):
        published.load(lora, base=language_of(model, tmp_path / "short", rows=299))


CHANGE_THE_BASE = ["pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga", "of next year"]


@pytest.mark.parametrize("start", CHANGE_THE_BASE)
def test_an_adapter_that_changed_its_base_is_refused_with_what_to_do(tmp_path, start):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 8, "init_lora_weights": start}))
    with pytest.raises(ValueError, match="init_lora_weights = .*changes the base weights before training.*merge it with peft") as error:
        llava.adapter_config(tmp_path)
    assert ("path_initial_model_for_weight_conversion" in str(error.value)) == (start not in ("loftq", "of next year"))


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_other_first_values_of_an_adapter_are_merged(tmp_path, start):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 8, "init_lora_weights": start}))
    assert llava.adapter_config(tmp_path)["init_lora_weights"] == start


def test_every_setting_of_pefts_adapters_is_known_to_the_merge_or_refused(tmp_path):
    """What a plain adapter's config has is neutral; what changes its layers is refused by name."""
    import peft

    plain = peft.LoraConfig(r=4, target_modules=["q"], lora_dropout=0.1).to_dict() | {"target_modules": ["q"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(plain, default=str))
    llava.adapter_config(tmp_path)
    changing = {"lora_bias": True, "use_qalora": True, "layer_replication": [[0, 2]], "alora_invocation_tokens": [5], "bias": "all"}
    changing |= {"target_parameters": ["experts.w"], "of_next_year": 1}
    for name, value in changing.items():
        (tmp_path / "adapter_config.json").write_text(json.dumps(plain | {name: value}, default=str))
        with pytest.raises(ValueError, match=f"has {name} = .*, which cannot be merged here; merge it with peft first"):
            llava.adapter_config(tmp_path)


def test_adapters_that_cannot_be_merged_are_refused(tmp_path):
    def adapter(**parts):
        return {f"x.lora_{name}.weight": part for name, part in parts.items()}

    a, b = torch.ones(1, 2), torch.ones(2, 1)
    cases = [
        ({"alpha_pattern": {"q": 2}}, adapter(A=a, B=b), "alpha_pattern = .* which cannot be merged here"),
        ({}, adapter(A=torch.zeros(0), B=b), "1 layers lack a half or have an empty one .*: x"),
        ({"use_dora": True}, adapter(A=a, B=b), "1 layers lack a half or have an empty one .*: x"),
        ({}, adapter(A=a, B=b, magnitude_vector=torch.ones(2)), "x.lora_magnitude_vector.weight is no LoRA weight"),
        ({}, adapter(A=a, B=b), "1 adapted layers have no weight in the base: x"),
    ]
    (tmp_path / "base").mkdir()
    save_file({"y.weight": a}, tmp_path / "base" / "model.safetensors")
    for settings, tensors, message in cases:
        (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 8} | settings))
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=message):
            list(llava.merged(tmp_path, tmp_path / "base"))


def write_shards(state: dict[str, torch.Tensor], folder: Path, world: int, flat: frozenset[str] = frozenset()) -> None:
    """Rank files as torch_xla's FSDP cuts parameters: on dim 0 with zero padding, or as one flat vector for names in ``flat``."""
    folder.mkdir(exist_ok=True)
    slices: list[dict] = [{} for _ in range(world)]
    facts: dict[str, dict] = {"": {}}
    for name, tensor in state.items():
        key = "_fsdp_shard_FSDP_SHARD_SEPARATOR_" + name.replace(".", "_FSDP_SHARD_SEPARATOR_")
        facts[""][key] = {"_orig_name": f"_fsdp_wrapped_module._fpw_module.{name}", "_orig_size": tensor.shape}
        whole = tensor.flatten() if name in flat else tensor
        share = -(-whole.shape[0] // world)
        padded = torch.cat([whole, whole.new_zeros(share * world - whole.shape[0], *whole.shape[1:])])
        for part, piece in zip(slices, padded.split(share), strict=True):
            part[key] = piece.clone()
    for rank, part in enumerate(slices):
        metadata = {"rank": rank, "world_size": world, "shard_info": facts, "flatten_info": {}, "buffer_info": {}}
        torch.save({"model": part, "shard_metadata": metadata}, folder / f"model_ckpt_rank-{rank:08d}-of-{world:08d}.pth")


@pytest.mark.parametrize("world", [1, 3, 8])
def test_rank_shards_of_any_world_size_load_as_a_model(release, tmp_path, world):
    model, folder = release("cambrian")
    state = load_file(folder / "model.safetensors")
    write_shards(state, tmp_path / "shards", world, flat=frozenset({"model.embed_tokens.weight", "model.image_newline"}))
    shutil.copy(folder / "config.json", tmp_path / "shards")
    again, _ = published.load(tmp_path / "shards")
    assert same(model, again)


def test_parameters_laid_flat_after_each_other_come_apart_again(tmp_path):
    """The usual form of torch_xla's FSDP: several parameters of a wrapped layer in one vector, padded to the world size."""
    weight, bias = torch.arange(6.0).view(2, 3), torch.tensor([7.0, 8.0])
    flat = torch.cat([weight.flatten(), bias, torch.zeros(1)]).split(3)
    inner, key = "_fsdp_wrapped_module.flat_param_0", "_fsdp_shard_FSDP_SHARD_SEPARATOR_flat_param_0"
    facts = {
        "rank": 0, "world_size": 3, "buffer_info": {"norm.steps": {"_orig_dtype": torch.int64}},
        "shard_info": {"model.layers.0": {key: {"_orig_name": inner, "_orig_size": torch.Size([8])}}},
        "flatten_info": {f"model.layers.0.{inner}": (["_fpw_module.up.weight", "_fpw_module.up.bias"], [weight.shape, bias.shape], [6, 2])},
    }  # fmt: skip
    for rank, part in enumerate(flat):
        model = {f"model.layers.0.{key}": part.clone(), "norm.steps": torch.tensor(3.0)}
        file = tmp_path / f"weights_rank-{rank:08d}-of-00000003-pytorch_model.bin"
        torch.save({"model": model, "shard_metadata": facts | {"rank": rank}}, file)
    found = dict(cambrian.consolidated(tmp_path))
    assert found.keys() == {"model.layers.0.up.weight", "model.layers.0.up.bias", "norm.steps"}
    assert torch.equal(found["model.layers.0.up.weight"], weight) and torch.equal(found["model.layers.0.up.bias"], bias)
    assert found["norm.steps"].dtype == torch.int64


def test_missing_ranks_and_mixed_checkpoints_are_named(tmp_path):
    write_shards({"model.norm.weight": torch.arange(5.0)}, tmp_path, 3)
    (tmp_path / "opt_rank-00000000-of-00000003-pytorch_model.bin").write_bytes(b"not a model")
    assert torch.equal(dict(cambrian.consolidated(tmp_path))["model.norm.weight"], torch.arange(5.0))
    for file in list(tmp_path.glob("model_ckpt_*")):
        shutil.copy(file, tmp_path / file.name.replace("model_ckpt", "mm_projector"))
    with pytest.raises(ValueError, match="several checkpoints .mm_projector of 3 ranks, model_ckpt of 3 ranks.; give the path of one"):
        list(cambrian.consolidated(tmp_path))
    assert len(cambrian.rank_files(tmp_path / "model_ckpt_rank-00000001-of-00000003.pth")) == 3
    (tmp_path / "model_ckpt_rank-00000001-of-00000003.pth").unlink()
    with pytest.raises(ValueError, match="missing rank 1 of 3"):
        list(cambrian.consolidated(tmp_path / "model_ckpt_rank-00000000-of-00000003.pth"))


# ---------------------------------------------------------------- files and commands


def test_files_that_are_no_checkpoint_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no file or folder"):
        published.read(tmp_path / "nothing")
    with pytest.raises(ValueError, match="is no published checkpoint: it has no config.json"):
        published.kind_of(tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"\x00" * 4)
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        published.read(tmp_path / "broken.safetensors")
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.bin")
    with pytest.raises(ValueError, match="holds neither an OpenCLIP model nor a connector; first tensors: a"):
        published.read(tmp_path / "other.bin")
    with pytest.raises(ValueError, match="no checkpoint kind 'fll'; kinds are full, delta"):
        published.read(tmp_path / "other.bin", kind="fll")


def test_a_pickle_that_runs_code_is_never_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"mm_projector.weight": Evil()}, tmp_path / "mm_projector.bin")
    with pytest.raises(ValueError, match="cannot be read as a file of tensors"):
        published.read(tmp_path / "mm_projector.bin")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("preset", ["ferret-7b-debug", "clip-vit-l-14-debug"])
def test_the_command_imports_and_exports_through_a_preset(tmp_path, preset):
    config = load(preset, "pretrain").model
    model = build(config)
    pretrained.save_pretrained(model, tmp_path / "ours", config)
    commands.export_published(str(tmp_path / "ours"), str(tmp_path / "theirs"), preset)
    commands.import_published(str(tmp_path / "theirs"), str(tmp_path / "back"), preset)
    again, _ = pretrained.from_pretrained(tmp_path / "back")
    assert same(model, again)


def test_the_command_refuses_before_it_writes(tmp_path):
    config = load("ferret-7b-debug", "eval").model
    model = build(config)
    export.write(model, tmp_path / "theirs", "ferret")
    commands.import_published(str(tmp_path / "theirs"), str(tmp_path / "back"), "ferret-7b-debug")
    assert pretrained.read_config(tmp_path / "back")[0] == config
    assert (tmp_path / "back" / "tokenizer" / "tokenizer.json").is_file()
    with pytest.raises(ConfigError, match="exists and is not empty; name a new folder"):
        commands.import_published(str(tmp_path / "theirs"), str(tmp_path / "back"))
    with pytest.raises(ConfigError, match="model.language.architecture.rms_norm_eps is 1e-05, the weights in .* have 1e-06"):
        commands.import_published(str(tmp_path / "theirs"), str(tmp_path / "new"), "llava-7b-debug")
    with pytest.raises(ValueError, match="no published form 'ferrett'; forms are cambrian"):
        export.write(model, tmp_path / "new", "ferrett")
    assert not (tmp_path / "new").exists()


def test_weights_come_from_the_hub_cache_by_repository_name(release, tmp_path, monkeypatch):
    from huggingface_hub import constants

    model, folder = release("llava")
    snapshot = tmp_path / "hub" / "models--someone--some-model" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again, _ = published.load("someone/some-model")
    assert same(model, again)
    with pytest.raises(ValueError, match="'someone/other' is neither in the hub cache nor reachable"):
        published.load("someone/other")
