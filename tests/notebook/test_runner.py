"""The exit code of a headless notebook is right whatever goes wrong in it, and nothing stays behind."""

from __future__ import annotations

import io
import time

import nbformat
import psutil
import pytest

from mmkit.config import ConfigError
from mmkit.notebook.runner import KERNEL_DIED, NOTEBOOK_ERROR, OK, USER_ERROR, inject, run_notebook


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


def test_a_good_notebook_ends_with_0_and_carries_no_trace_of_the_end_mark(tmp_path, write):
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


def test_output_of_a_long_cell_is_saved_while_it_runs(tmp_path, write):
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
