"""Tar shards as files: names written with braces, local or behind a URL, read with retries.

``{00000..00012}`` counts, ``{a,b}`` lists, ``*`` matches, ``::`` joins sources, ``pipe:COMMAND`` is a program whose output is the tar
(copied to a file without a name: a position in a pipe cannot be read). Everything else goes through fsspec: s3://, gs://, https://.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkit import storage
from mmkit.cache import cache_root
from mmkit.config import ConfigError
from mmkit.errors import InputError
from mmkit.storage import is_remote

BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"^(\d+)\.\.(\d+)$")
COPIED = 1 << 24  # bytes of a remote shard fetched at a time
PADDING = 2 * tarfile.RECORDSIZE  # more zeros than this at the end of a tar pad no usual record: there the download stopped
RECORDS = tuple(tarfile.BLOCKSIZE << power for power in range(6, 12))  # larger ones that tar's -b makes, to 1 MiB
_BAD_NUMBERS = (ValueError, LookupError, OverflowError, RecursionError)  # tarfile, of damaged headers
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}


class ShardError(InputError):
    """A shard that cannot be read; ``reason`` is the counter it belongs to, ``unread`` the share of its bytes behind the damage."""

    def __init__(self, url: str, reason: str, message: str, unread: float = 0.0):
        super().__init__(f"shard {url}: {message}")
        self.url, self.reason, self.message, self.unread = url, reason, message, unread

    def __reduce__(self):
        return ShardError, (self.url, self.reason, self.message, self.unread)


@dataclass(frozen=True)
class TarMember:
    """One file inside a tar."""

    name: str  # bytes that are no UTF-8 written as \\xe9
    offset: int  # of its content
    size: int  # -1: its content is not there as it is (a link to another file, a sparse file, a device)
    content: bytes | None = None  # where it was asked for


def expand(path: str) -> list[str]:
    """The shards a path stands for, in order: a pattern of braces or ``*``, a folder (its ``*.tar``; a URL that ends with / is one),
    one file, or several of these joined by ``::``."""
    urls = [url for part in path.split("::") for url in _expand_one(part.strip())]
    if len(set(urls)) < len(urls):
        raise ConfigError(f"{path}: shard {max(urls, key=urls.count)} is listed more than once")
    return urls


def _expand_one(part: str) -> list[str]:
    if not part:
        raise ConfigError("an empty source between `::`; remove one of the separators")
    if not part.startswith("pipe:") and (part.endswith("/") if is_remote(part) else Path(part).is_dir()):
        folder = part.rstrip("/")
        return _matching(f"{folder if is_remote(part) else glob.escape(folder)}/*.tar")
    pieces = BRACES.split(part)  # text, inside, text, inside, ..., text
    choices = [[piece] if i % 2 == 0 else _choices(piece, part) for i, piece in enumerate(pieces)]
    urls = ["".join(combination) for combination in itertools.product(*choices)]
    return [found for url in urls for found in ([url] if url.startswith("pipe:") or "*" not in url else _matching(url))]


def _matching(pattern: str) -> list[str]:
    if is_remote(pattern):
        system, inner = storage.file_system(pattern)
        found = [system.unstrip_protocol(name) for name in retried(lambda: system.glob(inner), pattern)]
    else:
        found = glob.glob(pattern.removeprefix("file://"))
    if not found:
        whole = pattern if is_remote(pattern) else os.path.abspath(pattern.removeprefix("file://"))
        raise ConfigError(
            f"no file matches {whole}; give a folder of .tar files, one file or a pattern such as "
            "{00000..00012}.tar"
        )
    return sorted(found)


def _choices(inside: str, part: str) -> list[str]:
    if found := RANGE.match(inside):
        first, last = found.groups()
        if int(last) < int(first):
            raise ConfigError(f"{part}: range {{{inside}}} counts backwards")
        return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    if "," in inside:
        return inside.split(",")
    raise ConfigError(f"{part}: {{{inside}}} is neither a range such as 00000..00012 nor a list with commas")


# ---------------------------------------------------------------- reading


def local_path(url: str) -> str:
    """The path of a shard that lies on a disk."""
    return url.removeprefix("file://")


def _run(url: str, file) -> None:
    done = subprocess.run(url.removeprefix("pipe:"), shell=True, stdout=file, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        last = done.stderr.decode("utf8", "replace").strip().splitlines()[-1:]
        raise ShardError(url, "absent shard", f"the command ended with {done.returncode}: {' '.join(last)}")


def opened(url: str) -> int:
    """A descriptor of the whole shard, to be closed by the caller: the file itself, or a copy without a name, which goes with its descriptor.

    Remote shards and pipes are fetched once, from the beginning to the end. ShardError where there is no such shard or it cannot be read.
    """
    if not is_remote(url) and not url.startswith("pipe:"):
        try:
            return os.open(local_path(url), os.O_RDONLY)
        except OSError as error:
            raise ShardError(url, "absent shard", f"it cannot be opened ({error.strerror})") from None
    folder = cache_root() / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        if url.startswith("pipe:"):
            _run(url, file)
        else:
            size = retried(lambda: _info(url)["size"], url)
            for start in range(0, size, COPIED):
                file.write(read_range(url, start, min(COPIED, size - start)))
            file.flush()
        return os.dup(file.fileno())


def stamp(url: str) -> str:
    """What changes when the shard does: size and modification time or the store's tag. ShardError where there is no such shard."""
    if not is_remote(url):
        try:
            facts = os.stat(local_path(url))
        except FileNotFoundError:
            raise ShardError(url, "absent shard", "there is no such file") from None
        return f"{facts.st_size}-{facts.st_mtime_ns}"
    info = retried(lambda: _info(url), url)
    return f"{info['size']}-{info.get('ETag') or info.get('mtime') or info.get('last_modified') or info.get('created') or ''}"


