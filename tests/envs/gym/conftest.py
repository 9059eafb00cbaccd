"""An environment that fails when it is told to, for the tests of what is made of that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from sheeplike.envs.gym.options import GymOptions
from sheeplike.envs.gym.vector_env import GymVectorEnv
from sheeplike.options import build

# Other processes cannot import a module of the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Failing(gymnasium.Env):
    """Counts its steps; every call asks ``trouble`` (the call, the count, this object) for an exception to raise."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012, as Gymnasium has it
    made = 0

    def __init__(self, trouble: Callable[[str, int, Failing], Exception | None], length: int = 4) -> None:
        Failing.made += 1
        self.number, self.trouble, self.length = Failing.made, trouble, length
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.count, self.stream, self.closed = 0, -1, False

    def _may(self, call: str) -> None:
        error = self.trouble(call, self.count, self)
        if error is not None:
            raise error

    def _seen(self) -> np.ndarray:
        return np.array([self.count, self.stream % 2**20], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.stream, self.count = self.stream if seed is None else seed, 0
        self._may("reset")
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self._may("step")
        return self._seen(), 1.0, self.count >= self.length, False, {}

    def render(self) -> np.ndarray:
        self._may("render")
        return np.full((16, 16, 3), self.count, np.uint8)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def failing() -> type[Failing]:
    return Failing


@pytest.fixture
def worlds() -> Callable[..., GymVectorEnv]:
    """Makes worlds of such an environment, with its trouble and options of the vector env."""

    def make(trouble: Any, *, num_envs: int = 1, length: int = 4, image_size: int = 16, **options: Any) -> GymVectorEnv:
        settings = build(GymOptions, {"id": "Failing", "frames": "none", "episode_length": 100} | options)
        return GymVectorEnv(
            lambda render_mode: Failing(trouble, length), settings, num_envs=num_envs, image_size=image_size
        )

    return make


@pytest.fixture
def row() -> Callable[..., list[float]]:
    def read(obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> list[float]:
        numbers = [obs["state"][0, 0], reward[0], terminated[0], truncated[0], info["restarted"][0]]
        return [float(x) for x in [*numbers, info["episode"]["return"][0], info["episode"]["length"][0]]]

    return read
