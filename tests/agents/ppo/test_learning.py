"""PPO solves a task whose best return is known, through the same loop and evaluation as everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from sheeplike.agents.agent import Step
from sheeplike.agents.ppo import PPO, PPOConfig
from sheeplike.envs.contract import OptionalMembers
from sheeplike.loop import LoopState, evaluate, train

LENGTH, SPEED = 10, 0.4


class Chase(OptionalMembers, VectorEnv):
    """A point on a line, moved by at most ``SPEED`` a step, is paid for being near a target: ``1 - |gap|``.

    Moving straight to the target and staying there is best. Episodes are truncated after ``LENGTH`` steps.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    device = torch.device("cpu")

    def __init__(self, num_envs: int, *, discrete: bool = False) -> None:
        self.num_envs = num_envs
        # Scales as uneven as those of real vectors: the normalisation has to even them out.
        self.single_observation_space = spaces.Dict({"state": spaces.Box(-np.inf, np.inf, (2,), np.float32)})
        self.single_action_space = spaces.Discrete(3) if discrete else spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.discrete = discrete

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if seed is not None:
            self.generator = torch.Generator().manual_seed(seed)
        self.over = torch.ones(self.num_envs, dtype=torch.bool)
        self.place = self.target = self.total = torch.zeros(self.num_envs)
        self.time = torch.zeros(self.num_envs, dtype=torch.int32)
        return self._begin(), self._info()

    def _begin(self) -> dict[str, Tensor]:
        drawn = torch.rand(2, self.num_envs, generator=self.generator) * 2 - 1
        self.place = torch.where(self.over, drawn[0], self.place)
        self.target = torch.where(self.over, drawn[1], self.target)
        self.total = torch.where(self.over, 0.0, self.total)
        self.time = torch.where(self.over, 0, self.time)
        return {"state": torch.stack([100 * self.place + 30, self.target], -1)}

    def _info(self) -> dict[str, Any]:
        success = (self.place - self.target).abs() < 0.1
        episode = {"return": self.total, "length": self.time, "success": success, "reward_terms": {}}
        return {"episode": episode}

    def step(self, action: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, dict[str, Any]]:
        move = action.float() - 1 if self.discrete else action[:, 0].clamp(-1, 1)
        begins = self.over
        self.place = torch.where(begins, self.place, self.place + SPEED * move)
        self.time = self.time + ~begins
        reward = torch.where(begins, 0.0, 1 - (self.place - self.target).abs())
        self.total = self.total + reward
        observation = self._begin()
        self.over = self.time >= LENGTH
        return observation, reward, torch.zeros_like(self.over), self.over, self._info()


def best_return(place: Tensor, target: Tensor) -> Tensor:
    gap = (place - target).abs()
    return sum(1 - (gap - SPEED * step).clamp_min(0) for step in range(1, LENGTH + 1))


class Silent:
    def stepped(self, step: Step, info: dict[str, Any]) -> None: ...
    def learned(self, metrics: dict[str, Tensor]) -> None:
        assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize(
    ("distribution", "options"),
    [
        ("tanh_normal", {}),
        pytest.param("clipped_normal", {"shared_trunk": True, "kl_control": "adaptive_lr"}, marks=pytest.mark.slow),
        pytest.param(
            "categorical", {"kl_control": "early_stop", "kl_target": 0.02, "value_clip": 0.5}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_trivial_task_is_solved_to_its_known_best_return(distribution: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    worlds, eval_envs = (Chase(32, discrete=distribution == "categorical") for _ in range(2))
    config = PPOConfig(
        observations=("state",),
        distribution=distribution,
        policy_layers=(32, 32),
        value_layers=(32, 32),
        activation="tanh",
        rollout_length=16,
        minibatches=4,
        epochs=4,
        discount=0.9,
        learning_rate=1e-3,
        clip=0.2,
        entropy_scale=0.0,
        **options,
    )
    agent = PPO(worlds.single_observation_space, worlds.single_action_space, config, num_envs=32)
    eval_envs.reset(seed=5)
    best = best_return(eval_envs.place, eval_envs.target)
    if distribution == "categorical":  # three speeds cannot stop on the target: within half a step of it
        best = best - LENGTH * SPEED / 2

    def score() -> float:
        return float(evaluate(agent, eval_envs, episodes=32, seed=5, sample=False).returns.mean())

    untrained = score()
    assert untrained < float(best.mean()) - 2
    train(agent, worlds, LoopState.begin(agent, worlds, seed=0), total_steps=60 * 16 * 32, observer=Silent())
    assert score() > float(best.mean()) - 0.4, (untrained, float(best.mean()))
