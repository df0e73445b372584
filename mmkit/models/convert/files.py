"""Reading tensors from weight files one at a time, and finding those files: a local path or the Hugging Face hub (cache first).

Files are mapped, and mapped again every `REMAP_BYTES` so that pages already read are given back; pickled files are opened with
``torch.load(mmap=True, weights_only=True)``, so nothing in them is executed.
"""

from __future__ import annotations

import errno
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from mmkit.errors import InputError
from mmkit.models.hollow import Reader, same_tensor
from mmkit.storage import fetched, is_remote

REMAP_BYTES = 64 << 20
SHARD_BYTES = 4 << 30
PICKLED = (".bin", ".pt", ".pth")
HUB_SMALL = ("*.json", "*.model", "*.txt", "*.jinja")  # of a hub repository: configs and tokenizer
SHARD = re.compile(r"-\d{5}-of-(\d{5})\.")  # model-00001-of-00004.safetensors
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "trainer_state")


def locate(source: str, weights: bool = True) -> Path:
    """Local path of ``source``: a file or folder as it is, a copy of one behind a URL, else a hub repository from the hub cache,
    downloaded where it is missing; without ``weights`` only its configs and tokenizer."""
    if is_remote(source):
        return fetched(source)
    path = Path(source).expanduser()
    if path.exists():
        return path
    if not is_repository(source):
        raise InputError(f"no file or folder {source!r}, and it is not a hub repository (owner/name)")
    return snapshot(source, weights)


def is_repository(source: str) -> bool:
    """Whether ``source`` has the form of a hub repository's name, owner/name."""
    return source.count("/") == 1 and not source.startswith((".", "/", "~")) and not is_remote(source)


def snapshot(repository: str, weights: bool = True, local: bool = False) -> Path:
    """Folder in the hub cache with what is read here of a repository: configs and tokenizer, and with ``weights`` its safetensors, or
    its pickled files where it has none; no code. Downloaded where it is missing, unless ``local``.

    Cache folder, mirror, offline mode and token are huggingface_hub's own (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN): nothing of
    them is read, kept or shown here. InputError says what a refusal means and what to do.
    """
    from huggingface_hub import snapshot_download

    patterns = [*HUB_SMALL, "*.safetensors"] if weights else list(HUB_SMALL)
    try:
        folder = Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=local))
        if weights and not list(folder.glob("*.safetensors")):
            patterns = [*HUB_SMALL, *(f"*{end}" for end in PICKLED)]
            folder = Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=local))
    except Exception as error:  # the hub client raises a dozen unrelated classes; the cause is kept
        raise InputError(hub_problem(repository, error)) from error
    return folder


def hub_problem(repository: str, error: BaseException, kind: str = "model") -> str:
    """What an error of the hub client means for ``repository`` (of ``kind`` model or dataset), and what to do."""
    from huggingface_hub import constants, errors, get_token

    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repository}"
    what, token = f"hub repository {repository!r}", "the token that was sent may not read it" if get_token() else "no token was sent"
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    status = next((one.response.status_code for one in causes if getattr(one, "response", None) is not None), None)
    log_in = f"log in with `hf auth login` or set HF_TOKEN ({token})"
    if any(isinstance(one, errors.GatedRepoError) for one in causes):
        return f"{what} is gated: accept its licence on {page}, then {log_in}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{what} is not at {page} (HTTP {status}), or it is private: check the name, or {log_in}"
    if status in (401, 403):
        return f"{what}: {page} answered HTTP {status}; {log_in}"
    if isinstance(error, errors.EntryNotFoundError) and status == 404:
        return f"{what} no longer has a file that was asked for (HTTP 404); look at {page}"
    if any(isinstance(one, OSError) and one.errno == errno.ENOSPC for one in causes):
        return f"{what}: no space is left below {constants.HF_HUB_CACHE}; free some, or set HF_HOME to a larger disk"
    if "onsistency check failed" in str(error):
        said = str(error).splitlines()[0]
        return f"{what}: a file came in another size than the hub names ({said}); nothing of it is kept: run the same command again"
    return (
        f"hub repository {repository!r} is neither in the hub cache nor reachable ({type(error).__name__}); "
        f"download it where there is a network and {'put it where the run reads it' if kind == 'dataset' else 'give the folder as weights'}"
    )


def weight_files(path: Path) -> list[Path]:
    """The weight files of ``path``: itself, or a folder's, by its index where it has one; safetensors before pickled ones."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"no file or folder {path}")
    for pattern in ("*.safetensors.index.json", "*.bin.index.json"):
        for index in sorted(path.glob(pattern)):
            return _indexed(index)
    found = sorted(path.glob("*.safetensors")) or sorted(p for p in path.iterdir() if p.suffix in PICKLED)
    found = [file for file in found if not file.name.startswith(NOT_WEIGHTS)]
    counts = {int(mark[1]) for file in found if (mark := SHARD.search(file.name))}
    if counts and len(found) < max(counts):  # a download that was cut short before the index came
        raise InputError(f"{path} holds {len(found)} of the {max(counts)} numbered weight files that their names count")
    if not found:
        raise InputError(f"no weight files (*.safetensors, {', '.join('*' + end for end in PICKLED)}) in {path}")
    return found


def _indexed(index: Path) -> list[Path]:
    names = sorted(set(json.loads(index.read_text(encoding="utf8"))["weight_map"].values()))
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise InputError(f"{index} lists {len(names)} weight files; missing: {', '.join(missing)}")
    return [index.parent / name for name in names]


def tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, CPU tensor) of every tensor of a weight file or folder; copy what you keep, the memory is the file's."""
    for file in weight_files(Path(path)):
        yield from _safetensors(file) if file.suffix == ".safetensors" else remapped(lambda file=file: pickled(file))


