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
    """Act at random in one world."""
    env.action_space.seed(0)
    obs, _ = env.reset(seed=0)
    episodes, first = [], True
    rows: list[tuple] = []
    for _ in range(steps):
        action = env.action_space.sample()
        seen = {key: value[0].numpy(force=True).copy() for key, value in obs.items()}
        if first:
            rows = [(seen, np.zeros_like(action[0]), 0.0)]
        obs, reward, terminated, truncated, _ = env.step(torch.as_tensor(action))
        if first and not rows[0][0]:
            raise AssertionError
        rows[-1] = (rows[-1][0], action[0], rows[-1][2])
        seen = {key: value[0].numpy(force=True).copy() for key, value in obs.items()}
        rows.append((seen, np.zeros_like(action[0]), float(reward[0])))
        first = bool(terminated[0] | truncated[0])
        if first:
            kept = {key: np.stack([row[0][key] for row in rows]) for key in seen}
            actions, rewards = np.stack([row[1] for row in rows]), np.array([row[2] for row in rows], np.float32)
            episodes.append(Episode(kept, actions, rewards, bool(terminated[0])))
            obs, *_ = env.step(torch.as_tensor(action))  # the step that begins the next episode
    return episodes


def record(place: Path, env: gymnasium.vector.VectorEnv, steps: int, keys: tuple[str, ...] = ()) -> Recording:
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
