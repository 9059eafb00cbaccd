"""Environments shared by the tests here: every one costs seconds to trace and compile, so each is built once, used by
many tests, and restarted by `reset(seed=...)` at the start of each."""

import functools
from collections.abc import Callable

import pytest
import torch
from gymnasium.vector import VectorEnv

import sheeplike.envs


@pytest.fixture(scope="module", params=["native", pytest.param("warp", marks=pytest.mark.slow)])
def physics(request: pytest.FixtureRequest) -> str:
    """Both engines, one after the other. Tests that are not about physics take one of them:
    ``@pytest.mark.parametrize("physics", ["native"], scope="module")``."""
    return request.param


build = functools.cache(sheeplike.envs.make)


@pytest.fixture
def cartpole(physics: str) -> VectorEnv:
    """Three worlds, episodes of six steps, an image that is not square."""
    return build("cartpole_balance", physics=physics, num_envs=3, image_size=(20, 28), episode_length=6)


@pytest.fixture
def swingup(physics: str) -> VectorEnv:
    return build("cartpole_swingup", physics=physics, num_envs=2, image_size=12)


@pytest.fixture
def franka(physics: str) -> VectorEnv:
    """Eight worlds, both cameras with depth, no episode that starts with the box grasped."""
    return build("franka_pick", physics=physics, num_envs=8, image_size=32, depth=True, picked_probability=0.0)


@pytest.fixture
def franka_picked(physics: str) -> VectorEnv:
    """Two worlds in which every episode starts with the box grasped."""
    options = {"num_envs": 2, "image_size": 8, "cameras": ("front",), "picked_probability": 1.0}
    return build("franka_pick", physics=physics, **options)


@pytest.fixture(scope="session")
def scripted_pick() -> Callable[[torch.Tensor], torch.Tensor]:
    """A controller that picks the box from `state` (N, 22): align, descend, close, lift."""

    def act(state: torch.Tensor) -> torch.Tensor:
        opening, opening_command, box_minus_tip = state[:, 5], state[:, 6], state[:, 10:13]
        # Steered by where the tip is told to be: it follows with a lag.
        towards = ((box_minus_tip[:, 1:] - state[:, 3:5]) / 0.005).clamp(-1, 1)
        closing = (box_minus_tip.norm(dim=1) < 0.008) | (opening_command < 0.035)
        grasped = closing & (opening < 0.022)
        aligned = box_minus_tip[:, 1].abs() < 0.005
        rise = torch.where(grasped, 1.0, torch.where(aligned, towards[:, 1], 0.0))
        return torch.stack([towards[:, 0], rise, torch.where(closing, -1.0, 1.0)], dim=1)

    return act
