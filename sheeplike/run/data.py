"""Recorded episodes of a run: read once, checked, and handed to the agent before its first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from gymnasium.vector import VectorEnv

from sheeplike.agents.agent import Agent, Step
from sheeplike.config.errors import expand
from sheeplike.config.schema import Config, Data
from sheeplike.data.episodes import Episode, deal, fit
from sheeplike.data.reading import control_rate, guess_format, read
from sheeplike.monitor.progress import phase
from sheeplike.options import CommandError
from sheeplike.terminal import info

COLUMNS = 16  # most pieces that the stream of all episodes is cut into; latents are inferred in all of them at once


def check(asked: Data) -> str:
    """Return the layout of the files; CommandError if there are none."""
    path = expand(asked.path)
    if not path.exists():
        raise CommandError(f"data.path={asked.path}: does not exist; expected recorded episodes")
    return asked.format or guess_format(path)


def load(config: Config, agent: Agent, envs: VectorEnv, *, resumed: bool) -> None:
    """Give the agent the episodes that ``config.data`` asks for; a resumed run has those of its replay already."""
    asked = config.data
    if asked.path is None:
        return
    share = 1.0 if config.offline else asked.fraction
    if resumed and share is None and not asked.held_out:
        return
    with phase("reading recorded episodes"):
        learnt, held_out = _split(_read(asked, agent, envs), asked.held_out)
    if not learnt or (asked.held_out and not held_out):
        raise CommandError(f"data.path={asked.path}: holds too few episodes for data.held_out")
    total, sequence = sum(map(len, learnt)), config.agent.batch_length + 2  # a step before it, and one beyond
    returns = [episode.total for episode in learnt + held_out]
    mean = sum(returns) / len(returns)
    apart = f", {len(held_out)} held out" if held_out else ""
    info(f"data: {len(learnt)} episodes, {total:,} steps{apart}; return {mean:.4g} on average")
    with phase("storing recorded episodes"):
        if held_out:
            agent.hold_out(*_steps(asked, held_out, COLUMNS, sequence, envs.device))
        if share is not None:
            agent.add_recorded(*_steps(asked, learnt, COLUMNS, sequence, envs.device), share)
        elif not resumed:
            agent.add_recorded(*_steps(asked, learnt, envs.num_envs, 1, envs.device), None)


def _read(asked: Data, agent: Agent, envs: VectorEnv) -> Iterator[Episode]:
    """Yield the episodes as the agent needs them."""
    path, layout = expand(asked.path), check(asked)
    rate, own = control_rate(path, layout), envs.metadata["render_fps"]
    if rate is not None and abs(rate - own) > 0.01 * own:
        raise CommandError(f"data.path={path}: {rate:g} steps per second; expected {own:g}, as the environment has")
    spaces = {key: envs.single_observation_space[key] for key in agent.observed}
    for episode in islice(read(path, layout), asked.episodes):
        yield fit(episode, spaces, envs.single_action_space, asked.keys)


def _split(episodes: Iterator[Episode], held_out: float) -> tuple[list[Episode], list[Episode]]:
    """Return the episodes to learn from, and those held out, which are spread evenly over all."""
    parts: tuple[list[Episode], list[Episode]] = [], []
    for number, episode in enumerate(episodes):
        parts[int((number + 1) * held_out) > int(number * held_out)].append(episode)
    return parts


def _steps(
    asked: Data, episodes: Sequence[Episode], columns: int, sequence: int, device: torch.device
) -> tuple[Iterator[Step], int]:
    """Return the steps of at most ``columns`` worlds that are at least ``sequence`` steps long, and their number."""
    total = sum(map(len, episodes))
    if total < sequence:
        raise CommandError(f"data.path={asked.path}: {total} steps; expected at least {sequence}, one sequence")
    columns = min(columns, total // sequence)

    def steps() -> Iterator[Step]:
        for one in deal(episodes, columns):
            obs = {key: torch.from_numpy(value).to(device) for key, value in one.pop("obs").items()}
            yield Step(obs, **{key: torch.from_numpy(value).to(device) for key, value in one.items()})

    return steps(), columns
