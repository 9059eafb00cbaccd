"""``seeds=``: one run after another, each in its own process, which frees all memory at its end."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys

from sheeplike.commands import Request
from sheeplike.config.compose import load, start_of
from sheeplike.config.sources import Sources
from sheeplike.options import CommandError, InvalidOption
from sheeplike.run.run_dir import lock, plan
from sheeplike.run.signals import INTERRUPTED, PREEMPTED, SIGNALS
from sheeplike.terminal import info, warn


def main(request: Request) -> int:
    """Train once per seed. The same command, given again, skips finished runs and resumes a stopped one.

    Returns:
        The exit status: 0, or that of the run that was stopped or failed; later seeds are not started.

    Raises:
        CommandError: one of the runs can neither begin nor go on; none was started.
    """
    start, overrides = start_of(request.arguments)
    if start.resume not in (None, "auto"):
        raise CommandError("seeds= and resume=: expected one of them; to go on, give the first command again")
    config = load(overrides, Sources(request.config_dirs)).config
    keys = {argument.partition("=")[0] for argument in overrides}
    # A dry run replaces the one before instead of resuming it.
    resume = ["resume=auto"] if start.resume == "auto" or not config.dry_run else []
    lines = {}
    for seed in list_seeds(start.seeds, config.seed, given="seed" in keys):
        place = [f"run_dir={config.run_dir}/seed_{seed}"] if "run_dir" in keys else []
        if config.checkpoint.mirror:
            place.append(f"checkpoint.mirror={config.checkpoint.mirror}/seed_{seed}")
        lines[seed] = [*overrides, f"seed={seed}", *place, *resume]
    plans = {seed: plan(line, request.config_dirs) for seed, line in lines.items()}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise CommandError("seeds=: expected one run for each torchrun; nearest: seed=<number>")
    if len({planned.run_dir for planned in plans.values()}) < len(plans):
        raise CommandError(
            f"run_dir={config.run_dir} comes from a config and would be shared by all seeds: expected run_dir=<parent> "
            "on the command line"
        )
    for planned in plans.values():
        if planned.resume:
            lock(planned.run_dir).close()  # refuses a run that is going on
    flags = [part for directory in request.config_dirs for part in ("--config-dir", directory)]
    for number, (seed, line) in enumerate(lines.items(), 1):
        info(f"seed {seed} ({number} of {len(lines)}): {plans[seed].run_dir}")
        status = call([sys.executable, "-m", "sheeplike", "train", *flags, *line])
        if status in (INTERRUPTED, PREEMPTED):
            again = shlex.join(["python", "-m", "sheeplike", *flags, *request.arguments])
            info(f"stopped at seed {seed} ({number} of {len(lines)}); resume all that is left: {again}")
        elif status:
            warn(f"seed {seed} failed; the seeds behind it were not started")
        if status:
            return status if status > 0 else 128 - status
    parent = plans[seed].run_dir.parent
    info(f"finished: {len(lines)} seeds in {parent}")
    if config.eval.every is not None and config.eval.every <= config.total_steps:  # it compares evaluations
        info(f"next: python -m sheeplike compare {shlex.quote(str(parent))}")
    return 0


def call(command: list[str]) -> int:
    """Run a process to its end and pass signals on to it; returns its status.

    A signal counts too if it comes before the process listens, or when it has finished.
    """
    received: list[int] = []
    children: list[subprocess.Popen] = []

    def forward(signum: int, frame: object) -> None:
        # A terminal sends Ctrl-C to the child too, which takes both for one request.
        received.append(signum)
        for child in children:
            child.send_signal(signum)

    heard = [signum for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]  # nohup ignores one
    before = {signum: signal.signal(signum, forward) for signum in heard}
    try:
        children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        if received:  # before there was a child
            children[0].send_signal(received[-1])
        status = children[0].wait()
        if received and status <= 0:
            return INTERRUPTED if received[0] == signal.SIGINT else PREEMPTED
        return status
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def list_seeds(asked: int | tuple[int, ...] | None, first: int, *, given: bool) -> list[int]:
    """Return the seeds that ``seeds=`` means: so many, counted from ``seed``, or those in a list.

    Args:
        given: ``seed=`` is on the command line too.
    """
    expected = "how many, counted from seed=, or a list of different ones"
    if isinstance(asked, int):
        if not 1 <= asked <= 1000:
            raise InvalidOption("seeds", asked, expected, min(max(asked, 1), 1000))
        return list(range(first, first + asked))
    if given and asked:
        raise CommandError(f"seeds=[{','.join(map(str, asked))}] and seed={first}: expected one of them")
    if not asked or len(set(asked)) < len(asked):
        raise InvalidOption("seeds", asked, expected, list(dict.fromkeys(asked or ())) or 3)
    return list(asked)
