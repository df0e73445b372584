"""Names of LLaVA, Cambrian, Ferret, open_clip and Hugging Face are answered with ours wherever a setting can be named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmkit import cli, config
from mmkit.config import ConfigError, changed, load
from mmkit.foreign_names import NAMES, VALUES, ours
from mmkit.notebook.parameters import assemble, begin
from mmkit.values import kinds_of, names_of

ASKED = {  # what users of these programs type first -> ours
    "learning_rate": "train.optimizer.lr", "gradient_checkpointing": "train.checkpoint_blocks", "lora_enable": "train.lora",
    "output_dir": "root", "model_name_or_path": "model.language.source", "bf16": "train.precision", "fp16": "train.precision",
    "gradient_accumulation_steps": "train.global_batch", "lora_r": "train.lora.rank", "lora_alpha": "train.lora.alpha",
    "per_device_train_batch_size": "train.device_batch", "num_train_epochs": "train.epochs", "max_steps": "train.steps",
    "warmup_ratio": "train.optimizer.warmup", "mm_projector_lr": "train.optimizer.lr_of", "vision_tower": "model.encoders",
    "tune_mm_mlp_adapter": "train.trainable", "freeze_backbone": "train.trainable", "model_max_length": "data.max_length",
    "deepspeed": "backend.deepspeed_config", "save_steps": "train.checkpoint.save_every", "save_total_limit": "train.checkpoint.keep_last",
    "logging_steps": "train.log_every", "data_path": "data.sources", "image_folder": "data.sources", "image_dir": "data.sources",
    "train-data": "data.sources", "train-num-samples": "data.samples_per_epoch", "batch-size": "train.device_batch",
    "wd": "train.optimizer.weight_decay", "grad-checkpointing": "train.checkpoint_blocks", "accum-freq": "train.global_batch",
    "report_to": "train.tensorboard", "resume_from_checkpoint": "resume", "lr_scheduler_type": "train.optimizer.schedule",
}  # fmt: skip
SAME = ("lr", "epochs", "warmup", "seed", "weight_decay", "max_grad_norm", "lock_image", "lock_text", "precision", "workers", "bits", "resume",
        "eps", "local_loss", "gather_with_grad", "name", "schedule", "pack")  # fmt: skip


def test_every_target_is_a_setting_and_no_name_of_ours_is_in_the_table():
    known = names_of(config.RunConfig)
    assert {setting for setting, _ in NAMES.values()} - {""} <= set(known)
    last = {path.rpartition(".")[2] for path in known} | set(known)
    assert sorted(NAMES.keys() & last) == []
    assert all(how for setting, how in NAMES.values() if not setting), "what has no setting says why"
    mentioned = re.findall(r"\b(?:train|data|model|backend|evaluation)\.[a-z_.]+[a-z]", " ".join(how for _, how in NAMES.values()))
    free = [path for path, kind in known.items() if "dict" in str(kind)]
    assert [name for name in mentioned if name not in known and not any(name.startswith(path + ".") for path in free)] == []


def test_every_value_that_is_advised_is_one_of_the_setting():
    for setting, values in VALUES.items():
        kinds = [str(kind) for path, kind in names_of(config.RunConfig).items() if path.endswith(f".{setting}")]
        kinds += [str(field.annotation) for field in (config.SourceConfig.model_fields.get(setting),) if field]
        for theirs, how in values.items():
            word = how.split(",")[0]
            assert any(f"'{word}'" in kind for kind in kinds) or setting == "template", (setting, theirs, how)
    assert kinds_of(config.TrainConfig.model_fields["precision"].annotation)


@pytest.mark.parametrize(("theirs", "setting"), ASKED.items())
def test_what_users_type_first_is_answered_with_ours(theirs, setting):
    with pytest.raises(ConfigError, match=rf"no setting '{theirs}' \(from .*\); it is '{re.escape(setting)}' here"):
        load("llava-7b", overrides={theirs: 1})


@pytest.mark.parametrize("name", SAME)
def test_what_is_called_the_same_is_a_setting_and_not_in_the_table(name):
    assert ours(name) == "" and any(path == name or path.endswith(f".{name}") for path in names_of(config.RunConfig))


def by_set(tmp_path: Path) -> None:
    options = cli.build_parser().parse_args(["train", "--model", "tiny", "--set", "learning_rate=1e-4"])
    cli.run_of(options)


def by_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(load("tiny")).replace("lr: 0.0005", "learning_rate: 0.0005"))
    config.load_file(path)


def by_preset(tmp_path: Path) -> None:
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "mine.yaml").write_text("base: tiny\ntrain: {optimizer: {learning_rate: 1e-4}}\n")
    load("mine")


def by_papermill(tmp_path: Path) -> None:
    cell = "model: str = 'tiny'  # a preset"
    begin({"In": ["", cell, "# Parameters\nlearning_rate = 1e-4"], "model": "tiny", "learning_rate": 1e-4}, "finetune")


def by_settings(tmp_path: Path) -> None:
    assemble({"model": "tiny", "settings": {"learning_rate": 1e-4}}, "finetune", "settings")


def by_python(tmp_path: Path) -> None:
    changed(load("tiny"), learning_rate=1e-4)


@pytest.mark.parametrize("way", [by_set, by_config_file, by_preset, by_papermill, by_settings, by_python], ids=lambda way: way.__name__)
def test_every_entry_point_says_it(way, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="learning_rate.*; it is 'train.optimizer.lr' here"):
        way(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--learning_rate", "1e-4"], "no option --learning_rate; it is 'train.optimizer.lr' here"),
        (["train", "--per-device-train-batch-size=4"], "it is 'train.device_batch' here"),
        (["train", "--lr", "1e-4"], "it is a setting, write --set train.optimizer.lr=VALUE"),
        (["train", "--image_dir", "x"], "images: DIR of the source"),
        (["notebook", "run", "03_finetune", "-p", "lora_r", "16"], "it is 'train.lora.rank' here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line_says_it_in_one_message(words, message, capsys):
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("mmkit: error: ") and message in error and len(error.splitlines()) == 1
