"""Settings: presets resolve, text is converted by type, and every wrong input is refused with a message that helps."""

from __future__ import annotations

import pytest

from mmkit import config
from mmkit.config import ConfigError, load

PUBLISHED = ("8b", "13b", "34b", "phi3-3b", "ferret-7b", "ferret-13b", "llava-7b", "llava-13b", "clip-vit-l-14")


@pytest.mark.parametrize("stage", config.STAGES)
@pytest.mark.parametrize("name", config.presets())
def test_every_preset_resolves_at_every_stage(name, stage):
    run = load(name, stage)
    assert (run.preset, run.stage) == (name, stage)
    assert run.folder == f"runs/{name}/{stage}/default"


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_preset_has_a_debug_twin_of_the_same_structure(name):
    full, small = load(name, "finetune").model, load(f"{name}-debug", "finetune").model
    assert full.kind == small.kind
    if full.kind == "vlm":
        assert len(full.encoders) == len(small.encoders)
        assert full.connector.kind == small.connector.kind and full.connector.depth == small.connector.depth
        assert (full.samplers is None) == (small.samplers is None)
        assert (full.regions is None) == (small.regions is None)
        assert (full.template, full.image_fit) == (small.template, small.image_fit)
        assert small.language.source == "random"


@pytest.mark.parametrize(
    ("name", "lr_pretrain", "lr_finetune", "batches", "samplers"),
    [
        ("8b", 1e-3, 4e-5, (512, 512), (0, 3, 10)),
        ("13b", 1e-3, 4e-5, (512, 512), (0, 4, 10)),
        ("34b", 1e-3, 2e-5, (1024, 1024), (0, 7, 9)),
    ],
)
def test_cambrian_hyper_parameters_are_the_published_ones(name, lr_pretrain, lr_finetune, batches, samplers):
    first, second = load(name, "pretrain"), load(name, "finetune")
    assert (first.train.optimizer.lr, second.train.optimizer.lr) == (lr_pretrain, lr_finetune)
    assert first.train.optimizer.lr_of == {"samplers": 1e-4} and second.train.optimizer.lr_of == {}
    assert (first.train.global_batch, second.train.global_batch) == batches
    assert (first.train.optimizer.warmup, second.train.optimizer.warmup) == (0.06, 0.03)
    placed = first.model.samplers
    assert (placed.start, placed.stride, placed.count) == samplers
    assert first.model.n_image_tokens == 600


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("lr", "1e-5", 1e-5),
        ("train.optimizer.lr", 3, 3.0),
        ("steps", "7", 7),
        ("steps", "none", None),
        ("dry_run", "false", False),
        ("trainable", "[connector]", ("connector",)),
        ("train.optimizer.lr_of.connector", "2e-4", 2e-4),
        ("betas", "[0.9, 0.95]", (0.9, 0.95)),
    ],
)
def test_text_is_converted_by_the_fields_type(name, value, want):
    run = load("llava-7b", "finetune", {name: value})
    got = run
    for part in config.setting_path(name):
        got = got[part] if isinstance(got, dict) else getattr(got, part)
    assert got == want and type(got) is type(want)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"lrr": 1e-4}, ["no setting 'lrr'", "did you mean 'lr'", "the command line"]),
        ({"lr": "fast"}, ["train.optimizer.lr", "'fast'", "the command line"]),
        ({"lr": -1}, ["train.optimizer.lr", "-1", "greater than 0"]),
        ({"precision": "int8"}, ["train.precision", "'int8'", "bf16"]),
        ({"dry_run": "maybe"}, ["dry_run", "'maybe'"]),
        ({"kind": "sva"}, ["ambiguous", "model.connector.kind"]),
        ({"global_batch": 100}, ["global_batch 100", "device_batch 16", "use 128 or 256"]),
        ({"template": None}, ["template"]),
        ({"model.connector.dept": 3}, ["no setting 'model.connector.dept'"]),
        ({"trainable": "[vision]"}, ["train.trainable", "'vision'"]),
        ({"train.optimizer.lr_of.connector": -1e-3}, ["train.optimizer.lr_of.connector = -0.001", "greater than 0"]),
        ({"train.lora": {"alpha": 0}}, ["train.lora.alpha = 0", "greater than 0"]),
        ({"betas": "[0.9, 1.0]"}, ["train.optimizer.betas.1 = 1.0", "less than 1"]),
        ({"eps": -1e-8}, ["train.optimizer.eps = -1e-08", "greater than or equal to 0"]),
        ({"cooldown": 0.2}, ["train.optimizer.cooldown = 0.2", "'const-cooldown'", "'cosine'", "the command line", "leave it out"]),
        ({"rewind_precision": "fp32"}, ["train.stability.rewind_precision = 'fp32'", "'rewind'", "'stop'"]),
        ({"strategy": "fsdp"}, ["backend.strategy = 'fsdp'", "'torch'", "'deepspeed'"]),
        ({"backend.kind": "torch", "zero_stage": 3}, ["backend.zero_stage = 3", "'deepspeed'", "'torch'"]),
        ({"backend.kind": "torch", "strategy": "fsdp", "static_graph": True}, ["backend.static_graph = True", "'ddp'", "'fsdp'"]),
    ],
)
def test_wrong_overrides_are_refused_with_field_value_source_and_remedy(overrides, words):
    with pytest.raises(ConfigError) as error:
        load("llava-7b", "finetune", overrides, "the command line")
    for word in words:
        assert word in str(error.value), str(error.value)


