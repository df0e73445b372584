"""Features of frozen encoders, computed once and kept on disk.

A cache belongs to one key: the encoders' weights (told by the caller) and the preprocessing (measured on a test picture). Inside, a
picture is found by the hash of its content, so copies and renamed files share features. Files are complete parts, memory-mapped
and shared by all processes; a part appears under its name only when it is whole, one that is cut later is computed anew, and every
row read has its checksum compared. The folder of all caches is bounded: the ones used longest ago make room, but none in use.

Libraries choose kernels, and with them the order of sums, by the number of threads, the number of pictures in
a forward and a picture's place among them. So features of one picture agree to a bound, not to the bit:
within `BOUND` of the encoder's largest value in fp32 and `HALF_BOUND` in bf16, for any number of threads, any
batch and any place. Measured at 1, 2 and 16 threads, 3.2e-6 was the most in fp32. A run fills its cache in
forwards of as many pictures as its micro-batches have places (`training.feed`), the last one filled up: on
one thread, training with the cache is then training without it to the bit where micro-batches have that many
places.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmkit.cache import atomic_folder, cache_root
from mmkit.config import ConfigError
from mmkit.data.example import BadRecord, ImageRef
from mmkit.data.images import ImageError, content_hash, open_image
from mmkit.errors import InputError

log = logging.getLogger(__name__)

BOUND, HALF_BOUND = 1e-5, 2.0**-7  # of an encoder's largest value, between features on other threads or in other batches
PART_BYTES = 1 << 29  # a finished part is kept when the process is killed later
IN_USE = "in-use"
FREE_SHARE = 0.5  # of the disk's free space that caches may take by default
Encode = Callable[[list[Tensor]], list[Tensor]]
Progress = Callable[[int, int], None]


class FeatureCache:
    """Features by content: ``get(ref)`` for pictures, ``get_text(text)`` for captions. `precompute` fills it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: list[tuple[tuple[int, ...], torch.dtype]] = []  # of one picture, an encoder each
        self.problems: dict[str, tuple[str, str]] = {}  # identity -> (message, reason) of pictures without features
        self._hash_of: dict[str, str] = {}  # identity -> content hash, learnt while filling
        self._place: dict[str, tuple[int, int]] = {}  # content hash -> (part, row)
        self._sizes: dict[str, tuple[int, int]] = {}
        self._parts: list[Path] = []
        self._sums: list[np.ndarray] = []  # (rows,) uint32 checksums of each part
        self._maps: dict[tuple[int, int], np.ndarray] = {}
        self._checked: list[np.ndarray] = []  # (rows,) bool of each part: whether the checksum was right
        self._hold = _shared(folder)  # as long as this object lives
        self.read()

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, digest: str) -> bool:
        return digest in self._place

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_maps": {}, "_hold": None}

    def read(self) -> None:
        """Learns of parts that other processes have finished; what is damaged goes away, to be computed anew."""
        for part in sorted(self.folder.glob("part-*")):
            if part in self._parts:
                continue
            facts = _part_facts(part)
            if facts is None:
                log.warning("features in %s are damaged and are computed anew", part)
                shutil.rmtree(part, ignore_errors=True)
                continue
            self._sums.append(np.array(facts["sums"], np.uint32))
            self._checked.append(np.zeros(len(facts["sums"]), bool))
            self.shapes = [(tuple(shape), getattr(torch, dtype)) for shape, dtype in facts["shapes"]]
            self._parts.append(part)
            for row, (digest, size) in enumerate(zip(facts["hashes"], facts["sizes"], strict=True)):
                self._place[digest] = (len(self._parts) - 1, row)
                self._sizes[digest] = tuple(size)

    def get(self, ref: ImageRef) -> tuple[list[Tensor], tuple[int, int]]:
        """(features an encoder, (width, height) of the picture); ImageError where the picture is bad or was not computed."""
        identity = ref.identity
        if identity in self.problems:
            raise ImageError(*self.problems[identity])
        digest = self._hash_of.get(identity) or self._hash_of.setdefault(identity, content_hash(ref))
        if digest not in self._place:
            raise ImageError(f"image {identity!r} has no cached features; call precompute with the data that holds it", "no features")
        return self._row(digest), self._sizes[digest]

    def get_text(self, text: str) -> list[Tensor]:
        """Features of a text; ValueError where it was not computed."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in self._place:
            raise InputError(f"text {text[:60]!r} has no cached features; call precompute_texts with the data that holds it")
        return self._row(digest)

    @property
    def n_bytes(self) -> int:
        """Size on disk."""
        return folder_bytes(self.folder)

    def _row(self, digest: str) -> list[Tensor]:
        part, row = self._place[digest]
        rows = [np.array(self._map(part, number)[row]) for number in range(len(self.shapes))]
        if not self._checked[part][row] and _checksum(rows) != self._sums[part][row]:
            raise InputError(f"cached features in {self._parts[part]} have changed on the disk (row {row}); remove that folder and start again")
        self._checked[part][row] = True
        return [torch.from_numpy(data).view(dtype).view(shape) for data, (shape, dtype) in zip(rows, self.shapes, strict=True)]

    def _map(self, part: int, encoder: int) -> np.ndarray:
        """(rows, bytes) memory map of one file."""
        if (part, encoder) not in self._maps:
            data = np.memmap(self._parts[part] / f"features.{encoder}.bin", dtype=np.uint8, mode="r")
            self._maps[part, encoder] = data.reshape(-1, _row_bytes(*self.shapes[encoder]))
        return self._maps[part, encoder]


def _part_facts(part: Path) -> dict | None:
    """What a part holds; None where its files are not those that were written."""
    try:
        facts = json.loads((part / "part.json").read_text())
        rows, shapes = len(facts["hashes"]), [(shape, getattr(torch, dtype)) for shape, dtype in facts["shapes"]]
        sizes = [(part / f"features.{number}.bin").stat().st_size for number in range(len(shapes))]
    except (OSError, ValueError, KeyError):
        return None
    whole = sizes == [rows * _row_bytes(*shape) for shape in shapes] and len(facts.get("sums", ())) == len(facts["sizes"]) == rows
    return facts if whole else None


def _row_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return int(np.prod(shape)) * dtype.itemsize


def _checksum(rows: Sequence[np.ndarray]) -> int:
    """Of one picture's features, an array of bytes an encoder."""
    total = 0
    for row in rows:
        total = zlib.crc32(row, total)
    return total


