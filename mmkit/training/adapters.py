"""LoRA by peft: which layers get adapters, and 4- and 8-bit base weights below them.

Layers are chosen by component and full name, never by a last word that other components share (U52). Not here: writing adapters to
disk (`models.pretrained`), merging them (`models.merging`), and which combinations of bits and backend exist (`sharding.combinations`).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from mmkit.config import ConfigError, LoraConfig
from mmkit.training.optim import Components, compiled, component_of

log = logging.getLogger(__name__)

ADAPTER = "default"  # peft's name for the one adapter a model has


# ---------------------------------------------------------------- which layers


def targets_of(model: nn.Module, lora: LoraConfig, components: Components, head: nn.Module | None = None) -> list[str]:
    """Full names of the layers that get an adapter: every linear layer of ``lora.components`` but the head, or those whose full
    name, or a whole-word end of it, fits one of ``lora.targets`` (regular expressions: ``q_proj``, ``layers\\.[0-3]\\..*``).

    Raises ConfigError where a pattern, or one of the components, matches nothing; the message lists what there is.
    """
    linear = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and not _inside_attention(model, name):
            linear[name] = component_of(f"{name}.weight", components)
    if absent := [component for component in lora.components if component not in linear.values()]:
        there = ", ".join(f"{component} ({n})" for component, n in Counter(linear.values()).items()) or "none"
        raise ConfigError(f"lora.components {absent} have no linear layer in this model; components with linear layers are {there}")
    scope = [name for name, component in linear.items() if component in lora.components]
    if not lora.targets:
        return scope
    chosen = []
    for pattern in lora.targets:
        found = _fitting("lora.targets", pattern, scope)
        if not found:
            examples = ", ".join(sorted({_shape_of(name) for name in scope})[:6])
            raise ConfigError(
                f"lora.targets pattern {pattern!r} matches no linear layer of {', '.join(lora.components)}; "
                f"full names look like {examples}"
            )
        chosen += [name for name in found if name not in chosen]
    return chosen


def _fitting(setting: str, pattern: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that a pattern fits whole, or from the beginning of one of their words to the end."""
    fits = compiled(setting, pattern).fullmatch
    return [name for name in names if any(fits(name, place.end()) for place in re.finditer(r"^|\.", name))]


def _inside_attention(model: nn.Module, name: str) -> bool:
    """Whether a linear layer is torch's attention's own output: its forward is never called, so an adapter on it would not train."""
    parent = model.get_submodule(name.rpartition(".")[0])
    return isinstance(parent, nn.MultiheadAttention)


def _shape_of(name: str) -> str:
    """``language.model.layers.*.mlp.up_proj`` of one of its layers."""
    return re.sub(r"\.\d+\.", ".*.", name)


def inject(model: nn.Module, lora: LoraConfig, components: Components, head: nn.Module | None = None) -> list[dict]:
    """Puts adapters into ``model`` and leaves only them (and `modules_to_save`) trainable. Returns the table of `adapted`.

    The order is freeze, adapters, then wrap: a wrapped model has no place for new parameters. Modules to save train in place, not
    in peft's copy of them: tied weights stay tied, and names stay those of the model. All that trains is in fp32.
    """
    import peft

    names = targets_of(model, lora, components, head)
    kept = modules_to_save(model, lora.modules_to_save, names)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, use_rslora=lora.use_rslora, use_dora=lora.use_dora,
        target_modules="|".join(re.escape(name) for name in names),
    )  # fmt: skip
    peft.inject_adapter_in_model(config, model, ADAPTER)
    # only now, or peft would train copies: the adapter's folder carries these modules, and tied ones under
    # each of their names
    whole = {id(p) for name in kept for p in model.get_submodule(name).parameters()}
    own = {name: map(id, part.parameters(recurse=False)) for name, part in model.named_modules()}
    tied = [name for name, parameters in own.items() if not whole.isdisjoint(parameters)]
    outer = [name for name in kept if not any(name.startswith(f"{other}.") for other in kept)]
    outer += [name for name in tied if not any(f"{name}.".startswith(f"{other}.") for other in outer)]
    model.peft_config[ADAPTER].modules_to_save = outer or None
    for layer in lora_layers(model).values():
        _draw(layer)
    for parameter in (p for name in kept for p in model.get_submodule(name).parameters()):
        parameter.requires_grad_(True)
        parameter.data = parameter.data.float()
    rows = adapted(model, components)
    if sum(row["layers"] for row in rows) != len(names):
        raise ConfigError(f"peft adapted {sum(row['layers'] for row in rows)} layers, {len(names)} were chosen")
    return rows


