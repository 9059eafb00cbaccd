"""Output of all commands, in lines and without control characters that a terminal would obey."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

LONGEST = 10_000  # characters of a line of untrusted text
rank = 0  # of this process, in a run on several devices: only rank 0 writes to standard output
_CLEAR, _COLOUR = "\r\x1b[2K", re.compile(r"\x1b\[[0-9;]*m")
# Control characters except tab and line feed, direction marks, and lone surrogates.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def text_of(value: object) -> str:
    """Return ``str(value)``, or the type's name if that raises, as exceptions of other packages may."""
    try:
        return str(value)
    except Exception:
        return f"{type(value).__name__} without a text"


def reason_of(error: Exception) -> str:
    """Return the text of an error; of an OSError its file and reason, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'}: {error.strerror}"
    return text_of(error)


def one_line(text: object) -> str:
    """Return the first ten thousand characters of a text as one :func:`visible` line."""
    return visible(" ".join(text_of(text)[:LONGEST].split()))


def first_sentence(text: object) -> str:
    """Return the first sentence of a library's message, at most 200 characters; the rest is usually advice."""
    return re.split(r"(?<=[.!?]) ", one_line(text), maxsplit=1)[0][:200]


def visible(text: str) -> str:
    r"""Escape control characters, as ``\x1b``, but not line breaks.

    Lone surrogates, which cannot be encoded, and direction marks, which let one name pass for another, are escaped too.
    """
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def echo(*lines: object) -> None:
    """Print the result of a command; OSError if it cannot be written, but not if its reader has gone away."""
    try:
        write("\n".join(map(str, lines)) + "\n")
    except OSError as error:
        error.filename = "standard output"
        raise


def info(*lines: object, file: TextIO | None = None) -> None:
    """Print lines about the progress of a command; a failure to write them is ignored."""
    with suppress(OSError):
        write("\n".join(map(str, lines)) + "\n", file)


def warn(text: str) -> None:
    """Print a warning or an error to stderr, as one line."""
    who = f"sheeplike, rank {rank}" if rank else "sheeplike"
    info(f"{who}: {one_line(text)}", file=sys.stderr)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show each of Python's warnings as one line, without its place in the code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: info(
            one_line(_COLOUR.sub("", text_of(message))), file=sys.stderr
        )
        yield


def is_terminal(file: TextIO | None = None) -> bool:
    """Return True if the file, standard output by default, is a terminal."""
    try:
        return (file or sys.stdout).isatty()
    except (AttributeError, ValueError):  # the file is None or closed
        return False


def write(text: str, file: TextIO | None = None, *, in_place: bool = False) -> None:
    """Write and flush, to standard output by default; characters that the encoding lacks are replaced.

    Args:
        in_place: replace the terminal's last line.

    Raises:
        OSError: the text cannot be written. A closed pipe is no error.
    """
    file = file or (None if rank else sys.stdout)
    if file is None:  # another rank writes, or standard output is closed, as under pythonw
        return
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        file.write((_CLEAR if in_place else "") + visible(text).encode(encoding, "replace").decode(encoding))
        file.flush()
    except BrokenPipeError:
        # Python would flush again at its exit, fail, and replace the exit status.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, file.fileno())
            os.close(nowhere)
    except ValueError:  # the file is closed
        pass
