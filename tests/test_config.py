"""Settings: presets resolve, text is converted by type, and every wrong input is refused with a message that helps."""

from __future__ import annotations

import pytest

from mmkit import config
from mmkit.config import ConfigError, changed, load
from mmkit.data.recipe import sources_of
from mmkit.presets import presets

PUBLISHED = ("8b", "13b", "34b", "phi3-3b", "ferret-7b", "ferret-13b", "ferret-7b-lora", "llava-7b", "llava-13b", "clip-vit-l-14")


@pytest.mark.parametrize("stage", config.STAGES)
@pytest.mark.parametrize("name", presets())
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


def test_every_preset_for_accelerators_has_a_debug_twin():
    large = {name for name in presets() if "debug" not in name} - {"tiny", "clip-tiny", "clip-scratch"}
    assert large == {*PUBLISHED, "ferret-7b-qlora"}
    full, small = load("ferret-7b-qlora", "finetune"), load("ferret-7b-qlora-debug", "finetune")
    assert full.train.bits == small.train.bits == 4 and full.train.lora == small.train.lora
    assert full.model.regions and small.model.regions
    assert (full.model.template, full.model.image_fit) == (small.model.template, small.model.image_fit)
    assert small.model.language.source == "pack:smollm2", "weights of 4 bits are exported beside a source that can be read"


FERRET_FOLDERS = {  # of apple/ml-ferret experiments/ferret_7b_train.sh: images below data/, data_multiple
    "git_instruction": ("coco2014/train2014", 3), "vg_objects": ("vg/images", 1), "vg_relations": ("vg/images", 0.2),
    "vg_regions": ("vg/images", 0.2), "grounded_llava_boxes_detail": ("coco2014/train2014", 1),
    "grounded_llava_boxes_complex_reasoning": ("coco2014/train2014", 1), "grounded_llava_boxes_conversation": ("coco2014/train2014", 1),
    "refexp_all": ("refcoco/train2014", 1), "flickr": ("flickr30k/flickr30k_images_split/train", 1), "objects365": ("objects365_v1/train", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ["ferret-7b", "ferret-13b"])
def test_ferret_presets_say_what_the_published_scripts_say(name):
    first, second = load(name, "pretrain"), load(name, "finetune")
    assert (first.train.optimizer.lr, first.train.global_batch, first.train.device_batch) == (2e-3, 128, 16), "LLaVA v1's projector"
    assert first.backend.prefer == second.backend.prefer == "zero3"
    assert (second.train.optimizer.lr, second.train.global_batch, second.train.device_batch, second.train.epochs) == (2e-5, 128, 16, 3)
    assert (second.train.optimizer.warmup, second.train.checkpoint.save_every, second.train.checkpoint.keep_last) == (0.03, 1500, 3)
    assert second.data.workers == 8 and second.data.max_length == 2048
    got = {source.name: (source.images.removeprefix("data/"), source.multiple) for source in second.data.sources}
    assert got == FERRET_FOLDERS


@pytest.mark.parametrize(("name", "bits"), [("ferret-7b-lora", 16), ("ferret-7b-qlora", 4)])
def test_adapter_presets_of_ferret(name, bits):
    run = load(name, "finetune")
    train, lora = run.train, run.train.lora
    assert (lora.rank, lora.alpha, lora.dropout, train.bits) == (16, 16, 0.05, bits)
    assert (train.device_batch, train.global_batch) == (2, 64)
    assert (train.optimizer.lr, train.optimizer.warmup, train.epochs, train.checkpoint_blocks) == (2e-5, 0.03, 3, True)
    assert (run.backend.kind, run.backend.prefer) == ("auto", "zero2") and run.model.language.source == "lmsys/vicuna-7b-v1.5"
    assert train.trainable == ("connector", "regions") and load(name, "pretrain").train.bits == 16


def test_the_published_contrastive_run_measures_zero_shot_each_epoch():
    run = load("clip-vit-l-14", "pretrain")
    assert (run.evaluation.tasks, run.train.eval_every, run.train.eval_unit) == (("imagenet1k",), 1, "epochs")


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
        ("lr_of.connector", "2e-4", 2e-4),
        ("model.language.architecture.vocab_size", "49153", 49153),
        ("model.language.architecture.rms_norm_eps", "1e-5", 1e-5),
        ("model.language.architecture.tie_word_embeddings", "true", True),
        ("model.language.architecture.rope_parameters", "{rope_type: default, rope_theta: 1e5}", {"rope_type": "default", "rope_theta": 1e5}),
        ("model.language.architecture.hidden_act", "silu", "silu"),
        ("trainable", "('connector', 'regions')", ("connector", "regions")),
        ("name", "007", "007"),
        ("name", "none", "none"),
        ("start_from", "none", None),
        ("betas", "[0.9, 0.95]", (0.9, 0.95)),
    ],
)
def test_text_is_converted_by_the_fields_type(name, value, want):
    run = load("llava-7b", "finetune", {name: value})
    got = run
    for part in config.setting_path(name):
        got = got[part] if isinstance(got, dict) else getattr(got, part)
    assert got == want and type(got) is type(want)


