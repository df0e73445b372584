"""What there is to choose from: settings with their meaning, models, tasks, templates, encoders, packs, backends, figures; and
an example of each command for its ``--help``."""

from __future__ import annotations

import ast
import functools
import inspect
import typing
from typing import Any, Literal

from mmkit import config
from mmkit.config import ConfigError, RunConfig, Settings, nearest
from mmkit.foreign_names import ours
from mmkit.presets import params_files
from mmkit.values import kinds_of, names_of

Row = dict[str, Any]
EXAMPLES = {  # command -> what its --help shows
    "doctor": "mmkit doctor",
    "settings": "mmkit settings lora --model tiny --stage finetune",
    "list": "mmkit list models",
    "plan": "mmkit plan --model 13b --stage finetune --machine 8xa100-80gb",
    "get": "mmkit get 8b --dry-run",
    "data demo": "mmkit data demo easy_vqa",
    "data check": "mmkit data check my.json --images pics --model 8b",
    "data shards": "mmkit data shards out --from pairs.csv --format csv",
    "train": "mmkit train --model 8b-debug --stage finetune --steps 4 --set lr=1e-4 data.max_length=512",
    "eval": "mmkit eval --model tiny --tasks easy_vqa --limit 50",
    "launch": "mmkit launch --slurm --model clip-vit-l-14 --stage pretrain --show\n\ntargets: local starts this machine's processes; slurm "
    "submits a job script; tpu drives a TPU VM with gcloud",
    "convert": "mmkit convert ferret-7b-delta exports/f --model ferret-7b --base vicuna-7b-v1.3",
    "figures": "mmkit figures cambrian_benchmarks --out figures",
    "notebook run": "mmkit notebook run 03_finetune -p model tiny -p lr 1e-4",
    "notebook demo": "mmkit notebook demo",
}


def settings(word: str = "", run: RunConfig | None = None) -> list[Row]:
    """A row a setting whose name or meaning has ``word``: name, type, default, meaning, and the value in ``run``.

    Fields of list entries (data.sources) stand under the list's name with ``[]``. ConfigError where no setting fits, with ours for
    a name of another program.
    """
    rows = [row for row in _rows(RunConfig) if word.lower() in f"{row['setting']} {row['meaning']}".lower()]
    if not rows:
        raise ConfigError(f"no setting has {word!r} in its name or meaning{ours(word) or nearest(word, names_of(RunConfig))}")
    return [{**row, "here": _value(run, row["setting"])} for row in rows] if run else rows


def _rows(section: type[Settings], prefix: str = "") -> list[Row]:
    rows, meanings = {}, _meanings()[section.__name__]
    for name, field in section.model_fields.items():
        required = field.is_required()
        default = "" if required else field.default
        nested = [kind for kind in kinds_of(field.annotation) if isinstance(kind, type) and issubclass(kind, Settings)]
        shown = "" if required else "{}" if isinstance(default, Settings) else _text(default)
        rows[prefix + name] = {
            "setting": prefix + name, "type": _type(field.annotation), "default": shown, "meaning": meanings.get(name, ""),
        }  # fmt: skip
        listed = [typing.get_args(kind)[0] for kind in kinds_of(field.annotation) if typing.get_origin(kind) is tuple]
        inner = [(kind, ".") for kind in nested]
        inner += [(kind, "[].") for kind in listed if isinstance(kind, type) and issubclass(kind, Settings)]
        for kind, sign in inner:
            for row in _rows(kind, f"{prefix}{name}{sign}"):
                rows.setdefault(row["setting"], row)
    return list(rows.values())


@functools.cache
def _meanings() -> dict[str, dict[str, str]]:
    """Class -> field -> the comment beside it in config.py: the one place where a setting is explained."""
    source = inspect.getsource(config)
    lines, found = source.splitlines(), {}
    for node in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
        beside = {field.target.id: lines[field.end_lineno - 1].encode()[field.end_col_offset :].decode() for field in fields}
        found[node.name] = {name: rest.partition("#")[2].strip() for name, rest in beside.items()}
    return found


