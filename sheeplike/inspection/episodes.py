"""Whole episodes in memory, played for an analysis.

Shape letters: ``E`` episodes, ``T`` steps of the longest one, ``N`` worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from sheeplike.agents.agent import own_randomness
from sheeplike.agents.policy import PolicyNetworks
from sheeplike.agents.spaces import ActionCodec
from sheeplike.loop import first_step
from sheeplike.options import InvalidOption
from sheeplike.run.evaluation import EVALUATION_SEED, MAX_EPISODES

MIN_EPISODES = 4  # enough to fit probes on some and to test on others
Act = Callable[[dict[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Episodes:
    """Episodes side by side, on the CPU; the last step of each is repeated up to ``T``."""

    obs: dict[str, Tensor]  # key to (E, T, ...); images uint8, or float32 where they are depth
    action: Tensor  # (E, T, ...) as the environment took them, each chosen after the observation of its step
    reward: Tensor  # (E, T) float32, for arriving at a step
    is_terminal: Tensor  # (E, T) bool
    lengths: Tensor  # (E,) int64, number of observations

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def steps(self) -> int:
        """``T``."""
        return self.reward.shape[1]

    @property
    def valid(self) -> Tensor:
        """``(E, T)`` bool: the steps that were played."""
        return torch.arange(self.steps) < self.lengths[:, None]

    @property
    def returns(self) -> Tensor:
        """``(E,)``, sums of rewards."""
        return torch.where(self.valid, self.reward, 0.0).sum(1)


@torch.no_grad()
def play(
    networks: PolicyNetworks, envs: VectorEnv, *, episodes: int, keys: Collection[str], act: str, seed: int = 0
) -> Episodes:
    """Play whole episodes that start as in no training; both kinds of ``act`` get the same starts.

    Args:
        keys: observations to keep.
        act: ``"policy"`` samples the agent's actions, ``"random"`` draws uniformly from the action space.
        seed: as of :func:`sheeplike.run.evaluation.play`.
    """
    if act not in ("policy", "random"):
        raise InvalidOption("act", act, "policy or random", "policy")
    first = EVALUATION_SEED + seed * MAX_EPISODES
    found: list[Episodes] = []
    with own_randomness(envs.device):
        torch.manual_seed(first)
        for start in range(0, episodes, envs.num_envs):
            chosen = networks.player(envs.num_envs).act if act == "policy" else lambda *_: random_actions(envs)
            found.append(_round(envs, chosen, list(keys), first + start))
    return _join(found, episodes)


def _round(envs: VectorEnv, act: Act, keys: list[str], seed: int) -> Episodes:
    """Play one whole episode per environment; one that a restart cut, ``info["restarted"]``, does not count."""
    obs, _ = envs.reset(seed=seed)
    step = first_step(obs, envs.num_envs)
    over = torch.zeros_like(step.is_last)
    begun = torch.zeros(envs.num_envs, dtype=torch.int64)  # index of each episode's first step in the record
    ended = torch.zeros_like(begun)
    rows: list[dict[str, Tensor]] = []
    while True:
        action = act(step.obs, step.is_first)
        row = {key: step.obs[key] for key in keys} | {"action": action}
        row |= {"reward": step.reward, "is_terminal": step.is_terminal}
        rows.append({name: value.cpu().clone() for name, value in row.items()})
        if bool(over.all()):
            break
        obs, reward, terminated, truncated, info = envs.step(action)
        step = step.following(action, obs, reward, terminated, truncated)
        cut = step.is_last & info.get("restarted", torch.zeros_like(over))
        whole = step.is_last & ~cut
        ended = torch.where((whole & ~over).cpu(), len(rows), ended)
        # The step after a cut begins the episode that counts.
        begun = torch.where((cut & ~over).cpu(), len(rows) + 1, begun)
        over = over | whole
    record = {name: torch.stack([row[name] for row in rows], 1) for name in rows[0]}
    lengths = ended - begun + 1
    times = (begun[:, None] + torch.arange(int(lengths.max()))).minimum(ended[:, None])  # (N, T)
    worlds = torch.arange(envs.num_envs)[:, None]
    picked = {name: value[worlds, times] for name, value in record.items()}
    reward = torch.where(times == begun[:, None], 0.0, picked["reward"])
    return Episodes({key: picked[key] for key in keys}, picked["action"], reward, picked["is_terminal"], lengths)


def random_actions(envs: VectorEnv) -> Tensor:
    """Draw one action for each world uniformly, ``(N, ...)``, with torch's own generator."""
    codec, device = ActionCodec(envs.single_action_space), envs.device
    shape = envs.num_envs, *envs.single_action_space.shape
    if not codec.discrete:
        return 2 * torch.rand(shape, device=device) - 1  # every agent takes a Box in [-1, 1]
    ranges = zip(codec.starts, codec.classes, strict=True)
    drawn = [torch.randint(start, start + count, (envs.num_envs,), device=device) for start, count in ranges]
    return torch.stack(drawn, -1).reshape(shape)


def _join(parts: list[Episodes], count: int) -> Episodes:
    """Join the first ``count`` episodes of all rounds, padded to the longest."""
    steps = max(part.steps for part in parts)

    def join(values: list[Tensor]) -> Tensor:
        return torch.cat([value[:, torch.arange(steps).clamp_max(value.shape[1] - 1)] for value in values])[:count]

    obs = {key: join([part.obs[key] for part in parts]) for key in parts[0].obs}
    rest = (join([getattr(part, name) for part in parts]) for name in ("action", "reward", "is_terminal"))
    return Episodes(obs, *rest, torch.cat([part.lengths for part in parts])[:count])
