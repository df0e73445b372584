"""Before anything starts: does the run fit this machine and its disk, what would it build, what is missing, and is its data in order.

The model is built on the meta device, full-sized and without a byte of weights, its parameters are counted, and the plan is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkit.config import STAGES, ConfigError, DataConfig, RunConfig, SourceConfig
from mmkit.launch.choose import Choice, for_machine
from mmkit.launch.counting import build_meta
from mmkit.launch.machine import Machine, check_is_here, machine_of
from mmkit.launch.plan import Plan, Row
from mmkit.notebook.tables import html, text
from mmkit.presets import preset_tree, presets

if TYPE_CHECKING:
    from mmkit.data.check import Report
    from mmkit.data.conversation import Formatter
    from mmkit.launch.requirements import Requirement

TRAINING, VALIDATION = "training", "validation"
LOOKED_AT = 20_000  # records whose keys are looked at before training, over all sources: 1 to 2 s


@dataclasses.dataclass(frozen=True)
class Preflight:
    """What was found before the start."""

    choice: Choice
    plan: Plan
    sources: tuple[dict[str, Any], ...] = ()  # one row a data source
    adapters: tuple[dict[str, Any], ...] = ()  # one row a kind of layer that gets an adapter
    added: tuple[dict[str, Any], ...] = ()  # one row a table of the vocabulary to which tokens are added
    shapes: tuple[dict[str, Any], ...] = ()  # of a dry run: what one micro-batch looks like on its way through the model
    missing: tuple[Requirement, ...] = ()  # weights and data that are not here
    disk: tuple[dict[str, Any], ...] = ()  # one row a thing that the run writes or fetches
    notes: tuple[str, ...] = ()  # what of the data's records is not read, or was chosen of several

    @property
    def run(self) -> RunConfig:
        """The run as it was resolved for the machine."""
        return self.choice.run

    @property
    def steps(self) -> int:
        """Optimizer steps the run will take, for progress; 1 where that is not known."""
        return self.plan.steps or 1

    def rows(self) -> list[dict[str, Any]]:
        """The parameter and memory table, one row a component."""
        return self.plan.rows()

    def _tables(self) -> list[tuple[str, list[dict[str, Any]]]]:
        found = {"chosen for the machine": self.choice.rows}
        found |= {"parameters and memory of one device": self.rows(), "adapters": self.adapters}
        found |= {"added tokens": self.added, "data": self.sources, "shapes": self.shapes}
        found |= {"missing here": [need.row() for need in self.missing], "disk": self.disk}
        found |= {"what of the records is not read": [{"source and what": note} for note in self.notes]}
        return [(caption, list(rows)) for caption, rows in found.items() if rows]

    def at_start(self) -> str:
        """What is worth saying as training begins: what is missing (weights come from the hub now), the
        adapters, the tokens that are added to the vocabulary, and what of the records is not read."""
        from mmkit.launch.requirements import told
        from mmkit.notebook.tables import text

        tables = [str(self.choice), told(self.missing)]
        named = (("adapters", self.adapters), ("added tokens", self.added))
        tables += [*(f"{name}\n{text(rows)}" for name, rows in named if rows), "\n".join(self.notes)]
        return "".join(f"{table}\n" for table in tables if table)

    def _repr_html_(self) -> str:
        return self.plan._repr_html_() + "".join(html(rows, caption) for caption, rows in self._tables())

    def __str__(self) -> str:
        return "\n".join([str(self.plan), *(f"\n{caption}\n{text(rows)}" for caption, rows in self._tables())])

    __repr__ = __str__


def preflight(run: RunConfig, machine: Machine | None = None) -> Preflight:
    """Counts the model of ``run``, plans it for ``machine`` (None: that of MMKIT_MACHINE, else this one), looks at its data and at the
    stage before, and raises TooLargeError where it cannot run there.

    ConfigError for what training itself would refuse: settings that cannot work together, names of what the model lacks, a schedule or best
    checkpoint that watches what is not measured, held-out data that are trained on, a disk that cannot hold two checkpoints, a machine
    given by name that is not this one.
    A dry run is never too large: it is meant for looking at a model on a machine that cannot hold it. Nothing is downloaded.
    """
    from mmkit.launch.disk import check_disk, disk_rows
    from mmkit.launch.requirements import missing, told
    from mmkit.training import assemble, same_run, validation, weights

    check_stage(run)
    machine = machine or machine_of()
    if not run.dry_run:
        check_is_here(machine)
    trains = run.stage != "eval"
    if trains:
        assemble.check(run)
        validation.check(run, tasks=run.model.kind == "clip")
        same_run.check_same_run(run)
    choice = for_machine(run, machine)
    run, plan = choice.run, choice.plan
    module = build_meta(run)
    adapters = weights.check_scope(module, run.train, weights.model_file(run).COMPONENTS) if trains else ()
    if not run.dry_run:
        plan.check()
    check_start(run)
    needs = missing(run)
    adds = trains and run.model.kind == "vlm" and all(need.kind == "data" for need in needs)  # its source is here
    added = weights.added_rows(module, run)[1] if adds else ()
    try:
        sources, samples = data_rows(run)
    except ConfigError as error:  # the first fault of one source; with what else is missing the user comes back once
        absent = told([need for need in needs if need.kind == "data"]) and told(needs)
        raise ConfigError("\n".join(filter(None, (str(error), absent)))) from None
    plan = dataclasses.replace(plan, samples=samples, row=row_of(run))
    if not run.dry_run:
        check_disk(plan)
    shapes = check_shapes(run, module) if run.dry_run and run.model.kind == "vlm" else ()
    return Preflight(
        choice, plan, tuple(sources), tuple(adapters), tuple(added), tuple(shapes), needs,
        tuple(disk_rows(plan, needs)), data_notes(run),
    )  # fmt: skip


def check_start(run: RunConfig) -> None:
    """ConfigError, with what makes it, where the export that ``run`` starts from or scores is missing or of an unfinished
    run; a dry run counts it among what is missing. CheckpointError where the run in the folder began with another."""
    from mmkit.evaluation.scoring import export_of
    from mmkit.training import same_run, weights

    try:
        export = export_of(run) if run.stage == "eval" else weights.parent_export(run)
    except ConfigError:
        if not run.dry_run:
            raise
        return
    if run.stage != "eval":
        same_run.check_start(run, export)


def plan_of(
    run: RunConfig,
    *,
    machine: Machine | None = None,
    samples: int | None = None,
    price: float | None = None,
) -> Plan:
    """The plan of a run, as chosen for ``machine`` or, where none is given, for this one. Data that is not here yet is not made.

    ConfigError for a stage that the preset does not have, names of what the model lacks, what could not be exported, and as `choose`
    raises it.
    """
    from mmkit.training.weights import check_exportable

    check_stage(run)
    check_exportable(run)
    choice = for_machine(run, dataclasses.replace(machine or machine_of(), price=price))
    row = row_of(choice.run) if _data_is_here(run) else None
    return dataclasses.replace(choice.plan, samples=samples, row=row)


def stages_of(preset: str) -> tuple[str, ...]:
    """The stages that a preset or one of its bases describes; all of them for a name that is no preset of this installation."""
    return tuple(preset_tree(preset).get("stages") or {}) if preset in presets() else STAGES


def check_stage(run: RunConfig) -> None:
    """ConfigError for a training stage that the preset does not describe: its settings would be defaults that nobody chose."""
    has = stages_of(run.preset)
    if run.stage != "eval" and run.stage not in has:
        raise ConfigError(f"model {run.preset!r} has no stage {run.stage!r}; its stages are {', '.join(has)}: take one of them")


def check_shapes(run: RunConfig, module: Any) -> list[dict[str, Any]]:
    """Sends one micro-batch without values through the model on the meta device; rows of what went in and came out.

    Every layer checks its shapes on the way, so a config whose parts do not fit together fails here, at full size, in seconds.
    """
    batch = meta_batch(run)
    hidden = module(batch)
    rows = [{"tensor": name, "shape": tuple(value.shape), "type": str(value.dtype).removeprefix("torch.")} for name, value in batch.items()]
    return [*rows, {"tensor": "hidden states", "shape": tuple(hidden.shape), "type": str(hidden.dtype).removeprefix("torch.")}]


def meta_batch(run: RunConfig) -> dict[str, Any]:
    """A vlm micro-batch of this run's static shapes on the meta device."""
    import torch

    from mmkit.models.build import resolution_of

    rows, length, images = run.train.device_batch, run.data.max_length, run.data.max_images
    whole = {"dtype": torch.long, "device": "meta"}
    batch = {name: torch.empty(rows, length, **whole) for name in ("input_ids", "labels", "positions", "segments", "branches")}
    batch["image_sizes"] = torch.empty(rows, images, 2, **whole)
    batch["image_real"] = torch.empty(rows, images, dtype=torch.bool, device="meta")
    for place, encoder in enumerate(run.model.encoders):
        side = resolution_of(encoder)
        batch[f"images.{place}"] = torch.empty(rows, images, 3, side, side, device="meta")
    if run.model.regions:
        regions, stages, points = max(run.data.max_regions, 1), len(run.model.regions.n_sub_points), run.model.regions.n_points
        batch["region_points"] = torch.empty(rows, regions, points, 2, device="meta")
        batch["region_starts"] = torch.empty(rows, regions, stages, **whole)
        batch["region_image"] = torch.empty(rows, regions, **whole)
        batch["region_real"] = torch.empty(rows, regions, dtype=torch.bool, device="meta")
        batch["region_point_real"] = torch.empty(rows, regions, points, dtype=torch.bool, device="meta")
    return batch


