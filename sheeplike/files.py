"""Reading what others have left, and writing where others may have been: no links, pipes or devices, all or nothing.

A run's directory may come from anybody. Whatever a command reads from one, or writes into one, goes through here.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import yaml

try:
    import fcntl
except ImportError:  # Windows has no such locks: there, two processes are not kept apart
    fcntl = None

CHECKPOINT = re.compile(r"(?:\.old-)?step_[0-9]{12,}")  # the directory of one; of a replaced one until the new is there
EVENTS = "events.out.tfevents."  # as the names of TensorBoard's files begin
REPLAY = "replay"  # beside the directory of checkpoints: files of steps, which checkpoints share
YAML_BYTES, YAML_DEPTH = 2**16, 20  # of a configuration, which takes about three thousand and has four sections deep
_FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY", "O_CLOEXEC")  # as far as the system has them
_MODES = {"rb": os.O_RDONLY, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT}


def open_regular(path: Path | str, mode: str = "rb") -> BinaryIO:
    """Open a file that must be one itself: a link could lead anywhere, a pipe keep us waiting for ever.

    Args:
        mode: ``"rb"``, or ``"ab"``, unbuffered, which creates a file that is not there and refuses one with hard links.

    Raises:
        OSError: it cannot be opened, or is none.
    """
    if problem := unusual(path):
        raise OSError(0, problem, str(path))
    descriptor = os.open(path, _MODES[mode] | sum(getattr(os, flag, 0) for flag in _FLAGS), 0o666)
    found = os.fstat(descriptor)
    regular = stat.S_ISREG(found.st_mode)
    if not regular or (mode == "ab" and found.st_nlink > 1):  # nothing was written yet
        os.close(descriptor)
        problem = (
            "has another name elsewhere, a hard link: put a copy in its place" if regular else "is no regular file"
        )
        raise OSError(0, problem, str(path))
    return open(descriptor, mode, buffering=0 if mode == "ab" else -1)


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


def read_yaml(path: Path | str) -> Any:
    """:func:`parse_yaml` of a file.

    Raises:
        OSError: as of :func:`read_text`.
        ValueError: likewise.
    """
    return parse_yaml(read_text(path, YAML_BYTES))


def parse_yaml(text: str) -> Any:
    """The plain values in YAML: no tags, which make objects; no references, which multiply; nothing large or deep.

    Raises:
        ValueError: it is something else; the error says where.
    """
    if len(text.encode()) > YAML_BYTES:
        raise ValueError(f"has more than {YAML_BYTES:,} bytes")
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                found = f"the reference {event.anchor!r}"
            elif getattr(event, "tag", None):
                found = f"the tag {event.tag!r}"
            elif isinstance(event, yaml.ScalarEvent) and "${" in event.value:
                found = f"the interpolation {event.value!r}"
            elif depth > YAML_DEPTH:
                found = f"more than {YAML_DEPTH} sections in each other"
            else:
                continue
            raise ValueError(
                f"line {event.start_mark.line + 1} holds {found}: expected plain values, as they were saved"
            )
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, OverflowError) as error:  # a number may be larger than a float
        raise ValueError(str(error)) from None


class _Loader(yaml.SafeLoader):
    """Plain values, whose integers have 64 bits at most: longer ones take long, and cannot be printed."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > 70 or (value := super().construct_yaml_int(node)).bit_length() > 64:
            raise ValueError(f"line {node.start_mark.line + 1} holds an integer of more than 64 bits")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def list_checkpoints(root: Path | str) -> list[Path]:
    """Directories of checkpoints under ``root``, oldest first; they are not verified."""
    found: dict[int, Path] = {}
    for path in sorted(Path(root).glob("*"), reverse=True):  # ".old-…" comes last and counts where nothing replaced it
        if CHECKPOINT.fullmatch(path.name) and path.is_dir():
            found.setdefault(step_of(path), path)
    return [found[step] for step in sorted(found)]


def step_of(checkpoint: Path) -> int:
    """The policy steps in the name of a checkpoint's directory."""
    return int(checkpoint.name.rpartition("_")[2])


def find_unusual(root: Path | str, below: str = "") -> str | None:
    """What in ``root/below`` is neither a file nor a directory, nor a link to one within ``root``; None: nothing is."""
    inside, top = os.path.join(os.path.realpath(root), ""), os.path.join(root, below)
    if below and (found := _leads_out(top, inside)):
        return found
    for folder, directories, names in os.walk(top):
        for name in (*directories, *names):
            if found := _leads_out(os.path.join(folder, name), inside):
                return found
    return None


def _leads_out(path: str, inside: str) -> str | None:
    if os.path.islink(path):
        target = os.path.realpath(path)
        if not target.startswith(inside):
            return f"{path} is a link to {target}"
        path = target
    problem = None if os.path.isdir(path) else unusual(path)
    return f"{path} {problem}" if problem else None


def unusual(path: Path | str) -> str | None:
    """Why nothing should be read from or written to ``path``; None where it is a file, or where there is nothing."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    if stat.S_ISLNK(mode):
        return "is a link, which is not followed"
    return None if stat.S_ISREG(mode) else "is no regular file"


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
        OSError: it cannot be written, or what is there is no regular file: then that is untouched. Or the directory
            could not be flushed: then the new file is there, and may not survive a power cut.
    """
    path = Path(path)
    if problem := unusual(path):
        raise OSError(0, problem, str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # of an attempt that was killed; opened as it is, it could be a link
        with open(temporary, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and not error.filename:
            error.filename = str(path)
        raise


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


def check_writable(directory: Path, *names: str) -> None:
    """Find out whether files can be made in a directory, or in the nearest one above it that exists.

    Asking for permission is not enough: some file systems take no files whatever it says.

    Args:
        names: of files that are to be written there with :func:`write_atomically`.

    Raises:
        OSError: they cannot; ``filename`` is what is in the way.
    """
    above = directory.absolute()
    while not _is_there(above):
        above = above.parent
    try:
        with tempfile.TemporaryFile(dir=above) as file:
            file.write(bytes(4096))  # a full disk may still take a name
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror or "cannot be written", str(above)) from None
    for name in names:
        if problem := unusual(directory / name):
            raise OSError(0, problem, str(directory / name))


def _is_there(path: Path) -> bool:
    """Whether there is anything of this name, if only a link that leads nowhere; OSError if it can be no name."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
