"""Directories of compiled kernels, which take minutes to build on a new machine.

Warp, XLA and Inductor keep them in ``~/.cache/sheeplike`` (or below ``XDG_CACHE_HOME``), in ``SHEEPLIKE_CACHE_DIR``, or
where a library's own variable says. Processes may share them: Warp and Inductor rename whole files into place or lock,
and JAX drops an unreadable entry.

Compiled code is executed, so a directory that another user owns or can write to is not used: code is then kept for this
process alone.

The step of the simulation may be cached although it calls back into Warp: the names and numbers of these calls are part
of JAX's key, and to compute the key a process traces the step, which registers a target for each call.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import sys
import tempfile
import zlib
from pathlib import Path

from sheeplike.terminal import warn

# Warp tells processors apart by itself; for the others each processor has its own directory.
VARIABLES = ("WARP_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR")
_ROOT, _UNMAPPED = 0, 65534  # in a container, directories of the host's users belong to the latter


def persist() -> None:
    """Set the variables of the caches that are not set, and make their directory, unless it cannot be written."""
    settings: dict[str, str | float] = {}
    processor = _processor()
    if any(name not in os.environ for name in VARIABLES[: 3 if processor else 1]):
        root = _root()
        if root is None:
            return
        settings["WARP_CACHE_PATH"] = os.path.join(root, "warp")
        if processor:
            settings["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(root, "inductor", processor)
            settings["JAX_COMPILATION_CACHE_DIR"] = os.path.join(root, "jax", processor)
    if processor:
        # JAX would not keep what compiles within a second, as the start of a simulation does.
        settings["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = 0.1
    late = "jax" in sys.modules
    for name, value in settings.items():
        if name not in os.environ:
            os.environ[name] = str(value)
            if late and name.startswith("JAX_"):  # JAX has read its variables
                sys.modules["jax"].config.update(name.lower(), value)


def directory() -> str:
    """Return the directory of all caches."""
    root = os.environ.get("SHEEPLIKE_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "sheeplike"
    )
    return os.path.realpath(root)  # a link may lead elsewhere by the time that the libraries follow it


def _root() -> str | None:
    """Make :func:`directory`, or one for this process alone; None if it cannot be written."""
    root = directory()
    try:
        # In a place such as /tmp another user could make it before the libraries do.
        os.makedirs(root, mode=0o700, exist_ok=True)
    except OSError:
        return None
    if not os.access(root, os.W_OK | os.X_OK):
        return None
    if found := danger(root):
        warn(
            f"compiled code is not kept: {found}, and code is run from there; nearest: "
            "SHEEPLIKE_CACHE_DIR=<a directory of your own, chmod 700>"
        )
        root = tempfile.mkdtemp(prefix="sheeplike-")
        atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def danger(root: str) -> str:
    """Return why another user could change or replace what lies in ``root``; empty if none could."""
    mine = os.geteuid()
    # In a directory that no other user can enter, such as umask 0 makes, only its owner can write.
    closed = os.path.isdir(root) and not os.stat(root).st_mode & (stat.S_IXGRP | stat.S_IXOTH)
    inner = [Path(root, name) for name in ("warp", "inductor", "jax")]
    own = [Path(root), *inner]
    for path in filter(os.path.lexists, [*own, *Path(root).parents]):
        about = path.lstat()
        trusted = {mine, _ROOT} if path in own else {mine, _ROOT, _UNMAPPED}
        if stat.S_ISLNK(about.st_mode) or about.st_uid not in trusted:
            return f"{path} belongs to user {about.st_uid}, and this is user {mine}"
        # In a directory with the sticky bit, such as /tmp, users cannot rename what belongs to others.
        if closed and path in inner:
            continue
        if (others := _writers(about)) and (path in own or not about.st_mode & stat.S_ISVTX):
            return f"{path} can be written by {others}"
    return ""


def _writers(about: os.stat_result) -> str:
    """Return who may write besides the owner; a private group, whose only member is the owner, does not count."""
    if about.st_mode & stat.S_IWOTH:
        return "every user"
    if about.st_mode & stat.S_IWGRP and about.st_gid != _ROOT:
        import grp
        import pwd

        try:
            group, owner = grp.getgrgid(about.st_gid), pwd.getpwuid(about.st_uid)
        except KeyError:
            return f"group {about.st_gid}"
        if group.gr_name != owner.pw_name or set(group.gr_mem) - {owner.pw_name}:
            return f"group {group.gr_name}"
    return ""


def _processor() -> str:
    # In a home directory shared by machines, XLA would load code with instructions that this processor lacks.
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            features = next(line for line in file if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return ""
    return f"{zlib.crc32(features.encode()):08x}"
