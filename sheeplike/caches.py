"""Where compiled code is kept, so that the second start is a fast one.

Warp's, XLA's and Inductor's kernels take minutes to build on a new machine. They are kept in ``~/.cache/sheeplike``
(``XDG_CACHE_HOME`` is respected), or wherever ``SHEEPLIKE_CACHE_DIR`` says; whoever has set a library's own variable
keeps that place. Many processes may share them: Warp and Inductor rename whole files into place, or write a precompiled
header under a lock, and JAX drops an entry that it cannot read, with a warning, and compiles.

Whoever can write there can have code run here. A place that belongs to somebody else, or that others can write to, is
therefore not used: what is compiled is then kept for this process alone.

JAX's cache may be used although the step of the simulation calls back into Warp: the names and numbers of those calls
are part of an entry's key, and whoever has the key has traced the step, and so registered a target for each of them.
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

# Warp tells processors apart by itself; the other two need a name for this one.
VARIABLES = ("WARP_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR")
_ROOT, _UNMAPPED = 0, 65534  # the latter: whoever owns the host's directories, as a container sees it


def persist() -> None:
    """Name the caches by environment variables, unless they are set, and make the directory that holds them.

    Does nothing where it cannot be written: each library then has its own way.
    """
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
        # What starts a simulation compiles in less than the second below which JAX would not keep it.
        settings["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = 0.1
    late = "jax" in sys.modules
    for name, value in settings.items():
        if name not in os.environ:
            os.environ[name] = str(value)
            if late and name.startswith("JAX_"):  # JAX has read its variables
                sys.modules["jax"].config.update(name.lower(), value)


def directory() -> str:
    """The directory of all caches."""
    root = os.environ.get("SHEEPLIKE_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "sheeplike"
    )
    return os.path.realpath(root)  # a link may lead elsewhere by the time that the libraries follow it


def _root() -> str | None:
    """:func:`directory`, which is made, or one for this process alone; None where it cannot be written."""
    root = directory()
    try:
        # Made at once: in a place such as /tmp, somebody else could make it before the libraries do.
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
        return _temporary()
    return root


def danger(root: str) -> str:
    """Who else could change what lies in ``root``, or put something else in its place; empty where nobody could."""
    if not hasattr(os, "geteuid"):  # Windows has other rules
        return ""
    mine = os.geteuid()
    own = [Path(root), *(Path(root, name) for name in ("warp", "inductor", "jax"))]
    for path in filter(os.path.lexists, [*own, *Path(root).parents]):
        about = path.lstat()
        trusted = {mine, _ROOT} if path in own else {mine, _ROOT, _UNMAPPED}
        if stat.S_ISLNK(about.st_mode) or about.st_uid not in trusted:
            return f"{path} belongs to user {about.st_uid}, and this is user {mine}"
        # In a directory such as /tmp, whose sticky bit is set, nobody can rename what belongs to another.
        if (others := _writers(about)) and (path in own or not about.st_mode & stat.S_ISVTX):
            return f"{path} can be written by {others}"
    return ""


def _writers(about: os.stat_result) -> str:
    """Who may write beside the owner; a group that is the owner's alone, as many systems have, does not count."""
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


def _temporary() -> str:
    """A directory that nobody else can enter, for as long as this process lives."""
    root, process = tempfile.mkdtemp(prefix="sheeplike-"), os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # and not in a fork of it
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return root


def _processor() -> str:
    """A name for what this processor can execute; empty where that cannot be told.

    In a home directory that several machines share, XLA would load what was compiled for another one's instructions,
    and crash.
    """
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            features = next(line for line in file if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return ""
    return f"{zlib.crc32(features.encode()):08x}"
