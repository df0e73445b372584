"""Captions of tars in other encodings and inside json, keys with dots, tars without samples: found by name, counted by the sample."""

import json
import logging
import tarfile

import pytest

from mmkit.cli import main
from mmkit.config import DataConfig
from mmkit.data.check import check_file
from mmkit.data.shard_sizes import known_samples, known_sizes
from mmkit.data.shards import damage, inspect, open_shards
from mmkit.data.stream import streamed
from mmkit.data.tar_captions import caption_of
from mmkit.data.tar_index import opened_index
from tests.data.test_shards import lenient, own_cache, raw_tar, source_config  # noqa: F401
from tests.data.test_stream import png


def pairs(n, caption=lambda i: f"caption {i}".encode(), extension="txt", name="{}"):
    files = ((f"{name.format(i)}.{end}", content) for i in range(n) for end, content in (("png", png(i)), (extension, caption(i))))
    return list(files)


# ---------------------------------------------------------------- captions


def test_a_caption_is_a_field_of_json_and_never_the_json_itself(tmp_path, capsys):
    facts = lambda i: json.dumps({"caption": f"a cat {i}", "url": "http://x", "w": 3, "meta": {"alt": f"tom {i}"}}).encode()
    path = raw_tar(tmp_path / "0.tar", pairs(4, facts, "json"))
    for key in ("txt", "json", "json:title"):
        with pytest.raises(ValueError, match=r"hold text: json:caption, json:url, json:meta.alt; set data.caption_key to one, as json:cap"):
            open_shards(source_config(path), lenient(caption_key=key))
    for key, found in (("json:caption", "a cat 3"), ("json:meta.alt", "tom 3"), (".JSON: caption", "a cat 3")):
        source = open_shards(source_config(path), DataConfig(caption_key=key))
        assert source[3].caption == found and source[3].meta["w"] == 3
    assert main(["data", "shards", path]) == 2 and "json:caption" in capsys.readouterr().out
    assert main(["data", "shards", path, "--caption", "json:caption"]) == 0
    assert main(["data", "shards", path, "--caption", "png"]) == 2 and "no ending of a text file" in capsys.readouterr().err


def test_json_under_another_ending_is_no_caption_either(tmp_path):
    facts = lambda i: json.dumps({"caption": f"a cat {i}"}).encode()
    for extension in ("txt", "meta.json"):
        path = raw_tar(tmp_path / f"{extension}.tar", pairs(4, facts, extension))
        with pytest.raises(ValueError, match="4 caption is JSON"):
            open_shards(source_config(path), lenient(caption_key=extension))
        assert open_shards(source_config(path), DataConfig(caption_key=f"{extension}:caption"))[1].caption == "a cat 1"


@pytest.mark.parametrize(
    ("content", "key", "found"),
    [
        (b"\xef\xbb\xbfa cat\r\n", "txt", "a cat"), ("Möwe".encode(), "txt", "Möwe"), (b"[1]", "txt", "[1]"), (b"{a}", "txt", "{a}"),
        (b"caf\xe9", "txt", "not UTF-8"), (b"it\x92s", "txt", "not UTF-8"), ("a cat".encode("utf-16"), "txt", "not UTF-8"),
        ("cat".encode("utf-16-le"), "txt", "not UTF-8"), ("猫".encode("shift_jis"), "txt", "not UTF-8"), (b"", "txt", "empty text"),
        (b'["a", "b"]', "txt", "caption is JSON"), (b'"a cat"', "json", "a cat"), (b"null", "json", "caption is no text"),
        (b'{"a": "x"}', "json:b", "missing field"), (b'{"a": null}', "json:a", "missing field"), (b'{"a": 3}', "json:a", "caption is no text"),
        (b'{"a": ["x"]}', "json:a", "caption is no text"), (b'{"a": " "}', "json:a", "empty text"), (b"[]", "json:a", "bad json"),
        (b'{"a": "x", "a": "y"}', "json:a", "bad json"), (b'{"a": "\\ud83d"}', "json:a", "not UTF-8"), (b"[" * 9999, "json:a", "bad json"),
        (b'{"a.b": "x", "a": {"b": "y"}}', "json:a.b", "x"), (b'{"a": {"b": {"c": "y"}}}', "json:a.b.c", "y"),
        (b'{"a": "caf\xe9"}', "json:a", "not UTF-8"),
    ],
)  # fmt: skip
def test_what_a_caption_file_says_or_why_it_is_none(content, key, found):
    try:
        assert caption_of(content, key) == found
    except ValueError as error:
        assert error.reason == found


