"""Text becomes a value here and nowhere else, and a value that does not fit is explained in plain words.

The command line, papermill, a notebook's parameters and YAML files all hand over text. What a text may become is decided by the type of
the setting it is for: a text stays a text, a free mapping (a model's ``architecture``) holds what YAML reads, and numbers and truth
values are left to pydantic, which knows the field.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import html
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

from mmkit.errors import ConfigError
from mmkit.foreign_names import our_value, ours

LONGEST = 200  # characters of a value in a message
_UNREADABLE = (  # what YAML and Python raise of `!!int x` or [[[[... besides errors of their own
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip
_NUMBER = ("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"))


class Yaml(yaml.SafeLoader):
    """YAML that takes 1e-4 for a number, as everybody writes it (YAML 1.1 wants 1.0e-4), leaves a date text,
    since no setting is one and ``name: 2024-05-01`` is a name, and refuses a key that stands twice."""

    yaml_implicit_resolvers = {
        first: [_NUMBER] * (first in "-+0123456789") + [kind for kind in kinds if not kind[0].endswith(":timestamp")]
        for first, kinds in (dict.fromkeys("-+0123456789", ()) | yaml.SafeLoader.yaml_implicit_resolvers).items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """The mapping; an error where a key stands twice, of which YAML would silently keep the last."""
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class Settings(BaseModel):
    """Base of all settings: frozen, unknown names refused. At the end of a cell they show, as YAML, what
    differs from the defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, tree: Any) -> Any:
        """``steps: yes`` is no number, though Python counts true as 1: spelt out, it is refused as any text
        in the place of one."""
        if not isinstance(tree, dict):
            return tree
        known = cls.model_fields
        return {name: _spelt(value, known[name].annotation) if name in known else value for name, value in tree.items()}

    def __repr__(self) -> str:
        tree = self.model_dump(mode="json", exclude_defaults=True)
        return "\n".join((f"# {type(self).__name__}: {'what differs from the defaults' if tree else 'the defaults'}", *yaml_lines(tree)))

    __str__ = __repr__

    def to_dict(self) -> dict[str, Any]:
        """Plain values; peft asks the config of the model it adapts for them by this name."""
        return self.model_dump(mode="json")

    def _repr_html_(self) -> str:
        every = html.escape(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
        return f"<pre>{html.escape(str(self))}</pre><details><summary>all settings</summary><pre>{every}</pre></details>"


def read_yaml(text: str, source: str) -> Any:
    """What ``text`` says in YAML; ConfigError names ``source``, and the line where there are several."""
    try:
        return _plain(yaml.load(text, Yaml))  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, *_UNREADABLE) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1})" if mark and "\n" in text else ""
        shown = "" if "\n" in text else f" {shortened(text)}"
        said = shortened(getattr(error, "problem", None) or str(error), quoted=False)
        raise ConfigError(f"{source}{place}:{shown} is no YAML: {said}") from None


