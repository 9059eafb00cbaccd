"""``seeds=3``: one run per seed, one after another, each in a process of its own.

A process of its own gives all memory back, and begins with nothing that an earlier run has left in torch, JAX or Warp.
The same command line, given again, goes on where the series stopped: a finished run is skipped, a stopped one resumed.
With a larger ``total_steps`` all of them go on.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sheeplike.commands import run_directory
from sheeplike.commands.config import changes, load, load_saved, to_yaml
from sheeplike.commands.errors import CommandError, InvalidValue
from sheeplike.commands.machine import check_accelerator
from sheeplike.commands.preemption import INTERRUPTED, PREEMPTED, SIGNALS
from sheeplike.commands.run_directory import CONFIG_FILE
from sheeplike.commands.schema import Config
from sheeplike.commands.sources import Sources


class Job(NamedTuple):
    """One run of a series: what its process is told, or None where it is finished."""

    seed: int
    run_dir: Path
    arguments: list[str] | None


def run(overrides: Sequence[str], config_dirs: Sequence[str], *, print_config: bool = False) -> None:
    """Train once per seed; every run directory is looked at before the first run begins.

    Args:
        overrides: those of one run, and ``seeds=``. A ``run_dir=`` is the parent of ``seed_<seed>``.
        config_dirs: as given with ``--config-dir``.
        print_config: print the configuration of the first run instead.

    Raises:
        CommandError: one of the runs can neither begin nor go on; none was started.
        SystemExit: status 130 after Ctrl-C, or that of the run that failed; the runs behind it were not started.
    """
    asked = [override for override in overrides if override.startswith("seeds=")]
    rest = [override for override in overrides if override not in asked]
    rest = [override for override in rest if override != "resume=auto"]  # as every series does
    if any(override.startswith("resume=") for override in rest):
        raise CommandError(f"{asked[-1]} and resume=: expected one of them; a series goes on with its first command")
    configs = _configs(asked[-1].removeprefix("seeds="), rest, Sources(config_dirs))
    if print_config:
        print(to_yaml(configs[0]), end="")
        return
    check_accelerator(configs[0])
    flags = [part for directory in config_dirs for part in ("--config-dir", directory)]
    jobs = [_job(config, [*flags, *rest]) for config in configs]
    with Child() as child:
        for number, job in enumerate(jobs, 1):
            title = f"seed {job.seed} ({number} of {len(jobs)})"
            print(f"{title}: {'finished before' if job.arguments is None else job.run_dir}", flush=True)
            if job.arguments is None:
                continue
            status = child.run([sys.executable, "-m", "sheeplike", "train", *job.arguments])
            if status in (INTERRUPTED, PREEMPTED) or (child.asked and (status or number < len(jobs))):
                again = shlex.join(["python", "-m", "sheeplike", *flags, *overrides])
                print(f"stopped at {title}; go on with all that is left: {again}")
                raise SystemExit(child.stopped if child.asked is not None else status)
            if status:
                print(f"sheeplike: {title} failed; the seeds behind it were not started", file=sys.stderr)
                raise SystemExit(status)
    print(f"finished: {len(jobs)} seeds in {jobs[0].run_dir.parent}")


class Child:
    """Runs one process after another and passes on what this one is asked to do: stop, or pause.

    A child has a process group of its own. In ours, Ctrl-C would reach it from the terminal and then once more from
    here, and the second one means: at once, without saving.

    Attributes:
        asked: the signal that asked to stop, if one came.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self.process: subprocess.Popen | None = None

    @property
    def stopped(self) -> int:
        """The exit status that tells by what the series was stopped."""
        return INTERRUPTED if self.asked == signal.SIGINT else PREEMPTED

    def run(self, command: Sequence[str]) -> int:
        """Exit status of ``command``; where a signal ended it, 128 and its number, as shells have it."""
        if self.asked is not None:
            return self.stopped
        self.process = subprocess.Popen(command, process_group=0, stdin=subprocess.DEVNULL)
        if self.asked is not None:  # it came while the process was being made
            self.process.send_signal(self.asked)
        status = self.process.wait()
        return status if status >= 0 else 128 - status

    def _stop(self, signum: int, frame: object) -> None:
        self.asked = signum
        if self.process is not None:
            self.process.send_signal(signum)  # nothing happens where it has ended

    def _pause(self, signum: int, frame: object) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # until the shell's fg or bg
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Child:
        handlers = {signum: self._stop for signum in SIGNALS} | {signal.SIGTSTP: self._pause}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            handlers[signal.SIGHUP] = self._stop
        self.before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self.before.items():
            signal.signal(signum, handler)


def _configs(text: str, overrides: Sequence[str], sources: Sources) -> list[Config]:
    """The configuration of every run, each with its own ``run_dir``."""
    first = load(overrides, sources)
    own_place = any(override.startswith("run_dir=") for override in overrides)
    configs = []
    for seed in _seeds(text, first.seed, any(override.startswith("seed=") for override in overrides)):
        config = load([*overrides, f"seed={seed}"], sources)
        if own_place:
            config = replace(config, run_dir=f"{config.run_dir}/seed_{seed}")
        configs.append(config)
    if len({config.run_dir for config in configs}) < len(configs):
        raise CommandError(
            f"run_dir={first.run_dir} comes from a config and would be shared by all seeds: expected run_dir=<parent> "
            "on the command line"
        )
    return configs


def _seeds(text: str, first: int, given: bool) -> list[int]:
    """What ``seeds=`` means: so many, counted from ``seed``, or those in a list."""
    expected = "how many, counted from seed=, or a list of different ones"
    try:
        value: Any = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if isinstance(value, str) and value.replace(",", "").replace(" ", "").isdigit():
        raise InvalidValue("seeds", text, expected, [part.strip() for part in text.split(",") if part.strip()])
    if isinstance(value, list) and given:
        raise CommandError(f"seeds={text} and seed={first}: expected one of them")
    counted = [value] if type(value) is int else value
    if not isinstance(counted, list) or not counted or any(type(seed) is not int for seed in counted):
        raise InvalidValue("seeds", text, expected, 3)
    if isinstance(value, int):
        if value < 1:
            raise InvalidValue("seeds", value, expected, 1)
        return list(range(first, first + value))
    if len(set(value)) < len(value):
        raise InvalidValue("seeds", text, expected, list(dict.fromkeys(value)))
    return value


def _job(config: Config, arguments: list[str]) -> Job:
    """What is to be done for one seed, by what its directory holds."""
    path = Path(config.run_dir).expanduser()
    quoted = str(path).replace("'", "\\'")
    if config.dry_run or not (path / CONFIG_FILE).is_file():
        run_directory.check(config)
        return Job(config.seed, path, [*arguments, f"seed={config.seed}", f"run_dir='{quoted}'"])
    saved = load_saved(path / CONFIG_FILE, [])
    longer = config.total_steps > saved.total_steps
    changed = changes(replace(saved, total_steps=config.total_steps) if longer else saved, config)
    if changed:
        key = next(iter(changed))
        raise CommandError(
            f"run_dir={path} holds a run with another {key}: expected the command line that began it, or "
            f"another run_dir; nearest: run_dir={path.parent}_2"
        )
    run_directory.lock(path).close()  # refuses one that is going on
    steps = run_directory.checkpoint_steps(path)
    if not steps:
        return Job(config.seed, path, [*arguments, f"seed={config.seed}", f"run_dir='{quoted}'", "resume=auto"])
    if steps[-1] >= config.total_steps:
        return Job(config.seed, path, None)
    return Job(config.seed, path, [f"resume={path}", *([f"total_steps={config.total_steps}"] if longer else [])])
