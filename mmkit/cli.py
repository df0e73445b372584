"""The command line: the same functions as the notebooks.

``mmkit doctor | settings | list | plan | get | data | train | eval | launch | convert | figures | notebook``. Parsing imports nothing heavy,
so ``--help`` is quick. A user's error is one message and exit code 2; everything else is a traceback and exit code 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkit.config import STAGES, ConfigError, DataConfig, FilterRule, RunConfig, SourceConfig, changed, nearest
from mmkit.foreign_names import ours
from mmkit.launch.launch import ERROR_PREFIX, tell
from mmkit.listing import EXAMPLES, LISTS
from mmkit.notebook.parameters import parameter_pair, quiet
from mmkit.presets import read_mapping
from mmkit.run_options import add_machine, add_run_options, run_of, start_at_root, target_options
from mmkit.storage import is_remote
from mmkit.values import checked, names_of, read_yaml

if TYPE_CHECKING:
    from mmkit.data.check import Report


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses, runs one command and returns its exit code."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if not hasattr(options, "run_command") and not rest:
        parser.print_help()
        return 2
    quiet()
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        if rest:
            _refuse(rest, vars(options).keys() - {"run_command", "fixed_stage"})
        start_at_root(options)
        return options.run_command(options) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `mmkit ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:  # OSError: a path that cannot be written, a full disk
        if options.verbose and not isinstance(error, ConfigError):
            raise
        tell(error)
        return 2


def _refuse(words: list[str], options: Iterable[str]) -> None:
    """ConfigError for words that are none of the command's ``options``: a setting's name, ours or another program's, goes after --set."""
    word = next((word for word in words if word.startswith("-")), words[0])
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    begun = [option for option in options if name and option.startswith(name)]
    if len(begun) == 1:  # an option cut short, or written with '_'
        raise ConfigError(f"no option {word}; did you mean --{begun[0].replace('_', '-')}?")
    known = names_of(RunConfig)
    settings = [path for path in known if path == name or path.endswith(f".{name}")]
    if settings:
        raise ConfigError(f"no option {word}: it is a setting, write --set {settings[0] if len(settings) == 1 else name}=VALUE")
    if there := ours(name):
        raise ConfigError(f"no option {word}{there}; settings are given by --set NAME=VALUE")
    near = nearest(name, {*options, *(path.rpartition(".")[2] for path in known)})
    raise ConfigError(f"no option {word}; settings are given by --set NAME=VALUE, `mmkit settings WORD` finds one{near}")


# ---------------------------------------------------------------- the parser


