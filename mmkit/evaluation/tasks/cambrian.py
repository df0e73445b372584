"""Cambrian-1's evaluation suite: data, prompt, decode length and scoring rule of each benchmark, as plain
data.

Facts: github.com/cambrian-mllm/cambrian, ``eval/eval``, and arXiv 2406.16860 section 2. Scores carry the
original csv names and their scale (some fractions, some percent, MME points) so that they can be laid beside
published rows; where an original counts oddly, the docstring says so.
"""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmkit.data.choices import LETTER, LETTER_IN_CHINESE, LETTER_ONLY
from mmkit.evaluation.answers import (
    after_marker,
    as_number,
    edit_distance,
    first_letter,
    first_word,
    short_answer,
    relaxed,
    vqa_accuracy,
    within,
)
from mmkit.evaluation.documents import Kind
from mmkit.evaluation.task import Unit

WORD = "Answer the question using a single word or phrase."
UNANSWERABLE = "When the provided information is insufficient, respond with 'Unanswerable'.\n" + WORD
SHORT = "Give the short answer directly."
NUMBER = "Answer the question using a single number or phrase."
REASONING = "First show your reasoning process and then give the final answer."
TRANSCRIBE = (
    "Please transcribe the text from the image word by word. Only include the words found in the image, "
    "and avoid adding any additional context or information."
)

SEED_TYPES = {
    1: "Scene Understanding", 2: "Instance Identity", 3: "Instance Attribute", 4: "Instance Location", 5: "Instance Counting",
    6: "Spatial Relation", 7: "Instance Interaction", 8: "Visual Reasoning", 9: "Text Recognition",
}  # fmt: skip
QBENCH_TYPES = {"0": "Yes/No", "1": "What", "2": "How"}
MME_COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
MME_PERCEPTION = (
    "existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR",
)  # fmt: skip
HANDWRITTEN = "Handwritten Mathematical Expression Recognition"

Row = dict[str, Any]
Right = Callable[[Row], float]  # how right one row is, 0 to 1
Score = Callable[[list[Row], list[float]], dict]  # all rows and how right each is -> metrics
Trials = Callable[
    [list[Row], list[float]], list[tuple[float, Row]]
]  # what the main metric is the mean of, each with a row of it
Together = Callable[[list[Row]], list[Any]]  # all rows -> for each what names those it counts together with


# ---------------------------------------------------------------- is one row right?


def _letter(text: str) -> str:
    return text.strip().lower().strip("()")


def lettered(trailing: str) -> Right:
    """The option letter of the answer equals that of the truth, written "B" or "(B)"."""
    return lambda row: first_letter(row["answer"], trailing) == _letter(row["gt_answer"])


def _omni(row: Row) -> bool:
    truth = _letter(row["gt_answer"])
    option = row["options"]["abcd".index(truth)] if truth in ("a", "b", "c", "d") else truth
    return first_letter(row["answer"]) in (truth, option)


def _ai2d(row: Row) -> bool:
    """The truth is the option's number from 0; an answer may be it or its letter."""
    letter = first_letter(row["answer"])
    numbers = {"a": "0", "b": "1", "c": "2", "d": "3"}
    return numbers.get(letter, letter) == str(row["gt_answer"])


def _before_period_word(row: Row) -> bool:
    head = row["answer"].split(".")[0].lower().strip()
    return head.split(" ")[0].lstrip("(").rstrip(")") == _letter(row["gt_answer"])


def _before_period(row: Row) -> bool:
    return row["answer"].split(".")[0].lower().strip() == row["gt_answer"].lower()


def _first_word(row: Row) -> bool:
    return first_word(row["answer"]) == row["gt_answer"].lower()


def _exact(row: Row) -> bool:
    return row["answer"].lower().rstrip(".") == row["gt_answer"].lower()


def _mmmu(row: Row) -> bool:
    read = first_letter if row["type"] == "multiple-choice" else short_answer
    answer, truth = read(row["answer"]), row["gt_answer"].lower()
    return answer == truth or within(truth, answer)  # 5% of the answer, as the original has it


def _mathvista(row: Row) -> bool:
    answer, truth = row["answer"].lower().strip(), row["gt_answer"].lower()
    answer = answer.split(".")[0] if row["type"] == "multiple-choice" else answer
    return answer == truth or within(truth, answer)  # 5% of the answer, as the original has it


def _chartqa(row: Row) -> bool:
    answer, truth = row["answer"].lower().strip(), row["gt_answer"].lower().strip()
    numbers = as_number(answer) is not None and as_number(truth) is not None
    return within(answer, truth) if numbers else answer == truth