def yaml_lines(tree: dict[str, Any], indent: str = "", room: int = 110) -> list[str]:
    """Lines of YAML: a mapping on one where it fits, on several full ones where it holds plain values alone."""
    lines = []
    for key, value in tree.items():
        entries = value if isinstance(value, list) and all(isinstance(entry, dict) for entry in value) else []
        inside = value.values() if isinstance(value, dict) else ()
        one = f"{indent}{key}: {_flow(value)}"
        if len(one) <= room or not (entries or inside):
            lines.append(one)
        elif inside and not any(isinstance(each, list) or len(_flow(each)) > room // 2 for each in inside):
            lines += textwrap.wrap(one, room, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)
        elif entries:
            lines += [f"{indent}{key}:", *(f"{indent}- {_flow(entry)}" for entry in entries)]
        else:
            lines += [f"{indent}{key}:", *yaml_lines(value, indent + "  ", room)]
    return lines


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return text.strip().removesuffix("...").strip()  # the end mark that follows a bare scalar


def _plain(value: Any) -> Any:
    """The value itself; ValueError where it is not made of texts, numbers, truth values, lists and mappings
    alone (a date, bytes, a set, a list that holds itself), of which config.yaml could not say what it is."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"holds more than texts, numbers, true, false, lists and mappings ({error})") from None
    return value


# keys become texts and tuples lists, as config.yaml will have them
Free = Annotated[Any, AfterValidator(lambda value: json.loads(json.dumps(_plain(value))))]


def _spelt(value: Any, annotation: Any) -> Any:
    """``value`` with truth values as text where a number is wanted and none of them."""
    kinds = kinds_of(annotation)
    if isinstance(value, bool):
        named = [type(each) for kind in kinds if typing.get_origin(kind) is Literal for each in typing.get_args(kind)]
        numbers = {int, float} & {*kinds, *named} and not {bool, Any} & {*kinds, *named}
        return str(value).lower() if numbers else value
    inner = [typing.get_args(kind) for kind in kinds if typing.get_origin(kind) in (tuple, dict)]
    if inner and isinstance(value, list | tuple):
        return [_spelt(each, inner[0][0]) for each in value]
    if inner and isinstance(value, dict):
        return {key: _spelt(each, inner[0][-1]) for key, each in value.items()}
    return value


def shortened(value: Any, quoted: bool = True) -> str:
    """A value for a message, at most `LONGEST` characters of it."""
    text = repr(value) if quoted else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"


def literal(text: str) -> Any:
    """Text that spells a list, tuple, set or mapping, in Python's or YAML's way, as its value; any other text as it is."""
    if not re.match(r"\s*[\[({]", text):
        return text.strip()
    with contextlib.suppress(SyntaxError, *_UNREADABLE):
        return ast.literal_eval(text.strip())
    with contextlib.suppress(yaml.YAMLError, *_UNREADABLE):
        return _plain(yaml.load(text, Yaml))  # noqa: S506 - a SafeLoader
    return text


def names_of(section: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Dotted path -> type of every field of ``section`` and the sections in it, of a union all."""
    names: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        names[prefix + name] = names.get(prefix + name, field.annotation)
        for kind in kinds_of(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                inner = names_of(kind, f"{prefix}{name}.")
                names |= {path: names[path] | kind if path in names and names[path] != kind else kind for path, kind in inner.items()}
    return names


def listed(annotation: Any) -> list[type[BaseModel]]:
    """The sections that entries of a list have."""
    inner = [typing.get_args(kind)[:1] for kind in kinds_of(annotation) if typing.get_origin(kind) is tuple]
    return [kind for one in inner for kind in one if isinstance(kind, type) and issubclass(kind, BaseModel)]


def kinds_of(annotation: Any) -> list[Any]:
    """The types an annotation allows: through unions and Annotated, but not into tuples and mappings."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in kinds_of(part)]
    return kinds_of(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is Annotated else [annotation]


def kinds_at(root: type[BaseModel], path: Iterable[Any]) -> list[Any]:
    """The types of what stands at ``path`` of a ``root``: names, places in lists, keys of free mappings."""
    kinds: list[Any] = [root]
    for part in path:
        inner: list[Any] = []
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                inner += kinds_of(kind.model_fields[part].annotation) if part in kind.model_fields else []
            elif typing.get_origin(kind) in (tuple, dict):
                inner += kinds_of([each for each in typing.get_args(kind) if each is not ...][-1])
            elif kind is Any:
                inner.append(Any)
        kinds = inner
    return kinds


def parsed(value: Any, kinds: Sequence[Any], source: str) -> Any:
    """``value``, where it is text, as one of ``kinds`` would have it; what pydantic converts by itself stays text."""
    if not isinstance(value, str):
        return value
    if value.strip().lower() in ("none", "null") and (type(None) in kinds or Any in kinds):
        return None
    if Any in kinds:
        return read_yaml(value, source)
    return value if str in kinds else literal(value)


# ---------------------------------------------------------------- what is wrong with a value


def nearest(name: str, known: Iterable[Any]) -> str:
    """A ``did you mean`` phrase, or an empty text where nothing is near."""
    match = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def hint(name: str, known: Iterable[Any]) -> str:
    """The end of a message about an unknown name: what another program's name is called here, else the nearest of ``known``."""
    return ours(name) or nearest(name, known)


def example(kinds: Sequence[Any], name: str = "") -> str:
    """A value of one of ``kinds`` as a user writes it: ``[connector, samplers]``, ``{rank: 64}``."""
    kind = next((kind for kind in kinds if kind is not type(None)), Any)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return str(arguments[0])
    if origin in (tuple, list):
        inner = kinds_of(arguments[0]) if arguments else [Any]
        if typing.get_origin(inner[0]) is Literal:
            return f"[{', '.join(map(str, typing.get_args(inner[0])[:2]))}]"
        n = 1 if isinstance(inner[0], type) and issubclass(inner[0], BaseModel) else 2 if arguments[-1:] == (...,) else len(arguments)
        return f"[{', '.join([example(inner, name)] * n)}]"
    if origin is dict:
        return f"{{{example(kinds_of(arguments[0]), 'key')}: {example(kinds_of(arguments[1]))}}}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = {field: info for field, info in kind.model_fields.items() if info.is_required()} or dict([*kind.model_fields.items()][:1])
        return f"{{{', '.join(f'{field}: {example(kinds_of(info.annotation), field)}' for field, info in fields.items())}}}"
    return {int: "8", float: "0.5", bool: "true"}.get(kind, name.upper() or "VALUE")


def explain(problem: dict[str, Any], kinds: Sequence[Any], name: str) -> str:
    """One of pydantic's faults in plain words: what is wanted, and an example. ``kinds``: the types of the setting ``name``."""
    about, context, given = problem["type"], problem.get("ctx", {}), problem["input"]
    wanted = {
        "bool": "true or false is wanted", "int": "a whole number is wanted, as 8", "float": "a number is wanted, as 0.5",
        "decimal": "a number is wanted, as 0.5", "string": "a text is wanted; quote it, as 'x'", "missing": "is missing",
        "tuple": f"a list is wanted, as {example(kinds, name)}", "list": f"a list is wanted, as {example(kinds, name)}",
        "dict": f"a mapping is wanted, as {example(kinds, name)}", "model": f"a mapping of settings is wanted, as {example(kinds, name)}",
        "union": f"a mapping with its kind is wanted: {context.get('discriminator', '')} is {context.get('expected_tags', 'missing')}",
    }  # fmt: skip
    if about == "literal_error":
        allowed = context["expected"]
        return f"is none of {allowed}{our_value(name, given) or nearest(given, re.findall('[a-zA-Z0-9_-]+', allowed.replace(' or ', ' ')))}"
    if about in ("too_short", "too_long"):
        least = "min_length" if about == "too_short" else "max_length"
        return f"has {context['actual_length']} values, {'at least' if about == 'too_short' else 'at most'} {context[least]} are wanted"
    words = problem["msg"].removeprefix("Value error, ").replace("Input should be ", "must be ")
    return words if about == "value_error" or about.startswith(("greater", "less")) else wanted.get(about.split("_")[0], words)


def checked(kind: type[BaseModel], values: dict[str, Any], source: str) -> Any:
    """A Settings object of ``values``; ConfigError names the field at fault and the nearest right one."""
    unknown = [name for name in values if name not in kind.model_fields]
    if unknown:
        raise ConfigError(
            f"no option {shortened(unknown[0])} (from {source}){nearest(unknown[0], kind.model_fields)}; there are {', '.join(kind.model_fields)}"
        )
    try:
        return kind(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))  # no field where two do not fit
        field = f"{name} = {shortened(problem['input'])} (from {source})" if name else source
        raise ConfigError(f"{field}: {explain(problem, kinds_at(kind, problem['loc']), name)}") from None
