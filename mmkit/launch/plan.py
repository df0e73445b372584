"""Memory, time and cost of a run, from its config and its parameter counts, before a weight is read.

Weights, gradients and optimizer state follow from counts and storage and are exact but for padding. Activations follow from shapes and
are an estimate: what backward keeps of each layer, by component. Dataset size plays no part in memory. Time is operations over the
rate that training reaches: a fraction of the device's peak taken from published runs, or of a matrix product measured here.

Not here: building the (meta) model that is counted; that is `mmkit.launch.preflight`.
"""

from __future__ import annotations

import dataclasses
import html
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from mmkit.config import ConfigError, LoraConfig, RunConfig
from mmkit.launch.machine import GIB, Machine

ADAM_BYTES = {"adamw": 8.0, "adamw_8bit": 2.04}  # both moments of a parameter; 8-bit keeps one fp32 scale a block of 256
QUANTISED_BYTES = {4: 0.5 + (1 + 4 / 256) / 64, 8: 1.0 + 4 / 4096, 16: 2.0}  # nf4 with double quantisation; int8 with a scale a row
# Fraction of an A100's peak that whole published runs reached, with data loading, links and kernel launches in it, and whose.
# Operations are counted as in `Plan.operations`, recomputation included. tests/launch/test_plan.py works each out again from
# the published rate; a run it was not taken from (ViT-L/14 on LAION-400M, 127 h) then comes within a quarter.
FRACTIONS: dict[tuple[str, str], tuple[float, str]] = {
    ("clip", "tf32"): (0.315, "ViT-L/14 on 384 A100 40GB, 27,862 samples/s (LAION large-openclip)"),
    ("clip", "bf16"): (0.21, "ViT-H/14 and g/14 on 800 A100 40GB, 42 and 31 samples/s each (LAION large-openclip)"),
    ("clip", "fp16"): (0.144, "ViT-H/14 and g/14 on 800 A100 40GB, 30 and 20 samples/s each (LAION large-openclip)"),
    ("vlm", "bf16"): (0.48, "LLaVA-1.5 7B and 13B pretraining, 558K samples in 3.5 and 5.5 h on 8 A100 80GB (its README)"),
}
HERE_FRACTION = 0.5  # of a measured matrix product's rate that the demo's two stages reach on two CPU cores
OTHERS = {"fp32": "tf32", "tf32": "bf16", "fp16": "bf16"}  # whose fraction a precision without a published one takes


class TooLargeError(ConfigError):
    """The run needs more memory than the machine has; the message says how much and what to do."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Parameters of one component of a model."""

    component: str
    parameters: int
    trained: int = 0  # of them, without adapters
    adapters: int = 0  # LoRA parameters added to it
    linear: int = 0  # weights of its linear layers but the head: what quantisation stores in few bits
    tables: int = 0  # embeddings: looked up, not multiplied
    halved: int = 0  # weights that scoring keeps in half precision where it computes in it (`models.hollow.cast_at_use`)


