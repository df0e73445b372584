"""The exit code of a headless notebook is right whatever goes wrong in it, and nothing stays behind."""

from __future__ import annotations

import io
import sys
import time

import nbformat
import psutil
import pytest

from mmkit.config import ConfigError
from mmkit.notebook.runner import KERNEL_DIED, NOTEBOOK_ERROR, OK, USER_ERROR, inject, kernel_of, run_notebook


VALUES = {"a": -1e-5, "b": "--flag", "c": None, "d": {1: "x", "y": [2, (3,)]}, "e": [float("-inf"), 0.1], "f": 'quo"te\n\\', "g": ()}


def test_the_injected_cell_gives_each_value_as_it_is_behind_the_parameters_and_once(tmp_path, write):
    book = nbformat.read(write(tmp_path, "print(1)", parameters='s: str = "a=b"'), as_version=4)
    for values in ({"s": "first"}, VALUES):
        inject(book, values)
    assert [cell.metadata.get("tags", []) for cell in book.cells] == [["parameters"], ["injected-parameters"], []]
    namespace: dict = {}
    exec(book.cells[1].source, namespace)
    assert {name: namespace[name] for name in VALUES} == VALUES and "s" not in namespace
    inject(book, {})
    assert len(book.cells) == 3


def test_a_good_notebook_ends_with_0_and_carries_no_trace_of_the_end_mark(tmp_path, write, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stream = io.StringIO()
    look = "import os; print('hello', model, lr, type(lr).__name__, 'beside', sorted(os.listdir()))"
    book = write(tmp_path, look)
    outcome = run_notebook(book, tmp_path / "out.ipynb", {"model": "13b", "lr": "1e-4"}, stream=stream)
    assert outcome.code == OK and outcome.message == ""
    assert "hello 13b 0.0001 float" in stream.getvalue() and "beside ['book.ipynb', 'out.ipynb']" in stream.getvalue()
    done = nbformat.read(outcome.notebook, as_version=4)
    assert [cell.source.splitlines()[0] for cell in done.cells] == [
        'model: str = "tiny"  # a preset',
        "# Parameters",
        look,
    ]


def test_a_failing_magic_is_a_notebook_error_that_names_its_cell(tmp_path, write):
    book = write(tmp_path, "%no_such_magic", "print('never')")
    outcome = run_notebook(book, tmp_path / "out.ipynb")
    assert outcome.code == NOTEBOOK_ERROR and "cell 2 (%no_such_magic)" in outcome.message


def test_leaving_early_without_an_error_is_not_success(tmp_path, write):
    book = write(tmp_path, "raise SystemExit(0)", "print('never')")
    outcome = run_notebook(book, tmp_path / "out.ipynb")
    assert outcome.code == NOTEBOOK_ERROR and "cell 2" in outcome.message


def test_a_wrong_setting_inside_the_notebook_is_a_user_error_with_its_message_alone(tmp_path, write):
    book = write(tmp_path, "from mmkit.config import load", "load('13c')")
    outcome = run_notebook(book, tmp_path / "out.ipynb")
    assert outcome.code == USER_ERROR and "did you mean '13b'" in outcome.message


def test_a_dead_kernel_has_its_own_code_and_leaves_no_child(tmp_path, write):
    spawn = (
        "import subprocess, os; child = subprocess.Popen(['sleep', '300'], start_new_session=True); print('child', child.pid, flush=True)"
    )
    book = write(tmp_path, spawn, "import time; time.sleep(1); os._exit(137)", "print('never')")
    stream = io.StringIO()
    outcome = run_notebook(book, tmp_path / "out.ipynb", stream=stream)
    assert outcome.code == KERNEL_DIED and "cell 3 (import time" in outcome.message
    child = int(stream.getvalue().split()[1])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert any("child" in out.get("text", "") for cell in nbformat.read(outcome.notebook, 4).cells for out in cell.get("outputs", ()))


def test_output_of_a_long_cell_is_saved_while_it_runs(tmp_path, write, monkeypatch):
    monkeypatch.chdir(tmp_path)
    early = "import time, pathlib\nfor i in range(6):\n    print('early', i, flush=True)\n    time.sleep(0.5)\n"
    watch = early + "print('saved', 'early 1' in pathlib.Path('out.ipynb').read_text())"
    book = write(tmp_path, watch)
    stream = io.StringIO()
    assert run_notebook(book, tmp_path / "out.ipynb", autosave=1, stream=stream).code == OK
    assert "saved True" in stream.getvalue()


def test_a_cell_over_its_time_is_a_notebook_error(tmp_path, write):
    outcome = run_notebook(write(tmp_path, "import time; time.sleep(60)"), tmp_path / "out.ipynb", timeout=1)
    assert outcome.code == NOTEBOOK_ERROR and "longer than 1 s" in outcome.message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lrr": "1e-4"}, "did you mean 'lr'"),
        ({"lr": "fast"}, "lr = 'fast'"),
        ({"show": "maybe"}, "show = 'maybe'"),
        ({"model": 7}, "quote it"),
    ],
)
def test_wrong_parameters_are_refused_before_a_kernel_starts(tmp_path, write, values, words):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=words):
        run_notebook(write(tmp_path, "1"), tmp_path / "out.ipynb", values)
    assert time.monotonic() - started < 2 and not (tmp_path / "out.ipynb").exists()


