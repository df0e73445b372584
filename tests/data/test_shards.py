"""Tar shards: written whole, read exactly, nothing lost in silence."""

import io
import logging
import os
import shutil
import subprocess
import sys
import tarfile

import fsspec
import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader

from mmkit.cli import main
from mmkit.config import ClipConfig, ConfigError, DataConfig, FilterRule, SourceConfig
from mmkit import storage
from mmkit.data import tar_files
from mmkit.data.example import BadRecord, Example, ImageRef, Turn
from mmkit.data.images import open_image
from mmkit.data.loader import loader
from mmkit.data.mixture import Mixture
from mmkit.data.shards import ShardSource, damage, inspect, open_shards, unique_expected
from mmkit.data.tar_files import ShardError, expand, members, read_range
from mmkit.data.tar_index import index_of, keeps
from mmkit.data.tar_writer import ShardWriter, write_examples


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "FIRST_WAIT", 0.001)


def write(folder, n=30, per_shard=10, meta=None, start=0):
    with ShardWriter(str(folder), max_samples=per_shard) as writer:
        for i in range(start, start + n):
            fields = {"jpg": f"picture {i}".encode() * 20, "txt": f"caption {i}"}
            writer.write(f"{i:06d}", fields | ({"json": meta(i)} if meta else {}))
    return writer.sizes


def raw_tar(path, files):
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def source_config(path, **more):
    return SourceConfig(name="pairs", format="webdataset", path=str(path), **more)


def lenient(**more):
    return DataConfig(max_bad_share=1.0, **more)


# ---------------------------------------------------------------- writer


def test_a_thousand_written_samples_are_read_back_whole_by_us_and_by_webdataset(tmp_path):
    sizes = write(tmp_path, n=1000, per_shard=300)
    assert sizes == {"00000.tar": 300, "00001.tar": 300, "00002.tar": 300, "00003.tar": 100}
    source = open_shards(source_config(tmp_path))
    assert [source[i].caption for i in (0, 299, 300, 999)] == ["caption 0", "caption 299", "caption 300", "caption 999"]
    assert source[7].images[0].data == b"picture 7" * 20 and source[7].key == "000007"
    theirs = list(webdataset.WebDataset(f"{tmp_path}/{{00000..00003}}.tar", shardshuffle=False))
    assert len(theirs) == len(source) == 1000
    assert [(s["__key__"], s["txt"].decode()) for s in theirs] == [(source[i].key, source[i].caption) for i in range(1000)]


