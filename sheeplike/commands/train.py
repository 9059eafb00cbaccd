"""Train an agent; the default command.

``python -m sheeplike [train] exp=… env=… [key=value …]``, with ``seeds=3`` if you like, or ``resume=<run_dir>``.
"""

from __future__ import annotations

import os
import shlex

from sheeplike import host, terminal
from sheeplike.commands import Request
from sheeplike.config.compose import explain, load, load_saved, start_of
from sheeplike.config.errors import expand
from sheeplike.config.sources import Sources
from sheeplike.monitor.progress import phase
from sheeplike.run.layout import config_file
from sheeplike.run.run_dir import Plan, plan
from sheeplike.terminal import echo, info


def main(request: Request) -> int:
    """Train until ``total_steps`` or a signal, and save the run, or print its values; CommandError if it cannot begin.

    Returns:
        The exit status: 0, or once the run is saved 130 after Ctrl-C and 75 after another signal.
    """
    host.choose_gpu()  # before anything asks the driver
    start, overrides = start_of(request.arguments)
    if start.show:
        saved = None if start.resume in (None, "auto") else config_file(expand(start.resume), "resume")
        echo(explain(load_saved(saved, overrides) if saved else load(overrides, Sources(request.config_dirs))))
        return 0
    # Compose and check the run: what needs neither torch nor JAX is refused here.
    return run(plan(request.arguments, request.config_dirs))


def run(planned: Plan) -> int:
    """Build, learn, and save; returns the exit status."""
    terminal.rank = host.rank_here() if planned.config.ranks > 1 else 0
    with phase("loading torch and JAX", after=0.0):
        from sheeplike.run.experiment import Experiment, Finished, Halted, Unsaved
    try:
        # Build device, worlds and agent; restore a resumed run.
        with Experiment(planned) as experiment:
            # Loop: act in all worlds, store the step, make the updates that are due; log, evaluate, save at intervals.
            experiment.iterate()
            # Leaving the block saves the run and closes everything.
    except (Finished, Halted, Unsaved) as error:
        if terminal.rank:
            return 0  # every rank ends with this error, and the first prints it
        if not (planned.auto and isinstance(error, Finished)):
            raise
        info(f"finished before: {planned.run_dir}")
        return 0
    if experiment.ranks.rank:
        # The first rank tells the rest. Fabric ends all ranks when one fails; torchrun starts those that failed again.
        return experiment.status if "TORCHELASTIC_RUN_ID" in os.environ else 0
    if not experiment.status:
        predicted = getattr(experiment.agent.networks, "predicted", None)
        inside = ("dream" if predicted.images else "", "analyze" if predicted.spaces else "") if predicted else ()
        looks = filter(None, ("eval", *inside))
        info(f"finished: {planned.run_dir}")
        info(*(f"next: python -m sheeplike {shlex.join([command, f'run={planned.run_dir}'])}" for command in looks))
    return experiment.status
