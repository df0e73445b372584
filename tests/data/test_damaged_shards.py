"""Damage inside a shard, where tarfile sees the end of the archive, and damage of what the cache keeps."""

import gzip
import io
import subprocess
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from mmkit.data import tar_files
from mmkit.data.shards import damage as damage_share
from mmkit.data.shards import inspect, open_shards
from mmkit.data.tar_files import members
from mmkit.data.tar_index import index_of, opened_index
from tests.data.test_shards import own_cache, raw_tar, source_config, write  # noqa: F401


def flip(data, at):
    return data[: at + 150] + bytes([data[at + 150] ^ 1]) + data[at + 151 :]


@pytest.mark.parametrize(
    "damage, wrong",
    [
        (flip, "no header at byte"),
        (lambda data, at: data[:at] + b"\x7f" * 512 + data[at + 512 :], "no header at byte"),
        (lambda data, at: data[:at] + bytes(512) + data[at + 512 :], "no header at byte"),
        (lambda data, at: data[:at] + bytes(len(data) - at), "zeros instead of data from byte"),
        (lambda data, at: data + b"<html>" * 100, "no header at byte"),
        (lambda data, at: gzip.compress(data), "compressed by gzip"),
        (lambda data, at: b"<html>\n not found" * 100, "text, no tar; it begins '<html>"),
        (lambda data, at: bytes(len(data)), "zeros instead of data from byte 0"),
    ],
)
def test_a_tar_that_ends_before_its_end_mark_is_damaged_indexed_and_streamed(tmp_path, damage, wrong):
    """tarfile takes any bad header behind the first for the end of the archive."""
    path = raw_tar(tmp_path / "0.tar", [(f"{i:02d}.{ext}", b"x" * 700) for i in range(50) for ext in ("jpg", "txt")])
    with tarfile.open(path) as tar:
        at = tar.getmembers()[40].offset
    data = (tmp_path / "0.tar").read_bytes()
    (tmp_path / "0.tar").write_bytes(damage(data, at))
    kept = 0 if "it " in wrong or "compressed" in wrong or "byte 0" in wrong else 19  # the twentieth may lack a file
    kept = 50 if damage(data, at).startswith(data) else kept
    with closing(opened_index(path)) as streamed:
        for index in (index_of(path), streamed):
            assert wrong in index.message and len(index) in (kept, kept - 1) and index.counts["damaged tar"] == 1
    with pytest.raises(ValueError, match="0.tar: .*" + wrong):
        open_shards(source_config(path))
    assert damage_share(inspect(path)) == pytest.approx({0: 1, 19: 0.62, 50: 1 / 51}[kept], abs=0.03)


@pytest.mark.parametrize("blocking", [20, 64, 128, 512, 2048])
def test_large_records_of_tar_are_no_damage_but_zeros_in_the_place_of_data_are(tmp_path, blocking):
    path = raw_tar(tmp_path / "0.tar", [(f"{i:02d}.{ext}", b"x" * 700) for i in range(40) for ext in ("jpg", "txt")])
    (tmp_path / "files").mkdir()
    subprocess.run(["tar", "xf", path, "-C", tmp_path / "files"], check=True)
    subprocess.run(["tar", "--sort=name", "-b", str(blocking), "-cf", path, "-C", tmp_path / "files", "."], check=True)
    assert len(index_of(path)) == 40 and not index_of(path).message
    data = (tmp_path / "0.tar").read_bytes()
    (tmp_path / "0.tar").write_bytes(data[:20_480] + bytes(len(data) - 20_480 + (1 << 21)))
    assert "zeros instead of data" in index_of(path).message


def test_archives_one_behind_the_other_are_read_whole(tmp_path):
    pairs = lambda first: [(f"{i:02d}.{ext}", b"x") for i in range(first, first + 10) for ext in ("jpg", "txt")]
    parts = [raw_tar(tmp_path / f"{first}.tar", pairs(first)) for first in (0, 10, 20)]
    joined = tmp_path / "joined.tar"
    joined.write_bytes(b"".join(Path(part).read_bytes() for part in parts))
    index = index_of(str(joined))
    assert [index.key(i) for i in range(30)] == [f"{i:02d}" for i in range(30)] and not index.message


def test_only_the_end_of_a_large_shard_is_read_for_its_end_mark(tmp_path, monkeypatch):
    path, read = raw_tar(tmp_path / "0.tar", [("0.jpg", b"x" * 4_000_000), ("0.txt", b"x")]), []

    class Counted(io.FileIO):
        def read(self, n=-1):
            read.append(n)
            return super().read(n)

    monkeypatch.setattr(tar_files, "_reader", Counted)
    assert len(list(members(path))) == 2 and sum(read) < 50_000


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: b"x" * 900])
def test_a_damaged_index_in_the_cache_is_made_anew(tmp_path, damage):
    write(tmp_path, n=3)
    path = str(tmp_path / "00000.tar")
    index_of(path)
    kept = next((tmp_path / "cache" / "shards").glob("*.npz"))
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert len(index_of(path)) == 3 and len(kept.read_bytes()) == len(whole)
