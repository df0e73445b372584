"""Multiple choice as the benchmarks ship it, to a question with lettered options and the letter of the
right one.

Forms: ``choices`` with a number as ``answer`` and a ``hint`` (ScienceQA), ``options`` with "2" (AI2D,
counted from 0), ``options`` as a Python list in text with "B" (MMMU), columns ``A`` to ``D`` with a
``hint`` (MMBench) or ``choice_a`` to ``choice_d`` (SEED-Bench), ``correct_choice_idx`` (A-OKVQA),
``choices`` as {text, label} with ``answerKey`` (ARC). The strings are those with which Cambrian-1 asks them
(its eval/eval/*/*_eval.py), so a model is trained on the prompts it is scored with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmkit.data.record import Record, holds_nothing, parsed, shown

LETTER = "Answer with the option's letter from the given choices directly."
LETTER_ONLY = "Please answer directly with only the letter of the correct option and nothing else."
LETTER_IN_CHINESE = "请直接回答选项字母。"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
OPTIONS = ("choices", "options", "candidates", "answer_choices")
WRONG_ONES = (
    "multiple_choices",
    "distractors",
    "incorrect_answers",
)  # without the right one and its place among them
RIGHT = (
    "answer", "correct_choice_idx", "answer_idx", "answer_index", "answer_label", "Answer_label",
    "answerKey", "answer_key", "correct_answer", "correct_option", "gt_answer", "cop", "Answer",
)  # fmt: skip
_COLUMN = re.compile(r"(?:(option|choice|op)[ _-]?)?([A-Z]|\d)", re.IGNORECASE)
_LETTERED = re.compile(r"\(?([A-Za-z])[).:]\s*(.*)", re.DOTALL)
_REASON = "choices"


def choice_question(record: Record, question: str) -> tuple[str, str] | None:
    """(the question with its lettered options, the right one's letter); None where the record has no
    options.

    BadRecord where it has some that cannot be read, or an answer that names none of them, or two different
    ones.
    """
    fields = record.fields
    if left := next((name for name in WRONG_ONES if not holds_nothing(fields.get(name))), None):
        raise record.bad(
            f"has {left} that are not read: the right one has no place among them; give choices and answer",
            _REASON,
        )
    name = next((name for name in OPTIONS if not holds_nothing(fields.get(name))), "")
    columns = {} if name else _columns(fields)
    if not name and not columns:
        return None
    record.read.update(columns.values())
    in_columns = {
        title: None if holds_nothing(fields[column]) else fields[column] for title, column in columns.items()
    }
    written = record.take(name) if name else in_columns
    in_text = isinstance(written, str)
    written = parsed(written) if in_text else written
    if isinstance(written, list) and not written:  # MMMU's open questions
        return None
    options, names, are_numbers = _options(record, written, name or "choices")
    right = set()
    for key in RIGHT:
        if not holds_nothing(fields.get(key)):
            right.add(_place(record, record.take(key), options, names, are_numbers))
    if len(right) != 1:
        told = (
            "no answer"
            if not right
            else f"answers that name different ones, {', '.join(LETTERS[k] for k in sorted(right))}"
        )
        raise record.bad(f"has {len(options)} choices, but {told}", _REASON)
    hint, science = record.take("hint"), name == "choices" and "hint" in fields
    asked = (
        question if hint is None else f"{record.text(hint, 'hint')}{' ' if science else chr(10)}{question}"
    )
    asked += " Options:" if columns or (in_text and name == "options") else ""
    chinese = bool(columns) and any("\u4e00" <= letter <= "\u9fff" for letter in question)
    suffix = LETTER_IN_CHINESE if chinese else LETTER_ONLY if science else LETTER
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([asked, *lines, suffix]), LETTERS[right.pop()]


def _columns(fields: Mapping[str, Any]) -> dict[str, str]:
    """Letter or number -> column, of options that stand in columns of their own; {} where there are none."""
    found: dict[tuple, dict[str, str]] = {}
    for name in fields:
        match = _COLUMN.fullmatch(str(name))
        if match and (match[1] or match[2].isupper()):
            found.setdefault(((match[1] or "").lower(), match[2].isdigit()), {})[match[2].upper()] = name
    for (_, numbered), columns in found.items():
        first = min(columns)
        row = "0123456789"[int(first) :] if numbered else LETTERS
        titles = sorted(columns)
        if len(titles) < 2 or "".join(titles) != row[: len(titles)] or first > "1" and numbered:
            continue
        while titles and holds_nothing(
            fields[columns[titles[-1]]]
        ):  # MMBench has two or three options in some rows
            titles.pop()
        if titles:
            return {title: columns[title] for title in titles}
    return {}


def _options(record: Record, written: Any, name: str) -> tuple[list[str], list[str], bool]:
    """(texts, names of their own, whether they are numbers) of the options; no names where they are called
    by letters.
    """
    titles: Any = ()
    if isinstance(written, Mapping) and set(written) >= {"text", "label"}:  # ARC, CommonsenseQA
        written, titles = written["text"], written["label"]
    elif isinstance(written, Mapping):
        titles, written = list(written), list(written.values())
    if isinstance(written, np.ndarray):
        written = written.tolist()
    if not isinstance(written, list | tuple) or not 2 <= len(written) <= len(LETTERS):
        raise record.bad(
            f"has {name} that are not read: {shown(written)}; give a list of 2 to {len(LETTERS)} texts",
            _REASON,
        )
    if any(option is None or (isinstance(option, str) and not option.strip()) for option in written):
        raise record.bad(f"has {name} that are not read: {shown(written)} has an empty one", _REASON)
    texts = [record.text(option, f"choice {number}") for number, option in enumerate(written, 1)]
    lettered = [_LETTERED.fullmatch(text.strip()) for text in texts]
    if all(match and match[1].upper() == LETTERS[k] and match[2] for k, match in enumerate(lettered)):
        texts = [match[2] for match in lettered if match]
    titles = [str(title).strip() for title in titles] if isinstance(titles, list | tuple) else []
    by_letters = titles == list(LETTERS[: len(texts)])
    return (
        texts,
        [] if by_letters or len(titles) != len(texts) else titles,
        not any(isinstance(one, str) for one in written),
    )


def _place(
    record: Record, answer: Any, options: Sequence[str], names: Sequence[str], are_numbers: bool
) -> int:
    """Which option an answer means: by its name or letter, its number from 0, or its words. BadRecord for
    none or several.
    """
    if isinstance(answer, list | tuple | np.ndarray) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | np.number):
        raise record.bad(f"has an answer that names no single choice: {shown(answer)}", _REASON)
    text = str(answer).strip()
    lettered, number = _LETTERED.fullmatch(text), re.fullmatch(r"(\d{1,9})(\.0)?", text)
    letter = (lettered[1] if lettered else text.strip("()")).upper()
    words = {k for k, option in enumerate(options) if _same(text, option)}
    named: set[int] = set()
    if names:  # a record's own names stand in place of letters and numbers
        named = {
            k for k, name in enumerate(names) if name in (text, letter) or (number and name == number[1])
        }
    elif number:
        named = {int(number[1])} & set(range(len(options)))
        # "2" may be the third option or the one that reads 2; a number is the text of numbers alone
        words = words if isinstance(answer, str) or are_numbers or not named else set()
    elif len(letter) == 1 and letter in LETTERS[: len(options)]:
        place = LETTERS.index(letter)
        named = set() if lettered and lettered[2] and not _same(lettered[2], options[place]) else {place}
    if len(named | words) == 1:
        return (named | words).pop()
    if named | words:
        raise record.bad(
            f"has an answer, {shown(answer)}, that fits several of its choices; give the letter",
            _REASON,
        )
    counted = f"; numbers count from 0 to {len(options) - 1}" if number else ""
    raise record.bad(
        f"has {len(options)} choices, of which its answer {shown(answer)} names none{counted}", _REASON
    )


def _same(one: str, other: str) -> bool:
    return one.strip().casefold().rstrip(".") == other.strip().casefold().rstrip(".")
