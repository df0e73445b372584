"""Documents are looked at whole before weights are read, and what was scored stays whatever stops the
rest."""

from __future__ import annotations

import dataclasses
import json
import random
import threading

import pytest
from PIL import Image

from mmkit import cli
from mmkit.config import ConfigError, load
from mmkit.errors import InputError
from mmkit.evaluation import answering, runner, scoring
from mmkit.evaluation.answers import relaxed
from mmkit.evaluation.runner import Result, evaluate, read_results, write_results
from mmkit.evaluation.tasks import published_sets
from mmkit.evaluation.tasks.cambrian import BENCHMARKS
from mmkit.evaluation.tasks.table import TASKS
from mmkit.folder_lock import FolderLock
from mmkit.notebook.scoring import score
from mmkit.storage import Store


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_EVAL_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    for name in "abcd":
        Image.new("RGB", (8, 8)).save(tmp_path / "data" / f"{name}.png")
    return tmp_path / "data"


def write(folder, name, rows):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")


def small(monkeypatch, name, n):
    """A benchmark whose complete set has ``n`` documents."""
    monkeypatch.setitem(BENCHMARKS, name, dataclasses.replace(BENCHMARKS[name], n=n))
    monkeypatch.setitem(TASKS, name, published_sets._task(name))
    return TASKS[name]


def gqa(n=2, **more):
    return [
        {"key": str(i), "image": "abcd"[i % 4] + ".png", "question": "Red?", "gt_answer": "yes"} | more
        for i in range(n)
    ]


def mmvp(n=4, **more):
    """Pairs of one question about two pictures, "(a)" then "(b)"."""
    options = {"options": ["Yes", "No"], "text_options": ["Yes", "No"]}
    return [
        {
            "key": str(i + 1),
            "image": "abcd"[i % 4] + ".png",
            "question": f"Open {i // 2}?",
            "gt_answer": ("(a)", "(b)")[i % 2],
        }
        | options
        | more
        for i in range(n)
    ]


def mme(n=8, category="OCR"):
    """Two questions about each of n / 2 pictures."""
    answers = ("Yes", "No")
    return [
        {
            "key": f"{category} {i}",
            "image": f"{'abcd'[i // 2]}.png",
            "question": f"{i}?",
            "gt_answer": answers[i % 2],
            "category": category,
        }
        for i in range(n)
    ]


