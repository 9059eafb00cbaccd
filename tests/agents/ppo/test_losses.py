"""Advantages and losses against their definitions, walked through one world and one number at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from sheeplike.agents.ppo.losses import approximate_kl, gae, masked_mean, normalise, policy_loss, value_loss

GAMMA, LAMBDA = 0.97, 0.9


class Case(NamedTuple):
    """Inputs of :func:`gae`, ``(T + 1, N)``."""

    reward: Tensor
    value: Tensor
    is_last: Tensor
    is_terminal: Tensor


def random_case(seed: int, *, steps: int = 12, worlds: int = 7) -> Case:
    """Endings of both kinds anywhere; the first worlds have one where mistakes like to hide."""
    rng = np.random.default_rng(seed)
    last = np.zeros((steps + 1, worlds), bool)
    # The first step, the last one, the step that bootstraps, and several at the smallest distance.
    for world, times in enumerate(([0], [steps - 1], [steps], [0, 2, 4, steps])):
        last[times, world] = True
    for world in range(4, worlds):
        for t in range(steps + 1):
            last[t, world] = rng.random() < 0.25 and not (t and last[t - 1, world])
    terminal = last & (rng.random(last.shape) < 0.5)
    reward, value = rng.standard_normal((2, steps + 1, worlds))
    return Case(*map(torch.tensor, (reward, value, last, terminal)))


def walk(case: Case, discount: float, lam: float) -> np.ndarray:
    """The sum of discounted TD errors from each step to the end of its episode or of the data."""
    reward, value, last, terminal = (x.numpy() for x in case)
    steps, worlds = len(reward) - 1, reward.shape[1]
    advantage = np.zeros((steps, worlds))
    for n in range(worlds):
        for t in range(steps):
            if last[t, n]:
                continue  # the action was ignored
            for k in range(t, steps):
                after = 0.0 if terminal[k + 1, n] else value[k + 1, n]
                error = reward[k + 1, n] + discount * after - value[k, n]
                advantage[t, n] += (discount * lam) ** (k - t) * error
                if last[k + 1, n]:
                    break
    return advantage


@pytest.mark.parametrize("seed", range(6))
def test_gae_is_the_discounted_sum_of_td_errors_within_the_episode(seed: int) -> None:
    case = random_case(seed)
    advantage, target = gae(*case, discount=GAMMA, gae_lambda=LAMBDA)
    expected = walk(case, GAMMA, LAMBDA)
    np.testing.assert_allclose(advantage, expected, atol=3e-6)
    np.testing.assert_allclose(target, expected + case.value[:-1].numpy(), atol=3e-6)


@pytest.mark.parametrize("seed", range(3))
def test_lambda_one_is_the_discounted_return_and_lambda_zero_one_step(seed: int) -> None:
    case = random_case(seed)
    reward, value, last, terminal = (x.numpy() for x in case)
    _, returns = gae(*case, discount=GAMMA, gae_lambda=1.0)
    _, one_step = gae(*case, discount=GAMMA, gae_lambda=0.0)
    steps, worlds = one_step.shape
    for n in range(worlds):
        for t in range(steps):
            if last[t, n]:
                assert returns[t, n] == one_step[t, n] == value[t, n]
                continue
            end = next((k for k in range(t + 1, steps + 1) if last[k, n]), steps)
            total = sum(GAMMA ** (k - t - 1) * reward[k, n] for k in range(t + 1, end + 1))
            total += 0.0 if terminal[end, n] else GAMMA ** (end - t) * value[end, n]
            assert returns[t, n] == pytest.approx(total, abs=3e-6)
            after = 0.0 if terminal[t + 1, n] else value[t + 1, n]
            assert one_step[t, n] == pytest.approx(reward[t + 1, n] + GAMMA * after, abs=3e-6)


def one_world(*, last: int, terminal: bool) -> Case:
    """Six steps of one world whose episode ends at ``last``; every reward 1, values 10, 20, 30, …"""
    is_last = torch.zeros(6, 1, dtype=torch.bool)
    is_last[last] = True
    value = 10.0 * torch.arange(1, 7).view(6, 1)
    return Case(torch.ones(6, 1), value, is_last, is_last & terminal)


def test_a_truncated_episode_bootstraps_from_its_true_last_frame_and_a_terminated_one_from_nothing() -> None:
    # Step 2 leads to the ending at step 3, whose value is 40: 1 + 0.5 * 40 - 30 and 1 - 30.
    truncated, _ = gae(*one_world(last=3, terminal=False), discount=0.5, gae_lambda=1.0)
    terminated, _ = gae(*one_world(last=3, terminal=True), discount=0.5, gae_lambda=1.0)
    assert truncated[2].item() == -9.0
    assert terminated[2].item() == -29.0
    # Step 1: 1 + 0.5 * 30 - 20 = -4, and half of the next one's.
    assert truncated[1].item() == -8.5
    assert terminated[1].item() == -18.5
    # Step 4 begins another episode, which nothing ends: 1 + 0.5 * 60 - 50.
    assert truncated[4].item() == terminated[4].item() == -19.0
    assert truncated[3].item() == terminated[3].item() == 0.0


@pytest.mark.parametrize("terminal", [False, True])
def test_what_belongs_to_the_ignored_step_changes_nothing_else(terminal: bool) -> None:
    """Its action led to the first frame of the next episode: that reward, and after a termination its value."""
    case = random_case(0)
    before = gae(*case, discount=GAMMA, gae_lambda=LAMBDA)
    for t, n in case.is_last[:-1].nonzero().tolist():
        kind = bool(case.is_terminal[t, n])
        if kind != terminal:
            continue
        changed = Case(*(x.clone() for x in case))
        changed.reward[t + 1, n] = 1e3
        if terminal:
            changed.value[t, n] = -1e3
        after = gae(*changed, discount=GAMMA, gae_lambda=LAMBDA)
        others = torch.ones_like(before[0], dtype=torch.bool)
        others[t, n] = False
        assert after[0][t, n] == before[0][t, n] == 0.0
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old[others], new[others])


def test_the_reward_and_flags_of_the_first_step_are_not_of_this_trajectory() -> None:
    """It arrived before the first action; only its own ending says whether that action was ignored."""
    case = random_case(1)
    before, _ = gae(*case, discount=GAMMA, gae_lambda=LAMBDA)
    case.reward[0] += 100
    case.is_terminal[0] = ~case.is_terminal[0]
    after, _ = gae(*case, discount=GAMMA, gae_lambda=LAMBDA)
    assert torch.equal(before, after)


def test_gae_of_float32_stays_float32_and_keeps_inputs() -> None:
    case = random_case(2)
    single = Case(case.reward.float(), case.value.float(), case.is_last, case.is_terminal)
    kept = [x.clone() for x in single]
    advantage, target = gae(*single, discount=GAMMA, gae_lambda=LAMBDA)
    assert advantage.dtype == target.dtype == torch.float32
    np.testing.assert_allclose(advantage, walk(case, GAMMA, LAMBDA), atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(kept, single, strict=True))


# --- losses ---------------------------------------------------------------------------------------------------------

CLIP = 0.2
RATIOS = [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0]


@pytest.mark.parametrize("advantage", [2.0, -3.0])
@pytest.mark.parametrize("ratio", RATIOS)
def test_clipped_objective_and_its_gradient(ratio: float, advantage: float) -> None:
    """The ratio's gain is capped where moving further would pay, and the gradient ends there."""
    old = -1.7
    log_prob = torch.tensor([old + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss = policy_loss(log_prob, torch.tensor([old]).double(), torch.tensor([advantage]).double(), CLIP)
    capped = ratio > 1 + CLIP if advantage > 0 else ratio < 1 - CLIP
    limit = 1 + CLIP if advantage > 0 else 1 - CLIP
    assert loss.item() == pytest.approx(-advantage * (limit if capped else ratio), rel=1e-6)
    loss.sum().backward()
    assert log_prob.grad.item() == pytest.approx(0.0 if capped else -advantage * ratio, rel=1e-6)


def test_value_loss_is_half_the_squared_error_and_with_a_clip_the_worse_of_two() -> None:
    rng = np.random.default_rng(0)
    value, old, target = 2 * rng.standard_normal((3, 400))
    tensors = [torch.tensor(x) for x in (value, old, target)]
    np.testing.assert_allclose(value_loss(*tensors, None), 0.5 * (value - target) ** 2, rtol=1e-12)
    expected, branches = [], set()
    for v, o, y in zip(value, old, target, strict=True):
        near = min(max(v, o - 0.3), o + 0.3)
        expected.append(0.5 * max((v - y) ** 2, (near - y) ** 2))
        branches.add((v > o + 0.3, v < o - 0.3, (near - y) ** 2 > (v - y) ** 2))
    assert len(branches) == 5, "above, below and within the clip, better and worse for it"
    np.testing.assert_allclose(value_loss(*tensors, 0.3), expected, rtol=1e-12)


def test_a_value_that_has_moved_too_far_towards_its_target_gets_no_gradient() -> None:
    value = torch.tensor([2.0, 2.0], requires_grad=True)
    # Both moved from 0 to 2: the first on the way to 5, the second past 1.
    value_loss(value, torch.zeros(2), torch.tensor([5.0, 1.0]), 0.5).sum().backward()
    assert value.grad.tolist() == [0.0, 1.0]


def test_approximate_kl_by_definition_and_as_an_estimate_of_the_divergence() -> None:
    rng = np.random.default_rng(0)
    new, old = rng.standard_normal((2, 100))
    ratio = np.exp(new - old)
    expected = ratio - 1 - np.log(ratio)
    np.testing.assert_allclose(approximate_kl(torch.tensor(new), torch.tensor(old)), expected, rtol=1e-9, atol=1e-12)
    # Drawn from the old policy N(0, 1); the new one is N(0.3, 1.2): KL in closed form.
    x = torch.tensor(rng.standard_normal(400_000))
    logs = [torch.distributions.Normal(m, s).log_prob(x) for m, s in ((0.3, 1.2), (0.0, 1.0))]
    estimate = approximate_kl(*logs)
    assert (estimate >= 0).all()
    closed = math.log(1.2) + (1 + 0.3**2) / (2 * 1.2**2) - 0.5
    assert estimate.mean().item() == pytest.approx(closed, rel=0.02)
    reverse = -math.log(1.2) + (1.2**2 + 0.3**2) / 2 - 0.5
    assert abs(closed - reverse) > 0.2 * closed, "the other direction must not pass"


def test_approximate_kl_of_two_policies_that_hardly_differ_is_not_lost_to_rounding() -> None:
    new = torch.tensor([-1.0001])
    estimate = approximate_kl(new, torch.tensor([-1.0]))
    assert estimate.item() == pytest.approx(0.5 * (new.item() + 1) ** 2, rel=0.01, abs=0)


def test_masked_mean_and_normalise_are_numpys_over_what_is_left() -> None:
    rng = np.random.default_rng(0)
    x = 5 + 3 * rng.standard_normal(200)
    mask = rng.random(200) < 0.6
    tensors = torch.tensor(x), torch.tensor(mask).double()
    assert masked_mean(*tensors).item() == pytest.approx(x[mask].mean(), rel=1e-12)
    scaled = normalise(*tensors).numpy()[mask]
    np.testing.assert_allclose(scaled, (x[mask] - x[mask].mean()) / x[mask].std(), rtol=1e-6)
    assert scaled.std() == pytest.approx(1, rel=1e-6)


def test_what_is_masked_does_not_count_however_large() -> None:
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    x, other = torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([1.0, -1e6, 3.0, 5.0])
    kept = [0, 2, 3]
    assert masked_mean(x, mask) == masked_mean(other, mask) == 3.0
    assert torch.equal(normalise(x, mask)[kept], normalise(other, mask)[kept])


def test_nothing_to_average_gives_zero_and_equal_advantages_stay_finite() -> None:
    x, nothing = torch.tensor([1.0, 2.0]), torch.zeros(2)
    assert masked_mean(x, nothing) == 0.0
    assert bool(normalise(x, nothing).isfinite().all())
    assert normalise(torch.full((4,), 7.0), torch.ones(4)).tolist() == [0.0] * 4