def _realworldqa(row: Row) -> bool:
    words = short_answer(row["answer"]).split()
    return bool(words) and words[0] == row["gt_answer"].lower()


def _scienceqa(row: Row) -> bool:
    answer, bare = short_answer(row["answer"]), str.maketrans("", "", string.punctuation)
    said, truth = (text.translate(bare).lower().strip() for text in (answer, row["text_answer"]))
    return said == truth or answer.split(".")[0] == row["gt_answer"].lower().strip()


def _mmvp(row: Row) -> bool:
    answer = after_marker(row["answer"]).rstrip(".:,").lstrip("(").rstrip(")")
    letter = _letter(row["gt_answer"])
    return answer == letter or answer == row["text_options"]["ab".index(letter)].lower()


def _ocr(exact: bool) -> Right:
    def right(row: Row) -> bool:
        answer = row["answer"].strip().replace("\n", " ")
        truths = [truth.strip().replace("\n", " ") for truth in row["gt_answer"]]
        if row["category"] == HANDWRITTEN:
            answer, truths = answer.replace(" ", ""), [truth.replace(" ", "") for truth in truths]
        else:
            answer, truths = answer.lower(), [truth.lower() for truth in truths]
        return answer in truths if exact else any(truth in answer for truth in truths)

    return right


def _prediction(read: Callable[[str], str]) -> Right:
    return lambda row: read(row.get("prediction", row.get("answer", ""))) == row["gt_answer"].lower()


def _soft(row: Row) -> float:
    """VQA soft accuracy; rows of VizWiz's test split, which its server scores, count nothing."""
    return vqa_accuracy(row["answer"], row["gt_answer"]) if _is_scored(row) else 0.0


def _is_scored(row: Row) -> bool:
    return row.get("category", "val") == "val"


def _distance(row: Row) -> int:
    return edit_distance(row["answer"].lower().strip(), row["gt_answer"].lower().strip())


def _transcribed(row: Row) -> bool:
    return _distance(row) == 0


# ---------------------------------------------------------------- rows -> metrics


def percent(rows: list[Row], right: list[float]) -> dict:
    """{"total", "correct", "accuracy" in percent}."""
    return {"total": len(rows), "correct": sum(right), "accuracy": 100 * sum(right) / len(rows)}


def by_category(name: Callable[[Row], str] = lambda row: row["category"]) -> Score:
    """{"accuracy", "total_count", category: {"accuracy", "total"}} as fractions."""

    def score(rows: list[Row], right: list[float]) -> dict:
        groups = defaultdict(list)
        for row, hit in zip(rows, right, strict=True):
            groups[name(row)].append(hit)
        out = {"accuracy": sum(right) / len(rows), "total_count": len(rows)}
        return out | {
            key: {"accuracy": sum(hits) / len(hits), "total": len(hits)} for key, hits in groups.items()
        }

    return score


def circular(rows: list[Row], right: list[float]) -> dict:
    """MMBench: `by_category` plus the fraction of questions right in every rotation (rows of one
    source_id).
    """
    out, whole = by_category()(rows, right), rotations(rows, right)
    out |= {"circular_accuracy": sum(hit for hit, _ in whole) / len(whole), "circular_count": len(whole)}
    for name in {row["category"] for _, row in whole}:
        inside = [hit for hit, row in whole if row["category"] == name]
        out[name] |= {"circular_accuracy": sum(inside) / len(inside), "circular_count": len(inside)}
    return out


def rotations(rows: list[Row], right: list[float]) -> list[tuple[float, Row]]:
    """MMBench's questions: right where every rotation is; with the last rotation of each, whose category
    counts.
    """
    hits, last = defaultdict(list), {}
    for row, hit in zip(rows, right, strict=True):
        hits[row["source_id"]].append(hit)
        last[row["source_id"]] = row
    return [(float(all(found)), last[key]) for key, found in hits.items()]


def score_scienceqa(rows: list[Row], right: list[float]) -> dict:
    """As the original: rows with an image count once under "is_multimodal" and once under their subject, so
    totals exceed the rows.
    """
    groups = defaultdict(list)
    for row, hit in zip(rows, right, strict=True):
        if row["type"]:
            groups["is_multimodal"].append(hit)
        groups[row["category"]].append(hit)
    hits = [hit for group in groups.values() for hit in group]
    out = {"accuracy": sum(hits) / len(hits), "total_count": len(hits)}
    if groups["is_multimodal"]:
        out["multimodal_acc"] = sum(groups["is_multimodal"]) / len(groups["is_multimodal"])
    return out | {name: {"accuracy": sum(g) / len(g), "total": len(g)} for name, g in groups.items() if g}


