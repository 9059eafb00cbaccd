"""Episodes of a policy, played in many worlds and written as they end."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from sheeplike.agents.agent import Step
from sheeplike.agents.policy import PolicyNetworks
from sheeplike.config.schema import Config
from sheeplike.data.episodes import Episode
from sheeplike.data.writing import Recording
from sheeplike.loop import first_step
from sheeplike.monitor.progress import Progress
from sheeplike.options import CommandError
from sheeplike.run.evaluation import EVALUATION_SEED, MAX_EPISODES


class Policy(Protocol):
    def __call__(self, obs: dict[str, Tensor], is_first: Tensor) -> Tensor:
        """Return actions of ``N`` worlds, as their environment takes them."""


def find_policy(name: str, networks: PolicyNetworks, envs: VectorEnv, *, sample: bool) -> Policy:
    """Return the trained policy, ``random``, or a function named ``<module>:<function>``."""
    if name == "trained":
        player = networks.player(envs.num_envs)
        return lambda obs, is_first: player.act(obs, is_first, sample=sample)
    if name == "random":
        return lambda obs, is_first: _random_actions(envs)
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Tensor] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise CommandError(f"policy={name}: expected trained, random or <module>:<function>; {error}") from None
    return found


def _random_actions(envs: VectorEnv) -> Tensor:
    space, count = envs.single_action_space, envs.num_envs
    choices = getattr(space, "nvec", getattr(space, "n", None))
    if choices is not None:
        drawn = (torch.rand(count, *space.shape) * torch.as_tensor(choices)).long() + torch.as_tensor(space.start)
        return drawn.to(envs.device)
    return (torch.rand(count, *space.shape) * 2 - 1).to(envs.device)


def facts_of(config: Config, envs: VectorEnv) -> dict[str, Any]:
    """Return what is the same for all episodes of a recording."""
    shapes = {key: list(space.shape) for key, space in envs.single_observation_space.items()}
    facts = {"env": config.env.name, "id": config.env.id, "fps": envs.metadata["render_fps"]}
    return facts | {"actions": str(envs.single_action_space), "observations": shapes}


class Collector:
    """Assembler of episodes from the steps of ``N`` worlds.

    Args:
        episodes: episodes to collect; each that was begun is finished, so that short ones are not preferred.
        write: called with each finished episode.
        info: stored with each.
    """

    def __init__(self, episodes: int, write: Callable[[Episode], None], info: dict[str, Any]) -> None:
        self.episodes, self._write, self._info = episodes, write, info
        self.begun = self.ended = 0
        self._open: dict[int, list[tuple[Any, ...]]] = {}

    def add(self, step: Step, info: dict[str, Any]) -> None:
        """Add a step, whose action is chosen, and the ``info`` that came with it."""
        obs = {key: value.cpu().numpy() for key, value in step.obs.items()}
        action, reward = step.action.cpu().numpy(), step.reward.cpu().numpy()
        first, last, terminal = (flag.tolist() for flag in (step.is_first, step.is_last, step.is_terminal))
        for world in range(len(reward)):
            if first[world]:
                self._open.pop(world, None)
                if self.begun < self.episodes:
                    self.begun += 1
                    self._open[world] = []
            if world not in self._open:
                continue
            one = {key: value[world].copy() for key, value in obs.items()}
            self._open[world].append((one, action[world].copy(), 0.0 if first[world] else reward[world]))
            if last[world]:
                rows = self._open.pop(world)
                cut = "restarted" in info and bool(info["restarted"][world])
                facts = self._info | {"cut": cut}
                success = info.get("episode", {}).get("success")
                if success is not None and not torch.isnan(success[world].float()):
                    facts["success"] = bool(success[world] > 0.5)
                observations = {key: np.stack([row[0][key] for row in rows]) for key in one}
                rewards = np.array([row[2] for row in rows], np.float32)
                self.ended += 1
                self._write(
                    Episode(observations, np.stack([row[1] for row in rows]), rewards, terminal[world], info=facts)
                )


def record(
    policy: Policy, envs: VectorEnv, writer: Recording, *, episodes: int, seed: int, name: str
) -> tuple[list[float], int | None]:
    """Play until ``writer`` holds ``episodes``; return the returns of the new ones, and how many of them succeeded."""
    new: list[Episode] = []
    progress = Progress(episodes, initial_steps=writer.written, unit="episodes")

    def write(episode: Episode) -> None:
        writer.add(episode)
        new.append(Episode({}, episode.action, episode.reward, episode.terminal, info=episode.info))

    collector = Collector(episodes - writer.written, write, {"policy": name})
    seed = EVALUATION_SEED + seed * MAX_EPISODES + writer.written  # other worlds than before
    torch.manual_seed(seed)
    if collector.episodes > 0:
        obs, info = envs.reset(seed=seed)
        step = first_step(obs, envs.num_envs)
    try:
        while collector.ended < collector.episodes:
            step.action = policy(step.obs, step.is_first)
            if step.action.is_floating_point():
                step.action = step.action.clamp(-1, 1)  # as the environment takes it
            collector.add(step, info)
            obs, reward, terminated, truncated, info = envs.step(step.action)
            step = step.following(step.action, obs, reward, terminated, truncated)
            progress.update(writer.written, 0)
    finally:
        progress.close()
    known = [episode.info["success"] for episode in new if "success" in episode.info]
    return [episode.total for episode in new], sum(known) if known else None


def open_writer(place: Path, layout: str, facts: dict[str, Any], envs: VectorEnv) -> Recording:
    """Return the writer of a recording in ``layout``."""
    spaces = {**envs.single_observation_space.spaces, "action": envs.single_action_space}
    return Recording(place, facts, layout, spaces)
