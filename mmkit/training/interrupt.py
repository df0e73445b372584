"""A signal asks training to end after the step in hand; a second Ctrl-C ends it at once."""

from __future__ import annotations

import logging
import signal
import threading

log = logging.getLogger(__name__)

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")  # the scheduler's, SLURM's warning before the time is up, the stop button


class Interrupt:
    """Within ``with Interrupt() as it``, ``it.asked`` becomes True on a signal; the handlers of before come back at the end.

    In a thread other than the main one nothing is installed: only the main thread may.
    """

    def __init__(self):
        self.asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                if hasattr(signal, name):
                    number = getattr(signal, name)
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        log.warning("%s: stopping after the step in hand, with a checkpoint", signal.Signals(number).name)
