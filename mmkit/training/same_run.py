"""Whether a run folder holds this run: which settings a resume takes over, tells, refuses.

A run is resumed by its name, so a changed setting would either do nothing (the run has ended) or train one model under two settings.
Every setting is in exactly one class of `CLASSES`; what is not named there is `NAMED`, so a new setting is compared by default.
What is only a place (paths of weights and data) is not compared: what lies there is, by hash, when the run resumes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from mmkit.config import ConfigError, RunConfig
from mmkit.models.exports import config_of, progress, provenance
from mmkit.training.checkpoint import CheckpointError

FREE = "changes no number that is trained, or is itself about resuming"
PLACE = "a place: what lies there is compared by its hash"
TOLD = "may change whenever a run resumes; told and recorded with its step"
NAMED = "may change where the user names the checkpoint to resume from"
FIXED = "what the trained tensors belong to; never changes"

CLASSES = {
    "preset": FREE, "stage": FREE, "name": FREE, "root": FREE, "resume": FREE, "dry_run": FREE, "intended_for": FREE,
    "pinned": FREE, "chosen": FREE,  # what was chosen stands in the settings themselves
    # the same training on any machine: tests/sharding holds all backends, device counts and accumulations equal
    "backend": FREE, "train.device_batch": FREE,
    # the same sums in another order or less memory
    "train.checkpoint_blocks": FREE, "train.loss_chunk": FREE, "train.contrastive.chunk": FREE,
    "train.contrastive.siglip_exchange": FREE, "data.buckets": FREE,
    # looks on, writes down, or stops; `WATCHED` of it steers a plateau schedule
    "evaluation": FREE, "train.log_every": FREE, "train.eval_every": FREE, "train.eval_unit": FREE, "train.allow_no_grad": FREE,
    "train.checkpoint": FREE, "data.validation": FREE, "data.workers": FREE, "data.cache_dir": FREE, "data.max_bad_share": FREE,
    "train.tensorboard": FREE,
    "start_from": PLACE, "data.mixture_root": PLACE,
    "train.steps": TOLD, "train.epochs": TOLD, "train.precision": TOLD,
    "model": FIXED, "train.trainable": FIXED, "train.new_tokens": FIXED, "train.bits": FIXED,
    "train.optimizer.kind": FIXED,
    "train.lora": FIXED, "train.lora.dropout": NAMED,
}  # fmt: skip
WATCHED = ("train.eval_every", "train.eval_unit", "train.checkpoint.best_metric", "train.checkpoint.best_mode", "data.validation")
UNORDERED = ("train.trainable", "train.lora.targets", "train.lora.components", "train.lora.modules_to_save")


class Difference(NamedTuple):
    """A setting of which a run folder and a run have two values."""

    path: str
    old: Any
    new: Any
    kind: str

    def __str__(self) -> str:
        return f"{self.path} = {short(self.old)}, this one has {short(self.new)}"


def class_of(path: str, run: RunConfig | None = None) -> str:
    """The class of a setting (a dotted path, also of an entry inside a mapping), of the longest entry of `CLASSES` it lies in."""
    if run is not None and path.startswith(WATCHED) and run.train.optimizer.schedule == "plateau":
        return NAMED
    if run is not None and path == "data.cache_features" and run.model.kind == "vlm":
        return FREE  # frozen encoders give the same features then and now; a contrastive run gives up random crops for its cache
    parts = path.split(".")
    inside = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((CLASSES[name] for name in inside if name in CLASSES), NAMED)


def differences(before: dict[str, Any], run: RunConfig) -> list[Difference]:
    """Every setting in which a saved config (``before``, as plain data) and ``run`` differ and that is compared by value."""
    old, new = comparable(with_defaults(before)), comparable(run.model_dump(mode="json"))
    found = [Difference(*leaf, class_of(leaf[0], run)) for leaf in _leaves("", old, new)]
    return [each for each in found if each.kind not in (FREE, PLACE)]


def comparable(tree: dict[str, Any]) -> dict[str, Any]:
    """A config as plain data in the one spelling that is compared: places left out, sets sorted, rates that say nothing left out."""
    tree = copy.deepcopy(tree)
    optimizer = (tree.get("train") or {}).get("optimizer") or {}
    for path in UNORDERED:
        *above, name = path.split(".")
        section = tree
        for key in above:
            section = section.get(key) or {}
        if isinstance(section.get(name), list):
            section[name] = sorted(section[name])
    if optimizer.get("lr_of"):
        optimizer["lr_of"] = {part: rate for part, rate in optimizer["lr_of"].items() if rate != optimizer.get("lr")}
    model = tree.get("model") or {}
    for source in (tree.get("data") or {}).get("sources") or ():
        source.pop("path", None)
        source.pop("images", None)
    for part, place in [(model.get("language"), "source"), *((encoder, "weights") for encoder in model.get("encoders") or ())]:
        if part and part.get(place) != "random":  # drawn weights lie nowhere
            part.pop(place, None)
    return tree


def with_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """A saved config with the settings that were added since and without those that are gone; as it is where it no longer fits."""
    for _ in range(2):
        try:
            return RunConfig.model_validate(tree).model_dump(mode="json")
        except ValidationError as error:
            gone = [problem["loc"] for problem in error.errors() if problem["type"] == "extra_forbidden"]
            tree = _without(tree, [tuple(part for part in loc if part not in ("vlm", "clip")) for loc in gone])
    return tree


def check_same_run(run: RunConfig) -> None:
    """ConfigError where the folder holds a run with other settings than those a resume may change.

    Compared are the settings that its newest checkpoint was made with: what is resumed. Without a checkpoint there is nothing to resume.
    """
    at = None if run.resume == "never" else progress(run.folder)
    before = at and (at.state.get("settings") or config_of(run.folder))  # older checkpoints do not say
    if not before:
        return
    refused = [each for each in differences(before, run) if each.kind == FIXED or (each.kind == NAMED and run.resume == "auto")]
    if not refused:
        return
    by_name = all(each.kind == NAMED for each in refused)
    ended = f", finished before at step {at.step} (nothing was trained now)," if at.done else ""
    raise ConfigError(
        f"{run.folder} holds a run{ended} with {'; '.join(map(str, refused[:4]))}{'; ...' if refused[4:] else ''}: "
        f"give it another name (name=...), or start anew with resume=never"
        + ("; to change it on the way, name the checkpoint: resume=PATH, step-N or epoch-N" if by_name else "")
    )


def check_start(run: RunConfig, export: str | None) -> None:
    """CheckpointError where the run in the folder began with other weights than ``export`` (what it would start from now) holds: the stage
    before was trained anew. Reads hashes only; weights are compared when the run resumes."""
    at = progress(run.folder) if export and run.resume == "auto" else None
    now = provenance(export).get("trained", {}) if at else {}
    before = (at.state.get("started") or {}) if at else {}
    refuse_other_start(run.folder, {name: before[name] for name in before if name in now}, now, export)


def refuse_other_start(where: str, before: dict[str, str], now: dict[str, str], source: str | None) -> None:
    """CheckpointError where one of the tensors that a run began with (``before``: name -> hash) is another one now."""
    changed = next((name for name, digest in before.items() if now.get(name) != digest), None)
    if changed:
        raise CheckpointError(
            f"{where} was trained from other weights than {source or 'its sources'} holds now (first {changed}): the stage before was "
            "trained anew, or a source replaced; start anew with resume=never or another name, or keep what it began with and name the "
            "checkpoint: resume=PATH, step-N or epoch-N"
        )


def already_done(step: int, total: int) -> str:
    """What a run that has nothing left to train says."""
    return (
        f"already done: finished before at step {step} of {total}; nothing was trained; give it another name (name=...) or resume=never to "
        "train it anew"
    )


def told(entry: dict[str, Any]) -> str:
    """One line of what an entry of the history changed."""
    changes = ", ".join(f"{name} {short(old)} -> {short(new)}" for name, (old, new) in entry.get("changes", {}).items())
    rates = "; learning rate {:.4g} before, {:.4g} then".format(*entry["lr"]) if "lr" in entry else ""
    return f"from step {entry['step']} on: {changes or 'no other settings'}{rates}"


def short(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def first_difference(path: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """(path, old, new) of the first leaf in which two trees differ."""
    return next(_leaves(path, old, new), (path, old, new))


def _leaves(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Every place in which two trees differ, as (dotted path, old, new)."""
    dot = f"{path}." if path else ""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _leaves(f"{dot}{key}", old.get(key), new.get(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new)):
            yield from _leaves(f"{dot}{index}", a, b)
    elif old != new:
        yield path, old, new


def _without(tree: Any, places: list[tuple]) -> Any:
    """``tree`` without the entries at ``places`` (keys and list positions from the root)."""
    if isinstance(tree, dict):
        below = {key: [place[1:] for place in places if len(place) > 1 and place[0] == key] for key in tree}
        return {key: _without(value, below[key]) for key, value in tree.items() if (key,) not in places}
    if isinstance(tree, list):
        return [_without(value, [place[1:] for place in places if place and place[0] == i]) for i, value in enumerate(tree)]
    return tree
