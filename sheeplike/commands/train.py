"""``python -m sheeplike [train] exp=… env=… [key=value …]``, with ``seeds=3`` if you like, or ``resume=<run_dir>``."""

from __future__ import annotations

from sheeplike.commands import cli
from sheeplike.commands.errors import CommandError
from sheeplike.commands.machine import check_accelerator
from sheeplike.commands.preemption import stops_at_once
from sheeplike.commands.sources import Sources
from sheeplike.monitor.progress import say


def main(arguments: list[str]) -> None:
    """Check the request as far as that is possible without torch and JAX, then train.

    Raises:
        CommandError: the request cannot be met; nothing was created.
        SystemExit: once the run is saved, status 130 after Ctrl-C and 75 after another signal.
    """
    request = cli.parse(arguments)
    sources = Sources(request.config_dirs)
    if request.help:
        print(f"{cli.overview(sources)}\n\nkeys\n{cli.keys(request.overrides)}")
        return
    from sheeplike.commands import run_directory, series  # Hydra, which help does without
    from sheeplike.commands.config import load, to_yaml

    if any(override.startswith("seeds=") for override in request.overrides):
        series.run(request.overrides, request.config_dirs, print_config=request.print_config)
        return
    if request.print_config and not any(override.startswith("resume=") for override in request.overrides):
        print(to_yaml(load(request.overrides, sources)), end="")
        return
    planned = run_directory.plan(request.overrides, sources)
    if request.print_config:
        print(to_yaml(planned.config), end="")
        return
    check_accelerator(planned.config)
    run_dir = planned.run_dir
    if planned.finished:
        steps = run_directory.checkpoint_steps(run_dir)[-1]
        if "resume=auto" in request.overrides:
            say(f"finished before: {run_dir}, at policy step {steps:,}")
            return
        raise CommandError(f"resume={run_dir}: finished at {steps} policy steps; expected a larger total_steps=")
    say("loading torch and JAX")
    with stops_at_once():
        from sheeplike.commands.experiment import run  # torch and JAX: from here on it takes seconds
    status = run(planned)
    if status:
        raise SystemExit(status)
    say(f"finished: {run_dir}")
