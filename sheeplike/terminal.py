"""Every text that a command shows: in lines, and without characters that a terminal would obey, whoever wrote it."""

from __future__ import annotations

import os
import re
import select
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

LONGEST = 10_000  # characters of a line that somebody else may have made
PATIENCE = 0.5  # seconds that a reader has once the process was asked to stop
_CLEAR = "\r\x1b[2K"
_waits = True  # for readers; see stop_waiting
# Control characters but for tabs and line breaks, marks of direction, and halves of characters.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def text_of(value: object) -> str:
    """``str(value)``, also of an exception of somebody else's whose own text raises one."""
    try:
        return str(value)
    except Exception:
        return f"{type(value).__name__} without a text"


def one_line(text: object) -> str:
    """The first ten thousand characters of a text of whatever origin, as one line and :func:`visible`."""
    return visible(" ".join(text_of(text)[:LONGEST].split()))


def first_sentence(text: object) -> str:
    """That of a library's message, 200 characters at most: what follows is advice, or a list of all that it can do."""
    return re.split(r"(?<=[.!?]) ", one_line(text), maxsplit=1)[0][:200]


def visible(text: str) -> str:
    """Text in which control characters, line breaks apart, are shown as escapes such as ``\\x1b``.

    So are lone surrogates, which no file takes, and marks that change the direction of writing, with which one name can
    pass for another.
    """
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def echo(*lines: object) -> None:
    """Print lines that somebody has asked for; a reader that has gone away had enough.

    Raises:
        OSError: they cannot be written, as on a full disk.
    """
    try:
        write("\n".join(map(str, lines)) + "\n")
    except OSError as error:
        error.filename = "standard output"
        raise


def info(*lines: object, file: TextIO | None = None) -> None:
    """Print lines that nobody has to read: that they cannot be written does not end the run."""
    with suppress(OSError):
        write("\n".join(map(str, lines)) + "\n", file)


def warn(text: str) -> None:
    """Print a line to stderr that says what a user should know, and need not stop for."""
    info(f"sheeplike: {one_line(text)}", file=sys.stderr)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show Python's warnings in a line each, without the place in the code that they come from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: info(one_line(message), file=sys.stderr)
        yield


def is_terminal(file: TextIO | None = None) -> bool:
    """Whether somebody watches the file, standard output by default."""
    try:
        return (file or sys.stdout).isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def write(text: str, file: TextIO | None = None, *, in_place: bool = False) -> None:
    """Write and flush, to standard output by default; an encoding without ``…`` will do.

    Args:
        in_place: over what stands in the terminal's last line.

    Raises:
        OSError: it cannot be written, for another reason than that nobody reads on.
    """
    file = file or sys.stdout
    if file is None or not _is_read(file):  # None: as under pythonw, or with standard output closed
        return
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        file.write(_CLEAR * in_place + visible(text).encode(encoding, "replace").decode(encoding))
        file.flush()
    except BrokenPipeError:
        # Or Python would try again when it exits, fail, and end with a status of its own.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, file.fileno())
            os.close(nowhere)
    except ValueError:  # it is closed
        pass


def stop_waiting() -> None:
    """From now on lose what a reader does not take within half a second.

    A full pipe that nobody reads must not hold up a process that was asked to stop.
    """
    global _waits
    _waits = False


def tell_at_once(text: str) -> None:
    """Write a line to standard output, if that can take it: for a signal's handler, which may interrupt a print."""
    with suppress(OSError, ValueError, AttributeError):  # there is none, nobody reads it, or the disk is full
        if _takes(sys.stdout, 0.0):
            os.write(sys.stdout.fileno(), f"\n{text}\n".encode())


def _is_read(file: TextIO) -> bool:
    """Wait until a line can be written without waiting; False where nobody reads it and the process shall stop.

    Waiting in the write itself would hold the stream's lock, and only a signal in the main thread would end it.
    """
    while not (taken := _takes(file, PATIENCE)) and _waits:
        pass
    return taken


def _takes(file: TextIO, seconds: float) -> bool:
    try:
        return bool(select.select([], [file.fileno()], [], seconds)[1])
    except (OSError, ValueError, AttributeError):  # no descriptor, or of a kind that this system cannot ask
        return True
