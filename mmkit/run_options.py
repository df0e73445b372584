"""Options of the command line that together name a run: a preset and its changes, or a saved config; and where
their paths start."""

from __future__ import annotations

import argparse
import glob
import os
import re
from pathlib import Path

from mmkit.config import STAGES, ConfigError, RunConfig, changed, load_file
from mmkit.presets import workspace
from mmkit.storage import is_remote

# options that name files to read
TYPED = ("config", "file", "images", "pattern", "source", "base", "notebook", "parameters", "start_from")


def add_run_options(parser: argparse.ArgumentParser, stage: str | None = None) -> None:
    """Options that together name a run: a preset and its changes, or a saved config."""
    group = parser.add_argument_group("which run")
    group.add_argument("--model", metavar="NAME", help="a preset: a file of params/ (default: tiny)")
    if stage is None:
        group.add_argument("--stage", metavar="|".join(STAGES), help="the stage to run (default: pretrain)")
    group.add_argument("--config", metavar="FILE", help="a resolved config.yaml of an earlier run, instead of --model and --stage")
    group.add_argument("--set", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help="any setting, by full or unique name")
    group.add_argument("--backend", metavar="NAME", help="auto, single, ddp, fsdp, zero0..zero3 or xla (default: the preset's)")
    group.add_argument("--processes", type=int, metavar="N", help="processes on each machine (default: one a device)")
    group.add_argument("--steps", type=int, metavar="N", help="optimizer steps (default: the preset's epochs)")
    group.add_argument("--run-dir", metavar="DIR", help="folder that runs are kept in (default: runs)")
    group.add_argument("--name", metavar="NAME", help="name of this run among those of its preset and stage")
    group.add_argument("--resume", metavar="auto|never|PATH|step-N|epoch-N", help="go on from the newest checkpoint, anew, or from this one")
    group.add_argument("--dry-run", action="store_true", help="build the model without weights, check everything, train nothing")
    parser.set_defaults(fixed_stage=stage)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The option that names a machine; `launch.machine.machine_of` reads it."""
    names = "8xa100-80gb, 2x8xh100-80gb, v4-64 or cpu (default: $MMKIT_MACHINE, else this one)"
    parser.add_argument("--machine", metavar="NAME", help=f"the machine the run is for: {names}")


def run_of(options: argparse.Namespace) -> RunConfig:
    """The run that the options describe; ConfigError names the option at fault."""
    from mmkit.notebook.parameters import assemble, backend_settings

    overrides = dict(pair(text, "--set") for text in options.set)
    named = {
        "processes": options.processes,
        "steps": options.steps,
        "root": options.run_dir,
        "name": options.name,
        "resume": options.resume,
    }
    overrides |= {name: value for name, value in named.items() if value is not None}
    if options.dry_run:
        overrides["dry_run"] = True
    if options.config:
        if options.model or getattr(options, "stage", None):
            raise ConfigError("--config already says which model and stage; leave out --model and --stage")
        if not Path(options.config).is_file():
            place = Path(options.config).absolute()
            raise ConfigError(f"no config file {place}; a run folder holds one as config.yaml")
        run = load_file(options.config)
        overrides |= backend_settings(options.backend or "", "--backend")
        return changed(run, "the command line", **{name.replace(".", "__"): value for name, value in overrides.items()}) if overrides else run
    where = {"model": options.model, "backend": options.backend}
    overrides |= {name: value for name, value in where.items() if value}
    stage = options.fixed_stage or options.stage or "pretrain"
    return assemble(overrides, stage, "the command line")


def target_options(options: argparse.Namespace) -> dict[str, str]:
    """The target's options: those after --option, and those that a machine given by name (--machine, MMKIT_MACHINE) stands for.

    ConfigError where both name the same one with other values, and for a machine that is not of the target's kind.
    """
    from mmkit.launch.machine import job_options, machine_of

    given = dict(pair(text, "--option") for text in options.option)
    machine = machine_of(options.machine)
    meant = job_options(machine, options.target) if machine.named else {}
    for name, value in given.items():
        if meant.get(name, value) != value:
            raise ConfigError(f"--option {name}={value}, but machine {machine.name} has {name} {meant[name]}; leave one of them out")
    return meant | given


def pair(text: str, option: str) -> tuple[str, str]:
    """(key, value) of ``key=value`` after ``option``; ConfigError otherwise."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ConfigError(f"{option} {text}: write it as key=value")
    return name.strip(), value


def start_at_root(options: argparse.Namespace) -> None:
    """Makes the checkout's root the working folder, so that a relative path means the same file here, under
    papermill and in a notebook (`notebook.parameters.begin`). Outside a checkout nothing changes. What was
    typed as the name of a file that lies in the folder the shell is in, by completion for instance, is that
    file."""
    root = workspace()
    if root == Path.cwd():
        return
    for name in TYPED:
        text = getattr(options, name, None)
        if text and not is_remote(text) and (Path(text).exists() or glob.glob(re.sub(r"{.*?}", "*", text))):
            setattr(options, name, os.path.abspath(text))
    os.chdir(root)
