"""Every command of the README exists: make targets, mmkit commands with their options, notebook parameters."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import nbformat
import pytest

from mmkit.cli import build_parser
from mmkit.launch.choose import choose
from mmkit.launch.machine import GIB, named
from mmkit.presets import presets
from mmkit.run_options import run_of

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf8"), re.DOTALL)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("words", [c for c in COMMANDS if c[0] == "mmkit"], ids=" ".join)
def test_mmkit_commands_parse_and_name_real_presets(words):
    options = build_parser().parse_args(words[1:])
    if getattr(options, "model", None):
        assert options.model in presets()


SYSTEMS = re.findall(
    r"^\| `([\w-]+)` (\w+) \| `(\S+)` \| `mmkit (.*?)`.*\| ([\d.]+) GiB of ([\d.]+) \| (\d+) x (\d+) x (\d+) \|$",
    (ROOT / "README.md").read_text(encoding="utf8"), re.MULTILINE,
)  # fmt: skip


@pytest.mark.parametrize("row", SYSTEMS, ids=lambda row: f"{row[0]} on {row[2]}")
def test_published_systems_need_what_their_row_says(row):
    model, stage, machine, command, need, has, *batch = row
    options = build_parser().parse_args(shlex.split(command))
    assert (options.model, options.stage) == (model, stage) and options.machine in (None, machine)
    choice = choose(run_of(options), named(machine))
    assert (f"{choice.plan.need.total / GIB:.1f}", round(choice.plan.has / GIB, 1)) == (need, float(has))
    assert [choice.run.train.device_batch, choice.run.devices, choice.run.accumulation] == list(map(int, batch))


def test_every_published_preset_has_a_row():
    large = {name for name in presets() if "debug" not in name} - {"tiny", "clip-tiny", "clip-scratch"}
    assert {row[0] for row in SYSTEMS} == large


@pytest.mark.parametrize("words", [c for c in COMMANDS if c[0] == "make"], ids=" ".join)
def test_make_targets_exist(words):
    assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf8"), re.MULTILINE)


@pytest.mark.parametrize("words", [c for c in COMMANDS if c[0] == "papermill"], ids=" ".join)
def test_papermill_commands_pass_parameters_their_notebook_has(words):
    book = nbformat.read(ROOT / words[1], 4)
    [cell] = [c for c in book.cells if "parameters" in c.metadata.get("tags", [])]
    names = {line.split(":")[0] for line in cell.source.splitlines()}
    given = [words[i + 1] for i, word in enumerate(words) if word == "-p"]
    assert given and set(given) <= names


def test_the_readme_has_commands_and_its_links_exist():
    text = (ROOT / "README.md").read_text(encoding="utf8")
    assert len(COMMANDS) >= 10 and all(c[0] in ("make", "mmkit", "papermill") for c in COMMANDS)
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / path).exists(), path
