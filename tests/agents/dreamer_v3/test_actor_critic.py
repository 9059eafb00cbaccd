"""Actor and critic losses, worked out in float64 from their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from sheeplike.agents.dreamer_v3.actor_critic import (
    ActorCritic,
    Policy,
    imagination_loss,
    replay_value_loss,
    return_metrics,
)
from sheeplike.agents.dreamer_v3.config import DreamerV3Config
from sheeplike.agents.spaces import ActionCodec
from sheeplike.nn.distributions import BoundedNormal, OneHotCategorical, TwoHotBins
from sheeplike.nn.normalizers import PercentileScale

ROLLOUTS, STATES, ACTIONS = 4, 7, 3
WEIGHTS = {"return_lambda": 0.95, "entropy_scale": 3e-4}


class Critic:
    """Value logits with most of their mass near a random value, their means and their cross entropies in float64."""

    def __init__(self, seed: int, *shape: int) -> None:
        rng = np.random.default_rng(seed)
        self.bins = TwoHotBins().values.double().numpy()
        centre = 4 * rng.standard_normal((*shape, 1))
        logits = np.maximum(-np.abs(self.bins - centre), -70) + 0.1 * rng.standard_normal((*shape, 255))
        self.logits = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
        exact = self.logits.detach().double().numpy()
        self.log_probs = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
        self.mean = (np.exp(self.log_probs) * self.bins).sum(-1)
        self.dist = TwoHotBins()(self.logits)

    def loss(self, target: np.ndarray) -> np.ndarray:
        """Cross entropy against weights linear in raw space; the targets here are all within the range."""
        loss = np.zeros(target.shape)
        for index in np.ndindex(target.shape):
            upper = next(k for k in range(1, 255) if self.bins[k] >= target[index])
            share = (target[index] - self.bins[upper - 1]) / (self.bins[upper] - self.bins[upper - 1])
            row = self.log_probs[index]
            loss[index] = -(share * row[upper] + (1 - share) * row[upper - 1])
        return loss


def returns(
    last: np.ndarray, terminal: np.ndarray, reward: np.ndarray, bootstrap: np.ndarray, discount: float
) -> np.ndarray:
    """Lambda-returns with lambda 0.95, recursively from the end, one number at a time."""
    rollouts, states = reward.shape
    out = np.zeros((rollouts, states - 1))
    for b in range(rollouts):
        follow = bootstrap[b, -1]
        for t in range(states - 2, -1, -1):
            lam = 0.0 if last[b, t + 1] else 0.95
            mixed = (1 - lam) * bootstrap[b, t + 1] + lam * follow
            follow = reward[b, t + 1] + discount * (1 - terminal[b, t + 1]) * mixed
            out[b, t] = follow
    return out


def policy_and_numbers(kind: str) -> tuple[Any, Tensor, Tensor, np.ndarray, np.ndarray]:
    """Policy, its raw parameters, actions, log-probabilities and entropies."""
    rng = np.random.default_rng(7)
    if kind == "continuous":
        raw = rng.standard_normal((ROLLOUTS, STATES, 2 * ACTIONS)).astype(np.float32)
        mean = np.tanh(raw[..., :ACTIONS].astype(np.float64))
        std = 0.9 / (1 + np.exp(-raw[..., ACTIONS:].astype(np.float64) - 2)) + 0.1
        action = mean + std * rng.standard_normal(mean.shape)
        log_prob = (-((action - mean) ** 2) / (2 * std**2) - np.log(std * np.sqrt(2 * np.pi))).sum(-1)
        entropy = np.log(std * np.sqrt(2 * np.pi * np.e)).sum(-1)
    else:
        raw = rng.standard_normal((ROLLOUTS, STATES, ACTIONS)).astype(np.float32)
        probs = 0.99 * np.exp(raw) / np.exp(raw).sum(-1, keepdims=True) + 0.01 / ACTIONS
        action = np.eye(ACTIONS)[rng.integers(ACTIONS, size=(ROLLOUTS, STATES))]
        log_prob, entropy = np.log((action * probs).sum(-1)), -(probs * np.log(probs)).sum(-1)
    tensor = torch.tensor(raw, requires_grad=True)
    dist = BoundedNormal(tensor) if kind == "continuous" else OneHotCategorical(tensor, 0.01)
    return dist, tensor, torch.tensor(action, dtype=torch.float32), log_prob, entropy


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
@pytest.mark.parametrize("spread", [0.0, 900.0], ids=["returns below the floor", "large returns"])
def test_imagination_losses_by_hand(kind: str, spread: float) -> None:
    rng = np.random.default_rng(3)
    reward, cont = rng.standard_normal((ROLLOUTS, STATES)), rng.uniform(0.3, 1, (ROLLOUTS, STATES))
    fast, slow = Critic(1, ROLLOUTS, STATES), Critic(2, ROLLOUTS, STATES)
    policy, _, action, log_prob, entropy = policy_and_numbers(kind)
    scale = PercentileScale()
    scale.range[1] = spread
    losses, ret, _ = imagination_loss(
        action, torch.tensor(reward), torch.tensor(cont), policy, fast.dist, slow.dist, scale, **WEIGHTS
    )

    # Targets bootstrap the fast critic; the horizon is inside cont, so the discount is 1.
    expected = returns(np.zeros_like(cont), 1 - cont, reward, fast.mean, 1.0)
    np.testing.assert_allclose(ret, expected, rtol=1e-4, atol=1e-4)
    # The weight of the first state is cont of the first state, not 1.
    weight = np.stack([cont[:, : t + 1].prod(1) for t in range(STATES - 1)], 1)
    low, high = 0.01 * np.percentile(expected, 5), 0.99 * spread + 0.01 * np.percentile(expected, 95)
    advantage = (expected - fast.mean[:, :-1]) / max(1.0, high - low)
    policy_loss = -weight * (log_prob[:, :-1] * advantage + 3e-4 * entropy[:, :-1])
    np.testing.assert_allclose(losses["policy"].detach(), policy_loss, rtol=1e-3, atol=1e-4)
    padded = np.concatenate([expected, np.zeros((ROLLOUTS, 1))], 1)
    value_loss = weight * (fast.loss(padded) + fast.loss(slow.mean))[:, :-1]
    np.testing.assert_allclose(losses["value"].detach(), value_loss, rtol=1e-3)
    assert set(losses) == {"policy", "value"}
    assert losses["policy"].shape == losses["value"].shape == (ROLLOUTS, STATES - 1)


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_imagination_gradients_reach_policy_and_fast_value_only(kind: str) -> None:
    """Everything else stops: rewards, continuations, actions, targets, weights, and the slow critic."""
    reward = torch.randn(ROLLOUTS, STATES, requires_grad=True)
    cont = torch.rand(ROLLOUTS, STATES, requires_grad=True)
    fast, slow = Critic(1, ROLLOUTS, STATES), Critic(2, ROLLOUTS, STATES)
    policy, raw, action, *_ = policy_and_numbers(kind)
    action.requires_grad_()
    losses, ret, metrics = imagination_loss(
        action, reward, cont, policy, fast.dist, slow.dist, PercentileScale(), **WEIGHTS
    )
    inputs = {"reward": reward, "cont": cont, "action": action, "slow": slow.logits, "fast": fast.logits, "raw": raw}
    for name, receiver in (("policy", "raw"), ("value", "fast")):
        gradients = torch.autograd.grad(losses[name].sum(), inputs.values(), allow_unused=True, retain_graph=True)
        reached = {key for key, g in zip(inputs, gradients, strict=True) if g is not None and bool(g.any())}
        assert reached == {receiver}
    assert not ret.requires_grad
    assert not any(value.requires_grad for value in metrics.values())


def test_policy_gradient_is_that_of_reinforce_for_continuous_actions_too() -> None:
    """Gradients by hand for two states: d(loss)/d(mean) = -weight * advantage * (a - mean) / std^2, entropy aside."""
    raw = torch.zeros(2, 2, 2, requires_grad=True)
    std = 0.1 + 0.9 / (1 + np.exp(-2.0))
    action = torch.tensor([[[0.7], [0.0]], [[-2.0], [0.0]]])
    value = TwoHotBins()(torch.zeros(2, 2, 255))  # predicts 0
    reward, cont = torch.tensor([[0.0, 0.5], [0.0, -0.25]]), torch.tensor([[0.8, 0.9], [0.6, 0.9]])
    losses, _, _ = imagination_loss(
        action, reward, cont, BoundedNormal(raw), value, value, PercentileScale(), return_lambda=0.95, entropy_scale=0.0
    )
    losses["policy"].sum().backward()
    expected = [-0.8 * 0.5 * 0.7 / std**2, -0.6 * -0.25 * -2.0 / std**2]
    np.testing.assert_allclose(raw.grad[:, 0, 0], expected, rtol=1e-5)
    assert not raw.grad[:, 1].any(), "the last action is never scored"


def test_value_gradient_pulls_towards_the_return_and_towards_the_slow_critic() -> None:
    fast, slow = Critic(1, 2, 2), Critic(2, 2, 2)
    reward, cont = torch.tensor([[0.0, 3.0], [0.0, -1.0]]), torch.tensor([[0.5, 0.0], [0.9, 0.0]])
    policy = BoundedNormal(torch.zeros(2, 2, 2))
    losses, _, _ = imagination_loss(
        torch.zeros(2, 2, 1), reward, cont, policy, fast.dist, slow.dist, PercentileScale(), **WEIGHTS
    )
    losses["value"].sum().backward()
    # The gradient of a cross entropy is softmax - target; its mean over the bins is the error of the prediction.
    # cont 0 at the next state: the return is the reward. Two cross entropies, each weighed by cont of the first state.
    middle = np.abs(fast.bins) < 1e3  # float32 noise times bins of 1e8 would drown the sum
    pull = (fast.logits.grad[:, 0].double().numpy() * fast.bins)[:, middle].sum(-1)
    expected = [0.5, 0.9] * (2 * fast.mean[:, 0] - [3.0, -1.0] - slow.mean[:, 0])
    np.testing.assert_allclose(pull, expected, atol=5e-3)


ENDINGS = {
    "none": ([], []),
    "truncated": ([2], []),
    "terminal": ([2], [2]),
    "both": ([1, 4], [4]),
    "at the last step": ([5], [5]),
}


@pytest.mark.parametrize("ends", ENDINGS)
def test_replay_value_loss_by_hand(ends: str) -> None:
    rng = np.random.default_rng(5)
    last, terminal = np.zeros((2, 6), bool), np.zeros((2, 6), bool)
    last[0, ENDINGS[ends][0]], terminal[0, ENDINGS[ends][1]] = True, True
    reward, bootstrap = rng.standard_normal((2, 6)), 3 * rng.standard_normal((2, 6))
    fast, slow = Critic(1, 2, 6), Critic(2, 2, 6)
    tensors = [torch.tensor(x) for x in (last, terminal, reward, bootstrap)]
    loss = replay_value_loss(*tensors, fast.dist, slow.dist, horizon=333.0, return_lambda=0.95)
    # Real endings carry no horizon: the discount is 1 - 1/333 here.
    ret = returns(last, terminal, reward, bootstrap, 1 - 1 / 333)
    padded = np.concatenate([ret, np.zeros((2, 1))], 1)
    expected = ~last[:, :-1] * (fast.loss(padded) + fast.loss(slow.mean))[:, :-1]
    assert loss.shape == (2, 5)
    np.testing.assert_allclose(loss.detach(), expected, rtol=1e-4)
    loss.sum().backward()
    assert slow.logits.grad is None


def test_the_value_of_a_last_step_is_not_trained_in_replay() -> None:
    last = torch.tensor([[False, True, False, False]])
    fast, slow = Critic(1, 1, 4), Critic(2, 1, 4)
    zeros = torch.zeros(1, 4)
    loss = replay_value_loss(last, last, zeros, zeros, fast.dist, slow.dist, horizon=333.0, return_lambda=0.95)
    loss.sum().backward()
    assert fast.logits.grad[0].any(-1).tolist() == [True, False, True, False]


def test_slow_critic_begins_as_a_copy_that_shares_no_memory_and_is_not_trained() -> None:
    torch.manual_seed(0)
    critic = ActorCritic(20, ActionCodec(spaces.Discrete(3)), DreamerV3Config(size="1m"))
    pairs = list(zip(critic.slow_value.named_parameters(), critic.value.named_parameters(), strict=True))
    assert pairs
    for (slow_name, slow), (name, fast) in pairs:
        assert slow_name == name
        assert torch.equal(slow, fast)
        assert slow.data_ptr() != fast.data_ptr()
        assert not slow.requires_grad
        assert fast.requires_grad


def test_returns_have_the_unit_of_rewards() -> None:
    config = DreamerV3Config(size="1m", reward_scaling=10.0)
    critic = ActorCritic(20, ActionCodec(spaces.Discrete(3)), config)
    assert critic.return_scale.limit == 0.1


@pytest.mark.parametrize("unimix", [0.0, 0.01])
def test_discrete_policy_has_the_unimix_it_was_given(unimix: float) -> None:
    policy = Policy(8, ActionCodec(spaces.Discrete(4)), 16, unimix=unimix)
    output = [m for m in policy.modules() if isinstance(m, nn.Linear)][-1]
    with torch.no_grad():
        output.bias.copy_(torch.tensor([90.0, 0, 0, 0]))
        probs = policy(torch.zeros(1, 8)).probs[0]
    np.testing.assert_allclose(probs, [1 - 0.75 * unimix, *[unimix / 4] * 3], atol=1e-6)


def test_metrics_of_returns_do_not_depend_on_their_unit() -> None:
    torch.manual_seed(0)
    returns, error, spread = torch.randn(50, 3), 0.5 * torch.randn(50, 3), torch.tensor(1.0)
    large, small = (return_metrics(k * returns, k * error, k * spread) for k in (1.0, 1e-6))
    for name in ("actor/advantage_std", "critic/explained_variance"):
        torch.testing.assert_close(small[name], large[name])
