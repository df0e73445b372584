"""Every golden case in $MMKIT_GOLDEN_DIR (default: tests/golden): vectors that the original implementations computed.

A case is a json file. Its ``kind`` (or, for files without one, its name) chooses the check; a case without a check fails.
"""

from __future__ import annotations

import fnmatch
import importlib
import os
from pathlib import Path

import pytest
import torch

from tests.golden_checks.case import Case

FOLDER = Path(os.environ.get("MMKIT_GOLDEN_DIR", Path(__file__).parent / "golden"))
NOT_CASES = "tokenizers"  # files that cases refer to


def _call(module: str, function: str, *arguments):
    """The check is imported when its case runs, so one broken topic does not hide the others."""
    return getattr(importlib.import_module(f"tests.golden_checks.{module}"), function)(*arguments)


# kind, or pattern of the file name where a file has no kind -> check
CHECKS = {
    "vision_token_sampler": lambda case: _call("connector", "vision_token_sampler", case),
    "sva_connector": lambda case: _call("connector", "sva_connector", case),
    "cambrian_llama_train": lambda case: _call("language", "cambrian_llama_train", case),
    "cambrian_llama_infer": lambda case: _call("language", "cambrian_llama_infer", case),
    "ferret_geo_sampler": lambda case: _call("regions", "ferret_geo_sampler", case),
    "ferret_llama": lambda case: _call("language", "ferret_llama", case),
    "llava_llama": lambda case: _call("language", "llava_llama", case),
    "image_preprocess": lambda case: _call("images", "check", case),
    "ferret_region_masks": lambda case: _call("region_masks", "check", case.json, case.tensors),
    "letterbox_table*": lambda case: _call("connector", "letterbox_table", case),
    "length_grouped_sampler*": lambda case: _call("sampler", "check", case),
    "prompts_*": lambda case: _call("prompts", "check", case.path.stem, case.path.parent),
    "eval_metrics*": lambda case: _call("eval_metrics", "check_metrics", case.path),
    "ferret_eval_parsing*": lambda case: _call("eval_metrics", "check_parsing", case.path),
    "fsdp_shards*": lambda case: _call("shards", "check", case.path.parent),
}


def cases() -> list[str]:
    """Names of all cases: json files, less those that only serve other cases."""
    found = (path.relative_to(FOLDER) for path in FOLDER.rglob("*.json"))
    return sorted(str(path) for path in found if path.parts[0] != NOT_CASES)


def check_of(case: Case, name: str):
    """The check for a case, or None."""
    if case.kind is not None:
        return CHECKS.get(case.kind)
    return next((CHECKS[pattern] for pattern in CHECKS if fnmatch.fnmatch(name, pattern)), None)


@pytest.mark.parametrize("name", cases())
def test_golden_case(name):
    case = Case(FOLDER / name)
    check = check_of(case, name)
    assert check is not None, f"{name}: no check for kind {case.kind!r}"
    torch.manual_seed(0)
    check(case)


def test_the_folder_has_cases_and_an_unknown_kind_has_no_check(tmp_path):
    assert cases(), f"no golden case in {FOLDER}"
    strange = tmp_path / "strange.json"
    strange.write_text('{"kind": "nobody_knows"}')
    assert check_of(Case(strange), "strange.json") is None