def _info(url: str) -> dict[str, Any]:
    system, inner = storage.file_system(url)
    system.invalidate_cache()
    return system.info(inner)


def read_range(url: str, offset: int, size: int, attempts: int = storage.ATTEMPTS) -> bytes:
    """``size`` bytes of a shard from ``offset``; remote reads are retried. ShardError where they end early."""
    data = retried(lambda: _fetch(url, offset, size), url, attempts) if is_remote(url) else _read_local(local_path(url), offset, size)
    if len(data) != size:
        raise ShardError(url, "truncated tar", f"{len(data)} of {size} bytes at {offset}; the shard has changed or is cut short")
    return data


def _fetch(url: str, offset: int, size: int) -> bytes:
    system, inner = storage.file_system(url)
    data = system.cat_file(inner, start=offset, end=offset + size)
    if len(data) < size and system.size(inner) >= offset + size:
        raise OSError(f"connection closed after {len(data)} of {size} bytes")
    return data


def _read_local(path: str, offset: int, size: int) -> bytes:
    file = os.open(path, os.O_RDONLY)  # open() would ask for the file's kind, size and place first: five calls a sample
    try:
        return os.pread(file, size, offset)
    finally:
        os.close(file)


def retried(action: Callable[[], Any], url: str, attempts: int = storage.ATTEMPTS) -> Any:
    """``action()``, tried again with growing waits after a dropped connection. ShardError when it keeps failing or nothing is there."""
    try:
        return storage.retried(action, url, attempts)
    except FileNotFoundError:
        raise ShardError(url, "absent shard", "there is no such object") from None
    except PermissionError as error:
        raise ShardError(url, "absent shard", f"no permission ({error})") from error
    except storage.Unreachable as error:
        raise ShardError(url, "unreadable shard", str(error)) from error


