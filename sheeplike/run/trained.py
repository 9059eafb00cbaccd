"""A trained agent and the worlds that it was trained in, for commands that let it play: of a run, an export or a demo.

Importing this module imports neither torch nor JAX: a request that cannot be met is refused before.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sheeplike import host
from sheeplike.config.compose import load_saved
from sheeplike.config.errors import expand
from sheeplike.config.schema import Config
from sheeplike.files import find_unusual
from sheeplike.options import CommandError, InvalidOption
from sheeplike.run import exported
from sheeplike.run.exported import is_export
from sheeplike.run.layout import CHECKPOINTS, CONFIG_FILE
from sheeplike.run.run_dir import open_run
from sheeplike.terminal import warn

if TYPE_CHECKING:
    from sheeplike.agents.agent import Agent


def open_trained(run: str | None, checkpoint: str, command: str, results: str) -> tuple[Path, Config]:
    """The directory of a run, an export or a demo, and its configuration.

    Args:
        run: of ``run=``.
        results: the directory in it where the command keeps what it finds.

    Raises:
        CommandError: it is none of them.
    """
    if run is not None and run.startswith(exported.DEMO):
        run_dir = exported.demo(run.removeprefix(exported.DEMO))
    elif run is None or not is_export(run_dir := expand(run)):
        return open_run(run, command)
    if checkpoint != "last":
        raise InvalidOption("checkpoint", checkpoint, "last: an export holds one agent", "last")
    if found := find_unusual(run_dir, results):
        raise CommandError(f"run={run_dir}: {found}: expected a directory for the results")
    # A download may be a link into a cache of downloads.
    return run_dir, load_saved(Path(os.path.realpath(run_dir / CONFIG_FILE))).config


def results_of(run_dir: Path, results: str) -> Path:
    """Where a command keeps what it finds about ``run_dir``; nothing is written where the program is installed."""
    is_demo = run_dir.resolve().parent == exported.DEMOS.resolve()
    return (Path("logs/demo", run_dir.resolve().name) if is_demo else run_dir) / results


def read_weights(run_dir: Path, path: Path | None, config: Config) -> tuple[int, Callable[[Agent], None]]:
    """The policy step at which an agent was saved, and what gives its weights to one that was made anew.

    Args:
        path: the checkpoint; None: the newest that is whole, or an export.
        config: of the run, as it is saved.
    """
    from sheeplike import checkpoint
    from sheeplike.run.build import changes_since, edits

    if is_export(run_dir):
        model, weights = exported.read(run_dir)
        problem = f"{run_dir}: the weights are not of the agent and the environments in its config.yaml"
        return model.step, lambda agent: exported.load_weights(agent, weights, problem)
    only = ("agent",)
    meta, parts = checkpoint.load(path, only=only) if path else checkpoint.load_latest(run_dir / CHECKPOINTS, only=only)
    if edited := edits(changes_since(meta, config)):
        warn(edited)

    def give_weights(agent: Agent) -> None:
        agent.load_state_dict(parts["agent"])
        checkpoint.check_finite("agent", agent.state_dict(replay=False))

    return meta["step"], give_weights


def choose_accelerator(asked: str, config: Config) -> str:
    """``cpu`` or ``cuda``, where ``auto`` asks for what the run was trained on, if it is here.

    Raises:
        InvalidOption: there is no GPU.
    """
    wanted = config.fabric.accelerator if asked == "auto" else asked
    problem = None if wanted == "cpu" else host.gpu_problem()
    if problem and asked != "auto":
        raise InvalidOption("accelerator", asked, f"a GPU, but {problem}", "cpu")
    if problem:
        warn(f"on the CPU although the run was trained on a GPU: {problem}")
    return "cpu" if wanted == "cpu" or problem else "cuda"


def finite(value: Any) -> Any:
    """``value`` with null in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