def test_a_writer_killed_midway_leaves_no_tar_under_a_final_name(tmp_path):
    code = (
        "import os; from mmkit.data.tar_writer import ShardWriter\n"
        f"with ShardWriter({str(tmp_path)!r}, max_samples=5) as w:\n"
        "    for i in range(8): w.write(str(i), {'jpg': b'x', 'txt': 'y'})\n"
        "    os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert [path.name for path in tmp_path.glob("*.tar")] == ["00000.tar"]
    assert len(open_shards(source_config(tmp_path))) == 5


def test_an_error_inside_the_writer_drops_the_unfinished_shard(tmp_path):
    with pytest.raises(KeyError), ShardWriter(str(tmp_path)) as writer:
        writer.write("0", {"jpg": b"x", "txt": "y"})
        raise KeyError
    assert not list(tmp_path.glob("*.tar"))


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_folder_with_shards_of_an_earlier_writing_is_refused(tmp_path, kind):
    folder = f"{tmp_path}/a" if kind == "local" else f"memory://{tmp_path.name}"
    write(folder, n=30)
    with pytest.raises(ValueError, match=".* holds 3 shards already, 00000.tar to 00002.tar, .* another folder or delete these"):
        write(folder, n=7)
    with ShardWriter(folder, first=3) as writer:
        writer.write("x", {"jpg": b"x", "txt": "y"})
    assert len(open_shards(source_config(folder + "/"))) == 31


@pytest.mark.parametrize("key", ["a.b", "", "folder.x/a"])
def test_keys_that_a_reader_would_cut_are_refused(tmp_path, key):
    with ShardWriter(str(tmp_path)) as writer, pytest.raises(ValueError, match="first dot"):
        writer.write(key, {"jpg": b"x", "txt": "y"})


def test_repeated_keys_and_odd_fields_are_refused(tmp_path):
    with ShardWriter(str(tmp_path)) as writer:
        writer.write("a", {"jpg": b"x", "txt": "y", "json": {"n": 1}})
        bad = (("a", {"txt": "y"}, "before"), ("b", {}, "no fields"), ("c", {"txt": 3}, "is int"), ("d", {".x": b""}, "extension"))
        for key, fields, message in bad:
            with pytest.raises(ValueError, match=message):
                writer.write(key, fields)


def test_a_shard_that_reads_back_differently_is_an_error_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("mmkit.data.tar_writer.members", lambda url: iter(()))
    with pytest.raises(OSError, match="differ from what was written"):
        write(tmp_path, n=2)
    assert not list(tmp_path.iterdir())


def test_any_source_of_pairs_becomes_shards_with_its_files_copied_byte_for_byte(tmp_path):
    jpeg, bmp = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (3, 2), (200, 0, 0)).save(jpeg, "jpeg")
    Image.new("RGB", (3, 2), (0, 200, 0)).save(bmp, "bmp")
    (tmp_path / "a.jpg").write_bytes(jpeg.getvalue())
    pictures = [ImageRef(str(tmp_path / "a.jpg")), ImageRef(jpeg.getvalue()), ImageRef(bmp.getvalue()), ImageRef(Image.new("RGB", (3, 2)))]
    turns = (Turn("user", "<image>"), Turn("assistant", "a caption"))
    examples = [Example(f"k.{i}", (picture,), turns, meta={"n": i}) for i, picture in enumerate(pictures)]
    assert write_examples(examples, str(tmp_path / "out"), max_samples=3) == {"00000.tar": 3, "00001.tar": 1}
    source = open_shards(source_config(tmp_path / "out"))
    assert source[0].images[0].data == source[1].images[0].data == jpeg.getvalue()
    assert open_image(source[2].images[0]).getpixel((0, 0)) == (0, 200, 0)
    assert [source[i].meta for i in range(4)] == [{"key": f"k.{i}", "n": i} for i in range(4)] and source[3].caption == "a caption"
    with pytest.raises(ValueError, match="'bad' has 0 pictures"):
        write_examples([Example("bad", (), turns)], str(tmp_path / "bad"))
    for data, wrong in ((str(tmp_path / "none.jpg"), "none.jpg"), (b"no picture", "of no known image format")):
        with pytest.raises(ValueError, match="sample 'gone': the picture cannot be read .*" + wrong):
            write_examples([Example("gone", (ImageRef(data),), turns)], str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="a.jpg/x cannot be made"):
        write_examples(examples, str(tmp_path / "a.jpg" / "x"))


def test_the_command_writes_shards_from_a_table_and_checks_them(tmp_path, capsys):
    for i in range(3):
        Image.new("RGB", (2, 2), (i, 0, 0)).save(tmp_path / f"{i}.png")
    (tmp_path / "pairs.csv").write_text("filepath\ttitle\n" + "".join(f"{i}.png\tpicture {i}\n" for i in range(3)))
    options = ["--from", str(tmp_path / "pairs.csv"), "--images", str(tmp_path), "--samples", "2"]
    assert main(["data", "shards", str(tmp_path / "out"), *options]) == 0
    text = capsys.readouterr().out
    assert "2 shards, 3 samples found, 3 usable" in text and "ready to train" in text
    assert main(["data", "shards", f"{tmp_path}/out/{{00000..00002}}.tar"]) == 2 and "training would stop" in capsys.readouterr().out
    assert [open_shards(source_config(tmp_path / "out"))[i].caption for i in range(3)] == ["picture 0", "picture 1", "picture 2"]


# ---------------------------------------------------------------- names


