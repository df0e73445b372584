"""What papermill hands a notebook becomes a checked RunConfig here, or stops the notebook.

papermill only warns of an unknown parameter, passes ``-p flag false`` as a truthy text and turns ``007`` into 7. `begin` runs in the
cell after the parameters: it compares what was declared (the cell tagged ``parameters``) with what was injected, converts every value
by its declared type, refuses unknown names with the nearest right one, and returns the run. It imports no heavy package.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import logging
import os
import re
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mmkit.config import ConfigError, RunConfig, changed, load, nearest, setting_path
from mmkit.foreign_names import ours
from mmkit.presets import workspace
from mmkit.values import explain, hint, kinds_of, literal, shortened

MAGIC = re.compile(r"(?m)^\s*[%!].*$")
INJECTED = "# Parameters"  # first line of the cell papermill adds
TYPES = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, tuple, set)}
TYPING = ("Any", "Literal", "Optional", "Union", "List", "Dict", "Tuple")
TYPES |= {name: getattr(typing, name) for name in TYPING}
BACKENDS: dict[str, dict[str, Any]] = {  # what `backend` may say, in settings
    "auto": {"backend.kind": "auto"},
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
        kind: Any = self.type_text
        try:
            while isinstance(kind, str):  # the type may be quoted: "int | None"
                kind = eval(kind, {"__builtins__": {}}, dict(TYPES))  # noqa: S307 - only the names of TYPES exist there
        except (NameError, SyntaxError, TypeError) as error:
            told = f"{self.type_text}: {error}; types are made of {', '.join(TYPES)}"
            raise ConfigError(f"parameter {self.name!r} is of type {told}") from None
        return kind


def declared(source: str) -> dict[str, Parameter]:
    """The parameters a cell declares, by name; ConfigError where a default is no literal."""
    source = MAGIC.sub("", source)
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
        none = type(None) in kinds_of(want) and value.strip() in ("None", "none", "null")
        value = None if none else literal(value)
    if hasattr(value, "item") and not isinstance(value, str):  # a numpy scalar
        value = value.item()
    if isinstance(value, Path):
        value = str(value)
    try:
        return TypeAdapter(want).validate_python(value)
    except ValidationError as error:
        why = explain(error.errors()[0], kinds_of(want), parameter.name)
        if want is str and isinstance(value, (int, float)):
            why += f"; a number where a text belongs: quote it (papermill: -r {parameter.name} TEXT keeps text as typed)"
        kind = parameter.type_text or getattr(want, "__name__", want)
        raise ConfigError(f"{parameter.name} = {value!r} (from {source}) is not of type {kind}: {why}") from None


def parameter_pair(text: str) -> tuple[str, str]:
    """(name, value) of ``NAME=VALUE``, as the command line has a parameter."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} has no value; write -p NAME VALUE or -p NAME=VALUE")
    return name, value


def check(values: dict[str, Any], known: dict[str, Parameter], source: str, settings: bool = True) -> dict[str, Any]:
    """Every value converted by its declaration; a name that is neither declared nor (with ``settings``) a setting is refused."""
    checked = {}
    for name, value in values.items():
        if name in known:
            checked[name] = convert(known[name], value, source)
        elif settings and _is_setting(name, source, known):
            checked[name] = value
        else:
            raise ConfigError(f"no parameter {name!r} (from {source}){hint(name, known)}; there are {', '.join(known)}")
    return checked


NOISE = {  # logger -> messages that say nothing to who reads them, and come with every run
    # Where the processor has bf16 instructions, bitsandbytes looks on the hub for a faster 4-bit kernel when it is imported, as peft does
    # for any run, warns that there is none, and computes with its own.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # jupyter_client interrupts a kernel before it ends it. Under papermill the kernel may then still be sending its last reply, and reports
    # an error although every cell is done. An interrupt within a cell is shown by that cell.
    "IPKernelApp": "KeyboardInterrupt caught in kernel",
}


def quiet() -> None:
    """Keeps the messages of `NOISE` out of the log, and nothing else. To be called before the libraries are imported."""
    for logger in NOISE:
        logging.getLogger(logger).addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(NOISE.get(record.name, ()))


