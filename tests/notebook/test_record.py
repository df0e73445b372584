"""What notebooks leave: records that can be read again, tables for people, the demo's numbers in one file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmkit.config import changed, load
from mmkit.notebook import demo as whole
from mmkit.notebook.record import read_record, record
from mmkit.notebook.run_view import gallery, trained_groups
from mmkit.notebook.runner import NOTEBOOK_ERROR, OK, Outcome
from mmkit.notebook.scoring import suffix_of
from mmkit.notebook.tables import Table, html, text


class Figure:
    """Stands for a drawn figure."""

    name, source = "curve", "a test"

    def save(self, folder):
        """Writes an empty picture."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / "curve.png"
        path.write_bytes(b"png")
        return path

    def _repr_png_(self) -> bytes:
        return b"png"


def a_run(tmp_path, stage="finetune"):
    return load("8b-debug", stage, {"root": str(tmp_path)})


def test_a_record_holds_results_and_saved_figures(tmp_path):
    run = a_run(tmp_path)
    table = record("03_finetune", run, {"loss": 0.5}, {"curve": Figure(), "absent": None})
    found = read_record("03_finetune", run)
    assert found["results"] == {"loss": 0.5} and Path(found["figures"]["curve"]).is_file() and "absent" not in found["figures"]
    assert "0.5" in str(table) and "<table>" in table._repr_html_() and read_record("other", run) == {}


def test_a_number_and_a_figure_of_one_name_are_both_shown(tmp_path):
    table = record("01_data", a_run(tmp_path), {"examples": 22141}, {"examples": Figure()})
    assert [row["value"] for row in table.rows if row["what"] == "examples"] == [22141, f"{tmp_path}/8b-debug/finetune/default/figures/curve.png"]


def test_a_gallery_saves_and_shows(tmp_path):
    shown = gallery([Figure()], a_run(tmp_path))
    assert "curve.png" in str(shown) and "data:image/png" in shown._repr_mimebundle_()["text/html"]


def test_groups_and_adapters_come_from_the_run_folder(tmp_path):
    run = a_run(tmp_path)
    assert trained_groups(SimpleNamespace(run=run, folder=tmp_path)) == []
    groups = [{"group": "connector", "lr": 1e-3, "weight_decay": 0.0, "tensors": 3}]
    groups += [{"group": f"language{end}", "lr": 2e-4, "weight_decay": decay, "tensors": 4} for end, decay in ((" (no decay)", 0.0), ("", 0.1))]
    adapters = [{"component": "language", "layer": "language.q", "layers": 2, "trained": 8}]
    (tmp_path / "environment.json").write_text(json.dumps({"tables": {"groups": groups, "adapters": adapters}}))
    lora = changed(run, train__lora={"rank": 2}, train__trainable=["connector"])
    *_, last = rows = trained_groups(SimpleNamespace(run=lora, folder=tmp_path))
    assert last["group"].startswith("adapter of language.q") and (last["lr"], last["weight_decay"], last["tensors"]) == (2e-4, 0.1, 4)
    assert len(rows) == 4 and {len(row) for row in rows} == {4}, "no blank cell"


def test_tables_align_numbers_and_escape_text():
    rows = [{"name": "a<b", "n": 1234567, "share": 0.12345, "ok": True, "list": (1, 2)}, {"name": "c", "n": 5, "more": {"x": 1}}]
    lines = text(rows).splitlines()
    assert lines[0].split() == ["name", "n", "share", "ok", "list", "more"] and "1,234,567" in lines[1] and "0.1235" in lines[1]
    assert "a&lt;b" in html(rows, "title") and "text-align:right" in html(rows) and str(Table([], "empty")).startswith("empty")


@pytest.fixture()
def notebooks(monkeypatch, tmp_path):
    """A demo whose notebooks only leave records; ``fail`` names a notebook that ends with an error."""
    calls = []

    def run(path, output, parameters):
        stage = {"02_pretrain": "pretrain", "04_eval": "eval"}.get(Path(path).stem, "finetune")
        run = load(parameters["model"], stage, {"root": parameters["root"]})
        calls.append((Path(path).stem, parameters["model"]))
        if Path(path).stem == fail.name:
            return Outcome(NOTEBOOK_ERROR, Path(output), 1.0, "boom")
        record(Path(path).stem, run, {f"{parameters['model']}_{Path(path).stem}": 1.0}, {})
        return Outcome(OK, Path(output), 1.0)

    fail = SimpleNamespace(name="", calls=calls)
    monkeypatch.setattr(whole, "run_notebook", run)
    monkeypatch.setattr("mmkit.data.demo.prepare", lambda progress: [SimpleNamespace(name="easy_vqa", status="ready")])
    return fail


def test_the_demo_collects_every_notebooks_numbers(notebooks, tmp_path, capsys):
    assert whole.demo("8b-debug", "clip-vit-l-14-debug", root=str(tmp_path)) == OK
    values = json.loads((tmp_path / "demo.json").read_text())
    assert values["complete"] and values["packs"] == {"easy_vqa": "ready"} and values["8b-debug_04_eval"] == 1.0 and values["seconds"] >= 0
    assert [name for name, _ in notebooks.calls] == [
        "00_setup",
        "01_data",
        "02_pretrain",
        "03_finetune",
        "04_eval",
        "02_pretrain",
        "04_eval",
        "05_figures",
    ]
    assert "demo.json" in capsys.readouterr().out


def test_the_demo_stops_at_the_first_failure_and_keeps_what_was_reached(notebooks, tmp_path, capsys):
    notebooks.name = "03_finetune"
    assert whole.demo("8b-debug", "clip-vit-l-14-debug", root=str(tmp_path)) == NOTEBOOK_ERROR
    values = json.loads((tmp_path / "demo.json").read_text())
    assert not values["complete"] and len(values["notebooks"]) == 4 and values["notebooks"][-1]["state"] == "boom"
    assert "boom" in capsys.readouterr().out


def test_an_evaluation_that_is_not_the_presets_own_has_names_of_its_own():
    def of(**values):
        return suffix_of(load("tiny", "eval", values))

    assert of() == of(limit=None) == of(name="other") == ""
    other, again = (of(start_from=f"{root}/tiny/pretrain/default") for root in ("runs", "elsewhere"))
    assert other.startswith("-from-pretrain-default-") and len({other, again, of()}) == 3
    assert of(limit=20) == "-limit20" and of(tasks=["charts"]) == "-charts" and of(tasks=["charts"], max_new_tokens=9) == "-charts-tokens9"
    many = [of(tasks=["vtab/cars"] * 20 + [str(number)]) for number in range(2)]
    assert len(set(many)) == 2 and all(len(name) <= 60 and "/" not in name for name in many)
