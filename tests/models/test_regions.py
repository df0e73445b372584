"""Region samplers against loops and torch's own lookup; determinism and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mmkit.config import RegionConfig
from mmkit.models.regions import build_regions, farthest_points, nearest_points, read_points, rows_at

CONFIG = RegionConfig(n_points=32, n_sub_points=(8, 4), n_neighbors=(5, 3))


def inputs(rows=2, images=2, regions=3, side=6, width=10, n_points=32):
    torch.manual_seed(0)
    return {
        "features": torch.randn(rows, images * side * side, width),
        "points": torch.rand(rows, regions, n_points, 2),
        "image": torch.randint(images, (rows, regions)),
        "starts": torch.randint(4, (rows, regions, 2)),
    }


@pytest.mark.parametrize("transposed", [False, True])
def test_lookup_equals_grid_sample_on_the_region_s_image(transposed):
    x, side = inputs(), 6
    x["points"][0, 0, :3] = torch.tensor([[-0.1, 0.5], [1.05, 0.2], [0.0, 1.0]])  # outside counts as zero
    got = read_points(x["features"], x["points"], x["image"], side, transposed)
    for b in range(2):
        for r in range(3):
            grid = x["features"][b].view(2, side, side, -1)[x["image"][b, r]].permute(2, 0, 1)[None]
            at = 2 * (x["points"][b, r].flip(-1) if transposed else x["points"][b, r]) - 1
            want = F.grid_sample(grid, at[None, None], mode="bilinear", padding_mode="zeros", align_corners=True)
            torch.testing.assert_close(got[b, r], want[0, :, 0].T, atol=1e-5, rtol=1e-5)


def test_transposed_reads_row_x_and_column_y():
    grid = torch.zeros(1, 36, 1)
    grid[0, 5 * 6 + 0] = 1.0  # row 5, column 0
    point = torch.tensor([[[[1.0, 0.0]]]])  # x = 1, y = 0
    image = torch.zeros(1, 1, dtype=torch.long)
    assert read_points(grid, point, image, 6, transposed=True).item() == 1
    assert read_points(grid, point, image, 6, transposed=False).item() == 0


def test_farthest_and_nearest_points_equal_a_greedy_loop():
    torch.manual_seed(3)
    points = torch.rand(2, 20, 2)
    chosen = farthest_points(points, 6, torch.tensor([3, 7]))
    for n in range(2):
        want = [[3, 7][n]]
        while len(want) < 6:
            distances = [min(float(((points[n, j] - points[n, i]) ** 2).sum()) for i in want) for j in range(20)]
            want.append(max(range(20), key=distances.__getitem__))
        assert chosen[n].tolist() == want
    near = nearest_points(points, rows_at(points, chosen), 4)
    for n in range(2):
        for a, centre in enumerate(chosen[n]):
            order = ((points[n] - points[n, centre]) ** 2).sum(-1).argsort()[:4]
            assert set(near[n, a].tolist()) == set(order.tolist()) and int(centre) in near[n, a].tolist()


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_regions_are_independent_of_their_neighbours_and_repeatable(pool):
    x = inputs()
    sampler = build_regions(CONFIG.model_copy(update={"pool": pool}), [10], [6], 12)
    out = sampler(x["features"], x["points"], x["image"], x["starts"])
    assert out.shape == (2, 3, 12)
    assert torch.equal(out, sampler(x["features"], x["points"], x["image"], x["starts"]))
    for b in range(2):
        for r in range(3):
            one = sampler(*(t[b : b + 1, r : r + 1] if name != "features" else t[b : b + 1] for name, t in x.items()))
            torch.testing.assert_close(out[b, r], one[0, 0], atol=1e-5, rtol=1e-5)


def test_mean_of_points_ignores_unreal_ones_and_survives_none():
    x = inputs()
    sampler = build_regions(RegionConfig(kind="mean"), [10], [6], 12)
    real = torch.rand(2, 3, 32) > 0.5
    real[1, 2] = False
    out = sampler(x["features"], x["points"], x["image"], real)
    seen = read_points(x["features"], x["points"], x["image"], 6, False)
    torch.testing.assert_close(out[0, 1], sampler.output(seen[0, 1][real[0, 1]]).mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[1, 2], sampler.output.bias)


def test_every_parameter_and_the_features_get_a_gradient():
    x = inputs()
    x["features"].requires_grad_()
    sampler = build_regions(CONFIG, [10], [6], 12)
    sampler(x["features"], x["points"], x["image"], x["starts"]).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in sampler.parameters()) and x["features"].grad.abs().sum() > 0


def test_bf16_autocast_chooses_the_same_neighbours():
    x = inputs(n_points=64)
    points = x["points"].flatten(0, 1)
    want = nearest_points(points, points[:, :8], 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(nearest_points(points, points[:, :8], 5), want)


def test_wrong_encoder_and_unequal_stages_are_refused():
    with pytest.raises(ValueError, match="regions.encoder 2 but there are 1"):
        build_regions(RegionConfig(encoder=2), [10], [6], 12)
    with pytest.raises(ValueError, match="one entry a stage"):
        build_regions(RegionConfig(n_sub_points=(8,), n_neighbors=(4, 4)), [10], [6], 12)