@dataclasses.dataclass(frozen=True)
class Split:
    """Over how many devices a backend cuts each kind of state, and bytes a trained parameter it keeps besides."""

    weights: int
    gradients: int
    optimizer: int
    master: float = 0.0  # ZeRO keeps the weights it updates as a second, cut copy


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the data, on average: its positions with padding, and the samples packed into it."""

    positions: float
    samples: float


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes on one device."""

    component: str
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    cache: float = 0.0  # keys and values of the positions that an answer goes on from

    @property
    def total(self) -> float:
        """All kinds together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache


# ---------------------------------------------------------------- counting


def count_parts(
    module: Any,
    components: Sequence[tuple[str, str]],
    trained: Collection[str] = (),
    adapted: Collection[str] = (),
    lora: LoraConfig | None = None,
    halved: Iterable[Any] = (),
) -> tuple[Part, ...]:
    """The parameters of a module (on any device, also meta) by component; ``trained`` names those that train whole,
    ``adapted`` the linear layers that get an adapter of ``lora`` (`training.adapters.targets_of`), ``halved`` are those of `Part.halved`."""
    head, small = {id(p) for p in _head(module)}, {id(p) for p in halved}
    tables: dict[str, dict[str, int]] = {}
    seen: set[int] = set()
    for path, layer in module.named_modules():
        linear = type(layer).__name__ == "Linear"  # not the output layer inside torch's attention, which takes no adapter
        for key, parameter in layer.named_parameters(recurse=False):
            name = f"{path}.{key}" if path else key
            if id(parameter) in seen:  # tied weights count once
                continue
            seen.add(id(parameter))
            component = _component(name, components)
            row = tables.setdefault(component, dict.fromkeys(("parameters", "trained", "adapters", "linear", "tables", "halved"), 0))
            row["parameters"] += parameter.numel()
            row["trained"] += parameter.numel() if name in trained else 0
            row["tables"] += parameter.numel() if type(layer).__name__ == "Embedding" else 0
            row["halved"] += parameter.numel() if id(parameter) in small else 0
            if linear and key == "weight" and id(parameter) not in head:
                row["linear"] += parameter.numel()
            if key == "weight" and path in adapted:  # two thin matrices, and a magnitude a row
                row["adapters"] += lora.rank * sum(parameter.shape) + (parameter.shape[0] if lora.use_dora else 0)
    return tuple(Part(component, **row) for component, row in tables.items())


def _head(module: Any) -> list[Any]:
    head = getattr(module, "head", None)
    return list(head.parameters()) if hasattr(head, "parameters") else []


def _component(name: str, components: Sequence[tuple[str, str]]) -> str:
    hits = [component for pattern, component in components if re.match(pattern, name)]
    return hits[0] if hits else "other"


# ---------------------------------------------------------------- memory


def split_of(run: RunConfig, devices: int) -> Split:
    """How the backend of ``run`` cuts state over ``devices``."""
    backend, n = run.backend, devices
    cuts = {
        "single": Split(1, 1, 1),
        "torch/ddp": Split(1, 1, 1),
        "torch/fsdp": Split(n, n, n),
        "deepspeed/0": Split(1, 1, 1),
        "deepspeed/1": Split(1, 1, n, 4.0),
        "deepspeed/2": Split(1, n, n, 4.0),
        "deepspeed/3": Split(n, n, n, 4.0),
        "xla": Split(*[min(backend.fsdp_axis or n, n)] * 3),
    }
    detail = {"torch": f"/{backend.strategy}", "deepspeed": f"/{backend.zero_stage}"}
    return cuts[backend.kind + detail.get(backend.kind, "")]


def state_needs(run: RunConfig, parts: Iterable[Part], devices: int) -> tuple[Need, ...]:
    """Weights, gradients and optimizer state of each component on one device."""
    train, cut = run.train, split_of(run, devices)
    moments = ADAM_BYTES[train.optimizer.kind]
    needs = []
    for part in parts:
        trained = part.trained + part.adapters
        frozen = _frozen_weights(run, part) / (1 if train.bits < 16 and part.component == "language" else cut.weights)
        optimizer = trained * moments / cut.optimizer + trained * cut.master / cut.optimizer
        offloaded = run.backend.offload
        needs.append(
            Need(
                part.component,
                weights=frozen + trained * 4 / cut.weights,
                gradients=trained * 4 / cut.gradients,
                optimizer=0.0 if offloaded else optimizer,
            )
        )
    return tuple(needs)


def _frozen_weights(run: RunConfig, part: Part) -> float:
    """Frozen weights are kept in fp32; linear ones of the language model in few bits where quantised, or as its files have them."""
    frozen = part.parameters - part.trained
    small = 0 if part.trained else _small_linear(run, part)
    return small * QUANTISED_BYTES[run.train.bits] + (frozen - small) * 4.0


def _small_linear(run: RunConfig, part: Part) -> int:
    """How many linear weights are stored in less than fp32: quantised, or in half precision as published language models are, where
    training computes in it. The packs' are in fp32."""
    half = run.train.precision in ("bf16", "fp16") and run.model.kind == "vlm" and not _in_fp32(run.model.language.source)
    return part.linear if part.component == "language" and not part.trained and (run.train.bits < 16 or half) else 0


def _in_fp32(source: str) -> bool:
    return source == "random" or source.startswith("pack:")


def cast_bytes(run: RunConfig, part: Part) -> float:
    """Half-precision copies of weights that autocast makes and backward keeps; block by block where blocks are recomputed."""
    train = run.train
    half = train.precision in ("bf16", "fp16") and part.component not in _locked(run)
    if not half or train.checkpoint_blocks:
        return 0.0
    return 2.0 * (part.parameters - _small_linear(run, part))


def _locked(run: RunConfig) -> tuple[str, ...]:
    """Components that run without a gradient."""
    if run.model.kind == "vlm":
        return () if "encoders" in run.train.trainable else ("encoders",)
    return tuple(name for name, locked in (("image", run.model.lock_image), ("text", run.model.lock_text)) if locked)