def test_a_notebook_without_a_parameters_cell_is_refused(tmp_path, write):
    with pytest.raises(ConfigError, match="no cell tagged 'parameters'"):
        run_notebook(write(tmp_path, "1", parameters=None), tmp_path / "out.ipynb", {"lr": "1e-4"})


def test_a_missing_notebook_names_those_that_exist(tmp_path, write):
    write(tmp_path, "1")
    with pytest.raises(ConfigError, match="book.ipynb"):
        run_notebook(tmp_path / "boook.ipynb")


def renamed(path, **kernelspec):
    """The notebook with another kernel in its metadata, or with none."""
    book = nbformat.read(path, as_version=4)
    book.metadata["kernelspec"] = kernelspec
    if not kernelspec:
        del book.metadata["kernelspec"]
    nbformat.write(book, path)
    return path


CONDA = {"name": "conda-env-analysis_1-py", "display_name": "Python [conda env:analysis_1]", "language": "python"}


def test_a_kernel_that_is_not_installed_is_this_environments_own_and_told_in_one_line(tmp_path, write, caplog, monkeypatch):
    (tmp_path / "books").mkdir()
    (tmp_path / "data.txt").write_text("found")
    monkeypatch.chdir(tmp_path)
    look = "import sys; print(sys.executable, model, open('data.txt').read())"
    book, stream = renamed(write(tmp_path / "books", look), **CONDA), io.StringIO()
    outcome = run_notebook(book, tmp_path / "out.ipynb", {"model": "13b"}, stream=stream)
    assert outcome.code == OK and f"{sys.executable} 13b found" in stream.getvalue()  # paths start where they do for papermill
    (line,) = [record.getMessage() for record in caplog.records if "is not installed" in record.getMessage()]
    assert "kernel 'conda-env-analysis_1-py' of book.ipynb" in line and sys.executable in line


def test_a_notebook_that_names_no_kernel_runs_and_one_that_is_installed_is_kept(tmp_path, write, monkeypatch):
    assert kernel_of(nbformat.read(renamed(write(tmp_path, "1")), as_version=4), "book") == "python3"
    folder = tmp_path / "share" / "kernels" / "mine"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text('{"argv": ["python"], "display_name": "Mine", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    assert kernel_of(nbformat.read(renamed(write(tmp_path, "1"), name="mine"), as_version=4), "book") == "mine"


def test_a_notebook_in_another_language_is_refused(tmp_path, write):
    with pytest.raises(ConfigError, match=r"book.ipynb is a notebook in R \(kernel 'ir'\)"):
        run_notebook(renamed(write(tmp_path, "1"), name="ir", display_name="R", language="R"), tmp_path / "out.ipynb")
