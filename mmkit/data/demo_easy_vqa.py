"""The easy-VQA pack: 5,000 small pictures of one shape each, 48,248 questions, 13 answers (the package ``easy-vqa``).

Pictures stay in the package. One example is one question; the questions of a picture follow each other and name it in ``meta``.
Its yes/no questions can be answered from their wording alone (84% right with the wrong picture), so ``train_balanced`` keeps at
most ``YES_NO_KEPT`` of them a picture and every score is given per question type beside a control.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
from PIL import Image

from mmkit.data.demo_files import python_package, region_row, row, write_split

SHAPES = ("circle", "rectangle", "triangle")
YES_NO_KEPT = 2
LICENCE = "MIT"


def question_type(answer: str) -> str:
    """``yes-no``, ``shape`` or ``colour``: what the answer is about."""
    if answer in ("yes", "no"):
        return "yes-no"
    return "shape" if answer in SHAPES else "colour"


def build(folder: Path, seed: int):
    """Writes train, train_balanced, captions (of training pictures) and test into ``folder``; returns the asset used."""
    asset = python_package("easy_vqa", "easy-vqa", LICENCE)
    for split in ("train", "test"):
        rows = question_rows(asset.folder, split)
        write_split(folder, split, rows)
        if split == "train":
            write_split(folder, "train_balanced", balanced(rows, seed))
            write_split(folder, "captions", caption_rows("train", len(rows)))
    return [asset]


def questions(package: Path, split: str) -> dict[int, list[tuple[str, str]]]:
    """(question, answer) pairs of each picture, pictures in the order of their numbers."""
    by_picture = defaultdict(list)
    for question, answer, picture in json.loads((package / "data" / split / "questions.json").read_text(encoding="utf8")):
        by_picture[picture].append((question, answer))
    return dict(sorted(by_picture.items()))


def question_rows(package: Path, split: str) -> list[dict]:
    """All questions of a split, those of one picture together, in the package's order."""
    return [
        row(
            f"{split}-{picture}-{place}",
            [picture_path(split, picture)],
            [("user", f"<image>\n{question}"), ("assistant", answer)],
            image=f"{split}-{picture}",
            answer=answer,
            question=question,
            type=question_type(answer),
        )
        for picture, pairs in questions(package, split).items()
        for place, (question, answer) in enumerate(pairs)
    ]


def picture_path(split: str, picture: int) -> str:
    """How a pack names a picture that stays in the package."""
    return f"easy_vqa:data/{split}/images/{picture}.png"


def balanced(rows: list[dict], seed: int, kept: int = YES_NO_KEPT) -> list[dict]:
    """The rows with at most ``kept`` yes/no questions a picture, chosen by ``seed``."""
    by_picture = defaultdict(list)
    for place, line in enumerate(rows):
        if line["meta"]["type"] == "yes-no":
            by_picture[line["meta"]["image"]].append(place)
    generator = random.Random(seed)
    dropped: set[int] = set()
    for places in by_picture.values():
        generator.shuffle(places)
        dropped.update(places[kept:])
    return [line for place, line in enumerate(rows) if place not in dropped]


def shape_box(path: Path) -> tuple[tuple[int, int, int, int], np.ndarray]:
    """The exact box (x1, y1, x2, y2), inclusive, and the mask of the shape: pixels that differ from the median background."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    mask = np.abs(pixels - np.median(pixels.reshape(-1, 3), axis=0)).sum(-1) > 60
    rows, columns = np.where(mask.any(1))[0], np.where(mask.any(0))[0]
    return (int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1])), mask


def told(package: Path, split: str, limit: int) -> list[dict]:
    """Path, shape and colour of the first ``limit`` pictures whose questions tell both."""
    facts = []
    for picture, pairs in questions(package, split).items():
        kinds = {question_type(answer): answer for _, answer in pairs}
        if {"shape", "colour"} <= set(kinds):
            facts.append({"path": picture_path(split, picture), "shape": kinds["shape"], "colour": kinds["colour"]})
    return facts[:limit]


def described(package: Path, split: str, limit: int) -> list[dict]:
    """`told`, with the exact box of each shape."""
    facts = told(package, split, limit)
    for fact in facts:
        fact["box"], _ = shape_box(package / fact["path"].partition(":")[2])
    return facts


def caption_rows(split: str, limit: int) -> list[dict]:
    """Captions of pictures whose shape and colour are known: "A blue rectangle." They align a connector with few tokens a picture."""
    package = python_package("easy_vqa", "easy-vqa", LICENCE).folder
    return [
        row(
            f"{split}-caption-{place}",
            [fact["path"]],
            [("user", "<image>"), ("assistant", f"A {fact['colour']} {fact['shape']}.")],
            concept=fact["shape"],
        )
        for place, fact in enumerate(told(package, split, limit))
    ]


def region_rows(split: str, limit: int) -> list[dict]:
    """Two region questions a picture with the exact box: what is it, and where is it."""
    package = python_package("easy_vqa", "easy-vqa", LICENCE).folder
    rows = []
    for place, fact in enumerate(described(package, split, limit)):
        region = region_row("box", fact["box"], (64, 64))
        name = f"{fact['colour']} {fact['shape']}"
        common = {"image": fact["path"], "concept": fact["shape"], "name": name}
        what = [("user", "<image>\nwhat is <region>?"), ("assistant", name)]
        where = [("user", f"<image>\nwhere is the {name}?"), ("assistant", "<region>")]
        rows.append(row(f"{split}-what-{place}", [fact["path"]], what, [region], type="refer", answer=name, **common))
        rows.append(row(f"{split}-where-{place}", [fact["path"]], where, [region], type="ground", **common))
    return rows