def activation_needs(run: RunConfig) -> dict[str, float]:
    """Bytes that one micro-batch keeps for backward on one device, by component."""
    model, train = run.model, run.train
    width = 2 if train.precision in ("bf16", "fp16") else 4
    if model.kind != "vlm":
        return _contrastive_activations(run, width)
    rows, length = train.device_batch, max(run.data.buckets or (run.data.max_length,))
    images = rows * run.data.max_images
    needs = {"language": _decoder_bytes(model.language.architecture, rows, length, run, width)}
    queries = images * model.grid_side**2
    keys = images * sum(encoder.side**2 for encoder in model.encoders)
    layers = model.connector.depth + (model.samplers.count if model.samplers else 0)
    v = model.connector.width
    needs["connector"] = (queries * v * 10 + keys * v * 3) * width * (layers if model.connector.kind == "sva" else 1)
    needs["encoders"] = max(images * encoder.side**2 * 1664 * 12 * width for encoder in model.encoders)  # one block at a time: frozen
    if "encoders" in train.trainable:
        needs["encoders"] *= 24
    return needs


def _decoder_bytes(architecture: dict[str, Any], rows: int, length: int, run: RunConfig, width: int) -> float:
    """Layers of the language model: per token what norms, projections, attention and the gated MLP keep, plus the head's logits."""
    d = architecture["hidden_size"]
    inner = architecture.get("intermediate_size", 4 * d)
    heads = architecture.get("num_attention_heads", 1)
    key_width = d * architecture.get("num_key_value_heads", heads) / heads
    layers = architecture["num_hidden_layers"]
    tokens = rows * length
    full = "language" in run.train.trainable or run.train.lora is not None
    norms = 2 * 3 * d * 4  # both norms keep their input, scaled input and statistics in fp32
    linear_inputs = (3 * d + inner) * width if full else 0  # a frozen linear layer keeps its weight, not its input
    layer = tokens * (norms + linear_inputs + (2 * d + 2 * key_width) * width + 3 * inner * width)
    kept = layers * tokens * d * width + layer if run.train.checkpoint_blocks else layers * layer
    chunk = run.train.loss_chunk or min(tokens, 256)
    return kept + chunk * architecture["vocab_size"] * (4 + 4 + width)


def _contrastive_activations(run: RunConfig, width: int) -> dict[str, float]:
    architecture = run.model.architecture or {}
    vision, text = architecture.get("vision_cfg", {}), architecture.get("text_cfg", {})
    needs = {}
    for name, tower, tokens in (("image", vision, image_tokens(vision)), ("text", text, text.get("context_length", 77))):
        layers, d = tower.get("layers", 24 if name == "image" else 12), tower.get("width", 1024 if name == "image" else 768)
        locked = run.model.lock_image if name == "image" else run.model.lock_text
        one_layer = run.train.device_batch * tokens * d * (34 if width == 2 else 60)
        recomputed = run.train.device_batch * tokens * d * width * layers + one_layer
        needs[name] = one_layer if locked else recomputed if run.train.checkpoint_blocks else one_layer * layers
    return needs


