"""Stopping on request: Ctrl-C, a scheduler that takes the machine back, a container that is shut down.

A signal only leaves a note. The loop finishes its step or its update, the run is saved by ordinary code, and then
whoever listened to the signal before is told: submitit, for one, puts its job back into SLURM's queue that way.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from sheeplike.terminal import stop_waiting, tell_at_once

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it; the run is saved
PREEMPTED = 75  # exit status after another signal, EX_TEMPFAIL of sysexits.h: saved, the same command goes on
UNSAVED = 74  # exit status where files could not be written, EX_IOERR of sysexits.h
FAILED = 70  # exit status where something in a run failed for good, EX_SOFTWARE of sysexits.h
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
HANG_UP = getattr(
    signal, "SIGHUP", None
)  # never a second request: it follows Ctrl-C and SIGTERM where a session is closed
SAME_REQUEST = 0.5  # seconds within which the same signal is one request: `timeout` and terminals send it twice

Handler = Callable[[int, FrameType | None], object]


def receive() -> None:
    """Undo what the process that began this one may have set: signals that are blocked, children that are forgotten."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, the status of a child is lost


def ignore() -> None:
    """Let no signal change the status of a process that is about to end."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


class AskedToExit(SystemExit):
    """A handler of another program ends the process, once everything is saved, with a status of its own."""


class StopRequest:
    """Whether and how this process was asked to stop; see :func:`stoppable`.

    Attributes:
        signals: what came, in order.
        settled: everything is saved; there is nothing left that a signal could ask for.
    """

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.settled = False
        self._before: dict[int, object] = {}
        self._last = 0.0

    def __call__(self) -> bool:
        return bool(self.signals)

    @property
    def status(self) -> int:
        """The exit status that tells what happened."""
        return INTERRUPTED if self.signals[:1] == [signal.SIGINT] else PREEMPTED

    def tell_others(self) -> None:
        """Call the handlers that had been there for the signals that came, now that everything is saved."""
        for signum in dict.fromkeys(self.signals):
            if handler := self._listener(signum):
                try:
                    handler(signum, None)
                except SystemExit as error:
                    raise AskedToExit(error.code) from None

    def _listener(self, signum: int) -> Handler | None:
        """A handler that somebody else had installed, rather than the system's or Python's own."""
        before = self._before.get(signum)
        return before if callable(before) and before is not signal.default_int_handler else None

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        now, again = time.monotonic(), bool(self.signals)
        repeated = self.signals[-1:] == [signum] and now - self._last < SAME_REQUEST
        repeated |= again and signum == HANG_UP
        self._last = now
        stop_waiting()
        name = signal.Signals(signum).name
        if again and not repeated and not self.settled and self._listener(signum) is None:
            tell_at_once(f"{name}: ended at once, as of the last checkpoint")
            os._exit(128 + signum)
        if not repeated:
            self.signals.append(signum)
        if not again:
            tell_at_once(f"{name}: saving; once more stops at once, unsaved")


@contextmanager
def stoppable() -> Iterator[StopRequest]:
    """Within it each of ``SIGNALS`` asks for an orderly stop; a second one ends the process at once.

    A signal that another program has a handler for never ends the process here: that is told when all is saved. One
    that is ignored stays ignored. In a thread other than the main one, where Python takes no signals, nothing changes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    for signum in SIGNALS:
        if (handler := signal.getsignal(signum)) is not signal.SIG_IGN:
            request._before[signum] = handler
            signal.signal(signum, request._ask)
    try:
        yield request
    finally:
        for signum, handler in request._before.items():
            # None: installed by a library in C, which Python cannot give back.
            handler = signal.SIG_DFL if handler is None else handler
            if request() and request.settled and handler == signal.SIG_DFL:
                handler = signal.SIG_IGN  # the process is about to end, and its status shall say that all is saved
            signal.signal(signum, handler)


def _end(status: int, signum: int, frame: FrameType | None) -> None:
    tell_at_once(f"{signal.Signals(signum).name}: stopped during the start; there is nothing to save yet")
    os._exit(status)


@contextmanager
def stops_at_once() -> Iterator[None]:
    """A signal ends the process, with the same status as later: for the start of a run, when nothing is to be saved.

    An exception would not do: one that is raised in a callback of JAX is printed and ignored. Handlers that somebody
    else has installed stay.
    """
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    ours = {s: handler for s, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)}
    for signum in ours:
        status = INTERRUPTED if signum == signal.SIGINT else PREEMPTED
        signal.signal(signum, partial(_end, status))
    try:
        yield
    finally:
        for signum, handler in ours.items():
            signal.signal(signum, handler)
