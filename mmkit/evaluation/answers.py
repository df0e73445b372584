"""How an answer is read out of generated text, by the originals' rules.

Facts: the extractors of Cambrian-1's evaluation suite (cambrian-mllm/cambrian @ 539ffc3, ``eval/eval``), the
M4C answer normaliser of VQA soft accuracy, and Ferret's parsing (apple/ml-ferret @ 3c9e5c9). All functions
are pure.
"""

from __future__ import annotations

import functools
import re

from mmkit.errors import InputError

_NUMBER_WORDS = {word: str(i) for i, word in enumerate("zero one two three four five six seven eight nine ten".split())} | {"none": "0"}
_ARTICLES = {"a", "an", "the"}
_PUNCTUATION = ";/[]\"{}()=+\\_-><@`,?!"
_FULL_FORMS = (  # the contraction table of VQA evaluation holds these with one apostrophe left out
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's how'd how'll "
    "how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock oughtn't 'ow's'at shan't "
    "she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's "
    "something'd something'd've something'll that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas "
    "wasn't we'd've we've weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've "
    "why'll why're why's won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've"
).split()
_CONTRACTIONS = {full[:i] + full[i + 1 :]: full for full in _FULL_FORMS for i, char in enumerate(full) if char == "'"}


def after_marker(text: str) -> str:
    """Lower-cased text behind the last "answer is" and, in what follows that, behind the last "answer:",
    stripped.

    As in the originals, "the answer is: b" leaves ": b", which their letter rule then reads as ":".
    """
    text = text.lower().rsplit("answer is", 1)[-1]
    return text.rsplit("answer:", 1)[-1].strip()


def first_letter(text: str, trailing: str = ".:,") -> str:
    """The option letter as Cambrian's multiple-choice scorers read it; some strip ``trailing`` "." only."""
    text = after_marker(text).rstrip(trailing).lstrip("(").rstrip(")")
    return text[:1]


def short_answer(text: str) -> str:
    """The whole answer behind a marker without its final period."""
    return after_marker(text).rstrip(".")


def first_word(text: str, trailing: str = ".:,") -> str:
    """The first word, lower-cased, without trailing punctuation; an empty text stays empty."""
    return (text.lower().split() or [""])[0].rstrip(trailing)


# ---------------------------------------------------------------- numbers


def as_number(text: str) -> float | None:
    """The number a text spells for ``float``, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def within(value: str, reference: str) -> bool:
    """Both are numbers and differ by at most 5% of the second. Binary fractions are compared as the originals
    do: 105 is within 5% of 100, 1.05 is not of 1.
    """
    got, want = as_number(value), as_number(reference)
    return got is not None and want is not None and abs(got - want) <= abs(want) * 0.05


def relaxed(answer: str, truth: str) -> bool:
    """ChartQA's relaxed accuracy (arXiv 2203.10244, section 5.1) as pix2struct's ``relaxed_correctness`` has
    it: within 5% of the truth where both are numbers, a percent sign divides by 100 ("5%" is "0.05"); else
    the same text but for case. A truth of 0 is compared as text."""
    answer, truth, numbers = answer.strip(), truth.strip(), []
    for text in (answer, truth):
        number = as_number(text.removesuffix("%"))
        numbers.append(number / 100 if number is not None and text.endswith("%") else number)
    got, want = numbers
    if got is None or not want:
        return answer.lower() == truth.lower()
    return abs(got - want) / abs(want) <= 0.05


# ---------------------------------------------------------------- VQA soft accuracy


def vqa_normalize(text: str) -> str:
    """The M4C normal form of a VQA answer: case, punctuation, number words, articles, contractions."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    text = text.replace("\n", " ").replace("\t", " ").strip()
    has_grouped_digits = re.search(r"(?<=\d),+(?=\d)", text) is not None
    out = text
    for mark in _PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        out = out.replace(mark, "" if beside_space or has_grouped_digits else " ")
    out = re.sub(r"\.(?!\d)", "", out)
    words = [_NUMBER_WORDS.get(word, word) for word in out.lower().split()]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def vqa_accuracy(answer: str, truths: list[str]) -> float:
    """Soft accuracy: mean over leave-one-out sets of min(1, matches / 3)."""
    answer, truths = vqa_normalize(answer), [vqa_normalize(truth) for truth in truths]
    matches = sum(truth == answer for truth in truths)
    scores = [min(1.0, (matches - (truth == answer)) / 3) for truth in truths]
    return sum(scores) / len(scores) if matches else 0.0


@functools.lru_cache(maxsize=4096)
def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance of two texts."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        above, row[0] = row[0], i
        for j, right in enumerate(b, start=1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (left != right))
    return row[-1]


# ---------------------------------------------------------------- boxes and phrases


def decode_boxes(text: str, width: int, height: int, grid: int = 1000) -> tuple[list[str], list[tuple[int, int, int, int]]]:
    """(entity before each box, box in pixels) of Ferret's answers "name [x1, y1, x2, y2]" on the 0-999 grid.

    A bracket that does not hold four whole numbers raises ValueError naming it.
    """
    entities, boxes, start = [], [], 0
    for match in re.finditer(r"\[([^\[\]]*)\]", text):
        parts = match.group(1).split(",")
        try:
            x1, y1, x2, y2 = (int(part) for part in parts)
        except ValueError:
            raise InputError(f"[{match.group(1)}] is not a box of four whole numbers") from None
        # the quotient first, as the original decodes: 750 on a side of 36 pixels is 26, not 27
        sides = zip((x1, y1, x2, y2), (width, height) * 2, strict=True)
        boxes.append(tuple(int(c * (side / grid)) for c, side in sides))
        entities.append(_entity_before(text[start : match.start()]))
        start = match.end()
    return entities, boxes


def _entity_before(text: str) -> str:
    """The noun phrase a box belongs to: what stands between the previous box or clause and this one."""
    text = re.sub(r"^[\s.,;:]*(?:and|or|with)\b", "", text.strip())
    return re.split(r"[.;:]", text)[-1].strip(" ,")


def phrases_equal(a: str, b: str) -> bool:
    """Equal after lower-casing, dropping the marks , . and folding spaces (Ferret's Flickr30k matching)."""
    return _plain(a) == _plain(b)


def _plain(phrase: str) -> str:
    return " ".join(re.sub(r"[,.;:!?]", "", phrase.lower()).split())


def without_negations(text: str) -> str:
    """Text without what stands between " not" or " no" and the next comma or period, both included (Ferret's
    LVIS scorer).

    As in the original, first every " not", then every " no", also where they begin a longer word; one that no
    comma or period follows stays. "a cup and no plate, really not." -> "a cup and really".
    """
    for word in ("not", "no"):
        text = re.sub(rf"\s+{word}[^,.]*[,.]", "", text)
    return text
