"""Cambrian's benchmarks run over documents on disk: asked as the originals ask, scored by their scorers,
complete or refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from PIL import Image

from mmkit.config import ConfigError, load
from mmkit.evaluation.runner import evaluate, table, write_results
from mmkit.evaluation.scoring import check_tasks
from mmkit.evaluation.tasks import cambrian, published_sets
from mmkit.evaluation.tasks.cambrian import BENCHMARKS
from mmkit.evaluation.tasks.table import TASKS
from mmkit.presets import presets


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_EVAL_DATA", str(tmp_path))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    return tmp_path


def write(folder, name, rows):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")


def small(monkeypatch, name, n):
    """The task of a benchmark whose complete set has ``n`` documents."""
    monkeypatch.setitem(BENCHMARKS, name, dataclasses.replace(BENCHMARKS[name], n=n))
    return published_sets._task(name)


def mmvp(folder, pairs):
    """``pairs`` pairs of questions about pictures of their own, "(a)" then "(b)"."""
    more = {"question": "Open?", "options": ["Yes", "No"], "text_options": ["Yes", "No"]}
    write(
        folder,
        "mmvp",
        [
            {"key": str(i), "image": f"{i}.png", "gt_answer": ("(a)", "(b)")[i % 2], **more}
            for i in range(2 * pairs)
        ],
    )


def test_mmvp_adds_both_questions_of_a_right_pair_and_no_others(folder, monkeypatch):
    mmvp(folder, 10)
    right = {0, 1, 4, 5, 18, 19, 2, 7, 9, 12}  # three pairs, four single questions
    said = [("A", "B")[i % 2] if i in right else ("B", "A")[i % 2] for i in range(20)]
    result = evaluate(
        small(monkeypatch, "mmvp", 20), lambda asked, decode: [said[int(example.key)] for example in asked]
    )
    assert result.metrics == {"total": 20, "correct": 6, "accuracy": 30.0} and (
        result.score,
        result.unit,
    ) == (30.0, "percent")
    low, high = result.interval
    assert (low, high) == pytest.approx((100 * 0.1078, 100 * 0.6032), abs=0.01)  # Wilson of 3 of 10 pairs
    assert [row["right"] for row in result.rows] == [i in right for i in range(20)]


def test_mmvp_counts_as_the_original_counts_on_every_pattern_of_eight_answers():
    """The original goes question by question and keeps one counter, whose being odd says that the pair's
    first was right.
    """
    for pattern in itertools.product((False, True), repeat=8):
        correct = 0
        for place, hit in enumerate(pattern):
            odd = correct % 2 == 1
            if place % 2 == 0:
                correct += hit
            elif odd:
                correct += 1 if hit else -1
        assert cambrian.score_mmvp([{}] * 8, list(pattern))["correct"] == correct, pattern


def row(**more):
    return {
        "key": "1",
        "image": "a.png",
        "question": "Which?",
        "gt_answer": "A",
        "category": "c",
        "type": "t",
    } | more


LETTER = "Answer with the option's letter from the given choices directly."
WORD = "Answer the question using a single word or phrase."
ONLY = "Please answer directly with only the letter of the correct option and nothing else."


@pytest.mark.parametrize(
    ("name", "more", "asked"),
    [
        (
            "mmmu",
            {"options": ["one", "two"], "type": "multiple-choice"},
            f"Which? Options:\nA. one\nB. two\n{LETTER}",
        ),
        ("mmmu", {"question": "See <image 1>. Why?", "type": "open"}, f"See . Why?\n{WORD}"),
        (
            "mathvista",
            {"type": "multi_choice"},
            "Which?\nFirst show your reasoning process and then give the final answer.",
        ),
        ("mathvista", {"type": "free_form", "gt_answer": "7"}, f"Which?\n{WORD}"),
        ("textvqa", {"gt_answer": ["A"], "ocr_tokens": ["STOP", "4th"]}, f"Which?\nReference OCR tokens: STOP, 4th\n{WORD}"),
        ("textvqa", {"gt_answer": ["A"], "ocr_tokens": []}, f"Which?\nReference OCR tokens:\n{WORD}"),
        (
            "scienceqa",
            {"options": ["one"], "text_answer": "one", "hint": "Look.", "type": True},
            f"Look. Which?\nA. one\n{ONLY}",
        ),
        (
            "mmbench_en",
            {"options": ["one"], "source_id": "s", "hint": "Look."},
            f"Look.\nWhich? Options:\nA. one\n{LETTER}",
        ),
        (
            "mmbench_cn",
            {"options": ["one"], "source_id": "s", "hint": "nan"},
            "Which? Options:\nA. one\n请直接回答选项字母。",
        ),
        ("omni", {"options": ["x", "y"], "question": "Near? (A) x (B) y"}, f"Near? (A) x (B) y\n{LETTER}"),
        ("mmstar", {}, f"Which?\n{ONLY}"),
        ("realworldqa", {}, "Which?"),
        ("docvqa", {"questionId": "5"}, "Which?\nGive the short answer directly."),
        (
            "vizwiz",
            {"image_id": "i", "category": "val", "gt_answer": ["A"]},
            f"Which?\nWhen the provided information is insufficient, respond with 'Unanswerable'.\n{WORD}",
        ),
    ],
)
def test_the_question_is_asked_as_the_originals_ask_it(folder, name, more, asked):
    write(folder, name, [row(**more)])
    assert published_sets.documents(name)[0].turns[0].text == f"<image>\n{asked}"


def test_the_first_picture_is_asked_about_and_none_leaves_no_marker(folder):
    write(folder, "gqa", [row(image=["a.png", "b.png"]), row(key="2", image=None)])
    one, other = published_sets.documents("gqa")
    assert (
        len(one.images) == 1
        and one.turns[0].text.startswith("<image>\nWhich?")
        and other.turns[0].text.startswith("Which?")
    )


def test_a_document_without_what_its_prompt_or_scorer_needs_is_refused_before_anything_is_asked(folder):
    write(folder, "textvqa", [row(ocr_tokens=["A"]), row(key="2")])
    with pytest.raises(
        ValueError,
        match=r"textvqa.jsonl: 2 of 2 documents cannot be used: line 1: gt_answer is 'A', not a list of texts; line 2: no ocr_tokens, gt_answer is "
        r"'A', .*\. A line of textvqa holds key, image, question, gt_answer, ocr_tokens$",
    ):
        published_sets.documents("textvqa")


DOCUMENT = {  # fields of one document that every benchmark can read, and a right answer to it
    "gt_answer": "A", "category": "c", "type": "t", "text_answer": "one", "options": ["one", "two"], "text_options": ["one", "two"],
    "source_id": "s", "ocr_tokens": [], "questionId": "7", "question_id": "7", "image_id": "i.jpg",
}  # fmt: skip
SPECIAL = {
    "ai2d": {"gt_answer": "0"}, "mmvp": {"gt_answer": "(a)"}, "ade": {"gt_answer": "(A)"}, "coco": {"gt_answer": "(A)"},
    "omni": {"gt_answer": "(A)"}, "blink": {"gt_answer": "(A)"}, "seed": {"category": 1}, "qbench": {"type": "0"}, "mme": {"category": "OCR", "gt_answer": "Yes"},
    "textvqa": {"gt_answer": ["A"] * 10, "category": "val"}, "vizwiz": {"gt_answer": ["A"] * 10, "category": "val"},
    "ocrbench": {"gt_answer": ["A"]}, "ocrbench_exact": {"gt_answer": ["A"]}, "scienceqa": {"type": True}, "mmmu": {"type": "multiple-choice"},
    "mathvista": {"type": "multi_choice"}, "pope": {"gt_answer": "yes"},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_every_benchmark_is_a_task_that_runs_over_documents_on_disk(folder, monkeypatch, name):
    assert name in TASKS and TASKS[name].decode.max_new_tokens == BENCHMARKS[name].max_new_tokens
    write(
        folder,
        name,
        [
            row(**DOCUMENT | SPECIAL.get(name, {}) | {"key": str(i), "image": f"{i // 2}.png"})
            for i in range(4)
        ],
    )
    said = [SPECIAL.get(name, {}).get("gt_answer", "A") if name in ("pope", "mme") else "A"] * 2 + ["nothing of the kind"] * 2
    result = evaluate(
        small(monkeypatch, name, 4), lambda asked, decode: [said[int(example.key)] for example in asked]
    )
    if BENCHMARKS[name].right is None:
        assert result.score is None and len(result.submission) in (1, 4) and "scores" in result.notes[0]
    elif BENCHMARKS[name].unit == "points":
        assert result.score == 100 and result.interval is None
    else:
        full = {"fraction": 1, "percent": 100}[result.unit]
        assert result.score == (
            0 if name.startswith("mmbench") else full / 2
        )  # MMBench: all rotations of one question
        assert (
            0 <= result.interval[0] <= result.score <= result.interval[1] <= full
            and result.interval[0] < result.interval[1]
        )


def test_answers_for_a_server_are_written_once_the_set_is_complete(folder, monkeypatch, tmp_path):
    write(folder, "docvqa", [row(key=str(i), questionId=str(5 + i)) for i in range(3)])
    task = small(monkeypatch, "docvqa", 3)
    result = evaluate(task, lambda asked, decode: [f"answer {example.key}" for example in asked])
    write_results(tmp_path / "run", [result])
    written = json.loads((tmp_path / "run" / "submission-docvqa.json").read_text())
    assert written == [{"questionId": 5 + i, "answer": f"answer {i}"} for i in range(3)]
    assert table([result])[0]["score"] is None and "rrc.cvc.uab.es" in result.notes[0]
    assert evaluate(task, lambda asked, decode: ["x"] * len(asked), limit=2).submission is None


def test_an_incomplete_set_is_refused_with_both_counts(folder):
    write(folder, "gqa", [{"key": "1", "image": "a.png", "question": "Red?", "gt_answer": "yes"}])
    with pytest.raises(ValueError, match="gqa: 1 documents found, 12578 expected"):
        TASKS["gqa"].checked_documents()


def test_a_line_that_is_no_document_is_named(folder):
    write(
        folder,
        "gqa",
        [{"key": "1", "image": None, "question": "Red?", "gt_answer": "yes"}, {"question": "no key", "gt_answer": "no"}],
    )
    with pytest.raises(ValueError, match="gqa.jsonl: 1 of 2 documents cannot be used: line 2: no key, no image. A line of gqa holds key"):
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
