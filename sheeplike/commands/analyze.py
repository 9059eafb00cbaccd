"""Take the world model of a run apart: how far it sees, what it expects, and where it keeps what.

``python -m sheeplike analyze run=<run_dir> [key=value …]`` plays episodes that the model was not trained on, with its
own policy and with random actions, and writes a page, its numbers and TensorBoard's curves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from sheeplike import envs
from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import as_command_errors, require_writable
from sheeplike.config.schema import Config
from sheeplike.options import CommandError, InvalidOption, Options, explain_keys, keys_of
from sheeplike.run import exported
from sheeplike.run.exported import is_export
from sheeplike.run.layout import ANALYSES, choose_checkpoint
from sheeplike.run.trained import choose_accelerator, open_trained, read_weights, results_of
from sheeplike.terminal import echo, info


class AnalyzeOptions(Options):
    """Keys of this command."""

    run: str | None = Field(None, description="the directory of the run, or of an export; or demo:<name>")
    checkpoint: str = Field(
        "last", description="last; best: of those kept, the one with the highest eval/return_mean; or its policy steps"
    )
    episodes: int = Field(
        50, ge=4, le=2**12, description="episodes to play with the policy, and as many with random actions"
    )
    num_envs: int | None = Field(
        None, ge=1, le=2**12, description="worlds side by side; null: one per episode, at most as many as the run has"
    )
    seed: int = Field(0, ge=0, le=2**15 - 1, description="of worlds and actions")
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = Field(
        "auto", description="auto: what the run was trained on, if it is here"
    )


def main(request: Request) -> None:
    """Analyse, print the main numbers and save all of them in ``<run_dir>/analyze/``.

    Raises:
        CommandError: there is no world model to analyse, or not in this way; nothing was written.
    """
    if request.help:
        echo("python -m sheeplike analyze run=<run_dir> [key=value ...]", "", explain_keys(keys_of(AnalyzeOptions)), "")
        echo("Writes <run_dir>/analyze/step_<steps>/: analysis.html, analysis.json and TensorBoard's events;")
        echo(f"of a demo below logs/demo/. A model that comes along: run={exported.DEMO}franka_pick")
        return
    asked = load_options(AnalyzeOptions, request.about_run())
    run_dir, config = open_trained(asked.run, asked.checkpoint, "analyze", ANALYSES)
    if config.agent.name != "dreamer_v3":
        raise CommandError(f"run={asked.run}: {config.agent.name} has no world model: expected a run of dreamer_v3")
    if asked.num_envs is not None and asked.num_envs > asked.episodes:
        raise InvalidOption("num_envs", asked.num_envs, f"at most episodes={asked.episodes}", asked.episodes)
    num_envs = asked.num_envs or min(asked.episodes, config.env.num_envs)
    path = None if is_export(run_dir) else choose_checkpoint(run_dir, asked.checkpoint)
    asked = asked.replace(num_envs=num_envs, accelerator=choose_accelerator(asked.accelerator, config))
    require_writable("run", results_of(run_dir, ANALYSES))
    info("loading torch and JAX")
    analyze_run(run_dir, path, config, asked)


def analyze_run(run_dir: Path, path: Path | None, config: Config, asked: AnalyzeOptions) -> None:
    """Play, take apart, print and save.

    Args:
        path: the checkpoint; None: the newest that is whole, or an export.
        config: of the run.
        asked: ``num_envs`` and ``accelerator`` are filled in.

    Raises:
        CommandError: the checkpoint is damaged, the environments or the agent cannot be built, or the episodes would
            not fit into memory.
    """
    import torch

    from sheeplike import checkpoint
    from sheeplike.analysis.dissect import PROBED, dissect
    from sheeplike.analysis.episodes import check_memory, play
    from sheeplike.analysis.model import TrainedModel
    from sheeplike.analysis.report import summarize, write
    from sheeplike.monitor.progress import banner, phase
    from sheeplike.run.build import build_envs, launch, make_agent, of_this_agent

    saved = config
    config = config.replace(
        fabric=config.fabric.replace(accelerator=asked.accelerator),
        compile="off",  # compiling takes longer than playing
        agent=config.agent.acting_only(config.env.num_envs),
    )
    failures = (ValueError, TypeError, MemoryError, torch.OutOfMemoryError, checkpoint.Corrupt, FileNotFoundError)
    with as_command_errors(*failures):
        # Before anything that takes long: a run that is going on removes its old checkpoints.
        step, give_weights = read_weights(run_dir, path, saved)
        fabric = launch(config)
        made = build_envs(config, asked.num_envs, fabric.device)
        agent = make_agent(config, made, fabric)
    with of_this_agent(run_dir):
        give_weights(agent)
    model = TrainedModel(agent)
    there = made.single_observation_space.spaces
    keys = [key for key in there if key in {*agent.predicted.spaces, PROBED}]
    check_memory(made, keys, asked.episodes)
    played = {}
    for act in ("policy", "random"):
        with phase(f"playing {asked.episodes} episodes: {act}"), as_command_errors(envs.Unusable):
            played[act] = play(agent, made, episodes=asked.episodes, keys=keys, act=act, seed=asked.seed)
    made.close()
    with phase("taking the model apart"):
        found = dissect(model, played, seed=asked.seed)
    about = {"run": asked.run, "env": config.env.task, "step": step, **asked.model_dump(exclude={"run"})}
    banner(f"policy step {step:,} of {asked.run}", summarize(found.numbers))
    with as_command_errors(OSError):
        files = write(results_of(run_dir, ANALYSES) / f"step_{step:012d}", found, about)
    echo(*(f"saved: {file}" for file in files))
