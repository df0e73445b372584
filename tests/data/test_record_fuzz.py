"""Mutated records and boxes: a right example, a counted bad record or a note of what is not read; nothing else, and nothing lost."""

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmkit.data.boxes import Box, Frame, pixels
from mmkit.data.conversation import Formatter
from mmkit.data.example import BadRecord, Region, checked
from mmkit.data.readers import GritSource
from mmkit.data.record import METADATA
from mmkit.data.regions import region_mask
from tests.data.test_conversation import byte_bpe

PAGE = (Path(__file__).parents[2] / "docs/data-formats.md").read_text(encoding="utf8")
FORMS = [json.loads(record) for record in re.findall(r"```json\n(.*?)\n```", PAGE, re.DOTALL)]
FUZZ = settings(derandomize=True, deadline=None, database=None, max_examples=400)
FORMATTER = Formatter(byte_bpe(False), "short", region_token="<region_fea>")

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8), st.just([]), st.just({}), st.just([[]]),
    st.sampled_from(["<image>", "<bbox>", "<region>", "<bbox_location7>", "<img></img>", "[1,", "nan", "\ud800", "{'a': 1}", "A", "-1", "9" * 40]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        sorted(
            {name for form in FORMS for name in form}
            | {"from", "value", "role", "content", "video", "loss", "type", "text", "A", "B"}
        )
    ),
)


def places(value, path=()):
    """Every (path, value) inside a record, itself included."""
    yield path, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield from places(one, (*path, name))


@st.composite
def mutated(draw):
    """A record of a published form with one to three places renamed, replaced, nested, doubled or taken out."""
    record = copy.deepcopy(draw(st.sampled_from(FORMS)))
    for _ in range(draw(st.integers(1, 3))):
        path, value = draw(st.sampled_from([place for place in places(record) if place[0]] or [((), None)]))
        if not path:
            break
        holder = record
        for name in path[:-1]:
            holder = holder[name]
        how, last = draw(st.sampled_from(["value", "type", "nest", "take", "rename", "add", "cut"])), path[-1]
        if how == "value":
            holder[last] = copy.deepcopy(draw(VALUES))
        elif how == "type":
            holder[last] = draw(
                st.sampled_from([str(value), json.dumps(value), [value], {"text": value}, len(str(value))])
            )
        elif how == "nest":
            holder[last] = [value, copy.deepcopy(value)]
        elif how == "take":
            del holder[last]
        elif how == "rename" and isinstance(holder, dict):
            holder[draw(NAMES)] = holder.pop(last)
        elif how == "add" and isinstance(holder, dict):
            holder[draw(NAMES)] = copy.deepcopy(draw(VALUES))
        elif how == "cut" and isinstance(value, str | list):
            holder[last] = value[: len(value) // 2]
    return record


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("pictures")
    Image.new("RGB", (64, 48)).save(where / "0.jpg")
    return str(where)


def read(record, folder, rng=None):
    """The example as training reads it, tokenised; None for a bad record, which says where and why."""
    try:
        example = checked(GritSource("s", [record], folder).draw(0, rng))
        FORMATTER.encode(example)
        return example
    except BadRecord as error:
        assert error.source and error.key and error.reason and len(str(error)) < 1500
        # what no line of the reader foresaw is caught around it: nothing of these forms may get so far
        assert error.reason != "unreadable record", error.message
        return None


@FUZZ
@given(record=mutated(), seed=st.integers(0, 3))
def test_a_mutated_record_is_an_example_or_a_bad_record(folder, record, seed):
    for rng in (None, np.random.default_rng(seed)):
        read(record, folder, rng)


MARKED = re.compile(r"mark\d+mark")


@st.composite
def marked(draw):
    """A record of a published form with a word of its own in each text of it, and some keys renamed or added."""
    record = copy.deepcopy(draw(st.sampled_from(FORMS)))
    for number, (path, value) in enumerate(list(places(record))):
        holder = record
        for name in path[:-1]:
            holder = holder[name]
        free = path and isinstance(value, str) and path[-1] in ("value", "content", "text", "question", "answer", "caption", "hint", "lecture", "system",
                                                                  "instruction", "input", "output", "query", "response", "A", "B")  # fmt: skip
        if free and not (path[-1] == "answer" and len(record) > 4):
            holder[path[-1]] = f"{value} mark{number}mark"
    for number in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from([path for path, value in places(record) if isinstance(value, dict)]))
        holder = record
        for name in path:
            holder = holder[name]
        if draw(st.booleans()) and holder:
            holder[draw(NAMES)] = holder.pop(draw(st.sampled_from(sorted(holder))))
        else:
            holder[draw(NAMES)] = f"mark{9000 + number}mark"
    return record


@FUZZ
@given(record=marked())
def test_no_word_of_a_record_is_lost_without_a_note(folder, record):
    example = read(record, folder)
    if example is None:
        return
    kept = " ".join([*(turn.text for turn in example.turns), *(ref.identity for ref in example.images)])
    noted = " ".join(example.notes)
    for path, value in places(record):
        lost = isinstance(value, str) and [word for word in MARKED.findall(value) if word not in kept]
        names = [str(name) for name in path]
        filed = [
            name
            for name in names
            if name.lower().replace("-", "_") in METADATA or name.lower().endswith("id")
        ]
        told = (
            [name for name in names if repr(name)[1:-1] in noted]
            or "accepted answers" in noted
            or "begin with an answer" in noted
        )
        assert not lost or filed or told, (lost, path, example)


NUMBER = st.one_of(st.integers(-2000, 2000), st.floats(-2000, 2000, width=32), st.floats())


@FUZZ
@given(
    corners=st.lists(NUMBER, min_size=4, max_size=4),
    width=st.integers(1, 500),
    height=st.integers(1, 500),
    share=st.booleans(),
)
def test_a_box_has_a_fault_or_pixels_of_its_picture(corners, width, height, share):
    if not np.isfinite(corners).all():
        return
    box = Box(*corners, Frame("shares", 1, 1) if share else pixels(width, height))
    if fault := box.fault(point=False):
        assert "is inverted" in fault or "is empty" in fault or "lies outside" in fault
        return
    mask = region_mask(Region("box", box), width, height)
    assert mask.shape == (height, width) and mask.any()
    assert all(0 <= int(number) < 1000 for number in re.findall(r"-?\d+", Region("box", box).text))


@FUZZ
@given(
    entry=st.one_of(st.lists(NUMBER, max_size=5), VALUES), form=st.sampled_from(["grit", "swift", "written"])
)
def test_any_entry_in_place_of_a_box_is_a_region_or_a_bad_record(folder, entry, form):
    record = {
        "image": "0.jpg",
        "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "That."}],
    }
    place = {"grit": "<bbox_location0>", "swift": "<bbox>", "written": f"<box>{entry}</box>"}[form]
    record["conversations"][1]["value"] += place
    record |= {
        "grit": {"box_x1y1x2y2": [[], [entry]]},
        "swift": {"objects": {"bbox": [entry]}},
        "written": {},
    }[form]
    example = read(record, folder, np.random.default_rng(0))
    if example is not None and form != "written":
        assert len(example.regions) >= 1
        for region in example.regions:
            assert region_mask(region, 64, 48).any()