def names(path: Path) -> list[str]:
    """Names of all tensors of a weight file or folder, without reading them."""
    files = weight_files(Path(path))
    return [name for file in files for name in (_header(file) if file.suffix == ".safetensors" else pickled(file))]


def _header(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as handle:
            return list(handle.keys())
    except SafetensorError as error:
        raise InputError(f"{file} is not a whole safetensors file: {error}") from None


class Lookup:
    """Random access by name into a weight file or folder; each tensor is read when asked for. Copy what you keep, as of `tensors`."""

    def __init__(self, path: Path):
        self._file_of = {name: file for file in weight_files(Path(path)) for name in names(file)}
        self._open: tuple[Path, dict[str, torch.Tensor]] | None = None
        self._read = 0

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __getitem__(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        file = self._file_of[name]
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as handle:
                return handle.get_tensor(name)
        opened = self._open  # another thread may open another file meanwhile
        if opened is None or opened[0] != file or self._read >= REMAP_BYTES:
            opened = self._open = (file, pickled(file))
            self._read = 0
        tensor = opened[1][name]
        self._read += tensor.nbytes
        return tensor


def readers(path: Path) -> dict[str, Reader]:
    """Name -> function that reads it, for every tensor of a weight file or folder. A reader's shape and dtype cost no reading."""
    lookup = Lookup(path)
    return {name: functools.partial(lookup.__getitem__, name) for name in lookup}


def _safetensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    pending = _header(file)
    while pending:
        read = 0
        with safe_open(file, "pt") as handle:
            while pending and read < REMAP_BYTES:
                name = pending.pop(0)
                tensor = handle.get_tensor(name)
                read += tensor.nbytes
                yield name, tensor


def remapped(read: Callable[[], dict[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The items of a mapped dict, which is read anew after every `REMAP_BYTES`."""
    content = read()
    used = 0
    for name in list(content):
        if used >= REMAP_BYTES:
            del content
            content, used = read(), 0
        used += content[name].nbytes
        yield name, content[name]


def pickled(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a ``torch.save`` file, unwrapped from ``state_dict`` or ``model``; ValueError where it holds anything but data."""
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError:  # files of torch < 1.6 are no zip archives and cannot be mapped
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises whatever the broken stream leads to
        raise InputError(f"{file} cannot be read as a file of tensors: {error}") from error
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content:
        raise InputError(f"{file} holds a {type(content).__name__}, not a dict of tensors")
    return {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}


def fill(
    model: nn.Module,
    stream: Iterable[tuple[str, torch.Tensor]],
    source: str,
    optional: Callable[[str], bool] = lambda name: False,
) -> None:
    """Copies a stream of (name, tensor) into ``model``; ValueError listing every missing, unexpected or misshapen tensor by name.

    Tensors for which ``optional`` is true may be missing. Tied tensors need one of their names only.
    """
    state = model.state_dict()
    partners = {name: group for group in same_tensor(model) for name in group}
    found: set[str] = set()
    problems = []
    for name, tensor in stream:
        if name not in state:
            problems.append(f"unexpected {name}")
        elif state[name].shape != tensor.shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, the model needs {tuple(state[name].shape)}")
            found.update(partners[name])
        else:
            # cast on the host: a device that does it would hold both, and a lazy one would keep it for its next program
            state[name].copy_(tensor.to(state[name].dtype))
            found.update(partners[name])
    problems = [f"missing {name}" for name in state if name not in found and not optional(name)] + problems
    if problems:
        raise InputError(f"{source} does not fit the model: {len(problems)} tensors: " + "; ".join(problems))


def write(stream: Iterable[tuple[str, torch.Tensor]], folder: Path, stem: str = "model") -> list[str]:
    """Writes a stream as ``stem.safetensors``, or as numbered files with an index where it is larger than `SHARD_BYTES`.

    Returns the names of all tensors.
    """
    from safetensors.torch import save_file

    parts: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        save_file(held, folder / f"{stem}-{len(parts):05d}.part", metadata={"format": "pt"})
        parts.append(list(held))
        held.clear()

    for name, tensor in stream:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        held[name] = tensor.detach().cpu().contiguous()
    flush()
    if len(parts) == 1:
        (folder / f"{stem}-00000.part").rename(folder / f"{stem}.safetensors")
        return parts[0]
    weight_map = {}
    for index, group in enumerate(parts):
        final = f"{stem}-{index + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"{stem}-{index:05d}.part").rename(folder / final)
        weight_map |= dict.fromkeys(group, final)
    index = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
    (folder / f"{stem}.safetensors.index.json").write_text(index, encoding="utf8")
    return list(weight_map)
