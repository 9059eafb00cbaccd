"""Episodes of the simulator and of Gymnasium, recorded once for all tests here."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gymnasium
import numpy as np
import pytest
import torch

import sheeplike.envs
from sheeplike.data.episodes import Episode
from sheeplike.data.writing import NpzWriter


class Recording(NamedTuple):
    place: Path
    episodes: list[Episode]
    spaces: dict[str, gymnasium.Space]
    action: gymnasium.Space
    fps: float


def play(env: gymnasium.vector.VectorEnv, steps: int) -> list[Episode]:
    """Act at random in one world; the step after an end begins the next episode."""

    def seen() -> dict[str, np.ndarray]:
        return {key: value[0].numpy(force=True).copy() for key, value in obs.items()}

    env.action_space.seed(0)
    obs, _ = env.reset(seed=0)
    episodes, frames, actions, rewards = [], [seen()], [], [0.0]
    for _ in range(steps):
        action = env.action_space.sample()
        obs, reward, terminated, truncated, _ = env.step(torch.as_tensor(action))
        frames.append(seen())
        actions.append(action[0])
        rewards.append(float(reward[0]))
        if terminated[0] or truncated[0]:
            stacked = {key: np.stack([frame[key] for frame in frames]) for key in frames[0]}
            actions = np.stack([*actions, np.zeros_like(action[0])])
            episodes.append(Episode(stacked, actions, np.array(rewards, np.float32), bool(terminated[0])))
            obs, *_ = env.step(torch.as_tensor(action))
            frames, actions, rewards = [seen()], [], [0.0]
    return episodes


def record(place: Path, env: gymnasium.vector.VectorEnv, steps: int) -> Recording:
    fps = float(env.metadata["render_fps"])
    writer = NpzWriter(place, {"env": env.name, "fps": fps})
    episodes = play(env, steps)
    for episode in episodes:
        writer.add(episode)
    spaces = dict(env.single_observation_space.spaces)
    env.close()
    assert writer.written == len(episodes) > 1
    return Recording(place, episodes, spaces, env.single_action_space, fps)


@pytest.fixture(scope="session")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Frames and vectors, continuous actions, episodes that a limit of time ends."""
    env = sheeplike.envs.make("cartpole_balance", num_envs=1, image_size=64, episode_length=6)
    return record(tmp_path_factory.mktemp("cartpole") / "npz", env, 13)


@pytest.fixture(scope="session")
def discrete(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Vectors alone, discrete actions, episodes that end by themselves."""
    env = sheeplike.envs.make("gym", id="CartPole-v1", num_envs=1, frames="none")
    return record(tmp_path_factory.mktemp("discrete") / "npz", env, 60)


@pytest.fixture(scope="session")
def same() -> Callable[[Episode, Episode], bool]:
    """Compares two episodes exactly, but for the names of their files."""

    def compare(one: Episode, other: Episode) -> bool:
        assert one.obs.keys() == other.obs.keys()
        for key, value in one.obs.items():
            assert value.dtype == other.obs[key].dtype
            assert np.array_equal(value, other.obs[key]), key
        assert np.array_equal(one.action[:-1], other.action[:-1])
        assert np.array_equal(one.reward, other.reward)
        assert one.terminal == other.terminal
        return True

    return compare