def multimodal(rows: list[Row], right: list[float]) -> list[tuple[float, Row]]:
    """ScienceQA's rows with an image."""
    return [(hit, row) for row, hit in zip(rows, right, strict=True) if row["type"]]


def score_mme(rows: list[Row], right: list[float]) -> dict:
    """Per category 100 * (accuracy + fraction of consecutive pairs with both right); sums for Perception and
    Cognition.
    """
    groups = defaultdict(list)
    for row, hit in zip(rows, right, strict=True):
        groups[row["category"]].append(hit)
    out = {"accuracy": 100 * sum(right) / len(rows), "Perception": 0.0, "Cognition": 0.0}
    for name, hits in groups.items():
        acc, both = 100 * sum(hits) / len(hits), 100 * _of_right_pairs(hits) / len(hits)
        out[name] = {"acc_score": acc, "acc_plus_score": both, "score": acc + both, "size": len(hits)}
        out["Cognition" if name in MME_COGNITION else "Perception"] += acc + both
    return out | {"total_score": out["Perception"] + out["Cognition"]}


def _of_right_pairs(hits: list[float]) -> int:
    """How many questions belong to pairs (of consecutive questions) with both right: each right pair adds 2.

    A last question without a partner counts by itself, as in the originals; only a limited run has one.
    """
    pairs = sum(2 for a, b in zip(hits[::2], hits[1::2], strict=False) if a and b)
    return pairs + int(len(hits) % 2 and bool(hits[-1]))


def score_mmvp(rows: list[Row], right: list[float]) -> dict:
    """Both questions of a pair (consecutive rows) count where both are right, else neither: 3 of 10 pairs are
    6 of 20, 30 percent.
    """
    return percent(rows, right) | {
        "correct": _of_right_pairs(right),
        "accuracy": 100 * _of_right_pairs(right) / len(rows),
    }


def pairs(rows: list[Row], right: list[float]) -> list[tuple[float, Row]]:
    """MMVP's pairs: right where both questions are."""
    return [(float(all(right[i : i + 2])), rows[i]) for i in range(0, len(rows), 2)]


def score_ocrbench(rows: list[Row], right: list[float]) -> dict:
    """Accuracy in percent per category and "total_accuracy"."""
    groups = defaultdict(list)
    for row, hit in zip(rows, right, strict=True):
        groups[row["category"]].append(hit)
        groups["total_accuracy"].append(hit)
    return {
        name: {"accuracy": 100 * sum(hits) / len(hits), "total": len(hits)} for name, hits in groups.items()
    }


def score_synthdog(rows: list[Row], right: list[float]) -> dict:
    """Percent of transcriptions within an edit distance of 0, 5, 10, 25, 50."""
    distances = [_distance(row) for row in rows]
    rate = {limit: 100 * sum(d <= limit for d in distances) / len(rows) for limit in (0, 5, 10, 25, 50)}
    return {
        f"accuracy_edit_distance_{limit}": {"accuracy": value, "total": len(rows)}
        for limit, value in rate.items()
    }


def score_vqa(rows: list[Row], right: list[float]) -> dict:
    """VQA soft accuracy in percent over the rows that carry answers (VizWiz: its "val" rows)."""
    scored = answered(rows, right)
    return {"accuracy": 100 * sum(hit for hit, _ in scored) / len(scored)} if scored else {}


def answered(rows: list[Row], right: list[float]) -> list[tuple[float, Row]]:
    """The rows that are scored here, not by a server."""
    return [(hit, row) for row, hit in zip(rows, right, strict=True) if _is_scored(row)]


def submission(key: str, convert: Callable = str) -> Callable[[list[Row]], list[dict]]:
    """The file a benchmark's server scores: [{key, "answer"}]."""
    return lambda rows: [{key: convert(row[key]), "answer": row["answer"]} for row in rows]


def submission_vizwiz(rows: list[Row]) -> list[dict]:
    """Test rows of VizWiz, for its server."""
    return [
        {"image": row["image_id"], "answer": row["answer"].lower()} for row in rows if not _is_scored(row)
    ]


