"""Files and folders of the cache appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmkit.cache import atomic_folder, atomic_write, cache_root
from mmkit.errors import Unusable


def test_the_cache_root_is_the_variable_or_the_home_folder(monkeypatch):
    monkeypatch.setenv("MMKIT_CACHE", "/somewhere/else")
    assert cache_root() == Path("/somewhere/else")
    monkeypatch.delenv("MMKIT_CACHE")
    assert cache_root() == Path.home() / ".cache" / "mmkit"


def test_an_interrupted_folder_leaves_the_old_one_and_nothing_else(tmp_path):
    with atomic_folder(tmp_path / "a" / "pack") as work:
        (work / "x").write_text("old")
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "a" / "pack") as work:
        (work / "x").write_text("half")
        raise RuntimeError
    assert (tmp_path / "a" / "pack" / "x").read_text() == "old"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["pack"]


def test_a_finished_folder_replaces_the_old_one(tmp_path):
    for text in ("first", "second"):
        with atomic_folder(tmp_path / "pack") as work:
            (work / text).write_text(text)
    assert [path.name for path in (tmp_path / "pack").iterdir()] == ["second"]
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]


def test_an_interrupted_file_leaves_the_old_one(tmp_path):
    with atomic_write(tmp_path / "file") as work:
        work.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "file") as work:
        work.write_text("half")
        raise RuntimeError
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_cache_that_cannot_be_made_is_an_error_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Unusable, match="a file stands in the place of a folder; .*MMKIT_CACHE"), atomic_folder(tmp_path / "file" / "pack"):
        pass
