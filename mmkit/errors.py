"""Errors that the user can mend. Everything else is a fault of the kit and keeps its traceback.

Each is one message: what is wrong, which value, where it came from, what to do. The command line prints it and exits with 2; a notebook
shows it without the traceback, and papermill still fails with it.
"""

from __future__ import annotations


class UserError(Exception):
    """Base of the errors that the user can mend, by another setting, file or command."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class InputError(UserError, ValueError):
    """A value, file or folder that was given cannot be used; the message names it."""


class ConfigError(InputError):
    """A setting is wrong; the message names the field, the value, its source and what to do."""
