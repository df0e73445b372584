"""Samplers, the SVA connector and letter-box integers against the original Cambrian-1."""

from __future__ import annotations

import itertools
from math import isqrt

import torch

from mmkit.config import EncoderConfig
from mmkit.letterbox import cropped, n_slots, padding, visible_cells, visible_slots
from mmkit.models.connectors import LAYERS, SpatialVisionAggregator, TokenSampler, to_windows, window_mask
from mmkit.models.convert.config import vlm_config
from mmkit.models.convert.names import ours
from tests.golden_checks.case import Case


def vision_token_sampler(case: Case) -> None:
    """A bare sampler, layer by layer."""
    facts = case.json
    layer = LAYERS[{"sep": "separate"}.get(facts.get("layer_type"), "joint")]
    sampler = TokenSampler(facts["q_dim"], facts["vision_hidden_size"], facts["kv_size_list"], facts["num_layers"], 16, layer)
    stem = "model.vision_sampler_0."  # the first group's, of a whole model
    sampler.load_state_dict(case.renamed(lambda name: ours(stem + name).removeprefix("connector.groups.0.")))
    x, context, windows = case["in.queries"], case["in.context"], case.many("in.kv")
    mask = torch.cat(case.many("in.kv_mask"), dim=1).bool()
    case.close(sampler(x, context, mask, *windows), "out.queries")
    for depth, one in enumerate(sampler.layers):
        x = one(x, context, mask, *windows)
        case.close(x, f"mid.layer_out.{depth}")


def sva_connector(case: Case) -> None:
    """The connector alone: projections, windows, masks, groups, tokens, crops, and the memory of in-LLM samplers."""
    connector, features, sizes = _connector(case), case.many("in.features"), case["in.image_sizes_wh"]
    projected = [project(f) for project, f in zip(connector.projections, features, strict=True)]
    for index, grid in enumerate(projected):
        case.close(grid, f"mid.aux_projected.{index}")
        case.close(to_windows(grid, connector.query_sides[0]), f"mid.kv_window.0.{index}")
    context = projected[0].mean(1)
    case.close(context, "mid.global_context")
    for group, side in enumerate(connector.query_sides):
        for index, encoder_side in enumerate(connector.sides):
            case.close(window_mask(sizes, encoder_side, side), f"mid.infer.kv_mask.{group}.{index}")
        memory = connector.memory(projected, context, sizes, side)
        x = connector.queries[group].expand(len(memory.mask), 1, -1)
        sampled = connector.groups[group](x, context.repeat_interleave(side * side, 0)[:, None], memory.mask, *memory.windows)
        case.close(sampled.reshape(len(sizes), side * side, -1), f"mid.infer.sampler_out.{group}")
    _tokens(case, connector, features, sizes)


def _connector(case: Case) -> SpatialVisionAggregator:
    config = case.json["config"]
    sides = [isqrt(n) for n in config["mm_vision_tower_aux_token_len_list"]]
    wanted = vlm_config(config, [EncoderConfig(name="given", side=side) for side in sides]).connector
    connector = SpatialVisionAggregator(wanted, config["encoder_hidden_sizes"], sides, config["hidden_size"])
    connector.load_state_dict({name.removeprefix("connector."): t for name, t in case.renamed(ours).items()})
    return connector


def _tokens(case: Case, connector, features, sizes) -> None:
    q = connector.grid_side
    tokens, memory = connector(features, sizes)
    grid = tokens.unflatten(1, (q, q + 1))[:, :, :q].flatten(1, 2)
    case.close(grid, "out.infer.projected_grid")
    shown, cells = visible_slots(sizes, q), visible_cells(sizes, q).flatten(1)
    for b, (width, height) in enumerate(sizes.tolist()):
        assert list(cropped(q, width, height)) == case["out.infer.final_size_hw"][b].tolist()
        case.close(tokens[b][shown[b]], f"out.infer.image_embeds.{b}")
    for index, (window, mask) in enumerate(zip(memory.windows, memory.mask.split([w.shape[1] for w in memory.windows], 1), strict=True)):
        case.close(window[cells.flatten()], f"out.infer.kv_final.{index}")
        case.close(mask[cells.flatten()], f"out.infer.kv_final_mask.{index}")
    case.close(shown, "out.train.attention_mask")
    case.close(shown.long().cumsum(1), "out.train.position_ids")  # the block sits at index 1
    for index, side in enumerate(connector.sides):
        case.close(window_mask(sizes, side, q).unflatten(0, (len(sizes), -1)), f"mid.train.collator_kv_mask.{index}")
    # with groups of another grid the original masks padded images wrongly in training
    same = torch.ones(len(sizes), dtype=torch.bool) if case.json["train_equals_infer_grid"] else shown.all(1)
    case.close(grid, "out.train.projected_grid", same)
    case.close(tokens, "out.train.image_embeds", same)


def letterbox_table(case: Case) -> None:
    """Integers of padding and cropping; rows where the original hides the whole image are its crash beyond side:1."""
    for row in case.json["rows"]:
        (width, height), side = row["size_wh"], row["side"]
        rows, columns = padding(side, width, height)
        sizes = torch.tensor([[width, height]])
        if 0 in row["unpadded_hw"]:
            assert min(cropped(side, width, height)) >= 1 and visible_cells(sizes, side).any(), row
            continue
        assert (rows, rows, columns, columns) == tuple(row[f"pad_{edge}"] for edge in ("top", "bottom", "left", "right")), row
        assert list(cropped(side, width, height)) == row["unpadded_hw"], row
        assert int(visible_cells(sizes, side).sum()) == row["kv_true"], row
        slots = visible_slots(sizes, side)[0]
        assert n_slots(side, width, height) == int(slots.sum()) == row["newline_mask_true"], row
        runs = [[int(value), len(list(run))] for value, run in itertools.groupby(slots.tolist())]
        assert runs == row["newline_mask_runs"], row
        places = slots.long().cumsum(0) - 1
        assert (int(places[0]), int(places[-1])) == (row["newline_position_first"], row["newline_position_last"]), row