EIGHT = {"backend.kind": "deepspeed", "backend.processes": 8}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"lrr": 1e-4}, ["no setting 'lrr'", "did you mean 'lr'", "the command line"]),
        ({"lr": "fast"}, ["train.optimizer.lr", "'fast'", "the command line"]),
        ({"lr": -1}, ["train.optimizer.lr", "-1", "greater than 0"]),
        ({"precision": "int8"}, ["train.precision", "'int8'", "bf16"]),
        ({"precision": "amp_bf16"}, ["train.precision = 'amp_bf16'", "write bf16"]),
        ({"schedule": "cosin"}, ["train.optimizer.schedule = 'cosin'", "did you mean 'cosine'"]),
        ({"dry_run": "maybe"}, ["dry_run", "'maybe'", "true or false is wanted"]),
        ({"steps": 2.5}, ["train.steps = 2.5", "a whole number is wanted, as 8"]),
        ({"steps": "many"}, ["train.steps = 'many'", "a whole number is wanted"]),
        ({"data.sources": "my.json"}, ["data.sources = 'my.json'", "a list is wanted, as [{name: NAME, format: llava, path: PATH}]"]),
        ({"data.sources": {"name": "x"}}, ["data.sources", "a list is wanted, as [{name: NAME"]),
        ({"data.sources": [{"name": "x", "format": "llava"}]}, ["data.sources.0.path", "is missing"]),
        ({"data.sources": "[{name: x, format: llava, path: a, image_dir: b}]"}, ["no setting 'data.sources.0.image_dir'", "images: DIR"]),
        ({"data.sources": "[{name: x, format: llava, path: a, imags: b}]"}, ["data.sources.0.imags", "did you mean 'images'"]),
        ({"trainable": "connector"}, ["train.trainable = 'connector'", "a list is wanted, as [language, connector]"]),
        ({"query_sides": 24}, ["model.connector.query_sides = 24", "a list is wanted, as [8, 8]"]),
        ({"betas": "[0.9]"}, ["train.optimizer.betas", "is missing"]),
        ({"train.lora": "true"}, ["train.lora = 'true'", "a mapping of settings is wanted, as {rank: 8}"]),
        ({"lr_of": "1e-3"}, ["train.optimizer.lr_of", "a mapping is wanted, as {language: 0.5}"]),
        ({"name": 7}, ["name = 7", "a text is wanted; quote it"]),
        ({"model.language.architecture.vocab_size": "[1, 2"}, ["vocab_size", "the command line", "is no YAML"]),
        ({"images": "pics"}, ["no setting 'images'", "entries of data.sources have it", "as [{name: NAME, format: llava"]),
        ({"resume": "latest"}, ["resume = 'latest'", "write auto"]),
        ({"kind": "sva"}, ["ambiguous", "model.connector.kind"]),
        ({"global_batch": 100, **EIGHT}, ["global_batch 100", "device_batch 16", "use 128 or 256"]),
        ({"template": None}, ["template"]),
        ({"model.connector.dept": 3}, ["no setting 'model.connector.dept'"]),
        ({"trainable": "[vision]"}, ["train.trainable", "'vision'"]),
        ({"train.optimizer.lr_of.connector": -1e-3}, ["train.optimizer.lr_of.connector = -0.001", "greater than 0"]),
        ({"train.lora": {"alpha": 0}}, ["train.lora.alpha = 0", "greater than 0"]),
        ({"betas": "[0.9, 1.0]"}, ["train.optimizer.betas.1 = 1.0", "less than 1"]),
        ({"eps": -1e-8}, ["train.optimizer.eps = -1e-08", "greater than or equal to 0"]),
        ({"cooldown": 0.2}, ["train.optimizer.cooldown = 0.2", "'const-cooldown'", "'cosine'", "the command line", "leave it out"]),
        ({"rewind_precision": "fp32"}, ["train.stability.rewind_precision = 'fp32'", "'rewind'", "'stop'"]),
        ({"strategy": "fsdp", **EIGHT}, ["backend.strategy = 'fsdp'", "'torch'", "'deepspeed'"]),
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
    run = load("ferret-7b", "finetune", {"backend.kind": "torch", "strategy": "ddp"})  # the preset prefers zero3
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(run), encoding="utf8")
    assert config.load_file(path) == run and run.backend.prefer == "zero3"
    assert config.changed(load("clip-vit-l-14-debug"), train__stability__action="stop").train.stability.rewind_precision == "fp32"


