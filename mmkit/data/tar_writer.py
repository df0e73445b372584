"""Writes WebDataset tar shards: a context manager whose shards appear whole under their names or not at all (U23)."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec

from mmkit.data.example import Example, ImageRef
from mmkit.data.images import ImageError, open_image
from mmkit.data.tar_files import is_remote, members
from mmkit.errors import InputError

NAME = "{:05d}.tar"
NUMBERED = re.compile(r"(?:^|/)(\d{5,})\.tar$")
SIGNATURES = ((b"\xff\xd8\xff", "jpg"), (b"\x89PNG\r\n", "png"), (b"RIFF", "webp"))


class ShardWriter:
    """``with ShardWriter(folder) as writer: writer.write("000001", {"jpg": data, "txt": "a cat"})``.

    A shard is closed after ``max_samples`` samples or ``max_bytes`` of content, read back, compared with what was written, and
    only then given its final name. ``sizes.json`` (shard -> samples) is written at the end. After an error the unfinished shard is
    removed. ``folder`` is any fsspec path. Samples are reproducible: times and owners in the tar are fixed. ValueError where the folder
    has shards from number ``first`` on: those that this writing does not reach would be read with it.
    """

    def __init__(self, folder: str, max_samples: int = 10_000, max_bytes: int = 256 << 20, first: int = 0):
        self.folder, self.max_samples, self.max_bytes = str(folder).rstrip("/"), max_samples, max_bytes
        self.system, self.base = fsspec.core.url_to_fs(self.folder)
        self.number = first
        self.sizes: dict[str, int] = {}
        self._seen: set[str] = set()
        self._begin()

    def __enter__(self) -> ShardWriter:
        try:
            self.system.makedirs(self.base, exist_ok=True)
        except OSError as error:
            raise InputError(f"folder {self.folder} cannot be made ({error}); write to another one") from None
        numbers = [int(found[1]) for path in self._present() if (found := NUMBERED.search(path))]
        if old := [number for number in numbers if number >= self.number]:
            raise InputError(
                f"folder {self.folder} holds {len(old)} shards already, {NAME.format(min(old))} to {NAME.format(max(old))}, which would be "
                "read together with the new ones; write to another folder or delete these first"
            )
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self._finish_shard()
            with self.system.open(f"{self.base}/sizes.json", "w") as file:
                json.dump(self.sizes, file, indent=1)
        self._begin()

    def write(self, key: str, fields: Mapping[str, Any]) -> None:
        """One sample: extension -> bytes, text, or (``json``) a value. ValueError for a key that readers would take apart wrongly:
        dots end a key in this format, so ``a.b`` would be read as key ``a``."""
        if not key or "." in key:
            raise InputError(f"sample key {key!r} is empty or has a dot; readers end a key at its first dot. Use letters, digits, - and _")
        if key in self._seen:
            raise InputError(f"sample key {key!r} was written before; keys are unique over all shards of a set")
        if not fields:
            raise InputError(f"sample {key!r} has no fields")
        if bad := [name for name in fields if not name or name.startswith(".")]:
            raise InputError(f"sample {key!r}: field {bad[0]!r} is not an extension such as jpg or txt")
        self._seen.add(key)
        contents = {name: _bytes(key, name, value) for name, value in fields.items()}
        if self._samples and (len(self._samples) >= self.max_samples or self._bytes + sum(map(len, contents.values())) > self.max_bytes):
            self._finish_shard()
        for name, content in contents.items():
            info = tarfile.TarInfo(f"{key}.{name}")
            info.size = len(content)
            self._tar.addfile(info, io.BytesIO(content))
            self._bytes += len(content)
        self._samples.append({f"{key}.{name}": len(content) for name, content in contents.items()})

    def _present(self) -> list[str]:
        return self.system.ls(self.base, detail=False) if self.system.exists(self.base) else []

    def _begin(self) -> None:
        self._buffer, self._samples, self._bytes = io.BytesIO(), [], 0
        self._tar = tarfile.open(fileobj=self._buffer, mode="w", format=tarfile.USTAR_FORMAT)

    def _finish_shard(self) -> None:
        if not self._samples:
            return
        self._tar.close()
        name = NAME.format(self.number)
        target, temporary = f"{self.base}/{name}", f"{self.base}/.{name}.tmp"
        place = temporary if not is_remote(self.folder) else target  # object stores show a file only when it is complete
        try:
            with self.system.open(place, "wb") as file:
                file.write(self._buffer.getvalue())
            self._verify(self.system.unstrip_protocol(place))
        except BaseException:
            if self.system.exists(place):
                self.system.rm_file(place)
            raise
        if place != target:
            self.system.mv(place, target)
        self.sizes[name] = len(self._samples)
        self.number += 1
        self._begin()

    def _verify(self, url: str) -> None:
        found = {member.name: member.size for member in members(url)}
        wanted = {name: size for sample in self._samples for name, size in sample.items()}
        if found != wanted:
            differing = sorted(set(found.items()) ^ set(wanted.items()))
            raise OSError(f"{url}: {len(differing)} members differ from what was written, first {differing[0][0]}; is the disk full?")


def _bytes(key: str, name: str, value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):
        return value.encode("utf8")
    if name == "json" or name.endswith(".json"):
        return json.dumps(value, ensure_ascii=False).encode("utf8")
    raise InputError(f"sample {key!r}: field {name!r} is {type(value).__name__}; give bytes, text, or a value for json")


def write_examples(source: Sequence[Example], folder: str, **options: Any) -> dict[str, int]:
    """Every image-text pair of a source as shards in ``folder``; returns shard -> samples. ``options`` are `ShardWriter`'s.

    Keys are numbers; the source's own key and metadata go into ``json``. JPEG, PNG and WebP files are copied byte for byte, other
    pictures become PNG. ValueError naming a sample that has no caption or not one picture.
    """
    if not len(source):
        raise InputError("the source has no example; nothing was written")
    with ShardWriter(folder, **options) as writer:
        for i in range(len(source)):
            example = source[i]
            if len(example.images) != 1 or not example.caption:
                found = f"{len(example.images)} pictures and caption {example.caption!r}"
                raise InputError(f"sample {example.key!r} has {found}; a pair has one of each")
            try:
                extension, data = _encoded(example.images[0].data)
            except (OSError, ImageError) as error:
                raise InputError(f"sample {example.key!r}: the picture cannot be read ({error}); correct or leave it out") from None
            writer.write(f"{i:09d}", {extension: data, "txt": example.caption, "json": {"key": example.key, **example.meta}})
    return writer.sizes


def _encoded(picture: Any) -> tuple[str, bytes]:
    """(extension, bytes) of a picture given as path, URL, bytes, PIL image or array."""
    if isinstance(picture, (str, Path)):
        with fsspec.open(str(picture), "rb") as file:
            picture = file.read()
    if isinstance(picture, bytes) and (known := next((name for head, name in SIGNATURES if picture.startswith(head)), None)):
        return known, picture
    out = io.BytesIO()
    open_image(ImageRef(picture)).save(out, "PNG")
    return "png", out.getvalue()
