"""What papermill hands a notebook becomes a checked RunConfig here, or stops the notebook.

papermill only warns of an unknown parameter, passes ``-p flag false`` as a truthy text and turns ``007`` into 7. `begin` runs in the
cell after the parameters: it compares what was declared (the cell tagged ``parameters``) with what was injected, converts every value
by its declared type, refuses unknown names with the nearest right one, and returns the run. It imports no heavy package.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from mmkit.config import ConfigError, RunConfig, changed, load, nearest, setting_path

INJECTED = "# Parameters"  # first line of the cell papermill adds
TYPES = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "dict": dict, "tuple": tuple}
BACKENDS: dict[str, dict[str, Any]] = {  # what `backend` may say, in settings
    "single": {"backend.kind": "single"},
    "torch": {"backend.kind": "torch"},
    "ddp": {"backend.kind": "torch", "backend.strategy": "ddp"},
    "fsdp": {"backend.kind": "torch", "backend.strategy": "fsdp"},
    "deepspeed": {"backend.kind": "deepspeed"},
    **{f"zero{stage}": {"backend.kind": "deepspeed", "backend.zero_stage": stage} for stage in range(4)},
    "xla": {"backend.kind": "xla"},
}
NOT_SETTINGS = ("model", "stage", "backend", "settings")  # parameters with a meaning of their own


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell: ``name: type = default  # comment``."""

    name: str
    type_text: str
    default: Any
    comment: str

    @property
    def type(self) -> Any:
        """The declared type as an object pydantic understands; without a declaration that of the default."""
        if not self.type_text:
            return type(self.default) if self.default is not None else object
        return eval(self.type_text, {"__builtins__": {}}, dict(TYPES))  # noqa: S307 - only the names of TYPES exist there


def declared(source: str) -> dict[str, Parameter]:
    """The parameters a cell declares, by name; ConfigError where a default is no literal."""
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
        if not isinstance(target, ast.Name) or node.value is None:
            raise ConfigError(f"the parameters cell holds {ast.unparse(node)!r}; write one `name: type = literal  # comment` a line")
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            raise ConfigError(f"parameter {target.id!r} has the default {ast.unparse(node.value)}, which is no literal") from None
        comment = lines[node.end_lineno - 1][node.end_col_offset :].partition("#")[2].strip()
        kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        found[target.id] = Parameter(target.id, kind, default, comment)
    return found


def convert(parameter: Parameter, value: Any, source: str) -> Any:
    """``value`` as the declared type; text spells any type, but a number never silently becomes a text."""
    want = parameter.type
    if isinstance(value, str) and want is not str:
        value = _literal(value)
    if hasattr(value, "item") and not isinstance(value, str):  # a numpy scalar
        value = value.item()
    if isinstance(value, Path):
        value = str(value)
    try:
        return TypeAdapter(want).validate_python(value)
    except ValidationError as error:
        hint = error.errors()[0]["msg"]
        if want is str and isinstance(value, (int, float)):
            hint += f"; a number where a text belongs: quote it (papermill: -r {parameter.name} TEXT keeps text as typed)"
        kind = parameter.type_text or want.__name__
        raise ConfigError(f"{parameter.name} = {value!r} (from {source}) is not of type {kind}: {hint}") from None


def check(values: dict[str, Any], known: dict[str, Parameter], source: str, settings: bool = True) -> dict[str, Any]:
    """Every value converted by its declaration; a name that is neither declared nor (with ``settings``) a setting is refused."""
    checked = {}
    for name, value in values.items():
        if name in known:
            checked[name] = convert(known[name], value, source)
        elif settings and _is_setting(name, source, known):
            checked[name] = value
        else:
            raise ConfigError(f"no parameter {name!r} (from {source}){nearest(name, known)}; there are {', '.join(known)}")
    return checked


