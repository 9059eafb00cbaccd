"""Both agents learn the best choice, one or several at a time, in worlds whose best return is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from sheeplike.agents.agent import Agent, Step
from sheeplike.agents.dreamer_v3 import DreamerV3, DreamerV3Config, Size
from sheeplike.agents.ppo import PPO, PPOConfig
from sheeplike.envs.contract import OptionalMembers
from sheeplike.loop import LoopState, evaluate, train

LENGTH = 4
BRIGHT = 20.0
ONE = spaces.Discrete(4, start=2)
SEVERAL = spaces.MultiDiscrete([3, 2], start=[0, -1])


class Locks(OptionalMembers, VectorEnv):
    """A lock shows its code, another one in each episode, and pays 1 for the action that is the code, 0 for any other.

    Several choices have to be right together. It shows too whether it has just been opened. Episodes are truncated
    after ``LENGTH`` steps.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    device = torch.device("cpu")

    def __init__(self, num_envs: int, actions: gymnasium.spaces.Space) -> None:
        self.num_envs = num_envs
        self.single_action_space = actions
        self.action_space = batch_space(actions, num_envs)
        self.choices = [int(n) for n in np.atleast_1d(getattr(actions, "nvec", getattr(actions, "n", 0)))]
        self.start = torch.as_tensor(actions.start, dtype=torch.int64)
        state = spaces.Box(0, BRIGHT, (sum(self.choices) + 1,), np.float32)
        self.single_observation_space = spaces.Dict({"state": state})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if seed is not None:
            self.generator = torch.Generator().manual_seed(seed)
        self.over = torch.zeros(self.num_envs, dtype=torch.bool)
        self.time, self.total = torch.zeros(self.num_envs, dtype=torch.int32), torch.zeros(self.num_envs)
        self.code, self.opened = self._draw(), torch.zeros(self.num_envs)
        return self._show(), self._info()

    def _draw(self) -> Tensor:
        return torch.stack([torch.randint(n, (self.num_envs,), generator=self.generator) for n in self.choices], -1)

    def _show(self) -> dict[str, Tensor]:
        shown = [F.one_hot(self.code[:, k], n) for k, n in enumerate(self.choices)]
        return {"state": BRIGHT * torch.cat([*shown, self.opened[:, None]], -1)}

    def _info(self) -> dict[str, Any]:
        success = self.total == LENGTH
        return {"episode": {"return": self.total, "length": self.time, "success": success, "reward_terms": {}}}

    def step(self, action: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, dict[str, Any]]:
        assert action.dtype == torch.int64
        assert all(self.single_action_space.contains(one) for one in action.numpy())
        chosen = (action - self.start).view(self.num_envs, -1)
        self.opened = torch.where(self.over, 0.0, (chosen == self.code).all(-1).float())
        self.time = torch.where(self.over, 0, self.time + 1)
        self.total = torch.where(self.over, 0.0, self.total + self.opened)
        self.code = torch.where(self.over[:, None], self._draw(), self.code)
        self.over = self.time >= LENGTH
        return self._show(), self.opened, torch.zeros_like(self.over), self.over, self._info()


class Observer:
    def __init__(self, all_finite: Callable[..., bool]) -> None:
        self.first: dict[str, Tensor] = {}
        self.all_finite = all_finite

    def stepped(self, step: Step, info: dict[str, Any]) -> None: ...
    def learned(self, metrics: dict[str, Tensor]) -> None:
        self.first = self.first or metrics
        self.last = metrics
        assert self.all_finite(metrics)


def score(agent: Agent, eval_envs: Locks) -> float:
    """Mean return, with the mode of the policy."""
    with torch.random.fork_rng():
        return float(evaluate(agent, eval_envs, episodes=64, seed=7, sample=False).returns.mean())


def make_dreamer(worlds: Locks) -> DreamerV3:
    config = DreamerV3Config(
        size=Size(deter=128, hidden=32, classes=4, depth=2, units=64),
        observations=("state",),
        replay_ratio=1 / 16,
        learning_starts=0,
        batch_size=16,
        batch_length=5,
        replay_size=8000,
        imagination_length=2,
        horizon=10.0,
        entropy_scale=0.05,
        learning_rate=3e-3,
        warmup=20,
        policy_unimix=0.01,
    )
    of_one = worlds.single_observation_space, worlds.single_action_space
    return DreamerV3(*of_one, config, num_envs=worlds.num_envs, seed=1)


def make_ppo(worlds: Locks) -> PPO:
    config = PPOConfig(
        observations=("state",),
        policy_layers=(32,),
        value_layers=(32,),
        rollout_length=8,
        minibatches=4,
        epochs=4,
        discount=0.5,
        learning_rate=1e-2,
    )
    return PPO(worlds.single_observation_space, worlds.single_action_space, config, num_envs=worlds.num_envs)


@pytest.mark.parametrize(
    "actions", [ONE, pytest.param(SEVERAL, marks=pytest.mark.slow)], ids=["one choice", "several choices"]
)
@pytest.mark.parametrize(
    "make", [pytest.param(make_dreamer, marks=pytest.mark.slow), make_ppo], ids=["dreamer_v3", "ppo"]
)
def test_the_best_choice_is_learnt(
    make: Callable[[Locks], Agent], actions: gymnasium.spaces.Space, all_finite: Callable[..., bool]
) -> None:
    torch.manual_seed(0)
    worlds, eval_envs, observer = Locks(16, actions), Locks(64, actions), Observer(all_finite)
    agent = make(worlds)
    untrained = score(agent, eval_envs)
    assert untrained < 0.6 * LENGTH
    train(agent, worlds, LoopState.begin(agent, worlds, seed=0), total_steps=4800, observer=observer)
    reached = score(agent, eval_envs)
    assert reached > 0.9 * LENGTH, (untrained, reached)
    # The entropy is that of all choices together: it began at the logarithm of their combinations.
    first, last = (float(metrics["actor/entropy"]) for metrics in (observer.first, observer.last))
    assert first == pytest.approx(math.log(math.prod(worlds.choices)), rel=0.02)
    assert last < 0.5 * first