def test_captions_that_are_not_utf8_are_counted_with_the_tars_name_and_refused_above_the_share(tmp_path, caplog, capsys):
    good = raw_tar(tmp_path / "good.tar", pairs(10))
    bad = raw_tar(tmp_path / "bad.tar", pairs(10, lambda i: b"caf\xe9" if i < 2 else b"tea"))
    source = open_shards(source_config(f"{good}::{bad}"), lenient())
    assert len(source) == 18 and source.counts == {"samples": 20, "not UTF-8": 2} and damage(source) == 0.1
    assert caplog.records[-1].levelno == logging.WARNING and "bad.tar: 2 not UTF-8 of 10 samples" in caplog.text
    report = check_file(f"{good}::{bad}", format="webdataset", data=lenient())
    assert (report.records, report.bad, report.left_out) == (18, 2, {"not UTF-8": 2}) and report.share == 0.1 and not report.would_fail
    with pytest.raises(ValueError, match="10.0% of the samples .*\n.*\n.*2 not UTF-8\n.*bad.tar: 2 not UTF-8"):
        open_shards(source_config(f"{good}::{bad}"))


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("files", "counts"),
    [
        (pairs(1000, name="img.{}"), {"samples": 1000, "dotted key": 1000}),
        ([("img.png", png()), ("img.txt", b"x"), *pairs(3, name="img.{}")], {"samples": 4, "dotted key": 3}),
        ([("a.png", png()), ("a.txt", b"x"), ("a.depth.png", png()), ("a.en.txt", b"x")], {"samples": 1}),
        ([("a.png", png()), ("a.depth.png", png())], {"samples": 1, "missing text": 1}),
        ([("a.b.png", png()), ("a.c.png", png())], {"samples": 2, "dotted key": 2}),
        ([(f"{i}.{end}", b"x") for end in ("png", "txt") for i in range(3)], {"samples": 3, "files apart": 3}),
        ([*pairs(1), *pairs(1, lambda i: b"")], {"samples": 2, "duplicate key": 1, "empty text": 1}),
        ([("a.png", b""), ("a.txt", b"x")], {"samples": 1, "empty image": 1}),
        ([*pairs(1), ("README", b"x"), ("._0.png", b"x")], {"samples": 1, "file without a key or an extension": 2}),
        ([], {"empty shard": 1}),
        ([("0", b"x"), (".png", b"x")], {"shard without a sample": 1, "file without a key or an extension": 2}),
        ([("0.png", png()), ("0.txt", b"x"), ("0.json", b"{")], {"samples": 1, "unreadable json, sample kept": 1}),
    ],
)
def test_each_sample_of_a_tar_is_counted_once(tmp_path, files, counts):
    assert opened_index(raw_tar(tmp_path / "0.tar", files)).counts == counts


def test_a_shard_of_dotted_keys_behind_a_good_one_is_named_and_refused(tmp_path, caplog):
    good, dotted = raw_tar(tmp_path / "0.tar", pairs(100)), raw_tar(tmp_path / "1.tar", pairs(100, name="img.{}"))
    with pytest.raises(ValueError, match="50.0% of the samples .*\n.*\n.*100 dotted key\n.*1.tar: 100 dotted key of 100 samples"):
        open_shards(source_config(tmp_path))
    assert len(open_shards(source_config(tmp_path), lenient())) == 100
    assert caplog.records[-1].levelno == logging.WARNING and "1.tar: 100 dotted key" in caplog.text
    with pytest.raises(ValueError, match="b: none of the 100 samples"):  # each source of a stream is looked at
        names = [source_config(good), source_config(dotted).model_copy(update={"name": "b"})]
        streamed(DataConfig(sources=names, resampled=True, samples_per_epoch=9)).check_first()


def test_names_that_are_not_utf8_and_links_are_read_or_counted(tmp_path):
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as tar:
        files = pairs(1, name="caf\xe9{}")
        for name, content in files:
            (tmp_path / "file").write_bytes(content)
            tar.add(tmp_path / "file", name)
        for name, _ in files:
            link = tarfile.TarInfo(name.replace("caf\xe9", "link"))
            link.type, link.linkname = tarfile.LNKTYPE, name
            tar.addfile(link)
    source = inspect(str(path))
    assert source.counts == {"samples": 2, "link in the place of a file": 1} and source[0].key == "caf\\xe90"


@pytest.mark.parametrize(
    "headers", [{"GNU.sparse.map": "a,b"}, {"size": "-1024"}, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}]
)
def test_extended_headers_with_numbers_that_are_none_are_damage_or_a_counted_sample(tmp_path, headers):
    with tarfile.open(tmp_path / "0.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in pairs(3):
            (tmp_path / "file").write_bytes(content)
            info = tar.gettarinfo(tmp_path / "file", name)
            info.pax_headers = headers if name == "1.png" else {}
            tar.addfile(info, (tmp_path / "file").open("rb"))
    index = opened_index(str(tmp_path / "0.tar"))
    assert len(index) < 3 and (index.message or index.bad_samples), index.row()


def test_files_that_nothing_reads_are_told(tmp_path, caplog):
    raw_tar(tmp_path / "0.tar", sorted([*pairs(3), *((f"{i}.npy", b"x") for i in range(3))]))
    source = open_shards(source_config(tmp_path))
    assert len(source) == 3 and "files that are not read: npy" in caplog.text and "not read: 3 npy files" in source.summary()
    assert check_file(str(tmp_path), format="webdataset").notes["npy files that are not read"] == 3


def test_empty_tars_cost_nothing_beside_others_and_are_named(tmp_path, caplog):
    raw_tar(tmp_path / "0.tar", pairs(3))
    raw_tar(tmp_path / "1.tar", [])
    source = open_shards(source_config(tmp_path))
    assert len(source) == 3 and damage(source) == 0 and "1.tar: it holds no file" in caplog.text
    with pytest.raises(ValueError, match="the shards hold no sample"):
        open_shards(source_config(tmp_path / "1.tar"))


@pytest.mark.parametrize("content", ['{"0.tar": null}', '{"0.tar": "3"}', '{"0.tar": -1}', '{"0.tar": true}', "[3]", "{", "[" * 9999])
def test_counts_beside_the_shards_that_are_none_are_told_and_not_used(tmp_path, content, caplog):
    path = raw_tar(tmp_path / "0.tar", pairs(3))
    for name in ("sizes.json", "0_stats.json", "__len__"):
        (tmp_path / name).write_text(content.replace("0.tar", "successes") if "stats" in name else content)
    assert known_sizes([path]) is None and known_samples([path]) is None
    assert not content.startswith("{") or "0_stats.json" in caplog.text or "null" in content
