"""Keeps `git status` clean of notebooks that were only run; `make lab` has JupyterLab call it after each save.

The filter that `make env` sets up leaves outputs out of what git reads. `git status` never asks it, though: a file of another size than
the index remembers counts as modified. Adding the file again, where what git would store is what it has, only renews that memory.
"""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any


def after_save(os_path: str, model: dict[str, Any], **_: Any) -> None:
    """JupyterLab's post-save hook, in a thread of its own, since git and its filter take a second; other files than notebooks are left alone."""
    if model["type"] == "notebook":
        threading.Thread(target=renew, args=(Path(os_path),)).start()


def renew(path: Path) -> None:
    """Renews git's memory of ``path`` where no cell of it was edited. Nothing is staged, and without git or a clone nothing is done."""
    if _git(path, "rev-parse", f":./{path.name}") == _git(path, "hash-object", path.name) != "":
        _git(path, "add", path.name)


def _git(path: Path, *words: str) -> str:
    try:
        return subprocess.run(["git", "-C", str(path.parent), *words], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git on this machine
        return ""
