"""Record episodes of a policy, frames included, for others or to learn from.

``python -m sheeplike record run=<run_dir> to=<directory> [key=value …]``; the run may also be an export or a demo.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import expand, require_writable
from sheeplike.options import CommandError, explain_keys, keys_of
from sheeplike.terminal import echo, info
from sheeplike.trained.playing import TrainedOptions, open_trained, rebuild


class RecordOptions(TrainedOptions):
    """Keys of this command."""

    to: str | None = Field(None, description="directory of the recording; an existing one of the same task goes on")
    seed: int = Field(100, ge=0, le=2**15 - 1, description="random seed; 0: the worlds of a run's evaluations")
    episodes: int = Field(100, ge=1, le=2**20, description="episodes that the recording is to have in all")
    format: Literal["npz", "minari", "lerobot"] = Field(
        "npz", description="npz: a file per episode; or a dataset of minari or of lerobot"
    )
    policy: str = Field(
        "trained", description="trained; random; or <module>:<function>, called with observations and is_first (N,)"
    )
    sample: bool | None = Field(None, description="sample the policy's actions or take its mode; null: as the run does")
    randomize: bool = Field(True, description="true: with the run's randomization; false: without it")


def main(request: Request) -> None:
    """Play and record."""
    if request.help:
        echo("python -m sheeplike record run=<run_dir> to=<directory> [key=value ...]", "")
        echo(explain_keys(keys_of(RecordOptions)))
        return
    asked = load_options(RecordOptions, request.about_run())
    if asked.to is None:
        raise CommandError("to= is missing: expected the directory of the recording; for example to=demos")
    run_dir, config, asked = open_trained(asked, "record", None)
    place = expand(asked.to)
    require_writable("to", place.parent)
    info("loading torch and JAX")
    from sheeplike.data.writing import Recording
    from sheeplike.trained.recording import facts_of, find_policy, record

    _, networks, envs = rebuild(run_dir, config, asked, randomize=asked.randomize)
    policy = find_policy(asked.policy, networks, envs, sample=(config.eval if asked.sample is None else asked).sample)
    spaces = {**envs.single_observation_space.spaces, "action": envs.single_action_space}
    played = config if asked.randomize else config.replace(randomization={})
    writer = Recording(place, facts_of(played, envs), asked.format, spaces)
    try:
        returns, successes = record(policy, envs, writer, episodes=asked.episodes, seed=asked.seed, name=asked.policy)
    finally:
        envs.close()
    writer.finish()
    outcome = f"; return {sum(returns) / len(returns):.4g} on average" if returns else ""
    outcome += f", {successes} of {len(returns)} succeeded" if returns and successes is not None else ""
    echo(f"saved: {place}: {writer.written} episodes; new: {len(returns)}{outcome}")
