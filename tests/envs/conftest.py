"""Environments shared by the tests here: every one costs seconds to trace and compile, so each is built once, used by
many tests, and restarted by `reset(seed=...)` at the start of each."""

from collections.abc import Callable

import pytest
import torch
from gymnasium.vector import VectorEnv

import sheeplike.envs


@pytest.fixture(scope="session")
def cartpole() -> VectorEnv:
    """Three worlds, episodes of six steps, an image that is not square."""
    return sheeplike.envs.make("cartpole_balance", num_envs=3, image_size=(20, 28), episode_length=6)


@pytest.fixture(scope="session")
def swingup() -> VectorEnv:
    return sheeplike.envs.make("cartpole_swingup", num_envs=2, image_size=12)


@pytest.fixture(scope="session")
def franka() -> VectorEnv:
    """Eight worlds, both cameras with depth, no episode that starts with the box grasped."""
    return sheeplike.envs.make("franka_pick", num_envs=8, image_size=32, depth=True, picked_probability=0.0)


@pytest.fixture(scope="session")
def franka_picked() -> VectorEnv:
    """Two worlds in which every episode starts with the box grasped."""
    return sheeplike.envs.make("franka_pick", num_envs=2, image_size=8, cameras=["front"], picked_probability=1.0)


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
