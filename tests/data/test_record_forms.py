"""Each published form of a record gives its conversation; whatever of a record is not used is counted or refused."""

import base64
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from mmkit.config import ConfigError, DataConfig, SourceConfig
from mmkit.data.check import check_file, record_notes
from mmkit.data.conversation import Formatter
from mmkit.data.example import REGION, BadRecord, checked
from mmkit.data.images import open_image
from mmkit.data.readers import RecordSource, open_source, records_of
from tests.data.test_conversation import byte_bpe
from tests.data.test_loader import vlm

PAGE = (Path(__file__).parents[2] / "docs/data-formats.md").read_text(encoding="utf8")
SHOWN = re.findall(r"```json\n(.*?)\n```\n```text\n(.*?)\n```", PAGE, re.DOTALL)
CHAT = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A kite."}]


@pytest.fixture
def pictures(tmp_path):
    for number in range(2):
        Image.new("RGB", (64, 48), ("red", "blue")[number]).save(tmp_path / f"{number}.jpg")
    return str(tmp_path)


def one(record, folder=None):
    """The example of a record, its markers counted."""
    return checked(RecordSource("s", [record], folder)[0])


def told(example):
    """An example as docs/data-formats.md shows it."""
    regions, lines = iter(example.regions), []
    for turn in example.turns:
        text = re.sub(REGION, lambda _: next(regions).text, turn.text)
        lines.append(f"{turn.role}{'' if turn.trained else ' (not learned)'}: {text}")
    return "\n".join([*lines, *(f"note: {note}" for note in example.notes)])


@pytest.mark.parametrize(("record", "shown"), SHOWN, ids=[str(k) for k in range(len(SHOWN))])
def test_the_page_of_formats_shows_what_each_record_becomes(pictures, record, shown):
    example = one(json.loads(record), pictures)
    assert told(example) == shown and all(open_image(ref).size == (64, 48) for ref in example.images)


def test_all_records_of_the_page_train_and_their_notes_are_told(pictures, tmp_path):
    lines = [json.dumps(json.loads(record)) for record, _ in SHOWN]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    formatter = Formatter(byte_bpe(False), "short")
    report = check_file(
        str(tmp_path / "all.jsonl"),
        pictures,
        data=DataConfig(max_length=2048),
        model=vlm(),
        formatter=formatter,
    )
    assert len(SHOWN) >= 14 and not report.faults and not report.would_fail and report.tokenised == len(SHOWN)
    assert report.notes["records have key 'lecture' that is not read"] == 1
    assert "note: 1 records have key 'lecture' that is not read" in report.summary()


def test_notes_are_counted_over_the_file_or_an_even_part_of_it(tmp_path):
    records = [{"caption": "x", "image": "a.jpg"} | ({"lecture": "y"} if k % 2 else {}) for k in range(40)]
    source = RecordSource("s", [*records, {"bad": 1}], None)
    assert record_notes(source, 100) == ["s: 20 records have key 'lecture' that is not read"]
    assert re.fullmatch(
        r"s: \d+ records have key 'lecture' that is not read \(of 10 looked at, of 41 in all\)",
        *record_notes(source, 10),
    )


@pytest.mark.parametrize(
    ("record", "note"),
    [
        (
            {"conversations": CHAT, "image": "0.jpg", "rejected": "x"},
            "records have key 'rejected' that is not read",
        ),
        (
            {"conversations": CHAT, "image": "0.jpg", "objective": 3},
            "records have key 'objective' that is not read",
        ),
        (
            {"conversations": [CHAT[0], CHAT[1] | {"reasoning_content": "x"}], "image": "0.jpg"},
            "'conversations[].reasoning_content'",
        ),
        ({"messages": CHAT, "image": "0.jpg", "conversations": []}, ""),
        (
            {
                "conversations": CHAT,
                "image": "0.jpg",
                "tools": "[]",
                "videos": [],
                "system": "",
                "history": [],
            },
            "",
        ),
        (
            {
                "conversations": CHAT,
                "image": "0.jpg",
                "image_id": 4,
                "L2-category": "x",
                "coco_url": "http://x",
                "imageId": "4",
            },
            "",
        ),
        (
            {"conversations": [CHAT[1], *CHAT], "image": "0.jpg"},
            "records begin with an answer, which is left out",
        ),
        (
            {"caption": ["a", "b"], "image": "0.jpg"},
            "records have several captions, of which the first is learned",
        ),
        (
            {"conversations": [CHAT[0] | {"weight": 1}, CHAT[1]], "image": "0.jpg"},
            "a user's message that is marked to be learned",
        ),
        ({"question": "q", "answers": [{"answer": "b", "answer_id": 1}]}, ""),
        (
            {"question": "q", "choices": ["x", "y"], "correct_choice_idx": 1, "rationales": ["r"]},
            "key 'rationales'",
        ),
    ],
)
def test_what_is_not_read_is_noted_and_metadata_is_not(record, note):
    notes = one(record).notes
    assert (notes == ()) if not note else (len(notes) == 1 and note in notes[0])


