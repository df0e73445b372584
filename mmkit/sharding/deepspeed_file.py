"""A user's DeepSpeed file filled in and checked against the run: no DeepSpeed is imported here.

``"auto"`` takes the run's value. A value that contradicts the run is a ConfigError naming both. Keys the run does not know are
DeepSpeed's own business and stay as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmkit.config import PARAMS, BackendConfig, ConfigError, TrainConfig

OPTIMIZERS = ("adam", "adamw")  # of a file: both mean torch's AdamW here


def read_file(path: str | None) -> dict[str, Any]:
    """The file's settings; a bare name (``zero3``) is one of ``params/deepspeed``. Empty without a path."""
    if path is None:
        return {}
    candidates = [Path(path), PARAMS / "deepspeed" / f"{path}.json"]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise ConfigError(f"backend.deepspeed_config = {path!r}: no such file, and none of {', '.join(_known())} in params/deepspeed")
    try:
        return json.loads(found.read_text(encoding="utf8")) | {"_file": str(found)}
    except json.JSONDecodeError as error:
        raise ConfigError(f"backend.deepspeed_config = {path!r} is not JSON: {error}") from None


def _known() -> list[str]:
    return sorted(path.stem for path in (PARAMS / "deepspeed").glob("*.json"))


def filled_settings(
    file: dict[str, Any], backend: BackendConfig, train: TrainConfig, accumulation: int, world: int
) -> dict[str, Any]:
    """What `deepspeed.initialize` gets: ``file`` with every "auto" replaced. ConfigError where the file contradicts the run."""
    source = file.get("_file", "deepspeed file")
    rest = {key: value for key, value in file.items() if key != "_file"}
    _check_precision(rest, train, source)
    _check_optimizer(rest.pop("optimizer", {}), train, source)
    if scheduler := rest.pop("scheduler", None):
        given = {key: value for key, value in scheduler.get("params", {}).items() if value != "auto"}
        if given:
            raise ConfigError(f"{source}: scheduler {given} but train.optimizer.schedule = {train.optimizer.schedule!r}; remove one")
    run = {
        "train_batch_size": (train.device_batch * accumulation * world, "train.global_batch"),
        "train_micro_batch_size_per_gpu": (train.device_batch, "train.device_batch"),
        "gradient_accumulation_steps": (accumulation, "global_batch / (device_batch x devices)"),
        "gradient_clipping": (train.optimizer.max_grad_norm or 0.0, "train.optimizer.max_grad_norm"),
    }
    out = {key: _agreed(rest.pop(key, "auto"), value, f"{source}: {key}", name) for key, (value, name) in run.items()}
    out["zero_optimization"] = _zero(rest.pop("zero_optimization", {}), backend, source)
    return _without_auto(rest) | out | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def _zero(zero: dict[str, Any], backend: BackendConfig, source: str) -> dict[str, Any]:
    zero = dict(zero)
    zero["stage"] = _agreed(zero.get("stage", "auto"), backend.zero_stage, f"{source}: zero_optimization.stage", "backend.zero_stage")
    wanted = "cpu" if backend.offload else "none"
    parts = ("offload_optimizer", "offload_param") if zero["stage"] == 3 else ("offload_optimizer",)
    for part in parts:
        section = zero.get(part, {}) if isinstance(zero.get(part, {}), dict) else {}
        device = _agreed(section.get("device", "auto"), wanted, f"{source}: zero_optimization.{part}.device", "backend.offload")
        zero[part] = _without_auto(section) | {"device": device}
        if device == "none":
            zero.pop(part)
    # DeepSpeed would replace torch.nn.functional.linear for the whole process
    return {"memory_efficient_linear": False} | _without_auto(zero)


def _check_precision(rest: dict[str, Any], train: TrainConfig, source: str) -> None:
    """Half precision is autocast over fp32 weights here, so the sections are checked and taken out."""
    for name in ("fp16", "bf16", "torch_autocast"):
        enabled = rest.pop(name, {}).get("enabled", "auto")
        if name != "torch_autocast":
            _agreed(enabled, train.precision == name, f"{source}: {name}.enabled", f"train.precision = {train.precision!r}, that is")


def _check_optimizer(section: dict[str, Any], train: TrainConfig, source: str) -> None:
    kind = section.get("type", "AdamW")
    if kind.lower() not in OPTIMIZERS:
        raise ConfigError(f"{source}: optimizer.type = {kind!r} but train.optimizer.kind = {train.optimizer.kind!r}; remove the section")
    mine = {"lr": train.optimizer.lr, "betas": list(train.optimizer.betas), "eps": train.optimizer.eps}
    for key, value in (mine | {"weight_decay": train.optimizer.weight_decay}).items():
        _agreed(section.get("params", {}).get(key, "auto"), value, f"{source}: optimizer.params.{key}", f"train.optimizer.{key}")


def _agreed(given: Any, wanted: Any, where: str, setting: str) -> Any:
    if given != "auto" and given != wanted:
        raise ConfigError(f"{where} = {given!r} but {setting} = {wanted!r}; make them equal or write \"auto\"")
    return wanted


def _without_auto(section: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's own defaults stand for what is still "auto"."""
    kept = {key: value for key, value in section.items() if value != "auto"}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in kept.items()}
