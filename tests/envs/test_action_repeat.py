"""An action is held inside the physics, never by rendering frames that are thrown away."""

from __future__ import annotations

import pytest
import torch

import sheeplike.envs
from sheeplike.envs.mjx.task import repeat_actions
from sheeplike.envs.mjx.tasks.cartpole import Cartpole


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_the_conversion_keeps_simulated_time_and_transitions(physics: str) -> None:
    """A cart-pole of half the control rate against one whose every step is taken twice with the same action."""
    steps, repeat = 6, 2
    options = {"num_envs": 2, "image_size": 16, "episode_length": 12, "physics": physics}
    held = sheeplike.envs.make("cartpole_swingup", action_repeat=repeat, **options)
    fine = sheeplike.envs.make("cartpole_swingup", **options)
    assert held.episode_length * repeat == fine.episode_length == steps * repeat
    assert held.metadata["render_fps"] * repeat == pytest.approx(fine.metadata["render_fps"])
    first, _ = held.reset(seed=4)
    same, _ = fine.reset(seed=4)
    assert torch.equal(first["pixels/fixed"], same["pixels/fixed"])
    actions = torch.tensor([[1.0], [-0.5]]) * torch.linspace(-1, 1, steps).view(-1, 1, 1)
    for number, action in enumerate(actions, 1):
        obs, _, terminated, truncated, info = held.step(action)
        for _ in range(repeat):
            expected, _, _, cut, finely = fine.step(action)
        assert torch.allclose(obs["state"], expected["state"], atol=1e-4)
        assert (obs["pixels/fixed"].int() - expected["pixels/fixed"].int()).abs().max() <= 3
        # The same time of the episode is left, and it ends at the same moment.
        assert torch.allclose(obs["privileged_state"][:, 5], expected["privileged_state"][:, 5], atol=1e-4)
        assert truncated.tolist() == cut.tolist() == [number == steps] * 2
        assert not terminated.any()
        assert (info["episode"]["length"] * repeat == finely["episode"]["length"]).all()


def test_success_takes_a_second_at_any_rate() -> None:
    assert [repeat_actions(Cartpole(), repeat)._success_steps for repeat in (1, 5)] == [13, 3]


@pytest.mark.parametrize(("repeat", "nearest"), [(2, 1), (30, 25), (1000, 125)])
def test_a_repeat_must_divide_the_episode(repeat: int, nearest: int) -> None:
    with pytest.raises(ValueError, match=f"action_repeat={repeat}: .*episode_length=125; nearest: {nearest}$"):
        sheeplike.envs.make("cartpole_balance", num_envs=1, action_repeat=repeat)
