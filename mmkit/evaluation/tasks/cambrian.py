"""Cambrian-1's evaluation suite: data, prompt suffix, decode length and scoring rule of each benchmark, as plain data.

Facts: cambrian-mllm/cambrian @ 539ffc3, ``eval/eval`` (reference-models 1.14; arXiv 2406.16860 section 2). Scores carry the original
csv names so that they can be laid beside published rows; where an original counts oddly, the docstring says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from mmkit.evaluation.answers import as_number, edit_distance, first_letter, first_word, short_answer, vqa_accuracy, within

LETTER = "Answer with the option's letter from the given choices directly."
WORD = "Answer the question using a single word or phrase."
LETTER_ONLY = "Please answer directly with only the letter of the correct option and nothing else."
UNANSWERABLE = "When the provided information is insufficient, respond with 'Unanswerable'.\n" + WORD
SHORT = "Give the short answer directly."

SEED_TYPES = {
    1: "Scene Understanding", 2: "Instance Identity", 3: "Instance Attribute", 4: "Instance Location", 5: "Instance Counting",
    6: "Spatial Relation", 7: "Instance Interaction", 8: "Visual Reasoning", 9: "Text Recognition",
}  # fmt: skip
QBENCH_TYPES = {"0": "Yes/No", "1": "What", "2": "How"}
MME_COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
HANDWRITTEN = "Handwritten Mathematical Expression Recognition"

Row = dict
Score = Callable[[list[Row]], dict]


# ---------------------------------------------------------------- is one row right?


def _letter(text: str) -> str:
    return text.strip().lower().strip("()")


def lettered(trailing: str) -> Callable[[Row], bool]:
    """The option letter of the answer equals that of the truth, written "B" or "(B)"."""
    return lambda row: first_letter(row["answer"], trailing) == _letter(row["gt_answer"])


def _omni(row: Row) -> bool:
    truth = _letter(row["gt_answer"])
    option = row["options"]["abcd".index(truth)] if truth in ("a", "b", "c", "d") else truth
    return first_letter(row["answer"]) in (truth, option.lower())


def _ai2d(row: Row) -> bool:
    letter = first_letter(row["answer"])
    return letter in ("a", "b", "c", "d") and "abcd".index(letter) == int(row["gt_answer"])


def _before_period_word(row: Row) -> bool:
    head = row["answer"].lower().strip().split(".")[0]
    return (head.split() or [""])[0].strip("()") == _letter(row["gt_answer"])


def _before_period(row: Row) -> bool:
    return row["answer"].split(".")[0].lower().strip() == row["gt_answer"].lower()


def _first_word(row: Row) -> bool:
    return first_word(row["answer"]) == row["gt_answer"].lower()


def _exact(row: Row) -> bool:
    return row["answer"].lower().rstrip(".") == row["gt_answer"].lower()


def _mmmu(row: Row) -> bool:
    read = first_letter if row["type"] == "multiple-choice" else short_answer
    answer, truth = read(row["answer"]), row["gt_answer"].lower()
    return answer == truth or within(answer, truth)


def _mathvista(row: Row) -> bool:
    answer, truth = row["answer"].lower().strip(), row["gt_answer"].lower()
    answer = answer.split(".")[0] if row["type"] == "multiple-choice" else answer
    return answer == truth or within(answer, truth)


def _chartqa(row: Row) -> bool:
    answer, truth = row["answer"].lower().strip(), row["gt_answer"].lower().strip()
    numbers = as_number(answer) is not None and as_number(truth) is not None
    return within(answer, truth) if numbers else answer == truth


def _realworldqa(row: Row) -> bool:
    words = short_answer(row["answer"]).split()
    return bool(words) and words[0] == row["gt_answer"].lower()


def _scienceqa(row: Row) -> bool:
    answer = short_answer(row["answer"])
    bare = "".join(char for char in answer if char.isalnum() or char.isspace()).strip()
    return answer.split(".")[0] == row["gt_answer"].lower() or bare == row["text_answer"].lower()


def _mmvp(row: Row) -> bool:
    answer = row["answer"].lower().strip().split("answer:")[-1].strip().rstrip(".:,").lstrip("(").rstrip(")")
    letter = _letter(row["gt_answer"])
    return answer == letter or answer == row["text_options"]["ab".index(letter)].lower()


def _ocr(exact: bool) -> Callable[[Row], bool]:
    def right(row: Row) -> bool:
        answer = row["answer"].strip().replace("\n", " ")
        truths = [truth.strip().replace("\n", " ") for truth in row["gt_answer"]]
        if row["category"] == HANDWRITTEN:
            answer, truths = answer.replace(" ", ""), [truth.replace(" ", "") for truth in truths]
        else:
            answer, truths = answer.lower(), [truth.lower() for truth in truths]
        return answer in truths if exact else any(truth in answer for truth in truths)

    return right


# ---------------------------------------------------------------- rows -> metrics


def share(correct: Callable[[Row], bool]) -> Score:
    """{"total", "correct", "accuracy" in percent}."""

    def score(rows: list[Row]) -> dict:
        right = sum(correct(row) for row in rows)
        return {"total": len(rows), "correct": right, "accuracy": 100 * right / len(rows)}

    return score


def by_category(correct: Callable[[Row], bool], name: Callable[[Row], str] = lambda row: row["category"]) -> Score:
    """{"accuracy", "total_count", category: {"accuracy", "total"}} as fractions."""

    def score(rows: list[Row]) -> dict:
        groups = defaultdict(list)
        for row in rows:
            groups[name(row)].append(correct(row))
        out = {"accuracy": sum(map(sum, groups.values())) / len(rows), "total_count": len(rows)}
        return out | {key: {"accuracy": sum(hits) / len(hits), "total": len(hits)} for key, hits in groups.items()}

    return score


def circular(correct: Callable[[Row], bool]) -> Score:
    """MMBench: `by_category` plus the share of questions right in every rotation (rows of one source_id)."""
    plain = by_category(correct)

    def score(rows: list[Row]) -> dict:
        out, questions, category = plain(rows), defaultdict(list), {}
        for row in rows:
            questions[row["source_id"]].append(correct(row))
            category[row["source_id"]] = row["category"]
        whole = {key: all(hits) for key, hits in questions.items()}
        out |= {"circular_accuracy": sum(whole.values()) / len(whole), "circular_count": len(whole)}
        for name in set(category.values()):
            inside = [whole[key] for key in whole if category[key] == name]
            out[name] |= {"circular_accuracy": sum(inside) / len(inside), "circular_count": len(inside)}
        return out

    return score


def _predicted(read: Callable[[str], str]) -> Callable[[Row], bool]:
    return lambda row: read(row.get("prediction", row.get("answer", ""))) == row["gt_answer"].lower()


def score_scienceqa(rows: list[Row]) -> dict:
    """As the original: rows with an image count once under "is_multimodal" and once under their subject, so totals exceed the rows."""
    groups = defaultdict(list)
    for row in rows:
        hit = _scienceqa(row)
        if row["type"]:
            groups["is_multimodal"].append(hit)
        groups[row["category"]].append(hit)
    hits = [hit for group in groups.values() for hit in group]
    out = {"accuracy": sum(hits) / len(hits), "total_count": len(hits)}
    if groups["is_multimodal"]:
        out["multimodal_acc"] = sum(groups["is_multimodal"]) / len(groups["is_multimodal"])
    return out | {name: {"accuracy": sum(g) / len(g), "total": len(g)} for name, g in groups.items() if g}


def score_mme(rows: list[Row]) -> dict:
    """Per category 100 * (accuracy + share of consecutive pairs with both right); sums for Perception and Cognition."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["category"]].append(_exact(row))
    out = {"accuracy": 100 * sum(map(sum, groups.values())) / len(rows), "Perception": 0.0, "Cognition": 0.0}
    for name, hits in groups.items():
        pairs = [a and b for a, b in zip(hits[::2], hits[1::2], strict=True)]
        acc, both = 100 * sum(hits) / len(hits), 100 * sum(pairs) / len(pairs)
        out[name] = {"acc_score": acc, "acc_plus_score": both, "score": acc + both, "size": len(hits)}
        out["Cognition" if name in MME_COGNITION else "Perception"] += acc + both
    return out | {"total_score": out["Perception"] + out["Cognition"]}


