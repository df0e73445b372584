"""Runs a notebook headless through papermill, with an exit code one can rely on.

papermill ends with 0 when a magic fails without an output, and marks cells completed that a dead kernel never reached. So the runner adds
a last cell of its own and believes only that cell's output; it checks the parameters before a kernel starts, saves the notebook while
cells run, and ends every process that the kernel left behind.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from mmkit.config import ConfigError
from mmkit.launch.launch import LaunchError
from mmkit.notebook.parameters import INJECTED, check, of_notebook, workspace

OK, USER_ERROR, NOTEBOOK_ERROR, KERNEL_DIED = 0, 2, 3, 4
MARK = "MMKIT_NOTEBOOK_RUN"  # environment variable that every process of one run carries
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run of a notebook ended."""

    code: int
    notebook: Path  # the executed notebook
    seconds: float
    message: str = ""  # what went wrong, empty when nothing did


def run_notebook(
    path: str | Path,
    executed: str | Path | None = None,
    parameters: dict[str, Any] | None = None,
    *,
    autosave: int = 10,
    timeout: int | None = None,
    stream: Any = None,
) -> Outcome:
    """Executes a notebook and says how it ended; the executed copy is kept whatever happens.

    The kernel starts in the checkout's root, outside one in the working folder, as papermill's does.
    ``executed`` defaults to ``runs/notebooks/<name>.ipynb`` there. ``timeout`` bounds one cell in seconds.
    What cells print goes to ``stream`` (standard output) while they run. Raises ConfigError before a kernel
    starts for a missing notebook, an unknown parameter or a wrong value.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no notebook {path.absolute()}; notebooks lie in {_notebooks(path)}")
    import nbformat

    book = nbformat.read(path, as_version=4)
    values = check(parameters or {}, of_notebook(book, path.name), "-p")
    kernel = kernel_of(book, path.name)
    executed = Path(executed) if executed else default_output(path, values)
    executed.parent.mkdir(parents=True, exist_ok=True)
    inject(book, values)
    started = time.monotonic()
    code, message = _execute(book, path, executed, values, kernel, autosave, timeout, stream or sys.stdout)
    return Outcome(code, executed, time.monotonic() - started, message)


def kernel_of(book: Any, name: str) -> str:
    """The kernel that a notebook runs on: the one it names where that is installed, else this environment's
    own, said in one line.

    The name is that of an environment on its author's machine (``conda-env-analysis-py``), which says nothing
    about this one. ConfigError for a notebook of another language.
    """
    from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpecManager

    spec = book.metadata.get("kernelspec", {})
    wanted, info = spec.get("name", ""), book.metadata.get("language_info", {})
    language = spec.get("language") or info.get("name") or "python"
    if language.lower() not in ("python", "python3", "ipython"):
        here = "mmkit runs notebooks in Python"
        raise ConfigError(f"{name} is a notebook in {language} (kernel {wanted!r}); {here}")
    if wanted in KernelSpecManager().find_kernel_specs():
        return wanted
    own = f"it runs on this environment's own ({sys.executable})"
    log.warning("kernel %r of %s is not installed; %s", wanted, name, own)
    return NATIVE_KERNEL_NAME


def inject(book: Any, values: dict[str, Any]) -> None:
    """Puts the cell that assigns ``values`` behind the parameters cell, as papermill does, in place of one
    that an earlier run left.

    papermill writes the keys of mappings as text only, and calls each parameter unknown whose default it
    cannot parse ("a=b").
    """
    import nbformat

    if not values:
        return
    lines = [INJECTED, *(f"{name} = {as_code(value)}" for name, value in values.items())]
    cell = nbformat.v4.new_code_cell("\n".join(lines), metadata={"tags": ["injected-parameters"]})
    tags = [each.metadata.get("tags", ()) for each in book.cells]
    place = next((i for i, found in enumerate(tags) if "injected-parameters" in found), None)
    if place is None:
        book.cells.insert(1 + next(i for i, found in enumerate(tags) if "parameters" in found), cell)
    else:
        book.cells[place] = cell


def as_code(value: Any) -> str:
    """``value`` as an expression of Python; numbers that are not finite, which have no literal, through
    ``float``."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_code(key)}: {as_code(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(as_code, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside},)" if value else "()"
    return repr(value)


class _Shown:
    """A stream without the line that the end mark prints."""

    def __init__(self, stream: Any, token: str):
        self.stream, self.token = stream, token

    def write(self, text: str) -> None:
        """Passes on everything but the mark."""
        self.stream.write(text.replace(self.token + "\n", ""))

    def flush(self) -> None:
        """Flushes the stream below."""
        self.stream.flush()


