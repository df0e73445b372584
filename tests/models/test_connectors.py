"""Connectors against references written with loops; grids, masks, groups, and errors that name both values."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from mmkit.config import ConnectorConfig
from mmkit.letterbox import visible_cells
from mmkit.models.connectors import (
    CrossAttention,
    JointLayer,
    SeparateLayer,
    TokenSampler,
    add_newlines,
    build_connector,
    check_features,
    resize_grid,
    to_windows,
    window_mask,
)
from tests.models.test_vlm import model_of

SIZES = torch.tensor([[300, 200], [150, 400], [64, 64], [1000, 10]])


def sva(sides=(4, 8), widths=(12, 20), d_language=24, **settings):
    torch.manual_seed(0)
    config = ConnectorConfig(**{"width": 32, "heads": 4, "depth": 2, "query_sides": (4,)} | settings)
    connector = build_connector(config, widths, sides, d_language)
    features = [torch.randn(len(SIZES), side * side, width) for side, width in zip(sides, widths, strict=True)]
    return connector, features


@pytest.mark.parametrize(("grid", "side"), [(4, 4), (8, 4), (6, 2), (3, 1)])
def test_each_window_holds_the_cells_under_its_query_row_by_row(grid, side):
    x = torch.arange(2 * grid * grid).view(2, grid * grid, 1)
    r = grid // side
    windows = to_windows(x, side).view(2, side, side, r * r)
    for n in range(2):
        for y in range(side):
            for column in range(side):
                want = [n * grid * grid + (y * r + dy) * grid + column * r + dx for dy in range(r) for dx in range(r)]
                assert windows[n, y, column].tolist() == want


def test_a_window_without_a_visible_cell_attends_to_all_and_others_only_to_visible_ones():
    mask = window_mask(SIZES, 8, 4).view(len(SIZES), 4, 4, 4)
    cells = to_windows(visible_cells(SIZES, 8).flatten(1), 4).view_as(mask)
    empty = ~cells.any(-1)
    assert empty.any() and mask[empty].all() and torch.equal(mask[~empty], cells[~empty])


@torch.no_grad()
def test_cross_attention_equals_a_loop_over_heads_and_keys():
    torch.manual_seed(1)
    attention = CrossAttention(16, 16, 2, 4)
    x, sources = torch.randn(3, 1, 16), [torch.randn(3, 1, 16), torch.randn(3, 4, 16)]
    mask = torch.rand(3, 5) > 0.4
    mask[:, 0] = True
    got = attention(x, mask, *sources)
    for n in range(3):
        keys = torch.cat([attention.keys[i](s[n]) for i, s in enumerate(sources)])
        values = torch.cat([attention.values[i](s[n]) for i, s in enumerate(sources)])
        query, out = attention.query(x[n])[0], []
        for head in range(4):
            part = slice(head * 4, head * 4 + 4)
            scores = torch.tensor([float(query[part] @ key[part]) / math.sqrt(4) if on else -math.inf for key, on in zip(keys, mask[n])])
            out.append(scores.softmax(0) @ values[:, part])
        torch.testing.assert_close(got[n, 0], attention.out(torch.cat(out)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", [JointLayer, SeparateLayer])
def test_hidden_cells_change_nothing_and_get_no_gradient(layer):
    torch.manual_seed(2)
    sampler = TokenSampler(24, 16, [1, 2], 2, 4, layer)
    x, context = torch.randn(5, 1, 24), torch.randn(5, 1, 16)
    windows = [torch.randn(5, 1, 16), torch.randn(5, 4, 16, requires_grad=True)]
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[:, 3:] = False
    out = sampler(x, context, mask, *windows)
    out.sum().backward()
    assert windows[1].grad[:, 2:].abs().max() == 0 and windows[1].grad[:, :2].abs().max() > 0
    with torch.no_grad():
        moved = windows[1] + torch.tensor([0, 0, 5.0, -7.0])[None, :, None]
        torch.testing.assert_close(sampler(x, context, mask, windows[0], moved), out.detach())


@pytest.mark.parametrize(("name", "layer"), [("joint", JointLayer), ("separate", SeparateLayer)])
def test_the_setting_chooses_the_layer_before_and_inside_the_language_model(name, layer):
    connector, features = sva(layer=name)
    assert all(type(one) is layer for group in connector.groups for one in group.layers)
    assert connector(features, SIZES)[0].isfinite().all()
    model = model_of(layer=name)
    assert all(type(one) is layer for sampler in model.samplers for one in sampler.layers) and len(model.samplers)


def test_only_windows_of_several_cells_have_a_position():
    names = {name for name, _ in TokenSampler(24, 16, [1, 2, 4], 1, 4).named_parameters() if "positions" in name}
    assert names == {"layers.0.positions.1.weight", "layers.0.positions.2.weight"}


def test_newlines_end_each_row_of_the_grid():
    out = add_newlines(torch.arange(9.0).view(1, 9, 1), torch.tensor([-1.0])).flatten().tolist()
    assert out == [0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1]


def test_a_group_on_another_grid_is_masked_on_its_own_windows_and_resized():
    connector, features = sva(sides=(4, 8), query_sides=(4, 2))
    tokens, memory = connector(features, SIZES)
    assert tokens.shape == (4, 20, 24) and memory.mask.shape == (4 * 16, 1 + 4)
    projected = [project(f) for project, f in zip(connector.projections, features, strict=True)]
    small = connector.memory(projected, projected[0].mean(1), SIZES, 2)
    assert torch.equal(small.mask, torch.cat([window_mask(SIZES, 4, 2), window_mask(SIZES, 8, 2)], 1))
    sampled = connector.sample(1, small)
    assert sampled.shape == (4, 16, 32)


def test_resizing_equals_torch_on_channels_first_and_keeps_equal_grids():
    grid = torch.randn(2, 4, 6)
    want = F.interpolate(grid.transpose(1, 2).view(2, 6, 2, 2), size=(4, 4), mode="bilinear")
    torch.testing.assert_close(resize_grid(grid, 4), want.flatten(2).transpose(1, 2))
    assert resize_grid(grid, 2) is grid


def test_an_image_gets_the_same_tokens_alone_and_among_others():
    connector, features = sva(depth=3)
    together = connector(features, SIZES).tokens
    for n in range(len(SIZES)):
        alone = connector([f[n : n + 1] for f in features], SIZES[n : n + 1]).tokens
        torch.testing.assert_close(together[n : n + 1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "layers"), [("mlp", 3), ("linear", 1), ("identity", 0)])
def test_mlp_connectors_join_encoders_on_channels(kind, layers):
    config = ConnectorConfig(kind=kind, depth=3, newline=False)
    connector = build_connector(config, [10, 14], [3, 3], 24)
    features = [torch.randn(2, 9, 10), torch.randn(2, 9, 14)]
    x = torch.cat(features, -1)
    weights = [m for m in connector.output if hasattr(m, "weight")]
    assert len(weights) == layers
    for index, linear in enumerate(weights):
        x = linear(F.gelu(x) if index else x)
    out = connector(features, SIZES[:2])
    torch.testing.assert_close(out.tokens, x)
    assert out.memory is None


def test_identity_of_other_width_and_wrong_features_are_refused_with_both_values():
    with pytest.raises(ValueError, match="24, not 30"):
        build_connector(ConnectorConfig(kind="identity"), [10, 20], [3, 3], 24)
    good = [torch.zeros(1, 9, 10)]
    check_features(good, [10], [3])
    with pytest.raises(ValueError, match="1 feature grids for 2 encoders"):
        check_features(good, [10, 10], [3, 3])
    with pytest.raises(ValueError, match="9 tokens, the connector expects 4x4 = 16"):
        check_features(good, [10], [4])
    with pytest.raises(ValueError, match="width 10, the connector expects 12"):
        check_features(good, [12], [3])
