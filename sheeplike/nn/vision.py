"""Convolutional encoder and decoder of DreamerV3 (``danijar/dreamerv3`` ``rssm.py``: ``Encoder``, ``Decoder``).

Images are NHWC outside a convolution. ``permute`` to NCHW gives the channels-last memory format, so it costs nothing.

Shape letters: ``B`` batch, ``H W`` pixels, ``C`` channels, ``D`` deterministic state, ``Z`` flat stochastic state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheeplike.nn.cnn import max_pool, to_unit
from sheeplike.nn.layers import BlockLinear, Linear, NormAct, init_truncated_normal_

STAGES = (2, 3, 4, 4)  # channel multipliers; each stage halves the image
SHRINK = 2 ** len(STAGES)
KERNEL = 5
MIN_SIDE, MAX_SIDE = 3, 16  # limits of the smallest feature map's sides


def nearest_side(side: int) -> int:
    """Return the valid side of an image, in pixels, nearest to ``side``."""
    return min(max(round(side / SHRINK), MIN_SIDE), MAX_SIDE) * SHRINK


class Conv2d(nn.Conv2d):
    """5x5 convolution, stride 1, same padding, NHWC in and out, truncated-normal weights and zero bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, KERNEL, padding=KERNEL // 2)

    def reset_parameters(self) -> None:
        init_truncated_normal_(self.weight, self.in_channels * KERNEL * KERNEL)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def _phase_taps() -> Tensor:
    """Return ``(2, 3, 5)``: the source pixel that each kernel tap reads, for even and odd output pixels."""
    taps = torch.zeros(2, 3, KERNEL)
    for phase in range(2):
        for k in range(KERNEL):
            taps[phase, (phase + k - KERNEL // 2) // 2 + 1, k] = 1.0
    return taps


class UpsampleConv2d(Conv2d):
    """Nearest-neighbour doubling followed by a 5x5 convolution, NHWC: ``(B, H, W, C) -> (B, 2H, 2W, O)``.

    The doubled image is never made. Neighbouring taps of the 5x5 kernel often read the same source pixel: for each of
    the four output phases the kernel collapses to 3x3 over the source. One 3x3 convolution to ``4 * O`` channels, whose
    phases are then interleaved, takes 9 instead of 25 products per output.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("taps", _phase_taps(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast only the convolution itself may run in bfloat16.
        with torch.autocast(x.device.type, enabled=False):
            kernel = torch.einsum("pak,qbl,oikl->pqoiab", self.taps, self.taps, self.weight)
        kernel = kernel.reshape(-1, x.shape[-1], 3, 3)
        # With channels in the order (phase row, phase column, O) an output pixel is contiguous; F.pixel_shuffle, with
        # its order (O, row, column), would gather number by number.
        y = F.conv2d(x.permute(0, 3, 1, 2), kernel, self.bias.repeat(4), padding=1).permute(0, 2, 3, 1)
        return y.unflatten(-1, (2, 2, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)  # by way of (B, H, 2, W, 2, O)


class ImageEncoder(nn.Module):
    """Four stages of (5x5 convolution, 2x2 max-pool, RMS over channels, SiLU), flattened.

    ``(B, H, W, C)``, uint8 or float32 in [0, 1], to ``(B, outputs)``. ``H`` and ``W`` are multiples of 16; all cameras
    of one size are channels of one image.
    """

    def __init__(self, height: int, width: int, channels: int, depth: int) -> None:
        super().__init__()
        h, w = height // SHRINK, width // SHRINK
        widths = [channels, *(depth * m for m in STAGES)]
        self.convs = nn.ModuleList(Conv2d(i, o) for i, o in pairwise(widths))
        self.norms = nn.ModuleList(NormAct(o) for o in widths[1:])
        self.outputs = h * w * widths[-1]

    def forward(self, image: Tensor) -> Tensor:
        x = (to_unit(image) if image.dtype == torch.uint8 else image) - 0.5
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = conv(x).permute(0, 3, 1, 2)
            x = norm(max_pool(x).permute(0, 2, 3, 1))
        return x.flatten(1)


class ImageDecoder(nn.Module):
    """Decoder of ``deter (B, D)`` and flat ``stoch (B, Z)`` to images ``(B, H, W, C)`` float32 in [0, 1].

    Each block of ``from_deter`` gives its own channels of the smallest feature map.
    """

    def __init__(
        self, deter: int, stoch: int, height: int, width: int, channels: int, *, depth: int, units: int, blocks: int
    ) -> None:
        super().__init__()
        h, w = height // SHRINK, width // SHRINK
        widths: Sequence[int] = [depth * m for m in STAGES]
        self.shape = (h, w, widths[-1])
        self.blocks = blocks
        self.from_deter = BlockLinear(deter, h * w * widths[-1], blocks)
        self.from_stoch = nn.Sequential(
            Linear(stoch, 2 * units), NormAct(2 * units), Linear(2 * units, h * w * widths[-1])
        )
        self.norm = NormAct(widths[-1])
        down = list(reversed(widths))
        self.convs = nn.ModuleList(UpsampleConv2d(i, o) for i, o in pairwise(down))
        self.norms = nn.ModuleList(NormAct(o) for o in down[1:])
        self.out = UpsampleConv2d(down[-1], channels)

    def forward(self, deter: Tensor, stoch: Tensor) -> Tensor:
        h, w, c = self.shape
        x = self.from_deter(deter).reshape(-1, self.blocks, h, w, c // self.blocks)
        x = x.permute(0, 2, 3, 1, 4).reshape(-1, h, w, c)  # "(g h w c) -> h w (g c)"
        x = self.norm(x + self.from_stoch(stoch).reshape(-1, h, w, c))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x))
        return torch.sigmoid(self.out(x).float())
