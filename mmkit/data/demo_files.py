"""How a prepared pack lies on disk, and where the packages it is made from are found.

A pack is a folder with one ``<split>.jsonl`` a split and the pictures it drew; pictures that an installed Python package holds
stay there and are named ``package:path``. Debian packages are taken from the system where installed, else downloaded by apt
and unpacked into the cache, which needs no root; npm packages likewise.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mmkit.cache import atomic_folder, cache_root
from mmkit.data.boxes import Box, pixels
from mmkit.data.example import Example, ImageRef, Region, Turn
from mmkit.errors import UserError

TIMEOUT = 300  # seconds for one download or unpacking


class AssetMissing(UserError, RuntimeError):
    """A package that a pack is made from cannot be had here; the message says why."""


@dataclass(frozen=True)
class Asset:
    """One source package: where its files are and what to write in the record."""

    folder: Path
    name: str
    version: str
    licence: str

    @property
    def label(self) -> str:
        """Name and version, as the record shows them."""
        return f"{self.name} {self.version}".strip()


def python_package(module: str, distribution: str, licence: str) -> Asset:
    """An installed package's folder, found without importing it; AssetMissing otherwise."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise AssetMissing(f"Python package {distribution} is not installed (pip install {distribution})")
    return Asset(Path(list(spec.submodule_search_locations)[0]), distribution, importlib.metadata.version(distribution), licence)


def debian_package(name: str, probe: str, licence: str, system: Path = Path("/")) -> Asset:
    """The folder ``probe`` (as ``usr/share/...``) of a Debian package: installed, already unpacked, or fetched into the cache."""
    if (system / probe).exists():
        return Asset(system / probe, name, _installed_version(name), licence)
    target = cache_root() / "debian" / name
    if not (target / probe).exists():
        _fetch_debian(name, target)
    if not (target / probe).exists():
        raise AssetMissing(f"Debian package {name} holds no {probe}; another release is needed")
    return Asset(target / probe, name, (target / "VERSION").read_text(encoding="utf8").strip(), licence)


def npm_package(name: str, version: str, licence: str) -> Asset:
    """The unpacked folder of an npm package in the cache."""
    target = cache_root() / "npm" / f"{name}-{version}"
    if not target.exists():
        if not shutil.which("npm"):
            raise AssetMissing(f"npm is not on this machine, so {name}@{version} cannot be fetched")
        with atomic_folder(target) as work:
            _command(["npm", "pack", "--silent", f"{name}@{version}"], work)
            archive = next(work.glob("*.tgz"), None)
            if archive is None:
                raise AssetMissing(f"npm pack {name}@{version} wrote no archive")
            with tarfile.open(archive) as tar:
                tar.extractall(work, filter="data")
            archive.unlink()
    return Asset(target / "package", name, version, licence)


def _installed_version(name: str) -> str:
    if not shutil.which("dpkg-query"):
        return ""
    found = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", name], capture_output=True, text=True, timeout=TIMEOUT)
    return found.stdout.strip()


def _fetch_debian(name: str, target: Path) -> None:
    for tool in ("apt-get", "dpkg-deb"):
        if not shutil.which(tool):
            raise AssetMissing(f"{tool} is not on this machine, so Debian package {name} cannot be fetched")
    with atomic_folder(target) as work:
        try:
            _command(["apt-get", "download", name], work)
        except AssetMissing:  # no package lists, or not ours to write: private lists in the cache need no root
            own = [f"-oDir::State::Lists={work}/lists", f"-oDir::Cache={work}/cache", "-oDebug::NoLocking=true"]
            for folder in ("lists/partial", "cache/archives/partial"):
                (work / folder).mkdir(parents=True)
            _command(["apt-get", *own, "-qq", "update"], work)
            _command(["apt-get", *own, "download", name], work)
        archive = next(work.glob("*.deb"))
        version = _command(["dpkg-deb", "-f", str(archive), "Version"], work)
        _command(["dpkg-deb", "-x", str(archive), str(work)], work)
        archive.unlink()
        for folder in ("lists", "cache"):
            shutil.rmtree(work / folder, ignore_errors=True)
        (work / "VERSION").write_text(version, encoding="utf8")


def _command(arguments: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise AssetMissing(f"{' '.join(arguments)} did not end within {TIMEOUT} s; is the network there?") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise AssetMissing(f"{' '.join(arguments)} ended with status {done.returncode}: {last[0]}")
    return done.stdout


# ---------------------------------------------------------------- examples as JSON lines


def row(key: str, images: Iterable[str], turns: Iterable[tuple[str, str]], regions: Iterable[dict] = (), **meta) -> dict:
    """One line of a split: pictures by path, turns as (role, text), regions as `region_row` gives them."""
    return {"key": key, "images": list(images), "turns": [list(turn) for turn in turns], "regions": list(regions), "meta": meta}


def region_row(kind: str, box: tuple[int, int, int, int], size: tuple[int, int], mask: dict | None = None) -> dict:
    """A region in pixels of a picture of ``size`` (width, height), its mask as COCO run lengths."""
    return {"kind": kind, "box": list(box), "size": list(size), "mask": mask}


def write_split(folder: Path, split: str, rows: list[dict]) -> None:
    """Writes ``<split>.jsonl``."""
    with (folder / f"{split}.jsonl").open("w", encoding="utf8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in rows)


def read_split(folder: Path, split: str) -> list[dict]:
    """The lines of a split."""
    with (folder / f"{split}.jsonl").open(encoding="utf8") as file:
        return [json.loads(line) for line in file]


def to_example(line: dict, folder: Path, source: str) -> Example:
    """The `Example` of a line; picture paths are resolved against the pack's folder or the package that holds them."""
    regions = tuple(
        Region(kind=region["kind"], box=Box(*region["box"], pixels(*region["size"])), mask=region["mask"]) for region in line["regions"]
    )
    return Example(
        key=line["key"],
        images=tuple(ImageRef(_picture(path, folder), name=identity(path, source)) for path in line["images"]),
        turns=tuple(Turn(role, text) for role, text in line["turns"]),
        regions=regions,
        source=source,
        meta=line["meta"],
    )


def identity(path: str, source: str) -> str:
    """What makes two lines show the same picture: a package's picture is the same in every pack."""
    return path if ":" in path else f"{source}/{path}"


def _picture(path: str, folder: Path) -> str:
    package, colon, inside = path.partition(":")
    if not colon:
        return str(folder / path)
    return str(_package_folder(package) / inside)


@functools.cache
def _package_folder(module: str) -> Path:
    return python_package(module, module.replace("_", "-"), "").folder
