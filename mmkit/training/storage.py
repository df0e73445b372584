"""A folder on a local disk or behind any fsspec URL, with what checkpoints and run records need of it.

Locally a folder is written under another name, flushed and renamed. Object stores have no rename: there a folder counts as
complete once its last file is there, and the caller writes that one last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import fsspec


def is_remote(path: str | os.PathLike) -> bool:
    """Whether ``path`` is a URL other than ``file://``."""
    return "://" in str(path) and not str(path).startswith("file://")


class Store:
    """Files below ``root``; names inside are relative with forward slashes."""

    def __init__(self, root: str | os.PathLike):
        self.remote = is_remote(root)
        self.root = str(root).rstrip("/") if self.remote else str(Path(str(root).removeprefix("file://")).absolute())
        self.fs, self.base = fsspec.core.url_to_fs(self.root)

    def path(self, name: str = "") -> str:
        """The path or URL of ``name`` for people and for other libraries."""
        return f"{self.root}/{name}" if name else self.root

    def write(self, name: str, data: bytes) -> None:
        """Writes one file whole; on a local disk it is flushed before this returns."""
        with self.fs.open(self._inner(name), "wb") as file:
            file.write(data)
            if not self.remote:
                file.flush()
                os.fsync(file.fileno())

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """The bytes of a file, or ``length`` of them from ``start``."""
        with self.fs.open(self._inner(name), "rb") as file:
            file.seek(start)
            return file.read() if length is None else file.read(length)

    def size(self, name: str) -> int | None:
        """Bytes of a file, None where there is none."""
        try:
            self.fs.invalidate_cache()
            return self.fs.size(self._inner(name))
        except FileNotFoundError:
            return None

    def folders(self) -> list[str]:
        """Names of the folders directly below the root, sorted; none where the root does not exist."""
        try:
            self.fs.invalidate_cache()
            entries = self.fs.ls(self.base, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory")

    def make(self, name: str = "") -> None:
        """Creates a folder and those above it."""
        self.fs.makedirs(self._inner(name), exist_ok=True)

    def remove(self, name: str) -> None:
        """Removes a folder, if it is there. Locally it first loses its name, so that no half of it is ever taken for the whole."""
        if self.remote:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm(self._inner(name), recursive=True)
            return
        target = Path(self.base, name)
        if target.is_dir():
            gone = target if target.suffix == ".tmp" else target.with_name(f"{target.name}.gone.tmp")
            with contextlib.suppress(OSError):
                target.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def rename(self, name: str, to: str) -> None:
        """Gives a local folder its final name, durably; replaces a folder of that name."""
        self.remove(to)
        folder, target = Path(self.base, name), Path(self.base, to)
        _flush_folder(folder)
        folder.rename(target)
        _flush_folder(target.parent)

    def _inner(self, name: str) -> str:
        return f"{self.base}/{name}" if name else self.base


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