@pytest.mark.parametrize(
    ("record", "reason", "message"),
    [
        ({"video": "0.mp4", "conversations": CHAT}, "video", "has video, which no model here reads"),
        ({"videos": ["0.mp4"], "question": "q", "answer": "a"}, "video", "has videos, which"),
        ({"audios": ["0.wav"], "conversations": CHAT}, "audio", "has audios, which"),
        ({"tools": "[{}]", "conversations": CHAT}, "tools", "has tools, which"),
        (
            {"conversations": [{"from": "human", "value": "<video>\nWhat?"}, CHAT[1]]},
            "placeholder",
            "placeholder <video> of another tool",
        ),
        (
            {"conversations": [{"from": "human", "value": "<|image_pad|>What?"}, CHAT[1]]},
            "placeholder",
            "placeholder <.image_pad.>",
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "at <loc_12>"}]},
            "placeholder",
            "<loc_12>",
        ),
        ({"conversations": [{"from": "human", "value": "<image 1> q"}, CHAT[1]]}, "placeholder", "<image 1>"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]},
            "message part",
            "a part of type 'video_url'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
            "message part",
            "of type 'refusal'",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]},
            "turns",
            "has tool_calls of its own",
        ),
        ({"messages": [CHAT[0], CHAT[1] | {"weight": 0.5}]}, "turns", "has weight 0.5; it is true or 1"),
        (
            {"conversations": [CHAT[0], {"from": "gpt", "text": "x"}]},
            "empty answer",
            "the message has from, text; its text stands in",
        ),
        (
            {"conversations": [CHAT[0], {"from": "gpt", "value": None}]},
            "empty answer",
            r"has from, value \(null\)",
        ),
        (
            {"conversations": [CHAT[0], {"from": "gpt", "value": " \n"}]},
            "empty answer",
            "there is nothing to learn from it",
        ),
        (
            {"conversations": [{"from": "human", "text": "x"}, CHAT[1]]},
            "turns",
            "has an empty message: the message has from, text",
        ),
        (
            {"system": "a", "conversations": [{"from": "system", "value": "b"}, *CHAT]},
            "turns",
            "a system text of its own and another",
        ),
        (
            {"history": ["a", "b"], "query": "q", "response": "r"},
            "turns",
            r"its history is .* not a list of \[question, answer\]",
        ),
        ({"history": [["a", ""]], "query": "q", "response": "r"}, "empty answer", "has an empty answer"),
        ({"instruction": "i", "output": ""}, "empty answer", "has an empty answer"),
        ({"image": "0.jpg", "caption": ""}, "missing caption", "has an empty caption"),
        (
            {"questions": ["a", "b"], "answers": ["c", "d"]},
            "no text",
            "its question is null, not text: it has answers, id, questions",
        ),
        (
            {f"key {k:04}": k for k in range(3000)},
            "no text",
            r"it has id, key 0000, .*, key 0010, ... 3,001 in all; it needs",
        ),
    ],
)
def test_what_no_model_here_can_learn_is_a_bad_record(record, reason, message):
    with pytest.raises(BadRecord, match=message) as caught:
        one({"id": "b", **record})
    assert caught.value.reason == reason and len(str(caught.value)) < 500


