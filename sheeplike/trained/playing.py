"""Options and worlds of the commands that let a trained agent play, from a run, an export or a demo.

This module imports neither torch nor JAX, so that invalid requests are refused at once.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field

from sheeplike import host
from sheeplike.config.compose import load_saved
from sheeplike.config.errors import as_command_errors, require_writable
from sheeplike.config.schema import Config
from sheeplike.files import find_unusual
from sheeplike.options import CommandError, InvalidOption, Options
from sheeplike.run.layout import choose_checkpoint
from sheeplike.run.run_dir import open_run
from sheeplike.terminal import warn
from sheeplike.trained import exported, hub
from sheeplike.trained.exported import is_export

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

    from sheeplike.agents.policy import PolicyNetworks

T = TypeVar("T", bound="AgentOptions")


class AgentOptions(Options):
    """Keys that name a trained agent, and where it runs."""

    run: str | None = Field(
        None, description="the directory of a run or an export; demo:<name>; or hf://<owner>/<name>[@<revision>]"
    )
    checkpoint: str = Field(
        "last", description="last; best: the one still saved with the highest eval/return_mean; or its policy steps"
    )
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = Field(
        "auto", description="auto: what the run was trained on, if this machine has it"
    )


class TrainedOptions(AgentOptions):
    """Keys of every command that plays episodes; each adds its own, and the default of ``episodes``."""

    episodes: int
    num_envs: int | None = Field(
        None, ge=1, le=2**16, description="worlds in parallel; null: one per episode, at most as many as the run has"
    )
    seed: int = Field(0, ge=0, le=2**15 - 1, description="random seed; eval with 0 repeats the evaluations of training")


def open_trained(asked: T, command: str, results: str | None, *, world_model: bool = False) -> tuple[Path, Config, T]:
    """Find a run, an export or a demo, and check all that can be checked before torch and JAX are loaded.

    Args:
        results: directory of the command's results in that of the run; None: they go elsewhere.
        world_model: refuse agents without one.

    Returns:
        The directory, its configuration, and the request with ``num_envs`` and ``accelerator`` filled in.
    """
    if asked.run is not None and is_export(run_dir := exported.find(asked.run)):
        exported.refuse_checkpoint(asked.checkpoint)
        if results and (found := find_unusual(run_dir, results)):
            raise CommandError(f"run={run_dir}: {found}: expected a directory for the results")
        config = load_saved(exported.config_of(run_dir)).config
    else:
        run_dir, config = open_run(asked.run, command)
        choose_checkpoint(run_dir, asked.checkpoint)
    if isinstance(asked, TrainedOptions):
        if asked.num_envs is not None and asked.num_envs > asked.episodes:
            raise InvalidOption("num_envs", asked.num_envs, f"at most episodes={asked.episodes}", asked.episodes)
        asked = asked.replace(num_envs=asked.num_envs or min(asked.episodes, config.env.num_envs))
    if results:
        require_writable("run", results_of(run_dir, results))
    if world_model and not config.agent.has_world_model:
        raise CommandError(f"run={asked.run}: {config.agent.name} has no world model: expected a run of dreamer_v3")
    return run_dir, config, asked.replace(accelerator=choose_accelerator(asked.accelerator, config))


def rebuild(
    run_dir: Path, config: Config, asked: TrainedOptions, **options: bool
) -> tuple[int, PolicyNetworks, VectorEnv]:
    """Return the policy step at which an agent was saved, its networks, and worlds that it can play in.

    Args:
        asked: as :func:`open_trained` returns it.
        options: of :func:`~sheeplike.run.build.build_envs`.
    """
    import torch

    from sheeplike.config.saved import changes
    from sheeplike.run.build import build_envs, launch
    from sheeplike.run.snapshot import forbidden_changes

    # Read at once: a run in progress removes its old checkpoints.
    meta, weights = exported.read(run_dir, asked.checkpoint)
    if "config" in meta and (edited := forbidden_changes(changes(meta["config"], config))):
        warn(edited)
    fabric = launch(config.replace(fabric=config.fabric.replace(accelerator=asked.accelerator)))
    with as_command_errors(ValueError, TypeError, MemoryError, torch.OutOfMemoryError):
        made = build_envs(config, asked.num_envs, fabric.device, **options)
        spaces = made.single_observation_space, made.single_action_space
        runtime = {"device": fabric.device, "autocast": fabric.autocast}
        return meta["step"], exported.build(run_dir, weights, *spaces, config.agent, **runtime), made


def name_results(step: int, asked: TrainedOptions, config: Config, *marks: str) -> str:
    """Return the name of the directory of results; ``marks`` tell options of the command that are not the defaults."""
    seed = f"_seed_{asked.seed}" if asked.seed else ""
    device = f"_{asked.accelerator}" if asked.accelerator != config.fabric.accelerator else ""
    name = f"step_{step:012d}_{asked.episodes}_episodes_{asked.num_envs}_worlds"
    return "".join([name, seed, *marks, device])


def results_of(run_dir: Path, results: str) -> Path:
    """Return the directory of a command's results, never in the installed package or in the cache of the hub."""
    if run_dir.resolve().parent == exported.DEMOS.resolve():
        return Path("logs/demo", run_dir.resolve().name, results)
    name = hub.cached(run_dir)
    return (Path("logs/hub", name) if name else run_dir) / results


def choose_accelerator(asked: str, config: Config) -> str:
    """Return ``cpu`` or ``cuda``; ``auto`` is what the run was trained on, if this machine has it."""
    wanted = config.fabric.accelerator if asked == "auto" else asked
    problem = None if wanted == "cpu" else host.gpu_problem()
    if problem and asked != "auto":
        raise InvalidOption("accelerator", asked, f"a GPU, but {problem}", "cpu")
    if problem:
        warn(f"on the CPU although the run was trained on a GPU: {problem}")
    return "cpu" if wanted == "cpu" or problem else "cuda"


def finite(value: Any) -> Any:
    """Replace infinite numbers and NaN, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
