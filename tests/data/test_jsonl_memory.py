"""Memory of the line index at the size of the published mixture."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_seven_million_lines_take_less_than_100_mb(tmp_path):
    out = tmp_path / "line_index.csv"
    subprocess.run([sys.executable, ROOT / "benchmarks/loader.py", "--lines", "7000000", "--out", out], check=True, capture_output=True)
    (row,) = csv.DictReader(out.open())
    assert row["lines"] == "7000000" and int(row["file_mb"]) > 500 and float(row["memory_mb"]) < 100
