"""What a run leaves open, decided for a machine: backend, processes, precision, micro-batch, recomputation, offload.

A pure function of run, machine and parameter counts, so that the choice for a machine that is not here can be computed and tested.
What was given by name is never changed (`RunConfig.pinned`), and neither is what changes the training itself: the global batch is
met exactly, or refused with the nearest ones. Decisions are tried from the cheapest to the dearest: a smaller micro-batch costs some
speed, recomputation a third of it, offload most of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from mmkit.config import BackendConfig, Chosen, ConfigError, LoraConfig, RunConfig, asked, changed
from mmkit.launch.counting import count, spelt_out
from mmkit.launch.machine import GPUS, Machine, named
from mmkit.launch.plan import Part, Plan, TooLargeError, make_plan, size
from mmkit.notebook.parameters import BACKENDS
from mmkit.sharding.combinations import OFFLOADS, Facts, check_combination

LESS = {"bf16": "fp16", "fp16": "bf16", "tf32": "fp32"}  # what stands in for a precision that the device does not have
BY_HAND, PRESET = "given by hand", "the preset's"
# machines that a run which fits nowhere here is tried on, small to large
OTHERS = ("l4-24gb", "a100-80gb", "8xa100-80gb", "v4-64", "4x8xa100-80gb", "v4-256", "16x8xa100-80gb", "v4-1024")


class BatchError(ConfigError):
    """The devices of the machine cannot share the global batch evenly; the message names the nearest that they can."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A run resolved for a machine, and the plan that the decision was made by."""

    run: RunConfig
    plan: Plan

    @property
    def backend(self) -> str:
        """The short name of the backend, as `backend` and --backend take it: ddp, zero3."""
        own = self.run.backend
        return {"torch": own.strategy, "deepspeed": f"zero{own.zero_stage}"}.get(own.kind, own.kind)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row a decision: setting, value, why."""
        rows = [{"setting": row.setting, "value": row.value, "why": row.why} for row in self.run.chosen]
        if self.run.stage == "eval":
            return rows
        why = f"global_batch {self.run.train.global_batch} is met exactly"
        return [*rows, {"setting": "accumulation", "value": self.run.accumulation, "why": why}]

    def __str__(self) -> str:
        run, why = self.run, next((row.why for row in self.run.chosen if row.setting == "backend.kind"), BY_HAND)
        backend = f"{Facts.of(run).machinery} on {run.devices} x {self.plan.machine.device}, {run.train.precision} ({why})"
        if run.stage == "eval":
            return f"backend: {backend}"
        batch = f"{run.train.device_batch} a device x {run.devices} devices x {run.accumulation} accumulation = {run.train.global_batch}"
        rest = {row.setting: row.why for row in run.chosen if row.asked != row.value}
        whys = [rest[name] for name in ("train.device_batch", "train.checkpoint_blocks", "backend.offload") if name in rest]
        return f"backend: {backend}\nbatch:   {batch} ({'; '.join(whys) or 'the micro-batch asked for fits'})"


@dataclasses.dataclass(frozen=True)
class Change:
    """A change with which a run fits that does not, and the plan that says so."""

    what: str
    settings: dict[str, Any]
    machine: str  # another machine's name, empty for the same
    plan: Plan

    def __str__(self) -> str:
        pairs = [f"{name}={_typed(value)}" for name, value in self.settings.items()]
        line = " ".join([*(["--set"] if pairs else []), *pairs, *(["--machine", self.machine] if self.machine else [])])
        book = [f"-p settings '{json.dumps(self.settings)}'"] if self.settings else []
        book += [f"-p machine {self.machine}"] if self.machine else []
        return f"{self.what}: {line}   (notebooks: {' '.join(book)}); it needs {size(self.plan.need.total)} a device"


def _typed(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, (dict, list)) else "none" if value is None else str(value).lower()
    return f"'{text}'" if isinstance(value, (dict, list)) else text


# ---------------------------------------------------------------- the choice


def choose(run: RunConfig, machine: Machine, parts: Sequence[Part] | None = None, must_fit: bool = True) -> Choice:
    """``run`` resolved for ``machine``; a run that was resolved before stays as it is. ``parts`` are counted where not given.

    BatchError where global_batch cannot be met exactly, ConfigError where the machine lacks what was given by hand, or where no backend can do
    what is asked; TooLargeError where nothing fits, or, without ``must_fit``, what comes nearest.
    """
    parts, best = count(run) if parts is None else parts, None
    if run.stage == "eval":
        run = _scored_by(run)
    if run.chosen:
        best = _planned(run, machine, parts)
        return _fitting(best, machine) if must_fit else best
    precision = _precision(run, machine)
    for offload in _offloads(run, machine):
        for recompute in _recomputations(run):
            extra = {"backend.offload": offload, "train.checkpoint_blocks": recompute, "train.precision": precision}
            found, needs = [], []
            for name, settings in _backends(run, machine, offload):
                tried = _largest(_with(run, settings | extra), machine, parts)
                if tried.plan.fits:
                    found.append((name, tried))
                    if name == run.backend.prefer or run.backend.kind != "auto":
                        break
                else:
                    needs.append(f"{name} would need {size(tried.plan.need.total)} a device")
                    best = min(best or tried, tried, key=lambda choice: choice.plan.need.total)
            if found:
                preferred = [each for each in found if each[0] == run.backend.prefer]
                name, choice = (preferred or sorted(found, key=lambda each: -each[1].run.train.device_batch))[0]
                return _told(run, choice, name, needs, machine)
    return _fitting(best, machine) if must_fit else _told(run, best, Facts.of(best.run).machinery, [], machine)


def for_machine(run: RunConfig, machine: Machine) -> Choice:
    """`choose`, with a plan that names the nearest changes that fit where the run does not: `Plan.check` and `Plan.message` tell."""
    choice = choose(run, machine, must_fit=False)
    if choice.plan.fits:
        return choice
    ways = tuple(map(str, changes_that_fit(run, machine)))
    return dataclasses.replace(choice, plan=dataclasses.replace(choice.plan, ways=ways))


def _fitting(choice: Choice, machine: Machine) -> Choice:
    if not choice.plan.fits:
        raise TooLargeError(choice.plan.message())
    return choice


def _planned(run: RunConfig, machine: Machine, parts: Sequence[Part]) -> Choice:
    """The plan of a resolved run, on the part of the machine that it uses."""
    used = machine if machine.devices == run.devices else machine.using(run.devices)
    return Choice(run, make_plan(spelt_out(run), parts, used))


def _scored_by(run: RunConfig) -> RunConfig:
    """``run`` without the backend that its preset trains by: scoring takes one device, by what was given by hand for it, or by `single` or `xla`."""
    given = {name: value for name, value in run.backend if f"backend.{name}" in run.pinned}
    return run.model_copy(update={"backend": BackendConfig(**{"kind": "auto"} | given)})


def _with(run: RunConfig, settings: dict[str, Any]) -> RunConfig:
    """``run`` with settings of train and backend replaced, unchecked: `check_combination` and `_largest` see to that."""
    sections = {}
    for section in ("train", "backend"):
        own = {name.partition(".")[2]: value for name, value in settings.items() if name.startswith(f"{section}.")}
        sections[section] = getattr(run, section).model_copy(update=own)
    return run.model_copy(update=sections)


# ---------------------------------------------------------------- what is open


def _precision(run: RunConfig, machine: Machine) -> str:
    asked, later = run.train.precision, run.train.stability.rewind_precision
    if run.train.stability.action == "rewind" and later and machine.peak and later not in machine.peak:
        has = ", ".join(machine.peak)
        raise ConfigError(f"stability.rewind_precision = {later}: {machine.device} ({machine.name}) does not compute in it; it has {has}")
    if asked in machine.peak or not machine.peak:
        return asked
    if "train.precision" in run.pinned:
        raise ConfigError(
            f"train.precision = {asked}: {machine.device} ({machine.name}) does not compute in it; use {LESS[asked]}, or leave it out"
        )
    return LESS[asked]


def _offloads(run: RunConfig, machine: Machine) -> tuple[bool, ...]:
    fixed = "backend.offload" in run.pinned or run.backend.offload or run.stage == "eval" or machine.kind != "cuda"
    return (run.backend.offload,) if fixed else (False, True)


def _recomputations(run: RunConfig) -> tuple[bool, ...]:
    """Recomputation is added only to transformers: a second forward of batch norms that train would update their statistics twice."""
    asked = run.train.checkpoint_blocks
    if run.model.kind == "vlm":
        transformers = "encoders" not in run.train.trainable
    else:
        towers = [tower for tower in (spelt_out(run).model.architecture or {}).values() if isinstance(tower, dict)]
        foreign = any("timm_model_name" in tower or "hf_model_name" in tower for tower in towers)
        transformers = not foreign and all(isinstance(tower.get("layers", 12), int) for tower in towers)
    fixed = asked or "train.checkpoint_blocks" in run.pinned or not transformers or run.stage == "eval"
    return (asked,) if fixed else (False, True)


def _backends(run: RunConfig, machine: Machine, offload: bool) -> list[tuple[str, dict[str, Any]]]:
    """(short name, settings) of the backends to try, best first; ConfigError with the reason where there is none."""
    own, several = run.backend, _spread(run, machine, "torch")["backend.processes"] * (run.backend.nodes or machine.hosts) > 1
    if own.kind != "auto":
        _refuse_lacking(own.kind, machine)
        names = [own.kind]
    elif machine.kind == "tpu" or own.xla_devices or own.fsdp_axis:
        if machine.kind == "cuda":
            raise ConfigError(f"backend.xla_devices and fsdp_axis are read by xla, which does not drive {machine.name}; leave them out")
        names = ["xla"]
    elif "backend.strategy" in run.pinned or "backend.zero_stage" in run.pinned:
        names = [own.strategy] if "backend.strategy" in run.pinned else [f"zero{own.zero_stage}"]
    elif run.stage == "eval" or (not several and not offload and not own.deepspeed_config):
        names = ["single"]
    else:
        # copies are the simplest; FSDP holds most; ZeRO-2 is what quantised weights can be offloaded or cut with
        names = [own.prefer, "ddp", "fsdp", "zero2"] if not own.deepspeed_config else [own.prefer, "zero3", "zero2", "zero1", "zero0"]
        names = [name for name in dict.fromkeys(names) if name not in (None, "xla")]
    found, refusals = [], []
    for name in names:
        settings = {} if own.kind != "auto" else dict(BACKENDS[name])
        kind = settings.get("backend.kind", own.kind)
        if ("backend.strategy" in run.pinned and kind != "torch") or ("backend.zero_stage" in run.pinned and kind != "deepspeed"):
            continue
        settings |= _spread(run, machine, kind) | {"backend.offload": offload}
        try:
            tried = _with(run, settings | {"train.precision": _precision(run, machine)})
            batches = device_batches(tried) if run.stage != "eval" else []
            check_combination(_with(tried, {"train.device_batch": batches[0]} if batches else {}))
            found.append((name, settings))
        except ConfigError as error:
            refusals.append(error)
    if not found and not (offload and not own.offload):
        by_hand = [name for name in run.pinned if name in ("backend.strategy", "backend.zero_stage")]
        use = {"tpu": "it is driven by xla"}.get(machine.kind, "strategy is torch's, zero_stage DeepSpeed's")
        told = refusals[0] if refusals else f"{' with '.join(by_hand)} on {machine.name}: {use}; leave it out"
        raise ConfigError(f"{told}; {machine.name} is driven by xla alone" if refusals and machine.kind == "tpu" else str(told))
    return found


def _refuse_lacking(kind: str, machine: Machine) -> None:
    """ConfigError for a backend given by hand that does not drive these devices."""
    if (kind == "xla") != (machine.kind == "tpu") and machine.kind != "cpu":
        use = "xla" if machine.kind == "tpu" else "single, torch or deepspeed"
        raise ConfigError(f"backend.kind = {kind} does not drive the {machine.device} of {machine.name}; use {use}, or auto")


def _spread(run: RunConfig, machine: Machine, kind: str) -> dict[str, Any]:
    """Processes, nodes and XLA devices of a backend of ``kind``: one process a device; fewer where one host has more than rows."""
    own, n = run.backend, machine.devices_per_host
    if kind == "xla":
        every = machine.devices if machine.kind == "tpu" and run.stage != "eval" else None
        if every and own.xla_devices not in (None, every):
            raise ConfigError(f"backend.xla_devices = {own.xla_devices}, but {machine.name} has {every} chips, of which all share a step")
        return {"backend.xla_devices": own.xla_devices or every}  # one program, whichever number of hosts run it
    if kind == "single" or run.stage == "eval":
        return {"backend.processes": own.processes or 1, "backend.nodes": own.nodes or 1}
    for name, wanted, there in (("processes", own.processes, n), ("nodes", own.nodes, machine.hosts)):
        if wanted and wanted > there and machine.kind != "cpu":
            raise ConfigError(f"backend.{name} = {wanted}, but {machine.name} has {there}{' devices a host' if name == 'processes' else ''}")
    nodes, rows = own.nodes or machine.hosts, run.train.global_batch
    if "train.device_batch" in run.pinned:
        rows //= run.train.device_batch
    fewer = nodes == 1 and 0 < rows < n
    return {"backend.processes": own.processes or (rows if fewer else n), "backend.nodes": nodes}


def _largest(run: RunConfig, machine: Machine, parts: Sequence[Part]) -> Choice:
    """``run`` with the largest micro-batch that fits, or with the smallest where none does."""
    if run.stage == "eval":
        return _planned(run, machine, parts)
    batches = device_batches(run)
    if not batches:
        raise BatchError(_unmet(run, machine))
    for batch in batches:
        choice = _planned(_with(run, {"train.device_batch": batch}), machine, parts)
        if choice.plan.fits:
            break
    return choice


def device_batches(run: RunConfig) -> list[int]:
    """Micro-batches with which the devices of ``run`` meet its global batch exactly, largest first: at most the preset's."""
    rows, rest = divmod(run.train.global_batch, run.devices)
    if rest:
        return []
    least = run.train.device_batch if "train.device_batch" in run.pinned else 1
    return [batch for batch in range(min(run.train.device_batch, rows), least - 1, -1) if rows % batch == 0]


