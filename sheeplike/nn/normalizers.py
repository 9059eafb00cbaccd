"""Running statistics that scale learning signals. State lives in buffers, updated in place, never read by the host."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PercentileScale(nn.Module):
    """Range between two percentiles of a stream of batches, tracked by an exponential average.

    DreamerV3 divides advantages by ``max(limit, ema(p95) - ema(p5))`` of the imagined returns: large returns are
    scaled down, small ones are not scaled up. The average starts at zero and is not debiased, as in the authors' code.
    """

    def __init__(self, low: float = 0.05, high: float = 0.95, rate: float = 0.01, limit: float = 1.0) -> None:
        super().__init__()
        self.rate, self.limit = rate, limit
        self.register_buffer("percentiles", torch.tensor([low, high]), persistent=False)
        self.register_buffer("range", torch.zeros(2))

    @torch.no_grad()
    def update(self, x: Tensor) -> Tensor:
        """Take in a batch of any shape; return the scale, a 0-dim float32 tensor of at least ``limit``."""
        # In float32: torch.quantile rejects bfloat16.
        self.range.lerp_(torch.quantile(x.float().flatten(), self.percentiles), self.rate)
        return self.scale()

    def scale(self) -> Tensor:
        """The current scale, 0-dim float32."""
        return (self.range[1] - self.range[0]).clamp_min(self.limit)
