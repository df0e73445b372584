"""Every command of the README exists: make targets, mmkit commands with their options, notebook parameters."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import nbformat
import pytest

from mmkit import config
from mmkit.cli import build_parser

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf8"), re.DOTALL)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("words", [c for c in COMMANDS if c[0] == "mmkit"], ids=" ".join)
def test_mmkit_commands_parse_and_name_real_presets(words):
    options = build_parser().parse_args(words[1:])
    if getattr(options, "model", None):
        assert options.model in config.presets()


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
