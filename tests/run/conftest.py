"""An environment for whole runs: it goes on exactly, as the simulator does, and nothing has to be compiled for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from sheeplike import envs


@pytest.fixture(autouse=True)
def _alone(alone: None) -> None: ...


class Line(VectorEnv):
    """Points that the action pushes along a line; a vector of five numbers begins with the place."""

    name = "line"

    def __init__(self, num_envs: int, seed: int, episode_length: int) -> None:
        self.num_envs, self.device, self.episode_length = num_envs, torch.device("cpu"), episode_length
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": 12.5}
        self.single_action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.single_observation_space = spaces.Dict({"state": spaces.Box(-np.inf, np.inf, (5,), np.float32)})
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.time, self.total = torch.zeros(self.num_envs, dtype=torch.int32), torch.zeros(self.num_envs)
        self.over, self.state = self.time > 0, torch.randn(self.num_envs, 5, generator=self.generator)
        return {"state": self.state}, self._info(torch.zeros(self.num_envs))

    def _info(self, reward: Tensor) -> dict[str, Any]:
        no = torch.zeros(self.num_envs, dtype=torch.bool)
        episode = {"return": self.total, "length": self.time, "success": no, "reward_terms": {"near": self.total}}
        return {"success": no, "reward_terms": {"near": reward}, "episode": episode, "nonfinite": no}

    def step(self, action: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, dict[str, Any]]:
        fresh = torch.randn(self.num_envs, 5, generator=self.generator)
        self.state = torch.where(self.over[:, None], fresh, self.state + 0.1 * action)
        reward = torch.where(self.over, 0.0, (-self.state[:, 0].abs()).exp())
        self.time = torch.where(self.over, 0, self.time + 1)
        self.total = torch.where(self.over, 0.0, self.total + reward)
        self.over = self.time >= self.episode_length
        return {"state": self.state}, reward, torch.zeros_like(self.over), self.over, self._info(reward)

    def state_dict(self) -> dict[str, Tensor]:
        held = {name: getattr(self, name) for name in ("time", "total", "over", "state")}
        return {name: value.clone() for name, value in held.items()} | {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.time, self.total, self.over, self.state = (state[name] for name in ("time", "total", "over", "state"))
        self.generator.set_state(state["generator"])


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> None:
    """``env=line``."""

    def make(
        *,
        num_envs: int,
        device: Any = "cpu",
        image_size: Any = 48,
        action_repeat: int = 1,
        seed: int = 0,
        episode_length: int = 24,
    ) -> Line:
        return Line(num_envs, seed, episode_length)

    monkeypatch.setitem(envs.registry.BUILT_IN, "line", make)
