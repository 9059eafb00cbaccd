"""Analyse the world model of a run: how far and how well it predicts, and what its latent state holds.

``python -m sheeplike analyze run=<run_dir> [key=value …]`` plays episodes that the model was not trained on, with its
own policy and with random actions, and writes a page, its numbers and TensorBoard's curves.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from sheeplike import envs
from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import as_command_errors
from sheeplike.config.schema import Config
from sheeplike.options import CommandError, InvalidOption, explain_keys, keys_of
from sheeplike.run.layout import ANALYSES
from sheeplike.terminal import echo, info
from sheeplike.trained import exported
from sheeplike.trained.card import FEW
from sheeplike.trained.playing import TrainedOptions, name_results, open_trained, rebuild, results_of


class AnalyzeOptions(TrainedOptions):
    """Keys of this command."""

    episodes: int = Field(
        50, ge=4, le=2**12, description="episodes to play with the policy, and as many with random actions"
    )
    trust: bool = Field(
        False,
        description="fork at least 16 worlds beside the dream: other physics and looks, ranking, exploits, alarms",
    )


def main(request: Request) -> None:
    """Analyse, print the main numbers and save all of them below ``<run_dir>/analyze/``."""
    if request.help:
        echo("python -m sheeplike analyze run=<run_dir> [key=value ...]", "", explain_keys(keys_of(AnalyzeOptions)), "")
        echo("Writes analysis.html, analysis.json, TensorBoard's events and the linear probe into a directory below")
        echo("<run_dir>/analyze/, or below logs/demo/ for a demo, logs/hub/ for one of the hub.")
        echo(f"A model comes with the program: run={exported.DEMO}franka_pick")
        return
    asked = load_options(AnalyzeOptions, request.about_run())
    run_dir, config, asked = open_trained(asked, "analyze", ANALYSES, world_model=True)
    if asked.trust and not envs.simulated(config.env.name):
        raise InvalidOption("trust", True, f"false: {config.env.name} is not simulated here", False)
    info("loading torch and JAX")
    analyze_run(run_dir, config, asked)


def analyze_run(run_dir: Path, config: Config, asked: AnalyzeOptions) -> None:
    """Play, analyse, print and save; ``asked`` has ``num_envs`` and ``accelerator``."""
    import torch

    from sheeplike.inspection import trust
    from sheeplike.inspection.dissect import PRIVILEGED_STATE, dissect
    from sheeplike.inspection.episodes import play
    from sheeplike.inspection.model import TrainedModel
    from sheeplike.inspection.report import summarize, write
    from sheeplike.monitor.progress import banner, phase
    from sheeplike.run.build import build_envs

    step, networks, made = rebuild(run_dir, config, asked)
    model = TrainedModel(networks)
    if not model.world.decoder.keys.spaces:
        raise CommandError(f"run={asked.run}: the model predicts nothing: expected agent.targets, or images to decode")
    there = made.single_observation_space.spaces
    keys = [key for key in there if key in {*networks.known.spaces, PRIVILEGED_STATE}]
    played, too_large = {}, (MemoryError, torch.OutOfMemoryError)
    for act in ("policy", "random"):
        with phase(f"playing {asked.episodes} episodes: {act}"), as_command_errors(envs.Unusable, *too_large):
            played[act] = play(networks, made, episodes=asked.episodes, keys=keys, act=act, seed=asked.seed)
    made.close()
    with phase("analysing the model"), as_command_errors(*too_large):
        found = dissect(model, played, positions=made.positions, entries=made.entries, seed=asked.seed)
    if asked.trust:
        added = trust.lines(made.simulator.task.model, model.cameras, config.randomization)
        lines = {**config.randomization, **added}
        forked = build_envs(config.replace(randomization=lines), max(asked.num_envs, FEW), model.device)
        with phase("forking the simulator beside the dream"), as_command_errors(envs.Unusable, *too_large):
            found.numbers["trust"] = trust.measure(model, forked, added, seed=asked.seed)
        forked.close()
    about = {"run": asked.run, "env": config.env.task, "step": step, **asked.model_dump(exclude={"run"})}
    banner(f"policy step {step:,} of {asked.run}", summarize(found.numbers))
    name = name_results(step, asked, config, "_trust" if asked.trust else "")
    with as_command_errors(OSError):
        files = write(results_of(run_dir, ANALYSES) / name, found, about)
    echo(*(f"saved: {file}" for file in files))
