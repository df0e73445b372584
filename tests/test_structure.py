"""The package keeps its shape: limits of size, one-way imports, distributed packages in one folder, whole notebooks."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mmkit"
LIMITS = (
    "max_file=500 max_function=80 p90_function=50 over_80=0 max_script=0 global_names=0 hard_cycles=0 leak_files=0 backend_branches=15 "
    "copied_functions=0 nb_longest_cell=12 nb_definitions=0 nb_with_outputs=0 nb_without_parameters=0 documented_pct>=80 test_ratio>=0.5"
).split()
LEVELS = (  # a folder may import from its own and from lower rows, never from a sibling in its own row
    ("errors", "config", "rules", "values", "presets", "foreign_names", "letterbox", "cache", "storage"),
    ("models", "data", "sharding"),
    ("training", "evaluation"),
    ("launch", "notebook", "figures", "doctor", "listing", "cli", "__main__"),
)
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
