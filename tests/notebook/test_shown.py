"""What a notebook shows: errors the user can mend as their message alone, objects as a short text and a picture or table of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from mmkit.config import load
from mmkit.doctor import examine
from mmkit.figures.measured import techniques
from mmkit.launch.launch import Launched
from mmkit.launch.preflight import plan_of, preflight
from mmkit.notebook.parameters import NOISE
from mmkit.notebook.runner import USER_ERROR, run_notebook

START = "from mmkit.config import load, load_file\nfrom mmkit.launch.launch import launch, LaunchError"
MISTAKES = {  # what a cell says -> a word of the message
    "load('13c')": "did you mean '13b'",
    "load('tiny', 'pretrain', {'lrr': 1})": "no setting 'lrr'",
    "load('tiny', 'pretrain', {'lr': 'fast', 'train.global_batch': 'many'})": "lr = 'fast'",
    "launch(load('8b-debug', 'pretrain', {'root': 'a_file/runs', 'steps': 1}))": "a file stands in the place of a folder",
    "launch(load('8b-debug', 'finetune', {'root': 'elsewhere', 'steps': 1}))": "mmkit train --model 8b-debug --stage pretrain",
    "raise LaunchError('training ended with exit code 1; its last lines:\\nValueError: boom')": "ValueError: boom",
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The error outputs by cell of a kernel in which each mistake was made."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "a_file").write_text("in the way")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (START, *MISTAKES, "1 / 0")])
    NotebookClient(book, allow_errors=True, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    assert not book.cells[0].outputs
    return {cell.source: [out for out in cell.outputs if out.output_type == "error"] for cell in book.cells[1:]}


@pytest.mark.parametrize("cell", MISTAKES)
def test_a_mistake_is_shown_as_its_message_alone(shown, cell):
    [error] = shown[cell]
    assert error.traceback == [f"{error.ename}: {error.evalue}"] and MISTAKES[cell] in error.evalue


def test_a_fault_of_code_keeps_its_traceback(shown):
    [error] = shown["1 / 0"]
    assert len("\n".join(error.traceback).splitlines()) > 3


def test_papermill_fails_with_the_message_and_the_executed_copy_shows_it_once(tmp_path, write):
    book = write(tmp_path, "from mmkit.storage import Unreachable", "raise Unreachable('the bucket does not answer')", "print('never')")
    outcome = run_notebook(book, tmp_path / "out.ipynb")
    assert outcome.code == USER_ERROR and outcome.message == "the bucket does not answer"
    command = [sys.executable, "-m", "papermill", str(book), str(tmp_path / "plain.ipynb"), "--no-progress-bar"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and done.stderr.rstrip().endswith("Unreachable: the bucket does not answer")
    for name in ("out.ipynb", "plain.ipynb"):
        outputs = [out for cell in nbformat.read(tmp_path / name, 4).cells for out in cell.get("outputs", ()) if out.output_type == "error"]
        assert [out.traceback for out in outputs] == [["Unreachable: the bucket does not answer"]]


def test_what_libraries_log_of_themselves_is_left_out_and_nothing_else(tmp_path, write):
    say = [
        "import logging; from mmkit.notebook.parameters import quiet; quiet()",
        "kernel, library = get_ipython().kernel.log, logging.getLogger('bitsandbytes.backends.cpu.ops')",
        "kernel.error('KeyboardInterrupt caught in kernel.'); kernel.error('a fault of the kernel')",
        "library.warning('Failed to load CPU gemm_4bit_forward from kernels: %s', 'x'); library.warning('a fault of the library')",
    ]
    command = [sys.executable, "-m", "papermill", str(write(tmp_path, *say)), str(tmp_path / "out.ipynb"), "--log-output"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "a fault of the kernel" in done.stderr and "a fault of the library" in done.stderr
    assert "KeyboardInterrupt caught" not in done.stderr and "Failed to load CPU" not in done.stderr


@pytest.mark.parametrize(("module", "logger"), [("bitsandbytes.backends.cpu.ops", None), ("ipykernel.kernelbase", "IPKernelApp")])
def test_the_libraries_still_say_what_is_left_out(module, logger):
    source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf8")
    assert NOISE[logger or module] in source, "the library says something else now: drop or correct the line"


def objects(folder):
    """What notebook cells end in, made without training."""
    run = load("8b-debug", "finetune", {"root": str(folder), "start_from": "source"})
    yield preflight(run)
    yield plan_of(run)
    yield examine()
    yield techniques()
    yield Launched(run, run.folder, 2, {"step": 2, "loss": 0.5}, None, 1.0)


def test_objects_at_the_end_of_a_cell_have_a_short_text_and_a_form_of_their_own(tmp_path):
    for thing in objects(tmp_path):
        words = repr(thing)
        assert len(words) < 4000 and len(words.splitlines()) < 40 and f"{type(thing).__name__}(" not in words, words
        assert hasattr(thing, "_repr_html_") and "<" in thing._repr_html_() or thing._repr_png_().startswith(b"\x89PNG")
