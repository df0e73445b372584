"""Pictures of examples: with their boxes, with a model's answers, and a conversation's tokens coloured by
what carries loss.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.patches import Circle, Rectangle

from mmkit.config import IMAGE_TOKEN_INDEX, REGION_TOKEN_INDEX
from mmkit.data.boxes import Box, boxes_in, grid, pixels
from mmkit.data.example import REGION, Example
from mmkit.data.images import open_image
from mmkit.figures.drawn import Drawn, blank

COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080")
MAX_TOKENS = 260  # of one conversation in a token picture
MAX_LINES = 11  # of text below a picture


def pictures(
    examples: Sequence[Example],
    columns: int = 3,
    name: str = "examples",
    notes: Sequence[str] = (),
    titles: Sequence[str] = (),
    boxes: Sequence[Sequence[Box]] = (),
) -> Drawn:
    """Each example's first picture with its regions drawn and its text below; ``notes`` replace the text and
    ``titles`` the source and key where given, ``boxes`` are drawn dashed besides the regions."""
    columns = min(columns, len(examples))
    rows = math.ceil(len(examples) / columns)
    figure, axes = blank(3.6 * columns, 4.4 * rows, columns=columns, rows=rows, squeeze=False)
    table = []
    for place, axis in enumerate(axes.flat):
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        if place < len(examples):
            example = examples[place]
            text = notes[place] if place < len(notes) else conversation_text(example)
            title = titles[place] if place < len(titles) else f"{example.source}: {example.key}"
            _one_picture(axis, example, text, title, boxes[place] if place < len(boxes) else ())
            table.append({"key": example.key, "source": example.source, "text": text, "regions": len(example.regions)})
    return Drawn(name, figure, pd.DataFrame(table), "the first examples of each source")


def _one_picture(axis: Any, example: Example, text: str, title: str, boxes: Sequence[Box]) -> None:
    if example.images:
        image = open_image(example.images[0])
        axis.imshow(image, extent=(0, image.width, image.height, 0))
        _draw_regions(axis, example, image.size)
        for box in boxes:
            left, top, right, bottom = box.to(pixels(*image.size)).corners
            for colour, width in (("black", 3.0), ("white", 1.5)):  # seen on any ground
                edge = {"edgecolor": colour, "linewidth": width, "linestyle": (0, (4, 3))}
                axis.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, **edge))
    axis.set_title(textwrap.shorten(title, 60), fontsize=7)
    lines = [line for paragraph in text.splitlines() for line in textwrap.wrap(paragraph, 42)]
    shown = lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], "..."]
    # a label of the axis, unlike free text, is part of the layout: rows below make room for it. "$" would
    # begin a formula
    axis.set_xlabel("\n".join(shown).replace("$", r"\$"), fontsize=7, loc="left")


def _draw_regions(axis: Any, example: Example, size: tuple[int, int]) -> None:
    """Boxes as rectangles, points as rings; every kind is turned into pixels of this picture first."""
    for number, region in enumerate(example.regions):
        if region.image:
            continue
        colour = COLOURS[number % len(COLOURS)]
        box = region.box.to(pixels(*size))
        left, top, right, bottom = box.corners
        if region.kind == "point":
            axis.add_patch(Circle(((left + right) / 2, (top + bottom) / 2), max(size) / 40, fill=False, edgecolor=colour, linewidth=2))
        else:
            axis.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, linewidth=2))
        axis.text(left, top, f"{number + 1}", color="white", fontsize=7, va="bottom", bbox={"facecolor": colour, "pad": 1, "linewidth": 0})


def conversation_text(example: Example) -> str:
    """The turns as short lines, markers left in."""
    names = {"user": "Q", "assistant": "A", "system": "S"}
    return "\n".join(f"{names.get(turn.role, turn.role)}: {turn.text.strip()}" for turn in example.turns)


def tokens(encoded: Any, tokenizer: Any, columns: int = 12, name: str = "tokens") -> Drawn:
    """One conversation token by token: green carries loss, grey does not, blue stands for a picture, orange
    for a region.

    ``encoded`` has ``ids`` and ``trained`` (`data.conversation.Encoded`). Of a long conversation a part is
    shown in which learning begins.
    """
    ids, trained = np.asarray(encoded.ids), np.asarray(encoded.trained)
    first = int(trained.argmax())  # behind a long system prompt or a picture's slots
    start = 0 if first < MAX_TOKENS * 3 // 4 else first - MAX_TOKENS // 2
    ids, trained = ids[start : start + MAX_TOKENS], trained[start : start + MAX_TOKENS]
    table = pd.DataFrame(
        [{"id": int(i), "text": token_text(int(i), tokenizer), "trained": bool(t)} for i, t in zip(ids, trained, strict=True)]
    )
    rows = max(math.ceil(len(table) / columns), 1)
    figure, axis = blank(columns * 0.95, rows * 0.32 + 0.3)
    axis.set(xlim=(0, columns), ylim=(rows, 0))
    axis.axis("off")
    for place, row in enumerate(table.itertuples()):
        x, y = place % columns, place // columns
        axis.add_patch(Rectangle((x, y), 0.97, 0.92, facecolor=_token_colour(row.id, row.trained)))
        axis.text(x + 0.05, y + 0.46, row.text[:11], fontsize=6.5, va="center", family="monospace")
    return Drawn(name, figure, table, "one example of this config, as the model is given it")


def token_text(token: int, tokenizer: Any) -> str:
    """What a token shows as; spaces and line ends made visible."""
    if token == IMAGE_TOKEN_INDEX:
        return "[picture]"
    if token == REGION_TOKEN_INDEX:
        return "[region]"
    text = tokenizer.decode([token]).replace("\n", "\u21b5").replace(" ", "\u00b7").replace("$", r"\$")
    return text or "\u2205"


def _token_colour(token: int, trained: bool) -> str:
    special = {IMAGE_TOKEN_INDEX: "#9ecae1", REGION_TOKEN_INDEX: "#fdae6b"}
    return special.get(token, "#a1d99b" if trained else "#e0e0e0")


def answers(
    rows: Sequence[Mapping[str, Any]],
    documents: Mapping[tuple[str, str], Example],
    columns: int = 3,
    name: str = "answers",
) -> Drawn:
    """A model's answers under their pictures; wrong ones are marked, and boxes of an answer are dashed beside
    the expected ones.

    ``rows`` are rows of results, ``documents`` examples by (task, key).
    """
    chosen = [row for row in rows if (row["task"], row["key"]) in documents]
    notes, titles, boxes = [], [], []
    for row in chosen:
        question = (row.get("question") or row["task"]).replace(REGION, "[region]")
        # each is cut by itself: a long question must not push the answer off
        parts = ("answer", "target", "shuffled_answer")
        said, expected, other = (_cut(str(row.get(part, "")), 80) for part in parts)
        boxes.append([box for box in boxes_in(row["answer"], grid()) if not box.is_point])
        wrong = "WRONG: " if row["right"] is False else ""
        lines = [_cut(question, 120), f"{wrong}{said} (expected {expected})"]
        lines += [f"with another picture: {other}"] * ("shuffled_answer" in row)
        lines += ["dashed: the answer's box"] * bool(boxes[-1])
        notes.append("\n".join(lines))
        titles.append(f"{row['task']}: {row['key']}")
    examples = [documents[row["task"], row["key"]] for row in chosen]
    return pictures(examples, columns, name, notes, titles, boxes)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