def image_tokens(vision: dict[str, Any]) -> int:
    """Positions of a contrastive image tower, its class token included."""
    size, patch = vision.get("image_size", 224), vision.get("patch_size", 14)
    return (size // patch) ** 2 + 1 if isinstance(size, int) and isinstance(patch, int) else 257


# ---------------------------------------------------------------- the plan


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs, what the machine has, and how long it takes there."""

    run: RunConfig
    machine: Machine
    parts: tuple[Part, ...]
    needs: tuple[Need, ...]
    samples: int | None = None
    row: Row | None = None  # as found in the data; None = one sample, padded to data.max_length
    ways: tuple[str, ...] = ()  # of a run that does not fit: changes that do (`choose.changes_that_fit`)

    @property
    def need(self) -> Need:
        """All components together, bytes on one device."""
        sums = {f.name: sum(getattr(need, f.name) for need in self.needs) for f in dataclasses.fields(Need) if f.name != "component"}
        return Need("all", **sums)

    @property
    def has(self) -> float:
        """Bytes one device may use."""
        return self.machine.memory / (self.machine.devices_per_host if self.machine.shared else 1)

    @property
    def fits(self) -> bool:
        """Whether the run fits, with a twentieth kept free, on devices and, where state is offloaded, on hosts."""
        own = self.host_need / self.machine.devices_per_host if self.machine.shared else 0.0  # a CPU offloads to its own memory
        return self.need.total + own <= self.has * 0.95 and self.host_need <= self.machine.host_memory * 0.95

    @property
    def host_need(self) -> float:
        """Bytes of a host's memory that offloaded state takes: trained weights and both moments in fp32, cut over all devices."""
        trained = sum(part.trained + part.adapters for part in self.parts)
        offloaded = self.run.backend.offload and self.run.stage != "eval"
        return trained * (4 + ADAM_BYTES[self.run.train.optimizer.kind]) / self.machine.hosts if offloaded else 0.0

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run; None where the amount of data is not known."""
        train = self.run.train
        if train.steps:
            return train.steps
        together = self.row.samples if self.row else 1
        return math.ceil(self.samples * train.epochs / together / train.global_batch) if self.samples else None

    @property
    def operations(self) -> float:
        """Operations of one step on all devices, recomputation included; of attention only the products with weights.

        A weight that multiplies costs two a position forward, two for the gradient that flows on, two for its own where
        it is trained.
        """
        run, total = self.run, 0.0
        for part in self.parts:
            language = part.component == "language"
            row = (self.row.positions if self.row else run.data.max_length) if language else _positions(run, part.component)
            trained = part.trained + part.adapters
            flows = trained > 0 or language  # a frozen language model passes gradients on to what stands before it
            weights = part.parameters - part.tables + part.adapters
            if run.data.cache_features and not language and part.component != "connector":
                weights = min(weights, trained)  # of a tower whose features are cached only what stands behind them runs
            passes = 2 + (2 + 2 * run.train.checkpoint_blocks) * flows
            total += run.train.global_batch * row * (passes * weights + 2 * min(trained, weights))
        return total

    @property
    def rate(self) -> tuple[float, str]:
        """(operations a second that training reaches on one device, how that is known); measured where this machine can be."""
        machine, precision = self.machine, self.run.train.precision
        if precision not in machine.peak:
            return 0.0, f"{machine.device} does not compute in {precision}: it has {', '.join(machine.peak)}"
        if machine.measured and not machine.peak[precision]:
            found = machine.measured(precision) / (machine.devices_per_host if machine.shared else 1)
            if not found:
                return 0.0, f"a matrix product in {precision} could not be tried here"
            told = f"{HERE_FRACTION:.0%} of the {found / 1e9:,.0f} GFLOP/s of a {precision} product measured here"
            return HERE_FRACTION * found, told
        kind, asked = self.run.model.kind, precision
        while (kind, asked) not in FRACTIONS:
            asked = OTHERS[asked]
        fraction, whose = FRACTIONS[kind, asked]
        peak = machine.peak[precision]
        told = f"{fraction:.3g} of {peak / 1e12:.4g} TFLOP/s in {precision}, as {whose}"
        good = machine.calibrated and asked == precision
        return fraction * peak, told if good else f"{told}; not calibrated for {precision} on {machine.name}"

    @property
    def seconds_a_step(self) -> float:
        """`operations` over what the devices together do in a second; infinite where that could not be measured."""
        rate = self.rate[0] * self.machine.devices
        return self.operations / rate if rate else math.inf

    @property
    def hours(self) -> float | None:
        """Hours of the whole run; None where the number of steps is not known."""
        return self.steps * self.seconds_a_step / 3600 if self.steps else None

    @property
    def _kinds(self) -> dict[str, str]:
        """What memory goes to, field of `Need` -> words."""
        scored = ("weights", "cache", "activations") if self.run.model.kind == "vlm" else ("weights", "activations")
        kinds = scored if self.run.stage == "eval" else ("weights", "gradients", "optimizer", "activations")
        return {name: {"cache": "keys and values"}.get(name, name) for name in kinds}

    def check(self) -> None:
        """TooLargeError where the run does not fit this machine."""
        if not self.fits:
            raise TooLargeError(self.message())

    def message(self) -> str:
        """What it needs, what the machine has, and the ways on."""
        need, run = self.need, self.run
        kinds = ", ".join(f"{words} {size(getattr(need, name))}" for name, words in self._kinds.items())
        verdict = "fits" if self.fits else "does not fit"
        several = self.machine.shared and self.machine.devices_per_host > 1
        shared = f" shared by {self.machine.devices_per_host} processes" if several else " a device"
        lines = [
            f"{run.preset}/{run.stage} {verdict} this machine.",
            f"  it needs:         {size(need.total)} a device ({kinds})",
            f"  this machine has: {size(self.machine.memory)}{shared} ({self.machine.name})",
        ]
        if self.host_need:
            lines.append(f"  offloaded:        {size(self.host_need)} a host, which has {size(self.machine.host_memory)}")
        if not self.fits:
            lines += [f"  it fits with      {way}" for way in self.ways]
            lines += [
                "  or look at it:    build and check the whole model here without weights: -p dry_run True (command line: --dry-run)",
                f"  it is meant for:  {run.intended_for} (mmkit launch --target slurm or tpu)",
            ]
        return "\n".join(lines)

    def rows(self) -> list[dict[str, Any]]:
        """One row a component: parameters, trained, adapters and GiB of each kind."""
        counted = {part.component: part for part in self.parts}
        rows = []
        for need in self.needs:
            part = counted.get(need.component, Part(need.component, 0))
            gib = {f"{name} GiB": round(getattr(need, name) / GIB, 3) for name in self._kinds}
            frozen = part.parameters - part.trained
            row = {"component": need.component, "parameters": part.parameters, "trainable": part.trained + part.adapters, "frozen": frozen}
            rows.append(row | gib | {"total GiB": round(need.total / GIB, 3)})
        total = {key: sum(row[key] for row in rows) if key != "component" else "all" for key in rows[0]} if rows else {}
        return [*rows, {key: round(value, 3) if isinstance(value, float) else value for key, value in total.items()}]

    def __str__(self) -> str:
        if self.run.stage == "eval":  # its time is that of answers, whose number and length no config says
            return f"{self.message()}\n  scored with:      {self.scored_with}"
        known = math.isfinite(self.seconds_a_step)
        time = f"about {duration(self.seconds_a_step)} a step" if known else "not known"
        time += f", {duration(self.hours * 3600)} for {self.steps} steps" if self.hours and known else ""
        if self.hours and known and self.machine.price:
            time += f", {self.hours * self.machine.devices * self.machine.price:,.0f} USD"
        lines = [self.message(), f"  time:             {time} on {self.machine.devices} x {self.machine.device}"]
        lines.append(f"  reckoned with:    {self.rate[1]}")
        if self.run.model.kind == "vlm":
            row = self.row or Row(self.run.data.max_length, 1)
            found = "as the first batches of the data" if self.row else "data.max_length: the data is not here"
            lines.append(f"                    rows of {row.positions:.0f} positions and {row.samples:.3g} samples ({found})")
        return "\n".join(lines)

    @property
    def scored_with(self) -> str:
        """Where and how a run of stage eval makes its answers, in one line."""
        run = self.run
        where = f"one process on one device ({self.machine.device})"
        if run.model.kind != "vlm":
            return f"{where}, in fp32, batches of {run.evaluation.batch}"
        from mmkit.launch.scoring_memory import answer_length, prompt_length

        lengths = f"prompts of {prompt_length(run)} positions and answers of up to {answer_length(run)}"
        return f"{where}, in {run.train.precision}, batches of {run.evaluation.batch} {lengths}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f'<pre style="word-break:normal">{html.escape(str(self))}</pre>'


def make_plan(
    run: RunConfig, parts: Sequence[Part], machine: Machine, samples: int | None = None, row: Row | None = None
) -> Plan:
    """The plan of ``run`` on ``machine`` for a model with these parts, ``samples`` an epoch, and rows as found in the data."""
    if run.stage == "eval":
        from mmkit.launch.scoring_memory import need_of  # it knows the tasks, which a plan of training does not load

        return Plan(run, machine, tuple(parts), tuple(need_of(run, part) for part in parts), samples, row)
    active = activation_needs(run)
    needs = []
    for part, need in zip(parts, state_needs(run, parts, machine.devices), strict=True):
        needs.append(dataclasses.replace(need, activations=active.get(part.component, 0.0) + cast_bytes(run, part)))
    return Plan(run, machine, tuple(parts), tuple(needs), samples, row)


def _positions(run: RunConfig, component: str) -> int:
    """Token positions of one row that a component works on."""
    model = run.model
    if model.kind != "vlm":
        architecture = model.architecture or {}
        text = architecture.get("text_cfg", {}).get("context_length", 77)
        return image_tokens(architecture.get("vision_cfg", {})) if component == "image" else text
    grids = sum(encoder.side**2 for encoder in model.encoders)
    return run.data.max_images * (grids // len(model.encoders) if component == "encoders" else model.grid_side**2)


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Seconds for people."""
    for unit, length in (("years", 365 * 86400), ("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.2g} s"
