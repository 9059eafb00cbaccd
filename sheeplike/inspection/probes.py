"""Probes of frozen latents, fitted on some episodes and tested on others.

A linear probe is ridge regression in closed form; a small MLP also finds what is encoded in another form. Steps of one
episode are alike, so whole episodes are held out: other steps of a fitted episode would be no test.

Shape letters: ``M`` rows, ``F`` features, ``N`` entries of the target, ``L`` penalties.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheeplike.agents.agent import own_randomness
from sheeplike.nn.layers import MLP, Linear

ALPHAS = tuple(10.0**power for power in range(-5, 4))  # penalties of the ridge, per row
UNITS = 128  # of the MLP
MAX_ROWS = 8192  # a linear probe is fitted to at most so many
LIMIT = 10.0  # deviations; limit of the MLP's features, which rare classes would exceed by far
CONSTANT = 1e-5  # an entry with a lower deviation, relative to its magnitude, is constant
HARDLY = 0.05  # the same for a test, relative to the deviation in the fit


@dataclass(frozen=True)
class LinearProbe:
    """An affine map from features to a target; each column of ``weights`` is a direction in feature space."""

    weights: Tensor  # (F, N) float32, zeros where the entry was constant
    bias: Tensor  # (N,) float32
    alpha: Tensor  # (N,) float32, penalties chosen from ALPHAS

    def predict(self, features: Tensor) -> Tensor:
        """``(..., F)`` to ``(..., N)``."""
        return features.float() @ self.weights + self.bias

    @property
    def least_changes(self) -> Tensor:
        """``(N, F)``: the least change of the features that the probe reads as one unit more of each entry.

        The model need not follow it: what a probe reads is not always what the decoder uses. See :func:`directions`.
        """
        return (self.weights / self.weights.square().sum(0).clamp_min(1e-30)).T


@dataclass(frozen=True)
class MLPProbe:
    """One hidden layer on whitened features, clipped to :data:`LIMIT`."""

    net: nn.Module
    centre: Tensor
    scale: Tensor
    target_centre: Tensor
    target_scale: Tensor

    @torch.no_grad()
    def predict(self, features: Tensor) -> Tensor:
        """``(..., F)`` to ``(..., N)``."""
        x = _whiten(features, self.centre, self.scale)
        return self.net(x) * self.target_scale + self.target_centre


def split(episodes: int, share: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw the episodes to fit on and those to test on, as indices, at least one of each."""
    assert episodes >= 2, f"{episodes} episode: expected at least 2, to fit on some and test on others"
    order = torch.randperm(episodes, generator=torch.Generator().manual_seed(seed))
    held_out = min(max(round(share * episodes), 1), episodes - 1)
    return order[held_out:].sort().values, order[:held_out].sort().values


def fit_linear(features: Tensor, target: Tensor, episode: Tensor, *, seed: int = 0) -> LinearProbe:
    """Fit a ridge regression to all rows, for each entry with the penalty that was best on held-out episodes.

    Args:
        features: ``(M, F)``.
        target: ``(M, N)`` float32.
        episode: ``(M,)`` int64, the episode of each row; at least two different ones.
    """
    inner, chosen_on = _inner_split(episode, seed)
    weights, bias = _ridge(features[inner], target[inner])
    error = (features[chosen_on].float() @ weights + bias - target[chosen_on]).square().mean(1)  # (L, N)
    best, entries = error.argmin(0), torch.arange(target.shape[1], device=features.device)
    weights, bias = _ridge(features, target)
    chosen = weights[best, :, entries].T.contiguous(), bias[best, 0, entries]
    return LinearProbe(*chosen, torch.tensor(ALPHAS, device=features.device)[best])


