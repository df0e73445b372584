"""Every format on disk gives the same kind of example (user reports U24, U25)."""

import csv
import json
import multiprocessing
import os
import pickle

import numpy as np
import pytest
from PIL import Image

from mmkit.config import ConfigError, DataConfig, SourceConfig
from mmkit.data import readers, record_facts
from mmkit.data.example import BadRecord, checked
from mmkit.data.images import ImageError, open_image
from mmkit.data.jsonl_index import JsonLines, line_index
from mmkit.data.mixture import ListSource, Mixture
from mmkit.data.readers import READERS, RecordSource, open_mixture, open_source, records_of
from mmkit.data.regions import region_mask

CHAT = [{"from": "human", "value": "Look at <image> now"}, {"from": "gpt", "value": "A kite."}]


def llava(tmp_path, records, name="data.json", **settings):
    path = tmp_path / name
    lines = name.endswith("jsonl")
    path.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records))
    return open_source(SourceConfig(name="s", format=settings.pop("format", "llava"), path=str(path), **settings))


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_json_and_jsonl_give_the_same_examples(tmp_path, name):
    source = llava(tmp_path, [{"id": 7, "image": "a/b.png", "conversations": CHAT}, {"conversations": CHAT[:0]}], name, images="/pictures")
    example = source[0]
    assert (example.key, example.images[0].data, len(source)) == ("7", "/pictures/a/b.png", 2)
    assert [turn.role for turn in example.turns] == ["user", "assistant"]
    assert example.turns[0].text == "<image>\nLook at  now"
    assert source[1].key == "record 2"


@pytest.mark.parametrize("image, count", [("t.jpg", 1), (["t.jpg"], 1), (["a.jpg", "b.jpg"], 2), ("", 0), (None, 0), ("None", 0), ("nan", 0), ([], 0)])
def test_image_may_be_text_list_or_absent(tmp_path, image, count):
    turns = [{"from": "human", "value": "<image>" * count + "\nhi"}, {"from": "gpt", "value": "yo"}]
    example = checked(llava(tmp_path, [{"id": "x", "image": image, "conversations": turns}])[0])
    assert len(example.images) == count == example.turns[0].text.count("<image>")


def test_text_and_list_of_one_picture_are_identical(tmp_path):
    source = llava(tmp_path, [{"id": "x", "image": image, "conversations": CHAT} for image in ("t.jpg", ["t.jpg"])])
    assert source[0] == source[1] and source.described(0)[0] == source.described(1)[0]


def test_two_pictures_and_one_placeholder_are_refused_with_both_counts(tmp_path):
    example = llava(tmp_path, [{"id": "x", "image": ["a.jpg", "b.jpg"], "conversations": CHAT}])[0]
    with pytest.raises(BadRecord, match="'x': 2 images but 1 image placeholders"):
        checked(example)


def test_leading_answer_is_dropped_and_unknown_roles_are_named(tmp_path):
    source = llava(tmp_path, [{"id": 1, "conversations": [CHAT[1], *CHAT]}, {"id": 2, "conversations": [{"from": "robot", "value": "x"}]}])
    assert [turn.role for turn in source[0].turns] == ["user", "assistant"]
    with pytest.raises(BadRecord, match="from 'robot'; it must be one of human"):
        source[1]


def test_chat_messages_with_typed_parts(tmp_path):
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a kite"}]},
    ]
    assert llava(tmp_path, [{"messages": messages, "image": "a.jpg"}])[0].turns[0].text == "<image>\nwhat?"


def test_answers_may_be_texts_numbers_or_several_and_columns_of_other_rows_are_null(tmp_path):
    empty = {"question": None, "answer": None, "conversations": None}
    records = [{"question": "q", "answer": 3}, {"question": "q", "answer": None, "answers": ["x", "y"]}, {"answer": "x"}, empty | {"caption": "x"}]
    records.append({"caption": ["x", "y"]})
    source = llava(tmp_path, records)
    assert [source[k].turns[-1].text for k in range(5)] == ["3", "x", "x", "x", "x"]


