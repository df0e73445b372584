"""A folder on a local disk or behind any fsspec URL (s3://, gs://, memory://), with what runs, exports and results need of it.

The one place that writes to either. A file appears whole or not at all: locally it is written under another name, flushed and
renamed; an object store shows an object only when it is complete. Object stores have no rename of folders either: there a folder
counts as complete once its last file is there, and the caller writes that one last. Dropped connections are tried again with
growing waits. Where a bucket is and who may use it is fsspec's own configuration (AWS_ENDPOINT_URL, FSSPEC_S3_KEY, GOOGLE_APPLICATION_CREDENTIALS, ...).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import random
import shutil
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from mmkit.cache import atomic_folder, cache_root
from mmkit.config import ConfigError
from mmkit.errors import Unusable, UserError, writing

log = logging.getLogger(__name__)

NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)  # of a disk without second names of a file
ATTEMPTS = 5
FIRST_WAIT = 0.5  # seconds before the second attempt; doubled each time, with up to half as much at random
CONNECTION_ERRORS = {
    "aiohttp": ("ClientError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
}
MARKS = ("manifest.json", "config.json")  # in a checkpoint or export on an object store: all its other files are there
EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}  # protocol -> the extra that installs its package


class Unreachable(UserError, OSError):
    """A store that did not answer after all attempts."""


def is_remote(path: str | os.PathLike) -> bool:
    """Whether ``path`` is a URL other than ``file://``."""
    return "://" in str(path) and not str(path).startswith("file://")


def transient_errors() -> tuple[type[BaseException], ...]:
    """Errors of a connection, in the libraries that are loaded."""
    kinds: list[type[BaseException]] = [OSError, EOFError, TimeoutError]
    for module, names in CONNECTION_ERRORS.items():
        if module in sys.modules:
            kinds.extend(getattr(sys.modules[module], name) for name in names)
    return tuple(kinds)


