"""Answers are read by written rules: letters, numbers, boxes, soft accuracy; what is not found is said so."""

from __future__ import annotations

import pytest

from mmkit.evaluation import answers
from mmkit.evaluation.tasks.cambrian import BENCHMARKS


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The correct answer is B. Here's why A fails", "B"),
        ("A or B", answers.NOT_FOUND),
        ("(C)", "C"),
        ("d.", "D"),
        ("the answer is: b", "B"),
        ("Answer: (A)", "A"),
        ("because it is obvious", answers.NOT_FOUND),
        ("", answers.NOT_FOUND),
        ("I'd say it can't be known", answers.NOT_FOUND),
    ],
)
def test_choice_letter_finds_one_letter_or_says_none(text, letter):
    assert answers.choice_letter(text) == letter


@pytest.mark.parametrize(("text", "letter"), [("Answer: (B)", "b"), ("The answer is C.", "c"), ("B:", "b"), ("(B) cat.", "b"), ("", "")])
def test_first_letter_follows_the_original_rule(text, letter):
    assert answers.first_letter(text) == letter


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("977,633", "977633"), ("$161,886", "161886"), ("27 percent", "27"), ("1.4 billion", "1400000000"), (r"so \boxed{7} = \boxed{7}", "7")],
)
def test_strict_and_lenient_number_readings_differ_as_stated(answer, truth):
    assert answers.as_number(answer) is None
    assert answers.lenient_number(answer) == float(truth)


def test_different_boxed_answers_are_flagged_and_the_last_counts():
    text = r"\boxed{7} no, \boxed{8}"
    assert answers.boxed_answers_differ(text) and answers.lenient_number(text) == 8
    assert not answers.boxed_answers_differ(r"\boxed{7} and \boxed{7}")


@pytest.mark.parametrize(
    "text", ["[10, 20, 30, 40]", '{"bbox": [10, 20, 30, 40]}', "```json\n[10, 20, 30, 40]\n```", "(10,20,30,40)", "It is at [10.0, 20, 30, 40]."]
)
def test_five_spellings_of_one_box_parse_equal(text):
    assert answers.any_box(text) == (10, 20, 30, 40)


def test_no_box_is_none():
    assert answers.any_box("none") is None


def test_soft_accuracy_matches_a_hand_count():
    truths = ["blue"] * 2 + ["navy"] * 8
    assert answers.vqa_accuracy("Blue!", truths) == pytest.approx((2 * (1 / 3) + 8 * (2 / 3)) / 10)
    assert answers.vqa_accuracy("red", truths) == 0


@pytest.mark.parametrize(("raw", "normal"), [("The  Two cats.", "2 cats"), ("10,000", "10000"), ("dont", "don't"), ("a-b", "b"), ("3.5", "3.5")])
def test_vqa_normal_form(raw, normal):
    assert answers.vqa_normalize(raw) == normal


def test_iou_of_hand_made_boxes():
    assert answers.box_iou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert answers.box_iou((0, 0, 1, 1), (2, 2, 3, 3)) == 0


def test_edit_distance_of_known_pairs():
    assert [answers.edit_distance(a, b) for a, b in (("kitten", "sitting"), ("", "abc"), ("same", "same"))] == [3, 3, 0]


def test_every_headline_benchmark_of_cambrian_is_in_the_table():
    headline = (
        "gqa vizwiz scienceqa textvqa pope mme mmbench_en mmbench_cn seed mmmu mathvista ai2d chartqa ocrbench mmstar realworldqa qbench blink "
        "mmvp vstar ade omni coco docvqa infovqa stvqa mmvet synthdog"
    ).split()
    assert set(headline) <= set(BENCHMARKS)
    assert all((bench.score or bench.submit) and bench.max_new_tokens > 0 for bench in BENCHMARKS.values())
