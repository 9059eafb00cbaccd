"""Max-pooling that a compiler leaves alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


# Operators of our own are opaque to torch.compile. Its own backward pass of max_pool2d recomputes what follows the pool
# for every pixel that went into it: on a CPU three times the work of the kernel that torch has.
@torch.library.custom_op("sheeplike::max_pool_2x2", mutates_args=())
def _forward(x: Tensor) -> tuple[Tensor, Tensor]:
    return _aten.max_pool2d_with_indices(x, [2, 2], [2, 2])


@torch.library.custom_op("sheeplike::max_pool_2x2_backward", mutates_args=())
def _backward(gradient: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    return _aten.max_pool2d_with_indices_backward(gradient, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)


def _save(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: None) -> Tensor:
    return _backward(gradient, *ctx.saved_tensors)


_forward.register_fake(lambda x: _aten.max_pool2d_with_indices(x, [2, 2], [2, 2]))
_backward.register_fake(
    lambda gradient, x, indices: _aten.max_pool2d_with_indices_backward(
        gradient, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices
    )
)
_forward.register_autograd(_differentiate, setup_context=_save)


def max_pool(x: Tensor) -> Tensor:
    """The largest of every 2x2 pixels: ``(B, C, H, W) -> (B, C, H // 2, W // 2)``."""
    # Without a gradient there is no backward pass to spoil, and the compiler may fuse the pool with what follows.
    return _forward(x)[0] if torch.is_grad_enabled() else F.max_pool2d(x, 2)