def run_of(tmp_path, *tasks, **settings):
    return load("8b-debug", "eval", {"root": str(tmp_path / "runs"), "tasks": list(tasks)} | settings)


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize(
    ("name", "row", "change", "words"),
    [
        ("gqa", gqa()[0], {"gt_answer": None}, "gt_answer is None, not a text"),
        ("gqa", gqa()[0], {"gt_answer": 5}, "gt_answer is 5, not a text"),
        ("gqa", gqa()[0], {"gt_answer": " "}, "gt_answer is ' ', not a text"),
        ("gqa", gqa()[0], {"question": ["Red?"]}, r"question is \['Red\?'\], not a text"),
        ("gqa", gqa()[0], {"image": {"path": "a.png"}}, "image is {'path': 'a.png'}, not a path, a list of paths or null"),
        ("gqa", gqa()[0], {"key": None}, "key is None, not a text or a whole number"),
        ("ocrbench", gqa()[0] | {"category": "c"}, {"gt_answer": "abc"}, "gt_answer is 'abc', not a list of texts"),
        ("ocrbench_exact", gqa()[0] | {"category": "c"}, {"gt_answer": []}, r"gt_answer is \[\], not a list of texts"),
        ("textvqa", gqa()[0] | {"gt_answer": ["a"]}, {"ocr_tokens": "STOP"}, "ocr_tokens is 'STOP', not a list of texts"),
        ("vizwiz", gqa()[0] | {"category": "val", "image_id": "i"}, {"gt_answer": "a"}, "gt_answer is 'a', not a list of texts"),
        ("vizwiz", gqa()[0] | {"gt_answer": ["a"], "image_id": "i"}, {"category": "train"}, "category is 'train', not 'val' or 'test'"),
        ("pope", gqa()[0], {"gt_answer": "1"}, "gt_answer is '1', not yes or no"),
        ("mme", mme()[0], {"category": "Commonsense Reasoning"}, "category is 'Commonsense Reasoning', not 'existence' or"),
        ("mmvp", mmvp()[0], {"text_options": ["Yes"]}, r"text_options is \['Yes'\], not a list of two texts"),
        ("mmvp", mmvp()[0], {"gt_answer": "Yes"}, "gt_answer is 'Yes', not the letter of an option"),
        ("mmvp", mmvp()[0], {"gt_answer": "(c)"}, r"gt_answer '\(c\)' is none of the 2 options"),
        ("mmbench_en", mmvp()[0] | {"category": "c", "source_id": 1}, {"gt_answer": "(A)"}, "not the letter of an option without brackets"),
        ("seed", mmvp()[0] | {"category": 1}, {"category": "Text"}, "category is 'Text', not 1 or 2"),
        ("seed", mmvp()[0] | {"category": 1}, {"options": "['Yes', 'No']"}, "options is .*, not a list of 1 to 9 texts or numbers"),
        ("seed", mmvp()[0] | {"category": 1}, {"options": list("abcdefghij")}, "not a list of 1 to 9 texts"),
        ("seed", {name: value for name, value in mmvp()[0].items() if name != "options"} | {"category": 1}, {}, "no options. A line .*, options$"),
        ("ai2d", mmvp()[0] | {"gt_answer": "1"}, {"gt_answer": "B"}, "gt_answer is 'B', not the number of an option, from 0"),
        ("ai2d", mmvp()[0] | {"gt_answer": "1"}, {"gt_answer": 2}, "gt_answer 2 is none of the 2 options"),
        ("mmmu", mmvp()[0] | {"category": "c", "gt_answer": "A"}, {"type": "multi-choice"}, "type is 'multi-choice', not 'multiple-choice' or 'open'"),
        ("mmmu", mmvp()[0] | {"category": "c", "type": "multiple-choice"}, {"gt_answer": "Yes"}, "gt_answer is 'Yes', not the letter"),
        ("mathvista", gqa()[0] | {"category": "c", "type": "free_form"}, {"gt_answer": 7}, "gt_answer is 7, not a text"),
        ("qbench", mmvp()[0] | {"gt_answer": "A"}, {"type": "3"}, "type is '3', not '0' or"),
        ("scienceqa", mmvp()[0] | {"gt_answer": "A", "text_answer": "Yes", "category": "c"}, {"type": "false"}, "type is 'false', not true or false"),
        ("docvqa", gqa()[0], {"questionId": "q7"}, "questionId is 'q7', not a whole number"),
        ("omni", mmvp()[0] | {"category": "c", "gt_answer": "A"}, {"gt_answer": "D"}, "gt_answer 'D' is none of the 2 options"),
    ],
)  # fmt: skip
def test_a_field_that_is_missing_or_no_such_thing_is_named_with_its_line(folder, name, row, change, words):
    published_sets._read.cache_clear()
    fields = [field for field in BENCHMARKS[name].needs]
    whole = {field: change[field] if field in change else row.get(field, "7") for field in fields} | row
    write(folder, name, [whole | change])
    with pytest.raises(
        InputError, match=rf"{name}.jsonl: 1 of 1 documents cannot be used: line 1: .*{words}"
    ):
        published_sets.documents(name)
    for missing in change:
        write(folder, name, [{field: value for field, value in (whole | change).items() if field != missing}])
        published_sets._read.cache_clear()
        with pytest.raises(InputError, match=f"line 1: (.*, )?no {missing}"):
            published_sets.documents(name)


def test_what_is_no_json_object_or_no_text_is_named(folder):
    path = folder / "gqa.jsonl"
    for text, words in [
        (b'{"key": 1,\n', "line 1: no JSON"), (b"[1]\n", "line 1: a list, not an object"), (b'{"question": "\xe9"}', "is no text in UTF-8"),
        (b"".join(b"[]\n" for _ in range(7)), r"7 of 7 documents .*line 5: a list, not an object; and 2 more\. A line"),
    ]:  # fmt: skip
        published_sets._read.cache_clear()
        path.write_bytes(text)
        with pytest.raises(InputError, match=f"{path.absolute()}.*{words}"):
            published_sets.documents("gqa")


def test_line_ends_of_other_scripts_blank_lines_and_a_byte_order_mark_are_no_faults(folder):
    rows = [json.dumps(row, ensure_ascii=False) for row in gqa(2, question="one\u2028two\x85three")]
    (folder / "gqa.jsonl").write_text("\ufeff" + "\n\n".join(rows) + "\n\n", encoding="utf8")
    published_sets._read.cache_clear()
    assert [example.meta["question"] for example in published_sets.documents("gqa")] == [
        "one\u2028two\x85three"
    ] * 2


# ---------------------------------------------------------------- what counts together


def test_mme_counts_the_same_in_any_order_of_lines(folder, monkeypatch):
    rows = mme() + mme(4, "color")
    said = {row["key"]: row["gt_answer"] if row["key"] not in ("OCR 1", "OCR 4") else "what" for row in rows}
    found = []
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        write(folder, "mme", rows)
        published_sets._read.cache_clear()
        found.append(
            evaluate(
                small(monkeypatch, "mme", 12), lambda asked, decode: [said[example.key] for example in asked]
            ).metrics
        )
    # of OCR six of eight questions and two of four pictures, of color everything
    assert (
        all(metrics == found[0] for metrics in found)
        and found[0]["accuracy of OCR"] == 75 + 50
        and found[0]["accuracy of color"] == 200
    )


