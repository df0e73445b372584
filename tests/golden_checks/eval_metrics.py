"""Golden check: each benchmark's metrics and submissions against the rows the original scorers wrote."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from mmkit.evaluation import answers
from mmkit.evaluation.task import SCALE
from mmkit.evaluation.tasks.cambrian import BENCHMARKS


def _value(text):
    """The csv cell as a number, a dict of numbers (its misspelt key mended) or text."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return {("accuracy" if key == "accurcay" else key): v for key, v in value.items()} if isinstance(value, dict) else value


def _agree(got, want, where):
    if isinstance(want, dict):
        assert set(want) == set(got), f"{where}: {set(want) ^ set(got)}"
        for key in want:
            _agree(got[key], want[key], f"{where}.{key}")
    else:
        assert got == pytest.approx(want, abs=1e-9), f"{where}: {got} is not {want}"


def check_metrics(path: Path) -> None:
    """Every benchmark of the file: our metrics equal the original csv row; some answers are right, some wrong."""
    cases = json.loads(path.read_text(encoding="utf8"))["benchmarks"]
    assert set(cases) == set(BENCHMARKS)
    for name, case in cases.items():
        bench, want = BENCHMARKS[name], case["expected"]
        if bench.right is not None:
            row = {key: _value(text) for key, text in want["csv_row"].items()}
            _agree(bench.reduce(case["rows"], [bench.right(answer) for answer in case["rows"]]), row, name)
            main = row[bench.main]["accuracy"] if isinstance(row[bench.main], dict) else row[bench.main]
            assert 0 < main and (bench.unit == "points" or main < SCALE[bench.unit]), f"{name} {main}: cannot fail"
        assert (bench.submit is not None) == ("submission" in want), name
        if bench.submit is not None:
            assert bench.submit(case["rows"]) == want["submission"], name


def check_parsing(path: Path) -> None:
    """Ferret's box parsing, phrase comparison and negation removal.

    The original names only the first box's entity and leaves the others empty, so later names are not compared.
    """
    cases = json.loads(path.read_text(encoding="utf8"))
    for case in cases["decode_boxes"]:
        width, height = case.get("img_wh", (640, 480))
        if "error" in case:
            with pytest.raises(ValueError, match="is not a box"):
                answers.decode_boxes(case["text"], width, height)
            continue
        entities, boxes = answers.decode_boxes(case["text"], width, height)
        assert [list(box) for box in boxes] == case["boxes"]
        assert entities[:1] == case["entities"][:1] and len(entities) == len(case["entities"])
    for case in cases["phrases_similar"]:
        assert answers.phrases_equal(case["a"], case["b"]) == case["same"]
    for case in cases["remove_not_phrases"]:
        assert answers.without_negations(case["text"]) == case["out"]