def members(
    url: str, descriptor: int | None = None, read: Callable[[str], bool] | None = None
) -> Iterator[TarMember]:
    """The files of a shard in order; ``descriptor`` is the shard where it is `opened`. Those whose name
    ``read`` takes have their content.

    Ends with ShardError where the tar is cut short, after the whole members have been given.
    """
    with _reader(url) if descriptor is None else open(os.dup(descriptor), "rb") as file:
        size, begin = file.seek(0, os.SEEK_END), 0
        while begin < max(size, 1):  # `cat a.tar b.tar` is one shard of two archives
            file.seek(begin)
            try:
                with tarfile.open(fileobj=file, mode="r:", encoding="utf8", errors="surrogateescape") as tar:
                    for info in tar:
                        if info.size < 0:  # tarfile would go backwards, and on for ever
                            raise ShardError(url, "damaged tar", f"{info.name!a} has a size below 0")
                        if info.isdir():
                            continue
                        name = info.name.encode("utf8", "surrogateescape").decode("utf8", "backslashreplace")
                        if not info.isreg() or info.issparse():
                            yield TarMember(name, info.offset_data, -1)
                            continue
                        if (needed := info.offset_data + info.size) > size:
                            said = f"{name} needs {needed} bytes, the file has {size}"
                            raise ShardError(url, "truncated tar", said)
                        file.seek(info.offset_data)  # tarfile seeks to the next header by itself
                        content = file.read(info.size) if read and read(name) else None
                        yield TarMember(name, info.offset_data, info.size, content)
                    end = tar.offset
            except ShardError:
                raise
            except (tarfile.TarError, *_BAD_NUMBERS) as error:
                file.seek(0)
                raise ShardError(url, "truncated tar" if size == 0 else "damaged tar", _no_tar(file.read(64)) or f"{error}") from error
            begin = _after_end_mark(url, file, end, size)


def _after_end_mark(url: str, file, end: int, size: int) -> int:
    """Where the archive behind the end mark at ``end`` begins, ``size`` where there is none.

    tarfile takes any block that is no header for the end of an archive. It is one only if it is zeros, as many as pad a record, with
    nothing behind them but another archive.
    """
    file.seek(end)
    tail = file.read(PADDING + tarfile.BLOCKSIZE)
    zeros, unread = len(tail) - len(tail.lstrip(b"\0")), 1 - end / max(size, 1)
    if len(tail) < tarfile.BLOCKSIZE:
        raise ShardError(url, "truncated tar", f"no end mark; the file stops at {size} bytes")
    if zeros > PADDING and not _pads_a_record(file, end, size):
        raise ShardError(url, "damaged tar", f"zeros instead of data from byte {end} of {size} on; was its download finished?", unread)
    if zeros > PADDING or zeros == len(tail):
        return size
    if zeros < 2 * tarfile.BLOCKSIZE:  # one block of zeros may be a lost header
        raise ShardError(url, "damaged tar", f"no header at byte {end} of {size}; what follows is not read", unread)
    return end + zeros - zeros % tarfile.BLOCKSIZE


def _pads_a_record(file, end: int, size: int) -> bool:
    """Whether the zeros from ``end`` to the end of the file fill up a record of one of `RECORDS`, of which the file is made."""
    if size - end > RECORDS[-1] or not any(size % record == 0 and size - end < record + 2 * tarfile.BLOCKSIZE for record in RECORDS):
        return False
    file.seek(end)
    return not file.read(size - end).strip(b"\0")


def _no_tar(head: bytes) -> str:
    """What a file is that begins like this and is no tar; empty where that is not known."""
    if packed := next((name for magic, name in COMPRESSED.items() if head.startswith(magic)), None):
        return f"it is compressed by {packed}, no tar; unpack it first"
    if head and head.isascii() and "".join(head.decode("ascii").split()).isprintable():
        return f"it is text, no tar; it begins {head[:40].decode('ascii')!r}. Was an error page saved in its place?"
    return ""


def _reader(url: str):
    if not is_remote(url):
        return open(local_path(url), "rb")
    return _Remote(url)


class _Remote:
    """A seekable reader that fetches a block at a time with retries; for passing over headers."""

    BLOCK = 1 << 20

    def __init__(self, url: str):
        self.url, self.position = url, 0
        self.size = retried(lambda: _info(url)["size"], url)
        self.start, self.block = 0, b""

    def __enter__(self) -> _Remote:
        return self

    def __exit__(self, *_) -> None:
        self.block = b""

    def tell(self) -> int:
        """The position of the next read."""
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        self.position = base + offset
        return self.position

    def read(self, n: int = -1) -> bytes:
        """Up to ``n`` bytes from the position."""
        end = self.size if n < 0 else min(self.position + n, self.size)
        out = bytearray()
        while self.position < end:
            if not self.start <= self.position < self.start + len(self.block):
                self.start = self.position
                self.block = read_range(self.url, self.start, min(self.BLOCK, self.size - self.start))
            part = self.block[self.position - self.start : end - self.start]
            out += part
            self.position += len(part)
        return bytes(out)
