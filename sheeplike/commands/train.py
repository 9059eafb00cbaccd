"""``python -m sheeplike [train] exp=… env=… [key=value …]``, with ``seeds=3`` if you like, or ``resume=<run_dir>``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sheeplike.commands import cli
from sheeplike.commands.machine import check_accelerator
from sheeplike.commands.sources import Sources

INTERRUPTED = 130  # the exit status of a run that Ctrl-C stopped, as shells have it


@contextmanager
def stops_at_once() -> Iterator[None]:
    """Ctrl-C ends the process: for the start of a run, when there is nothing to save yet.

    An exception would not do: one that is raised in a callback of JAX is printed and ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    if before != signal.default_int_handler:  # a background job, or a test, has a handler of its own
        yield
        return
    signal.signal(signal.SIGINT, lambda signum, frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main(arguments: list[str]) -> None:
    """Check the request as far as that is possible without torch and JAX, then train.

    Raises:
        CommandError: the request cannot be met; nothing was created.
        SystemExit: status 130 after Ctrl-C, once the run is saved.
    """
    request = cli.parse(arguments)
    sources = Sources(request.config_dirs)
    if request.help:
        print(f"{cli.overview(sources)}\n\nkeys\n{cli.keys()}")
        return
    from sheeplike.commands import run_directory, series  # Hydra, which help does without
    from sheeplike.commands.config import load, to_yaml

    if any(override.startswith("seeds=") for override in request.overrides):
        series.run(request.overrides, request.config_dirs, print_config=request.print_config)
        return
    resumed = [override for override in request.overrides if override.startswith("resume=")]
    if resumed:
        run_dir = Path(resumed[-1].partition("=")[2].strip("'\"")).expanduser()
        others = [override for override in request.overrides if override not in resumed]
        config = run_directory.resume(run_dir, others)
    else:
        config = load(request.overrides, sources)
    if request.print_config:
        print(to_yaml(config), end="")
        return
    check_accelerator(config)
    if not resumed:
        run_dir = run_directory.check(config)
    print("loading torch and JAX", flush=True)
    with stops_at_once():
        from sheeplike.commands.training import run  # torch and JAX: from here on it takes seconds
    finished = run(config, run_dir, resume=bool(resumed))
    if not finished:
        print(f"saved; go on with: python -m sheeplike resume={run_dir}")
        raise SystemExit(INTERRUPTED)
    print(f"finished: {run_dir}")