def submission_mmvet(rows: list[Row]) -> dict[str, str]:
    """{question id: answer} for MM-Vet's judge."""
    return {row["question_id"]: row["answer"] for row in rows}


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: where its questions come from, what is asked, how answers become metrics.

    ``n``: documents of a complete set (VizWiz: its val rows, or val and test). ``right`` is None where only
    others can score: then ``submit`` makes the file that ``scored_by`` takes. ``needs``: fields of a document
    beside key, image and question, each with what it must be (`documents.KINDS`); ``truth_of``: (field, its
    value, what ``gt_answer`` is then). ``together`` says which documents count together;
    ``also`` has scores that stand beside the original's under names of their own.
    """

    dataset: str
    split: str
    n: int | tuple[int, ...]
    suffix: str
    max_new_tokens: int
    right: Right | None
    reduce: Score | None = percent
    unit: Unit = "percent"
    main: str = "accuracy"
    trials: Trials | None = None  # None: every row is one trial
    needs: Mapping[str, Kind] = field(default_factory=lambda: {"gt_answer": "text"})
    truth_of: tuple[str, str, Kind] | None = None
    together: Together | None = None
    also: Mapping[str, Right] = field(default_factory=dict)
    options: str | None = (
        None  # what stands before the lettered options, where they are not in the question already
    )
    hint: str = ""  # what stands between a document's hint and its question
    suffix_of: tuple[str, str] | None = None  # (a document's type, its own suffix)
    question: str = ""  # asked of every document instead of its own
    submit: Callable | None = None
    scored_by: str = ""


def _letters(dataset: str, split: str, n: int, right: Right, **more: Any) -> Benchmark:
    return Benchmark(dataset, split, n, LETTER, 512, right, **more)


def _truth(kind: Kind, **more: Kind) -> dict[str, Kind]:
    return {"gt_answer": kind} | more


_GROUPED = {"reduce": by_category(), "unit": "fraction", "needs": _truth("letter", category="text")}
_CIRCULAR = {
    "reduce": circular, "unit": "fraction", "main": "circular_accuracy", "trials": rotations,
    "needs": _truth("bare letter", category="text", source_id="name"), "options": " Options:", "hint": "\n",
    "together": lambda rows: [row["source_id"] for row in rows],
}  # fmt: skip
_OCR = {"reduce": score_ocrbench, "main": "total_accuracy", "needs": _truth("texts", category="text")}
_RRC = {"right": None, "reduce": None, "main": "", "scored_by": "https://rrc.cvc.uab.es"}
_VQA = {"right": _soft, "reduce": score_vqa, "trials": answered}

# n: arXiv 2406.16860 Table 20 where it names one, else the split's own size. SEED-Bench counts its questions
# on one image, as the original asks no others; BLINK the six subsets the original asks (Counting, IQ_Test,
# Object_Localization, Relative_Depth, Relative_Reflectance, Spatial_Relation). ade, coco and omni are
# CV-Bench: its 2D score is the mean of the first two, 3D is omni.
BENCHMARKS: dict[str, Benchmark] = {
    "gqa": Benchmark("lmms-lab/GQA", "testdev_balanced", 12578, WORD, 128, _exact),
    "vizwiz": Benchmark(
        "lmms-lab/VizWiz-VQA", "val", (4319, 12319), UNANSWERABLE, 128, **_VQA,
        needs=_truth("anything", category=("val", "test"), image_id="text"),
        truth_of=("category", "val", "texts"),
        submit=submission_vizwiz, scored_by="the VizWiz challenge's server (test rows)",
    ),
    "scienceqa": Benchmark(
        "derek-thomas/ScienceQA", "test", 2017, LETTER_ONLY, 512, _scienceqa, score_scienceqa, "fraction",
        "multimodal_acc", multimodal,
        needs=_truth("bare letter", text_answer="text", category="text", type="flag"),
        options="", hint=" ",
    ),
    "textvqa": Benchmark(
        "lmms-lab/textvqa", "validation", 5000, WORD, 512, **_VQA, needs=_truth("texts", ocr_tokens="words")
    ),
    "pope": Benchmark("lmms-lab/POPE", "test", 9000, WORD, 128, _first_word, needs=_truth("yes or no")),
    "mme": Benchmark(
        "lmms-lab/MME", "test", 2374, WORD, 32, _exact, score_mme, "points", "Perception",
        needs=_truth("yes or no", category=(*MME_PERCEPTION, *MME_COGNITION)),
        together=lambda rows: [(row["category"], row["picture"]) for row in rows],
    ),
    "mmbench_en": _letters("lmms-lab/MMBench_EN", "dev", 4377, _prediction(first_letter), **_CIRCULAR),
    "mmbench_cn": Benchmark(
        "lmms-lab/MMBench_CN", "dev", 4329, LETTER_IN_CHINESE, 128, _prediction(first_word), **_CIRCULAR
    ),
    "seed": _letters(
        "lmms-lab/SEED-Bench", "test", 14233, lettered("."),
        **_GROUPED | {"reduce": by_category(lambda r: SEED_TYPES[int(r["category"])]), "options": " Options:"}
        | {"needs": _truth("letter", category=(*SEED_TYPES, *map(str, SEED_TYPES)))},
    ),
    "mmvet": Benchmark(
        "lmms-lab/MMVet", "test", 218, "", 128, **_RRC | {"scored_by": "MM-Vet's GPT-4 judge"},
        needs={"question_id": "name"}, submit=submission_mmvet,
    ),
    "mmmu": _letters(
        "lmms-lab/MMMU", "validation", 900, _mmmu,
        **_GROUPED | {"needs": _truth("text", category="text", type=("multiple-choice", "open"))},
        truth_of=("type", "multiple-choice", "bare letter"), options=" Options:", suffix_of=("open", WORD),
    ),
    "mathvista": Benchmark(
        "AI4Math/MathVista", "testmini", 1000, WORD, 512, _mathvista,
        **_GROUPED | {"needs": _truth("text", category="text", type=("multi_choice", "free_form"))},
        truth_of=("type", "multi_choice", "bare letter"), suffix_of=("multi_choice", REASONING),
    ),
    "ai2d": _letters("lmms-lab/ai2d", "test", 3088, _ai2d, options="", needs=_truth("option")),
    "chartqa": Benchmark(
        "lmms-lab/ChartQA", "test", 2500, NUMBER, 128, _chartqa,
        also={"relaxed": lambda row: relaxed(row["answer"], row["gt_answer"])},
    ),
    "docvqa": Benchmark(
        "lmms-lab/DocVQA", "test", 5188, SHORT, 128, **_RRC, needs={"questionId": "digits"},
        submit=submission("questionId", int)
    ),
    "infovqa": Benchmark(
        "lmms-lab/DocVQA", "test", 3288, WORD, 128, **_RRC, needs={"questionId": "digits"},
        submit=submission("questionId", int)
    ),
    "stvqa": Benchmark(
        "lmms-lab/ST-VQA", "test", 4070, WORD, 128, **_RRC, needs={"question_id": "digits"},
        submit=submission("question_id", int)
    ),
    "ocrbench": Benchmark("echo840/OCRBench", "test", 1000, SHORT, 512, _ocr(exact=False), **_OCR),
    "ocrbench_exact": Benchmark("echo840/OCRBench", "test", 1000, SHORT, 512, _ocr(exact=True), **_OCR),
    "mmstar": Benchmark(
        "Lin-Chen/MMStar", "val", 1500, LETTER_ONLY, 128, _first_word, needs=_truth("bare letter")
    ),
    "realworldqa": Benchmark("lmms-lab/RealWorldQA", "test", 765, "", 512, _realworldqa),
    "qbench": Benchmark(
        "teowu/LLVisionQA-QBench", "dev", 1495, LETTER_ONLY, 32, _before_period,
        by_category(lambda r: QBENCH_TYPES[str(r["type"])]), "fraction",
        needs=_truth("bare letter", type=(*QBENCH_TYPES, *map(int, QBENCH_TYPES))), options=" Options:",
    ),
    "blink": Benchmark("BLINK-Benchmark/BLINK", "val", 793, LETTER_ONLY, 32, _before_period_word, **_GROUPED),
    "mmvp": _letters(
        "MMVP/MMVP", "test", 300, _mmvp, reduce=score_mmvp, trials=pairs,
        needs=_truth("letter", text_options="two texts"), options=" Options:",
        together=lambda rows: [place // 2 for place in range(len(rows))],
    ),
    "vstar": Benchmark("craigwu/vstar_bench", "test", 191, "", 32, lettered("."), needs=_truth("letter")),
    "ade": _letters("SaiCharithaAkula21/benchmark_ade_manual", "train", 633, lettered("."), **_GROUPED),
    "coco": _letters("SaiCharithaAkula21/benchmark_coco_filtered", "train", 805, lettered("."), **_GROUPED),
    "omni": _letters(
        "nyu-visionx/CV-Bench", "test, 3D", 1200, _omni,
        **_GROUPED | {"needs": _truth("letter", category="text", options="options")},
    ),
    "synthdog": Benchmark(
        "naver-clova-ix/synthdog-en", "validation", 500, "", 128, _transcribed, score_synthdog,
        main="accuracy_edit_distance_0", question=TRANSCRIBE,
    ),
}  # fmt: skip