def begin(namespace: dict[str, Any], stage: str, also: tuple[str, ...] = ()) -> RunConfig:
    """The run that a notebook's parameters describe; call it as ``begin(globals(), stage="finetune")``.

    ``also`` names declared parameters that belong to the notebook alone (how many pictures to show). A value of 0, "" or {} means
    the preset's own. The converted values replace the raw ones in ``namespace``. The working folder becomes the checkout's root, so that a
    relative path means the same file in JupyterLab, whose kernels start in ``notebooks/``, under papermill and on the command line.
    """
    quiet()
    os.chdir(workspace())
    known, injected = _cells_of(namespace)
    for name in known:  # a misspelt name whose value is 0 or "" must not pass for "the preset's own"
        if name not in also and name not in NOT_SETTINGS:
            _is_setting(name, "the parameters cell", [other for other in known if other != name])
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
    overrides = values.pop("settings", None) or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"settings = {shortened(overrides)} (from {source}): a mapping is wanted, as {{data.max_length: 1024}}")
    model = values.pop("model", "tiny")
    stage = values.pop("stage", stage)
    overrides = backend_settings(values.pop("backend", ""), source) | overrides | values
    run = load(str(model), str(stage), overrides, source)
    local = "://" not in run.root and not Path(run.root).is_absolute()
    return changed(run, root=str(workspace() / Path(run.root).expanduser())) if local else run


def backend_settings(name: str, source: str) -> dict[str, Any]:
    """The settings a backend's short name stands for; none for an empty name."""
    if not name:
        return {}
    if not isinstance(name, str) or name not in BACKENDS:
        raise ConfigError(f"no backend {shortened(name)} (from {source}){nearest(name, BACKENDS)}; backends are {', '.join(BACKENDS)}")
    return dict(BACKENDS[name])


def of_notebook(book: Any, name: str) -> dict[str, Parameter]:
    """The parameters of a loaded notebook; ConfigError where no cell carries the tag ``parameters``."""
    for cell in book["cells"]:
        if cell["cell_type"] == "code" and "parameters" in cell["metadata"].get("tags", ()):
            return declared(cell["source"])
    raise ConfigError(f"{name} has no cell tagged 'parameters', so values passed to it would do nothing; tag its second cell")


def _is_setting(name: str, source: str, known: Iterable[str]) -> bool:
    try:
        setting_path(name, source)
    except ConfigError as error:
        if "ambiguous" in str(error):
            raise
        own = "" if ours(name) else nearest(name, known)
        raise ConfigError(f"no parameter or setting {name!r} (from {source}){own}" if own else str(error)) from None
    return True


def _cells_of(namespace: dict[str, Any]) -> tuple[dict[str, Parameter], list[str]]:
    """What the parameters cell declares, and the names that papermill's injected cell assigned after it.

    IPython keeps the text of the cells that were run, not their tags. The parameters cell is the newest one that is nothing but
    assignments with a declared type among them; once it was run, a newer cell that assigns half of its names counts too, so that a
    line added without a type, or a type deleted, is seen in a kernel that still knows the older text.
    """
    cells = [(source, _names_assigned(source)) for source in namespace.get("In", ()) if isinstance(source, str)]
    cells = [(source, names) for source, names in cells if names]
    own = [k for k, (source, names) in enumerate(cells) if any(names.values()) and not source.startswith(INJECTED) and _is_plain(source)]
    if not own:
        raise ConfigError("no parameters cell was run before this one; run the cell tagged 'parameters' (the second cell) first")
    first = cells[own[-1]][1]
    later = [
        k for k, (source, names) in enumerate(cells)
        if k > own[-1] and not source.startswith(INJECTED) and 2 * len(names.keys() & first.keys()) >= len(first)
    ]  # fmt: skip
    place = max([own[-1], *later])
    injected = [names for k, (source, names) in enumerate(cells) if k > place and source.startswith(INJECTED)]
    return declared(cells[place][0]), list(injected[-1]) if injected else []


def _names_assigned(source: str) -> dict[str, bool]:
    """Names that a cell assigns at its top level -> whether with a type; empty where it does not parse. Magics are left out."""
    try:
        nodes = ast.parse(MAGIC.sub("", source)).body
    except SyntaxError:
        return {}
    names = {node.target.id: True for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value}
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    return {target.id: False for target in targets if isinstance(target, ast.Name)} | names


def _is_plain(source: str) -> bool:
    """Whether a cell holds assignments only, some of them of a literal to a name with a type."""
    nodes = ast.parse(MAGIC.sub("", source)).body
    typed = [node.value for node in nodes if isinstance(node, ast.AnnAssign) and node.value]
    literals = [node for node in typed if not any(isinstance(part, (ast.Call, ast.Name)) for part in ast.walk(node))]
    return bool(literals) and all(isinstance(node, (ast.AnnAssign, ast.Assign)) for node in nodes)