def _unmet(run: RunConfig, machine: Machine) -> str:
    batch, own, pinned = run.train.global_batch, run.train.device_batch, "train.device_batch" in run.pinned
    one_pass = run.devices * (own if pinned else 1)
    lower = max(batch // one_pass, 1) * one_pass
    told = f"global_batch {batch} does not divide by the {run.devices} devices of {machine.name}"
    told += f" x device_batch {own} = {one_pass}" if pinned else ""
    told += f"; the nearest global batches that do are {lower} and {lower + one_pass}"
    told += ", or leave device_batch out: it is chosen" if pinned and batch % run.devices == 0 else ""
    fewer = next(n for n in range(min(run.devices, batch), 0, -1) if batch % n == 0)
    one_host = machine.kind == "cuda" and machine.hosts == 1 and not run.backend.processes == fewer
    return told + (f", or use {fewer} of its devices: backend.processes={fewer}" if one_host and not pinned else "")


# ---------------------------------------------------------------- why


def _told(run: RunConfig, choice: Choice, name: str, needs: Sequence[str], machine: Machine) -> Choice:
    """``choice`` with a row for each decision."""
    new, own = choice.run, run.backend
    if own.kind != "auto":
        why = BY_HAND if "backend.kind" in run.pinned else PRESET
    elif new.backend.kind == "xla":
        why = f"one program on all {new.devices} chips" if machine.kind == "tpu" else BY_HAND
    elif new.backend.kind == "single":
        why = "evaluation takes one device" if run.stage == "eval" and machine.devices > 1 else "one device"
    else:
        why = f"{name} is what the preset prefers" if name == own.prefer else f"{name} fits" + "".join(f", {need}" for need in needs)
    used = f"{new.devices} of {machine.devices} devices of {machine.name}"
    if machine.shared:
        used = f"{new.devices} process{'es' * (new.devices > 1)} on {machine.name}"
    elif new.devices < machine.devices and run.stage != "eval" and not own.processes:
        used += f": global_batch is {run.train.global_batch}"
    detail = {"torch": ["backend.strategy"], "deepspeed": ["backend.zero_stage"]}.get(new.backend.kind, [])
    spread = ["backend.xla_devices"] if new.backend.kind == "xla" else ["backend.processes", "backend.nodes"]
    cap, has = run.train.device_batch, machine.device
    smaller = f"the largest that fits, at most the preset's {cap}"
    if new.train.device_batch < cap and all(batch <= new.train.device_batch for batch in device_batches(_with(new, {"train.device_batch": cap}))):
        smaller = f"global_batch {run.train.global_batch} gives each of {new.devices} devices {run.train.global_batch // new.devices} rows"
    whys = {"backend.kind": why} | dict.fromkeys(detail, why) | dict.fromkeys(spread, used)
    whys |= {"train.precision": f"{has} has no {run.train.precision}", "train.device_batch": smaller}
    whys["train.checkpoint_blocks"] = "without recomputation it does not fit"
    whys["backend.offload"] = "without offload it does not fit"
    rows = []
    for setting, reason in whys.items():
        section, _, key = setting.partition(".")
        asked, value = getattr(getattr(run, section), key), getattr(getattr(new, section), key)
        kept = BY_HAND if setting in run.pinned else PRESET
        decided = asked != value or setting == "backend.kind" or (setting in detail and own.kind == "auto" and setting not in run.pinned)
        rows.append(Chosen(setting=setting, asked=asked, value=value, why=reason if decided else kept))
    run = new.model_copy(update={"chosen": tuple(rows)})
    return Choice(run, dataclasses.replace(choice.plan, run=choice.plan.run.model_copy(update={"chosen": tuple(rows)})))


# ---------------------------------------------------------------- changes that fit


def changes_that_fit(run: RunConfig, machine: Machine, most: int = 3) -> list[Change]:
    """The nearest changes, ``most`` of them, with which a run that does not fit ``machine`` does: each is planned, none is guessed."""
    run, found = asked(run), []  # what was chosen for another machine is open again
    done: set[str] = set()  # of several sizes of one kind of change the first that fits
    for what, settings, other in _changes(run, machine):
        if len(found) == most:
            break
        if what in done:
            continue
        try:
            own = changed(run, **{name.replace(".", "__"): value for name, value in settings.items()})
            free = own.pinned if "train.device_batch" not in settings else tuple(set(own.pinned) - {"train.device_batch"})
            choice = choose(own.model_copy(update={"pinned": free}), named(other) if other else machine)
        except ConfigError:
            continue
        if "train.device_batch" in settings:
            settings = {"train.device_batch": choice.run.train.device_batch}
        done.add(what)
        found.append(Change(what, settings, other, choice.plan))
    return found


def _changes(run: RunConfig, machine: Machine) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(what, settings, another machine) from the nearest on: what leaves the numbers alone, then adapters, then other machines."""
    train, adapters = run.train, []
    if "train.device_batch" in run.pinned:
        yield "smaller micro-batch", {"train.device_batch": train.device_batch}, ""
    if not train.checkpoint_blocks:
        yield "recomputation", {"train.checkpoint_blocks": True}, ""
    if run.backend.kind != "auto":
        yield "another backend", {"backend.kind": "auto", "backend.processes": None, "backend.nodes": None}, ""
    if "backend.strategy" in run.pinned and run.backend.strategy == "ddp":
        yield "another strategy", {"backend.strategy": "fsdp"}, ""
    if "backend.zero_stage" in run.pinned and run.backend.zero_stage < 3:
        yield "another stage of ZeRO", {"backend.zero_stage": 3}, ""
    if not run.backend.offload and Facts.of(run).machinery in (*OFFLOADS, "auto"):
        yield "offload", {"backend.offload": True}, ""
    if run.model.kind == "vlm" and run.stage != "eval":
        whole = {} if train.lora else {"train.trainable": [name for name in train.trainable if name != "language"]}
        if "language" in train.trainable:
            adapters.append(("LoRA", whole | {"train.lora": LoraConfig().model_dump(mode="json", include={"rank", "alpha"})}))
        if train.bits == 16 and (adapters or train.lora):
            adapters.append(("QLoRA", (adapters[0][1] if adapters else {}) | {"train.bits": 4}))
    for what, settings in adapters:
        yield what, settings, ""
    others = [("more devices", name) for name in _more(machine)]
    others += [("a TPU slice" if named(name).kind == "tpu" else "GPUs", name) for name in OTHERS]
    yield from ((what, {}, name) for what, name in others)
    for with_what, settings in [("a smaller micro-batch", {"train.device_batch": train.device_batch}), *adapters]:
        if with_what in (what for what, _ in adapters) or "train.device_batch" in run.pinned:
            yield from ((f"{what} and {with_what}", settings, name) for what, name in others)


def _more(machine: Machine) -> list[str]:
    """Names of machines with more of the same GPUs."""
    device = next((name for name, row in GPUS.items() if row.label == machine.device), None)
    counts = [f"{n}x" for n in (2, 4, 8)] + [f"{hosts}x8x" for hosts in (2, 4, 8, 16, 32)]
    return [f"{each}{device}" for each in counts if named(f"{each}{device}").devices > machine.devices] if device else []
