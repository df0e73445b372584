"""Tasks and their runner: complete sets, controls, groups, any number of processes, files, and specs that
tell what differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from mmkit.data.boxes import Box, grid, pixels
from mmkit.data.example import Example, ImageRef, Region, Turn
from mmkit.errors import InputError
from mmkit.evaluation import metrics
from mmkit.evaluation.runner import (
    compared,
    evaluate,
    read_results,
    sample_row,
    shuffled,
    table,
    target_of,
    write_results,
)
from mmkit.evaluation.task import Decode, Task, differences, find, own_prompt
from mmkit.evaluation.zero_shot import Share

COLOURS = ("red", "blue", "green")


def question(number: int, kind: str) -> Example:
    """A question about picture number // 2; the right answer is in the picture's name."""
    colour = COLOURS[number // 2 % 3]
    answer = colour if kind == "colour" else ("yes" if colour == "red" else "no")
    asked = "which colour?" if kind == "colour" else "is it red?"
    turns = (Turn("user", f"<image>\n{asked}"), Turn("assistant", answer))
    return Example(
        f"q{number}",
        (ImageRef(colour.encode(), name=f"{colour}-{number // 2}"),),
        turns,
        meta={"answer": answer, "type": kind},
    )


def documents() -> list[Example]:
    """Ten questions on five pictures."""
    return [question(number, ("colour", "yes-no")[number % 2]) for number in range(10)]


def exact(example: Example, answer: str) -> dict[str, float]:
    """Exact match."""
    return {"exact_match": metrics.exact_match(answer, target_of(example))}


def training() -> list[tuple[str, str]]:
    """Training pairs: blue is the usual colour, no the usual answer and the majority."""
    return [
        ("which colour?", "blue"),
        ("which colour?", "blue"),
        ("which colour?", "red"),
        *[("is it red?", "no")] * 4,
    ]


TASK = Task(
    "toy", 1, 10, documents, exact, "exact_match", groups=("type",), prior=training, facts={"split": "test"}
)


def sees(requests, decode) -> list[str]:
    """A perfect answerer: it reads the picture."""
    answers = []
    for request in requests:
        assert request.turns[-1].role == "user"
        colour = request.images[0].data.decode()
        answers.append(colour if "which" in request.question else ("yes" if colour == "red" else "no"))
    return answers


def test_scores_stand_beside_shuffled_pictures_majority_and_prior_by_type():
    result = evaluate(TASK, sees, batch=3)
    assert result.score == 1.0 and result.n == 10 and result.groups["type"]["colour"]["n"] == 5
    wrong = [request.images[0].data.decode() for request in shuffled(documents())]
    expected = (
        sum(
            one == other.images[0].data.decode()
            for one, other in zip(wrong[::2], documents()[::2], strict=True)
        )
        / 5
    )
    assert result.controls["shuffled"]["groups"]["type"]["colour"]["exact_match"] == expected < 1
    assert (
        result.controls["majority"]["metrics"]["exact_match"] == 0.3
    )  # "no" is right for three of five pictures
    assert result.controls["prior"]["groups"]["type"]["colour"]["exact_match"] == 0.4  # two blue pictures
    assert all(row["shuffled_answer"] and row["question"] for row in result.rows)


def test_shuffling_gives_every_picture_another_ones_and_keeps_questions_together():
    for seed in range(5):
        pairs = list(zip(documents(), shuffled(documents(), seed), strict=True))
        assert all(
            one.images[0] != other.images[0] and one.turns == other.turns and one.key == other.key
            for one, other in pairs
        )
        assert [pairs[k][1].images for k in range(0, 10, 2)] == [pairs[k][1].images for k in range(1, 10, 2)]
        assert {other.images[0].name for _, other in pairs} == {one.images[0].name for one, _ in pairs}
    with pytest.raises(ValueError, match="1 different pictures cannot be shuffled"):
        shuffled(documents()[:2])


def test_an_incomplete_or_repeated_set_is_no_score():
    with pytest.raises(ValueError, match="toy: 10 documents found, 12 expected"):
        evaluate(dataclasses.replace(TASK, n_expected=12), sees)
    doubled = dataclasses.replace(TASK, documents=lambda: [documents()[0]] * 10)
    with pytest.raises(ValueError, match="keys of documents repeat"):
        evaluate(doubled, sees)


def test_a_limited_run_spans_pictures_and_keeps_its_control():
    for limit in (3, 5):
        result = evaluate(TASK, sees, limit=limit)
        assert (result.n, result.n_total) == (limit, 10) and "shuffled" in result.controls
        assert result.notes == (f"toy: {limit} of 10 documents",)
        assert len({row["picture"] for row in result.rows}) > 1 and [
            row["key"] for row in result.rows
        ] == sorted(r["key"] for r in result.rows)
    one = evaluate(TASK, sees, limit=1)
    assert one.n == 1 and "shuffled" not in one.controls and "all documents show one picture" in one.notes[1]
    assert {row["key"] for row in evaluate(TASK, sees, limit=3).rows} < {
        row["key"] for row in evaluate(TASK, sees, limit=5).rows
    }
    ordered = dataclasses.replace(
        TASK, shuffled_control=False, groups=()
    )  # pairs of neighbours may belong together
    assert [row["key"] for row in evaluate(ordered, sees, limit=4).rows] == ["q0", "q1", "q2", "q3"]
    assert evaluate(TASK, sees, limit=99).notes == ()


@pytest.mark.parametrize("world", [1, 3, 4])
def test_any_number_of_processes_scores_each_document_once(world):
    """The parts of all ranks, computed one after the other, are exchanged through a list."""
    parts: list[list] = [[] for _ in range(world)]
    for rank in range(world):

        def keep(value, rank=rank):
            parts[rank].append(value)
            return [value]

        with pytest.raises(ValueError, match="of 10 documents") if world > 1 else contextlib.nullcontext():
            evaluate(TASK, sees, batch=2, share=Share(rank, world, keep))
    first_pass = [given[0] for given in parts]
    together = Share(0, 1, lambda value: first_pass)
    rows = together.joined({}, 10)
    assert [row["key"] for row in rows] == [f"q{number}" for number in range(10)]
    assert [{**row, "shuffled_answer": None} for row in rows] == [
        {**row, "shuffled_answer": None} for row in evaluate(TASK, sees).rows
    ]


def test_requests_hold_the_prompt_without_the_answer_and_only_regions_that_are_asked():
    region = Region("box", Box(1, 2, 3, 4, pixels(10, 10)))
    turns = (Turn("user", "<image>\nwhere is the dog?"), Turn("assistant", "<region>"))
    example = Example("r", (ImageRef(b"x"),), turns, (region,))
    assert TASK.request(example).turns == turns[:1] and TASK.request(example).regions == ()
    asked = dataclasses.replace(
        example, turns=(Turn("user", "<image>\nwhat is <region>?"), Turn("assistant", "a dog"))
    )
    assert TASK.request(asked).regions == (region,) and own_prompt(asked) == asked.turns[:1]
    assert target_of(asked) == "a dog" and target_of(documents()[1]) == "yes"
    assert target_of(example) == "[100, 200, 300, 400]"
    both = (
        turns[0],
        Turn("assistant", "at <region>"),
        Turn("user", "and <region>?"),
        Turn("assistant", "no, <region>, <region>"),
    )
    boxes = [Region("box", Box(i, 2, 3 + i, 4, pixels(10, 10))) for i in range(4)]
    assert target_of(Example("r", (), both, tuple(boxes))) == "no, [200, 200, 500, 400], [300, 200, 600, 400]"


def test_a_changed_character_changes_the_spec_hash_and_is_named():
    other = dataclasses.replace(TASK, facts={"split": "test", "suffix": "Answer briefly."})
    longer = dataclasses.replace(TASK, decode=Decode(max_new_tokens=17))
    assert TASK.spec_hash == dataclasses.replace(TASK).spec_hash
    assert (
        len(
            {
                TASK.spec_hash,
                other.spec_hash,
                longer.spec_hash,
                dataclasses.replace(TASK, process=lambda e, a: {}).spec_hash,
            }
        )
        == 4
    )
    assert differences(TASK.spec, TASK.spec) == []
    assert differences(TASK.spec, other.spec) == ["suffix: '(absent)' against 'Answer briefly.'"]
    assert "max_new_tokens" in differences(TASK.spec, longer.spec)[0]


def test_results_and_samples_are_written_whole_and_read_back(tmp_path):
    result = evaluate(TASK, sees)
    write_results(tmp_path, [result], {"preset": "tiny"})
    (stored,) = read_results(tmp_path)["results"]
    assert (
        stored["preset"] == "tiny"
        and stored["metrics"] == {"exact_match": 1.0}
        and stored["unit"] == "fraction"
    )
    assert (
        stored["spec_hash"] == TASK.spec_hash
        and "torch" in stored["versions"]
        and stored["interval"] == list(result.interval)
    )
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    named = {"spec_hash": TASK.spec_hash, "n": 10}
    assert lines == [named | row for row in result.rows] and {path.name for path in tmp_path.iterdir()} == {
        "results.json",
        "samples.jsonl",
    }


def found(folder):
    """(task, n, exact match) of every stored result, and how many samples each has."""
    trees = read_results(folder)["results"]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    count = [
        sum(
            (row["task"], row["spec_hash"], row["n"]) == (tree["task"], tree["spec_hash"], tree["n"])
            for row in samples
        )
        for tree in trees
    ]
    assert sum(count) == len(samples)
    return [
        (tree["task"], tree["n"], tree["metrics"]["exact_match"], n)
        for tree, n in zip(trees, count, strict=True)
    ]


def blind(requests, decode) -> list[str]:
    """Says no to everything."""
    return ["no"] * len(requests)


def test_results_of_another_export_stand_beside_those_of_the_run(tmp_path):
    write_results(tmp_path, [evaluate(TASK, sees)], {"export": "runs/tiny/finetune/default/export"})
    write_results(tmp_path, [evaluate(TASK, blind)], {"export": "exports/other"})
    stored = read_results(tmp_path)["results"]
    assert [tree["metrics"]["exact_match"] for tree in stored] == [1.0, 0.3]
    write_results(tmp_path, [evaluate(TASK, blind)], {"export": str(Path("exports/other").absolute())})  # the same one
    assert len(read_results(tmp_path)["results"]) == 2
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["right"] for row in samples[:10]] == [True] * 10 and len(samples) == 20


