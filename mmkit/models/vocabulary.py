"""Tokens added to a language model's vocabulary: which rows of its embedding and head are theirs, and
training these rows alone.

Rows that train alone are a parameter of their own above a frozen table, so whatever an optimizer does (weight
decay, 8-bit moments, a shard's padding) the old rows keep their bits, and neither gradients nor moments of
the whole table take memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmkit.config import ConfigError, VlmConfig
from mmkit.models.build import pack_folder, source_tokenizer, tokenizer
from mmkit.models.convert import files
from mmkit.models.hollow import base_name

ROWS = "added_rows"  # the parameter's name in its module


def added_tokens(config: VlmConfig) -> list[int]:
    """Ids of the tokens that ``config`` adds to its language model: the rows that its weights' files lack,
    and those tokens which the run's tokenizer puts into spare rows. Reads the source's config and tokenizer;
    InputError or ConfigError where they cannot be read."""
    from transformers import AutoConfig

    source, size = config.language.source, config.language.architecture["vocab_size"]
    old = size
    if source != "random":
        folder = pack_folder(source) or files.locate(source, weights=False)
        old = AutoConfig.from_pretrained(folder).vocab_size
    ids = set(range(old, size))
    if config.regions or config.language.tokenizer:
        own = config.language.tokenizer if source == "random" else source
        try:
            known = source_tokenizer(own).get_vocab() if own else {}
        except ConfigError:  # weights without a tokenizer: only the rows that they lack are known to be new
            known = None
        if known is not None:
            added = tokenizer(config).get_added_vocab()
            ids |= {number for token, number in added.items() if token not in known}
    return sorted(ids)


class AddedRows(nn.Module):
    """An embedding or a head of which only the rows ``ids`` (n,) train: ``added_rows`` (n, D) stand in their
    place.

    ``bias`` (n,): what a head adds to these rows.
    """

    def __init__(self, base_layer: nn.Module, ids: list[int], rows: nn.Parameter, bias: Tensor | None = None):
        super().__init__()
        self.base_layer, self.added_rows = base_layer.requires_grad_(False), rows
        place = torch.full((base_layer.weight.shape[0],), -1)
        place[ids] = torch.arange(len(ids))
        self.register_buffer("ids", torch.tensor(ids), persistent=False)
        self.register_buffer("place", place, persistent=False)  # (V,): a token's place among the rows, or -1
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (...) -> embeddings (..., D), or hidden states (..., D) -> logits (..., V)."""
        old = self.base_layer(x)
        if isinstance(self.base_layer, nn.Linear):
            return old.index_copy(-1, self.ids, F.linear(x, self.added_rows, self.bias).to(old.dtype))
        place = self.place[x]
        new = F.embedding(place.clamp(min=0), self.added_rows) * getattr(self.base_layer, "embed_scale", 1.0)
        return torch.where((place >= 0)[..., None], new.to(old.dtype), old)


def tables_of(model: nn.Module) -> dict[str, nn.Module]:
    """Full name -> embedding and head of a model's language model, each as it stands in the model."""
    ends = (model.language.get_input_embeddings(), model.language.get_output_embeddings())
    return {name: part for name, part in model.named_modules() if any(part is end for end in ends)}


def train_rows_alone(model: nn.Module, ids: list[int], read: Callable[[str], Tensor]) -> None:
    """Freezes embedding and head of ``model`` and puts trainable `AddedRows` of the tokens ``ids`` above
    both; tied tables share them.

    ``read`` gives a whole tensor that is still in a file by its name. ConfigError for a table of a kind that
    is not known.
    """
    made: dict[int, nn.Parameter] = {}
    for path, table in tables_of(model).items():
        scaled = isinstance(table, nn.Embedding) and hasattr(table, "embed_scale")  # as Gemma's
        if type(table) not in (nn.Embedding, nn.Linear) and not scaled:
            what = f"{path} is a {type(table).__name__}, whose rows cannot train alone"
            raise ConfigError(f"train.new_tokens 'rows': {what}; use 'all'")

        def rows_of(key: str, tensor: Tensor, path: str = path) -> Tensor:
            return (read(f"{path}.{key}") if tensor.is_meta else tensor.detach())[ids].float().clone()

        weight, bias = table.weight, getattr(table, "bias", None)
        if id(weight) not in made:
            made[id(weight)] = nn.Parameter(rows_of("weight", weight))
        parent, _, leaf = path.rpartition(".")
        above = AddedRows(table, ids, made[id(weight)], None if bias is None else rows_of("bias", bias))
        setattr(model.get_submodule(parent), leaf, above)


def row_tables(model: nn.Module) -> dict[str, AddedRows]:
    """Full name -> table of which only the added rows train."""
    return {path: part for path, part in model.named_modules() if isinstance(part, AddedRows)}


def folded(model: nn.Module, stream: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """A stream of (name, whole tensor) of ``model`` with the added rows in their tables, in fp32, and not
    apart.

    A module's own parameters come before those of its parts, so the rows come before their table.
    """
    tables, rows = row_tables(model), {}
    for name, tensor in stream:
        path, _, key = name.rpartition(".")
        if key == ROWS and path in tables:
            rows[path] = tensor
            continue
        path = path.removesuffix(".base_layer")
        if key == "weight" and path in rows:
            tensor = tensor.float().index_copy(0, tables[path].ids.to(tensor.device), rows.pop(path))
        yield name, tensor


def carried_by_adapter(model: nn.Module) -> dict[str, list[tuple[str, list[int] | None]]]:
    """Name of a tensor -> the names under which the adapter's folder holds it too, each with the token ids
    whose rows it holds (None: all).

    These are what the adapter of ``model`` needs beside its matrices, as its peft config says. Tied tensors
    are named by each alias.
    """
    config = getattr(model, "peft_config", {}).get("default")
    wanted = dict.fromkeys(getattr(config, "modules_to_save", None) or ())
    wanted |= getattr(config, "trainable_token_indices", None) or {}
    out: dict[int, list[tuple[str, list[int] | None]]] = {}
    names: dict[int, list[str]] = {}
    for alias, tensor in model.state_dict(keep_vars=True).items():
        plain = base_name(alias)
        names.setdefault(id(tensor), []).append(plain)
        for path, ids in wanted.items():
            inside = plain.startswith(f"{path}.") and not alias.endswith(f".{ROWS}")
            if plain == f"{path}.weight" if ids else inside:
                file = f"{path}.token_adapter.trainable_tokens_delta" if ids else plain
                out.setdefault(id(tensor), []).append((file, ids))
    return {alias: places for key, places in out.items() for alias in names[key]}