GPT = [{"from": "gpt", "value": "x"}]


@pytest.mark.parametrize(
    "record, message",
    [
        ({"question": "q", "answer": None}, "its answer is null, not text"),
        ({"question": "q", "answer": float("nan")}, "its answer is nan, not text"),
        ({"question": "q", "answers": []}, r"its answer is \[\], not text"),
        ({"question": "q", "answers": [{"text": "x"}]}, "its answer is {'text': 'x'}, not text"),
        ({"question": "q", "answers": [" "]}, "has an empty answer"),
        ({"question": None, "answer": "x"}, "its question is null, not text"),
        ({"question": None, "answer": None}, r"has no text: it has answer \(null\), id, question \(null\); it needs"),
        ({"caption": [None]}, "its caption is null, not text"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "a part of a message is 'hi', not an object"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "its message part is null, not text"),
        ({"messages": [{"role": "user", "content": {"text": "hi"}}]}, "its message is {'text': 'hi'}, not text"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"a message is from \['user'\]; it must be one of"),
        ({"messages": [{"role": "user", "content": "a \ud800 b"}]}, "its message has half of a surrogate pair"),
        ({"conversations": GPT, "image": [["a.png"]]}, r"its image is \['a.png'\]; give a path"),
        ({"conversations": GPT, "image": {"src": "a.png"}}, "its image is {'src': 'a.png'}; give a path"),
        ({"conversations": GPT, "image": {"bytes": None, "path": None}}, "its image is .*; give a path"),
    ],
)
def test_a_record_that_would_teach_none_or_stop_the_run_is_a_bad_record(tmp_path, record, message):
    source = llava(tmp_path, [{"id": "b"} | record])
    with pytest.raises(BadRecord, match="s: sample 'b': " + message):
        source[0]
    assert source.described(0) == ((), 0)


def test_any_other_failure_of_one_record_names_it_and_keeps_its_cause(monkeypatch):
    class Rows(list):
        def __getitem__(self, index):
            if index == 0:
                raise KeyError("column")
            return super().__getitem__(index)

    source = RecordSource("s", Rows([{}, {"id": "b", "caption": "x"}]), None)
    with pytest.raises(BadRecord, match=r"s: sample 'record 1': cannot be read \(KeyError: 'column'\)") as caught:
        source[0]
    assert isinstance(caught.value.__cause__, KeyError) and caught.value.reason == "unreadable record"
    with pytest.raises(IndexError, match="record 2 of 2 in 's'"):
        source[2]
    monkeypatch.setattr("mmkit.data.readers.example_of", lambda *_: None.text)
    with pytest.raises(BadRecord, match="sample 'b': cannot be read .AttributeError"):
        source[1]


# ---------------------------------------------------------------- JSONL index


def test_index_skips_blank_lines_and_survives_any_line_end(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\n{"a": 1}\r\n  \n\r\n{"a": 2}\n{"a": 3}')
    lines = JsonLines(path)
    assert [lines[k]["a"] for k in range(len(lines))] == [1, 2, 3]
    assert pickle.loads(pickle.dumps(lines))[2] == {"a": 3}


@pytest.mark.parametrize("block", [1, 3, 7, 64])
def test_index_does_not_depend_on_the_block_size(tmp_path, monkeypatch, block):
    rng = np.random.default_rng(block)
    parts = [rng.choice(["\n", " \n", '{"a": "' + "x" * int(rng.integers(9)) + '"}\n']) for _ in range(60)]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(parts) + '{"a": "end"}')
    monkeypatch.setattr("mmkit.data.jsonl_index._BLOCK", block)
    lines = JsonLines(path)
    wanted = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    assert [lines[k] for k in range(len(lines))] == wanted