@pytest.mark.parametrize("picture", ["d.png", None])
def test_mme_questions_whose_pictures_are_no_pairs_are_refused(folder, picture):
    rows = mme(6)
    rows[3]["image"] = picture
    write(folder, "mme", rows)
    with pytest.raises(
        InputError,
        match=r"2 of 4 pictures have not two questions: OCR: b.png \(1\); OCR: .* both name the same file",
    ):
        published_sets.documents("mme")


def test_mmvp_in_another_order_is_refused(folder):
    rows = sorted(mmvp(40), key=lambda row: row["key"])  # "1", "10", "11", ...
    write(folder, "mmvp", rows)
    with pytest.raises(
        InputError, match=r"only \d+ of 20 pairs of lines ask one question\. .*in the order of Questions.csv"
    ):
        published_sets.documents("mmvp")


def test_a_limit_takes_whole_pairs_and_rotations(folder, monkeypatch):
    answer = lambda asked, decode: ["A"] * len(asked)  # noqa: E731
    write(folder, "mmvp", mmvp(8))
    for limit, n in ((1, 2), (3, 4), (4, 4), (8, 8)):
        result = evaluate(small(monkeypatch, "mmvp", 8), answer, limit=limit)
        assert (
            result.n == n
            and result.metrics == {"total": n, "correct": 0, "accuracy": 0.0}
            and result.interval[0] == 0
        )
    rotations = [
        row | {"source_id": i % 3, "category": "c", "gt_answer": "A"} for i, row in enumerate(mmvp(9))
    ]
    write(folder, "mmbench_en", rotations)
    result = evaluate(small(monkeypatch, "mmbench_en", 9), answer, limit=1)
    assert [row["key"] for row in result.rows] == ["1", "4", "7"] and result.metrics["circular_count"] == 1
    write(folder, "mme", mme())
    assert evaluate(small(monkeypatch, "mme", 8), answer, limit=3).n == 4


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("5%", "0.05", True), ("0.05", "5%", True), ("5", "5%", False), ("5%", "5", False), ("104", "100", True), ("106", "100", False),
        ("-95.5", "-100", True), ("Yes", "yes", True), ("Yes.", "yes", False), (" 5 % ", "5%", True), ("0", "0", True), ("0.0", "0", False),
        ("1,000", "1000", False), ("%", "%", True), ("abc", "5", False),
    ],
)  # fmt: skip
def test_relaxed_accuracy_is_chartqas_own(answer, truth, right):
    assert relaxed(answer, truth) is right


def test_chartqa_has_both_accuracies_under_their_names(folder, monkeypatch):
    write(
        folder,
        "chartqa",
        [row | {"gt_answer": truth} for row, truth in zip(gqa(4), ("0.05", "10", "no", "7"), strict=True)],
    )
    said = ["5%", "10.4", "no", "8"]
    result = evaluate(
        small(monkeypatch, "chartqa", 4), lambda asked, decode: [said[int(example.key)] for example in asked]
    )
    assert (result.main_metric, result.score, result.metrics["relaxed"]) == ("accuracy", 50.0, 75.0)
    assert [row["scores"]["relaxed"] for row in result.rows] == [1, 1, 1, 0]


# ---------------------------------------------------------------- before weights are read


def test_faults_of_all_tasks_are_told_before_weights_are_read(folder, tmp_path, monkeypatch, capsys):
    write(folder, "mmvp", mmvp())
    write(
        folder, "gqa", [{name: value for name, value in row.items() if name != "gt_answer"} for row in gqa()]
    )
    write(folder, "pope", gqa(3, image="none.png"))
    for name, n in (("mmvp", 4), ("gqa", 2), ("pope", 3)):
        small(monkeypatch, name, n)
    monkeypatch.setattr(scoring, "export_of", lambda run: pytest.fail("the weights were looked for"))
    run = run_of(tmp_path, "mmvp", "gqa", "pope")
    for dry_run in (False, True):
        with pytest.raises(InputError) as error:
            scoring.evaluate_run(run.model_copy(update={"dry_run": dry_run}))
        first, second = str(error.value).split("\n")
        assert (
            "gqa.jsonl: 2 of 2 documents cannot be used: line 1: no gt_answer; line 2: no gt_answer. A line "
            "of gqa holds"
            in first
        )
        assert second.startswith("task pope: 1 of 1 pictures cannot be used: image ") and second.endswith(
            "none.png' does not exist"
        )
    words = ["eval", "--model", "8b-debug", "--run-dir", str(tmp_path / "runs"), "--tasks", "mmvp", "gqa"]
    for more in ([], ["--dry-run"]):
        assert cli.main([*words, *more]) == 2
        assert "no gt_answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "words"),
    [(lambda data: data[:-30], "b.jpg"), (lambda data: b"no picture", "of no known image format")],
)
def test_a_picture_that_does_not_decode_is_found_where_it_is_asked(
    folder, tmp_path, monkeypatch, damage, words
):
    Image.effect_noise((64, 64), 50).save(folder / "b.jpg")
    (folder / "b.jpg").write_bytes(damage((folder / "b.jpg").read_bytes()))
    write(folder, "gqa", [row | {"image": ["a.png", "b.jpg"][i]} for i, row in enumerate(gqa(2))])
    small(monkeypatch, "gqa", 2)
    with pytest.raises(InputError, match=f"task gqa: 1 of 2 pictures cannot be used: .*{words}"):
        scoring.check_documents(run_of(tmp_path, "gqa"))
    (row,) = scoring.check_documents(run_of(tmp_path, "gqa", **{"evaluation.limit": 1}))
    assert row == {"task": "gqa", "documents": 2, "asked": 1, "pictures": 1, "state": "ok"}