def file_system(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """fsspec's file system for ``url`` and the path in it; ConfigError where there is none or its package is absent."""
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(url.split("://")[0])
        raise ConfigError(f"{url}: {error}" + (f"; pip install 'mmkit[{extra}]'" if extra else "")) from error


def retried(action: Callable[[], Any], what: str, attempts: int = ATTEMPTS, first_wait: float | None = None) -> Any:
    """``action()``, tried again with growing waits after a dropped connection; `Unreachable` when it keeps failing.

    FileNotFoundError and PermissionError are answers, not failures: they are raised at once.
    """
    wait = FIRST_WAIT if first_wait is None else first_wait
    for attempt in range(1, attempts + 1):
        try:
            return action()
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            raise
        except transient_errors() as error:
            if attempt == attempts:
                times = f"{attempts} attempt{'s' * (attempts > 1)}"
                raise Unreachable(f"still failing after {times} ({type(error).__name__}: {error})") from error
            pause = wait * 2 ** (attempt - 1) * (1 + random.random() / 2)
            log.warning("%s: %s: %s; attempt %d of %d in %.1f s", what, type(error).__name__, error, attempt + 1, attempts, pause)
            time.sleep(pause)
    raise AssertionError("unreachable: the last attempt returns or raises")


class Store:
    """Files below ``root``; names inside are relative with forward slashes."""

    def __init__(self, root: str | os.PathLike):
        self.remote = is_remote(root)
        self.root = str(root).rstrip("/") if self.remote else str(Path(str(root).removeprefix("file://")).absolute())
        self.fs, self.base = file_system(self.root)

    def path(self, name: str = "") -> str:
        """The path or URL of ``name`` for people and for other libraries."""
        return f"{self.root}/{name}" if name else self.root

    def write(self, name: str, data: bytes) -> None:
        """Writes one file, whole or not at all, and the folders above it; on a local disk it is flushed before this returns."""
        place = self._inner(name)
        if self.remote:
            self._tried(lambda: self.fs.pipe_file(place, data), name)
            return
        part = f"{place}.part"
        with writing(self.path(name), "root=FOLDER"):
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            try:
                with self.fs.open(part, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, place)
            finally:
                Path(part).unlink(missing_ok=True)

    def create(self, name: str, data: bytes) -> None:
        """Writes one small file, whole, where there is none, and leaves one that is there; of several who try
        at once one succeeds (but on stores that cannot promise it, so read it back)."""
        place = self._inner(name)
        if self.remote:
            try:
                self.fs.pipe_file(place, data, mode="create")
            except FileExistsError:
                return
            except transient_errors():  # a dropped connection, or a store that has no such request
                if self.size(name) is None:
                    self.write(name, data)
            return
        with writing(self.path(name), "root=FOLDER"):
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            part = Path(f"{place}.{uuid.uuid4().hex}.part")
            try:
                part.write_bytes(data)
                os.link(part, place)  # a second name appears at once and whole, or not at all
            except FileExistsError:
                return
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                with contextlib.suppress(FileExistsError), open(place, "xb") as file:
                    file.write(data)
            finally:
                part.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        """Removes a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._tried(lambda: self.fs.rm_file(self._inner(name)), name)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """The bytes of a file, or ``length`` of them from ``start``."""
        if length == 0:
            return b""
        if self.remote:
            part = {} if not start and length is None else {"start": start, "end": None if length is None else start + length}
            return self._tried(lambda: self.fs.cat_file(self._inner(name), **part), name)
        with self._tried(lambda: self.fs.open(self._inner(name), "rb"), name) as file:
            file.seek(start)
            return file.read() if length is None else file.read(length)

    def size(self, name: str) -> int | None:
        """Bytes of a file, None where there is none."""
        try:
            self.fs.invalidate_cache()
            return self._tried(lambda: self.fs.size(self._inner(name)), name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def folders(self) -> list[str]:
        """Names of the folders directly below the root, sorted; none where the root does not exist."""
        return self._names("directory")

    def files(self) -> list[str]:
        """Names of the files directly below the root, as `folders`."""
        return self._names("file")

    def _names(self, kind: str) -> list[str]:
        try:
            self.fs.invalidate_cache()
            entries = self._tried(lambda: self.fs.ls(self.base, detail=True), "")
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == kind)

    def make(self, name: str = "") -> None:
        """Creates a folder and those above it."""
        if self.remote:
            self._tried(lambda: self.fs.makedirs(self._inner(name), exist_ok=True), name)
            return
        with writing(self.path(name), "root=FOLDER"):
            self.fs.makedirs(self._inner(name), exist_ok=True)

    def upload(self, folder: Path, name: str, last: str) -> None:
        """Puts a local folder in the place of the folder ``name``; its file ``last``, which says that it is complete, goes last."""
        self.remove(name)
        files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.relative_to(folder).as_posix() == last)
        for path in files:
            target = f"{name}/{path.relative_to(folder).as_posix()}"
            self._tried(lambda path=path, target=target: self.fs.put_file(str(path), self._inner(target)), target)

    def remove(self, name: str) -> None:
        """Removes a folder, if it is there. It first loses its name, on an object store its mark, so that no half of it is ever taken for
        the whole."""
        if self.remote:
            for mark in MARKS:  # first what says that it is complete
                if self.size(f"{name}/{mark}") is not None:
                    self._tried(lambda mark=mark: self.fs.rm_file(self._inner(f"{name}/{mark}")), name)
            with contextlib.suppress(FileNotFoundError):
                self.fs.invalidate_cache()
                self._tried(lambda: self.fs.rm(self._inner(name), recursive=True), name)
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

    def move(self, name: str, to: str) -> None:
        """Gives a folder or file another name; on an object store object by object, copied there without passing through here, and removed
        only when all are there."""
        if not self.remote:
            with writing(self.path(to), "root=FOLDER"):
                Path(self.base, name).rename(Path(self.base, to))
            return
        source, target = self._inner(name), self._inner(to)
        self.fs.invalidate_cache()
        for file in sorted(self._tried(lambda: self.fs.find(source), name), key=lambda file: file.rsplit("/", 1)[-1] in MARKS):
            self._tried(lambda file=file: self.fs.cp_file(file, target + file.removeprefix(source)), file)
        self.remove(name)

    def _inner(self, name: str) -> str:
        return f"{self.base}/{name}" if name else self.base

    def _tried(self, action: Callable[[], Any], name: str) -> Any:
        if self.remote:
            return retried(action, self.path(name))
        try:
            return action()
        except PermissionError as error:
            raise Unusable(f"{self.path(name)} cannot be read: {error.strerror}; change its owner or mode, or use another folder") from error


def fetched(source: str | os.PathLike) -> Path:
    """A local copy of a remote folder or file, kept in the cache until the remote one changes; a local path as it is.

    FileNotFoundError where there is nothing.
    """
    if not is_remote(source):
        return Path(str(source).removeprefix("file://"))
    store = Store(source)
    store.fs.invalidate_cache()
    found = retried(lambda: store.fs.find(store.base, detail=True), store.root)
    if not found:
        raise FileNotFoundError(f"{source} holds no files")
    marks = {name: str(info.get("ETag") or info.get("mtime") or info.get("created")) for name, info in found.items()}
    facts = sorted((name, info["size"], marks[name]) for name, info in found.items())
    place = cache_root() / "remote" / hashlib.sha256(store.root.encode()).hexdigest()[:16]
    version = place / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    if not version.is_dir():
        with atomic_folder(version) as work:
            for name in found:
                target = work / (name.removeprefix(store.base).lstrip("/") or Path(name).name)
                target.parent.mkdir(parents=True, exist_ok=True)
                retried(lambda name=name, target=target: store.fs.get_file(name, str(target)), f"{store.root}: {name}")
        for other in place.iterdir():
            if other.name != version.name and not other.name.startswith("."):  # an earlier content of the same URL
                shutil.rmtree(other, ignore_errors=True)
    return version / Path(store.base).name if list(found) == [store.base] else version


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