def test_a_limited_run_or_another_task_or_spec_leaves_finished_results_alone(tmp_path):
    other = dataclasses.replace(TASK, name="other")
    write_results(tmp_path, [evaluate(TASK, sees), evaluate(other, sees)])
    write_results(tmp_path, [evaluate(TASK, blind, limit=3)])
    assert [row[:2] for row in found(tmp_path)] == [("toy", 10), ("other", 10), ("toy", 3)] and found(
        tmp_path
    )[0][2:] == (1.0, 10)
    longer = dataclasses.replace(TASK, decode=Decode(max_new_tokens=99))
    result = compared(evaluate(longer, blind), read_results(tmp_path)["results"])
    assert (
        "not comparable with the stored result of 3 documents: decode: {'max_new_tokens': 99"
        in result.notes[-1]
    )
    write_results(tmp_path, [result])
    assert [row[:2] for row in found(tmp_path)] == [("toy", 10), ("other", 10), ("toy", 3), ("toy", 10)]
    write_results(tmp_path, [evaluate(TASK, blind)])  # the same measurement again: the newer one counts
    assert found(tmp_path)[-1] == ("toy", 10, 0.3, 10) and len(found(tmp_path)) == 4


def test_results_of_earlier_versions_are_kept_and_damaged_ones_are_refused(tmp_path):
    tree = {"task": "toy", "spec_hash": "abc", "n": 2, "metrics": {"exact_match": 0.5}}
    old = {"tasks": {"toy": tree}, "export": "runs/x/export", "preset": "tiny", "headline": {}}
    (tmp_path / "results.json").write_text(json.dumps(old))
    (tmp_path / "samples.jsonl").write_text(
        "".join(json.dumps({"task": "toy", "key": key}) + "\n" for key in "ab")
    )
    assert read_results(tmp_path)["results"] == [tree | {"export": "runs/x/export", "preset": "tiny"}]
    write_results(tmp_path, [evaluate(TASK, sees)])
    assert found(tmp_path) == [("toy", 2, 0.5, 2), ("toy", 10, 1.0, 10)]
    (tmp_path / "results.json").write_text('{"results": [')
    with pytest.raises(InputError, match=r"results.json cannot be read .*move it away"):
        read_results(tmp_path)


