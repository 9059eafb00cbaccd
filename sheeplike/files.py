"""Files in directories that may come from strangers: links, pipes and devices are refused, writes are all or nothing.

Commands read and write the directories of runs with these functions only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import yaml

CHECKPOINT = re.compile(r"(?:\.old-)?step_[0-9]{12,}")  # ".old-" marks one that is being replaced
EVENTS = "events.out.tfevents."  # prefix of TensorBoard's files
REPLAY = "replay"  # directory of steps that checkpoints share, beside theirs
YAML_BYTES, YAML_DEPTH = 2**16, 20  # limits; a configuration has about 3,000 bytes and four levels
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MODES = {"rb": os.O_RDONLY, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT}


def open_regular(path: Path | str, mode: str = "rb") -> BinaryIO:
    """Open a regular file; OSError for anything else: a link can lead anywhere, a pipe can block for ever.

    Mode ``"ab"`` is unbuffered, creates a missing file and refuses one with several hard links.
    """
    if problem := why_not_regular(path):
        raise OSError(0, problem, str(path))
    descriptor = os.open(path, _MODES[mode] | _FLAGS, 0o666)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        problem = "is no regular file"
    elif mode == "ab" and found.st_nlink > 1:
        problem = "has another name elsewhere, a hard link: put a copy in its place"
    else:
        return open(descriptor, mode, buffering=0 if mode == "ab" else -1)
    os.close(descriptor)
    raise OSError(0, problem, str(path))


def read_text(path: Path | str, limit: int) -> str:
    """Read a regular text file; OSError if it has more than ``limit`` bytes."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(0, f"has more than {limit:,} bytes", str(path))
    return content.decode()


def read_yaml(path: Path | str) -> Any:
    """Apply :func:`parse_yaml` to a regular file."""
    return parse_yaml(read_text(path, YAML_BYTES))


def parse_yaml(text: str) -> Any:
    """Parse YAML of plain values; ValueError for tags, references, interpolations and what exceeds the limits."""
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
    except (yaml.YAMLError, OverflowError) as error:  # numbers may be larger than a float
        raise ValueError(str(error)) from None


class _Loader(yaml.SafeLoader):
    """Loader of plain values; integers of more than 64 bits would take long, and cannot be printed."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > 70 or (value := super().construct_yaml_int(node)).bit_length() > 64:
            raise ValueError(f"line {node.start_mark.line + 1} holds an integer of more than 64 bits")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def list_checkpoints(root: Path | str) -> list[Path]:
    """List the directories of checkpoints under ``root``, oldest first, without verifying them.

    OSError if a directory cannot be listed: it may hold some.
    """
    found: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in sorted(os.listdir(root), reverse=True):  # ".old-…" comes last, and counts if nothing replaced it
            if CHECKPOINT.fullmatch(name) and (path := Path(root, name)).is_dir():
                found.setdefault(step_of(path), path)
    return [found[step] for step in sorted(found)]


def step_of(checkpoint: Path) -> int:
    """Return the policy steps in the name of a checkpoint's directory."""
    return int(checkpoint.name.rpartition("_")[2])


def find_unusual(root: Path | str, below: str = "") -> str | None:
    """Find a path in ``root/below`` that is neither a file nor a directory, nor a link to one within ``root``."""
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
    problem = None if os.path.isdir(path) else why_not_regular(path)
    return f"{path} {problem}" if problem else None


def why_not_regular(path: Path | str) -> str | None:
    """Return why ``path`` is no regular file; None if it is one, or if nothing is there."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    if stat.S_ISLNK(mode):
        return "is a link, which is not followed"
    return None if stat.S_ISREG(mode) else "is no regular file"


def lock(descriptor: int) -> bool:
    """Lock an open file or directory until it is closed or the process ends; False if the file system has no locks.

    Raises:
        BlockingIOError: another process has the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # ENOSYS, EOPNOTSUPP, ENOLCK, …: network file systems differ
        return False
    return True


def write_atomically(path: Path | str, data: bytes | str) -> None:
    """Write a file that is whole or absent after a kill or a power cut: under a temporary name, then renamed.

    Raises:
        OSError: the file cannot be written; or the path is no regular file, which is left as it is; or the directory
            cannot be flushed, so that the new file may not survive a power cut.
    """
    path = Path(path)
    if problem := why_not_regular(path):
        raise OSError(0, problem, str(path))
    temporary = path.with_name(_temporary(path.name))
    try:
        temporary.unlink(missing_ok=True)  # a killed attempt may have left it; it could also be a link
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


def _temporary(name: str) -> str:
    return f".{name}.{os.getpid()}"


def sync_directory(path: Path | str) -> None:
    """Flush a directory to the disk, so that files created or renamed in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, so that they survive a power cut."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in reversed(missing):
        with contextlib.suppress(OSError):  # a writable directory may be unreadable
            sync_directory(place.parent)


def check_writable(directory: Path, *names: str) -> None:
    """Check that files can be made in a directory, or in its nearest existing parent; OSError names the obstacle.

    A file is written, since some file systems refuse files that the permissions allow. None of ``names`` in the
    directory may be a link, a pipe or the like.
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
    for name in (*directory.parts, *map(_temporary, names)):
        _is_there(above / name)  # it may be too long
    for name in names:
        if problem := why_not_regular(directory / name):
            raise OSError(0, problem, str(directory / name))


def _is_there(path: Path) -> bool:
    """Return True if the path exists, even as a broken link; OSError if the name is not valid."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
