"""The package keeps its shape: limits of size, one-way imports, distributed packages in one folder, whole notebooks."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import typing
from argparse import Namespace
from collections import defaultdict
from pathlib import Path

import pytest

from mmkit import config
from mmkit.values import kinds_of
from tests import code_shape

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mmkit"
LIMITS = (
    "max_file=500 max_function=80 p90_function=50 over_80=0 max_script=0 global_names=0 hard_cycles=0 leak_files=0 "
    "copied_functions=0 nb_longest_cell=12 nb_definitions=0 nb_with_outputs=0 nb_without_parameters=0 documented_pct>=80 test_ratio>=0.5"
).split()
# what a machine is and which backend suits it are decided there, once, so that no other code has to ask
DECIDES_FOR_MACHINES = ("mmkit/launch/machine.py", "mmkit/launch/choose.py")
LEVELS = (  # a folder may import from its own and from lower rows, never from a sibling in its own row
    ("errors", "config", "rules", "values", "presets", "foreign_names", "letterbox", "cache", "storage", "folder_lock"),
    ("models", "data", "sharding"),
    ("training", "evaluation"),
    ("launch", "notebook", "figures", "doctor", "listing", "run_options", "cli", "__main__"),
)
REGIONS = "regions: Ferret's scorers, for its own benchmarks"
TAKEN_BY_TESTS = {  # public names that no line of the kit uses yet -> what will; an entry goes when its name is used or deleted
    "mmkit/evaluation/answers.py decode_boxes": REGIONS,
    "mmkit/evaluation/answers.py phrases_equal": REGIONS,
    "mmkit/evaluation/answers.py without_negations": REGIONS,
    "mmkit/evaluation/chat.py open_chat": "the talk widget",
    "mmkit/notebook/git_index.py after_save": "JupyterLab, as `make lab` tells it to",
}
READ_BY_NOTHING: dict[tuple[str, str], str] = {}  # settings that nothing reads yet -> what will
TOP_MAY_MIX = set(LEVELS[-1])  # the entry points call each other


def level_of(part: str) -> int:
    return next(i for i, row in enumerate(LEVELS) if part in row)


def package_imports(path: Path):
    """Dotted mmkit modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "mmkit")
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "mmkit":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_shape_limits_hold():
    command = [sys.executable, str(ROOT / "tests/code_shape.py"), str(ROOT), "--backend", "mmkit/sharding", "--check", *LIMITS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    command = [*command[:5], "--check", "backend_branches=15", "--skip", *DECIDES_FOR_MACHINES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_have_a_user_or_a_reason(monkeypatch):
    monkeypatch.setattr(code_shape, "LISTED", 10_000)
    shape = code_shape.measure(ROOT, Namespace(skip=[], only=[], backend=[], entry=[], path=[], top=0))
    places = [place.split() for place in shape["test_only_names_list"] + shape["unused_names_list"]]
    idle = {f"{place.partition(':')[0]} {name}" for place, name in places}
    assert sorted(idle - TAKEN_BY_TESTS.keys()) == [], "used by tests only: use it or delete it"
    assert sorted(TAKEN_BY_TESTS.keys() - idle) == [], "used or gone: take it out of TAKEN_BY_TESTS"


SECTIONS = {
    kind.__name__: kind
    for kind in vars(config).values()
    if isinstance(kind, type) and issubclass(kind, config.Settings) and kind is not config.Settings
}


class SettingsRead(ast.NodeVisitor):
    """The (section, field) pairs that a file reads: ``train.lr_of`` where ``train`` holds a TrainConfig.

    What a name holds is taken from its annotation, from what is assigned to it, from the list it runs through, and from
    the settings' own names (``run.train.optimizer``). A field that another object has under the same name is no reading of it.
    """

    def __init__(self, tree: ast.Module):
        self.known: defaultdict[str, set[str]] = defaultdict(set, {"run": {"RunConfig"}})
        for kind in SECTIONS.values():
            for name, field in kind.model_fields.items():
                tuples = [typing.get_args(each)[0] for each in kinds_of(field.annotation) if typing.get_origin(each) is tuple]
                inner = [*kinds_of(field.annotation), *(each for one in tuples for each in kinds_of(one))]
                self.known[name] |= {each.__name__ for each in inner if getattr(each, "__name__", "") in SECTIONS}
        self.read: set[tuple[str, str]] = set()
        for _ in range(3):  # a name may hold what a name further down holds
            self.visit(tree)

    def held(self, node: ast.AST | None) -> set[str]:
        """Names of the sections that an expression may be."""
        if isinstance(node, ast.Name):
            return self.known[node.id]
        if isinstance(node, ast.Attribute):
            return self.known[node.attr]
        if isinstance(node, (ast.Tuple, ast.BoolOp, ast.IfExp, ast.NamedExpr, ast.Subscript, ast.Starred)):
            return {name for part in ast.iter_child_nodes(node) for name in self.held(part)}
        if isinstance(node, ast.Call):
            function, arguments = node.func, [name for part in node.args for name in self.held(part)]
            made = getattr(function, "id", "") in SECTIONS and {function.id}
            copied = getattr(function, "attr", "") == "model_copy" and self.held(function.value)
            return made or copied or (set(arguments) if getattr(function, "id", "") in ("enumerate", "zip", "sorted", "changed") else set())
        return set()

    def bind(self, target: ast.AST, value: ast.AST | None, text: str = "") -> None:
        """``target`` holds what ``value`` does, and the sections that the annotation ``text`` names."""
        if isinstance(target, (ast.Tuple, ast.List)):
            parts = getattr(value, "elts", ())
            for k, one in enumerate(target.elts):
                self.bind(one, parts[k] if len(parts) == len(target.elts) else value)
        elif name := getattr(target, "arg", "") or getattr(target, "id", "") or getattr(target, "attr", ""):
            text = text.replace("ModelConfig", "VlmConfig ClipConfig")
            self.known[name] |= self.held(value) | {section for section in SECTIONS if section in text}

    def generic_visit(self, node: ast.AST) -> None:
        """Binds and reads, then goes on inside."""
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation:
            self.bind(getattr(node, "target", node), getattr(node, "value", None), ast.unparse(node.annotation))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self.bind(target, node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            self.bind(node.target, node.iter)
        elif isinstance(node, ast.NamedExpr):
            self.bind(node.target, node.value)
        elif isinstance(node, ast.Attribute):
            self.read |= {(section, node.attr) for section in self.held(node.value)}
        super().generic_visit(node)


def test_every_setting_is_read():
    files = [path for path in PACKAGE.rglob("*.py") if path not in (PACKAGE / "config.py", PACKAGE / "rules.py")]
    read = {pair for path in files for pair in SettingsRead(ast.parse(path.read_text(encoding="utf8"))).read}
    idle = {(name, field) for name, kind in SECTIONS.items() for field in kind.model_fields if (name, field) not in read}
    assert len(SECTIONS) > 15
    assert sorted(idle - READ_BY_NOTHING.keys()) == [], "read by nothing: read it or delete it"
    assert sorted(READ_BY_NOTHING.keys() - idle) == [], "read or gone: take it out of READ_BY_NOTHING"


def test_the_reader_of_settings_tells_a_setting_from_a_namesake():
    text = "def f(run: RunConfig, task: Task):\n    batch, decode = run.evaluation.batch, task.decode\n    return decode.max_new_tokens"
    found = SettingsRead(ast.parse(text)).read
    assert ("EvalConfig", "batch") in found and ("EvalConfig", "max_new_tokens") not in found
    assert ("EvalConfig", "limit") in SettingsRead(ast.parse("x = run.evaluation\nfor y in (x,):\n    y.limit")).read


def test_imports_point_one_way_and_siblings_do_not_meet():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if own == "__init__":
            continue
        for module in package_imports(path):
            other = module.split(".")[1] if "." in module else ""
            if not (PACKAGE / other).is_dir() and not (PACKAGE / f"{other}.py").is_file() or other in ("", own):
                continue
            same_row = level_of(other) == level_of(own) and own not in TOP_MAY_MIX and level_of(own) > 0
            if level_of(other) > level_of(own) or same_row:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=lambda p: str(p.parent.relative_to(ROOT)))
def test_init_files_hold_a_docstring_and_few_names(path):
    tree = ast.parse(path.read_text(encoding="utf8"))
    assert ast.get_docstring(tree), "a package says what it is"
    names = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert len(names) <= 10


def test_notebooks_carry_no_papermill_or_execution_traces():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        book = json.loads(path.read_text(encoding="utf8"))
        assert "papermill" not in book["metadata"], path.name
        for cell in book["cells"]:
            assert "papermill" not in cell["metadata"] and cell.get("execution_count") is None, path.name


def test_no_machine_paths_or_registry_hosts_in_the_project():
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    words = ["/wo" + "rk/", "/fa" + "rm/", "pypi" + ".org", "files.python" + "hosted", "registry." + "npmjs", "deb." + "debian.org"]
    hits = []
    for name in listed:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".ipynb", ".sh", ".json", ".csv"} and path.is_file():
            text = path.read_text(encoding="utf8", errors="replace")
            hits += [f"{name}: {word}" for word in words if word in text]
    assert not hits, hits
