"""OpenMP's threads do not spin while they wait, unless the user wants them to: torch's library is asked, not the variable."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("policy", "spins"), [(None, False), ("", False), ("ACTIVE", True), ("PASSIVE", False)])
def test_threads_wait_passively_where_the_user_did_not_choose(policy, spins):
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    variables |= {"OMP_DISPLAY_ENV": "VERBOSE"} | ({} if policy is None else {"OMP_WAIT_POLICY": policy})
    code = "import mmkit.launch.launch, torch; torch.ones(8, 8) @ torch.ones(8, 8)"
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    told = re.search(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)
    assert told and (told[1] != "0") is spins
