"""Files that somebody else may have put there: opened without being led or kept anywhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

_FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")  # as far as the system has them


def open_regular(path: Path | str) -> BinaryIO:
    """Open a file for reading that must be one itself: a link could lead anywhere, a pipe keep us waiting for ever.

    Raises:
        OSError: it cannot be opened, or is none.
    """
    if os.path.islink(path):
        raise OSError(0, "is a link, which is not followed", str(path))
    descriptor = os.open(path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in _FLAGS))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is no regular file", str(path))
    return open(descriptor, "rb")


def read_text(path: Path | str, limit: int) -> str:
    """The text of a file of :func:`open_regular`.

    Raises:
        OSError: likewise, or it has more than ``limit`` bytes.
        UnicodeDecodeError: it is no text.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(0, f"has more than {limit:,} bytes", str(path))
    return content.decode()


def sync_directory(path: Path | str) -> None:
    """A new name or a rename survives a power cut only once its directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