def test_brace_patterns_and_joined_sources(tmp_path):
    assert expand("d/{008..011}.tar") == ["d/008.tar", "d/009.tar", "d/010.tar", "d/011.tar"]
    assert expand("s3://b/{a,b}/{0..1}.tar") == ["s3://b/a/0.tar", "s3://b/a/1.tar", "s3://b/b/0.tar", "s3://b/b/1.tar"]
    assert expand("x.tar::y.tar") == ["x.tar", "y.tar"]
    theirs = webdataset.shardlists.expand_urls("d/{008..011}.tar::y/{a,b}.tar")
    assert expand("d/{008..011}.tar::y/{a,b}.tar") == theirs
    for name in ("10", "11", "20"):
        (tmp_path / f"[1]{name}.tar").touch()
    assert [path[-6:] for path in expand(f"{tmp_path}/*1*.tar")] == ["10.tar", "11.tar", "20.tar"]
    assert [path[-6:] for path in expand(f"{tmp_path}/*]{{2,1}}*.tar")] == ["20.tar", "10.tar", "11.tar"]
    (tmp_path / "empty").mkdir()
    for bad in ("{3..1}.tar", "{x}.tar", f"{tmp_path}/x*.tar", "a.tar::", "a.tar::a.tar", str(tmp_path / "empty")):
        with pytest.raises(ConfigError):
            expand(bad)


# ---------------------------------------------------------------- what cannot be used


def test_samples_without_a_caption_or_picture_are_counted(tmp_path):
    files = [(f"{i}.{ext}", b"x") for i in range(3) for ext in ("jpg", "txt")] + [("3.txt", b"x"), ("4.png", b"x")]
    raw_tar(tmp_path / "0.tar", files)
    source = open_shards(source_config(tmp_path / "0.tar"), lenient())
    assert len(source) == 3 and source.counts == {"samples": 5, "missing image": 1, "missing text": 1}


