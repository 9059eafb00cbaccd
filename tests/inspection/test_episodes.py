"""Episodes that an analysis plays: whole ones, one of each world a round."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from sheeplike import envs
from sheeplike.agents.dreamer_v3 import DreamerV3Config, Size
from sheeplike.agents.dreamer_v3.networks import DreamerNetworks
from sheeplike.envs.contract import OptionalMembers
from sheeplike.inspection.episodes import Episodes, play
from sheeplike.options import InvalidOption

KEYS = ("state",)


@pytest.fixture(scope="module")
def worlds() -> VectorEnv:
    made = envs.make("gym", id="CartPole-v1", num_envs=3, device="cpu", seed=0, frames="none")
    yield made
    made.close()


@pytest.fixture(scope="module")
def networks(worlds: VectorEnv) -> DreamerNetworks:
    config = DreamerV3Config(size=Size(deter=64, hidden=16, classes=4, depth=2, units=16), observations=("state",))
    spaces_of = worlds.single_observation_space, worlds.single_action_space
    return DreamerNetworks(*spaces_of, config)


@pytest.mark.parametrize("act", ["policy", "random"])
def test_episodes_are_those_that_the_recorded_actions_lead_to(
    worlds: VectorEnv, networks: DreamerNetworks, act: str
) -> None:
    played = play(networks, worlds, episodes=5, keys=KEYS, act=act, seed=2)
    assert len(played) == 5
    assert played.steps == int(played.lengths.max())
    assert torch.equal(played.returns, played.lengths - 1.0), "a reward of 1 for every step, none for the first"
    assert len(set(played.lengths.tolist())) > 1
    one = gymnasium.make("CartPole-v1")
    for row, length in enumerate(played.lengths.tolist()):
        one.reset(seed=0)
        obs = one.unwrapped.state = played.obs["state"][row, 0].double().numpy()
        for t in range(length):
            np.testing.assert_allclose(played.obs["state"][row, t], obs, rtol=1e-4, atol=1e-5)
            assert bool(played.is_terminal[row, t]) == (t == length - 1)
            if t < length - 1:
                obs, _, over, _, _ = one.step(int(played.action[row, t]))
                assert over == (t == length - 2)
        assert torch.equal(
            played.obs["state"][row, length:], played.obs["state"][row, -1].expand(played.steps - length, 4)
        )


def test_the_same_arguments_give_the_same_episodes_and_move_no_stream(
    worlds: VectorEnv, networks: DreamerNetworks
) -> None:
    before = torch.get_rng_state()
    one, other, random = (play(networks, worlds, episodes=3, keys=KEYS, act=a) for a in ("policy", "policy", "random"))
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("action", "reward", "is_terminal", "lengths"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert torch.equal(one.obs["state"][:, 0], random.obs["state"][:, 0]), "all kinds begin in the same worlds"
    assert one.action.shape != random.action.shape or not torch.equal(one.action, random.action)


class Failing(OptionalMembers, VectorEnv):
    """Two worlds that count their steps, episodes of four; the second fails at its third step and begins again."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self) -> None:
        self.num_envs, self.device, self.episode_length = 2, torch.device("cpu"), 4
        self.single_action_space = spaces.MultiDiscrete([2, 3], start=[0, 5])
        self.single_observation_space = spaces.Dict({"state": spaces.Box(-np.inf, np.inf, (1,), np.float32)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self.time, self.clock, self.over = torch.zeros(2), 0, torch.zeros(2, dtype=torch.bool)
        return {"state": self.time[:, None].clone()}, {}

    def step(self, action: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, dict[str, Any]]:
        assert action.shape == (2, 2)
        assert set(action[:, 1].tolist()) <= {5, 6, 7}
        self.clock += 1
        reward = torch.where(self.over, 0.0, 1.0)
        self.time = torch.where(self.over, 0, self.time + 1)
        failed = torch.tensor([False, self.clock == 3])
        truncated = (self.time == 4) | failed
        self.over = truncated
        info = {"restarted": failed}
        return {"state": self.time[:, None].clone()}, reward, torch.zeros(2, dtype=torch.bool), truncated, info


def test_who_acts_is_one_of_two() -> None:
    with pytest.raises(InvalidOption, match="mode"):
        play(None, Failing(), episodes=2, keys=KEYS, act="mode")


def test_an_episode_that_was_cut_does_not_count_and_the_next_one_does() -> None:
    played = play(None, Failing(), episodes=2, keys=KEYS, act="random")
    assert played.lengths.tolist() == [5, 5]
    assert played.obs["state"][..., 0].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert played.reward.tolist() == [[0, 1, 1, 1, 1]] * 2
    assert not bool(played.is_terminal.any())


def test_what_was_played_and_what_repeats_the_end() -> None:
    still = torch.zeros(2, 3)
    episodes = Episodes({}, still, torch.tensor([[0, 1, 1.0], [0, 2, 5]]), still > 0, torch.tensor([3, 2]))
    assert episodes.valid.tolist() == [[True, True, True], [True, True, False]]
    assert episodes.returns.tolist() == [2, 2]
