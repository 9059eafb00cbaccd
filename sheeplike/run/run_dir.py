"""The directory of a run: what it holds, when it may be used, and how it is resumed.

::

    logs/<env>[/<id>][/<randomization>]/<agent>/<exp>/seed_<seed>/
        config.yaml      the configuration, every value in full
        metrics.jsonl
        checkpoints/
        replay/          files of steps, which checkpoints share
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO

import yaml

from sheeplike import host
from sheeplike.config.compose import Composed, load
from sheeplike.config.errors import nearest
from sheeplike.config.saved import RESUMABLE, changes, describe_changes, load_saved, refuse_links, to_yaml
from sheeplike.config.schema import Config, Start
from sheeplike.config.sources import Sources
from sheeplike.files import CHECKPOINT, REPLAY, write_atomically
from sheeplike.files import lock as lock_file
from sheeplike.options import CommandError, InvalidOption

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
LOCK_FILE = ".lock"
EVENTS = "events.out.tfevents"  # as TensorBoard's files begin
LEFTOVERS = {CONFIG_FILE, CHECKPOINTS, REPLAY, "metrics.jsonl"}  # of a run that came to no checkpoint


class Plan(NamedTuple):
    """What a command line asks for.

    Attributes:
        run_dir: of a new run, or of the one that goes on.
        resume: it goes on from its newest checkpoint.
        replace: the directory holds a run without a checkpoint, which is deleted first.
        changed: keys whose values differ from those that the run has had, with both.
        files: configs that changed a value, for the banner.
    """

    config: Config
    run_dir: Path
    resume: bool = False
    replace: bool = False
    changed: Mapping[str, tuple[Any, Any]] = MappingProxyType({})
    files: Sequence[str] = ()

    @property
    def finished(self) -> bool:
        """Whether the run has made its ``total_steps`` already, by the name of its newest checkpoint."""
        return self.resume and checkpoint_steps(self.run_dir)[-1] >= self.config.total_steps


def plan(start: Start, arguments: Iterable[str], sources: Sources) -> Plan:
    """The run that a command line describes: a new one, or with ``resume=`` one that goes on.

    ``resume=<run_dir>`` takes everything from there; ``resume=auto`` composes the configuration as for a new run, and
    goes on if its ``run_dir`` holds that run.

    Raises:
        CommandError: the run cannot begin, or not go on like this; nothing was changed.
    """
    if start.resume not in (None, "auto"):
        planned = _resumed(Path(start.resume).expanduser(), list(arguments))
    else:
        composed = load(list(arguments), sources)
        planned = _auto(composed) if start.resume == "auto" else None
        planned = planned or Plan(composed.config, check(composed.config), files=composed.files)
    check_accelerator(planned.config)
    return planned


def check(config: Config) -> Path:
    """Where a new run goes; nothing is created yet.

    A directory that holds anything is refused, unless it holds a dry run and another one is to replace it.

    Raises:
        CommandError: the directory is in use or cannot be written.
    """
    path = Path(config.run_dir or "").expanduser()
    ancestor = next(place for place in (path, *path.absolute().parents) if place.exists())
    try:
        with TemporaryDirectory(dir=ancestor):  # asking for permission is not enough: some file systems take no files
            pass
    except OSError:
        raise CommandError(
            f"run_dir={path}: expected a directory that can be written, and {ancestor} is none; "
            "nearest: leave run_dir out, for one below logs/"
        ) from None
    taken = path.is_dir() and any(entry.name != LOCK_FILE for entry in path.iterdir())
    if taken and not (config.dry_run and _holds_dry_run(path)):
        free = next(name for count in range(2, 10_000) if not (name := path.with_name(f"{path.name}_{count}")).exists())
        what = "holds a run already" if (path / CONFIG_FILE).exists() else "is not empty"
        resume = f"{shlex.quote(f'resume={path}')} to continue it, or " if checkpoint_steps(path) else ""
        if what == "holds a run already" and not resume:
            resume = "resume=auto to begin again where it came to no checkpoint, or "
        raise CommandError(f"run_dir={path} {what}: expected {resume}another directory; nearest: run_dir={free}")
    return path


def create(run_dir: Path, config: Config, *, replace: bool = False) -> TextIO:
    """Create what :func:`plan` allowed, with the configuration in it; returns the lock (see :func:`lock`).

    Args:
        replace: a run in it that has no checkpoint makes room, as a dry run does for another.

    Raises:
        CommandError: another process took the directory meanwhile, or it cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        locked = lock(run_dir)
        if config.dry_run and _holds_dry_run(run_dir):
            _empty(run_dir, lambda name: name != LOCK_FILE)
        elif replace and not checkpoint_steps(run_dir):
            _empty(run_dir, lambda name: name in LEFTOVERS or name.startswith(EVENTS))
        if (run_dir / CONFIG_FILE).exists():
            raise FileExistsError
        write_atomically(run_dir / CONFIG_FILE, to_yaml(config))  # without it no checkpoint is of any use
        return locked
    except FileExistsError:
        raise CommandError(f"run_dir={run_dir} was taken by another run just now: expected another directory") from None
    except OSError as error:
        raise CommandError(f"run_dir={run_dir}: expected a place that can be written; {error.strerror}") from None


