"""LoRA by peft: which layers get adapters, 4- and 8-bit base weights below them, and merging without losing the adapter.

Layers are chosen by component and full name, never by a last word that other components share (U52). Merging is done in
double precision from unquantised weights, and says how much of each adapter the storage type would round away (U50).
Not here: writing adapters to disk (`models.pretrained`), and which combinations of bits and backend exist (`sharding.combinations`).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmkit.config import ConfigError, LoraConfig
from mmkit.training.optim import Components, component_of

log = logging.getLogger(__name__)

ADAPTER = "default"  # peft's name for the one adapter a model has
LOSS_LIMIT = 0.05  # of a merge: more rounding than this share of the adapter is refused


# ---------------------------------------------------------------- which layers


def targets_of(model: nn.Module, lora: LoraConfig, components: Components, head: nn.Module | None = None) -> list[str]:
    """Full names of the layers that get an adapter: every linear layer of ``lora.components`` but the head, or those whose full
    name, or a whole-word end of it, fits one of ``lora.targets`` (regular expressions: ``q_proj``, ``layers\\.[0-3]\\..*``).

    Raises ConfigError where a pattern, or the whole scope, matches nothing; the message lists what there is.
    """
    linear = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and not _inside_attention(model, name):
            linear[name] = component_of(f"{name}.weight", components)
    scope = [name for name, component in linear.items() if component in lora.components]
    if not scope:
        there = ", ".join(f"{component} ({n})" for component, n in Counter(linear.values()).items()) or "none"
        raise ConfigError(f"lora.components {list(lora.components)} have no linear layer; components with linear layers are {there}")
    if not lora.targets:
        return scope
    chosen = []
    for pattern in lora.targets:
        found = [name for name in scope if _fits(pattern, name)]
        if not found:
            examples = ", ".join(sorted({_shape_of(name) for name in scope})[:6])
            raise ConfigError(
                f"lora.targets pattern {pattern!r} matches no linear layer of {', '.join(lora.components)}; "
                f"full names look like {examples}"
            )
        chosen += [name for name in found if name not in chosen]
    return chosen


def _fits(pattern: str, name: str) -> bool:
    return re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name) is not None


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
    in peft's copy of them: tied weights stay tied, and names stay those of the model.
    """
    import peft

    names = targets_of(model, lora, components, head)
    kept = _full_names(model, lora.modules_to_save)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, use_rslora=lora.use_rslora, use_dora=lora.use_dora,
        target_modules="|".join(re.escape(name) for name in names),
    )  # fmt: skip
    peft.inject_adapter_in_model(config, model, ADAPTER)
    for layer in lora_layers(model).values():
        _draw(layer)
    for name in kept:
        model.get_submodule(name).requires_grad_(True)
    rows = adapted(model, components)
    if sum(row["layers"] for row in rows) != len(names):
        raise ConfigError(f"peft adapted {sum(row['layers'] for row in rows)} layers, {len(names)} were chosen")
    return rows


def _draw(layer: nn.Module) -> None:
    """Gives an adapter its first values in fp32 where its base weight has no memory yet: peft puts adapters where the base is."""
    if layer.lora_A[ADAPTER].weight.is_meta:
        for half in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            half.to_empty(device="cpu").float()
        layer.reset_lora_parameters(ADAPTER, True)


def _full_names(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Modules whose full name fits a pattern; ConfigError for one that fits none."""
    found = []
    for pattern in patterns:
        names = [name for name, _ in model.named_modules() if name and _fits(pattern, name)]
        if not names:
            raise ConfigError(f"lora.modules_to_save pattern {pattern!r} matches no module")
        found += names
    return found


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Full name -> adapted layer."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer) and ADAPTER in module.lora_A}


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


# ---------------------------------------------------------------- merging


@dataclass(frozen=True)
class MergeReport:
    """How much of each adapter the storage type rounds away: |stored - exact| / |adapter's change|, by layer."""

    losses: dict[str, float]
    dtype: str
    max_logit_change: float | None = None

    @property
    def worst(self) -> float:
        """The largest loss of a layer."""
        return max(self.losses.values(), default=0.0)

    def __str__(self) -> str:
        name = max(self.losses, key=self.losses.get, default="")
        logits = "" if self.max_logit_change is None else f"; largest change of a logit {self.max_logit_change:.2e}"
        return f"merged {len(self.losses)} layers into {self.dtype}: {self.worst:.2%} of the adapter lost at worst ({name}){logits}"


def merge(
    model: nn.Module,
    *,
    base: Callable[[str], Tensor] | None = None,
    limit: float = LOSS_LIMIT,
    force: bool = False,
    probe: Callable[[], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> MergeReport:
    """Folds the adapters into plain linear layers of ``dtype`` (None: the base weight's own, fp32 for a quantised base).

    ``base(name)`` gives the unquantised weight of layer ``name``; it is required for a quantised base. ``probe`` runs the model and
    returns logits, to report how much they change. ValueError, with the model untouched, where a layer would lose more than
    ``limit`` of its adapter and ``force`` is not set.
    """
    before = probe().float() if probe else None
    made, losses = {}, {}
    for name, layer in lora_layers(model).items():
        weight = _base_weight(name, layer, base)
        exact = _merged(layer, weight.double())
        kind = dtype or (weight.dtype if weight.is_floating_point() else torch.float32)
        stored = exact.to(kind)
        change = (exact - weight.double()).norm()
        losses[name] = float((stored.double() - exact).norm() / change) if change else 0.0
        made[name] = stored
    report = MergeReport(losses, str(dtype or _common_dtype(made)).removeprefix("torch."))
    if report.worst > limit and not force:
        raise ValueError(f"{report}; above the limit of {limit:.0%}: merge into float32, keep the adapter apart, or pass force=True")
    for name, weight in made.items():
        _replace(model, name, weight)
    if before is None:
        return report
    return MergeReport(losses, report.dtype, float((probe().float() - before).abs().max()))


def _common_dtype(made: dict[str, Tensor]) -> torch.dtype | str:
    kinds = {weight.dtype for weight in made.values()}
    return kinds.pop() if len(kinds) == 1 else "mixed types"


def _base_weight(name: str, layer: nn.Module, base: Callable[[str], Tensor] | None) -> Tensor:
    weight = layer.get_base_layer().weight
    if base is not None:
        return base(name).to(weight.device)
    if not weight.is_floating_point():
        raise ValueError(f"{name} has {weight.dtype} weights: merge needs base(name) -> the unquantised weight")
    return weight.detach()


def _merged(layer: nn.Module, weight: Tensor) -> Tensor:
    """The weight that does alone what base and adapter do together (LoRA section 4; DoRA section 4)."""
    a, b = layer.lora_A[ADAPTER].weight.detach().double(), layer.lora_B[ADAPTER].weight.detach().double()
    merged = weight + b @ a * layer.scaling[ADAPTER]
    if layer.use_dora.get(ADAPTER):
        magnitude = layer.lora_magnitude_vector[ADAPTER].weight.detach().double()
        merged = merged * (magnitude / merged.norm(dim=1))[:, None]
    return merged


def _replace(model: nn.Module, name: str, weight: Tensor) -> None:
    old = model.get_submodule(name)
    bias = old.get_base_layer().bias
    new = nn.Linear(old.in_features, old.out_features, bias=bias is not None, device="meta")
    new.weight = nn.Parameter(weight, requires_grad=False)
    new.bias = bias
    new.train(old.training)
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)

