"""Dense layers of DreamerV3: initialisation, RMS normalisation, block-diagonal linear maps, MLPs.

Source of every number: ``danijar/dreamerv3`` ``embodied/jax/nets.py``. Matrix products may run in bfloat16 under
autocast; normalisation always computes in float32.

Shape letters: ``B`` any leading axes, ``I`` inputs, ``O`` outputs, ``G`` blocks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheeplike.nn.linear import linear

# Standard deviation of a unit normal cut at +-2 is 0.8796; dividing by it restores the intended variance.
_TRUNCATED_STD = 0.87962566103423978


def init_truncated_normal_(weight: Tensor, fan_in: int, scale: float = 1.0) -> Tensor:
    """Fill ``weight`` from a normal cut at two standard deviations, with variance ``scale**2 / fan_in``."""
    if scale == 0.0:  # heads of reward and value: with bins up to 4.85e8, noise would be a huge prediction
        return nn.init.zeros_(weight)
    std = scale / math.sqrt(fan_in) / _TRUNCATED_STD
    # trunc_normal_ takes absolute bounds: +-2 would cut nothing and give a 14 % larger deviation.
    return nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std)


class Linear(nn.Linear):
    """Linear layer with truncated-normal weights times ``scale`` and zero bias."""

    def __init__(self, inputs: int, outputs: int, *, scale: float = 1.0) -> None:
        self.scale = scale
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        init_truncated_normal_(self.weight, self.in_features, self.scale)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class BlockLinear(nn.Module):
    """Block-diagonal linear layer ``(B, I) -> (B, O)``: block ``g`` of the output sees block ``g`` of the input only.

    Initialisation counts the *whole* input width ``I`` as fan-in, as in the authors' code, not ``I / blocks``.
    """

    def __init__(self, inputs: int, outputs: int, blocks: int) -> None:
        super().__init__()
        assert inputs % blocks == outputs % blocks == 0, (inputs, outputs, blocks)
        self.blocks = blocks
        self.weight = nn.Parameter(torch.empty(blocks, inputs // blocks, outputs // blocks))
        self.bias = nn.Parameter(torch.zeros(outputs))
        init_truncated_normal_(self.weight, inputs)

    def forward(self, x: Tensor) -> Tensor:
        lead = x.shape[:-1]
        grouped = x.reshape(-1, self.blocks, self.weight.shape[1]).transpose(0, 1)  # (G, B, I/G)
        return torch.bmm(grouped, self.weight).transpose(0, 1).reshape(*lead, -1) + self.bias  # bmm: (G, B, O/G)


class RMSNorm(nn.Module):
    """RMS normalisation over the last axis in float32, with a learned scale and without a shift."""

    def __init__(self, size: int, eps: float = 1e-4) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class NormAct(nn.Module):
    """RMS normalisation and SiLU, after every hidden linear layer and convolution."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = RMSNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x))


class MLP(nn.Sequential):
    """Stack of ``layers`` times (Linear, RMSNorm, SiLU): ``(B, I) -> (B, units)``."""

    def __init__(self, inputs: int, units: int, layers: int) -> None:
        modules: list[nn.Module] = []
        for index in range(layers):
            modules += [Linear(inputs if index == 0 else units, units), NormAct(units)]
        super().__init__(*modules)
