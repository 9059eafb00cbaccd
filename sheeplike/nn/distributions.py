"""Probability distributions. Those of DreamerV3 follow ``danijar/dreamerv3`` ``embodied/jax/outs.py``, ``heads.py``.

All of them compute in float32 whatever the precision of their inputs, draw from torch's global generator of the
device, and never synchronise with the host.

Shape letters: ``B`` any leading axes, ``S`` groups, ``K`` classes, ``A`` action, ``V`` vector, ``H W C`` image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def symlog(x: Tensor) -> Tensor:
    """``sign(x) * log(1 + |x|)``: compresses large magnitudes, identity near zero."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x: Tensor) -> Tensor:
    """Inverse of :func:`symlog`."""
    return torch.sign(x) * torch.expm1(torch.abs(x))


def _cumulative(probs: Tensor) -> Tensor:
    """``probs.cumsum(-1)``; a GPU has no deterministic kernel for that, and torch refuses the one it has."""
    if probs.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return probs.cumsum(-1)
    return _masked_cumulative(probs)


def _masked_cumulative(probs: Tensor) -> Tensor:
    classes = torch.arange(probs.shape[-1], device=probs.device)
    return (probs.unsqueeze(-2) * (classes <= classes.unsqueeze(-1))).sum(-1)


class OneHotCategorical:
    """Independent categoricals as one-hot vectors, mixed with ``unimix`` of a uniform distribution.

    Samples, log-probabilities, entropy and KL all see the mixture: it bounds the KL between two confident ones.

    Args:
        logits: ``(B, K)``, any float dtype.
        unimix: weight of the uniform distribution.
    """

    def __init__(self, logits: Tensor, unimix: float = 0.0) -> None:
        probs = F.softmax(logits.float(), -1)
        if unimix:
            probs = (1 - unimix) * probs + unimix / probs.shape[-1]
            self.log_probs = torch.log(probs)
        else:
            self.log_probs = F.log_softmax(logits.float(), -1)
        self.probs = probs

    def detach(self) -> OneHotCategorical:
        """The same distribution, through which no gradient flows."""
        other = object.__new__(OneHotCategorical)
        other.probs, other.log_probs = self.probs.detach(), self.log_probs.detach()
        return other

    def sample_index(self) -> Tensor:
        """Class indices ``(B,)`` int64, by inverting the cumulative distribution at one uniform number each."""
        probs = self.probs.detach()
        uniform = torch.rand(probs.shape[:-1], device=probs.device)
        # The last class takes what rounding leaves of the sum.
        return (_cumulative(probs)[..., :-1] <= uniform.unsqueeze(-1)).sum(-1)

    def sample(self) -> Tensor:
        """One-hot ``(B, K)`` float32 with the straight-through gradient of the probabilities."""
        return self.straight_through(self.sample_index())

    def straight_through(self, index: Tensor) -> Tensor:
        """One-hot of ``index (B,)`` whose gradient is that of the probabilities: ``one_hot + p - sg(p)``."""
        one_hot = F.one_hot(index, self.probs.shape[-1]).to(self.probs.dtype)
        return one_hot + (self.probs - self.probs.detach())

    def mode(self) -> Tensor:
        """The most probable class, one-hot ``(B, K)`` float32."""
        return F.one_hot(self.probs.argmax(-1), self.probs.shape[-1]).to(self.probs.dtype)

    def log_prob(self, one_hot: Tensor) -> Tensor:
        """``(B, K) -> (B,)``."""
        return (one_hot * self.log_probs).sum(-1)

    def entropy(self) -> Tensor:
        """``(B,)`` in nats."""
        return -(self.probs * self.log_probs).sum(-1)


class JointCategorical:
    """Several :class:`OneHotCategorical` of different sizes as one vector, their one-hots side by side.

    Log-probabilities and entropies are sums over them.

    Args:
        logits: ``(B, K)``, any float dtype, ``K`` the sum of ``classes``.
        classes: of each categorical, in the order of the logits.
        unimix: weight of the uniform distribution in each.
    """

    def __init__(self, logits: Tensor, classes: Sequence[int], unimix: float = 0.0) -> None:
        self.classes = list(classes)
        self.parts = [OneHotCategorical(part, unimix) for part in logits.split(self.classes, -1)]

    def sample(self) -> Tensor:
        """One-hots ``(B, K)`` float32 with the straight-through gradients of the probabilities."""
        return torch.cat([part.sample() for part in self.parts], -1)

    def mode(self) -> Tensor:
        """The most probable class of each, one-hots ``(B, K)`` float32."""
        return torch.cat([part.mode() for part in self.parts], -1)

    def log_prob(self, one_hots: Tensor) -> Tensor:
        """``(B, K) -> (B,)``."""
        drawn = one_hots.split(self.classes, -1)
        return sum(part.log_prob(one_hot) for part, one_hot in zip(self.parts, drawn, strict=True))

    def entropy(self) -> Tensor:
        """``(B,)`` in nats."""
        return sum(part.entropy() for part in self.parts)


def categorical(logits: Tensor, classes: Sequence[int], unimix: float = 0.0) -> OneHotCategorical | JointCategorical:
    """The distribution over one-hots ``(B, K)``, one for each entry of ``classes``, side by side."""
    return OneHotCategorical(logits, unimix) if len(classes) == 1 else JointCategorical(logits, classes, unimix)


