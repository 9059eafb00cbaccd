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

    faulthandler's thread needs no interpreter lock, so it works while a library holds that lock. A process has one such
    thread, so only one watchdog can be active.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds or 0.0
        # Arming starts a thread, so beats within `interval` do nothing; the limit grows by it.
        self.interval = min(1.0, self.seconds / 4)
        self.file = _stderr() if seconds is not None else None
        self._arm()

    def beat(self) -> None:
        """Restart the time limit."""
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