def _draw(layer: nn.Module) -> None:
    """Gives an adapter its first values in fp32 where peft did not: it puts adapters where the base is, which may have no memory yet, and
    in the type that a quantised base computes with, which would also round the values that training starts from."""
    halves = (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER])
    first = halves[0].weight
    if not first.is_meta and first.dtype == torch.float32:
        return
    for half in halves:
        half.to_empty(device="cpu" if first.is_meta else first.device).float()
    layer.reset_lora_parameters(ADAPTER, True)
    if layer.use_dora.get(ADAPTER):
        a, b = (half.weight for half in halves)
        layer.lora_magnitude_vector[ADAPTER].update_layer(
            base_layer=layer.get_base_layer(), lora_A=a, lora_B=b, scaling=layer.scaling[ADAPTER]
        )


def modules_to_save(model: nn.Module, patterns: Sequence[str], targets: Iterable[str]) -> list[str]:
    """Modules whose full name fits a pattern; ConfigError where it fits none that can train whole: none at all, without parameters,
    quantised, or with an adapted layer in it (the layer would then train twice, under two names)."""
    found = []
    for pattern in patterns:
        setting = f"lora.modules_to_save pattern {pattern!r}"
        names = _fitting("lora.modules_to_save", pattern, (name for name, _ in model.named_modules() if name))
        if not names:
            raise ConfigError(f"{setting} matches no module")
        modules = {name: list(model.get_submodule(name).parameters()) for name in names}
        modules = {name: parameters for name, parameters in modules.items() if parameters}
        if not modules:
            raise ConfigError(f"{setting} matches {names[0]}, which has no parameters to train")
        for name, parameters in modules.items():
            if twice := next((target for target in targets if f"{target}.".startswith(f"{name}.")), None):
                raise ConfigError(f"{setting} matches {name}, but {twice} gets an adapter; take one of them out (lora.targets)")
            if not all(parameter.is_floating_point() for parameter in parameters):
                raise ConfigError(f"{setting} matches {name}, whose weights are quantised and cannot train; take it out or use bits 16")
        found += modules
    return found


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Full name -> adapted layer."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer) and ADAPTER in module.lora_A}


def chosen(names: Iterable[str], components: Components) -> list[dict]:
    """One row a component and kind of layer among the layers that get an adapter (`targets_of`): how many."""
    counts = Counter((component_of(f"{name}.weight", components), _shape_of(name)) for name in names)
    return [{"component": component, "layer": layer, "layers": count} for (component, layer), count in counts.items()]


def adapted(model: nn.Module, components: Components) -> list[dict]:
    """One row a component and kind of layer: how many are adapted, trained and base parameters."""
    rows: dict[tuple[str, str], dict] = {}
    for name, layer in lora_layers(model).items():
        component = component_of(f"{name}.weight", components)
        kind = _shape_of(name)
        row = rows.setdefault((component, kind), {"component": component, "layer": kind, "layers": 0, "trained": 0, "base": 0})
        row["layers"] += 1
        row["trained"] += sum(p.numel() for p in layer.parameters() if p.requires_grad)
        row["base"] += layer.in_features * layer.out_features
    return list(rows.values())


def table_text(rows: Iterable[dict]) -> str:
    """`adapted` as aligned text."""
    lines = [f"{'component':12} {'layer':56} {'count':>6} {'trained':>12} {'base':>14}"]
    lines += [f"{r['component']:12} {r['layer']:56} {r['layers']:6d} {r['trained']:12,d} {r['base']:14,d}" for r in rows]
    return "\n".join(lines)


# ---------------------------------------------------------------- quantised base


def quantise(module: nn.Module, bits: int, compute_dtype: torch.dtype, skip: nn.Module | None = None) -> int:
    """Replaces the linear layers of a frozen ``module`` but ``skip`` by 4-bit (nf4, double quantisation) or 8-bit ones of
    bitsandbytes; returns how many. Weights must be loaded; call it before `inject`."""
    import bitsandbytes

    make = {4: _nf4, 8: _int8}[bits]
    found = [(name, layer) for name, layer in module.named_modules() if type(layer) is nn.Linear and layer is not skip]
    for name, layer in found:
        parent = module.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], make(bitsandbytes, layer, compute_dtype))
    return len(found)


def _nf4(bitsandbytes, layer: nn.Linear, compute_dtype: torch.dtype) -> nn.Module:
    settings = {"compress_statistics": True, "quant_type": "nf4"}
    new = bitsandbytes.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=layer.bias is not None, compute_dtype=compute_dtype, device="meta", **settings
    )
    new.weight = bitsandbytes.nn.Params4bit(layer.weight.detach(), requires_grad=False, module=new, **settings)
    new.bias = layer.bias
    return new.to(layer.weight.device)  # quantises


def _int8(bitsandbytes, layer: nn.Linear, compute_dtype: torch.dtype) -> nn.Module:
    new = bitsandbytes.nn.Linear8bitLt(
        layer.in_features, layer.out_features, bias=layer.bias is not None, has_fp16_weights=False, device="meta"
    )
    new.weight = bitsandbytes.nn.Int8Params(layer.weight.detach(), requires_grad=False, has_fp16_weights=False)
    new.bias = layer.bias
    return new.to(layer.weight.device)
