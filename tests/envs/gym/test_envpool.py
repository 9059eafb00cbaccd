"""EnvPool's tasks: the contract of vector environments, kept with EnvPool's own worlds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import sheeplike.envs
from sheeplike.envs.contract import Unusable
from sheeplike.options import InvalidOption

pytest.importorskip("envpool")


def make(id: str = "CartPole-v1", **options: Any) -> Any:
    options = {"num_envs": 3, "frames": "none" if id == "CartPole-v1" else "auto"} | options
    return sheeplike.envs.make("envpool", id=id, **options)


def push(env: Any) -> tuple:
    """Push every cart to the right: an episode terminates after 8 to 10 steps."""
    return env.step(torch.ones(env.num_envs, dtype=torch.int64))


@pytest.mark.parametrize("repeat", [1, 3])
def test_the_next_step_resets(repeat: int) -> None:
    env = make(action_repeat=repeat, episode_length=9)
    assert env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    assert env.episode_length == 9 // repeat
    env.reset(seed=5)
    before, total, lengths, endings = torch.zeros(3, dtype=torch.bool), torch.zeros(3), torch.zeros(3), set()
    for _ in range(40):
        obs, reward, terminated, truncated, info = push(env)
        total, lengths = torch.where(before, 0, total + reward), torch.where(before, 0, lengths + 1)
        assert (reward[before] == 0).all()
        assert (obs["state"][before].abs() < 0.05).all(), "the first observation of an episode"
        assert ((reward[~before] > 0) & (reward[~before] <= repeat)).all()
        assert not (terminated & truncated).any()
        fallen = obs["state"][:, 2].abs() > 0.2095
        assert torch.equal(terminated, fallen), "a fall at the time limit is a termination too"
        assert torch.equal(truncated, (total == 9) & ~fallen)
        assert torch.equal(info["episode"]["return"], total)
        assert torch.equal(info["episode"]["length"], lengths.int())
        assert torch.isnan(info["success"]).all()
        endings |= {(bool(t), int(n)) for t, n in zip(terminated, total, strict=True) if t}
        before = terminated | truncated
    assert (True, 9) in endings
    env.close()


def test_a_world_draws_from_the_seed_and_its_number() -> None:
    every, two = make(num_envs=4, seed=7), make(num_envs=2, seed=7, first_env=2)
    assert torch.equal(every.reset()[0]["state"][2:], two.reset()[0]["state"])
    for _ in range(30):
        a, b = push(every), push(two)
        assert torch.equal(a[0]["state"][2:], b[0]["state"])
    begun = every.reset(seed=7)[0]["state"]
    assert torch.equal(begun[2:], two.reset(seed=7)[0]["state"])
    assert not torch.equal(begun, every.reset()[0]["state"])
    assert len(begun.unique(dim=0)) == 4


def test_a_loaded_state_begins_episodes_that_there_were_not() -> None:
    env, other = make(), make(seed=99)
    first = env.reset()[0]["state"]
    push(env)
    other.load_state_dict(env.state_dict())
    obs, reward, terminated, _, info = push(other)
    assert not env.exact_resume
    assert reward.tolist() == info["episode"]["length"].tolist() == [0, 0, 0]
    assert not terminated.any()
    assert not torch.isclose(obs["state"], first).all(-1).any()


@pytest.mark.parametrize(("gray", "channels"), [(False, 3), (True, 1)])
def test_images_have_the_size_and_channels_that_were_asked_for(gray: bool, channels: int) -> None:
    env = make("Pong-v5", image_size=(48, 64), grayscale=gray)
    space = env.single_observation_space["pixels/observation"]
    assert (space.shape, space.dtype, env.episode_length) == ((48, 64, channels), np.uint8, 27_000)
    env.reset()
    obs, *_ = push(env)
    assert obs["pixels/observation"].float().std() > 10
    again, *_ = push(env)
    assert obs["pixels/observation"].data_ptr() != again["pixels/observation"].data_ptr()


def test_other_sizes_are_fitted_and_boxes_become_minus_one_to_one() -> None:
    env = make("CarRacing-v3")
    assert env.native_actions.low.tolist() == [-1, 0, 0]
    assert env.single_action_space == spaces.Box(-1, 1, (3,), np.float32)
    obs, _ = env.reset()
    assert obs["pixels/observation"].shape == (3, 64, 64, 3)
    for _ in range(60):  # the gas from its middle: the car has left its place
        obs, *_ = env.step(torch.tensor([[0.0, 1.0, -1.0], [0.0, -1.0, -1.0], [0.0, 1.0, -1.0]]))
    moved = obs["pixels/observation"].float()
    assert (moved[0] - moved[1]).abs().mean() > 1


def test_frames_are_rendered_beside_the_vectors() -> None:
    env = make("CartPole-v1", frames="auto")
    obs, _ = env.reset()
    assert {key: tuple(value.shape) for key, value in obs.items()} == {"pixels/render": (3, 64, 64, 3), "state": (3, 4)}
    assert obs["pixels/render"].float().std() > 5


def test_discrete_observations_are_one_hot() -> None:
    env = make("FrozenLake-v1", frames="none")
    obs, _ = env.reset()
    assert torch.equal(obs["state"], torch.eye(16)[[0, 0, 0]])


def test_success_is_the_tasks_own() -> None:
    env = make("MetaWorld/Reach-v3", frames="none", num_envs=1)
    env.reset()
    *_, info = env.step(torch.zeros(1, 4))
    assert info["success"].tolist() == [0.0]


def test_a_success_lasts_while_an_action_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make(action_repeat=2)
    env.reset()
    pool, told = env._worlds._pool, iter([[True, False, False], [False, True, False], [False] * 3, [False] * 3])
    told_by = SimpleNamespace(step=lambda *args: (*pool.step(*args)[:4], {"success": np.array(next(told))}))
    monkeypatch.setattr(env._worlds, "_pool", told_by)
    assert [push(env)[-1]["success"].tolist() for _ in range(2)] == [[1.0, 1.0, 0.0]] * 2


def test_values_that_are_not_finite_end_the_episode() -> None:
    env = make("HalfCheetah-v5", frames="none", arguments={"reset_noise_scale": 1e39})
    obs, _ = env.reset()
    for _ in range(3):
        assert torch.isfinite(obs["state"]).all()
        obs, reward, terminated, truncated, info = env.step(torch.zeros(3, 6))
        assert info["nonfinite"].all()
        assert truncated.all()
        assert not terminated.any()
        assert (reward == 0).all()


@pytest.mark.parametrize(
    ("id", "options", "key", "nearest"),
    [
        ("Pnog-v5", {}, "env.id", "Pong-v5"),
        ("Pong-v5", {"arguments": {"reward_clp": True}}, "env.options.arguments", "reward_clip"),
        ("Pong-v5", {"arguments": {"stack_num": 4}}, "env.options.arguments", None),
        ("D1Basic-v1", {"arguments": {"vzd_path": "/bin/true"}}, "env.options.arguments", None),  # it would be run
        ("CliffWalking-v1", {}, "env.options.episode_length", 1000),
        ("BabyAI-GoToRedBallGrey-v0", {}, "env.options.episode_length", 1000),
    ],
)
def test_wrong_options(id: str, options: dict[str, Any], key: str, nearest: object) -> None:
    with pytest.raises(InvalidOption) as error:
        make(id, **options)
    assert error.value.key == key
    assert nearest in (None, error.value.nearest)


def test_a_game_of_several_players_is_refused() -> None:
    with pytest.raises(Unusable, match="2 players"):
        make("Go9x9-v1")