def begin(namespace: dict[str, Any], stage: str, also: tuple[str, ...] = ()) -> RunConfig:
    """The run that a notebook's parameters describe; call it as ``begin(globals(), stage="finetune")``.

    ``also`` names declared parameters that belong to the notebook alone (how many pictures to show). A value of 0, "" or {} means
    the preset's own. The converted values replace the raw ones in ``namespace``. Paths of runs start from the checkout's root, so the
    notebook works from ``notebooks/`` and from the root.
    """
    known = _declared_in(namespace)
    injected = _injected_in(namespace)
    values = {name: namespace[name] for name in known if name in namespace}
    values |= {name: namespace[name] for name in injected if name in namespace}
    checked = check(values, known, "the notebook's parameters")
    namespace.update(checked)
    unset = {name for name, parameter in known.items() if not parameter.default and not checked.get(name)}
    own = {name: value for name, value in checked.items() if name not in unset and name not in also}
    return assemble(own, stage, "the notebook's parameters")


def assemble(values: dict[str, Any], stage: str, source: str) -> RunConfig:
    """Parameters by name -> RunConfig: ``model``, ``stage`` and ``backend`` are read here, the rest are settings."""
    values = dict(values)
    overrides = dict(values.pop("settings", None) or {})
    model = values.pop("model", "tiny")
    stage = values.pop("stage", stage)
    overrides = backend_settings(values.pop("backend", ""), source) | overrides | values
    run = load(str(model), str(stage), overrides, source)
    local = "://" not in run.root and not Path(run.root).is_absolute()
    return changed(run, root=str(workspace() / run.root)) if local else run


def backend_settings(name: str, source: str) -> dict[str, Any]:
    """The settings a backend's short name stands for; none for an empty name."""
    if not name:
        return {}
    if name not in BACKENDS:
        raise ConfigError(f"no backend {name!r} (from {source}){nearest(name, BACKENDS)}; backends are {', '.join(BACKENDS)}")
    return dict(BACKENDS[name])


def workspace(start: Path | None = None) -> Path:
    """The folder that ``runs/`` lies in: the checkout around the working folder, else the working folder itself."""
    here = Path(start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
            return folder
    return here


def of_notebook(book: Any, name: str) -> dict[str, Parameter]:
    """The parameters of a loaded notebook; ConfigError where no cell carries the tag ``parameters``."""
    for cell in book["cells"]:
        if cell["cell_type"] == "code" and "parameters" in cell["metadata"].get("tags", ()):
            return declared(cell["source"])
    raise ConfigError(f"{name} has no cell tagged 'parameters', so values passed to it would do nothing; tag its second cell")


def _is_setting(name: str, source: str, known: dict[str, Parameter]) -> bool:
    try:
        setting_path(name, source)
    except ConfigError as error:
        if "ambiguous" in str(error):
            raise
        own = nearest(name, known)
        raise ConfigError(f"no parameter or setting {name!r} (from {source}){own}" if own else str(error)) from None
    return True


def _literal(text: str) -> Any:
    """Text that spells a list, tuple, set or mapping, in Python's or YAML's way, as its value.

    ``1e-5`` and ``false`` stay text, which pydantic converts.
    """
    if not re.match(r"\s*[\[({]", text):
        return text.strip()
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text.strip())
    with contextlib.suppress(yaml.YAMLError):
        return yaml.safe_load(text)
    return text


def _cells_run(namespace: dict[str, Any]) -> list[str]:
    return [source for source in namespace.get("In", ()) if isinstance(source, str)]


def _declared_in(namespace: dict[str, Any]) -> dict[str, Parameter]:
    """Declarations of the last cell run that declares ``name: type = literal``; the newest run counts after an edit."""
    for source in reversed(_cells_run(namespace)):
        try:
            tree = ast.parse(source)
        except SyntaxError:  # a cell with a magic
            continue
        if tree.body and all(isinstance(node, ast.AnnAssign) for node in tree.body):
            return declared(source)
    raise ConfigError("no parameters cell was run before this one; run the cell tagged 'parameters' (the second cell) first")


def _injected_in(namespace: dict[str, Any]) -> list[str]:
    """Names assigned by papermill's injected cell, none outside papermill."""
    for source in reversed(_cells_run(namespace)):
        if source.startswith(INJECTED):
            return [node.targets[0].id for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return []