def test_what_a_preset_or_a_saved_config_says_of_another_backend_may_lie_idle(tmp_path):
    run = load("ferret-7b", "finetune", {"backend.kind": "torch", "strategy": "ddp"})  # the preset's zero_stage is 3
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(run), encoding="utf8")
    assert config.load_file(path) == run and run.backend.zero_stage == 3
    assert config.changed(load("clip-vit-l-14-debug"), train__stability__action="stop").train.stability.rewind_precision == "fp32"


def test_devices_of_xla_are_those_that_are_named():
    run = load("8b", "finetune", {"xla_devices": 16})
    assert (run.devices, run.accumulation) == (16, 4)
    assert load("8b", "finetune").devices == 1


def test_unknown_model_and_stage_name_the_nearest():
    with pytest.raises(ConfigError, match="no model '13bb'; did you mean '13b"):
        load("13bb")
    with pytest.raises(ConfigError, match="no stage 'finetuning'; did you mean 'finetune'"):
        load("13b", "finetuning")


def test_settings_that_do_not_fit_together_are_refused():
    with pytest.raises(ConfigError, match="encoder side 24 does not divide by query side 7; use a multiple of 7"):
        load("8b", "pretrain", {"query_sides": [7]})
    with pytest.raises(ConfigError, match="samplers need connector.kind 'sva'"):
        load("llava-7b", "pretrain", {"model.samplers": {"start": 0, "stride": 1, "count": 2}})
    with pytest.raises(ConfigError, match="width 1000 does not divide by heads 16"):
        load("8b", "pretrain", {"width": 1000})


def test_a_config_cannot_be_changed_and_a_change_makes_a_new_one():
    run = load("13b", "finetune")
    with pytest.raises(Exception, match="frozen"):
        run.seed = 3
    other = config.changed(run, seed=3, train__optimizer__lr=1e-6)
    assert (run.seed, other.seed, other.train.optimizer.lr) == (0, 3, 1e-6)
    assert other.model == run.model


def test_the_resolved_config_is_read_back_unchanged(tmp_path):
    run = load("ferret-7b", "finetune", {"steps": 3})
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(run), encoding="utf8")
    assert config.load_file(path) == run


def test_a_preset_file_with_an_unknown_name_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("model: {kind: clip, name: ViT-B-32}\nstages: {pretrian: {}}\n", encoding="utf8")
    monkeypatch.setenv("MMKIT_PARAMS", str(tmp_path))
    with pytest.raises(ConfigError, match="no stage 'pretrian'; did you mean 'pretrain'"):
        load("mine")
    (tmp_path / "mine.yaml").write_text("model: {kind: clip, name: ViT-B-32, lock_img: true}\n", encoding="utf8")
    with pytest.raises(ConfigError, match="no setting 'model.lock_img'.*did you mean 'lock_image'"):
        load("mine")
    (tmp_path / "mine.yaml").write_text("base: mine\n", encoding="utf8")
    with pytest.raises(ConfigError, match="ring: mine -> mine"):
        load("mine")