def _type(annotation: Any) -> str:
    """A type as a user reads it: ``bf16 | fp16``, ``number or none``, ``list of text``."""
    words = []
    for kind in kinds_of(annotation):
        origin, inside = typing.get_origin(kind), typing.get_args(kind)
        if origin is Literal:
            words.append(" | ".join(map(str, inside)))
        elif origin is tuple:
            words.append(f"list of {_type(inside[0])}")
        elif origin is dict:
            words.append("mapping")
        elif isinstance(kind, type) and issubclass(kind, Settings):
            words.append("settings")
        else:
            plain = {int: "whole number", float: "number", bool: "true | false", str: "text", type(None): "none"}
            words.append(plain.get(kind, "anything"))
    return " or ".join(dict.fromkeys(words))


def _text(value: Any) -> str:
    """A value as it is written after ``--set NAME=``."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, (dict, Settings)):
        return "{}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _value(run: RunConfig, path: str) -> str:
    here: Any = run
    for part in path.split("."):
        if not hasattr(here, part):
            return "-"  # of the other kind of model, or inside a list
        here = getattr(here, part)
    entries = here if isinstance(here, tuple) else (here,)
    return "..." if any(isinstance(entry, (dict, Settings)) for entry in entries) else _text(here)


# ---------------------------------------------------------------- lists of names

LISTS = ("models", "tasks", "templates", "encoders", "packs", "backends", "figures")


def names(of: str) -> list[Row]:
    """A row for each of one of `LISTS`; packages are imported for the list that is asked for only."""
    if of == "models":
        first = {name: files[0].read_text(encoding="utf8").partition("\n")[0] for name, files in params_files("*.yaml").items()}
        about = {name: line.lstrip("# ").split(". ")[0] if line.startswith("#") else "" for name, line in first.items()}
        return [{"model": name, "file": config.origin(name), "about": about[name]} for name in first]
    if of == "tasks":
        from mmkit.evaluation.collections import COLLECTIONS
        from mmkit.evaluation.collections import tasks as sets
        from mmkit.evaluation.tasks.clip_demo import CLIP_TASKS
        from mmkit.evaluation.tasks.table import TASKS

        groups = {name: f"contrastive models, {len(members)} sets" for name, members in COLLECTIONS.items()}
        rows = dict.fromkeys(TASKS, "vision-language models") | dict.fromkeys(CLIP_TASKS, "contrastive models") | groups
        rows |= {name: "contrastive models, a set" for name in sets() if name not in rows}
        return [{"task": name, "of": kind} for name, kind in rows.items()]
    if of == "templates":
        from mmkit.data.example import Turn
        from mmkit.data.templates import TEMPLATES, render

        turns = (Turn("user", "QUESTION"), Turn("assistant", "ANSWER"))
        return [{"template": name, "looks like": repr(render(template, turns).text[-90:])} for name, template in TEMPLATES.items()]
    if of == "encoders":
        from mmkit.models.encoders import ENCODERS

        rows = [{"encoder": name, "pixels": spec.resolution, "weights": spec.source} for name, spec in ENCODERS.items()]
        return rows + [{"encoder": f"{family}:NAME", "weights": f"any encoder of {family}"} for family in ("open_clip", "timm", "hf")]
    if of == "packs":
        from mmkit.data.demo import PACKS

        return [{"pack": name, "about": spec.about} for name, spec in PACKS.items()]
    if of == "backends":
        from mmkit.notebook.parameters import BACKENDS

        return [{"backend": name, "settings": " ".join(f"{key}={value}" for key, value in sets.items())} for name, sets in BACKENDS.items()]
    from mmkit.figures.gallery import FIGURES

    return [{"figure": name} for name in FIGURES]
