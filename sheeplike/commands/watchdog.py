"""Says where a run hangs: the stacks of all threads, once nothing has happened for too long."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

# The stacks come through a pipe, since faulthandler writes to one place only; the file is made when there is something
# to write. The shell ends with the pipe: when the watchdog is closed, or the process is gone in whatever way.
_COPY = 'while IFS= read -r line; do printf "%s\\n" "$line" >&2; printf "%s\\n" "$line" >>"$1"; done'


class Watchdog:
    """Prints the stacks of all threads whenever :meth:`beat` has not been called for ``seconds``, while that lasts.

    They go to stderr and to the end of a file. It works while the main thread holds the interpreter's lock inside a
    library, where no Python thread could say anything: faulthandler's own thread needs no lock. That one exists once in
    a process, so only one watchdog can be awake.

    Args:
        seconds: without a beat; None: never.
        path: of the file; its directory must exist by the time that something hangs.
    """

    def __init__(self, seconds: float | None, path: Path | str) -> None:
        self.seconds = seconds
        self.pauses = 0
        self.pipe: BinaryIO | None = None
        self.copier: subprocess.Popen[bytes] | None = None
        if seconds is None:
            return
        # Each arming starts a thread, so most beats arm nothing; the time allowed is as much longer.
        self.interval = min(1.0, seconds / 4)
        try:
            # In a session of its own, so that Ctrl-C does not end it before the run.
            self.copier = subprocess.Popen(
                ["/bin/sh", "-c", _COPY, "watchdog", os.path.abspath(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            self.pipe = self.copier.stdin
        except OSError:  # no shell: the file has to do
            self.pipe = open(path, "ab")  # noqa: SIM115, closed by close()
        self._arm()

    def beat(self) -> None:
        """Say that the run goes on."""
        if self.pipe is not None and not self.pauses and time.monotonic() - self.armed >= self.interval:
            self._arm()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is expected to happen inside: for what may take long, such as compiling."""
        self.pauses += 1
        if self.pipe is not None:
            faulthandler.cancel_dump_traceback_later()
        try:
            yield
        finally:
            self.pauses -= 1
            if self.pipe is not None and not self.pauses:
                self._arm()

    def close(self) -> None:
        """Stop watching; what was written is complete when this returns."""
        if self.pipe is None:
            return
        faulthandler.cancel_dump_traceback_later()
        pipe, self.pipe = self.pipe, None
        pipe.close()
        if self.copier is not None:
            try:
                self.copier.wait(5)
            except subprocess.TimeoutExpired:  # stderr or the disk is stuck, which is no reason to wait for them
                self.copier.kill()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _arm(self) -> None:
        self.armed = time.monotonic()
        faulthandler.dump_traceback_later(self.seconds + self.interval, repeat=True, file=self.pipe)