def test_the_table_has_a_line_for_all_and_for_each_group_with_unit_and_interval():
    lines = table([evaluate(TASK, sees)])
    assert [(line["group"], line["n"], line["score"]) for line in lines] == [
        ("all", 10, 1.0),
        ("colour", 5, 1.0),
        ("yes-no", 5, 1.0),
    ]
    assert {line["metric"] for line in lines} == {"exact_match"} and {line["unit"] for line in lines} == {
        "fraction"
    }
    assert {"shuffled", "majority", "prior", "low", "high"} <= set(lines[0])
    assert all(0.4 < line["low"] < 1 == line["high"] for line in lines)  # five pictures, all right


def test_progress_counts_batches():
    seen: list[tuple[str, int, int]] = []
    evaluate(TASK, sees, batch=4, progress=lambda *what: seen.append(what))
    assert (
        seen[:3] == [("toy: answers", 1, 3), ("toy: answers", 2, 3), ("toy: answers", 3, 3)]
        and seen[-1][0] == "toy: shuffled pictures"
    )


# ---------------------------------------------------------------- single metrics


def test_exact_match_ignores_case_and_outer_space_only():
    assert metrics.exact_match(" Red\n", "red") == 1
    assert metrics.exact_match("red.", "red") == 0 and metrics.exact_match("dark red", "red") == 0
    assert (
        metrics.contains_word("a small dog, asleep", "dog") == 1
        and metrics.contains_word("hotdog", "dog") == 0
    )