def test_index_is_built_once_and_again_when_the_file_changes(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n')
    index = line_index(path)
    built = index.stat().st_mtime_ns
    assert line_index(path).stat().st_mtime_ns == built
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert len(JsonLines(path)) == 2
    index.write_bytes(index.read_bytes()[:-8])
    assert len(JsonLines(path)) == 2


def test_read_only_folder_puts_the_index_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n')
    assert str(line_index(path)).startswith(str(tmp_path / "cache")) and len(JsonLines(path)) == 1


def test_broken_line_names_file_and_record(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": \n[1]\n')
    lines = JsonLines(path)
    with pytest.raises(BadRecord, match="x.jsonl: sample 'record 2': is no JSON"):
        lines[1]
    with pytest.raises(BadRecord, match="JSON list, not an object"):
        lines[2]


def test_large_json_list_becomes_lines_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mmkit.data.readers.LARGE_JSON", 10)
    source = llava(tmp_path, [{"id": k, "conversations": CHAT} for k in range(5)])
    assert isinstance(source.records, JsonLines) and [source[k].key for k in range(5)] == list("01234")


def test_wrong_files_are_config_errors(tmp_path):
    (tmp_path / "data.json").write_text("[]")
    with pytest.raises(ConfigError, match="date.json does not exist; did you mean 'data.json'"):
        records_of(tmp_path / "date.json")
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(ConfigError, match="neither JSONL"):
        records_of(tmp_path / "x.txt")
    (tmp_path / "x.json").write_text("[1, 2")
    with pytest.raises(ConfigError, match="x.json is no JSON"):
        records_of(tmp_path / "x.json")
    for content in (b"", b"\n \n", b"\xef\xbb\xbf"):
        (tmp_path / "x.jsonl").write_bytes(content)
        with pytest.raises(ConfigError, match="x.jsonl is empty; it needs one JSON object a line"):
            records_of(tmp_path / "x.jsonl")
    for mark in (b"", b"\xef\xbb\xbf"):  # one object over several lines, as an editor or another tool writes it
        (tmp_path / "x.json").write_bytes(mark + json.dumps({"a": [1]}, indent=1).encode())
        with pytest.raises(ConfigError, match="holds one JSON object .keys 'a'., not records: write one record a line"):
            records_of(tmp_path / "x.json")


@pytest.mark.parametrize("format", ["llava", "grit", "csv", "parquet"])
def test_urls_are_called_urls_and_not_missing_files(format):
    with pytest.raises(ConfigError, match="http://127.0.0.1:9/x.json is a URL"):
        open_source(SourceConfig(name="s", format=format, path="http://127.0.0.1:9/x.json"))


def stamp(path, content):
    path.write_bytes(content)
    return open_source(SourceConfig(name="s", format="llava", path=str(path))).fingerprint


def test_a_fingerprint_tells_edits_that_keep_the_size_but_not_copies(tmp_path, monkeypatch):
    lines = [json.dumps({"id": f"{k:03}", "conversations": CHAT}).encode() for k in range(300)]
    (tmp_path / "copy").mkdir()
    first, path = stamp(tmp_path / "a.jsonl", b"\n".join(lines)), tmp_path / "copy" / "b.jsonl"
    assert stamp(path, b"\n".join(lines)) == first
    swapped = [lines[1], lines[0], *lines[2:]]
    assert len({first, stamp(path, b"\n".join(swapped)), stamp(path, b"\n".join(lines[::-1])), stamp(path, b"\n".join(lines[:-1]))}) == 4
    monkeypatch.setattr("mmkit.data.readers.STAMP_BLOCK", 100)  # of a file that is too large to be read whole: head, tail and between
    monkeypatch.setattr("mmkit.data.readers.STAMP_BLOCKS", 8)
    whole = b"\n".join(lines)
    first = stamp(path, whole)
    edited = [whole.replace(b"000", b"999"), whole[:-3] + b" }]", b"\n".join(lines[::-1])]
    assert len({first, *(stamp(path, content) for content in edited)}) == 4 and stamp(path, whole) == first


def test_many_files_share_the_bytes_that_a_fingerprint_reads(tmp_path, monkeypatch):
    reads, files = [], [tmp_path / str(k) for k in range(300)]
    [file.write_bytes(bytes(50)) for file in files]
    monkeypatch.setattr("mmkit.data.readers.STAMP_BLOCK", 10)
    monkeypatch.setattr("mmkit.data.readers.open", lambda *a: reads.append(a) or open(*a), raising=False)
    before = readers._stamp(*map(str, files))
    files[299].write_bytes(bytes(49) + b"x")  # a parquet file's directory is its tail
    assert readers._stamp(*map(str, files)) != before and len(reads) == 600


# ---------------------------------------------------------------- other formats

GRIT = {
    "id": "g",
    "image": "a.png",
    "image_w": 100,
    "image_h": 70,
    "conversations": [
        {"from": "human", "value": "<image>\nWhat is <bbox_location1> beside <bbox_location0>, <bbox_location1>?"},
        {"from": "gpt", "value": "A kite <bbox_location0>."},
    ],
    "box_x1y1x2y2": [[[10, 10, 60, 40], [0, 50, 140, 90]], [[10, 10, 60, 40]]],
}


def test_grit_boxes_stand_where_the_text_mentions_them(tmp_path):
    source = llava(tmp_path, [GRIT], format="grit")
    example = checked(source[0])
    assert example.turns[0].text == "<image>\nWhat is <region> beside <region>, <region>?"
    assert [region.text for region in example.regions] == ["[0, 714, 990, 985]", "[100, 142, 600, 571]"] + ["[0, 714, 990, 985]", "[100, 142, 600, 571]"]


def test_grit_draws_points_for_users_and_boxes_for_answers(tmp_path):
    source = llava(tmp_path, [GRIT], format="grit")
    kinds = [[region.kind for region in source.draw(0, np.random.default_rng(seed)).regions] for seed in range(40)]
    assert {tuple(kind) for kind in kinds} == {("point",) * 3 + ("box",), ("box",) * 4}
    example = next(e for e in (source.draw(0, np.random.default_rng(seed)) for seed in range(9)) if e.regions[0].kind == "point")
    point = example.regions[1]
    assert 10 <= point.box.x1 <= 60 and 10 <= point.box.y1 <= 40
    ys, xs = np.nonzero(region_mask(point, 100, 70))
    assert xs.min() >= 10 and xs.max() <= 60 and ys.min() >= 10 and ys.max() <= 40
    again = source.draw(0, np.random.default_rng(3))
    assert [r.box for r in again.regions] == [r.box for r in source.draw(0, np.random.default_rng(3)).regions]


def test_grit_point_lies_on_the_mask(tmp_path):
    from mmkit.data.regions import encode_mask

    mask = np.zeros((70, 100), bool)
    mask[20:30, 50:58] = True
    record = GRIT | {"masks": [[encode_mask(mask), None], [None]]}
    source = llava(tmp_path, [record], format="grit")
    for seed in range(9):
        region = source.draw(0, np.random.default_rng(seed)).regions[1]
        if region.kind == "point":
            assert mask[int(region.box.y1), int(region.box.x1)]


def test_grit_mention_of_a_missing_box_is_refused(tmp_path):
    source = llava(tmp_path, [GRIT | {"box_x1y1x2y2": [[[1, 2, 3, 4]], []]}], format="grit")
    with pytest.raises(BadRecord, match="box 1 of a message with 1"):
        source[0]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"conversations": None}, r"has no text: it has box_x1y1x2y2, conversations \(null\)"),
        ({"box_x1y1x2y2": [[[1, 2, 3], [1, 2, 3]], []]}, r"a box is \[1, 2, 3\]; give four numbers"),
        ({"box_x1y1x2y2": [[["1", "2", "3", "4"]] * 2, []]}, r"a box is \['1', '2', '3', '4'\]; give four numbers"),
        ({"box_x1y1x2y2": [[[1, 2, 3, float("nan")]] * 2, []]}, "a box is .*; give four numbers"),
        ({"box_x1y1x2y2": [[1, 2, 3, 4], []]}, "a box is 2; give four numbers"),
        ({"masks": [[{"size": [70, 100], "counts": [3, 5]}] * 2, []]}, "mask runs add up to 8 pixels"),
        ({"masks": [[{"size": [70, 100]}] * 2, []]}, "a mask is {'size': .*; give an array or"),
        ({"masks": [[{"size": [70, 100], "counts": ["3"]}] * 2, []]}, "a mask is .*; give an array or"),
        ({"masks": [[{"size": [70, 100], "counts": "o"}] * 2, []]}, "a mask is .*; give an array or"),
        ({"image_w": "wide"}, "its image_w is 'wide'; give the picture's size in whole pixels"),
        ({"image_h": 0}, "its image_h is 0; give the picture's size"),
        ({"box_x1y1x2y2": [[[40, 30, 20, 15]] * 2, []]}, r"a box \[40, 30, 20, 15\] is inverted: .* not x, y, width, height"),
        ({"box_x1y1x2y2": [[[4, 3, 4, 15]] * 2, []]}, r"a box \[4, 3, 4, 15\] is empty"),
        ({"box_x1y1x2y2": [[[17, -904, 55, -880]] * 2, []]}, r"a box \[17, -904, 55, -880\] lies outside its picture of 100x70"),
        ({"box_x1y1x2y2": [[[10, 10, 60, 40]] * 2, [[100, 10, 160, 40]]]}, "a box .* lies outside its picture"),
        ({"box_x1y1x2y2": 3}, "its box_x1y1x2y2 is 3, not a list with an entry for each message"),
    ],
)
def test_a_grit_record_with_a_wrong_part_is_a_bad_record(tmp_path, change, message):
    source = llava(tmp_path, [GRIT | change], format="grit")
    with pytest.raises(BadRecord, match="s: sample 'g': " + message):
        [source.draw(0, np.random.default_rng(seed)) for seed in range(9)]  # a mask is looked at where a point is drawn


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_csv_pairs_pictures_with_captions(tmp_path, delimiter):
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["filepath", "title"], ["a.png", 'a "red", kite'], ["b.png", "two\nlines"]])
    source = open_source(SourceConfig(name="c", format="csv", path=str(path)))
    example = checked(source[0])
    assert example.caption == 'a "red", kite' and example.images[0].data == str(tmp_path / "a.png") and len(source) == 2


