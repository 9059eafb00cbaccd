"""Lambda-returns against their definition: a weighted average of all n-step returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sheeplike.agents.dreamer_v3.actor_critic import lambda_return


def n_step_return(
    t: int, n: int, terminal: np.ndarray, reward: np.ndarray, bootstrap: np.ndarray, discount: float
) -> float:
    """Rewards for arriving at t+1 ... t+n, then the bootstrap of t+n; what follows counts if nothing terminated."""
    total, alive = 0.0, 1.0
    for k in range(t + 1, t + n + 1):
        total += alive * reward[k]
        alive *= discount * (1 - terminal[k])
    return total + alive * bootstrap[t + n]


def averaged(
    last: np.ndarray, terminal: np.ndarray, reward: np.ndarray, bootstrap: np.ndarray, discount: float, lam: float
) -> np.ndarray:
    """Sum for every t: (1 - lambda) lambda^(n-1) of the n-step return; where it cannot go on, n takes all that is left.

    It cannot go on past the end of the data nor past the end of an episode.
    """
    steps = len(reward) - 1
    returns = np.zeros(steps)
    for t in range(steps):
        left = 1.0
        for n in range(1, steps - t + 1):
            over = t + n == steps or bool(last[t + n])
            share = left if over else left * (1 - lam)
            returns[t] += share * n_step_return(t, n, terminal, reward, bootstrap, discount)
            left -= share
            if over:
                break
    return returns


def compare(
    last: np.ndarray,
    terminal: np.ndarray,
    *,
    discount: float = 332 / 333,
    lam: float = 0.95,
    seed: int = 0,
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    reward, bootstrap = rng.standard_normal(last.shape), 5 * rng.standard_normal(last.shape)
    expected = np.stack([averaged(*row, discount, lam) for row in zip(last, terminal, reward, bootstrap, strict=True)])
    arrays = (torch.tensor(x) for x in (last, terminal, reward, bootstrap))
    got = lambda_return(*arrays, discount, lam)
    assert got.shape == (last.shape[0], last.shape[1] - 1)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    return expected


def episode_ends(*ends: tuple[int, bool], steps: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """``last`` and ``terminal`` of one sequence, from (step, whether it is terminal)."""
    last, terminal = np.zeros((1, steps), bool), np.zeros((1, steps), bool)
    for step, terminated in ends:
        last[0, step], terminal[0, step] = True, terminated
    return last, terminal


@pytest.mark.parametrize(
    "ends",
    [
        (),
        ((4, True),),
        ((4, False),),
        ((8, True),),
        ((8, False),),
        ((1, True), (5, False)),
        ((2, False), (3, True)),
        ((0, True),),
    ],
    ids=["none", "terminal", "truncated", "terminal at the end", "truncated at the end", "both", "in a row", "at 0"],
)
@pytest.mark.parametrize(("discount", "lam"), [(332 / 333, 0.95), (1.0, 0.95), (0.9, 0.0), (0.9, 1.0)])
def test_endings(ends: tuple[tuple[int, bool], ...], discount: float, lam: float) -> None:
    compare(*episode_ends(*ends), discount=discount, lam=lam)


@pytest.mark.parametrize("seed", range(5))
def test_probable_termination_as_in_imagination(seed: int) -> None:
    rng = np.random.default_rng(seed)
    compare(np.zeros((6, 16)), rng.uniform(0, 0.4, (6, 16)), discount=1.0, seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_random_endings_as_in_replay(seed: int) -> None:
    rng = np.random.default_rng(seed)
    last = rng.random((6, 20)) < 0.25
    compare(last, last & (rng.random((6, 20)) < 0.5), seed=seed)


def test_by_hand() -> None:
    """Two steps, discount 1/2, lambda 1/2, rewards 1, 2, 4 and bootstraps 8, 16, 32."""
    reward, bootstrap = torch.tensor([[1.0, 2, 4]]), torch.tensor([[8.0, 16, 32]])
    no = torch.zeros(1, 3)
    # R1 = 4 + 32/2 = 20; R0 is half of 2 + 16/2 = 10 and half of 2 + R1/2 = 12.
    assert lambda_return(no, no, reward, bootstrap, 0.5, 0.5).tolist() == [[11.0, 20.0]]
    at_one = torch.tensor([[0.0, 1, 0]])
    # Truncated at 1: R0 bootstraps there. Terminated at 1: nothing follows the reward.
    assert lambda_return(at_one, no, reward, bootstrap, 0.5, 0.5)[0, 0].item() == 10.0
    assert lambda_return(at_one, at_one, reward, bootstrap, 0.5, 0.5)[0, 0].item() == 2.0


def test_rewards_are_for_arriving_so_the_first_reward_and_ending_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    reward, bootstrap = (torch.randn(2, 6, generator=generator) for _ in range(2))
    no = torch.zeros(2, 6)
    first = torch.zeros(2, 6)
    first[:, 0] = 1
    expected = lambda_return(no, no, reward, bootstrap, 0.9, 0.95)
    assert torch.equal(lambda_return(first, first, reward + 7 * first, bootstrap + 7 * first, 0.9, 0.95), expected)


@pytest.mark.parametrize("steps", [2, 3, 17, 65])
def test_the_gradient_is_that_of_the_recursion(steps: int) -> None:
    rng = torch.Generator().manual_seed(0)
    last = torch.rand(4, steps, generator=rng) < 0.1
    given = [torch.rand(4, steps, generator=rng, dtype=torch.float64).requires_grad_() for _ in range(3)]
    terminal, reward, bootstrap = given
    ret, returns = bootstrap[:, -1], []
    for t in reversed(range(1, steps)):
        keep = 0.95 * ~last[:, t]
        ret = reward[:, t] + 0.99 * (1 - terminal[:, t]) * ((1 - keep) * bootstrap[:, t] + keep * ret)
        returns.insert(0, ret)
    weight = torch.rand(4, steps - 1, generator=rng, dtype=torch.float64)
    expected = torch.stack(returns, 1)
    got = lambda_return(last, terminal, reward, bootstrap, 0.99, 0.95)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    pairs = (torch.autograd.grad((returns * weight).sum(), given) for returns in (expected, got))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
