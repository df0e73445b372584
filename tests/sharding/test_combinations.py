"""Every forbidden combination is refused in one line before anything is read or started; the allowed ones pass."""

import json
import subprocess
import sys

import pytest

from mmkit.config import BackendConfig, ClipConfig, ConfigError, OptimizerConfig, RunConfig, TrainConfig
from mmkit.sharding.combinations import REFUSALS, check_combination
from mmkit.sharding.deepspeed_file import filled_settings, read_file

VLM = {
    "kind": "vlm",
    "encoders": [{"name": "clip-l-336", "side": 4}],
    "connector": {"kind": "mlp"},
    "language": {"source": "nowhere/that-exists", "architecture": {"model_type": "llama"}},
}
MACHINERY = {
    "single": {"kind": "single"},
    "ddp": {"kind": "torch", "strategy": "ddp", "processes": 2},
    "fsdp": {"kind": "torch", "strategy": "fsdp", "processes": 2},
    **{f"zero{stage}": {"kind": "deepspeed", "zero_stage": stage, "processes": 2} for stage in range(4)},
    "xla": {"kind": "xla", "xla_devices": 2},
}


def run_of(backend, model=VLM, **train):
    return RunConfig(
        preset="debug", stage="finetune", model=model, backend=BackendConfig(**backend), train=TrainConfig(global_batch=16, **train)
    )


def refused(run):
    with pytest.raises(ConfigError) as error:
        check_combination(run)
    return str(error.value)


FORBIDDEN = {
    "bits x cut weights": [run_of(MACHINERY[name], bits=bits) for name in ("fsdp", "zero3", "xla") for bits in (4, 8)],
    "bits x offload": [run_of(MACHINERY[name] | {"offload": True}, bits=4) for name in ("zero1", "zero2")],
    "bits x trained language": [run_of(MACHINERY["single"], bits=4, trainable=("language",))],
    "bits x clip": [run_of(MACHINERY["single"], model=ClipConfig(name="ViT-B-32"), bits=8)],
    "8 bits x DoRA": [run_of(MACHINERY["single"], bits=8, lora={"rank": 4, "use_dora": True})],
    "fp16 x xla": [run_of(MACHINERY["xla"], precision="fp16")],
    "8-bit Adam x machinery": [
        run_of(MACHINERY[name], optimizer=OptimizerConfig(kind="adamw_8bit"))
        for name in ("fsdp", "zero0", "zero1", "zero2", "zero3", "xla")
    ],
    "offload x machinery": [run_of(MACHINERY[name] | {"offload": True}) for name in ("single", "ddp", "zero0", "xla")],
    "single x processes": [run_of({"kind": "single", "processes": 2})],
    "xla devices x kind": [run_of(MACHINERY["ddp"] | {"xla_devices": 2}), run_of(MACHINERY["single"] | {"fsdp_axis": 2})],
    "xla devices x processes": [run_of({"kind": "xla", "xla_devices": 2, "nodes": 2})],
    "mesh x axis": [run_of({"kind": "xla", "xla_devices": 4, "fsdp_axis": 3, "processes": 1}, device_batch=4)],
    "deepspeed file x kind": [run_of(MACHINERY["ddp"] | {"deepspeed_config": "zero3"})],
}


def test_every_refusal_of_the_table_has_a_case():
    assert set(FORBIDDEN) == set(REFUSALS)


@pytest.mark.parametrize(("name", "index"), [(name, i) for name, runs in FORBIDDEN.items() for i in range(len(runs))])
def test_forbidden_combination_is_refused_in_one_line(name, index):
    message = refused(FORBIDDEN[name][index])
    assert "\n" not in message and len(message) < 200
    pattern = REFUSALS[name].message.split("{")[0] or REFUSALS[name].message.split("}")[-1]
    assert pattern in message


@pytest.mark.parametrize("name", MACHINERY)
def test_full_precision_lora_and_bf16_are_allowed_everywhere(name):
    for precision in ("fp32", "tf32", "bf16"):
        check_combination(run_of(MACHINERY[name], precision=precision, lora={"rank": 4}, trainable=("connector",)))


@pytest.mark.parametrize("name", ["single", "ddp", "zero0", "zero1", "zero2"])
def test_quantised_base_weights_are_allowed_where_nothing_cuts_them(name):
    check_combination(run_of(MACHINERY[name], bits=4, lora={"rank": 4, "use_dora": True}))
    check_combination(run_of(MACHINERY[name], bits=8, lora={"rank": 4, "use_rslora": True}))


