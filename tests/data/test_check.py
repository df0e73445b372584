"""Each fault of a data file is found before training and named with an example (user reports U24, U25)."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from mmkit.config import ClipConfig, ConfigError, DataConfig, SourceConfig
from mmkit.data.check import Report, check, check_file, judge_together, nearest_path, opened, write_json
from mmkit.data.conversation import Formatter
from mmkit.data.example import Example, ImageRef, Turn
from mmkit.data.loader import loader
from mmkit.data.mixture import ListSource, Mixture
from mmkit.data.tar_writer import ShardWriter
from tests.data.test_conversation import byte_bpe
from tests.data.test_loader import REGIONS, examples, picture, take, tokenizer, transform, vlm, with_broken
from tests.training.tiny_clip import shards

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
    ],
)
def test_fault_is_counted_and_named(tmp_path, record, fault, words):
    path = write(tmp_path, [record], n_good=3)
    formatter = Formatter(byte_bpe(False), "short")
    report = check_file(path, str(tmp_path), data=DataConfig(max_length=600), model=vlm(), formatter=formatter)
    assert report.faults == {fault: 1} and report.bad == 1 and report.would_fail
    assert re.search(words, report.shown[fault][0])
    assert f"1 {fault}" in report.summary()


def test_a_record_longer_than_a_row_is_left_out_and_no_fault(tmp_path):
    path = write(
        tmp_path, [{"id": 1, "conversations": [{"from": "human", "value": "word " * 900}, OK[1]]}], n_good=3
    )
    formatter = Formatter(byte_bpe(False), "short")
    report = check_file(
        path, str(tmp_path), data=DataConfig(max_length=600), model=vlm(), formatter=formatter
    )
    assert (report.faults, report.bad, report.left_out, report.would_fail) == ({}, 0, {"too long": 1}, False)
    assert (
        re.search("needs .*, more than data.max_length 600", report.shown["too long"][0])
        and "left out: 1 too long" in report.summary()
    )
    cut = DataConfig(max_length=600, too_long="truncate")
    report = check_file(
        path, str(tmp_path), data=cut, model=vlm(), formatter=formatter
    )  # the question alone fills the row
    assert (report.faults, report.would_fail) == ({"nothing left to learn": 1}, True)


def test_good_file_is_ready_and_its_lengths_are_told(tmp_path):
    formatter = Formatter(byte_bpe(False), "short")
    report = check_file(write(tmp_path, [], n_good=8), str(tmp_path), data=DataConfig(max_length=600), model=vlm(), formatter=formatter)
    assert not report.would_fail and report.faults == {} and report.images == 1 and report.tokenised == report.decoded == 8
    assert 10 < report.lengths["least"] <= report.lengths["median"] <= report.lengths["most"] < 60 and 0 < report.supervised < 0.7
    write_json(report, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["would_fail"] is False


def test_notes_do_not_fail(tmp_path):
    good = {"id": "good0", "image": "web-celebrity/1.png", "conversations": [OK[0], {"from": "gpt", "value": "answer 0"}]}
    report = check_file(write(tmp_path, [good], n_good=2), str(tmp_path))
    assert report.notes == {"duplicate id": 1, "duplicate content": 1} and not report.would_fail


def test_boxes_outside_the_picture_are_noted(tmp_path):
    turns = [{"from": "human", "value": "<image>\nwhat is <bbox_location0>?"}, {"from": "gpt", "value": "a kite"}]
    record = {"id": "g", "image": "web-celebrity/1.png", "conversations": turns, "box_x1y1x2y2": [[[5, 5, 90, 10]], []]}
    report = check_file(write(tmp_path, [record]), str(tmp_path), format="grit")
    assert report.notes == {"box outside": 1} and report.shown["box outside"] == ["g (5, 5, 90, 10) in 30x20"]


def test_allowed_share_decides(tmp_path):
    bad = {"id": 1, "image": "no.png", "conversations": OK}
    path = write(tmp_path, [bad], n_good=9)
    assert check_file(path, str(tmp_path), data=DataConfig(max_bad_share=0.05)).would_fail
    assert not check_file(path, str(tmp_path), data=DataConfig(max_bad_share=0.1)).would_fail


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


@pytest.mark.parametrize(
    ("conversations", "fault"),
    [
        ([], "no supervised token"),
        ([{"from": "human", "value": "what?"}], "no supervised token"),
        ([{"from": "human", "value": "what?"}] * 2 + [OK[1]], "turns"),
    ],
)
def test_roles_and_answers_are_checked_without_a_model(tmp_path, conversations, fault):
    report = check_file(write(tmp_path, [{"id": "odd", "conversations": conversations}], n_good=3), str(tmp_path))
    assert report.faults == {fault: 1} and report.would_fail


PAIRS = ClipConfig(name="any")


@pytest.mark.parametrize(
    ("row", "fault"), [("1.png,", "missing caption"), ("1.png, ", "missing caption"), (",a kite", "missing image"), ("broken.png,a kite", "undecodable image")]
)
def test_pairs_need_a_caption_and_a_picture(tmp_path, row, fault):
    write(tmp_path, [])
    (tmp_path / "pairs.csv").write_text(f"image,title\n1.png,a boat\n{row}\n")
    report = check_file(str(tmp_path / "pairs.csv"), str(tmp_path / "web-celebrity"), "csv", model=PAIRS)
    assert report.faults == {fault: 1} and report.bad == 1 and report.would_fail
    if "missing caption" in fault:
        assert check_file(str(tmp_path / "pairs.csv"), str(tmp_path / "web-celebrity"), "csv").faults == report.faults


def two_pictures(n):
    turns = (Turn("user", "<image><image>\nwhat red"), Turn("assistant", "green"))
    return [Example(f"two{k}", (picture(2 * k), picture(2 * k + 1)), turns) for k in range(n)]


def grit(tmp_path, **change):
    record = {"id": "g", "image": "1.png", "image_w": 30, "image_h": 20, "box_x1y1x2y2": [[[1, 1, 9, 9]] * 2, []]}
    record["conversations"] = [{"from": "human", "value": "<image>\nwhat <bbox_location0> <bbox_location1>"}, {"from": "gpt", "value": "red"}]
    write(tmp_path, [])
    (tmp_path / "grit.json").write_text(json.dumps([record | change]))
    return opened(SourceConfig(name="g", format="grit", path=str(tmp_path / "grit.json"), images=str(tmp_path / "web-celebrity")), DataConfig())[0]


@pytest.mark.parametrize(
    ("make_source", "data", "fault"),
    [
        (lambda _: ListSource(two_pictures(3)), {"max_images": 1}, "too many images"),
        (lambda _: ListSource(two_pictures(3)), {"max_images": 2}, ""),
        (lambda folder: grit(folder), {"max_regions": 1}, "too many regions"),
        (lambda folder: grit(folder), {"max_regions": 2}, ""),
        (lambda folder: grit(folder, masks=[[{"size": [20, 30], "counts": [3, 5]}] * 2, []]), {"max_regions": 2}, "region mask"),
        (lambda _: ListSource(examples(9)), {"max_length": 9}, "too long"),
        (lambda _: ListSource(with_broken(200, range(0, 200, 40))), {"max_bad_share": 0.01}, "undecodable image"),
        (lambda _: ListSource(with_broken(200, range(0, 200, 40))), {"max_bad_share": 0.2}, ""),
    ],
)
def test_what_training_refuses_is_a_fault_and_nothing_else_is(tmp_path, make_source, data, fault):
    source, model = make_source(tmp_path), vlm(regions=REGIONS)
    data = DataConfig(**{"max_length": 96, "max_images": 2, "max_regions": 2} | data)
    report = check(source, data, model, Formatter.of(tokenizer(), model))
    assert report.would_fail == bool(fault) and (not fault or fault in report.faults | report.left_out)
    mixture = Mixture([SourceConfig(name="one", format="llava", path="-")], [source])
    stream = loader(data, model, tokenizer(), [transform], train=True, device_batch=4, source=mixture)
    if fault:
        with pytest.raises(ValueError, match="can be used|cannot be used|mask runs"):
            take(stream, 100)
    else:
        assert take(stream, 100)[-1].epoch > 0


def cut_short(n, bad):
    """Examples of which some pictures have a sound header and half their content."""
    out = io.BytesIO()
    Image.effect_noise((40, 40), 50).save(out, "png")
    whole, found = out.getvalue(), examples(n)
    data = [whole[: len(whole) // 2] if k in bad else whole for k in range(n)]
    return [Example(example.key, (ImageRef(data[k], name=f"p{k}"),), example.turns) for k, example in enumerate(found)]


@pytest.mark.parametrize(("broken", "grows", "fails"), [([0], True, False), (range(0, 400, 4), False, True), ([], False, False)])
def test_a_decoded_sample_grows_until_it_tells(broken, grows, fails):
    report = check(ListSource(cut_short(400, broken)), DataConfig(max_bad_share=0.05), decode=20)
    assert report.would_fail == fails and report.share == pytest.approx(len(broken) / 400, abs=0.01)
    assert (report.decoded > 20) == grows and ("about 25.0% of all" in report.summary()) == fails


def test_sources_of_one_mixture_are_judged_by_the_share_of_all():
    reports = [Report("small", 100, 100, share=0.05), Report("large", 9900, 9900), Report("none", refused="it is not there")]
    judge_together(reports, [100, 9900, 0])
    assert [report.would_fail for report in reports] == [False, False, True]
    judge_together(reports, [3000, 7000, 0])
    assert [report.would_fail for report in reports] == [True, False, True]


def test_tar_shards_are_judged_by_their_counters_and_a_decoded_sample(tmp_path):
    path = shards(tmp_path / "good", n=24)
    report = check_file(path, format="webdataset", model=PAIRS)
    assert not report.would_fail and (report.records, report.decoded, report.left_out) == (24, 24, {})
    assert check_file(path, format="webdataset", data=DataConfig(caption_key="json")).refused.startswith("good: none of the 12 samples")
    absent = check_file(f"{path}/{{00000..00002}}.tar", format="webdataset")
    assert absent.left_out == {"absent shard": 1} and "33.3%" in absent.refused and absent.would_fail and "00002.tar" in absent.summary()
    allowed = check_file(f"{path}/{{00000..00002}}.tar", format="webdataset", data=DataConfig(max_bad_share=0.5))
    assert allowed.left_out == {"absent shard": 1} and not allowed.would_fail
    broken = check_file(shards(tmp_path / "broken", n=24, broken=3), format="webdataset", model=PAIRS)
    assert broken.faults == {"undecodable image": 1} and broken.would_fail


def test_a_stream_is_judged_by_the_share_its_first_shards_lack(tmp_path):
    path = f"{shards(tmp_path / 'pairs', n=24)}/{{00000..00002}}.tar"
    for allowed, fails in ((0.01, True), (0.1, False)):  # one problem among 24 samples, as the loader counts it
        data = DataConfig(max_bad_share=allowed)
        source, _ = opened(SourceConfig(name="s", format="webdataset", path=path), data)
        report = check(source, data, PAIRS, streamed=True)
        assert report.would_fail == fails and report.share == pytest.approx(1 / 24)


def test_faults_of_a_tar_are_counted_once(tmp_path):
    write(tmp_path, [])
    content, empty = (tmp_path / "web-celebrity" / "1.png").read_bytes(), np.random.default_rng(0).random(1200) < 0.1
    with ShardWriter(str(tmp_path / "tar")) as writer:
        for k in range(1200):
            writer.write(f"{k}", {"png": content, "txt": "" if empty[k] else f"kite {k}"})
    report = check_file(str(tmp_path / "tar"), format="webdataset", data=DataConfig(max_bad_share=0.15), model=PAIRS, decode=300)
    assert report.share == pytest.approx(0.1, abs=0.04) and not report.would_fail
