"""Small notebooks for the tests of the runner."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

PARAMETERS = 'model: str = "tiny"  # a preset\nlr: float = 0.0  # peak learning rate; 0 = the preset\'s own\nshow: bool = False  # pictures'


def _write(folder: Path, *cells: str, parameters: str | None = PARAMETERS, name: str = "book.ipynb") -> Path:
    """A notebook of these code cells after a parameters cell; without ``parameters`` it has no tagged cell."""
    book = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}})
    if parameters is not None:
        cell = nbformat.v4.new_code_cell(parameters)
        cell.metadata["tags"] = ["parameters"]
        book.cells.append(cell)
    book.cells += [nbformat.v4.new_code_cell(source) for source in cells]
    nbformat.write(book, folder / name)
    return folder / name


@pytest.fixture()
def write():
    """The function that writes a small notebook: ``write(folder, *cells, parameters=...)``."""
    return _write
