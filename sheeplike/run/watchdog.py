"""A watchdog that prints the stacks of all threads when a run hangs."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

PATIENCE = 6


class Watchdog:
    """Prints the stacks of all threads to stderr whenever :meth:`beat` was not called for ``seconds``; None: never.

    faulthandler's thread needs no interpreter lock, so it works while the main thread holds that inside a library.
    A process has one such thread, so only one watchdog can be awake.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds or 0.0
        # Each arming starts a thread, so most beats arm nothing; the time allowed is as much longer.
        self.interval = min(1.0, self.seconds / 4)
        self.file = _stderr() if seconds is not None else None
        self._arm()

    def beat(self) -> None:
        """Say that the run goes on."""
        if time.monotonic() - self.armed >= self.interval:
            self._arm()

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Allow :data:`PATIENCE` times as long, for compiling and the like."""
        self._arm(PATIENCE)
        try:
            yield
        finally:
            self._arm()

    def close(self) -> None:
        """Stop watching."""
        if self.file is not None:
            faulthandler.cancel_dump_traceback_later()
            self.file = None

    def _arm(self, times: int = 1) -> None:
        self.armed = time.monotonic()
        if self.file is not None:
            faulthandler.dump_traceback_later(times * self.seconds + self.interval, repeat=True, file=self.file)


def _stderr() -> TextIO | None:
    """Return the process's own stderr, or None if it has no file descriptor."""
    try:
        sys.__stderr__.fileno()
    except (AttributeError, OSError, ValueError):
        return None
    return sys.__stderr__