# ---------------------------------------------------------------- data


def data_rows(run: RunConfig) -> tuple[list[dict[str, Any]], int | None]:
    """One row a source (is it there, how many examples) and the number of training examples in all; None where a source is not here.

    In a dry run a missing source is only told; otherwise it is a ConfigError, since the run would fail at its first batch.
    """
    from mmkit.data.loader import looked_at

    rows, total = [], 0
    for source, use in sources_of(run):
        row = {"source": source.name, "use": use, "format": source.format, "path": source.path}
        try:
            _, examples = looked_at(source, data_for(run, use), run.model)
        except (ConfigError, OSError, ValueError) as error:
            if not run.dry_run:
                raise ConfigError(f"{use} source {source.name!r}: {error}") from None
            rows.append(row | {"examples": 0, "state": f"not here: {str(error).splitlines()[0]}"})
            continue
        rows.append(row | {"examples": examples, "state": "ok"})
        total += min(examples, source.cap or examples) if use == TRAINING else 0
    return rows, total or None


def data_notes(run: RunConfig) -> tuple[str, ...]:
    """What of the records of a run's sources is not read, one line a source and kind; sources that are not here say nothing."""
    from mmkit.data.check import record_notes
    from mmkit.data.readers import open_source

    sources = [(config, use) for config, use in sources_of(run) if config.format not in ("webdataset", "pack")]
    notes: list[str] = []
    for config, use in sources:
        with contextlib.suppress(ValueError, OSError):
            source = open_source(config, data_for(run, use))
            notes += record_notes(source, max(LOOKED_AT // len(sources), 100))
    return tuple(notes)


def _data_is_here(run: RunConfig) -> bool:
    """Whether every source can be looked into without making or fetching anything."""
    from mmkit.data.demo import pack_folder

    def here(source: SourceConfig) -> bool:
        packed = source.format == "pack"
        return ((pack_folder(source.path) / "record.json") if packed else Path(source.path)).exists()

    return bool(run.data.sources) and all(here(source) for source in run.data.sources)


def row_of(run: RunConfig) -> Row | None:
    """What a row of a vision-language run holds, as training would lay out the first conversations of its data
    (`ConversationPlan`). None for contrastive runs, and where data or tokenizer are not here or of no use."""
    from mmkit.data.loader import loader
    from mmkit.models.build import tokenizer

    train = run.train
    if run.model.kind != "vlm" or not run.data.sources:
        return None
    together = train.device_batch * run.devices  # rows that share a static shape
    try:
        words, options = tokenizer(run.model), {"train": True, "seed": run.seed, "device_batch": train.global_batch}
        with loader(run.data, run.model, words, (), **options) as made:
            rows = made.plan.rows(0, 0)
            blocks = [rows[start : start + together] for start in range(0, len(rows), together)]
            lengths = [made.plan.shape(block).tokens * len(block) for block in blocks]
            samples = sum(map(made.plan.n_samples, rows))
    except (OSError, ValueError):  # told where the data is looked at
        return None
    return Row(sum(lengths) / len(rows), samples / len(rows)) if rows else None


def sources_of(run: RunConfig) -> list[tuple[SourceConfig, str]]:
    """Every source of a run with what it is used for."""
    from mmkit.data.recipe import sources_of as trained_on

    training = [(source, TRAINING) for source in trained_on(run.data)]
    return [*training, *((source, VALIDATION) for source in run.data.validation)]


def data_for(run: RunConfig, use: str) -> DataConfig:
    """The settings under which the run reads its training or its held-out sources."""
    from mmkit.data.readers import held_out

    return run.data if use == TRAINING else held_out(run.data)


def check_examples(run: RunConfig, decode: int = 64) -> list[dict[str, Any]]:
    """`source_rows` of `check_sources`, for a data notebook."""
    return source_rows(run, check_sources(run, decode))


def source_rows(run: RunConfig, reports: Sequence[Report]) -> list[dict[str, Any]]:
    """One row a source: examples, how many were decoded whole, how many are bad, how many of those tokenised
    are longer than a row, the first fault, what training will do, and where there is such what of the records is not read."""
    from mmkit.data.example import TOO_LONG

    rows = []
    for (config, use), report in zip(sources_of(run), reports, strict=True):
        row = {"source": config.name, "use": use, "format": config.format, "path": config.path, "examples": report.examples}
        causes = [what for what in (*report.faults, *report.left_out) if what != TOO_LONG]
        faults = [text for what in causes for text in report.shown[what]]
        first = next(iter([*report.refused.splitlines(), *faults]), "")
        row |= {"opened": report.decoded, "bad": report.bad or int(bool(report.refused))}
        row |= {"too long": report.too_long[0], "first fault": first}
        noted = "; ".join(f"{count:,} {note}" for note, count in report.notes.items() if note.startswith("records "))
        rows.append(row | {"training": "would stop" if report.would_fail else "ready", "not read": noted})
    return rows if any(row["not read"] for row in rows) else [{k: v for k, v in row.items() if k != "not read"} for row in rows]


def check_sources(run: RunConfig, decode: int = 64) -> list[Report]:
    """The report of every source of a run; those of one mixture are judged together, as training counts what it cannot use.

    Nothing is raised: a source that is not here has a report that says so, so that a data notebook can show it.
    """
    from mmkit.data.check import Report

    formatter, missing = _formatter(run)
    reports = []
    for config, use in sources_of(run):
        try:
            report = _check_source(run, config, use, decode, formatter)
            report.refused = report.refused or missing
        except (ValueError, OSError) as error:
            report = Report(config.name, refused=str(error))
        reports.append(report)
    _judge(run, reports)
    return reports


def _check_source(run: RunConfig, config: SourceConfig, use: str = TRAINING, decode: int = 64, formatter: Formatter | None = None) -> Report:
    """The report of one source of a run; ConfigError where it is not here.

    Without a ``formatter`` conversations are checked for what every model asks of them. Of a stream the first shards are looked at.
    """
    from mmkit.data.check import check, opened
    from mmkit.data.loader import looked_at
    from mmkit.data.stream import streamed

    data, contrastive = data_for(run, use), run.model.kind == "clip"
    stream = use == TRAINING and contrastive and not data.cache_features and streamed(data) is not None
    if stream:
        (source, examples), refused = looked_at(config, data, run.model), ""
    else:
        source, refused = opened(config, data)
        examples = len(source)
    report = check(source, data, run.model, formatter, decode=decode, streamed=stream, refused=refused)
    report.examples = examples
    return report


def _formatter(run: RunConfig) -> tuple[Formatter | None, str]:
    """(what tokenises the run's conversations, why there is nothing that could)."""
    from mmkit.notebook.data_view import formatter_of

    try:
        return (formatter_of(run) if run.model.kind == "vlm" else None), ""
    except (ValueError, OSError) as error:
        return None, str(error)


def _judge(run: RunConfig, reports: list[Report]) -> None:
    """Judges the reports of `sources_of` by the samples an epoch takes of each, training and validation apart."""
    from mmkit.data.check import judge_together
    from mmkit.data.mixture import Mixture
    from mmkit.data.recipe import sources_of as trained_on

    uses = [use for _, use in sources_of(run)]
    for use in dict.fromkeys(uses):
        mine, data = [report for report, its in zip(reports, uses, strict=True) if its == use], data_for(run, use)
        sizes = [report.examples for report in mine]
        try:  # a mixture of anything as long: it refuses what training's would
            whole = all(sizes) and Mixture(trained_on(data), list(map(range, sizes)), data.samples_per_epoch)
            judge_together(mine, whole.wanted if whole else sizes)
        except ConfigError as error:
            for report in mine:
                report.refused, report.would_fail = report.refused or str(error), True
