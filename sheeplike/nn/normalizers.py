"""Running statistics that scale learning signals, in buffers that are updated in place and never read by the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sheeplike.ranks import ALONE, Ranks


class PercentileScale(nn.Module):
    """Exponential average of the range between two percentiles of batches.

    DreamerV3 divides advantages by ``max(limit, ema(p95) - ema(p5))`` of the imagined returns. The average starts at
    zero and is not debiased, as in the authors' code.
    """

    def __init__(self, low: float = 0.05, high: float = 0.95, rate: float = 0.01, limit: float = 1.0) -> None:
        super().__init__()
        self.percentiles, self.rate, self.limit = (low, high), rate, limit
        self.register_buffer("range", torch.zeros(2))

    @torch.no_grad()
    def update(self, x: Tensor) -> Tensor:
        """Add a batch of any shape; return the scale, a 0-dim float32 tensor of at least ``limit``."""
        # torch.quantile cannot be compiled with torch 2.11.
        ordered = x.float().flatten().sort().values
        places = [percentile * (len(ordered) - 1) for percentile in self.percentiles]
        found = [ordered[math.floor(place)].lerp(ordered[math.ceil(place)], place % 1) for place in places]
        self.range.lerp_(torch.stack(found), self.rate)
        return self.current()

    def current(self) -> Tensor:
        """Return the scale as it is."""
        return (self.range[1] - self.range[0]).clamp_min(self.limit)


class RunningNorm(nn.Module):
    """Whitening of vectors ``(B, D)`` by the mean and variance of all batches so far, clipped to ``[-limit, limit]``.

    Batches are merged by the parallel formula of Chan et al. (1983). Before the first :meth:`update` it only clips.
    """

    def __init__(self, size: int, limit: float = 10.0) -> None:
        super().__init__()
        self.limit = limit
        # float32 stops counting at 16 million.
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("square", torch.zeros(size, dtype=torch.float64))  # sum of squared deviations

    @torch.no_grad()
    def update(self, x: Tensor, ranks: Ranks = ALONE) -> None:
        """Add vectors ``(B, D)`` of all ranks, except those with a non-finite number, which would stay for ever."""
        finite = x.isfinite().all(-1, keepdim=True)
        count = finite.sum(dtype=torch.float64)
        # A product with zero would keep a NaN.
        x = torch.where(finite, x.double(), 0.0)
        mean = x.sum(0) / count.clamp_min(1.0)
        spread = torch.where(finite, x - mean, 0.0).square().sum(0)
        if ranks.size > 1:
            # Only what is new is merged: totals would be counted once for each rank.
            counts, means, spreads = ranks.gather(torch.cat([count[None], mean, spread])).split(
                [1, len(mean), len(mean)], 1
            )
            count = counts.sum()
            mean = (counts * means).sum(0) / count.clamp_min(1.0)
            spread = (spreads + counts * (means - mean).square()).sum(0)
        total = (self.count + count).clamp_min(1.0)
        gap = mean - self.mean
        self.square += spread + gap.square() * self.count * count / total
        self.mean += gap * count / total
        self.count += count

    @property
    def std(self) -> Tensor:
        """Standard deviation ``(D,)`` float32; 1 before the first update."""
        variance = (self.square / self.count.clamp_min(1)).clamp_min(0)
        return torch.where(self.count > 0, variance.sqrt(), 1.0).clamp_min(1e-6).float()

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean.float()) / self.std).clamp(-self.limit, self.limit)

    def invert(self, x: Tensor) -> Tensor:
        """Undo the whitening, but not the clipping."""
        return x * self.std + self.mean.float()