def csv_source(tmp_path, content, **settings):
    path = tmp_path / "rows.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_source(SourceConfig(name="c", format="csv", path=str(path), **settings))


def test_csv_rows_of_another_number_of_cells_are_bad_records_that_name_the_line(tmp_path):
    source = csv_source(tmp_path, 'image,question,answer\n\na.png,"what\nnow",x\na.png,a red, kite,x\na.png,what\n')
    assert source[0].turns[-1].text == "x" and len(source) == 3
    with pytest.raises(BadRecord, match="c: sample 'record 2': line 5 of .*rows.csv has 4 cells for 3 columns; put quotes"):
        source[1]
    with pytest.raises(BadRecord, match="'record 3': line 6 of .* has 2 cells for 3 columns"):
        source[2]


@pytest.mark.parametrize(
    "content, message",
    [
        ('image,title\nb.png,x\na.png,"one\n' + "a.png,c\n" * 20, "rows.csv line 23: unexpected end of data; the row begins in line 3. A cell"),
        ('image,title\na.png,"one\nb.png,"two\n', "rows.csv line 3: ',' expected after '\"'; the row begins in line 2"),
        ("image,title\na.png,x\na.png,caf\xe9\n".encode("latin1"), "rows.csv line 3 is not UTF-8; save the file as UTF-8"),
        ('"image,title\n', "rows.csv line 1: unexpected end of data; the row begins in line 1"),
        ("", "the first line of .* is ''; it needs columns"),
    ],
)
def test_csv_files_that_cannot_be_cut_into_rows_are_named_with_the_line(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr("mmkit.data.readers.LONGEST_CELL", 200)
    before = csv.field_size_limit()
    with pytest.raises(ConfigError, match="data.sources 'c': .*" + message):
        csv_source(tmp_path, content)
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("row", "message"), [('"Hello" said the man', "',' expected after"), ("x" * 300, "larger than field limit"), ('"he said no', "unexpected end of data")]
)
def test_a_stray_quote_costs_its_own_row_only(tmp_path, monkeypatch, row, message):
    monkeypatch.setattr("mmkit.data.readers.LONGEST_CELL", 200)
    last = message.startswith("unexpected")
    source = csv_source(tmp_path, f"image,title\na.png,one\nb.png,{row}" + ("" if last else "\nc.png,three\n"))
    assert len(source) == 3 - last and source[0].caption == "one" and (last or source[2].caption == "three")
    with pytest.raises(BadRecord, match=f"'record 2': line 3 of .*: .*{message}.*A cell that begins with a quote"):
        source[1]