def test_texts_about_tags_are_no_placeholders():
    text = "Write <video> in pairs: <video>...</video>, <bbox>1</bbox>."
    assert (
        one({"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "A <video> tag."}]})
        .turns[0]
        .text
        == text
    )
    assert (
        one({"conversations": [{"from": "human", "value": "<ref>x</ref>"}, CHAT[1]]}).turns[0].text
        == "<ref>x</ref>"
    )


# ---------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("record", "letter"),
    [
        ({"choices": ["3", "4"], "answer": 1}, "B"),
        ({"choices": ["3", "4"], "answer": "4"}, "B"),
        ({"choices": [3, 4, 5], "answer": 5}, "C"),
        ({"choices": "['x', 'y']", "answer": "0", "hint": "nan"}, "A"),  # as a CSV table has them
        ({"choices": '["x", "y"]', "answer": "(B)"}, "B"),
        ({"options": ["A. x", "B. y", "C. z"], "answer": "C. z"}, "C"),
        ({"options": {"A": "x", "B": "y"}, "answer": "y", "answer_idx": "B"}, "B"),
        ({"options": {"B": "x", "D": "y"}, "answer": "D"}, "B"),
        ({"choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}, "B"),
        ({"choice_a": "x", "choice_b": "y", "choice_c": "z", "choice_d": "w", "answer": "D"}, "D"),
        ({"option_1": "x", "option_2": "y", "option_3": "z", "answer": "2"}, "B"),
        ({"A": "x", "B": "None", "C": None, "answer": "None"}, "B"),
        ({"choices": ["C. elegans", "A. thaliana"], "answer": "c. elegans"}, "A"),
        ({"candidates": ["x", "y"], "answer": ["B"]}, "B"),
    ],
)
def test_the_right_choice_may_be_a_letter_a_number_or_its_text(record, letter):
    example = one({"question": "Which?"} | record)
    assert example.turns[1].text == letter and example.notes == () and "\nA. " in example.turns[0].text
    assert "A. A." not in example.turns[0].text and "None of" not in example.turns[0].text


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"choices": ["1", "2", "3"], "answer": "2"}, "an answer, '2', that fits several of its choices"),
        ({"choices": ["x", "x"], "answer": "x"}, "that fits several"),
        (
            {"choices": ["x", "y"], "answer": 2},
            "has 2 choices, of which its answer 2 names none; numbers count from 0 to 1",
        ),
        ({"choices": ["x", "y"], "answer": "C"}, "its answer 'C' names none"),
        ({"choices": ["x", "y"], "answer": None}, "has 2 choices, but no answer"),
        ({"choices": ["x", "y"], "answer": "x", "answer_idx": 1}, "answers that name different ones, A, B"),
        ({"choices": ["x", "y"], "answer": ["A", "B"]}, "an answer that names no single choice"),
        ({"choices": ["x", "y"], "answer": True}, "an answer that names no single choice: True"),
        (
            {"choices": ["x"], "answer": 0},
            "has choices that are not read: .'x'.; give a list of 2 to 26 texts",
        ),
        ({"choices": "x or y", "answer": 0}, "has choices that are not read: 'x or y'"),
        ({"choices": ["x", None], "answer": 0}, "has choices that are not read: .* has an empty one"),
        ({"options": {"min": 3}, "answer": "x"}, "has options that are not read"),
        ({"multiple_choices": ["x", "y"], "answer": "z"}, "has multiple_choices that are not read"),
        (
            {"A": "x", "B": "nan", "C": "y", "answer": "A"},
            "has choices that are not read: .* has an empty one",
        ),
    ],
)
def test_choices_that_cannot_be_read_are_a_bad_record(record, message):
    with pytest.raises(BadRecord, match=message) as caught:
        one({"question": "Which?"} | record)
    assert caught.value.reason == "choices"


def test_of_several_answers_the_most_frequent_is_learned():
    assert one({"question": "q", "answers": ["a", "b", "b"]}).turns[1].text == "b"
    assert one({"question": "q", "answers": "['none', 'one', 'none']"}).turns[1].text == "none"
    several = [{"answer": "no"}, {"answer": "yes"}]
    assert one({"question": "q", "answers": several, "multiple_choice_answer": "yes"}).turns[1].text == "yes"
    assert one({"query": "q", "label": ["14"]}).turns[1].text == "14"


# ---------------------------------------------------------------- pictures


def test_base64_is_read_with_and_without_a_data_url():
    out = io.BytesIO()
    Image.new("RGB", (8, 6), "red").save(out, "jpeg")
    text = base64.b64encode(out.getvalue()).decode()
    wrapped = "\n".join(text[k : k + 76] for k in range(0, len(text), 76))
    urlsafe = base64.urlsafe_b64encode(out.getvalue()).decode().rstrip("=")
    for value in (text, wrapped, urlsafe, f"data:image/jpeg;base64,{text}", {"bytes": text}, [text]):
        assert open_image(one({"image": value, "caption": "x"}).images[0]).size == (8, 6)
    part = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": text}}
    chat = {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "x"}]}
    assert one(chat).images == one({"image": text, "caption": "x"}).images
    assert (
        one({"image": "/9j/pictures/of/the/second/day/number/0001.jpg", "caption": "x"})
        .images[0]
        .data.endswith("0001.jpg")
    )


