"""A clone stays clean when its notebooks are run and saved in JupyterLab, and shows what was edited in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_output

from mmkit.notebook.git_index import after_save, renew

ROOT = Path(__file__).resolve().parents[2]
LANGUAGE = {  # what JupyterLab's kernel tells it
    "codemirror_mode": {"name": "ipython", "version": 3}, "file_extension": ".py", "mimetype": "text/x-python", "name": "python",
    "nbconvert_exporter": "python", "pygments_lexer": "ipython3", "version": "3.11.7",
}  # fmt: skip


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def filtered(folder: Path) -> subprocess.CompletedProcess:
    """`make git-filter` with this Python's environment."""
    return subprocess.run(["make", "git-filter"], cwd=folder, env=os.environ | {"CONDA_PREFIX": sys.prefix}, capture_output=True, text=True, check=False)


@pytest.fixture()
def clone(tmp_path):
    """A clone with one notebook, as `make env` leaves it."""
    for name in ("Makefile", ".gitattributes", "pyproject.toml", "notebooks/00_setup.ipynb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "as published")
    assert filtered(tmp_path).returncode == 0
    return tmp_path


def save_as_jupyterlab(path: Path, edit: str = "") -> None:
    """Runs nothing, but leaves the file as JupyterLab does after Run All: outputs, counts, what it knows of the kernel."""
    book = nbformat.read(path, as_version=4)
    for count, cell in enumerate([cell for cell in book.cells if cell.cell_type == "code"], 1):
        cell.execution_count, cell.metadata["execution"] = count, {"iopub.execute_input": "2026-11-30T23:00:00Z"}
        cell.outputs = [new_output("execute_result", {"text/plain": "x" * 1000}, execution_count=count)]
    book.cells[1].source += edit
    book.metadata["language_info"] = LANGUAGE
    nbformat.write(book, path)


def test_running_a_notebook_changes_nothing_that_git_sees_and_editing_it_does(clone):
    path = clone / "notebooks" / "00_setup.ipynb"
    save_as_jupyterlab(path)
    assert git(clone, "diff") == ""
    renew(path)
    assert git(clone, "status", "--porcelain") == "" and "x" * 1000 in path.read_text(encoding="utf8"), "the outputs stay on the disk"
    save_as_jupyterlab(path, "\nextra: int = 1  # edited")
    renew(path)
    assert git(clone, "status", "--porcelain") == " M notebooks/00_setup.ipynb\n", "modified, and not staged"
    assert [line for line in git(clone, "diff").splitlines() if line.startswith("+ ")][-1].strip("+ ") == '"extra: int = 1  # edited"'


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb")))
def test_git_stores_each_notebook_as_it_is_published_also_after_jupyterlab_saved_it(clone, name):
    path = clone / "notebooks" / name
    shutil.copy(ROOT / "notebooks" / name, path)
    published = git(clone, "hash-object", "--no-filters", str(path))
    save_as_jupyterlab(path)
    assert git(clone, "hash-object", str(path)) == published, "`make git-filter` and `git add --renormalize notebooks` put it right"


def test_without_git_or_a_clone_nothing_is_done(tmp_path, monkeypatch):
    shutil.copy(ROOT / "Makefile", tmp_path)
    assert filtered(tmp_path).returncode == 0 and not (tmp_path / ".git").exists()
    shutil.copy(ROOT / "notebooks" / "00_setup.ipynb", tmp_path)
    renew(tmp_path / "00_setup.ipynb")
    monkeypatch.setenv("PATH", "")
    renew(tmp_path / "00_setup.ipynb")


def test_jupyterlab_calls_it_for_notebooks_alone_and_as_it_calls_hooks(clone, monkeypatch):
    from jupyter_server.services.contents.filemanager import FileContentsManager

    called = []
    monkeypatch.setattr("mmkit.notebook.git_index.renew", called.append)
    hook = "mmkit.notebook.git_index.after_save"
    assert f"--FileContentsManager.post_save_hook={hook}" in (ROOT / "Makefile").read_text(encoding="utf8")
    manager = FileContentsManager(root_dir=str(clone), post_save_hook=hook)
    assert manager.post_save_hook is after_save
    model = manager.get("notebooks/00_setup.ipynb")
    manager.save(model, "notebooks/00_setup.ipynb")
    manager.save({"type": "file", "format": "text", "content": "x"}, "words.txt")
    assert called == [clone / "notebooks" / "00_setup.ipynb"]