def test_csv_cells_may_be_longer_than_the_csv_module_allows(tmp_path):
    assert len(csv_source(tmp_path, "image,title\na.png," + "x" * 200_000)[0].caption) == 200_000


def test_filters_are_refused_where_they_would_do_nothing(tmp_path):
    with pytest.raises(ConfigError, match="'c': filters look at the metadata of tar shards and would do nothing for format 'csv'"):
        csv_source(tmp_path, "image,title\na.png,x\n", filters=[{"key": "punsafe", "op": "<", "value": 0.5}])


def test_parquet_with_encoded_pictures(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("MMKIT_CACHE", str(tmp_path / "cache"))
    pictures = [Image.new("RGB", (4, 3), color) for color in ("red", "blue")]
    table = datasets.Dataset.from_dict(
        {"image": pictures, "question": ["which colour?"] * 2, "answer": ["red", "blue"]},
        features=datasets.Features({"image": datasets.Image(), "question": datasets.Value("string"), "answer": datasets.Value("string")}),
    )
    table.to_parquet(str(tmp_path / "part-0.parquet"))
    source = open_source(SourceConfig(name="p", format="parquet", path=str(tmp_path)))
    example = checked(source[1])
    assert isinstance(example.images[0].data, bytes) and example.turns[0].text == "<image>\nwhich colour?"
    assert example.turns[1].text == "blue" and len(source) == 2


def test_parquet_lists_of_pictures_stay_encoded_so_that_a_damaged_one_is_one_bad_record(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("MMKIT_CACHE", str(tmp_path / "cache"))
    cells = [[{"bytes": b"\x89PNG cut", "path": None}], [{"bytes": b"\x89PNG", "path": None}] * 2]
    features = datasets.Features({"images": datasets.List(datasets.Image()), "caption": datasets.Value("string")})
    datasets.Dataset.from_dict({"images": cells, "caption": ["x", "y"]}, features=features).to_parquet(str(tmp_path / "a.parquet"))
    source = open_source(SourceConfig(name="p", format="parquet", path=str(tmp_path)))
    assert [[ref.data for ref in source[k].images] for k in range(2)] == [[b"\x89PNG cut"], [b"\x89PNG"] * 2]
    with pytest.raises(ImageError, match="no known image format"):
        open_image(source[0].images[0])
    assert pickle.loads(pickle.dumps(source))[1].caption == "y"

    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-30])
    with pytest.raises(ConfigError, match="data.sources 'p': .*/b.parquet cannot be read as parquet .*magic bytes not found"):
        open_source(SourceConfig(name="p", format="parquet", path=str(tmp_path)))