def test_a_dry_run_shows_what_is_there_and_what_is_not(folder, tmp_path, monkeypatch):
    write(folder, "mmvp", mmvp())
    small(monkeypatch, "mmvp", 4)
    shown = str(score(run_of(tmp_path, "mmvp", "gqa", dry_run=True)))
    assert "would score mmvp, gqa" in shown and f"not here: task 'gqa': no documents at {folder}" in shown
    with pytest.raises(
        ConfigError,
        match=rf"no documents at {folder}/gqa.jsonl; .* with key, image, question, gt_answer, or set MMKIT",
    ):
        score(run_of(tmp_path, "mmvp", "gqa"))
    with pytest.raises(ConfigError, match="names a task twice"):
        scoring.check_tasks(run_of(tmp_path, "mmvp", "mmvp"))


# ---------------------------------------------------------------- what was scored stays


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("CUDA out of memory")])
def test_what_ends_is_written_whatever_stops_the_next_task(folder, tmp_path, monkeypatch, caplog, stop):
    write(folder, "mmvp", mmvp())
    write(folder, "gqa", gqa())
    small(monkeypatch, "mmvp", 4), small(monkeypatch, "gqa", 2)
    run = run_of(tmp_path, "mmvp", "gqa")

    class Answers:
        """Answers one task; the other is interrupted."""

        def __init__(self, *parts):
            pass

        def __call__(self, requests, decode):
            if requests[0].source == "gqa":
                raise stop
            return ["A"] * len(requests)

    monkeypatch.setattr(answering, "VlmAnswerer", Answers)
    monkeypatch.setattr(scoring, "export_of", lambda run: "export")
    monkeypatch.setattr(scoring, "opened", lambda export, backend: (None, run.model, None, None))
    with pytest.raises(type(stop)):
        scoring.evaluate_run(run)
    (stored,) = read_results(run.folder)["results"]
    assert (stored["task"], stored["n"], stored["export"]) == ("mmvp", 4, "export")
    assert len(Store(run.folder).read("samples.jsonl").splitlines()) == 4
    assert f"what was scored before is in {run.folder}/results.json: mmvp" in caplog.text


def test_two_evaluations_that_end_together_lose_no_result(tmp_path, monkeypatch):
    gate = threading.Barrier(4)
    results = [
        Result(f"task {i}", {}, "x", 1, "m", {"m": 1.0}, rows=({"task": f"task {i}", "key": "k"},))
        for i in range(4)
    ]

    def end(result):
        gate.wait()
        write_results(tmp_path, [result])

    threads = [threading.Thread(target=end, args=(result,)) for result in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tree["task"] for tree in read_results(tmp_path)["results"]) == [
        result.task for result in results
    ]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 4
    monkeypatch.setattr(runner, "PATIENCE", 0.0)
    lock = FolderLock(Store(tmp_path), "writes results in it")
    lock.take()
    with pytest.raises(ConfigError, match="is in use: .* writes results in it"):
        write_results(tmp_path, results[:1])
    lock.release()


def test_a_pack_is_not_made_to_be_looked_at(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_CACHE", str(tmp_path))
    tasks = [name for name in TASKS if TASKS[name].pack]
    rows = scoring.check_documents(run_of(tmp_path, *tasks))
    clip = scoring.check_documents(load("clip-tiny", "eval", {"dry_run": True}))
    assert len(tasks) == 5 and [row["task"] for row in rows] == tasks and not list(tmp_path.iterdir())
    assert all("by `mmkit data demo" in row["state"] for row in (*rows, *clip)) and len(clip) == 2
