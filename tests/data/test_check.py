"""Each fault of a data file is found before training and named with an example (user reports U24, U25)."""

import json

import pytest
from PIL import Image

from mmkit.config import ConfigError
from mmkit.data.check import check_file, nearest_path, write_json
from mmkit.data.conversation import Formatter
from tests.data.test_conversation import byte_bpe

OK = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a kite"}]


def write(tmp_path, records, n_good=0):
    (tmp_path / "web-celebrity").mkdir(exist_ok=True)
    Image.new("RGB", (30, 20)).save(tmp_path / "web-celebrity" / "1.png")
    (tmp_path / "web-celebrity" / "broken.png").write_bytes(b"\x89PNG\r\n")
    good = [{"id": f"good{k}", "image": "web-celebrity/1.png", "conversations": [OK[0], {"from": "gpt", "value": f"answer {k}"}]} for k in range(n_good)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in [*records, *good]))
    return str(path)


@pytest.mark.parametrize(
    "record, fault, words",
    [
        ({"id": 1, "image": "web-Celebrity/1.png", "conversations": OK}, "missing image", "on disk: .*web-celebrity/1.png"),
        ({"id": 1, "image": "web-celebrity/l.png", "conversations": OK}, "missing image", "on disk: .*web-celebrity/1.png"),
        ({"id": 1, "image": "web-celebrity/broken.png", "conversations": OK}, "undecodable image", "broken.png"),
        ({"id": 1, "image": ["web-celebrity/1.png"] * 2, "conversations": OK}, "image count", "2 images but 1 image placeholders"),
        ({"id": 1, "conversations": [{"from": "human", "value": "a"}] * 2}, "turns", "turn 2 is from 'user'"),
        ({"id": 1, "conversations": [{"from": "human", "value": "a"}]}, "no supervised token", "answer that is not empty"),
        ({"id": 1, "image": "web-celebrity/1.png", "note": "x"}, "no text", "it needs conversations"),
        ('{"id": 1, ', "no JSON", "is no JSON"),
        ({"id": 1, "conversations": [{"from": "human", "value": "word " * 900}, OK[1]]}, "too long", "needs .* more than 600"),
    ],
)
def test_fault_is_counted_and_named(tmp_path, record, fault, words):
    path = write(tmp_path, [record], n_good=3)
    formatter = Formatter(byte_bpe(False), "short")
    report = check_file(path, str(tmp_path), formatter=formatter, slots=20, max_length=600)
    assert report.faults == {fault: 1} and report.bad == 1 and report.would_fail
    import re

    assert re.search(words, report.shown[fault][0])
    assert f"1 {fault}" in report.summary()


def test_good_file_is_ready_and_its_lengths_are_told(tmp_path):
    formatter = Formatter(byte_bpe(False), "short")
    report = check_file(write(tmp_path, [], n_good=8), str(tmp_path), formatter=formatter, slots=20, max_length=600)
    assert not report.would_fail and report.faults == {} and report.images == 1 and report.tokenised == report.decoded == 8
    assert 20 < report.lengths["least"] <= report.lengths["median"] <= report.lengths["most"] < 60 and 0 < report.supervised < 0.5
    write_json(report, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["would_fail"] is False


def test_notes_do_not_fail(tmp_path):
    good = {"id": "good0", "image": "web-celebrity/1.png", "conversations": [OK[0], {"from": "gpt", "value": "answer 0"}]}
    empty = {"id": "e", "image": "web-celebrity/1.png", "conversations": [OK[0], {"from": "gpt", "value": " "}]}
    report = check_file(write(tmp_path, [good, empty], n_good=2), str(tmp_path))
    assert report.notes == {"duplicate id": 1, "duplicate content": 1, "empty answer": 1} and not report.would_fail


def test_boxes_outside_the_picture_are_noted(tmp_path):
    turns = [{"from": "human", "value": "<image>\nwhat is <bbox_location0>?"}, {"from": "gpt", "value": "a kite"}]
    record = {"id": "g", "image": "web-celebrity/1.png", "conversations": turns, "box_x1y1x2y2": [[[5, 5, 90, 10]], []]}
    report = check_file(write(tmp_path, [record]), str(tmp_path), format="grit")
    assert report.notes == {"box outside": 1} and "90.0" in str(report.shown) or "90" in str(report.shown)


def test_allowed_share_decides(tmp_path):
    bad = {"id": 1, "image": "no.png", "conversations": OK}
    path = write(tmp_path, [bad], n_good=9)
    assert check_file(path, str(tmp_path), max_bad_share=0.05).would_fail
    assert not check_file(path, str(tmp_path), max_bad_share=0.1).would_fail


def test_nearest_path_gives_up_where_nothing_is_near(tmp_path):
    assert nearest_path(str(tmp_path / "nothing" / "zzz.png")) is None


@pytest.mark.parametrize(
    "change, reason, message",
    [
        ({"conversations": "hello"}, "turns", "its conversation is a str, not a list of messages"),
        ({"conversations": [1, 2]}, "turns", "a message is 1, not an object with from and value"),
        ({"conversations": ["no json"]}, "turns", "a message is 'no json', not an object"),
        ({"image": 5}, "image", "its image is the number 5; give a path"),
    ],
)
def test_records_of_wrong_types_are_faults_and_do_not_stop_the_check(tmp_path, change, reason, message):
    good = {"id": "g", "conversations": [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "a kite"}]}
    (tmp_path / "a.json").write_text(json.dumps([good, good | {"id": "odd"} | change]))
    report = check_file(str(tmp_path / "a.json"))
    assert report.records == 2 and report.faults == {reason: 1} and f"odd: {message}" in report.shown[reason][0] and report.would_fail


@pytest.mark.parametrize("content", ["", "image;question;answer\n0.jpg;what?;kite\n", '[{"id": 1}]'])
def test_a_table_without_known_columns_is_refused(tmp_path, content):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ConfigError, match="it needs columns, with commas or tabs between them: one of image"):
        check_file(str(tmp_path / "a.csv"), format="csv")
