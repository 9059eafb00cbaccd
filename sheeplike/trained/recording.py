"""Episodes of a policy, played in many worlds and written as they end."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv
from torch import Tensor

from sheeplike.agents.policy import PolicyNetworks
from sheeplike.config.schema import Config
from sheeplike.data.episodes import Episode
from sheeplike.data.reading import expecting
from sheeplike.data.writing import TAKEN, NpzWriter
from sheeplike.loop import first_step
from sheeplike.monitor.progress import Progress
from sheeplike.options import CommandError
from sheeplike.run.evaluation import EVALUATION_SEED, MAX_EPISODES

Policy = Callable[[dict[str, Tensor], Tensor], Tensor]  # observations and is_first (N,) to actions of the environment


def find_policy(name: str, networks: PolicyNetworks, envs: VectorEnv, *, sample: bool) -> Policy:
    """Return the trained policy, ``random``, or a function named ``<module>:<function>``."""
    if name == "trained":
        player = networks.player(envs.num_envs)
        return lambda obs, is_first: player.act(obs, is_first, sample=sample)
    if name == "random":
        return lambda obs, is_first: torch.as_tensor(envs.action_space.sample(), device=envs.device)
    module, _, function = name.partition(":")
    try:
        act = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise CommandError(f"policy={name}: expected trained, random or <module>:<function>; {error}") from None
    # What it changes in place is not what was seen.
    return lambda obs, is_first: act({key: value.clone() for key, value in obs.items()}, is_first.clone())


def _checked(actions: Any, envs: VectorEnv, name: str) -> Tensor:
    """Return actions as the environment takes them; CommandError for a function that returns no such ones."""
    with expecting(f"policy={name}", f"actions of {envs.action_space}"):
        actions = torch.as_tensor(actions, device=envs.device).detach()
        actions = actions.float().clamp(-1, 1) if isinstance(envs.single_action_space, Box) else actions.long()
        if actions.cpu().numpy() not in envs.action_space:  # nor is NaN
            raise ValueError(f"found {tuple(actions.shape)}, {actions[:1].tolist()} for the first world")
        return actions


def facts_of(config: Config, envs: VectorEnv) -> dict[str, Any]:
    """Return what is the same for all episodes of a recording."""
    shapes = {key: list(space.shape) for key, space in envs.single_observation_space.items()}
    if taken := sorted(TAKEN & shapes.keys()):
        raise CommandError(f"observation {taken[0]}: a recording stores something else by this name; rename it")
    facts = {"env": config.env.name, "id": config.env.id, "options": dict(config.env.options)}
    facts |= {"randomization": config.randomization, "fps": envs.metadata["render_fps"]}
    return facts | {"actions": str(envs.single_action_space), "observations": shapes}


def record(
    policy: Policy, envs: VectorEnv, writer: NpzWriter, *, episodes: int, seed: int, name: str
) -> tuple[list[float], int | None]:
    """Play until ``writer`` holds ``episodes``; return the returns of the new ones, and how many of them succeeded.

    Each episode that was begun is finished, so that short ones are not preferred.
    """
    missing, begun = episodes - writer.written, 0
    returns: list[float] = []
    successes: list[bool] = []
    playing: dict[int, list[dict[str, np.ndarray]]] = {}  # world to its steps
    progress = Progress(episodes, initial_steps=writer.written, unit="episodes")
    seed = EVALUATION_SEED + seed * MAX_EPISODES + writer.written  # other worlds than before
    torch.manual_seed(seed)
    envs.action_space.seed(seed)
    obs, info = envs.reset(seed=seed)
    step = first_step(obs, envs.num_envs)
    try:
        while len(returns) < missing:
            step.action = _checked(policy(step.obs, step.is_first), envs, name)
            shown = {**step.obs, "action": step.action, "reward": step.reward}
            shown = {key: value.cpu().numpy() for key, value in shown.items()}
            first, last, terminal = (flag.tolist() for flag in (step.is_first, step.is_last, step.is_terminal))
            for world in range(envs.num_envs):
                if first[world] and begun < missing:
                    begun += 1
                    playing[world] = []
                if world not in playing:
                    continue
                playing[world].append({key: value[world].copy() for key, value in shown.items()})
                if last[world]:
                    rows = playing.pop(world)
                    # A Gymnasium world that failed was restarted, which cut its episode.
                    facts = {"policy": name, "cut": "restarted" in info and bool(info["restarted"][world])}
                    if not np.isnan(success := float(info["episode"]["success"][world])):
                        facts["success"] = success > 0.5
                        successes.append(success > 0.5)
                    arrays = {key: np.stack([row[key] for row in rows]) for key in shown}
                    action, reward = arrays.pop("action"), arrays.pop("reward")
                    episode = Episode(arrays, action, reward, terminal[world], info=facts)
                    writer.add(episode)
                    returns.append(episode.total)
            obs, reward, terminated, truncated, info = envs.step(step.action)
            step = step.following(step.action, obs, reward, terminated, truncated)
            progress.update(writer.written, 0)
    finally:
        progress.close()
    return returns, sum(successes) if successes else None
