"""Cambrian's benchmarks run over documents on disk: asked as the originals ask, scored by their scorers, complete or refused."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from mmkit.config import ConfigError, load, presets
from mmkit.evaluation.runner import evaluate
from mmkit.evaluation.scoring import check_tasks
from mmkit.evaluation.tasks import published_sets
from mmkit.evaluation.tasks.cambrian import BENCHMARKS
from mmkit.evaluation.tasks.table import TASKS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_EVAL_DATA", str(tmp_path))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    return tmp_path


def write(folder, name, rows):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")


def test_mmvp_counts_a_pair_only_where_both_answers_are_right(folder, monkeypatch):
    monkeypatch.setitem(published_sets.PUBLISHED_N, "mmvp", 4)
    truths = ["(a)", "(b)", "(a)", "(b)"]
    write(folder, "mmvp", [
        {"key": str(i), "image": "a.png", "question": "Open?", "options": ["Yes", "No"], "text_options": ["Yes", "No"], "gt_answer": truth}
        for i, truth in enumerate(truths)
    ])  # fmt: skip
    result = evaluate(published_sets._task("mmvp"), lambda asked, decode: ["ABAA"[int(example.key)] for example in asked])
    assert result.metrics == {"total": 4, "correct": 1, "accuracy": 25.0} and result.score == 25.0


def test_the_question_is_asked_as_the_originals_ask_it(folder):
    write(folder, "mmmu", [{"key": "1", "image": "a.png", "question": "Which?", "options": ["one", "two"], "gt_answer": "A"}])
    asked = published_sets.documents("mmmu")[0]
    assert asked.turns[0].text == "<image>\nWhich? Options:\nA. one\nB. two\nAnswer with the option's letter from the given choices directly."


def test_an_incomplete_set_is_refused_with_both_counts(folder):
    write(folder, "gqa", [{"key": "1", "image": "a.png", "question": "Red?", "gt_answer": "yes"}])
    with pytest.raises(ValueError, match="gqa: 1 documents found, 12578 expected"):
        TASKS["gqa"].checked_documents()


def test_a_line_that_is_no_document_is_named(folder):
    write(folder, "gqa", [{"key": "1", "question": "Red?"}, {"question": "no key"}])
    with pytest.raises(ValueError, match="gqa.jsonl, line 2: KeyError 'key'"):
        published_sets.documents("gqa")


def test_missing_documents_are_said_before_weights_are_read(folder):
    run = load("8b", "eval")
    with pytest.raises(ConfigError, match="task 'gqa': no documents at .*gqa.jsonl.*MMKIT_EVAL_DATA"):
        check_tasks(run)


def test_every_task_a_vision_language_preset_names_exists():
    for name in presets():
        run = load(name, "eval")
        if run.model.kind == "vlm":
            assert set(run.evaluation.tasks) <= set(TASKS), name


def test_published_sets_have_scorers():
    assert all(BENCHMARKS[name].score for name in published_sets.PUBLISHED_N)