def test_devices_of_xla_are_those_that_are_named():
    run = load("8b", "finetune", {"backend.kind": "xla", "xla_devices": 16})
    assert (run.devices, run.accumulation) == (16, 4)
    assert load("8b", "finetune", {"backend.kind": "xla"}).devices == 1


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


def test_a_batch_that_does_not_divide_names_batches_and_device_batches_that_do():
    wrong = {"global_batch": 128, "device_batch": 256, "backend.kind": "single"}
    with pytest.raises(ConfigError, match="use 256 or 512, or device_batch 128, or device_batch 64"):
        load("clip-tiny", "pretrain", wrong)
    for fits in ({"global_batch": 256}, {"device_batch": 128}, {"device_batch": 64}):
        assert load("clip-tiny", "pretrain", wrong | fits).accumulation >= 1


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


@pytest.mark.parametrize("name", ["a/b c", "", "..", ".hidden", "-x", "a b", "x\n", "é", "a" * 101])
def test_a_name_that_is_no_folder_of_its_own_is_refused(name):
    with pytest.raises(ConfigError, match="name = .*letters a-z, digits, '.', '_' and '-'"):
        load("tiny", overrides={"name": name})


def test_names_roots_and_urls_that_are_folders_are_taken():
    for name in ("lr-1e-4", "a.b_c", "7", "_x"):
        assert load("tiny", overrides={"name": name}).folder == f"runs/tiny/pretrain/{name}"
    assert load("tiny", overrides={"root": "gs://bucket/a b/runs"}).folder.startswith("gs://bucket/a b/runs/tiny")
    with pytest.raises(ConfigError, match="root = '': .*|root = ''"):
        load("tiny", overrides={"root": ""})
    with pytest.raises(ConfigError, match="tensorboard.*to a disk only"):
        load("tiny", overrides={"root": "gs://bucket/runs", "train.tensorboard": True})