def precompute(
    source,
    transforms: Sequence[Callable],
    encode: Encode,
    key: str,
    *,
    folder: str | os.PathLike | None = None,
    batch: int = 64,
    max_bytes: int | None = None,
    progress: Progress | None = None,
) -> FeatureCache:
    """The cache of ``source``'s pictures (anything with a length that gives examples), with what was missing computed.

    ``encode`` maps a list of tensors (``batch``, 3, h, w), one an encoder, to their features; it runs without
    a graph. ``key`` tells the encoders' weights apart. Several processes may call this at once: one computes,
    the others wait and read. Pictures that do not decode are left out; the loader reports them. ConfigError
    for random transforms or where the cache would outgrow ``max_bytes``.
    """
    cache = _opened(key + preprocessing_hash(transforms), folder)
    refs = _pictures(source)

    def load(ref: ImageRef) -> tuple[list[Tensor], tuple[int, int]]:
        image = open_image(ref)
        return [transform(image) for transform in transforms], image.size

    with _locked(cache.folder):
        cache.read()
        missing: dict[str, ImageRef] = {}
        with ThreadPoolExecutor(max_workers=2) as pool:
            for ref, digest in zip(refs, pool.map(_digest, refs), strict=True):
                if isinstance(digest, ImageError):
                    cache.problems[ref.identity] = (digest.message, digest.reason)
                    continue
                cache._hash_of[ref.identity] = digest
                if digest not in cache:
                    missing.setdefault(digest, ref)
        _fill(cache, missing, load, encode, batch, _room(cache, max_bytes), progress)
    return cache