def test_box_overlap_reads_the_first_box_of_an_answer():
    target = Box(0, 0, 50, 100, pixels(100, 100))
    assert metrics.box_overlap("[0, 0, 500, 999]", target) == pytest.approx(1, abs=0.01)
    assert metrics.box_overlap("at [500, 0, 999, 999] or [0, 0, 500, 999]", target) == pytest.approx(
        0, abs=0.01
    )
    assert metrics.box_overlap("nowhere", target) is None and metrics.box_overlap("[5, 5]", target) is None
    assert target.to(grid(1000)).corners == (0, 0, 500, 999)


def test_majority_and_priors_break_ties_by_name():
    assert metrics.majority(["b", "a", "b", "a"]) == "a" and metrics.priors(training()) == {
        "which colour?": "blue",
        "is it red?": "no",
    }
    with pytest.raises(ValueError, match="majority of"):
        metrics.majority([])


def test_wilson_intervals_are_those_of_the_formula_and_never_empty():
    assert metrics.wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert metrics.wilson(1.0, 76) == pytest.approx((0.9519, 1.0), abs=1e-4) and metrics.wilson(
        0.0, 76
    ) == pytest.approx((0, 0.0481), abs=1e-4)


def test_intervals_draw_pictures_where_they_repeat():
    alone = metrics.interval([1, 0] * 50, [str(i) for i in range(100)])
    assert alone == metrics.wilson(0.5, 100)
    together = metrics.interval(
        [1, 0] * 50, [str(i % 2) + str(i // 10) for i in range(100)]
    )  # ten pictures of five alike
    assert together == metrics.interval([1, 0] * 50, [str(i % 2) + str(i // 10) for i in range(100)])
    assert together[0] < alone[0] - 0.1 and together[1] > alone[1] + 0.1
    generator = np.random.default_rng(1)
    hits = np.repeat(
        generator.random(200) < 0.7, 5
    )  # 200 pictures, five questions each, all right or all wrong
    low, high = metrics.interval(hits, [str(i // 5) for i in range(1000)])
    mean, half = hits.mean(), 1.96 * np.sqrt(0.7 * 0.3 / 200)
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.015)
    assert metrics.interval([1.0] * 60, [str(i // 10) for i in range(60)]) == metrics.wilson(1.0, 6)
    assert metrics.interval([1, 0, 0], ["same"] * 3) == metrics.wilson(1 / 3, 1)
    low, high = metrics.interval([0.2, 0.4, 0.9, 0.5], list("abcd"))  # overlaps are no counts
    assert 0.2 < low < 0.5 < high < 0.9


def test_an_interval_has_the_unit_of_its_score_and_points_have_none():
    rows = evaluate(TASK, blind).rows
    whole = TASK.interval(rows)
    assert dataclasses.replace(TASK, unit="percent").interval(rows) == pytest.approx(
        [100 * bound for bound in whole]
    )
    assert (
        dataclasses.replace(TASK, unit="points").interval(rows) is None and 0 < whole[0] < 0.3 < whole[1] < 1
    )


def test_tasks_are_found_by_name_or_the_nearest_is_named():
    from mmkit.evaluation.tasks.table import TASKS

    assert find("charts", TASKS).main_metric == "exact_match"
    with pytest.raises(ValueError, match="no task 'easy_vga'; did you mean 'easy_vqa'"):
        find("easy_vga", TASKS)
    assert sample_row(TASK, documents()[0], "red")["scores"] == {"exact_match": 1.0}