@pytest.mark.parametrize(
    "image",
    [
        "/9j/" + "A" * 5000,
        "/9j/" + "A" * 97,
        "data:image/png;base64,!!!",
        "data:image/svg+xml,<svg/>",
        "x" * 9000,
        "%x " * 9000,
    ],
)
def test_a_text_that_is_no_picture_is_shown_by_its_first_40_characters(image):
    with pytest.raises(BadRecord, match="its image is .*(; give|; encode|no path)") as caught:
        one({"image": image, "caption": "x"})
    assert len(str(caught.value)) < 300 and caught.value.reason == "image"


def test_parts_take_pictures_of_their_own_or_of_the_record():
    def content(*parts):
        turns = [
            {"role": "user", "content": [*parts, {"type": "text", "text": "q"}]},
            {"role": "assistant", "content": "a"},
        ]
        return {"messages": turns, "images": ["a.jpg", "b.jpg"]}

    assert [
        ref.data for ref in one(content({"type": "image", "index": 1}, {"type": "image", "index": 0})).images
    ] == ["b.jpg", "a.jpg"]
    assert [ref.data for ref in one(content({"type": "image"}, {"type": "image", "text": None})).images] == [
        "a.jpg",
        "b.jpg",
    ]
    mixed = content(
        {"type": "image"},
        {"type": "input_image", "image_url": "c.jpg"},
        {"image": "d.jpg"},
        {"type": "image"},
    )
    assert [ref.data for ref in one(mixed).images] == ["a.jpg", "c.jpg", "d.jpg", "b.jpg"]
    with pytest.raises(BadRecord, match="2 images but 1 image placeholders"):
        one(content({"type": "image"}))
    with pytest.raises(BadRecord, match="shows picture 4 of 2"):
        one(content({"type": "image", "index": 3}))


# ---------------------------------------------------------------- boxes


def swift(answer="<bbox>", **objects):
    turns = [{"role": "user", "content": "<image>Where?"}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": ["0.jpg"], "objects": objects}


def test_boxes_of_ms_swift_in_each_frame_and_of_older_versions(pictures):
    for frame in ({"bbox": [[16, 12, 32, 24]]}, {"bbox": [[0.25, 0.25, 0.5, 0.5]], "bbox_type": "norm1"}):
        assert told(one(swift(**frame, image_id=[0]), pictures)).endswith("assistant: [250, 250, 500, 500]")
    assert told(one(swift("click('<bbox>')", bbox=[[16, 12]]), pictures)).endswith("click('[250, 250]')")
    row = [
        {"caption": "a", "bbox": [[250, 250, 500, 500], [0, 0, 9, 9]], "bbox_type": "norm_1000", "image": 0}
    ]
    old = swift("<ref-object><bbox>") | {"objects": json.dumps(row)}
    assert told(one(old, pictures)).endswith("assistant: a [250, 250, 500, 500] [0, 0, 9, 9]")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (swift(bbox=[[40, 30, 20, 15]]), "is inverted"),
        (swift(bbox=[[9, 9, 9, 15]]), r"a box \[9, 9, 9, 15\] is empty"),
        (swift(bbox=[[70, 9, 90, 15]]), "lies outside its picture of 64x48 pixels"),
        (swift(bbox=[[70, 9]]), r"a box \[70, 9\] lies outside"),
        (swift(bbox=[[1, 2, 3]]), "give four numbers, .* or two for a point"),
        (swift(bbox=[[1, 2, 3, 4]] * 2), "its objects have 2 boxes, but the text has 1 <bbox>"),
        (
            swift(ref=["x"], bbox=[[1, 2, 3, 4]]),
            "its objects have 1 reference, but the text has 0 <ref-object>",
        ),
        (swift(bbox=[]), "has 0 boxes for <bbox> number 1"),
        (swift("<ref-object>", bbox=[]), "has 0 references for <ref-object> number 1"),
        (swift(bbox=[[1, 2, 3, 4]], image_id=[1]), "has a box on picture 2 of 1"),
        (swift(bbox=[[1, 2, 3, 4]], bbox_type="feet"), "bbox_type 'feet'; it is one of real, norm1"),
        (swift(bbox=[[1, 2, 3, 4]], image_id=["a"]), "its objects have image_id .'a'. for 1 boxes"),
        (swift("<box>(1,2),(2000,3)</box>"), "a box outside 0 to 1000"),
        (swift("<box>(9,2),(3,3)</box>"), "is inverted"),
        (swift("<box>(9,2),(3)</box>"), "has a box of 3 numbers"),
        (swift("<|box_start|>none<|box_end|>"), "placeholder <.box_start.>"),
        (swift("<bbox_location0>"), "mentions box 0 of a message with 0"),
    ],
)
def test_a_box_that_is_no_part_of_its_picture_is_a_bad_record_wherever_it_stands(pictures, record, message):
    with pytest.raises(BadRecord, match=message):
        one(record, pictures)
    asked = [
        {"role": "user", "content": record["messages"][1]["content"] + "<image>?"},
        {"role": "assistant", "content": "here"},
    ]
    with pytest.raises(BadRecord, match=message):
        one(record | {"messages": asked}, pictures)


