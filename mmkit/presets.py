"""Presets: the YAML files of ``params/``, a user's laid over the kit's, each saying only what differs from its ``base:``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mmkit.errors import ConfigError
from mmkit.values import nearest, read_yaml, shortened

_FOLDER = Path(__file__).resolve().parent  # a wheel carries params/ inside the package, a checkout beside it
PARAMS = _FOLDER.joinpath("params" if (_FOLDER / "params").is_dir() else "../params").resolve()  # the kit's own


def workspace(start: Path | None = None) -> Path:
    """The folder that ``runs/`` and a user's ``params/`` lie in: the checkout around the working folder, else the working folder."""
    here = Path(start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
            return folder
    return here


def params_files(pattern: str) -> dict[str, list[Path]]:
    """Name -> its files of ``params/`` that fit ``pattern`` (``*.yaml``, ``deepspeed/*.json``), a user's before the kit's.

    A user's lie in the folder that MMKIT_PARAMS names and in ``params/`` of the working folder or of the checkout around it.
    """
    named = os.environ.get("MMKIT_PARAMS")
    if named and not Path(named).is_dir():
        why = "make it, or unset the variable: params/ of the working folder is read too"
        raise ConfigError(f"MMKIT_PARAMS = {named!r} is no folder; {why}")
    own = [Path(named)] if named else []
    folders = dict.fromkeys(folder.resolve() for folder in (*own, Path("params"), workspace() / "params", PARAMS))
    found: dict[str, list[Path]] = {}
    for path in (path for folder in folders for path in sorted(folder.glob(pattern))):
        found.setdefault(path.stem, []).append(path)
    return dict(sorted(found.items()))


def presets() -> tuple[str, ...]:
    """Names of all presets: the YAML files of ``params/``, the user's and the kit's."""
    return tuple(params_files("*.yaml"))


def origin(name: str) -> str:
    """Where a preset stands, for messages: ``params/13b.yaml``, or a user's file and what it is laid over."""
    first, *below = params_files("*.yaml")[name]
    if first.parent == PARAMS:
        return f"params/{name}.yaml"
    return f"{first}" + (f", which stands in place of {below[0]}" if below else "")


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds, empty for an empty file; ConfigError where it holds something else."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        place = f"byte {error.object[error.start]:#x} at {error.start}"
        raise ConfigError(f"{path} is not UTF-8 ({place}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    tree = read_yaml(text, str(path))
    if not isinstance(tree or {}, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; write one `name: value` a line")
    return tree or {}


def preset_tree(name: str, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The file's tree over its base's. A user's file whose base has its own name stands on the kit's file of that name."""
    files = params_files("*.yaml")
    if name not in files:
        raise ConfigError(f"no model {shortened(name)}{nearest(name, files)}; models are {', '.join(presets())}")
    path = next((file for file in files[name] if file not in chain), None)
    if path is None:
        raise ConfigError(f"params: base files form a ring: {' -> '.join((*(file.stem for file in chain), name))}")
    tree = read_mapping(path)
    base = tree.pop("base", None)
    if isinstance(base, bool | dict | list):
        raise ConfigError(f"{path}: base = {shortened(base)}: the name of a model is wanted, as {{base: tiny}}")
    return merge(preset_tree(str(base), (*chain, path)), tree, str(path)) if base not in (None, "") else tree


def merge(below: dict, above: dict, source: str) -> dict:
    """``above``, which is from ``source``, laid over ``below``: mappings merge, everything else is replaced;
    ``{replace: true}`` replaces a mapping. ConfigError where a mapping would cover a value that is none."""
    mappings = [key for key, value in above.items() if isinstance(value, dict)]
    if lost := [key for key in mappings if not isinstance(below.get(key), dict | None)]:
        covered = f"{lost[0]} = {shortened(below[lost[0]])}"
        raise ConfigError(f"{covered}, over which {source} lays a mapping of settings; correct one of them")
    if above.get("replace") is True:
        return {key: value for key, value in above.items() if key != "replace"}
    both = [key for key, value in above.items() if isinstance(value, dict) and isinstance(below.get(key), dict)]
    return below | above | {key: merge(below[key], above[key], source) for key in both}
