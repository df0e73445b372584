"""Parameters arrive with the declared type or not at all."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mmkit.config import ConfigError
from mmkit.notebook.parameters import Parameter, assemble, begin, check, convert, declared, workspace

CELL = """model: str = "8b"  # a preset
lr: float = 0.0  # peak learning rate; 0 = the preset's own
steps: int = 0  # optimizer steps; 0 = the preset's own
dry_run: bool = False  # build and check, train nothing
pictures: int = 6  # how many examples to show
settings: dict = {}  # any other setting, by its full name"""


def space(injected: str = "", cell: str = CELL) -> dict:
    """A namespace as IPython leaves it after the parameters cell and papermill's injected one."""
    namespace: dict = {"In": ["", cell]}
    exec(cell, namespace)
    if injected:
        namespace["In"].append("# Parameters\n" + injected)
        exec(injected, namespace)
    return namespace


def test_a_parameters_cell_is_read_with_types_and_comments():
    found = declared(CELL)
    assert list(found) == ["model", "lr", "steps", "dry_run", "pictures", "settings"]
    assert found["lr"] == Parameter("lr", "float", 0.0, "peak learning rate; 0 = the preset's own")


def test_a_default_must_be_a_literal():
    with pytest.raises(ConfigError, match="no literal"):
        declared("lr: float = 2 * x")
    with pytest.raises(ConfigError, match="write one"):
        declared("import os")


@pytest.mark.parametrize(
    ("kind", "value", "want"),
    [
        ("tuple[int, ...]", "(1, 2)", (1, 2)),
        ("list[int]", "[1, 2]", [1, 2]),
        ("list", "[13b, tiny]", ["13b", "tiny"]),
        ("float", "0.1000000015", 0.1000000015),
        ("float", np.float32(0.5), 0.5),
        ("str", Path("data/x"), "data/x"),
        ("bool", "false", False),
        ("bool", "True", True),
        ("float", "1e-5", 1e-5),
        ("int", "12", 12),
        ("dict[int, str]", {"1": "a"}, {1: "a"}),
        ("str", "007", "007"),
        ("float", "-1e-5", -1e-5),
        ("float", "-inf", float("-inf")),
        ("int | None", "None", None),
        ("'int | None'", "-3", -3),
        ("Optional[int]", " null ", None),
        ("str | None", "None", None),
        ("Literal['a', 'b']", "b", "b"),
        ("dict", "{1: 'a', 'b': 2}", {1: "a", "b": 2}),
        ("dict", '{"a": null, "b": [true]}', {"a": None, "b": [True]}),
    ],
)
def test_values_become_the_declared_type(kind, value, want):
    got = convert(Parameter("x", kind, None, ""), value, "-p")
    assert got == want and type(got) is type(want)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", "7.5"),
        ("bool", "maybe"),
        ("str", 7),
        ("int", "(1, 2)"),
        ("list[int]", "{1, x}"),
        ("float", None),
        ("dict[int, str]", {"None": "a"}),
        ("int", "None"),
        ("Literal['a', 'b']", "c"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(kind, value):
    with pytest.raises(ConfigError, match=r"x = .*from -p.* is not of type"):
        convert(Parameter("x", kind, None, ""), value, "-p")


def test_a_type_that_is_not_known_is_named_with_those_that_are():
    with pytest.raises(ConfigError, match="parameter 'x' is of type ndarray: .*; types are made of bool, int, .*Optional"):
        convert(Parameter("x", "ndarray", None, ""), "1", "-p")


def test_begin_gives_the_run_and_converts_the_namespace():
    namespace = space("lr = '1e-4'\ndry_run = 'true'\nsettings = {'train.global_batch': 256}\nwarmup = 0.1")
    run = begin(namespace, "finetune", also=("pictures",))
    assert run.train.optimizer.lr == namespace["lr"] == 1e-4
    assert run.dry_run is True and run.train.global_batch == 256 and run.train.optimizer.warmup == 0.1
    assert run.train.steps is None, "0 leaves the preset's own"


@pytest.mark.parametrize(
    ("injected", "words"),
    [
        ("lrr = 1e-4", "did you mean 'lr'"),
        ("step = 3", "did you mean 'steps'"),
        ("dry_run = 'perhaps'", "dry_run = 'perhaps'"),
        ("model = '9b'", "did you mean '8b'"),
        ("model = 7", "quote it"),
        ("settings = {'train.optimiser.lr': 1}", "did you mean"),
        ("backend = 'zerro2'", "no backend 'zerro2'.*did you mean 'zero"),
    ],
)
def test_begin_stops_the_notebook_on_a_wrong_parameter(injected, words):
    with pytest.raises(ConfigError, match=words):
        begin(space(injected), "finetune", also=("pictures",))


def test_a_misspelt_declaration_is_refused_and_its_correction_counts():
    namespace = space(cell=CELL + "\nwarmpu: float = 0.1  # misspelt")
    with pytest.raises(ConfigError, match="did you mean 'warmup'"):
        begin(namespace, "finetune", also=("pictures",))
    corrected = CELL + "\nwarmup: float = 0.1  # right"
    namespace["In"].append(corrected)
    exec(corrected, namespace)
    assert begin(namespace, "finetune", also=("pictures",)).train.optimizer.warmup == 0.1


def warm(*later: str) -> dict:
    """A kernel in which the notebook ran once, and then these cells."""
    namespace = space()
    begin(namespace, "finetune", also=("pictures",))
    for cell in ("from mmkit.notebook.parameters import begin\nrun = begin(globals())", *later):
        namespace["In"].append(cell)
        exec(cell.replace("%matplotlib inline", "").partition("\nrun =")[0], namespace)
    return namespace


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (CELL + "\nlrr = 1e-4", "'lrr'.*did you mean 'lr'"),
        (CELL + "\nlearning_rate = 1e-4", "it is 'train.optimizer.lr' here"),
        (CELL + "\nshare_imag = False", "'share_imag'.*did you mean 'share_image'"),  # a value that stands for "the preset's own"
        (CELL + "\nwarmpu: float = 0.0", "did you mean 'warmup'"),
        ("%matplotlib inline\n" + CELL + "\nlrr = 1e-4", "did you mean 'lr'"),
        (re.sub(r"(?m)^(\w+): \w+", r"\1", CELL) + "\nlrr = 1", "did you mean 'lr'"),
        (CELL + "\nimport os", "write one `name: type = literal"),
        (CELL + "\nlr = lr * 2", "no literal"),
    ],
    ids=["added", "another program's", "false", "zero", "magic", "without types", "import", "computed"],
)
def test_a_wrong_name_in_an_edited_parameters_cell_is_seen_in_a_warm_kernel(cell, words):
    with pytest.raises(ConfigError, match=words):
        begin(warm(cell), "finetune", also=("pictures",))


