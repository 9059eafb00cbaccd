"""Provenance of a run: command line, commit and versions of each start."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sheeplike
from sheeplike.checkpoint import versions
from sheeplike.files import open_regular
from sheeplike.run.layout import STARTS


def record(run_dir: Path) -> dict[str, Any]:
    """Add a line to ``starts.jsonl``; returns its content."""
    package = Path(sheeplike.__file__).parents[1]
    # A package installed inside the repository of another project is no part of it.
    places = {"sheeplike": package} if (package / ".git").exists() else {}
    places |= {"working directory": Path.cwd()}
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "commit": {name: found for name, place in places.items() if (found := commit(place))},
        "versions": versions(),
    }
    with open_regular(run_dir / STARTS, "ab") as file:
        file.write(json.dumps(start).encode() + b"\n")
    return start


def commit(place: Path) -> str | None:
    """Return the commit of a directory, with ``-dirty`` if files differ; None outside repositories."""
    # A repository could name any program as its file system monitor, and git would run it.
    git = ["git", "-c", "core.fsmonitor=false", "-C", str(place)]
    asked = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run([*git, *asked], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # git is missing, or fails
        return None
