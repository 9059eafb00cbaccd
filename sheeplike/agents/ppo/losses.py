"""Advantages and losses of PPO as pure functions of tensors.

Sources: generalised advantage estimation (Schulman et al., 2016), the clipped objective (Schulman et al., 2017), and
the details that matter in practice (Huang et al., 2022, "The 37 implementation details of PPO").

Shape letters: ``T`` steps of a trajectory, ``N`` worlds, ``B`` batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sheeplike.nn.distributions import JointCategorical, Normal, OneHotCategorical

STORED = ("raw_action", "log_prob", "value")  # known when a step is taken
COMPUTED = ("advantage", "target", "mask")  # known when its rollout is complete


def gae(
    reward: Tensor, value: Tensor, is_last: Tensor, is_terminal: Tensor, *, discount: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and value targets ``(T, N)`` of steps ``0 .. T-1`` from ``(T + 1, N)`` inputs.

    The advantage of an action of step ``t`` comes from reward, ending and value of step ``t + 1``. A truncated episode
    bootstraps from the value of its true last frame, which next-step reset delivers; a terminated one from 0. An
    action chosen on a last frame was ignored: its advantage is 0, its target its own value, and the mask leaves it out.
    """
    assert reward.shape == value.shape == is_last.shape == is_terminal.shape
    follows = (~is_terminal[1:]).float() * discount
    delta = reward[1:] + follows * value[1:] - value[:-1]
    carry = (~is_last[1:]).float() * discount * gae_lambda
    estimates = []
    ahead = torch.zeros_like(value[0])
    for t in reversed(range(len(delta))):
        ahead = delta[t] + carry[t] * ahead
        estimates.append(ahead)
    advantage = torch.stack(estimates[::-1]) * ~is_last[:-1]
    return advantage, advantage + value[:-1]


