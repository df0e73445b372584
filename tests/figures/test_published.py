"""Published plots are drawn from data that states its source, and their numbers equal what was printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmkit.figures import published, scaling
from mmkit.figures.gallery import FIGURES



@pytest.mark.parametrize("name", sorted(FIGURES))
def test_every_figure_is_drawn_and_saved_beside_its_numbers(name, tmp_path):
    drawn = FIGURES[name]()
    picture = Path(drawn.save(tmp_path))
    assert picture.stat().st_size > 5_000
    text = picture.with_suffix(".csv").read_text(encoding="utf8")
    assert text.startswith("# ") and len(text.splitlines()) == len(drawn.table) + 2
    assert len(drawn.source) > 20


@pytest.mark.parametrize("path", sorted(published.DATA.glob("*.csv")), ids=lambda p: p.stem)
def test_every_table_begins_with_its_source(path):
    assert published.source(path.stem), path
    assert len(published.table(path.stem)) > 0


def test_our_fits_give_the_printed_power_laws():
    for row in published.table("scaling_laws_fits").itertuples():
        points = scaling.scaling_points(row.downstream_dataset)
        mine = points[points.family == row.family]
        a, b = scaling.power_law(mine.gmacs_total.to_numpy(), mine.error.to_numpy(), binned=row.family == "OpenCLIP")
        assert len(mine) == row.n_points
        assert a == pytest.approx(row.a_printed, rel=0.02) and b == pytest.approx(row.b_printed, abs=0.006), row


def test_imagenet_fit_is_the_published_annotation():
    points = scaling.scaling_points("imagenet1k")
    got = {}
    for family, group in points.groupby("family"):
        a, b = scaling.power_law(group.gmacs_total.to_numpy(), group.error.to_numpy(), binned=family == "OpenCLIP")
        got[family] = (round(a, 2), round(b, 2))
    assert got == {"OpenCLIP": (5.86, -0.11), "OpenAI CLIP": (23.18, -0.16)}


def test_cambrian_category_shares_equal_the_printed_ones():
    rows = published.table("cambrian_7m_sources").query("in_7m == 1")
    share = 100 * rows.groupby("category").samples_k.sum() / rows.samples_k.sum()
    printed = rows.groupby("category").category_pct_label.first()
    for name in printed.index:
        assert share[name] == pytest.approx(float(str(printed[name]).rstrip("%")), abs=0.06), name


def test_two_stage_quartiles_equal_the_published_box_plots():
    full, boxes = published.table("cambrian_two_stage_full"), published.table("cambrian_two_stage_boxplots")
    short = {shown: column for column, shown in published.CATEGORIES.items()}
    agree = 0
    for box in boxes.itertuples():
        inside = full[(full.group == box.encoder_group) & (full.adapter_data == box.adapter_data) & (full.vision_encoder == box.vision_encoder)]
        values = inside[inside.tuning_data == "737K"][short[box.category]].dropna()
        agree += all(abs(values.quantile(q) - want) <= 0.035 for q, want in ((0.25, box.q1), (0.5, box.median), (0.75, box.q3)))
    assert (agree, len(boxes)) == (47, 48)


def test_unknown_table_and_dataset_name_what_there_is():
    with pytest.raises(ValueError, match="no published table 'ferret'.*ferret_pope"):
        published.table("ferret")
    with pytest.raises(ValueError, match="no scaling data for 'imagenet2'.*imagenet1k"):
        scaling.scaling_points("imagenet2")
