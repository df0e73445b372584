"""Every notebook runs headless, in order, at reduced steps on a debug twin; alone, each says what it misses."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from mmkit.notebook.parameters import of_notebook
from mmkit.notebook.runner import OK, USER_ERROR, find_notebook, run_notebook

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MODEL, CLIP = "8b-debug", "clip-vit-l-14-debug"
CHAIN = (  # (name of the step, notebook, parameters)
    ("setup", "00_setup", {"model": MODEL, "others": "[]"}),
    ("data", "01_data", {"model": MODEL, "pictures": "3", "sample": "20", "check_count": "4"}),
    ("pretrain", "02_pretrain", {"model": MODEL, "steps": "2"}),
    ("finetune", "03_finetune", {"model": MODEL, "steps": "2"}),
    ("eval", "04_eval", {"model": MODEL, "limit": "16", "pictures": "2"}),
    ("figures", "05_figures", {"model": MODEL, "figures": "[cambrian_benchmarks]"}),
    ("clip", "02_pretrain", {"model": CLIP, "steps": "2"}),
    ("clip eval", "04_eval", {"model": CLIP, "limit": "8", "tasks": "[clip_retrieval, clip_zero_shot]"}),
)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """(the folder of runs, outcomes by step): all notebooks in order, each from a kernel of its own."""
    root = tmp_path_factory.mktemp("runs")
    outcomes = {}
    for step, notebook, values in CHAIN:
        outcomes[step] = run_notebook(find_notebook(notebook), root / "notebooks" / f"{step}.ipynb", {**values, "root": str(root)})
    return root, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("step", [step for step, *_ in CHAIN])
def test_each_notebook_runs_top_to_bottom(chain, step):
    outcome = chain[1][step]
    assert outcome.code == OK, outcome.message


@pytest.mark.slow
@pytest.mark.parametrize("step", [step for step, *_ in CHAIN])
def test_every_cell_ends_in_what_a_person_reads_and_no_library_talks(chain, step):
    for cell in nbformat.read(chain[1][step].notebook, as_version=4).cells:
        outputs = cell.get("outputs", ())
        assert not [out.text for out in outputs if out.output_type == "stream" and out.name == "stderr"]
        last = ast.parse(cell.source).body[-1] if cell.cell_type == "code" else None
        if not isinstance(last, ast.Expr) or "print(" in ast.unparse(last):
            continue
        [data] = [out.data for out in outputs if out.output_type == "execute_result"]
        words = data["text/plain"]
        assert len(words) < 4000 and len(words.splitlines()) <= 60 and not re.search(r"Config\(|=<|\w+\(\w+=", words), words
        assert "text/html" in data or "image/png" in data, cell.source


@pytest.mark.slow
def test_metrics_grow_by_a_line_a_step_and_results_lie_beside_the_run(chain):
    root, _ = chain
    folder = root / MODEL / "finetune" / "default"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert {"loss", "grad_norm", "lr", "targets", "samples", "seconds", "total_steps"} <= set(lines[0])
    assert {"config.yaml", "environment.json", "checkpoints", "export", "figures", "record-03_finetune.json"} <= {
        p.name for p in folder.iterdir()
    }
    assert (folder / "figures" / "training.png").stat().st_size > 5000
    assert (folder / "figures" / "training.csv").read_text().startswith("#")
    results = json.loads((root / MODEL / "eval" / "default" / "results.json").read_text())
    (result,) = results["results"]
    assert (result["task"], result["n"], result["unit"]) == ("easy_vqa", 16, "fraction") and "shuffled" in result["controls"]
    assert (root / MODEL / "eval" / "default" / "figures" / "answers-limit16.png").is_file()


@pytest.mark.slow
def test_data_pictures_and_published_figures_are_saved_with_their_numbers(chain):
    root, _ = chain
    figures = root / MODEL / "finetune" / "default" / "figures"
    for name in ("examples", "tokens", "mixture", "lengths", "cambrian_benchmarks", "stages"):
        assert (figures / f"{name}.png").is_file() and (figures / f"{name}.csv").is_file(), name
    tokens = (figures / "tokens.csv").read_text().splitlines()
    assert any(line.endswith("True") for line in tokens) and any(line.endswith("False") for line in tokens)


@pytest.mark.slow
def test_the_contrastive_notebooks_record_scores_beside_chance(chain):
    root, _ = chain
    (path,) = (root / CLIP / "eval" / "default").glob("record-04_eval*.json")
    found = json.loads(path.read_text())["results"]
    assert found, "no headline number"


@pytest.mark.slow
def test_a_stage_without_the_one_before_says_which_command_makes_it(tmp_path):
    outcome = run_notebook(find_notebook("03_finetune"), tmp_path / "out.ipynb", {"model": MODEL, "root": str(tmp_path / "runs")})
    assert outcome.code == USER_ERROR and f"mmkit train --model {MODEL} --stage pretrain" in outcome.message
    assert f"run 02_pretrain with model='{MODEL}', root=" in outcome.message  # where the user is: in a notebook
    assert "hidden states" not in (tmp_path / "out.ipynb").read_text() and not (tmp_path / "runs").exists()
    outcome = run_notebook(find_notebook("04_eval"), tmp_path / "out.ipynb", {"model": MODEL, "root": str(tmp_path / "runs")})
    assert outcome.code == USER_ERROR and f"mmkit train --model {MODEL} --stage finetune" in outcome.message


@pytest.mark.slow
def test_a_model_too_large_stops_usefully_and_its_dry_run_ends_well(tmp_path):
    values = {"model": "llava-7b", "root": str(tmp_path / "runs")}
    outcome = run_notebook(find_notebook("03_finetune"), tmp_path / "out.ipynb", values)
    assert outcome.code == USER_ERROR and "does not fit this machine" in outcome.message and "dry_run True" in outcome.message
    outcome = run_notebook(find_notebook("03_finetune"), tmp_path / "dry.ipynb", values | {"dry_run": "True"})
    assert outcome.code == OK, outcome.message
    shown = (tmp_path / "dry.ipynb").read_text()
    assert "hidden states" in shown and "dry run: no steps were made" in shown
    assert not (tmp_path / "runs" / "llava-7b" / "finetune" / "default" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_plain_papermill_works_from_inside_the_notebooks_folder(tmp_path):
    values = ["-p", "model", MODEL, "-p", "others", "[]", "-p", "root", str(tmp_path)]
    command = [sys.executable, "-m", "papermill", "00_setup.ipynb", str(tmp_path / "out.ipynb"), *values]
    done = subprocess.run(
        command, cwd=ROOT / "notebooks", capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    bad = [*command, "-p", "modle", "tiny"]
    done = subprocess.run(
        bad, cwd=ROOT / "notebooks", capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode != 0 and "did you mean 'model'" in done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_tidy(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert book.cells[1].metadata.get("tags") == ["parameters"], "the parameters are the second cell"
    for parameter in of_notebook(book, path.name).values():
        assert parameter.type_text and parameter.comment and "=" not in parameter.comment, parameter
    for before, cell in zip(book.cells[1:], book.cells[2:], strict=False):
        if cell.cell_type == "code":
            assert before.cell_type == "markdown" and len(re.findall(r"[.?](\s|$)", before.source)) >= 2, "prose comes before each cell"
            assert len(cell.source.splitlines()) <= 12 and not any(word in cell.source for word in ("!pip", "%pip", "def ", "class "))
    assert "record(" in book.cells[-1].source, "the last cell records"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_papermill_explains_every_parameter(path):
    from papermill.inspection import inspect_notebook

    inferred = {name: parameter["help"] for name, parameter in inspect_notebook(str(path)).items()}
    known = of_notebook(nbformat.read(path, as_version=4), path.name)
    assert inferred == {name: parameter.comment for name, parameter in known.items()}
