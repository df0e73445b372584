"""Which settings go together, checked before anything is downloaded or started. Each refusal is one line that says what to use.

What is not listed is allowed and tested: fp32, tf32 and bf16 everywhere; fp16 with a loss scaler on single, torch and deepspeed; LoRA
everywhere; 4- and 8-bit base weights where no device cuts them (single, torch ddp, ZeRO 0-2), DoRA above 4-bit ones only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mmkit.config import ConfigError, RunConfig
from mmkit.sharding.deepspeed_file import filled_settings, read_file


class Facts(NamedTuple):
    """The settings that combinations are about; ``machinery`` tells torch's two strategies and DeepSpeed's stages apart."""

    kind: str  # single, torch, deepspeed, xla
    machinery: str  # single, torch ddp, torch fsdp, ZeRO-0 ... ZeRO-3, xla
    quantised: bool
    offload: bool
    run: RunConfig

    @classmethod
    def of(cls, run: RunConfig) -> Facts:
        """Read from a run."""
        backend = run.backend
        details = {"torch": f"torch {backend.strategy}", "deepspeed": f"ZeRO-{backend.zero_stage}"}
        return cls(backend.kind, details.get(backend.kind, backend.kind), run.train.bits < 16, backend.offload, run)


class Refusal(NamedTuple):
    """A forbidden combination: when it is met, and what to say ({bits} and so on are filled in)."""

    when: Callable[[Facts], bool]
    message: str


CUTS_WEIGHTS = ("torch fsdp", "ZeRO-3", "xla")  # machinery that stores a parameter in parts
OFFLOADS = ("torch fsdp", "ZeRO-1", "ZeRO-2", "ZeRO-3")
REFUSALS: dict[str, Refusal] = {
    "bits x cut weights": Refusal(
        lambda f: f.quantised and f.machinery in CUTS_WEIGHTS,
        "train.bits = {bits}: {machinery} cannot cut quantised weights; use backend kind torch with strategy ddp, or zero_stage 2",
    ),
    "bits x offload": Refusal(
        lambda f: f.quantised and f.offload and f.machinery not in CUTS_WEIGHTS,
        "train.bits = {bits} with backend.offload: quantised weights stay on their device; set backend.offload false",
    ),
    "bits x trained language": Refusal(
        lambda f: f.quantised and "language" in f.run.train.trainable,
        "train.bits = {bits}: quantised weights cannot be trained; take 'language' out of train.trainable and use train.lora",
    ),
    "bits x clip": Refusal(
        lambda f: f.quantised and f.run.model.kind == "clip",
        "train.bits = {bits}: model {preset} has no language model to quantise; use bits 16",
    ),
    "8 bits x DoRA": Refusal(
        lambda f: f.run.train.bits == 8 and f.run.train.lora is not None and f.run.train.lora.use_dora,
        "train.bits = 8 with lora.use_dora: DoRA cannot read 8-bit weights; use bits 4 or 16, or plain LoRA",
    ),
    "fp16 x xla": Refusal(
        lambda f: f.run.train.precision == "fp16" and f.kind == "xla",
        "train.precision = fp16 does not exist on backend xla; use bf16",
    ),
    "8-bit Adam x machinery": Refusal(
        lambda f: f.run.train.optimizer.kind == "adamw_8bit" and f.machinery not in ("single", "torch ddp", "auto"),
        "train.optimizer.kind = adamw_8bit: {machinery} cannot cut 8-bit moments; use adamw (already cut) or torch ddp",
    ),
    "offload x machinery": Refusal(
        lambda f: f.offload and f.machinery not in (*OFFLOADS, "auto"),
        "backend.offload: {machinery} has nothing to offload; use deepspeed with zero_stage 1 to 3 or torch fsdp",
    ),
    "single x processes": Refusal(
        lambda f: f.kind == "single" and f.run.backend.world > 1,
        "backend.kind = single is one process, but backend.processes x nodes = {n_processes}; use torch or deepspeed",
    ),
    "xla devices x kind": Refusal(
        lambda f: f.kind not in ("xla", "auto") and bool(f.run.backend.xla_devices or f.run.backend.fsdp_axis),
        "backend.xla_devices and fsdp_axis mean nothing on {machinery}; remove them or use backend.kind = xla",
    ),
    "xla devices x processes": Refusal(
        lambda f: f.kind == "xla" and bool(f.run.backend.xla_devices) and f.run.backend.world > 1,
        "backend.xla_devices counts the devices of all hosts in one program, but backend.processes x nodes = {n_processes}; set both to 1",
    ),
    "mesh x axis": Refusal(
        lambda f: bool(f.run.backend.xla_devices and f.run.backend.fsdp_axis) and bool(f.run.backend.xla_devices % f.run.backend.fsdp_axis),
        "backend.fsdp_axis does not divide backend.xla_devices; use a divisor",
    ),
    "deepspeed file x kind": Refusal(
        lambda f: f.kind not in ("deepspeed", "auto") and f.run.backend.deepspeed_config is not None,
        "backend.deepspeed_config is given but backend.kind = {kind}; set kind to deepspeed or remove the file",
    ),
}


def check_combination(run: RunConfig) -> None:
    """ConfigError with one line for each combination of ``run`` that cannot work; a DeepSpeed file is compared with the run too."""
    facts = Facts.of(run)
    words = {
        "bits": run.train.bits, "machinery": facts.machinery, "kind": facts.kind, "preset": run.preset,
        "n_processes": run.backend.world,
    }  # fmt: skip
    met = [refusal.message.format(**words) for refusal in REFUSALS.values() if refusal.when(facts)]
    if met:
        raise ConfigError("\n".join(met))
    file = run.backend.deepspeed_config
    if file and run.backend.kind != "auto":
        filled_settings(read_file(file), run.backend, run.train, run.accumulation, run.devices)