def discard(run_dir: Path) -> None:
    """Remove what :func:`create` began, and nothing else: the same command line can then be given again."""
    with suppress(OSError):
        _empty(run_dir, lambda name: name in {*LEFTOVERS, LOCK_FILE} or name.startswith(EVENTS))
        run_dir.rmdir()


def lock(run_dir: Path) -> TextIO:
    """Claim a run directory until the file that is returned is closed, or the process ends in whatever way.

    Where the file system knows no locks, two processes are not kept apart.

    Raises:
        CommandError: another process has it.
    """
    try:
        file = (run_dir / LOCK_FILE).open("a", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"run_dir={run_dir}: expected a place that can be written; {error.strerror}") from None
    try:
        lock_file(file.fileno())
    except BlockingIOError:
        file.close()
        raise CommandError(f"run_dir={run_dir} is in use by another process: wait for it, or stop it first") from None
    return file


def update(run_dir: Path, config: Config) -> None:
    """Save the configuration of a resumed run, so that the next one to resume it keeps what has changed."""
    write_atomically(run_dir / CONFIG_FILE, to_yaml(config))


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
    return sorted({int(match[1]) for name in names if (match := CHECKPOINT.fullmatch(name))})


def open_run(run: str | None, command: str) -> tuple[Path, Config]:
    """The directory of the run that ``run=`` names, and its configuration, for a command that reads its checkpoints.

    Raises:
        CommandError: there is no such run with a checkpoint.
    """
    if run is None:
        raise CommandError(
            f"run= is missing: expected the directory of a run: python -m sheeplike {command} run=<run_dir>"
        )
    run_dir = Path(run).expanduser()
    config = load_saved(config_file(run_dir, "run")).config
    if not checkpoint_steps(run_dir):
        raise CommandError(f"run={run_dir}: expected a run with a checkpoint; this one has none")
    return run_dir, config


def choose_checkpoint(run_dir: Path, name: str) -> Path | None:
    """The directory that ``checkpoint=`` means; None: the newest that is whole.

    Raises:
        InvalidOption: there is no such checkpoint.
    """
    if name == "last":
        return None
    from sheeplike.checkpoint import best, list_checkpoints  # torch takes seconds

    steps = checkpoint_steps(run_dir)
    found = list_checkpoints(run_dir / CHECKPOINTS)
    if name == "best":
        path = best(run_dir / CHECKPOINTS)
        if path is None:
            raise InvalidOption("checkpoint", name, "one that was saved after an evaluation; here is none", "last")
        return path
    expected = f"best, last, or one of {', '.join(map(str, steps))}"
    step = name.removeprefix("step_")
    if not step.isdecimal():
        raise InvalidOption("checkpoint", name, expected, nearest(name, ("best", "last")) or "last")
    if int(step) not in steps:
        raise InvalidOption("checkpoint", name, expected, min(steps, key=lambda other: abs(other - int(step))))
    return next(path for path in found if int(path.name.rpartition("_")[2]) == int(step))


def _resumed(run_dir: Path, arguments: Sequence[str]) -> Plan:
    """The run in ``run_dir``, to be continued with the changes in ``arguments``."""
    file = config_file(run_dir, "resume")
    if not checkpoint_steps(run_dir):
        raise CommandError(
            f"resume={run_dir}: expected a run with a checkpoint; this one stopped before its first: give the command "
            "that began it again, with resume=auto"
        )
    composed = load_saved(file, arguments)
    changed = changes(load_saved(file).config, composed.config)
    config = composed.config.replace(run_dir=str(run_dir))  # it may have been moved
    return Plan(config, run_dir, resume=True, changed=changed, files=composed.files)


def _auto(composed: Composed) -> Plan | None:
    """The run that ``run_dir`` holds, continued, or begun again if it has no checkpoint; None where there is none."""
    config = composed.config
    path = Path(config.run_dir or "").expanduser()
    if not (path / CONFIG_FILE).is_file():
        return None
    changed = changes(load_saved(config_file(path, "run_dir")).config, config)
    refused = {key: values for key, values in changed.items() if key.partition(".")[0] not in RESUMABLE}
    if refused:
        raise CommandError(
            f"resume=auto: run_dir={path} holds another run: {describe_changes(refused)}; expected the command line "
            f"that began it (only {', '.join(sorted(RESUMABLE))} may differ), or another run_dir"
        )
    if not checkpoint_steps(path):
        return Plan(config, path, replace=True, files=composed.files)
    return Plan(config, path, resume=True, changed=changed, files=composed.files)


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


def _empty(run_dir: Path, chosen: Callable[[str], bool]) -> None:
    """Remove what an attempt has left that is not worth keeping, by its name."""
    for entry in run_dir.iterdir():
        if not chosen(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _holds_dry_run(path: Path) -> bool:
    try:
        return yaml.safe_load((path / CONFIG_FILE).read_text(encoding="utf-8"))["dry_run"] is True
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return False
