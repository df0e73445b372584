"""Every published figure by name; a new one is a function and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mmkit.config import ConfigError, nearest
from mmkit.figures import measured, published, scaling
from mmkit.figures.drawn import Drawn

FIGURES: dict[str, Callable[[], Drawn]] = {
    draw.__name__: draw
    for draw in (
        published.cambrian_benchmarks, published.cambrian_encoder_comparison, published.cambrian_encoder_ensemble,
        published.cambrian_connector, published.cambrian_data_curation, published.cambrian_threshold, published.cambrian_threshold_cumulative, published.cambrian_mixture,
        published.cambrian_composition, published.cambrian_two_stage, published.cambrian_clip_vs_dinov2, published.cambrian_linear_probe,
        published.cambrian_attention, published.ferret_referring, published.ferret_grounding, published.ferret_pope, published.ferret_bench,
        scaling.scaling_law, scaling.learning_curves, scaling.stability_timeline, scaling.l14_results, scaling.model_profile,
        scaling.training_speed, measured.techniques,
    )
}  # fmt: skip
A_FEW = ("cambrian_benchmarks", "cambrian_encoder_comparison", "cambrian_mixture", "ferret_referring", "scaling_law", "stability_timeline")


def chosen(names: Iterable[str] = ()) -> tuple[str, ...]:
    """The names to draw: those given, or a few of each system; ConfigError names one that does not exist."""
    names = tuple(names) or A_FEW
    for name in names:
        if name not in FIGURES:
            raise ConfigError(f"no figure {name!r}{nearest(name, FIGURES)}; there are {', '.join(FIGURES)}")
    return names