def test_missing_parquet_and_text_are_named(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match="no parquet file at"):
        open_source(SourceConfig(name="p", format="parquet", path=str(tmp_path / "x.parquet")))
    with pytest.raises(BadRecord, match="has no text: it has image, note"):
        llava(tmp_path, [{"image": "a.png", "note": 1}])[0]


def test_mixture_opens_every_source(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"id": k, "conversations": CHAT} for k in range(4)]))
    sources = [SourceConfig(name=name, format="llava", path=str(path)) for name in "ab"]
    mix = open_mixture(DataConfig(sources=sources))
    assert len(mix) == 8 and mix[5].source == "b" and set(READERS) >= {"llava", "grit", "parquet", "csv", "pack", "webdataset"}


# ---------------------------------------------------------------- what planning asks of every record


def conversations(path, n=40):
    """``n`` records about half as many pictures, some without one, of different lengths, and one line that is no JSON."""
    lines = []
    for k in range(n):
        record = {"id": k, "conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "so " * (k % 7 + 1)}]}
        lines.append(json.dumps(record | ({"image": f"{k * 7 % (n // 2)}.jpg"} if k % 5 else {})))
    path.write_text("\n".join([*lines, "{broken"]) + "\n")
    return RecordSource("made", records_of(path), str(path.parent), "f")


def test_kept_groups_and_lengths_equal_those_read_anew(tmp_path, monkeypatch):
    source = conversations(tmp_path / "a.jsonl")
    kept = source.facts
    identities, lengths = zip(*map(source.described, range(len(source))), strict=True)
    seen = {}
    assert kept["groups"].tolist() == [seen.setdefault(one or k, len(seen)) for k, one in enumerate(identities)] and len(seen) < len(source)
    assert kept["lengths"].tolist() == list(lengths) and min(kept["lengths"]) < 0 < max(kept["lengths"])
    listed = RecordSource("made", [source.records[k] for k in range(40)], str(tmp_path))  # a list in memory, nothing kept
    assert listed.facts["groups"].tolist() == kept["groups"].tolist()[:40] and listed.facts["lengths"].tolist() == kept["lengths"].tolist()[:40]
    monkeypatch.setattr(RecordSource, "described", None)
    again = RecordSource("made", records_of(tmp_path / "a.jsonl"), str(tmp_path))
    assert isinstance(again.facts["groups"], np.memmap) and again.facts["groups"].tolist() == kept["groups"].tolist()
    with pytest.raises(TypeError):  # another folder is another identity of the pictures
        _ = RecordSource("made", again.records, "/elsewhere").facts


def test_kept_groups_and_lengths_are_made_anew_when_the_file_changes_or_they_are_cut_short(tmp_path):
    kept = conversations(tmp_path / "a.jsonl").facts["lengths"].tolist()
    assert len(conversations(tmp_path / "a.jsonl", 30).facts["lengths"]) == 31
    file = tmp_path / f"a.jsonl{record_facts.SUFFIX}"
    file.write_bytes(file.read_bytes()[:-8])
    assert conversations(tmp_path / "a.jsonl").facts["lengths"].tolist() == kept
    (tmp_path / "empty.jsonl").write_text("\n")
    assert len(RecordSource("made", JsonLines(tmp_path / "empty.jsonl"), None).facts["groups"]) == 0


def test_orders_by_picture_and_length_are_the_same_with_and_without_the_kept_numbers(tmp_path):
    source = conversations(tmp_path / "a.jsonl")
    plain = ListSource([example for k in range(40) if (example := source[k])])
    config = SourceConfig(name="made", format="llava", path="a")
    short = RecordSource("made", [source.records[k] for k in range(40)], str(tmp_path))
    for options in ({"by_image": True}, {"megabatch": 4}, {"by_image": True, "megabatch": 4}):
        orders = [Mixture([config], [one]).order(1, 2, **options) for one in (plain, short)]
        assert orders[0].members.tolist() == orders[1].members.tolist() and orders[0].starts.tolist() == orders[1].starts.tolist()


def _build_and_count(path, calls):
    source, real = RecordSource("made", records_of(path), str(path.parent)), RecordSource.described
    RecordSource.described = lambda self, k: calls.put(k) or real(self, k)
    _ = source.facts


def test_two_processes_build_the_numbers_once(tmp_path):
    conversations(tmp_path / "a.jsonl")
    context = multiprocessing.get_context("fork")
    calls = context.SimpleQueue()
    work = [context.Process(target=_build_and_count, args=(tmp_path / "a.jsonl", calls)) for _ in range(3)]
    [process.start() for process in work]
    [process.join() for process in work]
    assert all(process.exitcode == 0 for process in work)
    assert sorted(calls.get() for _ in iter(lambda: not calls.empty(), False)) == list(range(41))
