"""Recorded episodes of a run: read once, checked, and handed to the agent before its first step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import torch
from gymnasium.vector import VectorEnv
from torch.utils import _pytree as pytree

from sheeplike.agents.agent import Agent, Step
from sheeplike.config.errors import UnknownName, expand
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
    share = 1.0 if config.offline else asked.fraction
    if asked.path is None or (resumed and share is None and not asked.held_out):
        return
    path, layout = expand(asked.path), check(asked)
    rate, own = control_rate(path, layout), envs.metadata["render_fps"]
    if rate is not None and not abs(rate - own) <= 0.01 * own:
        repeat = max(round(config.env.action_repeat * own / rate), 1)
        nearest = f"; nearest: env.action_repeat={repeat}" if repeat != config.env.action_repeat else ""
        raise CommandError(f"data.path={path}: {rate:g} steps per second; expected {own:g}, as here{nearest}")
    spaces = {key: envs.single_observation_space[key] for key in agent.observed}
    if unknown := sorted(asked.keys.keys() - spaces.keys()):
        raise UnknownName("data.keys: observation", unknown[0], spaces)
    learnt: list[Episode] = []
    held_out: list[Episode] = []  # they are spread evenly over all
    with phase("reading recorded episodes"):
        for number, episode in enumerate(islice(read(path, layout), asked.episodes)):
            kept_apart = int((number + 1) * asked.held_out) > int(number * asked.held_out)
            (held_out if kept_apart else learnt).append(fit(episode, spaces, envs.single_action_space, asked.keys))
    if not learnt or (asked.held_out and not held_out):
        expected = f"expected at least {math.ceil(1 / (asked.held_out or 1))}"
        raise CommandError(f"data.path={asked.path}: {len(learnt)} episodes; {expected}")
    mean = sum(episode.total for episode in learnt + held_out) / len(learnt + held_out)
    apart = f", {len(held_out)} held out" if held_out else ""
    info(f"data: {len(learnt)} episodes, {sum(map(len, learnt)):,} steps{apart}; return {mean:.4g} on average")

    needed, size = -(-sum(map(len, learnt)) // envs.num_envs) * envs.num_envs, config.agent.replay_size
    if share is None and needed > size:
        expected = f"expected at most agent.replay_size={size}; nearest: agent.replay_size={needed}"
        raise CommandError(f"data.path={asked.path}: {needed} steps; {expected}")

    if share is None and not resumed and needed < config.agent.batch_length * envs.num_envs:
        pieces = f"{needed // envs.num_envs} steps for each of env.num_envs={envs.num_envs} worlds"
        expected = f"expected at least {config.agent.batch_length}, one sequence; nearest: data.fraction=0.25"
        raise CommandError(f"data.path={asked.path}: {pieces}; {expected}")

    def steps(episodes: list[Episode], columns: int, shortest: int) -> tuple[Iterator[Step], int, int]:
        """Return ``shortest`` or more steps of at most ``columns`` worlds, and the numbers of both."""
        total = sum(map(len, episodes))
        if total < shortest:
            raise CommandError(f"data.path={asked.path}: {total} steps; expected at least {shortest}, one sequence")
        columns = min(columns, total // shortest)
        found = (pytree.tree_map(lambda x: torch.from_numpy(x).to(device), one) for one in deal(episodes, columns))
        return (Step(**one) for one in found), columns, -(-total // columns)

    sequence, device = config.agent.batch_length + 2, envs.device  # one sequence, and the write head
    with phase("storing recorded episodes"):
        if held_out:
            agent.hold_out(*steps(held_out, COLUMNS, sequence))
        if share is not None:
            agent.add_recorded(*steps(learnt, COLUMNS, sequence), share)
        elif not resumed:
            agent.add_recorded(*steps(learnt, envs.num_envs, 1), None)
