"""Ferret's weights: published as differences to Vicuna v1.3, since the base may not be passed on.

target = delta + base for every tensor of the base; embeddings and head have rows more than the base (the region token), which
are stored as they are, like all tensors the base does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from mmkit.errors import InputError
from mmkit.models.convert.files import Lookup

NORM = "model.norm.weight"


def apply_delta(delta: Iterable[tuple[str, Tensor]], base: Path) -> Iterator[tuple[str, Tensor]]:
    """(original name, tensor) of the target model; ValueError where a tensor of the base has no difference."""
    lookup = Lookup(base)
    left = {name for name in lookup if not name.endswith("rotary_emb.inv_freq")}
    for name, tensor in delta:
        left.discard(name)
        yield name, _sum(name, tensor, lookup[name]) if name in lookup else tensor
    if left:
        raise InputError(f"the delta lacks {len(left)} tensors of the base {base}: {', '.join(sorted(left))}")


def _sum(name: str, delta: Tensor, base: Tensor) -> Tensor:
    if delta.shape == base.shape:
        return (delta.float() + base.float()).to(delta.dtype)
    grown = name.endswith(("embed_tokens.weight", "lm_head.weight"))
    if not grown or delta.shape[1:] != base.shape[1:] or delta.shape[0] < base.shape[0]:
        raise InputError(f"{name}: the delta has shape {tuple(delta.shape)}, the base {tuple(base.shape)}")
    whole = delta.clone()
    whole[: base.shape[0]] = (delta[: base.shape[0]].float() + base.float()).to(delta.dtype)
    return whole


def check_not_delta(tensors: Lookup, path: Path) -> None:
    """ValueError where the final norm is about zero: a difference taken for weights gives fluent nonsense, not an error."""
    if NORM in tensors and tensors[NORM].float().abs().mean() < 0.01:
        raise InputError(
            f"{path} holds a difference to a base model ({NORM} is about 0); "
            "give the base (Vicuna v1.3 of the same size) as base"
        )