class Parser(argparse.ArgumentParser):
    """A parser, and one of each command, that takes options by their whole name only.

    argparse would read ``--lim`` as ``--limit``, so a script's meaning would change with each option that is
    added. It would also take the value of ``-p lr -1e-5`` for an option; after one of ``pairs`` stand a name
    and a value whatever they begin with, or NAME=VALUE.
    """

    pairs: tuple[str, ...] = ()

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, which sees each of `pairs` with its two words as one, behind the others."""
        out, joined, rest = [], [], list(sys.argv[1:] if args is None else args)
        while rest:
            word = rest.pop(0)
            if word in self.pairs and rest:
                pair = rest.pop(0)
                pair = pair if "=" in pair or not rest else f"{pair}={rest.pop(0)}"
                joined.append(f"{self.pairs[-1]}={pair}")
            else:
                out.append(word)
        return super().parse_known_args([*out, *joined], namespace)


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="mmkit", description=__doc__.splitlines()[0])
    parser.set_defaults(verbose=False)
    parser.add_argument("--version", action="version", version=f"mmkit {importlib.metadata.version('mmkit')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_doctor(commands)
    _add_settings(commands)
    _add_plan(commands)
    _add_data(commands)
    _add_train(commands)
    _add_eval(commands)
    _add_launch(commands)
    _add_convert(commands)
    _add_figures(commands)
    _add_notebook(commands)
    return parser


def _command(commands: Any, name: str, run: Any, about: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=about, description=about, formatter_class=raw)
    parser.epilog = f"example: {EXAMPLES[parser.prog.removeprefix('mmkit ')]}"
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens; show the traceback of an error")
    parser.set_defaults(run_command=run)
    return parser


def _add_doctor(commands: Any) -> None:
    parser = _command(commands, "doctor", _doctor, "What is this machine, what is missing on it, and what to do about each fault.")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _add_settings(commands: Any) -> None:
    parser = _command(commands, "settings", _settings, "Every setting: name, type, default, meaning.")
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help="only those with it in their name or meaning")
    parser.add_argument("--model", metavar="NAME", help="show the values of this preset as well")
    parser.add_argument("--stage", metavar="|".join(STAGES), default="pretrain", help="of --model (default: pretrain)")
    parser = _command(commands, "list", _list, "What there is to choose from.")
    parser.add_argument("of", choices=LISTS)


def _add_plan(commands: Any) -> None:
    parser = _command(commands, "get", _get, "Fetch weights and data a model misses here; without --stage for pretrain and finetune.")
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model")
    parser.add_argument("--only", choices=("weights", "data"), help="fetch these alone")
    add_run_options(parser)
    parser = _command(commands, "plan", _plan, "Memory, time, cost and disk of a run, and what is missing, before a byte is downloaded.")
    add_run_options(parser)
    add_machine(parser)
    parser.add_argument("--all", action="store_true", help="instead: which preset fits which machine, at --stage (default: finetune)")
    parser.add_argument("--samples", type=int, metavar="N", help="examples of one epoch, where the data is not here")
    parser.add_argument("--price", type=float, metavar="USD", help="price of one device for one hour")


def _add_data(commands: Any) -> None:
    inner = commands.add_parser("data", help="Prepare, check and write data.", description="Prepare, check and write data.")
    kinds = inner.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo = _command(kinds, "demo", _data_demo, "Prepare the offline packs in the cache; show source, licence and counts of each.")
    demo.add_argument("packs", nargs="*", metavar="PACK", help="only these packs")
    check = _command(kinds, "check", _data_check, "Check a data file, or every source of a run: all paths, a decoded sample, before training.")
    check.add_argument("file", nargs="?", metavar="FILE", help="a data file (default: the sources of the run)")
    check.add_argument("--images", metavar="DIR", help="folder that the file's relative image paths start from")
    formats = ("llava", "grit", "parquet", "csv", "webdataset", "pack")
    check.add_argument("--format", choices=formats, default="llava", help="of FILE (default: llava)")
    check.add_argument("--report", metavar="JSON", help="write the whole report here as well")
    check.add_argument("--decode", type=int, default=64, metavar="N", help="examples to open fully; more where faults are found (default: 64)")
    check.add_argument("--all", action="store_const", const=sys.maxsize, dest="decode", help="open every example fully")
    add_run_options(check)
    shards = _command(kinds, "shards", _data_shards, "Write or check tar shards: samples, bad members, fields, per shard.")
    shards.add_argument("pattern", help="folder, file, URL or brace pattern: data/{000..012}.tar; with --from the folder to write")
    shards.add_argument("--from", dest="source", metavar="FILE", help="pairs to write as shards: a csv, llava, parquet or pack source")
    shards.add_argument("--format", choices=("csv", "llava", "parquet", "pack"), default="csv", help="of --from (default: csv)")
    shards.add_argument("--images", metavar="DIR", help="folder that relative image paths of --from start from")
    shards.add_argument("--samples", type=int, default=10_000, help="in one shard (default: 10000)")
    shards.add_argument("--caption", default="txt", metavar="EXTENSION", help="of the captions' files to check, or json:FIELD (default: txt)")
    rule = ("KEY", "OP", "VALUE")
    shards.add_argument("--filter", nargs=3, action="append", default=[], metavar=rule, help="check under this rule, as punsafe '<=' 0.5")
    shards.add_argument("--decode", type=int, default=64, metavar="N", help="samples to open fully; more where faults are found (default: 64)")


def _add_train(commands: Any) -> None:
    parser = _command(commands, "train", _train, "Train one stage of a model.")
    add_run_options(parser)
    add_machine(parser)


def _add_eval(commands: Any) -> None:
    parser = _command(commands, "eval", _eval, "Score a trained run beside its baselines.")
    add_run_options(parser, stage="eval")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="score these (default: the preset's)")
    parser.add_argument("--limit", type=int, metavar="N", help="documents of each task")
    parser.add_argument("--start-from", metavar="PATH", help="run folder or export to score (default: the newest stage of the preset)")


def _add_launch(commands: Any) -> None:
    parser = _command(commands, "launch", _launch, "Train on this machine, a SLURM cluster or a TPU pod.")
    add_run_options(parser)
    add_machine(parser)
    parser.add_argument("--target", choices=("local", "slurm", "tpu"), default="local")
    for name in ("slurm", "tpu"):
        parser.add_argument(f"--{name}", action="store_const", const=name, dest="target", help=f"the same as --target {name}")
    parser.add_argument("--option", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help="of the target, as accelerator=v4-32")
    parser.add_argument("--show", action="store_true", help="print the commands or the job script; start nothing")


def _add_convert(commands: Any) -> None:
    parser = _command(commands, "convert", _convert, "Read or write a published checkpoint.")
    parser.add_argument("source", help="folder or file of the published checkpoint, or an export of ours with --to")
    parser.add_argument("target", help="folder to write")
    parser.add_argument("--model", metavar="NAME", help="the preset it belongs to; compared with what the release says")
    parser.add_argument("--to", action="store_true", help="from ours to the published layout")
    parser.add_argument(
        "--kind", help="full, delta, lora, projector, shards, openclip; with --to: cambrian, ferret, llava, openclip, projector"
    )
    parser.add_argument("--base", help="weights of the base model (deltas, LoRA folders), or the open_clip model name of a lone file")


def _add_figures(commands: Any) -> None:
    parser = _command(commands, "figures", _figures, "Draw figures, each as PNG and CSV.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which figures (default: all published ones)")
    parser.add_argument("--list", action="store_true", help="name them all")
    parser.add_argument("--out", default="runs/figures", metavar="DIR")


def _add_notebook(commands: Any) -> None:
    inner = commands.add_parser("notebook", help="Run notebooks headless.", description="Run notebooks headless.")
    kinds = inner.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run = _command(kinds, "run", _notebook_run, "Execute one notebook. Exit code: 0 done, 2 wrong input, 3 error in a cell, 4 kernel died.")
    run.add_argument("notebook", help="path, or a name of notebooks/ such as 03_finetune")
    run.add_argument("output", nargs="?", help="executed copy (default: runs/notebooks/)")
    run.pairs = ("-p", "--parameter")
    pair = {"type": parameter_pair, "metavar": "NAME VALUE", "help": "a parameter, as for papermill; or -p NAME=VALUE"}
    run.add_argument("-p", "--parameter", action="append", default=[], **pair)
    run.add_argument("-f", "--parameters", metavar="FILE", help="parameters as YAML or JSON")
    run.add_argument("--autosave", type=int, default=10, metavar="S", help="save the notebook every S seconds while a cell prints")
    run.add_argument("--timeout", type=int, metavar="S", help="longest time of one cell")
    demo = _command(kinds, "demo", _notebook_demo, "Prepare the offline data, run all notebooks on it, and collect the results.")
    demo.add_argument("--model", default="tiny", metavar="NAME")
    demo.add_argument("--clip", default="clip-tiny", metavar="NAME")


# ---------------------------------------------------------------- commands


def _doctor(options: argparse.Namespace) -> int:
    from mmkit.doctor import examine

    report = examine()
    print(json.dumps(report.rows(), indent=1) if options.json else report)
    return 1 if report.faults else 0


def _settings(options: argparse.Namespace) -> int:
    from mmkit.config import load
    from mmkit.listing import settings
    from mmkit.notebook.tables import text

    print(text(settings(options.word, load(options.model, options.stage) if options.model else None)))
    return 0


def _list(options: argparse.Namespace) -> int:
    from mmkit.listing import names
    from mmkit.notebook.tables import text

    print(text(names(options.of)))
    return 0


def _plan(options: argparse.Namespace) -> int:
    from mmkit.launch.choose import Choice
    from mmkit.launch.machine import machine_of
    from mmkit.launch.overview import ABOUT, overview
    from mmkit.launch.preflight import plan_of
    from mmkit.launch.requirements import beside
    from mmkit.notebook.tables import text

    machine = machine_of(options.machine)
    if options.all:
        print(f"{ABOUT}\n{text(overview([options.model] if options.model else (), options.stage or 'finetune', machine))}")
        return 0
    plan = plan_of(run_of(options), machine=machine, samples=options.samples, price=options.price)
    choice = Choice(plan.run, plan)
    print(f"{choice}\n{plan}\n\nchosen for the machine\n{text(choice.rows)}\n\n{beside(plan)}")
    return 0


def _get(options: argparse.Namespace) -> int:
    from mmkit.launch.requirements import get

    stages = [options.stage] if options.stage or options.config else ["pretrain", "finetune"]
    runs = [run_of(argparse.Namespace(**{**vars(options), "stage": stage})) for stage in stages]
    get(runs, options.only, options.dry_run)
    return 0


def _train(options: argparse.Namespace) -> int:
    from mmkit.launch.launch import WORKER, is_worker, launch
    from mmkit.launch.machine import machine_of
    from mmkit.launch.preflight import data_notes, preflight
    from mmkit.notebook.progress import Progress
    from mmkit.sharding.environment import process_environment

    run = run_of(options)
    if is_worker():
        speaks = process_environment(os.environ).rank == 0  # for the job's log
        if speaks and WORKER not in os.environ:  # else the process that started this one has told
            print("".join(f"{note}\n" for note in data_notes(run)), end="", flush=True)
        result = launch(run)
        if speaks:
            print(result)
        return 0
    report = preflight(run, machine_of(options.machine))
    if run.dry_run:
        print(report)
        return 0
    print(report.at_start(), end="")
    with Progress(report.steps, live=False) as progress:
        result = launch(report.run, on_log=progress)
    print(result)
    return 0


def _launch(options: argparse.Namespace) -> int:
    if options.target == "local":
        return _train(options)
    run, wanted = run_of(options), target_options(options)
    from mmkit.training.assemble import check
    from mmkit.training.same_run import check_same_run

    check(run)  # before a job waits in a queue
    show = options.show or run.dry_run
    if not show:
        check_same_run(run)
    return {"slurm": _launch_slurm, "tpu": _launch_tpu}[options.target](run, wanted, show)


def _launch_slurm(run: RunConfig, wanted: dict[str, str], show: bool) -> int:
    from mmkit.launch import slurm

    cluster = checked(slurm.SlurmConfig, wanted, "--option")
    folder = Path("slurm", run.preset, run.stage, run.name) if is_remote(run.folder) else Path(run.folder, "slurm")  # sbatch reads a disk
    spread = slurm.for_cluster(run, cluster)
    if show:
        print(slurm.render(cluster, folder / "config.yaml", folder / "job.log"))
        return 0
    job = slurm.submit(spread, cluster, folder)
    print(f"job {job.id}: script {job.script}, output {job.log}; `scancel {job.id}` ends it with a checkpoint kept")
    return 0


def _launch_tpu(run: RunConfig, wanted: dict[str, str], show: bool) -> int:
    from mmkit.launch import tpu

    return tpu.start(run, checked(tpu.TpuConfig, wanted, "--option"), show=show)


def _data_demo(options: argparse.Namespace) -> int:
    from mmkit.data.demo import prepare
    from mmkit.notebook.tables import text

    records = prepare(options.packs or None, progress=lambda line: print(line, flush=True))
    names = ("name", "status", "counts", "sources", "licences", "reason", "folder")
    print("\n" + text([{name: getattr(record, name) for name in names} for record in records]))
    return 0


def _data_check(options: argparse.Namespace) -> int:
    from mmkit.data.check import write_json

    if options.report and not Path(options.report).absolute().parent.is_dir():
        raise ConfigError(f"--report {options.report}: there is no folder {Path(options.report).parent}; make it first")
    if options.file:
        reports = [_check_file(options)]
        print(reports[0].summary())
    else:
        reports = _check_run(options)
    if options.report:
        write_json(reports[0] if options.file else reports, options.report)
    return 2 if any(report.would_fail for report in reports) else 0


def _check_run(options: argparse.Namespace) -> list[Report]:
    from mmkit.launch.preflight import check_sources, source_rows
    from mmkit.notebook.tables import text

    run = run_of(options)
    reports = check_sources(run, options.decode)
    print(text(source_rows(run, reports)))
    return reports


def _check_file(options: argparse.Namespace) -> Report:
    """The report of one file: with a run named as that run would train on it, else by what every model asks."""
    from mmkit.data.check import check_file

    if not (options.model or options.config or options.stage or options.set):
        return check_file(options.file, options.images, options.format, decode=options.decode)
    from mmkit.launch.preflight import check_sources

    run = run_of(options)
    config = SourceConfig(name=Path(options.file).name, format=options.format, path=options.file, images=options.images)
    data = run.data.model_copy(update={"sources": (config,), "mixture": None, "validation": ()})
    return check_sources(run.model_copy(update={"data": data}), options.decode)[0]


def _data_shards(options: argparse.Namespace) -> int:
    from mmkit.data.check import check, opened

    given = [{"key": key, "op": op, "value": read_yaml(value, "--filter")} for key, op, value in options.filter]
    rules = [checked(FilterRule, values, "--filter") for values in given]
    if options.source:
        _write_shards(options)
    shards = SourceConfig(name=options.pattern, format="webdataset", path=options.pattern, filters=tuple(rules))
    data = DataConfig(caption_key=options.caption)
    source, refused = opened(shards, data)
    report = check(source, data, decode=options.decode, refused=refused)
    print(f"{source.summary().splitlines()[0]}\n{report.summary()}")
    return 2 if report.would_fail else 0


def _write_shards(options: argparse.Namespace) -> None:
    from mmkit.data.readers import open_source
    from mmkit.data.tar_writer import write_examples

    pairs = SourceConfig(name="pairs", format=options.format, path=options.source, images=options.images)
    try:
        write_examples(open_source(pairs), options.pattern, max_samples=options.samples)
    except OSError as error:
        raise ConfigError(
            f"--from {options.source} cannot be written to {options.pattern}: {error}; `mmkit data check {options.source} --format "
            f"{options.format}` names every picture that is missing"
        ) from None


def _eval(options: argparse.Namespace) -> int:
    from mmkit.evaluation.scoring import check_documents
    from mmkit.launch.preflight import preflight
    from mmkit.notebook.scoring import score

    named = {"evaluation.tasks": options.tasks, "evaluation.limit": options.limit, "start_from": options.start_from}
    run = run_of(options)
    wanted = {name.replace(".", "__"): value for name, value in named.items() if value is not None}
    run = changed(run, "the command line", **wanted) if wanted else run
    looked = check_documents(run)
    report = preflight(run)
    print(report if run.dry_run else f"scored with: {report.plan.scored_with}")
    print(score(run, looked))
    return 0


def _convert(options: argparse.Namespace) -> int:
    from mmkit.models.convert.commands import export_published, import_published

    if options.to:
        print(export_published(options.source, options.target, options.model, options.kind))
    else:
        print(import_published(options.source, options.target, options.model, options.base, options.kind))
    return 0


def _figures(options: argparse.Namespace) -> int:
    from mmkit.figures.gallery import FIGURES, chosen

    if options.list:
        print("\n".join(FIGURES))
        return 0
    for name in chosen(options.names or FIGURES):
        print(FIGURES[name]().save(options.out))
    return 0


def _notebook_demo(options: argparse.Namespace) -> int:
    from mmkit.notebook.demo import demo

    return demo(options.model, options.clip)


def _notebook_run(options: argparse.Namespace) -> int:
    from mmkit.notebook.runner import find_notebook, run_notebook

    values = (read_values(options.parameters) if options.parameters else {}) | dict(options.parameter)
    outcome = run_notebook(find_notebook(options.notebook), options.output, values, autosave=options.autosave, timeout=options.timeout)
    print(f"{ERROR_PREFIX}{outcome.message}" if outcome.code else f"done in {outcome.seconds:.0f} s", file=sys.stderr)
    print(outcome.notebook)
    return outcome.code


def read_values(path: str) -> dict[str, Any]:
    """Parameters out of a YAML or JSON file; ConfigError where it holds no mapping."""
    if not Path(path).is_file():
        raise ConfigError(f"no parameter file {Path(path).absolute()}")
    return {str(name): value for name, value in read_mapping(Path(path)).items()}
