"""Pixels, pooling, and small convolutional encoders for model-free agents.

Sources: ``max_pool`` is the network of MuJoCo Playground's vision recipes (Brax, ``networks_vision.py``); ``nature`` is
the one of Mnih et al. (2015), padded as in Brax, so that an image of 64 pixels gives 8 x 8 features.

Shape letters: ``B`` batch, ``H W`` pixels, ``C`` channels.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {"elu": nn.ELU, "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}


def to_unit(image: Tensor) -> Tensor:
    """Return an image as float32 in [0, 1]: uint8 colours over 255, float32 depth ``d`` in metres as ``d / (1 + d)``.

    Half of the range stands for depths below 1 m, a hundredth for those above 99 m. 0 m means that nothing was hit.
    """
    if image.dtype == torch.uint8:
        return image.float() / 255
    return 1 - 1 / (1 + image.float().clamp_min(0))  # d / (1 + d), also for an infinite d


def from_unit(depth: Tensor) -> Tensor:
    """Return depth in metres, float32: the inverse of :func:`to_unit`."""
    return depth / (1 - depth).clamp_min(1e-6)


def to_pixels(unit: Tensor) -> Tensor:
    """Return an image of :func:`to_unit` as uint8."""
    return (unit * 255).clamp(0, 255).to(torch.uint8)


def _pool(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.max_pool2d_with_indices(x, [2, 2], [2, 2])


def _pool_backward(gradient: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    return backward(gradient, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: None) -> Tensor:
    return _max_pool_backward(gradient, *ctx.saved_tensors)


# torch.compile takes custom operators as they are. Compiled by itself, the backward pass of max_pool2d would recompute
# what follows the pool for each input pixel: on a CPU three times the work of torch's own kernel.
_max_pool = torch.library.custom_op("sheeplike::max_pool_2x2", _pool, mutates_args=())
_max_pool_backward = torch.library.custom_op("sheeplike::max_pool_2x2_backward", _pool_backward, mutates_args=())
_max_pool.register_fake(_pool)
_max_pool_backward.register_fake(_pool_backward)
_max_pool.register_autograd(_differentiate, setup_context=_keep_for_backward)


def max_pool(x: Tensor) -> Tensor:
    """Return the maximum of every 2x2 pixels: ``(B, C, H, W) -> (B, C, H // 2, W // 2)``."""
    # Without a gradient, and on a GPU, the compiler fuses F.max_pool2d well.
    return _max_pool(x)[0] if torch.is_grad_enabled() and x.device.type == "cpu" else F.max_pool2d(x, 2)


class Layout(NamedTuple):
    """Convolutions, each followed by the activation and, if ``pool``, a 2x2 max-pool."""

    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    pool: bool


LAYOUTS = {
    "max_pool": Layout((16, 32), (5, 3), (2, 2), pool=True),
    "nature": Layout((32, 64, 64), (8, 4, 3), (4, 2, 1), pool=False),
}


class CNN(nn.Module):
    """Encoder of images ``(B, H, W, C)``, uint8 or float32 depth in metres, to features ``(B, outputs)``.

    Args:
        layout, activation: names in ``LAYOUTS`` and ``ACTIVATIONS``.
        head: reduction of the last feature map: ``flatten`` keeps all of it, ``average`` and ``max`` one number per
            channel, ``spatial_softmax`` the expected position of each channel (Levine et al. 2016), two numbers each.
        normalise_channels: whiten each channel of each image over its pixels, without parameters.
    """

    def __init__(
        self,
        height: int,
        width: int,
        channels: int,
        *,
        layout: str,
        head: str,
        activation: str,
        normalise_channels: bool,
    ) -> None:
        super().__init__()
        plan = LAYOUTS[layout]
        self.head, self.pool, self.normalise_channels = head, plan.pool, normalise_channels
        self.activation = ACTIVATIONS[activation]()
        self.convs = nn.ModuleList()
        h, w, inputs = height, width, channels
        for outputs, kernel, stride in zip(plan.channels, plan.kernels, plan.strides, strict=True):
            # "same" padding for this stride, shared by both sides where the kernel allows it.
            padding = (kernel - stride + 1) // 2
            self.convs.append(nn.Conv2d(inputs, outputs, kernel, stride, padding))
            h, w = ((side + 2 * padding - kernel) // stride + 1 for side in (h, w))
            h, w = (h // 2, w // 2) if plan.pool else (h, w)
            inputs = outputs
        if min(h, w) < 1:
            raise ValueError(f"image {height}x{width}: too small for the {layout} network; expected at least 16x16")
        self.outputs = {"flatten": h * w * inputs, "spatial_softmax": 2 * inputs}.get(head, inputs)
        if head == "spatial_softmax":
            self.register_buffer("rows", torch.linspace(-1, 1, h), persistent=False)
            self.register_buffer("columns", torch.linspace(-1, 1, w), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        x = to_unit(image)
        if self.normalise_channels:
            mean = x.mean((1, 2), keepdim=True)
            x = (x - mean) * torch.rsqrt(x.var((1, 2), correction=0, keepdim=True) + 1e-6)
        x = x.permute(0, 3, 1, 2)
        for conv in self.convs:
            x = self.activation(conv(x))
            if self.pool:
                x = max_pool(x)
        if self.head == "average":
            return x.mean((2, 3))
        if self.head == "max":
            return x.amax((2, 3))
        if self.head == "spatial_softmax":
            weight = F.softmax(x.float().flatten(2), -1).view(x.shape)
            return torch.cat([(weight.sum(3) * self.rows).sum(2), (weight.sum(2) * self.columns).sum(2)], 1)
        return x.permute(0, 2, 3, 1).flatten(1)  # memory is channels-last: another order would copy


def orthogonal_(module: nn.Module, gain: float = math.sqrt(2)) -> None:
    """Initialise every convolution and linear map with orthogonal weights times ``gain`` and zero biases."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.orthogonal_(part.weight, gain)
            nn.init.zeros_(part.bias)
