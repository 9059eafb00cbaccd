"""The directory of a run: what it holds, when it may be used, and how it is resumed.

::

    logs/<env>[/<id>][/<randomization>]/<agent>[/<exp>]/seed_<seed>/
        config.yaml      the configuration, every value in full
        starts.jsonl     command line, commit and versions of each start
        metrics.jsonl
        checkpoints/
        replay/          files of steps, which checkpoints share
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import socket
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from sheeplike import host
from sheeplike.config.compose import Composed, load, load_saved
from sheeplike.config.errors import as_command_errors, expand, require_writable
from sheeplike.config.saved import RESUMABLE, changes, describe_changes, may_change, to_yaml
from sheeplike.config.schema import Config, Start
from sheeplike.config.sources import Sources
from sheeplike.files import (
    EVENTS,
    open_regular,
    parse_yaml,
    read_text,
    read_yaml,
    write_atomically,
)
from sheeplike.files import lock as lock_file
from sheeplike.options import CommandError, InvalidOption
from sheeplike.run.layout import (
    ASIDE,
    CHECKPOINTS,
    CONFIG_FILE,
    LOCK_FILE,
    METRICS,
    OURS,
    STARTS,
    checkpoint_steps,
    config_file,
)
from sheeplike.terminal import info, warn


class Plan(NamedTuple):
    """What a command line asks for.

    Attributes:
        run_dir: of a new run, or of the one that goes on.
        resume: it goes on from its newest checkpoint.
        again: the directory holds this run, which came to no checkpoint and begins anew.
        files: configs that changed a value, for the banner.
    """

    config: Config
    run_dir: Path
    resume: bool = False
    again: bool = False
    files: Sequence[str] = ()

    def finished_at(self) -> int | None:
        """The policy step at which the run has made its ``total_steps`` already, or None where it would go on.

        What a name says is not enough: a run whose newest checkpoint is damaged goes on from the one before.
        """
        total = self.config.total_steps
        if not self.resume or checkpoint_steps(self.run_dir)[-1] < total:
            return None
        from sheeplike import checkpoint  # torch takes seconds

        with as_command_errors(checkpoint.Corrupt, FileNotFoundError), warnings.catch_warnings(record=True) as passed:
            warnings.simplefilter("always")
            meta, parts = checkpoint.load_latest(self.run_dir / CHECKPOINTS, only=parts_to_read(self.config))
        with suppress(LookupError, TypeError):  # somebody has made it: refused when the run goes on
            # The last step may be followed by updates that are still due, but by no other step.
            due = parts["loop"]["counters"]["due"] and meta["step"] - self.config.env.num_envs < total
            if meta["step"] >= total and not due:
                for warning in passed:
                    warn(str(warning.message))
                return meta["step"]
        return None  # what was passed over is told when the run goes on


def plan(start: Start, arguments: Iterable[str], sources: Sources) -> Plan:
    """The run that a command line describes: a new one, or with ``resume=`` one that goes on.

    ``resume=<run_dir>`` takes everything from there; ``resume=auto`` composes the configuration as for a new run, and
    goes on if its ``run_dir`` holds that run.

    Raises:
        CommandError: the run cannot begin, or not go on like this; nothing was changed.
    """
    if start.resume not in (None, "auto"):
        planned = _resumed(expand(start.resume), list(arguments))
        check_accelerator(planned.config)
    else:
        composed = load(list(arguments), sources)
        check_accelerator(composed.config)
        planned = _auto(composed) if start.resume == "auto" else None
        planned = planned or Plan(composed.config, check(composed.config), files=composed.files)
    try:
        parse_yaml(to_yaml(planned.config))
    except ValueError as error:
        raise CommandError(f"the configuration could not be read again from {CONFIG_FILE}: {error}") from None
    return planned


def check(config: Config) -> Path:
    """Where a new run goes; nothing is created yet.

    A directory that holds anything is refused, unless it holds a dry run and another one is to replace it.

    Raises:
        CommandError: the directory is in use or cannot be written.
    """
    path = expand(config.run_dir or "")
    require_writable("run_dir", path, nearest="leave run_dir out, for one below logs/")
    taken = path.is_dir() and any(entry.name != LOCK_FILE for entry in path.iterdir())
    if taken and not (config.dry_run and _holds_dry_run(path)):
        other = free(path)
        what = "holds a run already" if (path / CONFIG_FILE).exists() else "is not empty"
        resume = f"{shlex.quote(f'resume={path}')} to continue it, or " if checkpoint_steps(path) else ""
        if what == "holds a run already" and not resume:
            resume = "resume=auto to begin again where it came to no checkpoint, or "
        raise CommandError(f"run_dir={path} {what}: expected {resume}another directory; nearest: run_dir={other}")
    return path


class Claim:
    """A run directory, locked for the start of a run, and what that start has made or replaced in it.

    Args:
        again: the run in it, which has no checkpoint, begins anew.

    Raises:
        CommandError: another process took the directory meanwhile, or it cannot be written.
    """

    def __init__(self, run_dir: Path, config: Config, *, again: bool = False) -> None:
        self.run_dir = run_dir
        self._made = [place for place in (run_dir, *run_dir.absolute().parents) if not place.exists()]
        self._before: set[str] = {*os.listdir(run_dir)} if not self._made else set()
        self._replaced: dict[str, bytes] = {}
        self._aside: Path | None = None
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = lock(run_dir)
            except CommandError:
                self._remove_directories()
                raise
            there = {*os.listdir(run_dir)} - {LOCK_FILE}
            if config.dry_run and _holds_dry_run(run_dir):  # another one takes its place
                self._remove(there)
            elif CONFIG_FILE in there and not (again and not checkpoint_steps(run_dir)):
                self._lock.close()
                raise CommandError(f"run_dir={run_dir} was taken by another run just now: expected another one")
            elif again:
                for name in {CONFIG_FILE, METRICS, STARTS} & there:
                    with open_regular(run_dir / name) as file:
                        self._replaced[name] = file.read()
                if _last_row(run_dir):  # somebody may have removed the checkpoints of a run that was finished
                    count = next(n for n in itertools.count(1) if not (run_dir / ASIDE.format(n)).exists())
                    self._aside = run_dir / ASIDE.format(count)
                    write_atomically(self._aside, self._replaced[METRICS])
                    info(f"its metrics are kept in {self._aside}")
            write_atomically(run_dir / CONFIG_FILE, to_yaml(config))  # without it no checkpoint is of any use
        except OSError as error:
            self.discard()
            problem = f"{error.filename or run_dir}: {error.strerror}"
            raise CommandError(f"run_dir={run_dir}: expected a place that can be written; {problem}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    def discard(self) -> None:
        """Remove what this start has made, and nothing else: the same command line can then be given again."""
        with suppress(OSError):
            self._remove({*os.listdir(self.run_dir)} - self._before)
            for name, content in self._replaced.items():
                write_atomically(self.run_dir / name, content)
            if self._aside:
                self._aside.unlink(missing_ok=True)
            self._remove_directories()

    def _remove_directories(self) -> None:
        with suppress(OSError):  # something is in one: it is not ours, nor are those above it
            for place in self._made:  # the innermost first
                place.rmdir()

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = self.run_dir / name
            if name not in OURS and not name.startswith(EVENTS):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def lock(run_dir: Path) -> BinaryIO:
    """Claim a run directory until the file that is returned is closed, or the process ends in whatever way.

    Where the file system knows no locks, two processes are not kept apart.

    Raises:
        CommandError: another process has it, or it cannot be written.
    """
    path = run_dir / LOCK_FILE
    try:
        if (run_dir / METRICS).exists():
            open_regular(run_dir / METRICS, "ab").close()  # refused now, and not once the worlds are built
        file = open_regular(path, "ab")
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
        raise CommandError(f"run_dir={run_dir}: expected a place that can be written; {problem}") from None
    try:
        lock_file(file.fileno())
    except BlockingIOError:
        file.close()
        with suppress(OSError, ValueError):
            number, host_name = read_text(path, 300).split()
            raise CommandError(
                f"run_dir={run_dir} is in use by process {int(number)} on {host_name}: wait for it, or stop it first"
            ) from None
        raise CommandError(f"run_dir={run_dir} is in use by another process: wait for it, or stop it first") from None
    with suppress(OSError):  # the disk is full: then nobody is told who has it
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}\n".encode())
    return file


def parts_to_read(config: Config) -> tuple[str, ...] | None:
    """The parts of a checkpoint that a run goes on from; None: all of them."""
    return None if config.checkpoint.replay else ("agent", "envs", "loop", "monitor", "rng")


def update(run_dir: Path, config: Config) -> None:
    """Save the configuration of a resumed run, so that the next one to resume it keeps what has changed.

    Raises:
        CommandError: it cannot be written.
    """
    with as_command_errors(OSError):
        write_atomically(run_dir / CONFIG_FILE, to_yaml(config))


def open_run(run: str | None, command: str) -> tuple[Path, Config]:
    """The directory of the run that ``run=`` names, and its configuration, for a command that reads its checkpoints.

    Raises:
        CommandError: there is no such run with a checkpoint.
    """
    if run is None:
        raise CommandError(
            f"run= is missing: expected the directory of a run: python -m sheeplike {command} run=<run_dir>"
        )
    run_dir = expand(run)
    config = load_saved(config_file(run_dir, "run")).config
    if not checkpoint_steps(run_dir):
        raise CommandError(f"run={run_dir}: expected a run with a checkpoint; this one has none")
    return run_dir, config


def _resumed(run_dir: Path, arguments: Sequence[str]) -> Plan:
    """The run in ``run_dir``, to be continued with the changes in ``arguments``."""
    file = config_file(run_dir, "resume")
    if not checkpoint_steps(run_dir):
        raise CommandError(
            f"resume={run_dir}: expected a run with a checkpoint; this one stopped before its first: give the command "
            "that began it again, with resume=auto"
        )
    composed = load_saved(file, arguments)
    config = composed.config.replace(run_dir=str(run_dir))  # it may have been moved
    return Plan(config, run_dir, resume=True, files=composed.files)


def _auto(composed: Composed) -> Plan | None:
    """The run that ``run_dir`` holds, continued, or begun again if it has no checkpoint; None where there is none."""
    config = composed.config
    path = expand(config.run_dir or "")
    if not (path / CONFIG_FILE).is_file():
        return None
    changed = changes(load_saved(config_file(path, "run_dir")).config, config)
    refused = {key: values for key, values in changed.items() if key == "seed" or not may_change(key)}
    if refused:
        raise CommandError(
            f"resume=auto: run_dir={path} holds another run: {describe_changes(refused)}; expected the command line "
            f"that began it (only {', '.join(sorted(RESUMABLE - {'seed'}))} may differ), or another run_dir"
        )
    resume = bool(checkpoint_steps(path))
    return Plan(config, path, resume=resume, again=not resume, files=composed.files)


def _last_row(run_dir: Path) -> int:
    """The policy step of the last whole row of metrics, 0 where there is none."""
    try:
        with open_regular(run_dir / METRICS) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 2**20, 0))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            step = json.loads(line)["step"]
            if type(step) is int:
                return step
    return 0


def check_accelerator(config: Config) -> None:
    """Raise where the run asks for a GPU that is not there."""
    if config.compile == "graph" and config.fabric.accelerator == "cpu":
        raise InvalidOption("compile", "graph", "a GPU for CUDA graphs, but fabric.accelerator=cpu", "inductor")
    problem = host.gpu_problem() if config.fabric.accelerator == "cuda" else None
    if problem:
        raise CommandError(
            f"fabric.accelerator=cuda, profile={config.profile}: expected a GPU, but {problem}; "
            "nearest: fabric.accelerator=cpu profile=cpu"
        )


def free(path: Path) -> Path:
    """The next name that nothing has yet."""
    if path.name in ("", ".."):
        path = path.resolve()
    stem = path.name or "run"  # the root directory has no name
    return next(name for count in itertools.count(2) if not (name := path.parent / f"{stem}_{count}").exists())


def _holds_dry_run(path: Path) -> bool:
    try:
        return read_yaml(path / CONFIG_FILE)["dry_run"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False
