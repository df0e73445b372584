"""Errors that the user can mend. Everything else is a fault of the kit and keeps its traceback.

Each is one message: what is wrong, which value, where it came from, what to do. The command line prints it and exits with 2; a notebook
shows it without the traceback, and papermill still fails with it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


class UserError(Exception):
    """Base of the errors that the user can mend, by another setting, file or command."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class InputError(UserError, ValueError):
    """A value, file or folder that was given cannot be used; the message names it."""


class ConfigError(InputError):
    """A setting is wrong; the message names the field, the value, its source and what to do."""


class Unusable(UserError, OSError):
    """A folder or file that cannot be read or written: no permission, a file in the place of a folder, a full disk."""


@contextlib.contextmanager
def writing(path: str | os.PathLike, elsewhere: str) -> Iterator[None]:
    """Within it, what the system says against writing ``path`` becomes `Unusable`; ``elsewhere`` is the setting that names another place."""
    try:
        yield
    except OSError as error:
        blocked = isinstance(error, (FileExistsError, NotADirectoryError))
        reason = "a file stands in the place of a folder" if blocked else error.strerror or error
        raise Unusable(f"{path} cannot be written: {reason}; free some space or repair the folder, or choose another ({elsewhere})") from error


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: what to do is then told in a notebook's words."""
    ipython = sys.modules.get("IPython")  # a kernel has it; nothing else need import it to know
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None
