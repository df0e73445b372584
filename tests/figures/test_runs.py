"""Figures of runs and examples: right numbers beside each picture, and something to see."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from mmkit.config import IMAGE_TOKEN_INDEX, REGION_TOKEN_INDEX, ConfigError, load
from mmkit.data.boxes import Box, pixels
from mmkit.data.example import Example, ImageRef, Region, Turn
from mmkit.figures import examples as drawing
from mmkit.figures import runs


def metrics(folder, losses):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3 / step, "targets": 5} for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_curves_keep_every_step_and_spell_what_is_not_finite(tmp_path):
    folder = metrics(tmp_path / "m" / "finetune" / "default", [3.0, "nan", 1.0])
    drawn = runs.curves(folder)
    assert list(drawn.table["step"]) == [1, 2, 3] and math.isnan(drawn.table["loss"][1]) and set(drawn.table["run"]) == {"m/finetune"}
    path = Path(drawn.save(tmp_path / "figures"))
    assert path.stat().st_size > 3000 and path.with_suffix(".csv").read_text().count("\n") == 5


def test_the_loss_of_held_out_data_is_drawn_as_dots_where_it_was_measured(tmp_path):
    folder = metrics(tmp_path / "a", [3.0, 2.0, 1.0])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[1]["eval_loss"] = 2.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = runs.curves({"a": folder, "b": metrics(tmp_path / "b", [3, 2])})
    (dots,) = [line for line in drawn.figure.axes[0].get_lines() if line.get_label() == "a, held out"]
    assert (list(dots.get_xdata()), list(dots.get_ydata())) == ([2], [2.5])
    assert not any("held out" in line.get_label() for axis in drawn.figure.axes[1:] for line in axis.get_lines())


def test_a_run_whose_batch_was_changed_is_drawn_over_samples(tmp_path):
    folder = metrics(tmp_path / "a", [3.0, 2.5, 2.0, 1.0, 0.5])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps, samples = [1, 2, 3, 4, 4], [12, 24, 36, 48, 64]  # step 4 of 12 pairs is step 3 of 16
    rows = [row | {"step": step, "total_samples": count} for row, step, count in zip(rows, steps, samples, strict=True)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    axis = runs.curves(folder).figure.axes[0]
    assert axis.get_xlabel() == "samples" and all(list(line.get_xdata()) == samples for line in axis.get_lines())
    assert runs.curves(metrics(tmp_path / "b", [2, 1])).figure.axes[0].get_xlabel() == "step"


def test_several_runs_share_one_picture(tmp_path):
    drawn = runs.curves({"a": metrics(tmp_path / "a", [2, 1]), "b": metrics(tmp_path / "b", [3, 2, 1])})
    assert drawn.table.groupby("run").size().to_dict() == {"a": 2, "b": 3}
    assert [line.get_label() for line in drawn.figure.axes[0].get_lines() if not line.get_label().startswith("_")] == ["a", "b"]


def test_a_run_without_metrics_says_what_makes_them(tmp_path, capsys):
    with pytest.raises(ConfigError, match="mmkit train"):
        runs.curves(tmp_path)
    assert runs.stages(load("8b-debug", "finetune", {"root": str(tmp_path)})) is None
    assert "mmkit train --model 8b-debug" in capsys.readouterr().out
    metrics(tmp_path / "8b-debug" / "pretrain" / "default", [1])
    assert set(runs.stages(load("8b-debug", "finetune", {"root": str(tmp_path)})).table["run"]) == {"pretrain"}


def test_a_dry_run_has_no_curves():
    assert runs.training(SimpleNamespace(run=load("8b-debug", "finetune", {"dry_run": True}), folder="none")) is None


def test_scores_stand_beside_their_controls():
    fraction = {"group": "all", "unit": "fraction"}
    rows = [
        fraction | {"task": "vqa", "n": 600, "metric": "exact", "score": 0.8, "low": 0.75, "high": 0.83, "shuffled": 0.66, "prior": 0.65, "majority": 0.3},
        fraction | {"task": "clip", "n": 90, "metric": "acc1", "score": 0.5, "low": 0.4, "high": 0.6, "majority": 0.2},
        {"task": "mmvp", "group": "all", "n": 300, "metric": "accuracy", "score": 30.0, "unit": "percent", "low": 23.0, "high": 37.0, "published": 51.3},
        {"task": "mme", "group": "all", "n": 2374, "metric": "Perception", "score": 1500.0, "unit": "points", "low": None, "high": None, "published": 1547.1},
        {"task": "docvqa", "group": "all", "n": 5188, "metric": "", "score": None, "unit": "", "low": None, "high": None},
    ]  # fmt: skip
    drawn = runs.scores(rows)
    assert list(drawn.table["score"]) == [0.8, 0.5, 30.0, 1500.0] and list(drawn.table["unit"]) == ["fraction", "fraction", "percent", "points"]
    in_percent, in_points = drawn.figure.axes
    assert [text.get_text() for text in in_percent.get_legend().get_texts()] == [
        "model", "same model, pictures shuffled", "best answer to the question alone", "majority answer", "published model of this preset"
    ]  # fmt: skip
    bars = in_percent.containers[1]
    assert [bar.get_height() for bar in bars] == pytest.approx([80, 50, 30])
    (lines,) = in_percent.containers[0].lines[2]
    assert np.array([segment[:, 1] for segment in lines.get_segments()]) == pytest.approx(np.array([[75, 83], [40, 60], [23, 37]]))
    assert in_points.get_ylabel() == "Perception (points)" and in_points.containers[1][0].get_height() == 1500
    with pytest.raises(ConfigError, match="no score"):
        runs.scores([])
    assert runs.scores_of(SimpleNamespace(rows=())) is None and runs.scores_of(SimpleNamespace(rows=rows[-1:])) is None
    assert runs.scores_of(SimpleNamespace(rows=rows, suffix="-limit5")).name == "scores-limit5"


def test_mixture_and_lengths_show_every_source():
    lines = [{"source": name, "category": "x", "samples": 10, "wanted": 5, "share": 0.5, "repeats": 0.5} for name in ("a", "b")]
    assert len(runs.mixture(lines).figure.axes[0].get_yticks()) == 2
    rows = [{"source": name, "category": "x", "wished": 0.5, "seen": 4, "realised": 0.5, "difference": 0.0} for name in ("a", "b")]
    assert [label.get_text() for label in runs.shares(rows).figure.axes[0].get_yticklabels()] == ["a", "b"]
    drawn = runs.lengths({"a": [10, 20], "b": [30]}, limit=64)
    assert list(drawn.table["tokens"]) == [10, 20, 30] and len(drawn.figure.axes[0].get_legend().get_texts()) == 3


def an_example(**more) -> Example:
    picture = ImageRef(np.array(Image.new("RGB", (90, 60), "white")), name="p")
    turns = (Turn("user", "<image>\nwhat is in <region>?"), Turn("assistant", "a cat"))
    box = Region("box", Box(10, 20, 40, 50, pixels(90, 60)))
    return Example("k1", (picture,), turns, (box,), "mine", more)


def test_boxes_are_drawn_where_they_are():
    drawn = drawing.pictures([an_example(), Example("k2", turns=(Turn("user", "q"), Turn("assistant", "a")), source="text")])
    axis = drawn.figure.axes[0]
    rectangle = axis.patches[0]
    assert (rectangle.get_x(), rectangle.get_y(), rectangle.get_width(), rectangle.get_height()) == pytest.approx((10, 20, 30, 30), abs=0.1)
    assert list(drawn.table["regions"]) == [1, 0] and "A: a cat" in drawn.table["text"][0]


def test_tokens_show_what_carries_loss():
    tokenizer = SimpleNamespace(decode=lambda ids: {5: "a b", 6: "\n"}.get(ids[0], "x"))
    encoded = SimpleNamespace(ids=np.array([IMAGE_TOKEN_INDEX, REGION_TOKEN_INDEX, 5, 6]), trained=np.array([False, False, True, True]))
    drawn = drawing.tokens(encoded, tokenizer)
    assert list(drawn.table["text"]) == ["[picture]", "[region]", "a\u00b7b", "\u21b5"] and list(drawn.table["trained"]) == [
        False,
        False,
        True,
        True,
    ]
    colours = {patch.get_facecolor() for patch in drawn.figure.axes[0].patches}
    assert len(colours) == 3


def an_answer(task="t", key="k1", answer="cat", right=True, **more):
    return {"task": task, "key": key, "question": "q", "answer": answer, "target": "cat", "right": right} | more


def test_answers_mark_what_is_wrong():
    rows = [an_answer(answer="dog", right=False, shuffled_answer="cow"), an_answer(), an_answer(key="gone")]
    text = list(drawing.answers(rows, {("t", "k1"): an_example()}).table["text"])
    assert text[0].startswith("q\nWRONG: dog (expected cat)") and "cow" in text[0] and "WRONG" not in text[1] and len(text) == 2


def test_the_models_box_is_drawn_dashed_beside_the_expected_one():
    row = an_answer(answer="there: [500, 500, 1000, 1000]", target="[111, 333, 444, 833]")
    axis = drawing.answers([row], {("t", "k1"): an_example()}).figure.axes[0]
    solid, *dashed = axis.patches
    assert solid.get_linestyle() == "solid" and (solid.get_x(), solid.get_width()) == pytest.approx((10, 30), abs=0.1)
    assert dashed and all((p.get_x(), p.get_y(), p.get_width(), p.get_height()) == pytest.approx((45, 30, 45, 30)) for p in dashed)


def test_every_task_has_its_share_of_the_answers_though_keys_are_the_same():
    names = ("one", "two", "three", "four")
    results = [SimpleNamespace(rows=[an_answer(task, f"k{i}", f"{task} {i}") for i in range(10)]) for task in names]
    results.insert(1, SimpleNamespace(rows=[]))
    examples = {(task, f"k{i}"): an_example() for task in names for i in range(10)}
    scored = SimpleNamespace(results=results, documents=examples, suffix="-x")
    drawn = runs.answers_of(scored, 6)
    said = [text.splitlines()[1].split(" (")[0] for text in drawn.table["text"]]
    assert said == ["one 0", "one 5", "two 0", "two 5", "three 0", "four 0"] and drawn.name == "answers-x"
    assert len(runs.answers_of(scored, 2).table) == 2 and len(runs.answers_of(scored, 99).table) == 40
    assert runs.answers_of(SimpleNamespace(results=[], documents={}, suffix=""), 2) is None


def test_text_below_a_picture_stays_above_the_next_row():
    notes = ["word " * 200, "short", "a $5 and a $6 line\n" * 20, "x"]
    drawn = drawing.pictures([an_example()] * 4, columns=2, notes=notes)
    canvas = FigureCanvasAgg(drawn.figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    for above, below in zip(drawn.figure.axes[:2], drawn.figure.axes[2:], strict=True):
        assert above.xaxis.label.get_window_extent(renderer).y0 > below.title.get_window_extent(renderer).y1