def test_refusal_takes_under_a_second_and_loads_no_heavy_library():
    code = (
        "import sys, time; from mmkit.config import *; from mmkit.sharding.combinations import check_combination\n"
        f"run = RunConfig.model_validate({run_of(MACHINERY['zero3'], bits=4).model_dump(mode='json')!r})\n"
        "start = time.perf_counter()\n"
        "try: check_combination(run)\n"
        "except ConfigError as error: print(error, file=sys.stderr)\n"
        "assert time.perf_counter() - start < 1\n"
        "print([name for name in ('torch', 'transformers', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]" and "train.bits = 4" in done.stderr


# ---------------------------------------------------------------- DeepSpeed files


def filled(file, backend=None, train=None, accumulation=2, world=4):
    backend = BackendConfig(kind="deepspeed", **{"zero_stage": 2, **(backend or {})})
    return filled_settings(file, backend, TrainConfig(**{"device_batch": 3, "precision": "bf16", **(train or {})}), accumulation, world)


@pytest.mark.parametrize(("name", "stage", "offload"), [("zero2", 2, False), ("zero3", 3, False), ("zero3_offload", 3, True)])
def test_shipped_files_are_filled_without_any_auto_left(name, stage, offload):
    settings = filled(read_file(name), {"zero_stage": stage, "offload": offload})
    assert settings["train_batch_size"] == 24 and settings["gradient_accumulation_steps"] == 2
    assert settings["gradient_clipping"] == 1.0 and settings["zero_optimization"]["stage"] == stage
    assert ("offload_optimizer" in settings["zero_optimization"]) == offload
    assert '"auto"' not in json.dumps(settings) and "bf16" not in settings


@pytest.mark.parametrize(
    ("file", "both"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, ("8", "3")),
        ({"gradient_accumulation_steps": 5}, ("5", "2")),
        ({"train_batch_size": 7}, ("7", "24")),
        ({"gradient_clipping": 0.3}, ("0.3", "1.0")),
        ({"zero_optimization": {"stage": 3}}, ("3", "2")),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ("'cpu'", "backend.offload = False")),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, ("'cpu'", "backend.offload = False with backend.zero_stage = 2")),
        ({"zero_optimization": {"cpu_offload": True}}, ("cpu_offload = True", "backend.offload = False")),
        ({"fp16": {"enabled": True}}, ("True", "bf16")),
        ({"bf16": {"enabled": False}}, ("False", "bf16")),
        ({"torch_autocast": {"enabled": False}}, ("torch_autocast.enabled = False", "train.precision = 'bf16'")),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, ("'float16'", "bfloat16")),
        ({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": []}}, ("lower_precision_safe_modules = []", "bf16")),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, ("0.001", "2e-05")),
        ({"optimizer": {"type": "Lamb"}}, ("Lamb", "adamw")),
        ({"optimizer": {"type": None}}, ("optimizer.type = None", "adamw")),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, ("adam_w_mode = False", "True")),
        ({"optimizer": {"type": "Adam", "params": {"freeze_step": 3}}}, ("freeze_step = 3", "train.optimizer")),
        ({"zero_force_ds_cpu_optimizer": True}, ("zero_force_ds_cpu_optimizer = True", "False")),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, ("WarmupLR", "cosine")),
        ({"scheduler": {"type": None}}, ("None", "cosine")),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}, ("10", "cosine")),
    ],
)
def test_a_file_that_contradicts_the_run_is_refused_with_both_values(file, both):
    with pytest.raises(ConfigError) as error:
        filled(file)
    assert all(value in str(error.value) for value in both), str(error.value)


@pytest.mark.parametrize(
    ("precision", "file", "both"),
    [
        ("fp32", {"torch_autocast": {"enabled": True}}, ("torch_autocast.enabled = True", "'fp32'")),
        ("fp16", {"fp16": {"enabled": True, "loss_scale": 128}}, ("fp16.loss_scale = 128", "'fp16' has loss_scale 0")),
        ("fp16", {"fp16": {"loss_scale_window": 1000}}, ("1000", "2000")),
        ("fp16", {"bf16": {"enabled": True}}, ("bf16.enabled = True", "'fp16'")),
    ],
)
def test_a_precision_that_the_run_does_not_have_is_refused_with_both_values(precision, file, both):
    with pytest.raises(ConfigError) as error:
        filled(file, train={"precision": precision})
    assert all(value in str(error.value) for value in both), str(error.value)


def test_what_agrees_passes_and_what_is_off_is_not_read():
    scaler = {"loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "loss_scale_window": 1000}
    adam = {"type": "Adam", "params": {"lr": "auto", "betas": [0.9, 0.999], "adam_w_mode": True, "torch_adam": True}}
    file = {"fp16": {"enabled": "auto"} | scaler, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "optimizer": adam}
    settings = filled(file | {"scheduler": {"type": "auto", "params": {"warmup_num_steps": "auto"}}, "zero_allow_untested_optimizer": True})
    assert not {"fp16", "torch_autocast", "optimizer", "scheduler"} & set(settings)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"optimizer": "auto"}, "optimizer = 'auto'"),
        ({"optimizer": {"params": 3}}, "optimizer: params = 3"),
        ({"scheduler": "WarmupLR"}, "scheduler = 'WarmupLR'"),
        ({"fp16": True}, "fp16 = True"),
        ({"bf16": None}, "bf16 = None"),
        ({"zero_optimization": 2}, "zero_optimization = 2"),
        ({"zero_optimization": "auto"}, "zero_optimization = 'auto'"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "zero_optimization: offload_optimizer = 'cpu'"),
    ],
)
def test_what_should_be_a_section_is_named_with_file_key_and_value(tmp_path, file, words):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(file))
    with pytest.raises(ConfigError) as error:
        filled(read_file(str(path)))
    assert f"{path}: {words}, but it is a section" in str(error.value)


def test_unknown_keys_of_a_users_file_reach_deepspeed_unchanged(tmp_path):
    path = tmp_path / "mine.json"
    zero = {"stage": 2, "reduce_bucket_size": 77, "allgather_bucket_size": "auto"}
    path.write_text(json.dumps({"zero_optimization": zero, "wall_clock_breakdown": True}))
    settings = filled(read_file(str(path)))
    assert settings["wall_clock_breakdown"] is True and settings["zero_optimization"]["reduce_bucket_size"] == 77
    assert "allgather_bucket_size" not in settings["zero_optimization"]


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file, and none of zero2, zero3, zero3_offload"):
        read_file("zero9")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_file(str(tmp_path / "broken.json"))
    (tmp_path / "list.json").write_text('[{"bf16": {}}]')
    with pytest.raises(ConfigError, match=r"list.json' holds \[\{'bf16': \{\}\}\], but a DeepSpeed file is one object"):
        read_file(str(tmp_path / "list.json"))
