"""Stopping on request: Ctrl-C, a scheduler that takes the machine back, a container that is shut down.

A signal only sets a flag. The loop finishes its step or update, the run is saved, and then the handlers that were
installed before are called: submitit requeues its SLURM job that way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from sheeplike import terminal

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it; the run is saved
PREEMPTED = 75  # exit status after another signal, EX_TEMPFAIL of sysexits.h: saved, the same command resumes
UNSAVED = 74  # exit status if files could not be written, EX_IOERR of sysexits.h
FAILED = 70  # exit status if something in a run failed for good, EX_SOFTWARE of sysexits.h
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SAME_REQUEST = 0.5  # seconds within which the same signal is one request: `timeout` and terminals send it twice

Handler = Callable[[int, FrameType | None], object]
_ENDING = threading.Lock()
LAUNCHER = "SHEEPLIKE_LAUNCHER"  # variable with the number of the process that started this rank


def unblock() -> None:
    """Unblock signals, and stop ignoring children, whose status would be lost: a parent may have set both."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def ignore() -> None:
    """Ignore all signals: the process is about to end."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def end_at_once(signum: int, frame: FrameType | None) -> None:
    """Handle a signal where nothing is to be saved; JAX and others ignore a KeyboardInterrupt in their callbacks."""
    if not _ENDING.acquire(blocking=False):  # the handler and the thread of handle_all_at_once
        return
    _write(f"{signal.Signals(signum).name}: stopped")
    os._exit(INTERRUPTED if signum == signal.SIGINT else PREEMPTED)


def end_with_launcher() -> None:
    """End a rank as soon as the process that started it has ended, for which it would wait in vain."""
    if launcher := os.environ.get(LAUNCHER):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(launcher):  # it has ended before
            os._exit(PREEMPTED)


def handle_all_at_once() -> None:
    """Let each signal end the process at once, unless it is ignored or another program handles it.

    A thread does so where the main thread waits in a library, such as for other ranks, and so runs no handler.
    """
    for signum in SIGNALS:
        if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, end_at_once)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_listen, args=(reader, writer), name="signals", daemon=True).start()


def _listen(reader: socket.socket, writer: socket.socket) -> None:
    """End the process for a signal that would end it at once; ``writer`` stays open."""
    while number := reader.recv(1):
        handler = signal.getsignal(number[0])
        request = getattr(handler, "__self__", None)
        starting = isinstance(request, StopRequest) and not request.ready and request._previous(number[0]) is None
        if starting or handler is end_at_once:
            end_at_once(number[0], None)


class AskedToExit(SystemExit):
    """Exit that the handler of another program asks for, with its own status, after everything is saved."""


class StopRequest:
    """The signals that asked this process to stop; calling it returns True once there is one. See :func:`stoppable`.

    Attributes:
        ready: there is something to save; until then a signal ends the process at once.
        settled: everything is saved; until the end of :func:`stoppable` no further signal ends the process.
    """

    def __init__(self, *, ready: bool = False) -> None:
        self.signals: list[int] = []
        self.ready, self.settled = ready, False
        self._before: dict[int, object] = {}
        self._last = 0.0
        self._adopted = False  # the signal came to another rank, and may still come here

    def __call__(self) -> bool:
        return bool(self.signals)

    def adopt(self, signum: int) -> None:
        """Take over the signal of another rank; the first that comes here is the same request."""
        if not self.signals:
            self.signals.append(signum)
            self._adopted = True
            _write(f"{signal.Signals(signum).name} to another rank: saving")

    @property
    def status(self) -> int:
        """The exit status for the first signal."""
        return INTERRUPTED if self.signals[:1] == [signal.SIGINT] else PREEMPTED

    def call_previous_handlers(self) -> None:
        """Call the handlers of other programs for the signals that came; only after everything is saved."""
        for signum in dict.fromkeys(self.signals):
            if handler := self._previous(signum):
                try:
                    handler(signum, None)
                except SystemExit as error:
                    raise AskedToExit(error.code) from None

    def _previous(self, signum: int) -> Handler | None:
        """Return the handler of another program, or None for the system's or Python's own."""
        before = self._before.get(signum)
        return before if callable(before) and before not in (signal.default_int_handler, end_at_once) else None

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        now, again = time.monotonic(), bool(self.signals)
        repeated = self.signals[-1:] == [signum] and now - self._last < SAME_REQUEST
        # SIGHUP never counts as the second, killing signal: closing a session sends it after Ctrl-C or SIGTERM.
        repeated |= again and (signum == signal.SIGHUP or self._adopted)
        self._adopted = False
        self._last = now
        name = signal.Signals(signum).name
        if not self.ready and self._previous(signum) is None:
            end_at_once(signum, frame)  # the worlds and the agent are being built
            return
        if again and not repeated and not self.settled and self._previous(signum) is None:
            _write(f"{name}: ended at once, as of the last checkpoint")
            os._exit(128 + signum)
        if not repeated:
            self.signals.append(signum)
        if not again:
            _write(f"{name}: saving; once more stops at once, unsaved")


@contextmanager
def stoppable(*, ready: bool = False) -> Iterator[StopRequest]:
    """Let each of ``SIGNALS`` ask for an orderly stop, once the request is ``ready``; a second one ends the process.

    A signal with a handler of another program never ends the process here; that handler is called after all is saved.
    An ignored signal stays ignored. Outside the main thread Python handles no signals, and nothing changes.
    """
    request = StopRequest(ready=ready)
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
            # A handler in C is None here, and Python cannot restore it.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def _write(text: str) -> None:
    """Write a line from a signal handler, which may have interrupted a print: past the stream and its lock."""
    if terminal.rank:
        return
    with suppress(OSError, ValueError, AttributeError):  # no stdout, no reader, or a full disk
        os.write(sys.stdout.fileno(), f"\n{text}\n".encode())
