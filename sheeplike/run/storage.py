"""Files of a run in progress: lock, configuration, checkpoints, and the record of each start."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

import sheeplike
from sheeplike import checkpoint
from sheeplike.config.errors import as_command_errors
from sheeplike.config.saved import to_yaml
from sheeplike.config.schema import Config, to_data
from sheeplike.files import list_checkpoints, open_regular, step_of, write_atomically
from sheeplike.options import CommandError
from sheeplike.ranks import ALONE, Ranks
from sheeplike.run import layout, snapshot
from sheeplike.run.build import numerics_device
from sheeplike.run.layout import checkpoint_steps
from sheeplike.run.mirror import STOPPING, Mirror
from sheeplike.run.run_dir import Plan, claim, lock
from sheeplike.terminal import reason_of, warn


class Storage:
    """The directory of one run, locked from :meth:`create` or :meth:`resume` until :meth:`close`.

    The first of several ranks holds the lock.

    Attributes:
        path: the directory; absolute, since an environment may change the working directory.
        writer: writes the checkpoints, or this rank's share of them.
        mirror: copies the checkpoints of all ranks; None if there is none, or another rank does it.
    """

    writer: checkpoint.Writer

    def __init__(self, planned: Plan, ranks: Ranks = ALONE) -> None:
        self.path, self.ranks = planned.run_dir.absolute(), ranks
        self.place = layout.place_of(self.path, ranks.rank)
        url = planned.config.checkpoint.mirror
        self.mirror = Mirror(url, self.path) if url and ranks.first else None
        self._stack = ExitStack()

    def create(self, config: Config) -> None:
        """Create the directory of a new run."""
        self._enter(config, claim)

    def resume(self, config: Config) -> snapshot.Saved:
        """Lock the directory of a run and return its newest whole checkpoint, which may have to be downloaded."""
        self._enter(config, lambda path, config: lock(path), download=True)  # removes what a kill may have left
        saved = snapshot.read(self.path, config, self.ranks)
        self.writer.resumed_from(saved.step)
        return saved

    def _enter(self, config: Config, hold: Callable[[Path, Config], BinaryIO], *, download: bool = False) -> None:
        if self.ranks.first:
            self._lock = self._stack.enter_context(hold(self.path, config))
            if self.mirror and download:
                self.mirror.download()
        self.ranks.wait()
        if not self.ranks.first:
            try:
                self._lock = self._stack.enter_context(open_regular(self.path / layout.LOCK_FILE))
            except OSError:
                raise CommandError(f"run_dir={self.path}: expected a directory that all nodes share") from None
        self._open(config)

    def save(
        self,
        step: int,
        parts: checkpoint.Parts,
        meta: dict[str, Any],
        history: checkpoint.History | None,
        *,
        finite: Collection[str],
        wait: bool,
    ) -> bool:
        """Write a checkpoint as ``checkpoint.Writer`` does; return False if a rank could not write its share.

        With several ranks every save waits: the first writes last, so that there is no checkpoint without a share, and
        the others keep the steps that it keeps.
        """
        ranks = self.ranks
        if ranks.first:
            self._remove_shares()
        if ranks.size == 1:
            self.writer.save(step, parts, meta, history, finite=finite, wait=wait)
            return True
        meta |= {"save": ranks.collect(uuid.uuid4().hex)[0]}
        for turn in (not ranks.first, ranks.first):
            error = None
            if turn:
                try:
                    self.writer.save(step, parts, meta, history, finite=finite, wait=True)
                except (OSError, checkpoint.NonFinite) as problem:
                    error = problem
            # All ranks raise, or go on without this checkpoint.
            nonfinite, failed = ranks.most(isinstance(error, checkpoint.NonFinite), error is not None)
            if nonfinite:
                raise checkpoint.NonFinite(next(filter(None, ranks.collect(str(error or "")))))
            if failed and wait:
                raise error or OSError(0, "was not written by another rank", str(self.path))
            if failed:
                if error:
                    warn(f"{checkpoint.NOT_WRITTEN}: {reason_of(error)}")
                return False
        kept = ranks.collect(checkpoint_steps(self.path))[0]
        for path in list_checkpoints(self.writer.root):
            if step_of(path) not in kept:
                shutil.rmtree(path, ignore_errors=True)
        return True

    def _remove_shares(self) -> None:
        """Remove the shares of ranks that are no more, once no checkpoint needs them."""
        kept = set(checkpoint_steps(self.path))
        for place in (self.path / layout.RANKS).glob("*"):
            gone = place.name.isdecimal() and int(place.name) >= self.ranks.size
            if gone and not kept & set(checkpoint_steps(place)):
                shutil.rmtree(place, ignore_errors=True)

    def update(self, config: Config) -> None:
        """Save the configuration of a resumed run, so that the next resume keeps its changes."""
        with as_command_errors(OSError):
            write_atomically(self.path / layout.CONFIG_FILE, to_yaml(config))

    def record_start(self) -> dict[str, Any]:
        """Add command line, commits and versions as a line to ``starts.jsonl``; returns them."""
        package = Path(sheeplike.__file__).parents[1]
        # A package installed inside the repository of another project is no part of it.
        commits = {"sheeplike": commit(package, dirty=True) if (package / ".git").exists() else None}
        commits["working directory"] = commit(Path.cwd())
        start = {
            "id": uuid.uuid4().hex,  # no other start has the same line, by which a mirror knows its owner
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.orig_argv),
            "commit": {name: found for name, found in commits.items() if found},
            "versions": checkpoint.versions(),
        }
        with open_regular(self.path / layout.STARTS, "ab") as file:
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
        write_atomically(self.place / layout.LAST_BATCH, content.getvalue())
        return self.place / layout.LAST_BATCH

    def _open(self, config: Config) -> None:
        with as_command_errors(OSError):
            self.writer = checkpoint.Writer(
                self.place / layout.CHECKPOINTS,
                keep_last=config.checkpoint.keep_last if self.ranks.first else sys.maxsize,
                keep_best=config.checkpoint.keep_best,
                config=to_data(config),
                device=numerics_device(config),
                check=self._check_owner,
            )
        if self.mirror:
            self.mirror.follow(self.writer)
            self._stack.callback(self.mirror.wait, STOPPING)
        self._stack.callback(self.writer.close)

    def _check_owner(self) -> None:
        """Raise OSError if the lock file in the directory is not the one held."""
        held, there = os.fstat(self._lock.fileno()), None
        with suppress(FileNotFoundError):
            there = (self.path / layout.LOCK_FILE).lstat()
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