def test_a_truncated_and_an_absent_shard_are_named_and_the_rest_is_read(tmp_path):
    write(tmp_path, n=30)
    middle = tmp_path / "00001.tar"
    middle.write_bytes(middle.read_bytes()[: middle.stat().st_size // 2])
    source = open_shards(source_config(f"{tmp_path}/{{00000..00003}}.tar"), lenient())
    kept = len(source) - 20
    assert 3 <= kept <= 7
    assert {source[20 - 10 + i].key for i in range(kept)} == {f"{10 + i:06d}" for i in range(kept)}
    assert source.counts["truncated tar"] == 1 and source.counts["absent shard"] == 1
    text = source.summary()
    assert "00001.tar" in text and "00003.tar" in text and "00002.tar" not in text
    assert inspect(f"{tmp_path}/{{00000..00003}}.tar").summary().splitlines()[1:] == text.splitlines()[1:]
    with pytest.raises(ValueError, match="00003.tar"):
        open_shards(source_config(f"{tmp_path}/{{00000..00003}}.tar"))


def test_extensions_that_no_sample_has_are_an_error_naming_both_sides(tmp_path):
    raw_tar(tmp_path / "0.tar", [("a.input.jpg", b"x"), ("a.outputs.txt", b"x")])
    with pytest.raises(ValueError, match="input.jpg, outputs.txt; wanted: one of jpg, png, jpeg, webp and txt"):
        open_shards(source_config(tmp_path / "0.tar"), lenient())
    raw_tar(tmp_path / "1.tar", [("a.jpg", b"x"), ("a.cls", b"3")])
    with pytest.raises(ValueError, match="cls, jpg; wanted"):
        open_shards(source_config(tmp_path / "1.tar"), lenient())
    assert open_shards(source_config(tmp_path / "1.tar"), lenient(caption_key="cls"))[0].caption == "3"


def test_files_of_one_key_that_lie_apart_are_said_to(tmp_path):
    raw_tar(tmp_path / "0.tar", [(f"{i}.{ext}", b"x") for ext in ("jpg", "txt") for i in range(5)])
    with pytest.raises(ValueError, match="the files of one key do not stand side by side: 5 keys come again later"):
        open_shards(source_config(tmp_path / "0.tar"), lenient())


def test_duplicate_and_dotted_keys_are_counted(tmp_path):
    pair = lambda key: [(f"{key}.jpg", b"x"), (f"{key}.txt", key.encode())]
    raw_tar(tmp_path / "0.tar", [*pair("a"), *pair("b"), *pair("a"), ("c.v1.jpg", b"x"), ("c.v1.txt", b"x")])
    source = open_shards(source_config(tmp_path / "0.tar"), lenient())
    assert [source[i].key for i in range(len(source))] == ["a", "b", "a"]
    assert source.counts["duplicate key"] == 1 and source.counts["dotted key"] == 1
    assert (
        damage(source) == 1 / 4
    )  # of four samples found the dotted one is lost; a key that comes again costs none


def test_filters_remove_and_count_before_decoding(tmp_path):
    write(tmp_path, n=20, meta=lambda i: {"punsafe": i / 20, "NSFW": "UNLIKELY" if i % 2 else "NSFW"} if i != 3 else {})
    rules = (FilterRule(key="punsafe", op="<=", value=0.5), FilterRule(key="NSFW", op="in", value=["UNLIKELY"], if_missing="keep"))
    source = open_shards(source_config(tmp_path, filters=rules))
    assert [source[i].key for i in range(len(source))] == [f"{i:06d}" for i in (1, 5, 7, 9)]
    assert source.counts == {"samples": 20, "filter punsafe <= 0.5": 10, "filter NSFW in ['UNLIKELY']": 6}
    assert source[0].meta == {"punsafe": 0.05, "NSFW": "UNLIKELY"}
    assert "left out: 10 filter punsafe <= 0.5" in source.summary()


def test_broken_metadata_is_counted_and_a_rule_for_another_type_counts_as_missing(tmp_path):
    contents = {"a.jpg": b"x", "a.txt": b"x", "a.json": b"{", "b.jpg": b"x", "b.txt": b"x", "b.json": b'{"s": 1}'}
    raw_tar(tmp_path / "0.tar", contents.items())
    rule = FilterRule(key="s", op=">", value=0)
    assert open_shards(source_config(tmp_path / "0.tar", filters=(rule,)), lenient()).counts == {"samples": 2, "bad json": 1}
    assert not keeps(rule, {"s": "high"}) and keeps(FilterRule(key="s", op=">", value=0, if_missing="keep"), {"s": None})


def test_a_filter_that_removes_everything_is_named_with_the_keys_seen(tmp_path, caplog):
    write(tmp_path, n=5, meta=lambda i: {"punsafe": i / 20, "NSFW": "UNLIKELY"})
    misspelt = {"key": "punsave", "op": "<", "value": 0.5}
    with pytest.raises(ValueError, match="remove all 5 samples .5 by punsave < 0.5.; no sample has a value for punsave; .*: NSFW, punsafe"):
        open_shards(source_config(tmp_path, filters=(FilterRule(**misspelt),)))
    with pytest.raises(ValueError, match="remove all 5 samples .5 by punsafe > 0.5.; keys"):
        open_shards(source_config(tmp_path, filters=(FilterRule(key="punsafe", op=">", value=0.5),)))
    assert len(open_shards(source_config(tmp_path, filters=(FilterRule(**misspelt, if_missing="keep"),)))) == 5
    assert "no sample has a value for punsave" in caplog.text
    with pytest.raises(ConfigError, match="`in` needs a list"):
        open_shards(source_config(tmp_path, filters=(FilterRule(key="NSFW", op="in", value="UNLIKELY"),)))


@pytest.mark.parametrize(
    "op, wanted, value, kept",
    [
        ("<", "0.5", 0.3, True), ("<", "0.5", 0.7, False), ("<", 0.5, "0.3", True), ("<", "10", "9", True), (">", "b", "a", False),
        ("==", "0.1", 0.1, True), ("==", "007", "7", False), ("!=", 1, "1.0", False), ("in", ["0.1", "b"], 0.1, True),
        ("in", [1, 2], "2", True), ("not in", [1, 2], "3", True), ("in", ["12345678901234567890"], 12345678901234567891, False),
        ("<", 0.5, "low", False), ("<", [1], 0, False),
    ],
)  # fmt: skip
def test_rules_compare_numbers_that_are_text_as_numbers(op, wanted, value, kept):
    assert keeps(FilterRule(key="s", op=op, value=wanted), {"s": value}) == kept


# ---------------------------------------------------------------- order


def test_an_epoch_shows_every_sample_once_and_differs_by_epoch(tmp_path):
    write(tmp_path, n=30)
    source = open_shards(source_config(tmp_path))
    orders = [source.draw_order(np.random.default_rng([0, epoch]), 30).tolist() for epoch in range(2)]
    assert all(sorted(order) == list(range(30)) for order in orders) and orders[0] != orders[1]
    assert orders[0] == source.draw_order(np.random.default_rng([0, 0]), 30).tolist()
    mixture = Mixture([source_config(tmp_path)], [source])
    assert sorted(mixture.order(0, 0).members.tolist()) == list(range(30))


class Tokens:
    def __call__(self, texts):
        return torch.tensor([[len(text)] for text in texts])


def shard_loader(folder, rank, world, workers, state=None):
    config = source_config(folder)
    mixture = Mixture([config], [open_shards(config)])
    data, model = DataConfig(workers=workers), ClipConfig(name="ViT-B-32")
    picture = lambda image: torch.zeros(3, 1, 1)
    return loader(data, model, Tokens(), [picture], train=True, seed=3, rank=rank, world=world, device_batch=5, state=state, source=mixture)


@pytest.mark.parametrize("later", [(2, 2), (1, 3), (4, 0)])
def test_an_epoch_of_shards_is_read_exactly_once_across_a_stop(tmp_path, later):
    """6 shards of 10 on 2 processes x 2 workers, stopped after 20 samples, resumed on ``later`` processes and workers."""
    out = io.BytesIO()
    Image.new("RGB", (2, 2)).save(out, "png")
    with ShardWriter(str(tmp_path), max_samples=10) as writer:
        for i in range(60):
            writer.write(f"{i:03d}", {"png": out.getvalue(), "txt": "x"})
    seen, states = [], []
    for rank in range(2):
        with shard_loader(tmp_path, rank, 2, 2) as first:
            for _ in range(2):
                seen += next(first).keys
            states.append(first.state_dict())
    assert len(seen) == 20 and states[0] == states[1]
    world, workers = later
    for rank in range(world):
        with shard_loader(tmp_path, rank, world, workers, states[0]) as rest:
            for _ in range(40 // (5 * world)):
                seen += next(rest).keys
    assert sorted(seen) == [f"{i:03d}" for i in range(60)]


def test_neighbours_of_an_epoch_lie_in_few_shards(tmp_path, monkeypatch):
    write(tmp_path, n=60, per_shard=10)
    monkeypatch.setattr("mmkit.data.shards.SHUFFLE", 20)
    order = open_shards(source_config(tmp_path)).draw_order(np.random.default_rng(0), 60)
    assert all(len({i // 10 for i in order[start : start + 20]}) == 2 for start in range(0, 60, 20))


def test_resampling_repeats_shards_and_says_how_many_samples_to_expect(tmp_path):
    write(tmp_path, n=30)
    source = open_shards(source_config(tmp_path), DataConfig(resampled=True))
    assert unique_expected(source) == 21 and "shows 21 different ones" in source.summary()
    drawn = [len(set(source.draw_order(np.random.default_rng(seed), 30).tolist())) for seed in range(300)]
    assert np.mean(drawn) == pytest.approx(21.1, abs=0.8)
    assert all(len(source.draw_order(np.random.default_rng(seed), 45)) == 45 for seed in range(20))


# ---------------------------------------------------------------- remote


@pytest.fixture
def bucket():
    system = fsspec.filesystem("memory")
    yield "memory://shards"
    system.rm("/shards", recursive=True)


def test_shards_are_written_to_and_read_from_any_fsspec_url(bucket):
    assert write(bucket, n=25) == {"00000.tar": 10, "00001.tar": 10, "00002.tar": 5}
    source = open_shards(source_config(bucket + "/{00000..00002}.tar"))
    assert [source[i].caption for i in range(25)] == [f"caption {i}" for i in range(25)]
    assert source[3].images[0].data == b"picture 3" * 20
    assert expand(bucket + "/") == [f"memory:///shards/0000{i}.tar" for i in range(3)]


class Flaky:
    """Fails the first ``n`` calls."""

    def __init__(self, n, action):
        self.n, self.action, self.calls = n, action, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls <= self.n:
            raise ConnectionResetError("reset by peer")
        return self.action(*args, **kwargs)


def test_a_dropped_connection_is_tried_again_then_reported_for_the_shard(bucket, monkeypatch, caplog):
    write(bucket, n=5)
    source = open_shards(source_config(bucket + "/00000.tar"))
    real = tar_files._fetch
    monkeypatch.setattr(tar_files, "_fetch", Flaky(3, real))
    with caplog.at_level(logging.WARNING):
        assert source[0].caption == "caption 0"
    assert caplog.text.count("reset by peer; attempt") == 3
    monkeypatch.setattr(tar_files, "_fetch", Flaky(99, real))
    with pytest.raises(BadRecord, match="00000.tar: still failing after 5 attempts") as caught:
        source[1]
    assert caught.value.reason == "unreadable shard"


def test_waits_grow_between_attempts(monkeypatch):
    waits = []
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    with pytest.raises(storage.Unreachable, match="after 5 attempts"):
        storage.retried(Flaky(99, None), "u", first_wait=1.0)
    assert len(waits) == 4 and all(2**i <= wait <= 1.5 * 2**i for i, wait in enumerate(waits))


def test_a_read_past_the_end_is_a_truncated_shard(bucket, tmp_path):
    write(bucket, n=1)
    write(tmp_path, n=1)
    for url in (f"{bucket}/00000.tar", str(tmp_path / "00000.tar")):
        with pytest.raises(ShardError, match="cut short"):
            read_range(url, 10**7, 10)


def test_a_pipe_is_fetched_once_and_its_failure_is_reported(tmp_path):
    write(tmp_path / "a", n=3)
    counter = tmp_path / "count"
    source = open_shards(source_config(f"pipe:echo x >> {counter}; cat {tmp_path}/a/00000.tar"))
    assert [source[i].caption for i in range(3)] == ["caption 0", "caption 1", "caption 2"]
    assert counter.read_text() == "x\n"
    assert os.listdir(tmp_path / "cache" / "shards") == []  # held open without a name, gone with the process
    bad = index_of("pipe:echo no such bucket >&2; exit 3")
    assert bad.counts == {"absent shard": 1} and "no such bucket" in bad.message


def test_a_pipe_opened_anew_gives_what_its_command_gives_now(tmp_path):
    write(tmp_path / "a", n=3)
    write(tmp_path / "b", n=4, start=10)
    path = f"pipe:cat {tmp_path}/now.tar"
    for folder, keys in (("a", 3), ("b", 4)):
        shutil.copy(tmp_path / folder / "00000.tar", tmp_path / "now.tar")
        source = open_shards(source_config(path))
        assert len(source) == keys and len(list(DataLoader(Captions(source), batch_size=None, num_workers=1))) == keys


class Captions:
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, i):
        return self.source[i].caption


def test_the_index_is_kept_and_made_anew_when_the_shard_changes(tmp_path, monkeypatch):
    write(tmp_path, n=3)
    path = str(tmp_path / "00000.tar")
    assert len(index_of(path)) == 3
    with monkeypatch.context() as patch:
        patch.setattr("mmkit.data.tar_index.members", None)
        assert len(index_of(path)) == 3
    os.remove(path)
    write(tmp_path, n=4)
    assert len(index_of(path)) == 4


def test_members_of_an_empty_file_are_an_error(tmp_path):
    (tmp_path / "0.tar").write_bytes(b"")
    with pytest.raises(ShardError, match="0.tar"):
        list(members(str(tmp_path / "0.tar")))


def test_sources_say_when_they_changed(tmp_path):
    write(tmp_path, n=30)
    source = open_shards(source_config(tmp_path))
    fewer = ShardSource("pairs", source.indexes[:2])
    assert source.fingerprint != fewer.fingerprint == ShardSource("pairs", source.indexes[:2]).fingerprint
    with pytest.raises(IndexError):
        source[30]
