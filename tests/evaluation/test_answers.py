"""Answers are read by written rules: letters, numbers, boxes, soft accuracy; what is not found is said so."""

from __future__ import annotations

import pytest

from mmkit.evaluation import answers
from mmkit.evaluation.tasks.cambrian import BENCHMARKS


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: (B)", "b"),
        ("The answer is C.", "c"),
        ("B:", "b"),
        ("(B) cat.", "b"),
        ("", ""),
        ("The answer is unclear. Answer: (C)", "c"),
    ],
)
def test_first_letter_follows_the_original_rule(text, letter):
    assert answers.first_letter(text) == letter


def test_soft_accuracy_matches_a_hand_count():
    truths = ["blue"] * 2 + ["navy"] * 8
    assert answers.vqa_accuracy("Blue!", truths) == pytest.approx((2 * (1 / 3) + 8 * (2 / 3)) / 10)
    assert answers.vqa_accuracy("red", truths) == 0


@pytest.mark.parametrize(
    ("raw", "normal"),
    [("The  Two cats.", "2 cats"), ("10,000", "10000"), ("dont", "don't"), ("a-b", "b"), ("3.5", "3.5")],
)
def test_vqa_normal_form(raw, normal):
    assert answers.vqa_normalize(raw) == normal


def test_edit_distance_of_known_pairs():
    assert [
        answers.edit_distance(a, b) for a, b in (("kitten", "sitting"), ("", "abc"), ("same", "same"))
    ] == [3, 3, 0]


MATHS, OPEN = {"type": "free_form"}, {"type": "open"}
COLD = {"text_answer": "It's cold.", "type": True}


@pytest.mark.parametrize(
    ("task", "answer", "truth", "fields", "right"),
    [
        ("mmmu", "95", "100", OPEN, False),  # 5 of 95 is more than 5%: MMMU and MathVista take it of the answer
        ("mmmu", "105.2", "100", OPEN, True),
        ("mathvista", "95", "100", MATHS, False),
        ("mathvista", "105.2", "100", MATHS, True),
        ("chartqa", "95", "100", {}, True),  # ChartQA takes it of the truth
        ("chartqa", "105.2", "100", {}, False),
        ("chartqa", "1.05", "1", {}, False),  # as the originals compare binary fractions
        ("scienceqa", "its cold", "B", COLD, True),  # both sides lose their punctuation
        ("scienceqa", "It's cold!", "B", COLD, True),
        ("scienceqa", "b. whatever", "B", COLD, True),
        ("scienceqa", "cold", "B", COLD, False),
        ("ai2d", "B", "1", {}, True),
        ("ai2d", "1", "1", {}, True),
        ("ai2d", "1", "0", {}, False),
        ("blink", "(B) the left.", "(B)", {}, True),
        ("blink", "B\nthe left", "(B)", {}, False),  # words end at a space, as in the original
    ],
)
def test_a_rule_that_differs_between_benchmarks_is_that_of_the_original(task, answer, truth, fields, right):
    assert BENCHMARKS[task].right({"answer": answer, "gt_answer": truth} | fields) is right


def test_kinds_of_questions_may_be_numbers_or_text():
    for kind in (0, "0"):
        scores = BENCHMARKS["qbench"].reduce([{"type": kind}], [1.0])
        assert scores["Yes/No"] == {"accuracy": 1.0, "total": 1}
    assert "Scene Understanding" in BENCHMARKS["seed"].reduce([{"category": "1"}], [1.0])


def test_every_headline_benchmark_of_cambrian_is_in_the_table():
    headline = (
        "gqa vizwiz scienceqa textvqa pope mme mmbench_en mmbench_cn seed mmmu mathvista ai2d chartqa ocrbench mmstar realworldqa qbench blink "
        "mmvp vstar ade omni coco docvqa infovqa stvqa mmvet synthdog"
    ).split()
    assert set(headline) <= set(BENCHMARKS)
    assert all((bench.right or bench.submit) and bench.max_new_tokens > 0 for bench in BENCHMARKS.values())


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a cup and no plate, really not.", "a cup and really"),
        ("a cup, not\nfull. Two", "a cup, Two"),
        ("it is not", "it is not"),
        ("not a cup, no.", "not a cup,"),
    ],
)
def test_negations_end_at_a_comma_or_period_with_or_without_words_between(text, left):
    assert answers.without_negations(text) == left
