"""Train an agent; the default command.

``python -m sheeplike [train] exp=… env=… [key=value …]``, with ``seeds=3`` if you like, or ``resume=<run_dir>``.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sheeplike import envs
from sheeplike.agents import registry
from sheeplike.commands import Request
from sheeplike.config.errors import as_command_errors, expand
from sheeplike.config.schema import Start, all_keys, to_data
from sheeplike.config.sources import Sources
from sheeplike.envs.mjx.options import SimulationOptions
from sheeplike.envs.registry import options_of
from sheeplike.monitor.progress import phase
from sheeplike.options import CommandError, InvalidOption, explain_keys, keys_of
from sheeplike.run.signals import FAILED, INTERRUPTED, PREEMPTED, SIGNALS, stops_at_once
from sheeplike.terminal import echo, info, stop_waiting, warn

PR_SET_PDEATHSIG = 1  # of prctl(2)


def main(request: Request) -> int:
    """Check the request as far as that is possible without torch and JAX, then train.

    Returns:
        The exit status: 0, or once the run is saved 130 after Ctrl-C and 75 after another signal.

    Raises:
        CommandError: the request cannot be met; nothing was created.
    """
    sources = Sources(request.config_dirs)
    if request.help:
        echo(usage(request.arguments, sources))
        return 0
    from sheeplike.config.compose import explain, load, load_saved, start_of  # Hydra, which help does without
    from sheeplike.run import layout, run_dir

    start, rest = start_of(request.arguments)
    if start.show == "config":
        resumed = start.resume not in (None, "auto")  # then all values are in its directory
        file = layout.config_file(expand(start.resume), "resume") if resumed else None
        echo(explain(load_saved(file, rest) if file else load(rest, sources)))
        return 0
    if start.seeds is not None:
        return train_seeds(start, rest, request.config_dirs)
    with stops_at_once():
        with as_command_errors(OSError):  # a path that is too long, or may not be looked at
            planned = run_dir.plan(start, rest, sources)
        steps = planned.finished_at()
    if steps:
        if start.resume == "auto":
            info(f"finished before: {planned.run_dir}, at policy step {steps:,}")
            return 0
        raise CommandError(
            f"resume={planned.run_dir}: its {steps:,} policy steps have reached "
            f"total_steps={planned.config.total_steps}; expected a larger total_steps="
        )
    with stops_at_once(), phase("loading torch and JAX", after=0.0):
        from sheeplike.run.experiment import run  # torch and JAX: from here on it takes seconds
    status = run(planned)
    if not status:
        info(f"finished: {planned.run_dir}")
    return status


def usage(arguments: Sequence[str], sources: Sources) -> str:
    """The text of ``python -m sheeplike train --help``; with ``agent=<name>`` of that agent alone.

    With ``env=<name>`` there are the options of that task too, and with ``exp=`` the values that the run would have.
    """
    asked = dict(argument.partition("=")[::2] for argument in arguments)
    agents, task, values = {*registry.list_agents()} & {asked.get("agent"), asked.get("exp")}, asked.get("env"), {}
    if {"exp", "env"} <= asked.keys():
        from sheeplike.config.compose import load, start_of  # Hydra takes half a second

        config = load(start_of(arguments)[1], sources).config
        agents, task, values = {config.agent.name}, config.env.name, to_data(config)
    with as_command_errors(ValueError):
        named = [registry.find(name).config for name in agents] or registry.built_in()
        known = task in envs.list_envs()
        own = [key for key in keys_of(options_of(task)) if key.path != "id"] if known else []
        # An environment that renders itself takes none of these keys.
        left_out = {f"env.{name}" for name in SimulationOptions.model_fields if known and not envs.simulated(task)}
    parts = ["python -m sheeplike [train] exp=<recipe> env=<task> [key=value ...]", "", sources.describe(), "", "keys"]
    if not values:
        parts.append(
            "Defaults are those of the code. Files in configs/ change some: name exp= and env= here to see the values "
            "of a run beside them; show=config prints the file that each comes from. Environments of Gymnasium take no "
            f"{', '.join(f'env.{name}' for name in SimulationOptions.model_fields)}."
        )
    of_a_run = [key for key in all_keys() if key.path not in {"agent", *left_out}]
    parts.append(explain_keys([*keys_of(Start), *of_a_run], values))
    if own:
        options = [key._replace(path=f"env.options.{key.path}") for key in own]
        parts += ["", f"keys with env.name={task}", explain_keys(options, values)]
    for options in named:
        name = options.model_fields["name"].default
        parts += ["", f"keys with agent.name={name}", explain_keys(keys_of(options, "agent."), values)]
    return "\n".join(parts)


def train_seeds(start: Start, arguments: Sequence[str], config_dirs: Sequence[str]) -> int:
    """Train once per seed, each in a process of its own, which gives all memory back.

    The same command line, given again, goes on where it stopped: a finished run is skipped, a stopped one resumed.

    Returns:
        The exit status: 0, or that of the run that was stopped or failed; those behind it were not started.

    Raises:
        CommandError: one of the runs can neither begin nor go on; none was started.
    """
    from sheeplike.config.compose import load, start_of
    from sheeplike.run import run_dir

    if start.resume not in (None, "auto"):
        raise CommandError("seeds= and resume=: expected one of them; to go on, give the first command again")
    with stops_at_once():
        config = load(arguments, Sources(config_dirs)).config
    flags = [part for directory in config_dirs for part in ("--config-dir", directory)]
    go_on = [] if config.dry_run and start.resume is None else ["resume=auto"]  # a dry run replaces the one before
    own_place = any(argument.startswith("run_dir=") for argument in arguments)
    lines = {}
    for seed in _seeds(start.seeds, config.seed, any(argument.startswith("seed=") for argument in arguments)):
        place = [f"run_dir={config.run_dir}/seed_{seed}"] if own_place else []
        lines[seed] = [*arguments, f"seed={seed}", *place, *go_on]
    with stops_at_once(), as_command_errors(OSError):
        plans = {seed: run_dir.plan(*start_of(line), Sources(config_dirs)) for seed, line in lines.items()}
    if len({planned.run_dir for planned in plans.values()}) < len(plans):
        raise CommandError(
            f"run_dir={config.run_dir} comes from a config and would be shared by all seeds: expected run_dir=<parent> "
            "on the command line"
        )
    for planned in plans.values():
        if planned.resume or planned.again:
            run_dir.lock(planned.run_dir).close()  # refuses one that is going on
    tie = _tied_to_this_process()
    signals: list[int] = []
    child: subprocess.Popen | None = None

    def forward(signum: int, frame: object) -> None:
        # A terminal's Ctrl-C reaches the child too; it takes what comes twice at once for one request.
        signals.append(signum)
        if child is not None:
            child.send_signal(signum)
        stop_waiting()

    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    before = {signum: handler for signum, handler in handlers.items() if handler is not signal.SIG_IGN}  # nohup, &
    for signum in before:
        signal.signal(signum, forward)
    try:
        for number, (seed, line) in enumerate(lines.items(), 1):
            info(f"seed {seed} ({number} of {len(lines)}): {plans[seed].run_dir}")
            status = None
            if not signals:
                command = [sys.executable, "-m", "sheeplike", "train", *flags, *line]
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=tie)
                if signals:  # it came while the process was being made
                    child.send_signal(signals[-1])
                status = child.wait()
            stopped = signals and (status != 0 or number < len(lines))  # else the last one has finished all the same
            if stopped or status in (INTERRUPTED, PREEMPTED):
                again = shlex.join(["python", "-m", "sheeplike", *flags, *arguments, f"seeds={_typed(start.seeds)}"])
                info(f"stopped at seed {seed} ({number} of {len(lines)}); go on with all that is left: {again}")
                return INTERRUPTED if signals[:1] == [signal.SIGINT] or status == INTERRUPTED else PREEMPTED
            if not status and not _is_finished(plans[seed].run_dir, plans[seed].config.total_steps):
                warn(f"seed {seed} is not finished: an environment, or something that it uses, has ended the process")
                status = FAILED
            if status:
                warn(f"seed {seed} failed; the seeds behind it were not started")
                return status if status > 0 else 128 - status
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
    info(f"finished: {len(lines)} seeds in {plans[seed].run_dir.parent}")
    return 0


def _is_finished(place: Path, total_steps: int) -> bool:
    """Whether a run that ended with status 0 has come to its end: an environment can end a process with any status."""
    from sheeplike.run.layout import checkpoint_steps

    return checkpoint_steps(place)[-1:] >= [total_steps]


def _tied_to_this_process() -> Callable[[], None] | None:
    """What a child process does first, to be asked to stop when this one ends in whatever way.

    Linux alone knows that. Elsewhere a run that has lost its parent goes on, and its lock names it.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended already
            os._exit(PREEMPTED)

    return tie


def _seeds(asked: int | tuple[int, ...], first: int, given: bool) -> list[int]:
    """What ``seeds=`` means: so many, counted from ``seed``, or those in a list."""
    if isinstance(asked, int):
        if not 1 <= asked <= 1000:
            raise InvalidOption(
                "seeds", asked, "how many, counted from seed=, or a list of different ones", min(max(asked, 1), 1000)
            )
        return list(range(first, first + asked))
    if given:
        raise CommandError(f"seeds={_typed(asked)} and seed={first}: expected one of them")
    if not asked or len(set(asked)) < len(asked):
        different = list(dict.fromkeys(asked)) or 3
        raise InvalidOption("seeds", asked, "how many, counted from seed=, or a list of different ones", different)
    return list(asked)


def _typed(seeds: int | tuple[int, ...]) -> str:
    return str(seeds) if isinstance(seeds, int) else f"[{','.join(map(str, seeds))}]"