def fit_mlp(features: Tensor, target: Tensor, episode: Tensor, *, steps: int = 1000, seed: int = 0) -> MLPProbe:
    """Fit an MLP of one hidden layer with AdamW, and keep the weights that were best on held-out episodes."""
    inner, chosen_on = _inner_split(episode, seed)
    centre, scale = _moments(features[inner])
    target_centre, target_scale = _moments(target[inner])
    x, y = _whiten(features, centre, scale), (target.float() - target_centre) * target_scale
    with own_randomness(features.device):
        torch.manual_seed(seed)
        # The output layer begins at zero, which predicts the mean: a fit to noise is no worse than that.
        net = nn.Sequential(MLP(x.shape[1], UNITS, 1), Linear(UNITS, y.shape[1], scale=0.0)).to(features.device)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=1e-2)
        best, kept = float("inf"), copy.deepcopy(net.state_dict())
        for step in range(steps + 1):
            if step % 50 == 0:
                with torch.no_grad():
                    error = F.mse_loss(net(x[chosen_on]), y[chosen_on]).item()
                if error < best:
                    best, kept = error, copy.deepcopy(net.state_dict())
            rows = inner[torch.randint(len(inner), (256,), device=features.device)]
            optimizer.zero_grad()
            F.mse_loss(net(x[rows]), y[rows]).backward()
            optimizer.step()
    net.load_state_dict(kept)
    # The scale of a constant target is 0: the prediction is its mean.
    back = torch.where(target_scale > 0, 1 / target_scale.clamp_min(1e-30), 0.0)
    return MLPProbe(net.eval(), centre, scale, target_centre, back)


def directions(features: Tensor, target: Tensor) -> Tensor:
    """Return ``(N, F)``: the mean change of ``features (M, F)`` per unit of each entry of ``target (M, N)``.

    This regresses the features on the target, where a probe does the reverse, so that states moved along stay close to
    states that occur. What usually changes with an entry changes too, except for the other entries of the target: to
    move a box alone, add the place of the hand.
    """
    x, y = (value.double() - value.double().mean(0) for value in (target, features))
    return (torch.linalg.pinv(x.T @ x, hermitian=True) @ (x.T @ y)).float()


def r_squared(predicted: Tensor, target: Tensor, spread: Tensor | None = None) -> list[float | None]:
    """Return the explained share of the variance of each entry of ``(M, N)``; None where it is constant.

    Args:
        spread: ``(N,)`` deviation of each entry in the fit; an entry that varies far less here counts as constant.
    """
    target = target.double()
    error, variance = (predicted.double() - target).square().mean(0), target.var(0, correction=0)
    still = constant(target)
    if spread is not None:
        still |= variance.sqrt() < HARDLY * spread
    found = (1 - error / variance.clamp_min(1e-300)).tolist()
    return [None if none else value for value, none in zip(found, still.tolist(), strict=True)]


def rmse(predicted: Tensor, target: Tensor) -> list[float]:
    """Return the root mean squared error of each entry of ``(M, N)``, in its units."""
    return (predicted.double() - target.double()).square().mean(0).sqrt().tolist()


def constant(target: Tensor) -> Tensor:
    """Return ``(N,)`` bool, True for the entries of ``(M, N)`` that do not change."""
    target = target.double()
    return target.std(0, correction=0) <= CONSTANT * target.abs().mean(0).clamp_min(1e-3)


def _ridge(features: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights ``(L, F, N)`` and biases ``(L, 1, N)`` for all penalties, from one decomposition."""
    if len(features) > MAX_ROWS:
        rows = torch.linspace(0, len(features) - 1, MAX_ROWS).long()
        features, target = features[rows], target[rows]
    centre, scale = _moments(features)
    target_centre, target_scale = _moments(target)
    x = ((features.float() - centre) * scale).double()
    y = ((target.float() - target_centre) * (target_scale > 0)).double()
    # Both products give the same weights; the smaller one is cheaper.
    dual = x.shape[1] > len(x)
    values, vectors = torch.linalg.eigh(x @ x.T if dual else x.T @ x)
    rotated = vectors.T @ (y if dual else x.T @ y)
    penalties = torch.tensor(ALPHAS, dtype=x.dtype, device=x.device)[:, None, None] * len(x)
    solution = vectors @ (rotated / (values.clamp_min(0)[:, None] + penalties))
    weights = (x.T @ solution if dual else solution).float() * scale[:, None]
    return weights, target_centre - centre[None] @ weights


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / deviation of each column; the latter is 0 where it is constant."""
    return x.float().mean(0), torch.where(constant(x), 0.0, 1 / x.float().std(0, correction=0).clamp_min(1e-30))


def _whiten(features: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    return ((features.float() - centre) * scale).clamp(-LIMIT, LIMIT)


def _inner_split(episode: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return the rows to fit on, and rows of other episodes to choose on."""
    numbers = episode.unique()
    fit, choose = split(len(numbers), 0.25, seed + 1)
    return tuple(torch.isin(episode, numbers[part]).nonzero()[:, 0] for part in (fit, choose))
