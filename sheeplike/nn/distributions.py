"""Probability distributions. Those of DreamerV3 follow ``danijar/dreamerv3`` ``embodied/jax/outs.py``, ``heads.py``.

All of them compute in float32, draw from torch's global generator of the device, and never synchronise with the host.

Shape letters: ``B`` any leading axes, ``S`` groups, ``K`` classes, ``A`` action, ``V`` vector, ``H W C`` image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def symlog(x: Tensor) -> Tensor:
    """Compress large magnitudes: ``sign(x) * log(1 + |x|)``."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x: Tensor) -> Tensor:
    """Invert :func:`symlog`."""
    return torch.sign(x) * torch.expm1(torch.abs(x))


def _cumulative(probs: Tensor) -> Tensor:
    """Return ``probs.cumsum(-1)``, of which a GPU has no deterministic kernel."""
    if probs.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return probs.cumsum(-1)
    return _masked_cumulative(probs)


def _masked_cumulative(probs: Tensor) -> Tensor:
    classes = torch.arange(probs.shape[-1], device=probs.device)
    return (probs.unsqueeze(-2) * (classes <= classes.unsqueeze(-1))).sum(-1)


class OneHotCategorical:
    """Categorical over one-hot vectors from logits ``(B, K)``, mixed with ``unimix`` of a uniform distribution.

    Samples, log-probabilities, entropy and KL all use the mixture: it bounds the KL between two confident ones.
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
        """Return the same distribution without gradient."""
        other = object.__new__(OneHotCategorical)
        other.probs, other.log_probs = self.probs.detach(), self.log_probs.detach()
        return other

    def sample_index(self) -> Tensor:
        """Draw class indices ``(B,)`` int64 by inverting the cumulative distribution."""
        probs = self.probs.detach()
        uniform = torch.rand(probs.shape[:-1], device=probs.device)
        # Rounding may leave the sum below 1: the last class takes the rest.
        return (_cumulative(probs)[..., :-1] <= uniform.unsqueeze(-1)).sum(-1)

    def sample(self) -> Tensor:
        """Draw one-hots ``(B, K)`` float32 with straight-through gradients: ``one_hot + p - sg(p)``."""
        return self._one_hot(self.sample_index()) + (self.probs - self.probs.detach())

    rsample = sample

    def mode(self) -> Tensor:
        """Return the most probable class as one-hot ``(B, K)`` float32."""
        return self._one_hot(self.probs.argmax(-1))

    def _one_hot(self, index: Tensor) -> Tensor:
        # F.one_hot checks the range of the indices, which takes a GPU further kernels.
        return (index.unsqueeze(-1) == torch.arange(self.probs.shape[-1], device=index.device)).to(self.probs.dtype)

    def log_prob(self, one_hot: Tensor) -> Tensor:
        return (one_hot * self.log_probs).sum(-1)

    def entropy(self) -> Tensor:
        return -(self.probs * self.log_probs).sum(-1)


class JointCategorical:
    """Several independent :class:`OneHotCategorical`, side by side in logits and one-hots ``(B, sum(classes))``."""

    def __init__(self, logits: Tensor, classes: Sequence[int], unimix: float = 0.0) -> None:
        self.classes = list(classes)
        self.parts = [OneHotCategorical(part, unimix) for part in logits.split(self.classes, -1)]

    def sample(self) -> Tensor:
        return torch.cat([part.sample() for part in self.parts], -1)

    rsample = sample

    def mode(self) -> Tensor:
        return torch.cat([part.mode() for part in self.parts], -1)

    def log_prob(self, one_hots: Tensor) -> Tensor:
        drawn = one_hots.split(self.classes, -1)
        return sum(part.log_prob(one_hot) for part, one_hot in zip(self.parts, drawn, strict=True))

    def entropy(self) -> Tensor:
        return sum(part.entropy() for part in self.parts)


def categorical(logits: Tensor, classes: Sequence[int], unimix: float = 0.0) -> OneHotCategorical | JointCategorical:
    """Build the distribution over one-hots ``(B, K)``, one for each entry of ``classes``, side by side."""
    return OneHotCategorical(logits, unimix) if len(classes) == 1 else JointCategorical(logits, classes, unimix)


def categorical_kl(p: OneHotCategorical, q: OneHotCategorical) -> Tensor:
    """Return ``KL(p || q)`` in nats, summed over the groups: logits ``(B, S, K)`` give ``(B,)``."""
    return (p.probs * (p.log_probs - q.log_probs)).sum((-2, -1))


class Normal:
    """Diagonal normal over actions: mean ``(B, A)``, std ``(B, A)`` or ``(A,)``.

    Samples are not clipped to the bounds, so that log-probabilities stay right; what an environment gets is.
    """

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.mean = mean.float()
        self.std = std.float().expand_as(self.mean)

    def sample(self) -> Tensor:
        """Draw ``(B, A)`` float32, without gradient."""
        return self.rsample().detach()

    def rsample(self) -> Tensor:
        """Draw ``(B, A)`` float32, with the gradient of mean and deviation."""
        return self.mean + self.std * torch.randn_like(self.mean)

    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        z = (action - self.mean) / self.std
        return (-0.5 * z.square() - self.std.log() - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self) -> Tensor:
        return (0.5 + 0.5 * math.log(2 * math.pi) + self.std.log()).sum(-1)


class BoundedNormal(Normal):
    """Normal of DreamerV3, mean in (-1, 1), std in (min_std, max_std), from their pre-activations ``raw (B, 2A)``."""

    def __init__(self, raw: Tensor, min_std: float = 0.1, max_std: float = 1.0) -> None:
        mean, std = raw.float().chunk(2, -1)
        super().__init__(torch.tanh(mean), (max_std - min_std) * torch.sigmoid(std + 2.0) + min_std)


class TanhNormal(Normal):
    """Distribution of ``tanh(x)`` for a normal ``x``, from the mean and the std's pre-activation in ``raw (B, 2A)``.

    The std is ``softplus(.) + 0.001``, as in Brax. Actions are ``x`` everywhere: ``tanh(x)`` would round to 1.
    """

    def __init__(self, raw: Tensor) -> None:
        mean, std = raw.float().chunk(2, -1)
        super().__init__(mean, F.softplus(std) + 0.001)

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-probability of ``tanh(action)``: ``(B, A) -> (B,)``."""
        return super().log_prob(action) - _log_slope(action).sum(-1)

    def entropy(self) -> Tensor:
        """Estimate the entropy ``(B,)`` from one sample: there is no closed form, and the gradient is unbiased."""
        return super().entropy() + _log_slope(self.mean + self.std * torch.randn_like(self.mean)).sum(-1)