def test_names_of_other_cells_are_the_notebooks_own():
    own = ("lrr = 1e-4\nwarmpu = 3", "rows = [1]\nk: int = len(rows)", "for step in rows:\n    pass", "def f(x: int = 3):\n    return x")
    namespace = warm(*own)
    assert begin(namespace, "finetune", also=("pictures",)).train.optimizer.lr == 4e-5


def test_a_line_whose_type_was_deleted_still_counts():
    namespace = warm(CELL.replace("lr: float = 0.0", "lr = 1e-4"))
    assert begin(namespace, "finetune", also=("pictures",)).train.optimizer.lr == 1e-4


def test_what_papermill_injected_does_not_outlive_a_newer_parameters_cell():
    namespace = space("warmup = 0.5")
    assert begin(namespace, "finetune", also=("pictures",)).train.optimizer.warmup == 0.5
    namespace["In"].append(CELL)
    assert begin(namespace, "finetune", also=("pictures",)).train.optimizer.warmup == 0.03


def test_begin_before_the_parameters_cell_says_so():
    with pytest.raises(ConfigError, match="no parameters cell was run"):
        begin({"In": ["", "from mmkit import x"]}, "finetune")


def test_check_without_settings_knows_only_what_is_declared():
    assert check({"warmup": "0.1"}, declared(CELL), "-p") == {"warmup": "0.1"}
    with pytest.raises(ConfigError, match="no parameter 'warmup'"):
        check({"warmup": "0.1"}, declared(CELL), "-p", settings=False)


def test_backend_short_names_become_settings():
    run = assemble({"model": "8b", "backend": "zero3"}, "finetune", "test")
    assert (run.backend.kind, run.backend.zero_stage) == ("deepspeed", 3)


@pytest.mark.parametrize("start", [".", "notebooks"])
def test_a_relative_path_is_the_same_file_from_the_root_and_from_notebooks(tmp_path, monkeypatch, start):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    assert workspace(tmp_path / "notebooks") == workspace(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path / start)
    assert begin(space(), "finetune", also=("pictures",)).root == str(tmp_path / "runs")
    assert Path("data/own.jsonl").absolute() == tmp_path / "data" / "own.jsonl"


def test_outside_a_checkout_paths_start_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert begin(space(), "finetune", also=("pictures",)).root == str(tmp_path / "runs") and Path.cwd() == tmp_path
