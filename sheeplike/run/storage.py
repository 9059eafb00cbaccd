"""Files of a run in progress: lock, configuration, checkpoints, and the record of each start."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sheeplike
from sheeplike import checkpoint
from sheeplike.config.errors import as_command_errors
from sheeplike.config.saved import to_yaml
from sheeplike.config.schema import Config, to_data
from sheeplike.files import open_regular, write_atomically
from sheeplike.run import snapshot
from sheeplike.run.build import numerics_device
from sheeplike.run.layout import CHECKPOINTS, CONFIG_FILE, LAST_BATCH, LOCK_FILE, STARTS, checkpoint_steps
from sheeplike.run.run_dir import Plan, claim, lock
from sheeplike.terminal import warn


class Storage:
    """The directory of one run, locked from :meth:`create` or :meth:`resume` until :meth:`close`.

    Attributes:
        path: the directory; absolute, since an environment may change the working directory.
        writer: writes the checkpoints.
    """

    writer: checkpoint.Writer

    def __init__(self, planned: Plan) -> None:
        self.path = planned.run_dir.absolute()
        self._stack = ExitStack()

    def create(self, config: Config) -> None:
        """Create the directory of a new run."""
        self._lock = self._stack.enter_context(claim(self.path, config))
        self._open(config)

    def resume(self, config: Config) -> snapshot.Saved:
        """Lock the directory of a run and return its newest whole checkpoint."""
        self._lock = self._stack.enter_context(lock(self.path))
        self._open(config)  # removes what a kill may have left
        saved = snapshot.read(self.path, config)
        self.writer.resumed_from(saved.step)
        return saved

    def update(self, config: Config) -> None:
        """Save the configuration of a resumed run, so that the next resume keeps its changes."""
        with as_command_errors(OSError):
            write_atomically(self.path / CONFIG_FILE, to_yaml(config))

    def record_start(self) -> dict[str, Any]:
        """Add command line, commits and versions as a line to ``starts.jsonl``; returns them."""
        package = Path(sheeplike.__file__).parents[1]
        # A package installed inside the repository of another project is no part of it.
        commits = {"sheeplike": commit(package, dirty=True) if (package / ".git").exists() else None}
        commits["working directory"] = commit(Path.cwd())
        start = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.orig_argv),
            "commit": {name: found for name, found in commits.items() if found},
            "versions": checkpoint.versions(),
        }
        with open_regular(self.path / STARTS, "ab") as file:
            file.write(json.dumps(start).encode() + b"\n")
        return start

    def newest_step(self) -> int | None:
        """Return the policy step of the newest checkpoint, once it is written; None in a directory of another run."""
        with suppress(OSError):  # an older one is the newest then
            self.writer.wait()
        try:
            self._check_owner()
        except OSError:
            return None
        return max(checkpoint_steps(self.path), default=None)

    def save_batch(self, batch: dict[str, Tensor]) -> Path:
        """Write the batch of an update that was not finite; returns its file."""
        self._check_owner()
        content = io.BytesIO()
        torch.save({name: value.cpu() for name, value in batch.items()}, content)
        write_atomically(self.path / LAST_BATCH, content.getvalue())
        return self.path / LAST_BATCH

    def _open(self, config: Config) -> None:
        with as_command_errors(OSError):
            self.writer = checkpoint.Writer(
                self.path / CHECKPOINTS,
                keep_last=config.checkpoint.keep_last,
                keep_best=config.checkpoint.keep_best,
                config=to_data(config),
                device=numerics_device(config),
                report=warn,
                check=self._check_owner,
            )
        self._stack.callback(self.writer.close)

    def _check_owner(self) -> None:
        """Raise OSError if the lock file in the directory is not the one held."""
        held, there = os.fstat(self._lock.fileno()), None
        with suppress(FileNotFoundError):
            there = (self.path / LOCK_FILE).lstat()
        if there is None or not os.path.samestat(held, there):
            raise OSError(0, "was removed, moved or taken by another run", str(self.path))

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and unlock the directory."""
        self._stack.close()


def commit(place: Path, *, dirty: bool = False) -> str | None:
    """Return the commit of the repository around a directory; None outside of one.

    Args:
        dirty: add ``-dirty`` if files differ; git then runs filters and hooks that the repository names.
    """
    asked = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"] if dirty else ["rev-parse", "HEAD"]
    git = ["git", "-c", "core.fsmonitor=false", "-C", str(place)]
    try:
        return subprocess.run([*git, *asked], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # git is missing, or fails
        return None