def score_mmvp(rows: list[Row]) -> dict:
    """A pair of consecutive questions counts, as one, only where both are right; accuracy is over all questions."""
    hits = [_mmvp(row) for row in rows]
    right = sum(a and b for a, b in zip(hits[::2], hits[1::2], strict=True))
    return {"total": len(rows), "correct": right, "accuracy": 100 * right / len(rows)}


def score_ocrbench(exact: bool) -> Score:
    """Accuracy in percent per category and "total_accuracy"; a truth inside the answer counts unless ``exact``."""

    def score(rows: list[Row]) -> dict:
        groups = defaultdict(list)
        for row in rows:
            hit = _ocr(exact)(row)
            groups[row["category"]].append(hit)
            groups["total_accuracy"].append(hit)
        return {name: {"accuracy": 100 * sum(hits) / len(hits), "total": len(hits)} for name, hits in groups.items()}

    return score


def score_synthdog(rows: list[Row]) -> dict:
    """Share of transcriptions within an edit distance of 0, 5, 10, 25, 50, in percent."""
    distances = [edit_distance(row["answer"].lower(), row["gt_answer"].lower()) for row in rows]
    limits = (0, 5, 10, 25, 50)
    rate = {limit: 100 * sum(d <= limit for d in distances) / len(rows) for limit in limits}
    return {f"accuracy_edit_distance_{limit}": {"accuracy": rate[limit], "total": len(rows)} for limit in limits}


def score_vqa(rows: list[Row]) -> dict:
    """VQA soft accuracy in percent over the rows that carry answers (VizWiz: its "val" rows)."""
    scored = [row for row in rows if row.get("category", "val") == "val"]
    return {"accuracy": 100 * sum(vqa_accuracy(row["answer"], row["gt_answer"]) for row in scored) / len(scored)}


