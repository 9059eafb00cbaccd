"""The directory of a run: the plan of a run in it, its lock, and its reuse.

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
import os
import shlex
import shutil
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sheeplike import host
from sheeplike.config.compose import COMMAND_LINE, Composed, load, load_saved, start_of
from sheeplike.config.errors import as_command_errors, expand, require_writable, writing
from sheeplike.config.saved import changes, describe_changes, may_change, resumable_keys, to_yaml
from sheeplike.config.schema import LOGGERS, Config, to_data
from sheeplike.config.sources import Sources
from sheeplike.envs.gym.options import find_module
from sheeplike.files import EVENTS, open_regular, parse_yaml, read_text, read_yaml, write_atomically
from sheeplike.files import lock as lock_file
from sheeplike.options import CommandError, InvalidOption
from sheeplike.run.layout import ASIDE, CONFIG_FILE, LOCK_FILE, METRICS, OURS, checkpoint_steps, config_file
from sheeplike.terminal import info


class Plan(NamedTuple):
    """A run that is about to begin, or to be resumed."""

    config: Config
    run_dir: Path
    resume: bool = False  # from its newest checkpoint
    auto: bool = False  # `resume=auto` asked for that
    files: Sequence[str] = ()  # configs that changed a value, for the banner


def plan(arguments: Iterable[str], config_dirs: Iterable[str] = ()) -> Plan:
    """Compose and check the run that a command line describes, changing nothing; CommandError if it cannot begin.

    ``resume=<run_dir>`` takes everything from there. ``resume=auto`` composes the configuration as for a new run, and
    resumes it if ``run_dir`` holds that run.
    """
    start, overrides = start_of(arguments)
    with as_command_errors(OSError):  # a path may be too long, or forbidden
        if start.resume not in (None, "auto"):
            planned = _resumed(expand(start.resume), overrides)
        else:
            planned = _begun(load(overrides, Sources(config_dirs)), auto=start.resume == "auto")
    try:
        parse_yaml(to_yaml(planned.config))
    except ValueError as error:
        raise CommandError(f"the configuration could not be read again from {CONFIG_FILE}: {error}") from None
    check_loggers(planned.config)
    return planned


def _resumed(run_dir: Path, overrides: Sequence[str]) -> Plan:
    file = config_file(run_dir, "resume")
    if not checkpoint_steps(run_dir):
        raise CommandError(f"resume={run_dir}: expected a run with a checkpoint; nearest: the command that began it")
    composed = load_saved(file, overrides)
    config = composed.config.replace(run_dir=str(run_dir))  # the directory may have been moved
    check_accelerator(config)
    if (url := config.checkpoint.mirror) and composed.sources.get("checkpoint.mirror") != COMMAND_LINE:
        # The directory may come from elsewhere, and may not choose a place to write to.
        raise CommandError(
            f"resume={run_dir}: its checkpoints are copied to {url}: expected that on the command line too; nearest: "
            f"{shlex.quote(f'checkpoint.mirror={url}')}, or checkpoint.mirror=null"
        )
    return Plan(config, run_dir, resume=True, files=composed.files)


def _begun(composed: Composed, *, auto: bool) -> Plan:
    """Return the plan of a new run, or with ``auto`` of resuming the one in ``run_dir``."""
    config, run_dir = composed.config, expand(composed.config.run_dir or "")
    check_accelerator(config)
    # Links and devices in a run are refused here.
    saved = config_file(run_dir, "run_dir") if (run_dir / CONFIG_FILE).is_file() else None
    resume = saved is not None and auto and bool(checkpoint_steps(run_dir))
    before, place = None, f"run_dir={run_dir}"
    if (url := config.checkpoint.mirror) and not checkpoint_steps(run_dir):
        from sheeplike.run.mirror import Mirror  # it imports torch, which takes seconds

        if before := Mirror(url, run_dir).newest_config():
            resume, place = True, f"checkpoint.mirror={url}"
            if not auto:
                raise CommandError(f"{place} holds a run: expected resume=auto to continue it, or another place")
    if before is None and saved and (auto or not checkpoint_steps(run_dir)) and not (config.dry_run and not resume):
        before = to_data(load_saved(saved).config)
    if before is not None:
        changed = changes(before, config)
        refused = {key: values for key, values in changed.items() if key == "seed" or not may_change(key)}
        if resume and (steps := changed.get("total_steps", (0, 0)))[1] < steps[0]:  # a longer run is none of a series
            refused["total_steps"] = steps
        if refused:
            raise CommandError(
                f"{place} holds another run: {describe_changes(refused)}; expected the command line that "
                f"began it (only {', '.join(sorted(resumable_keys() - {'seed'}))} may differ, total_steps upwards), or "
                f"another {place.partition('=')[0]}"
            )
    if not resume or not checkpoint_steps(run_dir):
        check(config, run_dir)
    return Plan(config, run_dir, resume=resume, auto=resume, files=composed.files)


def check(config: Config, run_dir: Path) -> Path:
    """Return the directory of a new run, without creating it; CommandError if it is not free or cannot be written.

    It is free if it is empty or holds an earlier attempt of this run without a checkpoint. A dry run replaces another.
    """
    require_writable("run_dir", run_dir, nearest="leave run_dir out, for one below logs/")
    ours = (LOCK_FILE, f".{CONFIG_FILE}.")  # a kill while the configuration is written leaves the second
    taken = run_dir.is_dir() and any(not entry.name.startswith(ours) for entry in run_dir.iterdir())
    if not taken or (config.dry_run and _holds_dry_run(run_dir)):
        return run_dir
    nearest = free(run_dir)
    is_run = (run_dir / CONFIG_FILE).exists() and not (run_dir / "model.json").exists()  # an export has both
    if is_run and not checkpoint_steps(run_dir):
        if (run_dir / LOCK_FILE).exists() and not host.rank_here():
            lock(run_dir).close()  # refuses a run that is going on
        return run_dir
    what = "holds a run already" if is_run else "is not empty"
    resume = f"{shlex.quote(f'resume={run_dir}')} to continue it, or " if checkpoint_steps(run_dir) else ""
    raise CommandError(f"run_dir={run_dir} {what}: expected {resume}another directory; nearest: run_dir={nearest}")


def claim(run_dir: Path, config: Config) -> BinaryIO:
    """Create and lock the directory of a new run, and write its configuration; returns the lock."""
    with writing("run_dir", run_dir), ExitStack() as stack:
        held = stack.enter_context(lock(run_dir))
        if config.dry_run and _holds_dry_run(run_dir):
            _clear(run_dir)
        elif checkpoint_steps(run_dir):
            raise CommandError(f"run_dir={run_dir} was taken by another run just now: expected another one")
        elif (run_dir / CONFIG_FILE).exists():
            info(f"{run_dir} has no checkpoint: it begins again")
            metrics = run_dir / METRICS
            if metrics.is_file() and metrics.stat().st_size:  # a user may have removed the checkpoints
                aside = next(path for n in itertools.count(1) if not (path := run_dir / ASIDE.format(n)).exists())
                metrics.rename(aside)
                info(f"its metrics are kept in {aside}")
            _clear(run_dir, only={METRICS})
        write_atomically(run_dir / CONFIG_FILE, to_yaml(config))  # checkpoints are useless without it
        stack.pop_all()
    return held


def _clear(run_dir: Path, only: Iterable[str] = frozenset(OURS - {LOCK_FILE})) -> None:
    """Remove the files of a run named in ``only``, and its event files."""
    for path in run_dir.iterdir():
        if path.name not in only and not path.name.startswith(EVENTS):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def lock(run_dir: Path) -> BinaryIO:
    """Lock a run directory until the returned file is closed or the process ends; CommandError if it is in use."""
    path = run_dir / LOCK_FILE
    with writing("run_dir", run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        if (run_dir / METRICS).exists():
            open_regular(run_dir / METRICS, "ab").close()  # refused now, not after the worlds are built
        file = open_regular(path, "ab")
    try:
        lock_file(file.fileno())
    except BlockingIOError:
        file.close()
        owner = "another process"
        with suppress(OSError, ValueError):
            number, host_name = read_text(path, 300).split()
            owner = f"process {int(number)} on {host_name}"
        raise CommandError(f"run_dir={run_dir} is in use by {owner}: wait for it, or stop it first") from None
    with suppress(OSError):  # the disk is full: the owner stays unnamed
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}\n".encode())
    return file


def open_run(run: str | None, command: str) -> tuple[Path, Config]:
    """Return the directory of the run that ``run=`` names, and its configuration; refuses one without a checkpoint."""
    if run is None:
        raise CommandError(
            f"run= is missing: expected the directory of a run: python -m sheeplike {command} run=<run_dir>"
        )
    run_dir = expand(run)
    config = load_saved(config_file(run_dir, "run")).config
    if not checkpoint_steps(run_dir):
        raise CommandError(f"run={run_dir}: expected a run with a checkpoint; this one has none")
    return run_dir, config


def check_accelerator(config: Config) -> None:
    """Raise if the run asks for a GPU that is not there."""
    if config.compile == "graph" and config.fabric.accelerator == "cpu":
        raise InvalidOption("compile", "graph", "a GPU for CUDA graphs, but fabric.accelerator=cpu", "inductor")
    asked, gpus = config.fabric.devices, host.gpu_count() if config.fabric.accelerator == "cuda" else 0
    if gpus > 1 and asked > gpus:
        raise InvalidOption("fabric.devices", asked, f"at most {gpus}, the GPUs of this machine", gpus)
    problem = host.gpu_problem() if config.fabric.accelerator == "cuda" else None
    if problem:
        raise CommandError(
            f"fabric.accelerator=cuda, profile={config.profile}: expected a GPU, but {problem}; "
            "nearest: fabric.accelerator=cpu profile=cpu"
        )


def check_loggers(config: Config) -> None:
    """Raise if a logger, or the package that it needs, is not installed."""
    for name in config.logger:
        LOGGERS.check(name)
        # A directory of this name, such as wandb leaves, is found too, without an origin.
        if name in LOGGERS.built_in and not getattr(find_module(name), "origin", None):
            raise CommandError(f"logger={name}: expected its package; nearest: pip install {name}")


def free(path: Path) -> Path:
    """Return the next name beside ``path`` that does not exist; a file keeps its suffix."""
    if path.name in ("", ".."):
        path = path.resolve()
    stem, end = (path.stem, path.suffix) if path.is_file() else (path.name or "run", "")  # the root has no name
    return next(name for count in itertools.count(2) if not (name := path.parent / f"{stem}_{count}{end}").exists())


def _holds_dry_run(path: Path) -> bool:
    try:
        return read_yaml(path / CONFIG_FILE)["dry_run"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False
