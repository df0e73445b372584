"""One writer a folder, on a disk or in an object store: the file ``.in-use`` in it says who writes there.

It is made only where nobody has one, renewed each minute and removed at the end. Who finds one judges by what
it says whether its writer is gone: a process of this machine by asking the system, an earlier start of the
same SLURM job at once, any other after five minutes without a renewal. Locks of the operating system are not
used: object stores and many network disks have none, and a network disk keeps those of a host that died. A
writer that was out of reach for those minutes may find another in its place, so it asks (`FolderLock.check`)
before it writes what cannot be undone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from mmkit.errors import ConfigError
from mmkit.storage import Store

NAME = ".in-use"
RENEWED = 60.0  # seconds between renewals
GONE = 300.0  # seconds without one after which a writer that cannot be asked counts as gone: four may fail
LOOK = 0.5  # seconds between looks at a folder that is waited for
log = logging.getLogger(__name__)


class FolderLock:
    """The right to write in a folder. ``use`` says for what, for the message that another gets: "trains in
    it".

    ``clock`` gives the time in seconds since 1970; the clocks of hosts that share a folder may differ by a
    minute or two.
    """

    def __init__(self, store: Store, use: str, clock: Callable[[], float] = time.time):
        self.store, self.use, self.clock = store, use, clock
        self.own: dict[str, Any] = {}  # what the file says while it is ours
        self.lost = ""  # who has taken over
        self._end, self._turn = threading.Event(), threading.Lock()  # of the thread that renews, and others

    def take(self, patience: float = 0.0) -> None:
        """Takes the folder and renews the claim until `release`. ConfigError where another still writes there
        after ``patience`` seconds."""
        now, process = self.clock(), psutil.Process()
        self.own = {
            "use": self.use, "host": socket.gethostname(), "system": system(),
            "pid": process.pid, "started": process.create_time(),
            "job": os.environ.get("SLURM_JOB_ID", ""), "since": now, "renewed": now, "id": uuid.uuid4().hex,
        }  # fmt: skip
        until = now + patience
        while True:
            other = self._read()
            other = self._claim(NAME) if other is None else other
            if other is None:  # made and removed by another in the same moment
                continue
            if other.get("id") == self.own["id"] or (not self._is_alive(other) and self._take_over(other)):
                break
            if self._is_alive(other) and self.clock() >= until:
                self._refuse(other)
            time.sleep(LOOK)
        threading.Thread(target=self._renew_until_end, name="folder lock", daemon=True).start()

    def _claim(self, name: str) -> dict[str, Any] | None:
        """Makes the file ``name`` where there is none; what it says then decides, not whether it was made: a
        reply may have been lost, and some object stores overwrite, where who wrote last has it."""
        self.store.create(name, json.dumps(self.own).encode())
        if self.store.remote:
            time.sleep(LOOK)
        return self._read(name)

    def _take_over(self, gone: dict[str, Any]) -> bool:
        """Puts our file in the place of ``gone``'s; False where another is at it or has been.

        Two who both found that writer gone must not both do it, nor the slower one remove the quicker one's
        file: the one that makes the file named by the gone claim goes on. It then looks once more, since that
        file is removed behind the new claim, after which a late one could make it again.
        """
        marks, writer, taken = [], gone, False
        while not taken:
            mark = f"{NAME}.{hashlib.sha256(str(writer.get('id', writer)).encode()).hexdigest()[:16]}"
            writer = self._claim(mark)
            taken = writer is not None and writer.get("id") == self.own["id"]
            if writer is None or (not taken and self._is_alive(writer)):
                return False
            marks.append(mark)  # who took over may have died on the way, and is then taken over from itself
        if taken := self._read() == gone:
            self.store.write(NAME, json.dumps(self.own).encode())
            log.warning("%s: taken over from %s, which is gone", self.store.path(), named(gone))
        for mark in marks:
            self.store.delete(mark)
        return taken

    def release(self) -> None:
        """Gives the folder back, where it is still ours. A store that cannot be reached keeps the file, which
        then counts as gone by itself."""
        self._end.set()
        with self._turn, contextlib.suppress(OSError):
            if (self._read() or {}).get("id") == self.own["id"]:
                self.store.delete(NAME)

    def renew(self) -> None:
        """Says that the writer is still there; notes where another has taken over. A store that cannot be
        reached now is told and tried again at the next time."""
        with self._turn:
            if self._end.is_set():
                return
            try:
                found, now = self._read(), self.clock()
                # removed by hand: nobody may have taken it over so soon
                if found is None and now - self.own["renewed"] < GONE:
                    self.store.create(NAME, json.dumps(self.own).encode())
                    found = self._read()
                if found is None or found.get("id") != self.own["id"]:
                    self.lost = named(found or {})
                    return
                self.own["renewed"] = now
                self.store.write(NAME, json.dumps(self.own).encode())
            except OSError as error:
                log.warning("%s could not be renewed: %s", self.store.path(NAME), error)

    def check(self) -> None:
        """ConfigError where the folder is no longer ours: nothing more may be written there."""
        if not self.lost:
            self.renew()
        if self.lost:
            raise ConfigError(
                f"{self.store.path()} was taken over by {self.lost}, since process {self.own['pid']} on "
                f"{self.own['host']} gave no sign for "
                f"{GONE / 60:.0f} minutes; nothing more is written here. Let one of them go on, or give this "
                f"run another name (name=...)"
            )

    def _renew_until_end(self) -> None:
        while not self.lost and not self._end.wait(RENEWED):
            self.renew()

    def _read(self, name: str = NAME) -> dict[str, Any] | None:
        """What the file says; None where there is none, nothing where it is none of ours or was never
        finished."""
        for wait in (LOOK, 0.0):
            try:
                text = self.store.read(name)
            except (FileNotFoundError, NotADirectoryError):  # making it says which
                return None
            if text:
                break
            time.sleep(wait)  # somebody is writing it at this moment
        try:
            found = json.loads(text)
        except ValueError:  # of an earlier version of the kit, whose file outlived its lock
            return {}
        return found if isinstance(found, dict) else {}

    def _is_alive(self, other: dict[str, Any]) -> bool:
        """Whether the writer that ``other`` names may still write."""
        if other.get("system") == self.own["system"]:
            if not runs(other.get("pid"), other.get("started")):
                return False
        elif other.get("job") and other["job"] == self.own["job"]:
            return False
        return self.clock() - other.get("renewed", 0.0) < GONE

    def _refuse(self, other: dict[str, Any]) -> None:
        renewed = other.get("renewed", 0.0)
        age, free = (
            max(self.clock() - renewed, 0.0),
            time.strftime("%H:%M:%S", time.localtime(renewed + GONE)),
        )
        near = other.get("system") == self.own["system"]
        where_gone = (
            ""
            if near
            else f". It was last heard of {age:.0f} s ago; where it is gone, the folder is free at {free}"
        )
        raise ConfigError(
            f"{self.store.path()} is in use: {named(other)} {other.get('use', 'writes in it')}; wait for it "
            f"or stop it, or give this run "
            f"another name (name=...){where_gone}"
        )


def named(writer: dict[str, Any]) -> str:
    """A writer for people: ``process 7 on gpu03 of job 12, since 2026-05-01 12:00:00``."""
    if "pid" not in writer:
        return "a process that is not known"
    job = f" of job {writer['job']}" if writer.get("job") else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(writer.get("since", 0.0)))
    return f"process {writer['pid']} on {writer.get('host')}{job}, since {since}"


def system() -> str:
    """What process numbers of this process mean something in: its machine since it was started, and its
    container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux only; elsewhere the host's name has to do
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join(parts)


def runs(pid: Any, started: Any) -> bool:
    """Whether process ``pid`` that began at ``started`` is still there, and not another that got its
    number."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 2 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, TypeError, ValueError):
        return False
    except psutil.AccessDenied:
        return True
