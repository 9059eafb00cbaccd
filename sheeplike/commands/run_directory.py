"""The directory of a run: what it holds, when it may be used, and how it is resumed.

::

    logs/<env>/<agent>/<exp>/seed_<seed>/
        config.yaml      the configuration, every value in full
        metrics.jsonl
        checkpoints/
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import yaml

from sheeplike.commands.config import load_saved, to_yaml
from sheeplike.commands.errors import CommandError, nearest
from sheeplike.commands.saved import refuse_links
from sheeplike.commands.schema import Config

try:
    import fcntl
except ImportError:  # Windows has no such locks: there, two processes are not kept apart
    fcntl = None

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
LOCK_FILE = ".lock"
_CHECKPOINT = re.compile(r"(?:\.old-)?step_(\d{12,})")  # as sheeplike.checkpoint names them


def check(config: Config) -> Path:
    """Where a new run goes; nothing is created yet.

    A directory that holds anything is refused, unless it holds a dry run and another one is to replace it.

    Raises:
        CommandError: the directory is in use or cannot be written.
    """
    path = Path(config.run_dir or "").expanduser()
    ancestor = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.R_OK | os.W_OK | os.X_OK):
        raise CommandError(
            f"run_dir={path}: expected a directory that can be written, and {ancestor} is none; "
            "nearest: leave run_dir out, for one below logs/"
        )
    if path.is_dir() and any(path.iterdir()) and not (config.dry_run and _holds_dry_run(path)):
        free = next(name for count in range(2, 10_000) if not (name := path.with_name(f"{path.name}_{count}")).exists())
        what = "holds a run already" if (path / CONFIG_FILE).exists() else "is not empty"
        resume = f"resume={path} to continue it, or " if checkpoint_steps(path) else ""
        raise CommandError(f"run_dir={path} {what}: expected {resume}another directory; nearest: run_dir={free}")
    return path


def create(run_dir: Path, config: Config) -> TextIO:
    """Create what :func:`check` allowed, with the configuration in it; returns the lock (see :func:`lock`).

    Raises:
        CommandError: another process took the directory meanwhile, or it cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        held = lock(run_dir)
        if config.dry_run and _holds_dry_run(run_dir):
            for entry in run_dir.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name != LOCK_FILE:
                    entry.unlink()
        with (run_dir / CONFIG_FILE).open("x", encoding="utf-8") as file:  # whoever creates it owns the directory
            file.write(to_yaml(config))
        return held
    except FileExistsError:
        raise CommandError(f"run_dir={run_dir} was taken by another run just now: expected another directory") from None
    except OSError as error:
        raise CommandError(f"run_dir={run_dir}: expected a place that can be written; {error.strerror}") from None


def discard(run_dir: Path) -> None:
    """Remove what :func:`create` began: the same command line can then be given again."""
    shutil.rmtree(run_dir, ignore_errors=True)


def lock(run_dir: Path) -> TextIO:
    """Claim a run directory until the file that is returned is closed, or the process ends in whatever way.

    Raises:
        CommandError: another process has it.
    """
    file = (run_dir / LOCK_FILE).open("a", encoding="utf-8")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CommandError(f"run_dir={run_dir} is in use by another process: wait for it, or stop it first") from None
    return file


def update(run_dir: Path, config: Config) -> None:
    """Save the configuration of a resumed run, so that the next one to resume it keeps what has changed."""
    fresh = run_dir / f".{CONFIG_FILE}.{os.getpid()}"
    fresh.write_text(to_yaml(config), encoding="utf-8")
    fresh.replace(run_dir / CONFIG_FILE)  # whole or not at all


def resume(run_dir: Path, arguments: list[str]) -> Config:
    """The configuration of the run in ``run_dir``, to be continued with the changes in ``arguments``.

    Raises:
        CommandError: there is no such run, it has no checkpoint, or a change is not allowed.
    """
    file = config_file(run_dir, "resume")
    if not checkpoint_steps(run_dir):
        raise CommandError(
            f"resume={run_dir}: expected a run with a checkpoint; this one stopped before its first: delete it, "
            "or begin in another run_dir"
        )
    return replace(load_saved(file, arguments), run_dir=str(run_dir))  # it may have been moved


def config_file(run_dir: Path, key: str) -> Path:
    """The configuration of the run that ``key=<run_dir>`` names.

    Raises:
        CommandError: there is no such run, or a link in it leads elsewhere.
    """
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        runs = [str(found.parent) for found in sorted(Path("logs").rglob(CONFIG_FILE))]
        match = nearest(str(run_dir), runs)
        hint = f"; nearest: {key}={match}" if match else ""
        raise CommandError(f"{key}={run_dir}: expected the directory of a run, with a {CONFIG_FILE} in it{hint}")
    refuse_links(run_dir, key)
    return file


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Policy steps of a run's checkpoints, oldest first, by their names; found without torch, and not verified."""
    names = [entry.name for entry in (run_dir / CHECKPOINTS).glob("*")]
    return sorted({int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))})


def _holds_dry_run(path: Path) -> bool:
    try:
        return yaml.safe_load((path / CONFIG_FILE).read_text(encoding="utf-8"))["dry_run"] is True
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return False