def find_notebook(name: str | Path) -> Path:
    """A notebook by path, or by the name of one in the checkout's ``notebooks/`` with or without its ending."""
    path = Path(name)
    inside = workspace() / "notebooks" / path.with_suffix(".ipynb").name
    return inside if not path.is_file() and inside.is_file() and len(path.parts) == 1 else path


def default_output(path: Path, values: dict[str, Any]) -> Path:
    """Where the executed copy goes: ``runs/notebooks/<notebook>-<model>.ipynb``."""
    model = f"-{values['model']}" if values.get("model") else ""
    return workspace() / "runs" / "notebooks" / f"{path.stem}{model}.ipynb"


def _notebooks(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() and any(path.parent.glob("*.ipynb")) else workspace() / "notebooks"
    return f"{folder}: {', '.join(sorted(book.name for book in folder.glob('*.ipynb'))) or 'none'}"


def _execute(
    book: Any,
    path: Path,
    executed: Path,
    values: dict[str, Any],
    kernel: str,
    autosave: int,
    timeout: int | None,
    stream: Any,
) -> tuple[int, str]:
    """Runs the cells; returns the exit code and what went wrong."""
    import nbformat
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    token = uuid.uuid4().hex
    ending = nbformat.v4.new_code_cell(f"print({token!r})")
    ending.metadata["tags"] = ["mmkit-end"]
    book.cells.append(ending)
    folder = tempfile.TemporaryDirectory(prefix="mmkit-notebook-")
    marked = Path(folder.name) / path.name
    nbformat.write(book, marked)
    environment = {MARK: token, "MMKIT_HEADLESS": "1"}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        papermill.execute_notebook(
            str(marked), str(executed), progress_bar=False, cwd=str(workspace()),
            autosave_cell_every=autosave, execution_timeout=timeout, kernel_name=kernel, language="python",
            stdout_file=_Shown(stream, token), stderr_file=_Shown(stream, token),
            # socket files in a folder only this user can open, not ports, nor files beside the notebook
            config=Config(KernelManager={"transport": "ipc", "ip": f"{folder.name}/kernel"}),
        )  # fmt: skip
        code, message = OK, ""
    except papermill.PapermillExecutionError as error:
        # `UserError` shows itself so, and nothing else does; what a training process died of is an error all the same
        user = error.traceback == [f"{error.ename}: {error.evalue}"] and error.ename != LaunchError.__name__
        code = USER_ERROR if user else NOTEBOOK_ERROR
        message = error.evalue if user else f"{error.ename} in cell {_shown_cell(executed)}: {error.evalue}"
    except CellTimeoutError as error:
        code, message = NOTEBOOK_ERROR, f"a cell ran longer than {timeout} s: {str(error).splitlines()[0]}"
    except DeadKernelError:
        code = KERNEL_DIED
        message = f"the kernel died in cell {_shown_cell(executed)}, often for want of memory; what was saved is in {executed}"
    finally:
        folder.cleanup()
        _restore(before)
        _end_processes(token)
    return _judge(path, executed, values, token, code, message)


def _judge(
    path: Path, executed: Path, values: dict[str, Any], token: str, code: int, message: str
) -> tuple[int, str]:
    """Takes the end mark out of the saved notebook; without its output a run that looked fine is an error after all."""
    import nbformat

    book = nbformat.read(executed, as_version=4)
    endings = [cell for cell in book.cells if "mmkit-end" in cell.metadata.get("tags", [])]
    reached = any(token in out.get("text", "") for cell in endings for out in cell.outputs)
    if code == OK and not reached:
        code, message = NOTEBOOK_ERROR, f"cell {_shown_cell(executed)} stopped the notebook without an error of its own"
    book.cells = [cell for cell in book.cells if cell not in endings]
    shown = json.loads(json.dumps(values, default=str))
    book.metadata["papermill"] |= {"input_path": path.name, "parameters": shown}
    book.metadata["mmkit"] = {"code": code, "message": message}
    nbformat.write(book, executed)
    return code, message


def _shown_cell(executed: Path) -> str:
    """Number (from 1, counting code cells of the executed copy) and first line of the cell in which a run stopped."""
    import nbformat

    book = nbformat.read(executed, as_version=4)
    codes = [cell for cell in book.cells if cell.cell_type == "code" and cell.source.strip()]
    begun = [i for i, cell in enumerate(codes) if cell.metadata.get("papermill", {}).get("start_time")]
    index = begun[-1] if begun else 0
    return f"{index + 1} ({codes[index].source.strip().splitlines()[0]})"


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _end_processes(token: str) -> None:
    """Ends every process that carries this run's mark: what a killed kernel leaves behind."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == token:
                process.terminate()
                left.append(process)
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    _, stubborn = psutil.wait_procs(left, timeout=10)
    for process in stubborn:
        process.kill()
    if left:
        log.warning("ended %d processes that the kernel left behind", len(left))
