"""Atari games by the protocol of Atari 100k."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ale_py  # noqa: F401, registers its games
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from PIL import Image

import sheeplike.envs
from sheeplike.envs import InvalidOption
from sheeplike.envs.gym.atari import Protocol
from sheeplike.envs.gym.options import AtariOptions
from sheeplike.envs.gym.world import derive_seed


def test_the_protocol() -> None:
    env = sheeplike.envs.make("atari", num_envs=2, action_repeat=4)
    assert env.name == "ALE/Pong-v5"
    assert env.episode_length == 27_000  # 108,000 frames
    assert env.single_action_space == spaces.Discrete(6)  # those that the game uses
    assert env.action_names == ["NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE"]
    assert {key: space.shape for key, space in env.single_observation_space.items()} == {
        "pixels/observation": (64, 64, 3)
    }
    game = env._worlds.envs[0]._env.unwrapped
    assert game.ale.getFloat("repeat_action_probability") == 0.0
    everything = sheeplike.envs.make("atari", num_envs=1, all_actions=True, sticky_actions=True, grayscale=True)
    assert everything.single_action_space == spaces.Discrete(18)
    assert everything.single_observation_space["pixels/observation"].shape == (64, 64, 1)
    assert everything._worlds.envs[0]._env.unwrapped.ale.getFloat("repeat_action_probability") == 0.25


@pytest.mark.parametrize("game", ["pong", "Pong", "ALE/Pong-v5", "ms_pacman", "MsPacman"])
def test_games_by_any_spelling(game: str) -> None:
    resolved = AtariOptions(id=game).recipe((64, 64))[1].id
    assert resolved in ("ALE/Pong-v5", "ALE/MsPacman-v5")
    assert resolved.lower().strip("ale/v5-") in game.lower().replace("_", "")


def test_an_unknown_game_gets_the_nearest() -> None:
    with pytest.raises(InvalidOption, match=r"env.id=ALE/Pnog-v5.*ale_py.*nearest: env.id=ALE/Pong-v5"):
        sheeplike.envs.make("atari", num_envs=1, id="ALE/Pnog-v5")


def test_frames_are_the_brighter_of_two_resized_as_the_authors_do() -> None:
    """Against the same game, stepped frame by frame here."""
    env = sheeplike.envs.make("atari", num_envs=1, id="boxing", action_repeat=4, noops=0)
    obs, _ = env.reset(seed=3)
    game = gymnasium.make("ALE/Boxing-v5", frameskip=1, repeat_action_probability=0.0, full_action_space=False)
    screen, _ = game.reset(seed=derive_seed(3, 0, 0))

    def image(pixels: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(pixels).resize((64, 64), Image.BILINEAR))

    assert np.array_equal(obs["pixels/observation"][0], image(screen))
    total = 0.0
    rng = np.random.default_rng(0)
    for _ in range(150):
        action = int(rng.integers(18))
        screens, reward = [], 0.0
        for _ in range(4):
            screen, one, *_ = game.step(action)
            screens.append(screen)
            reward += one
        obs, given, *_ = env.step(torch.tensor([action]))
        total += abs(reward)
        assert given.item() == reward
        assert np.array_equal(obs["pixels/observation"][0], image(np.maximum(*screens[2:])))
    assert total > 0


class Lives(gymnasium.Env):
    """A game with three lives, of which every third frame takes one."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 99, (1,)), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.frame = 0
        return np.zeros(1, np.float32), {"lives": 3}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.frame += 1
        lives = 3 - self.frame // 3
        return np.full(1, self.frame, np.float32), 1.0, lives == 0, False, {"lives": lives}


@pytest.mark.parametrize(("ends", "frames"), [(False, 9), (True, 3)])
def test_a_life_ends_the_episode_only_if_asked_to(ends: bool, frames: int) -> None:
    game = Protocol(Lives(), noops=0, terminal_on_life_loss=ends)
    game.reset(seed=0)
    outcomes = [game.step(1)[2] for _ in range(frames)]
    assert outcomes == [False] * (frames - 1) + [True]


def test_episodes_begin_with_up_to_so_many_frames_of_nothing() -> None:
    game = Protocol(Lives(), noops=8, terminal_on_life_loss=False)
    starts = [int(game.reset(seed=0 if not episode else None)[0][0]) for episode in range(200)]
    assert set(starts) == set(range(9))
    long = Protocol(Lives(), noops=20, terminal_on_life_loss=False)
    assert {int(long.reset(seed=seed)[0][0]) for seed in range(200)} == set(
        range(9)
    )  # the game was over, and began anew
    assert starts == [int(game.reset(seed=0 if not episode else None)[0][0]) for episode in range(200)]


def test_a_game_is_made_without_a_banner() -> None:
    code = "import sheeplike.envs as e; e.make('atari', num_envs=1, id='pong').reset(seed=0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