def precompute_texts(source, tokenizer, encode: Callable[[Tensor], Tensor], key: str, *, folder=None, batch: int = 256, max_bytes=None) -> FeatureCache:
    """The cache of the captions of ``source``: ``encode`` maps token ids (n, L) to features (n, C). Otherwise as `precompute`."""
    cache = _opened(key + "text", folder)
    with _locked(cache.folder):
        cache.read()
        captions = dict.fromkeys(example.caption for example in _examples(source))
        digests = {hashlib.sha256(text.encode()).hexdigest(): text for text in captions}
        missing = {digest: text for digest, text in digests.items() if digest not in cache}
        _fill(cache, missing, lambda text: ([tokenizer([text])[0]], (0, 0)), lambda ids: [encode(ids[0])], batch, _room(cache, max_bytes), None)
    return cache


def preprocessing_hash(transforms: Sequence[Callable]) -> str:
    """A hash of what transforms do to a test picture; ConfigError where they are random."""
    ramp = np.arange(37 * 23 * 3, dtype=np.int64).reshape(23, 37, 3)
    picture = Image.fromarray((ramp * 7 % 256).astype(np.uint8))
    first, second = ([transform(picture).numpy().tobytes() for transform in transforms] for _ in range(2))
    if first != second:
        raise ConfigError("data.cache_features needs fixed preprocessing, but these transforms change from call to call; turn augmentation off")
    return hashlib.sha256(b"".join(first)).hexdigest()