# ---------------------------------------------------------------- a user's own presets


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A working folder with params/: one preset on the kit's, one of the same name as the kit's."""
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "mine.yaml").write_text("base: ferret-7b-debug\nstages: {finetune: {train: {optimizer: {lr: 1e-4}}}}\n")
    (tmp_path / "params" / "tiny.yaml").write_text("base: tiny\nmodel: {language: {architecture: {rms_norm_eps: 1e-6}}}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "params"


def test_presets_of_the_working_folder_lie_over_the_kits(own):
    assert {"mine", "tiny", "13b"} <= set(presets())
    assert load("mine", "finetune").train.optimizer.lr == 1e-4 and load("mine", "finetune").model == load("ferret-7b-debug", "finetune").model
    mine, lora = load("tiny", "finetune"), {"rank": 16, "alpha": 32}
    assert mine.model.language.architecture["rms_norm_eps"] == 1e-6 and mine.train.lora.model_dump().items() >= lora.items()


def test_an_error_in_an_own_preset_names_its_file_and_what_it_stands_in_place_of(own):
    (own / "tiny.yaml").write_text("base: tiny\ntrain: {learning_rate: 1e-4}\n")
    words = r"no setting 'train.learning_rate' \(from .*params/tiny.yaml, which stands in place of .*params/tiny.yaml"
    with pytest.raises(ConfigError, match=words + r"\); it is 'train.optimizer.lr' here"):
        load("tiny")


def test_mmkit_params_names_one_more_folder_and_hides_nothing(own, tmp_path, monkeypatch):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "mine.yaml").write_text("base: 13b-debug\n")
    monkeypatch.setenv("MMKIT_PARAMS", str(tmp_path / "more"))
    assert load("mine").model == load("13b-debug").model and load("ferret-7b").backend.prefer == "zero3"
    monkeypatch.setenv("MMKIT_PARAMS", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="MMKIT_PARAMS = .*none' is no folder"):
        load("tiny")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "holds a list; write one `name: value` a line"),
        ("model: {kind: vlm\n", r"mine.yaml \(line 2\)"),
        ("train: {steps: 1}\ntrain: {steps: 2}\n", "'train' stands there twice"),
        ("train: {steps: 1, steps: 2}\n", "'steps' stands there twice"),
        ("stages: {pretrain: {train: {lora_r: 16}}}\nbase: tiny\n", "it is 'train.lora.rank' here"),
    ],
)
def test_a_preset_file_that_cannot_be_read_is_one_message(own, text, words):
    (own / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load("mine")


def test_a_contrastive_model_is_given_no_length_of_answers():
    with pytest.raises(ConfigError, match=r"evaluation.max_new_tokens = 4 \(from .* generates no text"):
        load("clip-tiny", "eval", {"max_new_tokens": 4})


def test_a_change_given_by_a_user_is_told_with_its_origin_and_refused_where_nothing_reads_it():
    run = load("8b-debug")  # whose backend is single: nothing is left to choose
    with pytest.raises(ConfigError, match=r"evaluation.limit = 0 \(from the command line\)"):
        changed(run, "the command line", evaluation__limit=0)
    with pytest.raises(ConfigError, match=r"backend.strategy = 'fsdp' \(from the command line\) is read with"):
        changed(run, "the command line", backend__strategy="fsdp")
    assert changed(run, backend__strategy="fsdp").backend.strategy == "fsdp"


# ---------------------------------------------------------------- values of another kind than they look


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"steps": True}, ["train.steps = 'true'", "a whole number is wanted"]),
        ({"betas": [0.9, False]}, ["train.optimizer.betas.1 = 'false'", "a number is wanted"]),
        ({"zero_stage": True}, ["backend.zero_stage", "none of 0, 1, 2 or 3"]),
        ({"lr": float("inf")}, ["train.optimizer.lr = inf", "finite"]),
        ({"lr": ".nan"}, ["train.optimizer.lr = '.nan'", "a number is wanted"]),
        ({"model.connector.heads": 0}, ["model.connector.heads = 0", "greater than 0"]),
        ({"query_sides": []}, ["model.connector.query_sides = []", "at least 1"]),
        ({"seed": -1}, ["seed = -1"]),
        ({"augment_scale": [1, 0.5]}, ["data.augment_scale = (1.0, 0.5)", "the smaller area comes first"]),
        ({"model.language.architecture.hidden_size.x": 3}, ["hidden_size is 32, which holds no settings"]),
        ({"train": 3, "train.steps": 4}, ["train.steps", "train is 3, which holds no settings"]),
        ({"model.language.architecture.x": {1, 2}}, ["architecture.x", "holds more than texts, numbers"]),
        ({"model.language.architecture.x": "!!int y"}, ["is no YAML"]),
        ({"name": "x" * 5000}, ["5,002 characters"]),
        ({"device_batch": 7, "global_batch": 10**15}, ["does not divide", "device_batch 8"]),
    ],
)
def test_values_that_python_or_yaml_would_take_for_others_are_refused(overrides, words):
    with pytest.raises(ConfigError) as error:
        load("8b-debug", "finetune", overrides, "the command line")
    for word in words:
        assert word in str(error.value), str(error.value)


def test_a_date_is_a_text_and_a_free_mapping_is_kept_as_config_yaml_writes_it(tmp_path):
    given = {"name": "2024-05-01", "model.language.architecture.id2label": {0: "cat"}}
    run = load("8b-debug", "finetune", given | {"model.language.architecture.released": "2024-02-30"})
    (tmp_path / "config.yaml").write_text(config.to_yaml(run))
    assert config.load_file(tmp_path / "config.yaml") == run and run.name == "2024-05-01"
    assert run.model.language.architecture["id2label"] == {"0": "cat"} and run.model.language.architecture["released"] == "2024-02-30"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: tiny\nstages: [1]\n", r"stages = \[1\]: a mapping is wanted"),
        ("base: tiny\nstages: {finetune: 3}\n", "stages = .*: a mapping is wanted"),
        ("base: [tiny]\n", r"base = \['tiny'\]: the name of a model is wanted"),
        ("base: no\n", "base = False: the name"),
        ("base: tiny\ntrain: 3\n", "train = 3 .*a mapping of settings is wanted"),
        ("base: tiny\ntrain:\n  # steps: 3\n", "train = None .*a mapping of settings is wanted.*leave it out"),
        ("base: tiny\ntrain: {optimizer: }\n", "train.optimizer = None .*a mapping of settings is wanted"),
        ("base: tiny\npinned: 3\n", "pinned = 3 .*a list is wanted"),
        ("base: tiny\nname: caf\xe9\n", "is not UTF-8 .byte 0xe9 at 20.; save it as UTF-8"),
        ("base: tiny\nx: &a [*a]\n", "is no YAML: holds more than texts"),
        ("base: tiny\nx: " + "[" * 1000, "is no YAML"),
    ],
)
def test_a_preset_file_of_another_form_is_one_message(own, text, words):
    (own / "mine.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=words):
        load("mine", "finetune")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sources: [{name: a, category: b}]\nname: x", r"sources.0.samples = .*from .*mix.yaml.: is missing"),
        ("name: x", "sources = .*is missing"),
        ("name: x\nsources: 3", "sources = 3 .*a list is wanted"),
        ("name: x\nsource: []", "no option 'source' .*did you mean 'sources'"),
        ("name: x\nratios: {b: 0}\nsources: [{name: a, category: b, samples: 3}]", "ratios.b = 0 .*greater than 0"),
    ],
)
def test_a_mixture_file_of_another_form_is_one_message(own, text, words):
    (own / "mixtures").mkdir()
    (own / "mixtures" / "mix.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        sources_of(config.DataConfig(mixture="mix"))
