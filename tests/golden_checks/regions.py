"""Ferret's spatial-aware visual sampler against the original, given the random choices that the original made."""

from __future__ import annotations

import torch

from mmkit.config import RegionConfig
from mmkit.models.convert.names import ours
from mmkit.models.regions import GeoRegionSampler, farthest_points, nearest_points, read_points, rows_at
from tests.golden_checks.case import Case


def ferret_geo_sampler(case: Case) -> None:
    """Points, neighbours, pooled features and region tokens, stage by stage, then in one call."""
    facts, points, starts = case.json, case["in.points_xy"], case.many("in.fps_start")
    config = RegionConfig(
        n_points=facts["num_init_point"], n_sub_points=facts["num_sub_point"], n_neighbors=facts["num_neighbor"],
        pool=facts["pooler_mode"], transposed=True,
    )  # fmt: skip
    sampler = GeoRegionSampler(config, facts["input_dim"], facts["feature_side"], facts["output_dim"])
    sampler.load_state_dict({name.removeprefix("regions."): t for name, t in case.renamed(ours).items()})
    counts = [len(case.many(f"in.mask.{b}")) for b in range(len(case["in.feature_map"]))]
    image = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[None]  # (1, R)
    features = case["in.feature_map"].flatten(0, 1)[None]  # (1, B*s*s, C): all images as one row
    seen = read_points(features, points[None], image, sampler.side, transposed=True)[0]
    case.close(seen, "mid.point_features")
    at = points
    for index, (stage, start) in enumerate(zip(sampler.stages, starts, strict=True)):
        chosen = farthest_points(at, stage.n_points, start)
        case.close(chosen, f"mid.fps_idx.{index}")
        kept = rows_at(at, chosen)
        near = nearest_points(at, kept, stage.n_neighbors)
        case.close(near.sort(-1).values, case[f"mid.knn_idx.{index}"].sort(-1).values)
        seen, at = stage.mix(seen, at, chosen, near), kept
        case.close(seen, f"mid.pooled.{index}")
    case.close(sampler.flatten(seen.flatten(1)), "mid.flattened")
    tokens = sampler(features, points[None], image, torch.stack(starts, -1)[None])[0].split(counts)
    for b, count in enumerate(counts):
        if count:
            case.close(tokens[b], f"out.region.{b}")
