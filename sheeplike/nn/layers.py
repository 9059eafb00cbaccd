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
    """Fill ``weight`` from a normal cut at two standard deviations, with variance ``scale**2 / fan_in``.

    ``scale=0`` fills exact zeros: the reward and value heads must predict 0.0 at initialisation, because their bins
    reach 4.85e8 and any noise in the logits would become a huge prediction.
    """
    if scale == 0.0:
        return nn.init.zeros_(weight)
    std = scale / math.sqrt(fan_in) / _TRUNCATED_STD
    # The bounds scale with std; fixed bounds of +-2 would cut nothing and give a 14 % larger deviation.
    return nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std)


class Linear(nn.Linear):
    """Affine map ``(B, I) -> (B, O)`` with truncated-normal weights times ``scale`` and zero bias."""

    def __init__(self, inputs: int, outputs: int, *, scale: float = 1.0) -> None:
        self.scale = scale
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        init_truncated_normal_(self.weight, self.in_features, self.scale)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class BlockLinear(nn.Module):
    """Block-diagonal affine map ``(B, I) -> (B, O)``: block ``g`` of the output sees block ``g`` of the input only.

    Initialisation counts the *whole* input width ``I`` as fan-in, as in the authors' code, not ``I / blocks``.

    Raises:
        ValueError: ``inputs`` or ``outputs`` is not divisible by ``blocks``.
    """

    def __init__(self, inputs: int, outputs: int, blocks: int) -> None:
        super().__init__()
        if inputs % blocks or outputs % blocks:
            raise ValueError(f"BlockLinear: {inputs} inputs and {outputs} outputs must both divide by {blocks} blocks")
        self.blocks = blocks
        self.weight = nn.Parameter(torch.empty(blocks, inputs // blocks, outputs // blocks))
        self.bias = nn.Parameter(torch.zeros(outputs))
        init_truncated_normal_(self.weight, inputs)

    def forward(self, x: Tensor) -> Tensor:
        lead = x.shape[:-1]
        grouped = x.reshape(-1, self.blocks, self.weight.shape[1]).transpose(0, 1)  # (G, B, I/G)
        out = torch.bmm(grouped, self.weight)  # (G, B, O/G)
        return out.transpose(0, 1).reshape(*lead, -1) + self.bias


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last axis; learned scale, no shift, eps 1e-4, computed in float32."""

    def __init__(self, size: int, eps: float = 1e-4) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class NormAct(nn.Module):
    """RMS normalisation over the last axis, then SiLU: what follows every hidden linear map and convolution."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = RMSNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x))


class MLP(nn.Sequential):
    """``layers`` times (Linear, RMSNorm, SiLU): ``(B, I) -> (B, units)``."""

    def __init__(self, inputs: int, units: int, layers: int) -> None:
        modules: list[nn.Module] = []
        for index in range(layers):
            modules += [Linear(inputs if index == 0 else units, units), NormAct(units)]
        super().__init__(*modules)