def compute_advantages(
    reward: Tensor,
    value: Tensor,
    is_last: Tensor,
    is_terminal: Tensor,
    *,
    reward_scaling: float,
    discount: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return advantage, value target and mask (0 where the action was ignored) of a trajectory's steps."""
    reward = reward * reward_scaling
    advantage, target = gae(reward, value, is_last, is_terminal, discount=discount, gae_lambda=gae_lambda)
    return advantage, target, (~is_last[:-1]).float()


class Totals(NamedTuple):
    """Moments of a minibatch over the valid steps of all ranks, 0-dim each."""

    count: Tensor
    advantage_mean: Tensor
    advantage_variance: Tensor
    target_variance: Tensor


def sums(advantage: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return count, sums and sums of squares of advantages and targets ``(M, B)`` where ``mask``: ``(M, 5)`` float64.

    They add up over ranks; :func:`totals_of` a row makes :class:`Totals`.
    """
    mask, advantage, target = mask.double(), advantage.double(), target.double()
    parts = [mask, advantage * mask, advantage.square() * mask, target * mask, target.square() * mask]
    return torch.stack(parts, -1).sum(1)


def totals_of(row: Tensor, dtype: torch.dtype) -> Totals:
    """Return the moments that a row ``(5,)`` of :func:`sums` describes."""
    count, advantage, advantage_square, target, target_square = row.unbind()
    most = count.clamp_min(1)
    mean, target_mean = advantage / most, target / most
    variances = (advantage_square / most - mean.square(), target_square / most - target_mean.square())
    return Totals(*(x.to(dtype) for x in (most, mean, *(variance.clamp_min(0) for variance in variances))))


def masked_mean(x: Tensor, mask: Tensor, count: Tensor | None = None) -> Tensor:
    """Return the mean of ``x (B,)`` where ``mask (B,)``, 0 where there is nothing; or the sum over ``count`` steps."""
    return (x * mask).sum() / (mask.sum().clamp_min(1) if count is None else count)


def masked_variance(x: Tensor, mask: Tensor) -> Tensor:
    """Return the variance of ``x (B,)`` where ``mask (B,)``; 0 where there is nothing."""
    return masked_mean((x - masked_mean(x, mask)).square(), mask)


def normalise(advantage: Tensor, mask: Tensor) -> Tensor:
    """Return ``advantage (B,)`` with mean 0 and standard deviation 1 over the entries in ``mask``."""
    return (advantage - masked_mean(advantage, mask)) * torch.rsqrt(masked_variance(advantage, mask) + 1e-8)


def policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Return the clipped objective ``(B,)``: no gain from a ratio outside ``1 - clip .. 1 + clip``."""
    ratio = (log_prob - old_log_prob).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def value_loss(value: Tensor, old_value: Tensor, target: Tensor, clip: float | None) -> Tensor:
    """Return half the squared error ``(B,)``; with ``clip``, at least that of a value near the old one."""
    error = (value - target).square()
    if clip is not None:
        near = old_value + (value - old_value).clamp(-clip, clip)
        error = torch.maximum(error, (near - target).square())
    return 0.5 * error


def approximate_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Estimate KL(old || new) ``(B,)``, unbiased and never negative (Schulman 2020): ``r - 1 - log r``."""
    log_ratio = log_prob - old_log_prob
    return torch.expm1(log_ratio) - log_ratio


def objective(
    policy: Normal | OneHotCategorical | JointCategorical,
    value: Tensor,
    raw_action: Tensor,
    old_log_prob: Tensor,
    old_value: Tensor,
    advantage: Tensor,
    target: Tensor,
    mask: Tensor,
    *,
    clip: float,
    value_clip: float | None,
    normalise_advantage: bool,
    totals: Totals | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return losses ``policy``, ``value`` and ``entropy``, and metrics, 0-dim, over the steps where ``mask`` is 1.

    With ``totals``, these are the shares of one rank, which add up to those of all.

    Args:
        policy, value: outputs of the networks now, for ``B`` steps.
        raw_action, old_log_prob, old_value: drawn by the policy at the time, ``(B, A)``, and its outputs then,
            ``(B,)``.
        advantage, target, mask: ``(B,)``; see :func:`compute_advantages`.
    """
    # The ratio of an ignored step is set to 1: if it overflowed, the masked sum would be NaN.
    log_prob = torch.where(mask.bool(), policy.log_prob(raw_action), old_log_prob)
    count = None if totals is None else totals.count
    if normalise_advantage and totals is None:
        advantage = normalise(advantage, mask)
    elif normalise_advantage:
        advantage = (advantage - totals.advantage_mean) * torch.rsqrt(totals.advantage_variance + 1e-8)
    losses = {
        "policy": policy_loss(log_prob, old_log_prob, advantage, clip),
        "value": value_loss(value, old_value, target, value_clip),
        "entropy": policy.entropy(),
    }
    with torch.no_grad():
        ratio, error = (log_prob - old_log_prob).exp(), target - value
        metrics = {
            "ppo/approx_kl": masked_mean(approximate_kl(log_prob, old_log_prob), mask, count),
            "ppo/clip_fraction": masked_mean(((ratio - 1).abs() > clip).float(), mask, count),
            "ppo/valid_fraction": mask.mean(),
            "actor/entropy": masked_mean(losses["entropy"], mask, count),
            "critic/value": masked_mean(value, mask, count),
        }
        if totals is None:
            unexplained, spread = masked_variance(error, mask), masked_variance(target, mask)
            metrics["critic/explained_variance"] = 1 - unexplained / spread.clamp_min(1e-8)
        else:
            error = error - totals.advantage_mean  # that of the values before; small differences keep their digits
            metrics |= {f"error/{power}": masked_mean(error**power, mask, count) for power in (1, 2)}
        if isinstance(policy, Normal):
            metrics["actor/std"] = masked_mean(policy.std.mean(-1), mask, count)
    return {name: masked_mean(loss, mask, count) for name, loss in losses.items()}, metrics
