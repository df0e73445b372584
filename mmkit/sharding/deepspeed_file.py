"""A user's DeepSpeed file filled in and checked against the run: no DeepSpeed is imported here.

``"auto"`` takes the run's value. A value that contradicts the run is a ConfigError naming both. The sections on precision, optimizer and
schedule never reach DeepSpeed, as the run does these itself: all they ask for is compared. Other keys the run does not know are DeepSpeed's
own business and stay as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmkit.config import BackendConfig, ConfigError, TrainConfig
from mmkit.presets import params_files

OPTIMIZERS = ("adam", "adamw", "auto")  # of a file: all mean torch's AdamW here
ADAMW = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "torch_adam": True}  # how that one works, in DeepSpeed's words
SCALER = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1, "min_loss_scale": 1}  # of every backend
AUTOCAST = {"bf16": ("bfloat16", "bf16", "torch.bfloat16"), "fp16": ("float16", "fp16", "half", "torch.float16")}  # names of its dtype


def read_file(path: str | None) -> dict[str, Any]:
    """The file's settings; a bare name (``zero3``) is one of ``params/deepspeed``. Empty without a path."""
    if path is None:
        return {}
    kept = params_files("deepspeed/*.json")
    candidates = [Path(path), *kept.get(path, ())]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise ConfigError(f"backend.deepspeed_config = {path!r}: no such file, and none of {', '.join(kept)} in params/deepspeed")
    try:
        settings = json.loads(found.read_text(encoding="utf8"))
    except ValueError as error:
        raise ConfigError(f"backend.deepspeed_config = {path!r} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"backend.deepspeed_config = {path!r} holds {str(settings)[:60]}, but a DeepSpeed file is one object {{...}}")
    return settings | {"_file": str(found)}


def filled_settings(
    file: dict[str, Any], backend: BackendConfig, train: TrainConfig, accumulation: int, world: int
) -> dict[str, Any]:
    """What `deepspeed.initialize` gets: ``file`` with every "auto" replaced. ConfigError where the file contradicts the run."""
    source = file.get("_file", "deepspeed file")
    rest = {key: value for key, value in file.items() if key != "_file"}
    _check_precision(rest, train, source)
    _check_optimizer(_taken(rest, "optimizer", source), train, source)
    _check_scheduler(_taken(rest, "scheduler", source), train, source)
    zero = _zero(_taken(rest, "zero_optimization", source), backend, f"{source}: zero_optimization")
    run = {
        "train_batch_size": (train.device_batch * accumulation * world, "train.global_batch"),
        "train_micro_batch_size_per_gpu": (train.device_batch, "train.device_batch"),
        "gradient_accumulation_steps": (accumulation, "global_batch / (device_batch x devices)"),
        "gradient_clipping": (train.optimizer.max_grad_norm or 0.0, "train.optimizer.max_grad_norm"),
        "zero_allow_untested_optimizer": (True, "the value for torch's AdamW"),
        "zero_force_ds_cpu_optimizer": (False, "the value for torch's AdamW"),
    }
    out = {key: _agreed(rest.pop(key, "auto"), value, f"{source}: {key}", f"{name} = {value!r}") for key, (value, name) in run.items()}
    return _without_auto(rest) | out | {"zero_optimization": zero}


def _zero(zero: dict[str, Any], backend: BackendConfig, where: str) -> dict[str, Any]:
    stage = f"backend.zero_stage = {backend.zero_stage}"
    zero["stage"] = _agreed(zero.get("stage", "auto"), backend.zero_stage, f"{where}.stage", stage)
    stated, both = f"backend.offload = {backend.offload} with {stage}", backend.offload and backend.zero_stage == 3
    for part, older, wanted in (("offload_optimizer", "cpu_offload", backend.offload), ("offload_param", "cpu_offload_param", both)):
        section = _taken(zero, part, where)
        _agreed(zero.pop(older, "auto"), wanted, f"{where}.{older}", stated)
        device = _agreed(section.get("device", "auto"), "cpu" if wanted else "none", f"{where}.{part}.device", stated)
        if wanted:
            zero[part] = _without_auto(section) | {"device": device}
    # DeepSpeed would replace torch.nn.functional.linear for the whole process
    return {"memory_efficient_linear": False} | _without_auto(zero)


def _check_precision(rest: dict[str, Any], train: TrainConfig, source: str) -> None:
    """Half precision is autocast over fp32 weights here. Of a section that is off nothing else is read, here as in DeepSpeed."""
    stated, names = f"train.precision = {train.precision!r}", AUTOCAST.get(train.precision, ())
    for name, known in {"fp16": SCALER, "bf16": {}, "torch_autocast": {"dtype": names}}.items():
        section = _taken(rest, name, source)
        active = train.precision == name or (name == "torch_autocast" and bool(names))
        _agreed(section.pop("enabled", "auto"), active, f"{source}: {name}.enabled", stated)
        if section.get("dtype") in names:
            section["dtype"] = names
        _check_known(section if active else {}, known, f"{source}: {name}", stated)


def _check_optimizer(section: dict[str, Any], train: TrainConfig, source: str) -> None:
    mine, kind = train.optimizer, section.get("type", "auto")
    if str(kind).lower() not in OPTIMIZERS:
        raise ConfigError(f"{source}: optimizer.type = {kind!r} but train.optimizer.kind = {mine.kind!r}; remove the section")
    numbers = {"lr": mine.lr, "betas": list(mine.betas), "eps": mine.eps, "weight_decay": mine.weight_decay}
    _check_known(_taken(section, "params", f"{source}: optimizer"), numbers | ADAMW, f"{source}: optimizer.params", "train.optimizer")


def _check_scheduler(section: dict[str, Any], train: TrainConfig, source: str) -> None:
    """None of DeepSpeed's schedules is one of the run's: even its warm-up is another curve."""
    params = _taken(section, "params", f"{source}: scheduler")
    if given := _without_auto(section | params):
        raise ConfigError(f"{source}: scheduler {given} but train.optimizer.schedule = {train.optimizer.schedule!r}; remove the section")


def _taken(above: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """The section ``name``, taken out of ``above``; empty where there is none, ConfigError where it is something else."""
    section = above.pop(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: {name} = {section!r}, but it is a section: write {{...}} with \"auto\" inside, or remove it")
    return dict(section)


def _check_known(section: dict[str, Any], known: dict[str, Any], where: str, stated: str) -> None:
    """Every value of a section that DeepSpeed does not get is the run's own."""
    for key, value in section.items():
        if key not in known and value != "auto":
            raise ConfigError(f"{where}.{key} = {value!r}, but {stated} knows no {key}; remove it")
        _agreed(value, known.get(key), f"{where}.{key}", f"{stated} has {key} {known.get(key)!r}")


def _agreed(given: Any, wanted: Any, where: str, stated: str) -> Any:
    if given != "auto" and given != wanted:
        raise ConfigError(f"{where} = {given!r} but {stated}; make them equal or write \"auto\"")
    return wanted


def _without_auto(section: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's own defaults stand for what is still "auto"."""
    kept = {key: value for key, value in section.items() if value != "auto"}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in kept.items()}
