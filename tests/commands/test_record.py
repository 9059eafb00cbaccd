"""Episodes of a policy are recorded whole, and a recording goes on."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from sheeplike import envs
from sheeplike.data.reading import read
from sheeplike.data.writing import NpzWriter
from sheeplike.envs.gym.options import GymOptions
from sheeplike.envs.gym.vector_env import GymVectorEnv
from sheeplike.options import CommandError
from sheeplike.trained.recording import facts_of, find_policy, record


@pytest.fixture
def worlds():
    made = envs.make("gym", num_envs=3, id="CartPole-v1", frames="none")
    yield made
    made.close()


def test_whole_episodes_as_they_were_played(worlds, tmp_path):
    writer = NpzWriter(tmp_path / "demos", {"fps": 50})
    policy = find_policy("random", None, worlds, sample=True)
    returns, _ = record(policy, worlds, writer, episodes=7, seed=0, name="random")
    episodes = list(read(tmp_path / "demos"))
    assert writer.written == len(episodes) == len(returns) == 7
    for episode, total in zip(episodes, returns, strict=True):
        world = gymnasium.make("CartPole-v1").unwrapped
        world.reset()
        world.state = episode.obs["state"][0].astype(np.float64)
        for step, action in enumerate(episode.action[:-1], 1):
            seen, *_ = world.step(int(action))
            np.testing.assert_allclose(seen, episode.obs["state"][step], atol=1e-4)
        assert total == episode.total == len(episode) - 1
        assert episode.terminal
    assert str(np.load(tmp_path / "demos" / "episode_000000.npz")["policy"]) == "random"


@pytest.mark.parametrize("name", ["action", "success", "terminated", "policy", "file"])
def test_an_observation_cannot_be_called_like_something_else_in_the_file(name):
    space = spaces.Dict({name: spaces.Box(-1, 1, (2,), np.float32)})
    config = SimpleNamespace(env=SimpleNamespace(name="gym", id="Own-v0", options={}), randomization={})
    worlds = SimpleNamespace(single_observation_space=space, metadata={"render_fps": 30})
    with pytest.raises(CommandError, match=f"observation {name}"):
        facts_of(config, worlds)


def test_a_recording_goes_on_in_other_worlds(worlds, tmp_path):
    policy = find_policy("random", None, worlds, sample=True)
    for episodes, new in ((2, 2), (5, 3), (5, 0)):
        writer = NpzWriter(tmp_path / "demos", {"fps": 50})
        returns, _ = record(policy, worlds, writer, episodes=episodes, seed=0, name="random")
        assert len(returns) == new
        assert len(list((tmp_path / "demos").glob("episode_*.npz"))) == episodes
        del writer  # which locks the directory
    begins = {episode.obs["state"][0].tobytes() for episode in read(tmp_path / "demos")}
    assert len(begins) == 5


@pytest.mark.parametrize("space", [spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 3], start=[0, -1])])
def test_random_actions_of_every_kind(space):
    some = SimpleNamespace(action_space=batch_space(space, 200), device=torch.device("cpu"))
    drawn = find_policy("random", None, some, sample=True)({}, None).numpy()
    assert all(action in space for action in drawn)
    assert len(np.unique(drawn, axis=0)) == (6 if drawn.ndim == 2 else 3)


def test_an_episode_that_a_failure_cut_is_marked(tmp_path):
    class Fragile(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)
        metadata = {"render_fps": 20}  # noqa: RUF012, as Gymnasium has it
        failed, count = False, 0

        def reset(self, **_):
            self.count = 0
            return np.zeros(2, np.float32), {}

        def step(self, action):
            self.count += 1
            if self.count == 3 and not Fragile.failed:
                Fragile.failed = True
                raise ValueError("broken")
            return np.zeros(2, np.float32), 1.0, self.count == 5, False, {}

    options = GymOptions(id="Fragile", frames="none", episode_length=9, vectorization="sync")
    worlds = GymVectorEnv(lambda render_mode: Fragile(), options, num_envs=1)
    policy = find_policy("random", None, worlds, sample=True)
    record(policy, worlds, NpzWriter(tmp_path / "demos", {"fps": 20}), episodes=3, seed=0, name="random")
    worlds.close()
    files = [np.load(file) for file in sorted((tmp_path / "demos").glob("*.npz"))]
    assert [bool(file["cut"]) for file in files] == [True, False, False]
    assert [len(file["action"]) for file in files[1:]] == [5, 5]


@pytest.mark.parametrize(
    ("id", "actions"),
    [
        ("CartPole-v1", None),
        ("CartPole-v1", [0]),
        ("CartPole-v1", [0, 1, 2]),
        ("Pendulum-v1", [[math.nan]] * 3),
    ],
)
def test_a_function_that_returns_no_actions(id, actions, tmp_path):
    writer = NpzWriter(tmp_path / "demos", {"fps": 20})
    made = envs.make("gym", num_envs=3, id=id, frames="none")
    with pytest.raises(CommandError, match="policy=mine:act"):
        record(lambda obs, is_first: actions, made, writer, episodes=1, seed=0, name="mine:act")
    made.close()
    assert writer.written == 0


@pytest.mark.parametrize("name", ["nowhere:act", "math:nothing", "math", ".mine:act"])
def test_a_policy_that_does_not_exist(worlds, name):
    with pytest.raises(CommandError, match=name):
        find_policy(name, None, worlds, sample=True)


@pytest.mark.slow
def test_ten_kills_lose_what_was_going_on_alone(tmp_path):
    place, chance = tmp_path / "demos", random.Random(0)
    command = [sys.executable, "-m", "sheeplike", "record", "run=demo:franka_pick", f"to={place}", "num_envs=2"]
    kept: dict[str, bytes] = {}

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in place.glob("episode_*.npz")}

    for _ in range(10):
        process = subprocess.Popen([*command, "episodes=1000"], cwd=tmp_path, stderr=subprocess.DEVNULL)
        while len(files()) <= len(kept):
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 3))
        process.kill()
        process.wait()
        before, kept = kept, files()
        assert before.items() < kept.items(), "no episode is lost or written anew"
        assert len(list(read(place))) == len(kept), "each is whole"
    subprocess.run([*command, f"episodes={len(kept) + 2}"], cwd=tmp_path, check=True)
    assert kept.items() < files().items()
    assert len(list(read(place))) == len(kept) + 2