def _log_slope(x: Tensor) -> Tensor:
    """Return ``log(d tanh(x) / dx)``, finite for every ``x``."""
    return 2 * (math.log(2) - x - F.softplus(-2 * x))


class Bernoulli:
    """Bernoulli distribution from logits ``(B, 1)``; outputs are ``(B,)``."""

    def __init__(self, logit: Tensor) -> None:
        self.logit = logit.float().squeeze(-1)

    def prob(self) -> Tensor:
        return torch.sigmoid(self.logit)

    def loss(self, target: Tensor) -> Tensor:
        """Return the cross entropy ``(B,)`` with soft targets ``(B,)`` in [0, 1]."""
        return F.binary_cross_entropy_with_logits(self.logit, target.float(), reduction="none")


class TwoHotBins(nn.Module):
    """Bins of a symexp two-hot distribution: exactly symmetric, exponentially spaced, up to 4.85e8 times ``unit``."""

    def __init__(self, bins: int = 255, unit: float = 1.0) -> None:
        super().__init__()
        half = symexp(torch.linspace(-20, 0, (bins - 1) // 2 + 1, dtype=torch.float32)) * unit
        self.unit = unit
        self.register_buffer("values", torch.cat([half, -half[:-1].flip(0)]), persistent=False)

    def forward(self, logits: Tensor) -> TwoHot:
        return TwoHot(logits, self.values, self.unit)


class TwoHot:
    """Distribution over fixed bins from logits ``(B, bins)``; ``bins`` ascend and are symmetric about their middle."""

    def __init__(self, logits: Tensor, bins: Tensor, unit: float = 1.0) -> None:
        self.log_probs = F.log_softmax(logits.float(), -1)
        self.bins, self.unit = bins, unit

    def pred(self) -> Tensor:
        """Return the mean ``(B,)``, summed in pairs from the middle: equal probabilities give exactly 0.0."""
        weighted = self.log_probs.exp() * self.bins
        middle = (self.bins.shape[0] - 1) // 2
        return weighted[..., middle] + (weighted[..., :middle].flip(-1) + weighted[..., middle + 1 :]).sum(-1)

    def smooth_pred(self) -> Tensor:
        """Return :meth:`pred` with the gradient of ``symexp(E[symlog(bin)])``, the mean of DreamerV3's first version.

        The gradient of the mean itself is noise until the far bins have lost their probability: they are up to 4.85e8.
        """
        smooth = symexp((self.log_probs.exp() * symlog(self.bins / self.unit)).sum(-1)) * self.unit
        return self.pred().detach() + (smooth - smooth.detach())

    def loss(self, target: Tensor) -> Tensor:
        """Return the cross entropy ``(B,)`` with targets ``(B,)``, each split linearly between its two nearest bins."""
        target = target.float().detach()
        last = self.bins.shape[0] - 1
        above = torch.searchsorted(self.bins, target.contiguous()).clamp(1, last)
        below = above - 1
        low, high = self.bins[below], self.bins[above]
        weight = ((target - low) / (high - low)).clamp(0.0, 1.0)
        log_below = self.log_probs.gather(-1, below.unsqueeze(-1)).squeeze(-1)
        log_above = self.log_probs.gather(-1, above.unsqueeze(-1)).squeeze(-1)
        return -((1 - weight) * log_below + weight * log_above)
