"""What all processes of a run have to find alike on a disk they share, though their lists of it may be of different age."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmkit.errors import InputError, UserError


def by_main(backend: Any, find: Callable[[], Any]) -> Any:
    """What ``find`` gives on the main process, on every process; an error the user can mend is raised on all."""
    found = error = None
    if backend.is_main:
        try:
            found = find()
        except UserError as problem:
            error = problem
    found, error = backend.broadcast((found, error))
    if error:
        raise error
    return found


def by_each(backend: Any, path: str, open_it: Callable[[], Any]) -> Any:
    """``open_it()``, which reads ``path``, on every process.

    Where one cannot, InputError on all with the ranks that cannot; where none can, each raises its own error. A
    process that failed alone would leave the others waiting for it.
    """
    found = error = None
    try:
        found = open_it()
    except (OSError, InputError) as problem:
        error = problem
    problems = {rank: text for rank, text in enumerate(backend.all_objects(error and str(error))) if text}
    if not problems:
        return found
    if len(problems) == backend.world:
        raise error
    ranks, text = ", ".join(map(str, problems)), next(iter(problems.values()))
    raise InputError(
        f"rank {ranks} of {backend.world} cannot read {path}, which the others can: {text}. The run folder must be on a "
        "disk that every host shares and sees alike, or in an object store; where a host's list of it is only old, the "
        "same command works once it is new"
    )
