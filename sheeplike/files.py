"""Safe file access: no links or pipes, locks, atomic writes."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows has no such locks: there, two processes are not kept apart
    fcntl = None

CHECKPOINT = re.compile(r"(?:\.old-)?step_(\d{12,})")  # the directory of one; of a replaced one until the new is there
REPLAY = "replay"  # beside the directory of checkpoints: files of steps, which checkpoints share
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


def lock(descriptor: int) -> bool:
    """Lock an open file or directory until it is closed, or the process ends in whatever way.

    Returns:
        Whether it is locked: False where the file system, or the whole system, knows no locks.

    Raises:
        BlockingIOError: somebody else has it.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # ENOSYS, EOPNOTSUPP, ENOLCK, …, as network file systems differ: no reason not to run there
        return False
    return True


def write_atomically(path: Path | str, data: bytes | str) -> None:
    """Write a file that is whole or absent, whatever ends the process or the power: beside its place, then renamed.

    Raises:
        OSError: it cannot be written; what was there before is untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # of an attempt that was killed; opened as it is, it could be a link
        with open(temporary, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path | str) -> None:
    """What was created or renamed in a directory survives a power cut only once the directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory and what is missing above it, so that it survives a power cut."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in reversed(missing):
        with contextlib.suppress(OSError):  # a directory that may be written need not be readable
            sync_directory(place.parent)
