import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from mujoco import mjx

from sheeplike.envs.mjx.options import CartpoleBalanceOptions, CartpoleSwingupOptions
from sheeplike.envs.mjx.tasks.cartpole import Cartpole, tolerance


def test_tolerance_is_the_suites():
    # Values of dm_control.utils.rewards.tolerance(x, margin=margin) with its Gaussian default.
    assert float(tolerance(jnp.array(0.0), margin=2.0)) == 1.0
    np.testing.assert_allclose(tolerance(jnp.array([2.0, -2.0]), margin=2.0), 0.1, rtol=1e-6)
    np.testing.assert_allclose(tolerance(jnp.array(2.5), margin=5.0), 0.1**0.25, rtol=1e-6)


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_the_reward_is_the_product_of_its_factors(swingup):
    swingup.reset(seed=0)
    for action in torch.rand(30, 2, 1) * 2 - 1:
        obs, reward, *_ = swingup.step(action)
        position, cosine, _, _, velocity = obs["state"].double().T
        control = (4 + 1 - action[:, 0].double() ** 2) / 5
        centred = (1 + 0.1 ** ((position / 2) ** 2)) / 2
        slow = (1 + 0.1 ** ((velocity / 5) ** 2)) / 2
        torch.testing.assert_close(reward.double(), (1 + cosine) / 2 * control * centred * slow, rtol=0, atol=1e-6)
        assert ((reward >= 0) & (reward <= 1)).all()


def test_balance_starts_upright_and_swingup_hanging(cartpole, swingup):
    starts = [cartpole.reset(seed=seed)[0]["state"].clone() for seed in range(5)]
    states = torch.cat(starts)
    assert (states[:, 1] > 0.999).all()
    assert (states[:, 0].abs() <= 0.1).all()
    assert states[:, 0].std() > 0.02
    hanging = swingup.reset(seed=0)[0]["state"]
    assert (hanging[:, 1] < -0.99).all()
    assert (hanging[:, 0].abs() < 0.1).all()


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_a_balanced_pole_is_worth_nearly_everything_and_counts_as_success(swingup):
    """A linear feedback holds the pole for a second; the same start without it fails. Also: success stays reported."""
    swingup.reset(seed=0)
    upright = swingup.state_dict()
    upright["[1].data.qpos"][:] = torch.tensor([0.05, 0.03])
    upright["[1].data.qvel"][:] = 0.0
    swingup.load_state_dict(upright)
    rewards, success = [], []
    action = torch.zeros(2, 1)
    for _ in range(60):
        obs, reward, terminated, truncated, info = swingup.step(action)
        position, cosine, sine, speed, rate = obs["state"].T
        feedback = 0.12 * position + 0.25 * speed + 3.0 * torch.atan2(sine, cosine) + 0.8 * rate
        action = torch.stack([feedback[0], torch.zeros(())])[:, None].clamp(-1, 1)
        rewards.append(reward.clone())
        success.append(info["success"].clone())
        assert not (terminated | truncated).any()
    rewards, success = torch.stack(rewards), torch.stack(success)
    assert (rewards[:, 0] > 0.9).all()
    assert success[:, 0].tolist() == [False] * 12 + [True] * 48
    assert not success[:, 1].any()
    assert rewards[:, 1].min() < 0.5
    assert obs["privileged_state"][0, 6] == 1.0


def test_a_fallen_pole_ends_a_balance_unless_it_may_fall_and_no_swing_up():
    """Judged where the pole is: just above the horizontal it goes on, just below it is over; hanging is a beginning."""
    balance, swingup = Cartpole(), Cartpole(CartpoleSwingupOptions())
    suite = Cartpole(CartpoleBalanceOptions(fall_ends=False))
    data = mjx.make_data(balance.model, impl="warp", naconmax=1, njmax=4)
    memory = balance.reset(jax.random.key(0), data)[1]
    for angle, fallen in ((0.0, False), (1.55, False), (-1.55, False), (1.6, True), (-1.6, True), (3.1, True)):
        there = data.replace(qpos=jnp.array([0.0, angle]))
        assert bool(balance.evaluate(there, memory, jnp.zeros(1)).terminated) == fallen
        for endless in (swingup, suite):
            assert not bool(endless.evaluate(there, memory, jnp.zeros(1)).terminated)


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_the_cart_stays_on_its_rail_and_in_the_picture(swingup):
    swingup.reset(seed=0)
    for _ in range(90):
        obs, *_ = swingup.step(torch.tensor([[1.0], [-1.0]]))
        assert (obs["state"][:, 0].abs() < 2.0).all()
    # At both ends the cart's blue is seen at the edge of the image.
    blue = (obs["pixels/fixed"][..., 2] > 150) & (obs["pixels/fixed"][..., 0] < 100)
    columns = blue.float().sum(1)
    assert columns[0, 6:].sum() > 0
    assert columns[1, :6].sum() > 0
