"""Where prepared files are kept, and how they get there whole or not at all.

Everything mmkit derives once and reads many times (offline weights, data packs, encoder features) lies below `cache_root`.
A file or folder is written under a temporary name beside its target and renamed when complete, so a killed process or two
processes at once never leave half a folder under the final name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mmkit.errors import writing


def cache_root() -> Path:
    """The cache folder: ``$MMKIT_CACHE``, else ``~/.cache/mmkit``. Not created here."""
    return Path(os.environ.get("MMKIT_CACHE") or Path.home() / ".cache" / "mmkit").expanduser()


@contextlib.contextmanager
def alone(what: str | os.PathLike) -> Iterator[None]:
    """One process of this machine at a time for each ``what``; the lock ends with the process that holds it."""
    folder = cache_root() / "locks"
    with writing(folder, "MMKIT_CACHE=FOLDER"):
        folder.mkdir(parents=True, exist_ok=True)
    with (folder / hashlib.sha256(str(what).encode()).hexdigest()[:24]).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Yields an empty temporary folder that becomes ``path`` when the block ends without an error.

    An existing ``path`` is replaced. Where another process finished the same folder meanwhile, its copy is replaced too:
    both hold the same content by construction. After an error nothing is left behind.
    """
    path = Path(path)
    with writing(path, "MMKIT_CACHE=FOLDER"):
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    work.chmod(0o755)  # mkdtemp gives 0700; a cache may be shared
    try:
        yield work
        _replace_folder(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _replace_folder(work: Path, path: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    try:
        with contextlib.suppress(FileNotFoundError):
            path.rename(old / "old")
        try:
            work.rename(path)
        except OSError:
            if not path.is_dir():  # else another process renamed its equal copy between our two renames
                raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary file beside ``path``, flushed to disk and renamed onto ``path`` when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    work = Path(name)
    work.chmod(0o644)  # mkstemp gives 0600
    try:
        yield work
        with work.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)