def folder_bytes(folder: Path) -> int:
    """Bytes of all finished files below a folder."""
    files = (path for path in folder.rglob("*") if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return sum(path.stat().st_size for path in files if path.is_file())


def _opened(key: str, folder: str | os.PathLike | None) -> FeatureCache:
    root = Path(folder) if folder else cache_root()
    place = root / "features" / hashlib.sha256(key.encode()).hexdigest()[:24]
    while True:
        place.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process made room between two lines
            cache = FeatureCache(place)
            (place / "used").touch()
            return cache


def _examples(source) -> Iterator:
    for index in range(len(source)):
        with contextlib.suppress(BadRecord):  # the loader counts it
            yield source[index]


def _pictures(source) -> list[ImageRef]:
    found: dict[str, ImageRef] = {}
    for example in _examples(source):
        for ref in example.images:
            found.setdefault(ref.identity, ref)
    return list(found.values())


def _digest(ref: ImageRef) -> str | ImageError:
    try:
        return content_hash(ref)
    except ImageError as error:
        return error


def _fill(cache: FeatureCache, missing: dict, load: Callable, encode: Encode, batch: int, room: Callable[[int], None], progress: Progress | None) -> None:
    """Computes and stores what is missing, part by part; the next batch is loaded by threads while one is encoded."""
    items, done, checked = list(missing.items()), 0, False
    with ThreadPoolExecutor(max_workers=2) as pool:
        chunks = [items[start : start + batch] for start in range(0, len(items), batch)]
        ahead = [pool.submit(_loaded, load, thing) for _, thing in chunks[0]] if chunks else []
        number = 0
        while number < len(chunks):
            with _full_disk_told(cache.folder), atomic_folder(cache.folder / f"part-{chunks[number][0][0][:16]}") as work:
                part = _Part(work)
                while number < len(chunks) and part.n_bytes < PART_BYTES:
                    loaded = [future.result() for future in ahead]
                    following = chunks[number + 1] if number + 1 < len(chunks) else []
                    ahead = [pool.submit(_loaded, load, thing) for _, thing in following]
                    _store(cache, part, chunks[number], loaded, encode, batch)
                    if part.rows and not checked:
                        room(part.n_bytes * len(items) // len(part.rows))
                        checked = True
                    done += len(chunks[number])
                    number += 1
                    if progress:
                        progress(done, len(items))
                part.close()
            cache.read()


@contextlib.contextmanager
def _full_disk_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cached features could not be written to {folder}: {error}; what was written before is kept: free some space, or set "
            "data.cache_dir to a larger disk or data.cache_features to false"
        ) from error


def _loaded(load: Callable, thing):
    try:
        return load(thing)
    except ImageError as error:
        return error


def _store(cache: FeatureCache, part: _Part, chunk, loaded, encode: Encode, batch: int) -> None:
    good = [(digest, result) for (digest, _), result in zip(chunk, loaded, strict=True) if not isinstance(result, ImageError)]
    for (_, ref), result in zip(chunk, loaded, strict=True):
        if isinstance(result, ImageError):
            cache.problems[ref.identity] = (result.message, result.reason)
    if not good:
        return
    # Always whole batches: another number of pictures may take other kernels, with other sums in the last
    # bits.
    rows = (good * -(-batch // len(good)))[:batch]
    stacked = [torch.stack(tensors) for tensors in zip(*(tensors for _, (tensors, _) in rows), strict=True)]
    with torch.no_grad():
        features = [output[: len(good)].detach().cpu().contiguous() for output in encode(stacked)]
    part.add([digest for digest, _ in good], [size for _, (_, size) in good], features)


class _Part:
    """One part being written."""

    def __init__(self, folder: Path):
        self.folder, self.rows, self.sizes, self.sums, self.n_bytes = folder, [], [], [], 0
        self.shapes: list = []
        self._files: list = []

    def add(self, digests: list[str], sizes: list, features: list[Tensor]) -> None:
        """Appends pictures with their features (n, ...), one tensor an encoder."""
        if not self._files:
            self.shapes = [(list(output.shape[1:]), str(output.dtype).removeprefix("torch.")) for output in features]
            self._files = [(self.folder / f"features.{number}.bin").open("wb") for number in range(len(features))]
        arrays = [output.reshape(len(digests), -1).view(torch.uint8).numpy() for output in features]
        for file, data in zip(self._files, arrays, strict=True):
            data.tofile(file)
            self.n_bytes += data.nbytes
        self.sums += [_checksum(rows) for rows in zip(*arrays, strict=True)]
        self.rows += digests
        self.sizes += sizes

    def close(self) -> None:
        """Flushes to disk and writes what the part holds."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        (self.folder / "part.json").write_text(json.dumps({"shapes": self.shapes, "hashes": self.rows, "sizes": self.sizes, "sums": self.sums}))


def _room(cache: FeatureCache, max_bytes: int | None) -> Callable[[int], None]:
    """A check that ``needed`` bytes fit; caches of other keys give way, the longest unused first."""

    def room(needed: int) -> None:
        root = cache.folder.parent
        limit = max_bytes if max_bytes is not None else int(shutil.disk_usage(root).free * FREE_SHARE) + folder_bytes(root)
        others = sorted((path for path in root.iterdir() if path.is_dir() and path != cache.folder), key=lambda path: _used(path))
        while others and folder_bytes(root) + needed > limit:
            _make_room(others.pop(0))
        if folder_bytes(root) + needed > limit:
            raise ConfigError(
                f"cached features need about {needed / 1e9:.2f} GB below {root}, which may hold {limit / 1e9:.2f} GB; "
                "set data.cache_dir to a larger disk or data.cache_features to false"
            )

    return room


def _make_room(folder: Path) -> None:
    """Removes a cache unless a process uses it."""
    with contextlib.suppress(FileNotFoundError), (folder / IN_USE).open("w") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        log.info("feature cache %s makes room", folder.name)
        shutil.rmtree(folder, ignore_errors=True)


def _shared(folder: Path) -> IO:
    """A file whose lock says that the cache is in use, until it is closed; FileNotFoundError where the cache is gone."""
    file = (folder / IN_USE).open("a+")  # NFS shares a lock on what can be read only
    fcntl.flock(file, fcntl.LOCK_SH)
    os.stat(folder / IN_USE)
    return file


def _used(folder: Path) -> float:
    mark = folder / "used"
    return mark.stat().st_mtime if mark.exists() else 0.0


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; the lock ends with the process that holds it."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