def submission(key: str, convert: Callable = str) -> Callable[[list[Row]], list[dict]]:
    """The file a benchmark's server scores: [{key, "answer"}]."""
    return lambda rows: [{key: convert(row[key]), "answer": row["answer"]} for row in rows]


def submission_vizwiz(rows: list[Row]) -> list[dict]:
    """Test rows of VizWiz, for its server."""
    return [{"image": row["image_id"], "answer": row["answer"]} for row in rows if row["category"] != "val"]


def submission_mmvet(rows: list[Row]) -> dict[str, str]:
    """{question id: answer} for MM-Vet's judge."""
    return {row["question_id"]: row["answer"] for row in rows}


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: where it comes from, what is asked, how answers become metrics."""

    dataset: str
    split: str
    suffix: str
    max_new_tokens: int
    score: Score | None
    options: str = ""  # " Options:" or "" before the lettered options of a multiple-choice question
    submit: Callable | None = None


BENCHMARKS: dict[str, Benchmark] = {
    "gqa": Benchmark("lmms-lab/GQA", "testdev_balanced", WORD, 128, share(_exact)),
    "vizwiz": Benchmark("lmms-lab/VizWiz-VQA", "val", UNANSWERABLE, 128, score_vqa, submit=submission_vizwiz),
    "scienceqa": Benchmark("derek-thomas/ScienceQA", "test", LETTER_ONLY, 512, score_scienceqa),
    "textvqa": Benchmark("lmms-lab/textvqa", "validation", WORD, 512, score_vqa),
    "pope": Benchmark("lmms-lab/POPE", "test", WORD, 128, share(_first_word)),
    "mme": Benchmark("lmms-lab/MME", "test", WORD, 32, score_mme),
    "mmbench_en": Benchmark("lmms-lab/MMBench_EN", "dev", LETTER, 512, circular(_predicted(first_letter)), " Options:"),
    "mmbench_cn": Benchmark("lmms-lab/MMBench_CN", "dev", "请直接回答选项字母。", 128, circular(_predicted(first_word))),
    "seed": Benchmark("lmms-lab/SEED-Bench", "test", LETTER, 512, by_category(lettered("."), lambda r: SEED_TYPES[r["category"]]), " Options:"),
    "mmvet": Benchmark("lmms-lab/MMVet", "test", "", 512, None, submit=submission_mmvet),
    "mmmu": Benchmark("lmms-lab/MMMU", "validation", LETTER, 512, by_category(_mmmu), " Options:"),
    "mathvista": Benchmark("AI4Math/MathVista", "testmini", WORD, 512, by_category(_mathvista)),
    "ai2d": Benchmark("lmms-lab/ai2d", "test", LETTER, 512, share(_ai2d)),
    "chartqa": Benchmark("lmms-lab/ChartQA", "test", "Answer the question using a single number or phrase.", 128, share(_chartqa)),
    "docvqa": Benchmark("lmms-lab/DocVQA", "test", SHORT, 128, None, submit=submission("questionId", int)),
    "infovqa": Benchmark("lmms-lab/DocVQA", "test", WORD, 128, None, submit=submission("questionId", int)),
    "stvqa": Benchmark("lmms-lab/ST-VQA", "test", WORD, 128, None, submit=submission("question_id", int)),
    "ocrbench": Benchmark("echo840/OCRBench", "test", SHORT, 512, score_ocrbench(exact=False)),
    "ocrbench_exact": Benchmark("echo840/OCRBench", "test", SHORT, 512, score_ocrbench(exact=True)),
    "mmstar": Benchmark("Lin-Chen/MMStar", "val", LETTER_ONLY, 512, share(_first_word)),
    "realworldqa": Benchmark("lmms-lab/RealWorldQA", "test", "", 512, share(_realworldqa)),
    "qbench": Benchmark("teowu/LLVisionQA-QBench", "dev", LETTER_ONLY, 32, by_category(_before_period, lambda r: QBENCH_TYPES[r["type"]]), " Options:"),
    "blink": Benchmark("BLINK-Benchmark/BLINK", "val", LETTER_ONLY, 32, by_category(_before_period_word)),
    "mmvp": Benchmark("MMVP/MMVP", "test", LETTER, 512, score_mmvp, " Options:"),
    "vstar": Benchmark("craigwu/vstar_bench", "test", "", 32, share(lettered("."))),
    "ade": Benchmark("SaiCharithaAkula21/benchmark_ade_manual", "test", LETTER, 512, by_category(lettered("."))),
    "coco": Benchmark("SaiCharithaAkula21/benchmark_coco_filtered", "test", LETTER, 512, by_category(lettered("."))),
    "omni": Benchmark("local json", "test", LETTER, 512, by_category(_omni)),
    "synthdog": Benchmark("naver-clova-ix/synthdog-en", "validation", "", 128, score_synthdog),
}
