"""Where compiled code is kept, so that the second start is a fast one.

Warp's kernels, XLA's executables and Inductor's kernels take minutes to build on a new machine. They are kept in
``~/.cache/sheeplike`` (``XDG_CACHE_HOME`` is respected), or wherever ``SHEEPLIKE_CACHE_DIR`` says; whoever has set a
library's own variable keeps that place. Many processes may share them: Warp and Inductor rename whole files into place,
and JAX drops an entry that it cannot read, with a warning, and compiles.

JAX's cache may be used although the step of the simulation calls back into Warp. The compiled step holds nothing of a
process but the names and numbers of those calls, which are part of the entry's key, and the process has registered a
target for each of them by the time that it has the key: it traced the step.
"""

from __future__ import annotations

import os
import sys
import zlib


def persist() -> None:
    """Name the caches by environment variables, unless they are set; the libraries make the directories.

    Does nothing where the directory could not be written: each library then has its own way.
    """
    root = os.environ.get("SHEEPLIKE_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "sheeplike"
    )
    root = os.path.abspath(root)
    if not _writable(root):
        return
    settings: dict[str, str | float] = {"WARP_CACHE_PATH": os.path.join(root, "warp")}
    if processor := _processor():
        settings["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(root, "inductor", processor)
        settings["JAX_COMPILATION_CACHE_DIR"] = os.path.join(root, "jax", processor)
        # What starts a simulation compiles in less than the second below which JAX would not keep it.
        settings["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = 0.1
    late = "jax" in sys.modules
    for name, value in settings.items():
        if name in os.environ:
            continue
        os.environ[name] = str(value)
        if late and name.startswith("JAX_"):  # which has read its variables
            sys.modules["jax"].config.update(name.lower(), value)


def _writable(path: str) -> bool:
    """Whether ``path`` could be written, or made."""
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _processor() -> str:
    """A name for what this processor can execute; empty where that cannot be told.

    In a home directory that several machines share, XLA would load what was compiled for another one's instructions,
    and crash. Warp tells processors apart by itself.
    """
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            features = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""
    return f"{zlib.crc32(features.encode()):08x}" if features else ""