def categorical_kl(p: OneHotCategorical, q: OneHotCategorical) -> Tensor:
    """``KL(p || q)`` summed over the groups: logits ``(B, S, K)`` give ``(B,)`` nats."""
    return (p.probs * (p.log_probs - q.log_probs)).sum((-2, -1))


class Normal:
    """Diagonal normal over actions; the environment clips what it executes to its bounds.

    Args:
        mean: ``(B, A)``.
        std: ``(B, A)`` or ``(A,)``, above 0.
    """

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.mean = mean.float()
        self.std = std.float().expand_as(self.mean)

    def sample(self) -> Tensor:
        """``(B, A)`` float32, without gradient."""
        return (self.mean + self.std * torch.randn_like(self.mean)).detach()

    def mode(self) -> Tensor:
        """``(B, A)`` float32."""
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        """``(B, A) -> (B,)``."""
        z = (action - self.mean) / self.std
        return (-0.5 * z.square() - self.std.log() - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self) -> Tensor:
        """``(B,)`` in nats."""
        return (0.5 + 0.5 * math.log(2 * math.pi) + self.std.log()).sum(-1)


class BoundedNormal(Normal):
    """:class:`Normal` with mean in (-1, 1) and standard deviation in (min_std, max_std), as DreamerV3 has it.

    Samples are not clipped: the replay keeps the raw action, so that its log-probability is right.

    Args:
        raw: ``(B, 2A)``, the mean's pre-activation, then the deviation's.
    """

    def __init__(self, raw: Tensor, min_std: float = 0.1, max_std: float = 1.0) -> None:
        mean, std = raw.float().chunk(2, -1)
        super().__init__(torch.tanh(mean), (max_std - min_std) * torch.sigmoid(std + 2.0) + min_std)


class TanhNormal(Normal):
    """The distribution of ``tanh(x)`` for a normal ``x``; all actions here are ``x``, which no rounding can lose.

    The standard deviation is ``softplus(std) + 0.001``, as in Brax.

    Args:
        raw: ``(B, 2A)``, the mean of ``x``, then the deviation's pre-activation.
    """

    def __init__(self, raw: Tensor) -> None:
        mean, std = raw.float().chunk(2, -1)
        super().__init__(mean, F.softplus(std) + 0.001)

    def log_prob(self, action: Tensor) -> Tensor:
        """Of ``tanh(action)``: ``(B, A) -> (B,)``."""
        return super().log_prob(action) - _log_slope(action).sum(-1)

    def entropy(self) -> Tensor:
        """``(B,)`` in nats, estimated from one sample, since there is no closed form; its gradient is unbiased."""
        drawn = self.mean + self.std * torch.randn_like(self.mean)
        return super().entropy() + _log_slope(drawn).sum(-1)


def _log_slope(x: Tensor) -> Tensor:
    """``log(d tanh(x) / dx)``, finite for every ``x``."""
    return 2 * (math.log(2) - x - F.softplus(-2 * x))


class Bernoulli:
    """Probability of an event from one logit: ``(B, 1)`` logits, ``(B,)`` outputs."""

    def __init__(self, logit: Tensor) -> None:
        self.logit = logit.float().squeeze(-1)

    def prob(self) -> Tensor:
        """``(B,)`` in (0, 1)."""
        return torch.sigmoid(self.logit)

    def loss(self, target: Tensor) -> Tensor:
        """Cross entropy ``(B,)`` against a soft target ``(B,)`` in [0, 1]."""
        return F.binary_cross_entropy_with_logits(self.logit, target.float(), reduction="none")


class TwoHotBins(nn.Module):
    """The 255 values of a symexp two-hot distribution: exactly symmetric, exponentially spaced, up to 4.85e8."""

    def __init__(self, bins: int = 255) -> None:
        super().__init__()
        half = symexp(torch.linspace(-20, 0, (bins - 1) // 2 + 1, dtype=torch.float32))
        self.register_buffer("values", torch.cat([half, -half[:-1].flip(0)]), persistent=False)

    def forward(self, logits: Tensor) -> TwoHot:
        return TwoHot(logits, self.values)


class TwoHot:
    """A distribution over fixed bins; its mean is the prediction, its target a pair of neighbouring bins.

    Args:
        logits: ``(B, bins)``.
        bins: ``(bins,)`` float32, ascending and symmetric about its middle.
    """

    def __init__(self, logits: Tensor, bins: Tensor) -> None:
        self.log_probs = F.log_softmax(logits.float(), -1)
        self.bins = bins

    def pred(self) -> Tensor:
        """Mean ``(B,)``. Bins are summed in pairs from the middle, so that equal probabilities give exactly 0.0."""
        weighted = self.log_probs.exp() * self.bins
        middle = (self.bins.shape[0] - 1) // 2
        pairs = weighted[..., :middle].flip(-1) + weighted[..., middle + 1 :]
        return weighted[..., middle] + pairs.sum(-1)

    def loss(self, target: Tensor) -> Tensor:
        """Cross entropy ``(B,)`` against targets ``(B,)``, shared by the two nearest bins linearly in raw space."""
        target = target.float().detach()
        last = self.bins.shape[0] - 1
        above = torch.searchsorted(self.bins, target.contiguous()).clamp(1, last)
        below = above - 1
        low, high = self.bins[below], self.bins[above]
        weight = ((target - low) / (high - low)).clamp(0.0, 1.0)
        log_below = self.log_probs.gather(-1, below.unsqueeze(-1)).squeeze(-1)
        log_above = self.log_probs.gather(-1, above.unsqueeze(-1)).squeeze(-1)
        return -((1 - weight) * log_below + weight * log_above)