def test_grit_is_read_in_any_format_and_its_answers_boxes_are_checked(pictures, tmp_path):
    grit = {"image": "0.jpg", "box_x1y1x2y2": [[], [[16, 12, 32, 24]]]}
    grit |= {"conversations": [CHAT[0], {"from": "gpt", "value": "There: <bbox_location0>"}]}
    assert told(one(grit, pictures)).endswith("There: [250, 250, 500, 500]")
    with_system = grit | {"system": "s", "history": None}
    assert told(one(with_system, pictures)).endswith("There: [250, 250, 500, 500]")
    for change, reason in (
        ({"image_w": 48, "image_h": 64}, "picture size"),  # it was turned
        ({"box_x1y1x2y2": [[], [[-9, -9, 0, 0]]]}, "box"),
    ):
        (tmp_path / "grit.json").write_text(json.dumps([grit | change]))
        for format in ("llava", "grit"):
            report = check_file(str(tmp_path / "grit.json"), pictures, format)
            assert report.faults == {reason: 1} and report.would_fail


def test_boxes_of_a_picture_that_was_scaled_keep_their_place(pictures, tmp_path):
    record = {"image": "0.jpg", "image_w": 637, "image_h": 481, "box_x1y1x2y2": [[], [[160, 120, 318, 241]]]}
    record |= {"conversations": [CHAT[0], {"from": "gpt", "value": "There: <bbox_location0>"}]}
    assert told(one(record, pictures)).endswith("There: [251, 249, 499, 501]")
    (tmp_path / "grit.json").write_text(json.dumps([record]))
    report = check_file(str(tmp_path / "grit.json"), pictures, "grit")
    assert not report.faults and not report.would_fail


# ---------------------------------------------------------------- files that hold no records


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {f"{k:05}": {"question": "q", "answer": "a", "imageId": "1"} for k in range(3000)},
            "keys '00000', .*, ... 3,000 in all.*GQA form",
        ),
        ({"questions": [{"question": "q"}], "task_type": "x"}, "VQA form; make one line a question"),
        ({"images": [{"id": 1}], "annotations": [{"image_id": 1}]}, "COCO form; make one line a picture"),
        ({"data": [{"question": "q"}] * 3, "version": 1}, "the 3 objects of 'data' may be records"),
        ({"1": {"lecture": "x"}, "2": {}}, "make one line of each object"),
        ({"id": 1}, "write one record a line"),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_one_json_object_is_no_file_of_records(tmp_path, content, message, indent):
    (tmp_path / "x.json").write_text(json.dumps(content, indent=indent))
    with pytest.raises(ConfigError, match=f"x.json holds one JSON object .*{message}") as caught:
        records_of(tmp_path / "x.json")
    assert len(str(caught.value)) < 400


def test_a_single_record_and_a_damaged_first_line_are_records(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"caption": "x"}))
    assert len(records_of(tmp_path / "x.jsonl")) == 1
    (tmp_path / "x.jsonl").write_text('{"caption": \n{"caption": "y"}\n')
    source = open_source(SourceConfig(name="s", format="llava", path=str(tmp_path / "x.jsonl")))
    assert len(source) == 2 and source[1].caption == "y"
