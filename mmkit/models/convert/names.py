"""Names of the published Cambrian, Ferret and LLaVA weights, and ours for the same tensors.

Pure renaming: no tensor changes its shape. `ours` and `original` are inverse to each other on every name the three systems have.
"""

from __future__ import annotations

import re

from mmkit.errors import InputError


# (original pattern, our pattern); {n} stands for a number, rules are tried in order and the first that matches counts
_SAMPLER = (
    ("proj_context.", "context."),
    ("proj_in.", "query_in."),
    ("pos_embed_{n}", "positions.{n}.weight"),
    ("cross_attn.q_proj.", "attention.query."),
    ("cross_attn.k_proj_{n}.", "attention.keys.{n}."),
    ("cross_attn.v_proj_{n}.", "attention.values.{n}."),
    ("cross_attn.o_proj.", "attention.out."),
    ("proj_out.linear_1.", "out.0."),
    ("proj_out.linear_2.", "out.2."),
    ("weight_mlp.linear_1.", "gate.0."),
    ("weight_mlp.linear_2.", "gate.2."),
    ("aggregate_{n}.attention_layer.linear_1.", "sources.{n}.0."),
    ("aggregate_{n}.attention_layer.linear_2.", "sources.{n}.2."),
    ("aggregate_{n}.attention_layer.q_proj.", "sources.{n}.query."),
    ("aggregate_{n}.attention_layer.k_proj.", "sources.{n}.keys.0."),
    ("aggregate_{n}.attention_layer.v_proj.", "sources.{n}.values.0."),
    ("aggregate_{n}.attention_layer.o_proj.", "sources.{n}.out."),
)
_STEMS = (
    ("model.mm_projector_aux_{n}.", "connector.projections.{n}."),
    ("model.vision_query", "connector.queries"),
    ("model.vision_sampler_layers.{n}.layers.{n}.", "samplers.{n}.layers.{n}."),
    ("model.vision_sampler_{n}.layers.{n}.", "connector.groups.{n}.layers.{n}."),
    ("model.image_newline", "connector.newline"),
    ("model.mm_projector.weight", "connector.output.0.weight"),
    ("model.mm_projector.bias", "connector.output.0.bias"),
    ("model.mm_projector.{n}.", "connector.output.{n}."),
    ("model.region_geo_sampler.diff_projector_list.{n}.", "regions.stages.{n}.difference."),
    ("model.region_geo_sampler.agg_projector_list.{n}.net.0.", "regions.stages.{n}.aggregate."),
    ("model.region_geo_sampler.agg_projector_list.{n}.norm.", "regions.stages.{n}.norm."),
    ("model.region_geo_sampler.flatten_projector.", "regions.flatten."),
    ("model.region_geo_sampler.dim_projector.", "regions.output."),
    ("model.region_fea_adapter.", "regions.output."),
)
_LAYER = re.compile(r"(.*?\blayers\.\d+\.)(.*)")
_WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod|base_model\.model)\.)+")

# What stands before the name of a connector or region tensor in adapter-only files, which differ in their prefixes.
PART = re.compile(
    r"^.*?(?=(?:mm_projector|vision_query|vision_sampler|image_newline|region_geo_sampler|region_fea_adapter)[._]"
    r"|(?:vision_query|image_newline)$)"
)


def unwrapped(name: str) -> str:
    """``name`` without the prefixes that DDP, torch.compile and peft put before it."""
    return _WRAPPERS.sub("", name)


def ours(name: str) -> str:
    """Our name of an original tensor; wrapper prefixes (``module.``, ``_orig_mod.``, peft's) are dropped.

    What no rule names is the language model's.
    """
    name = unwrapped(name)
    for there, here in _STEMS:
        if (renamed := _swap(name, there, here)) is not None:
            return _sampler_part(renamed, 0, 1) if "layers" in there else renamed
    return "language." + name


def original(name: str, linear: bool = False, mean: bool = False) -> str:
    """The original name of our tensor. ``linear``: the connector is one linear layer; ``mean``: regions are means of points.

    Both cases have a shorter original name. Raises ValueError for a tensor that the originals do not have.
    """
    if name.startswith("language."):
        return name.removeprefix("language.")
    skipped = "region_geo_sampler" if mean else "region_fea_adapter"
    for there, here in _STEMS:
        bare = there in ("model.mm_projector.weight", "model.mm_projector.bias")
        if skipped in there or (bare and not linear):
            continue
        if (renamed := _swap(name, here, there)) is not None:
            return _sampler_part(renamed, 1, 0) if "layers" in there else renamed
    raise InputError(f"tensor {name!r} has no name in the published format")


def _sampler_part(name: str, there: int, here: int) -> str:
    match = _LAYER.fullmatch(name)
    if not match:
        return name
    head, tail = match.groups()
    for rule in _SAMPLER:
        if (renamed := _swap(tail, rule[there], rule[here])) is not None:
            return head + renamed
    return name


def _swap(name: str, there: str, here: str) -> str | None:
    """``name`` with its beginning ``there`` replaced by ``here``, or None where it begins otherwise."""
    match = re.match(re.escape(there).replace(r"\{n\}", r"(\d+)"), name)
    whole = not there.endswith(".")  # a full name, not a beginning
    if not match or (whole and match.end() != len(name)):
        return None
    numbers = iter(match.groups())
    return re.sub(r"\{n\}", lambda _: next(numbers), here) + name[match.end() :]
