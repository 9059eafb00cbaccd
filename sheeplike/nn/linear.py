"""Linear maps by oneDNN on a CPU, which torch has for its convolutions.

torch multiplies float32 matrices with MKL, which on an AMD leaves half of the vector units idle; oneDNN uses them all,
in float32 too. That was measured on an AMD only.

Shape letters: ``B`` batch, ``I`` inputs, ``O`` outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ONEDNN = torch.backends.mkldnn.is_available()
ROWS = 128  # of a product with fewer, the call costs as much as is gained


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _like_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
    x, weight = ctx.saved_tensors
    to_x = _onednn(gradient, weight.T, None) if ctx.needs_input_grad[0] else None
    return to_x, _onednn(gradient.T, x.T, None), gradient.sum(0) if ctx.needs_input_grad[2] else None


# An operator of our own is opaque to torch.compile, which would not know how to differentiate oneDNN's.
_onednn = torch.library.custom_op("sheeplike::linear", _multiply, mutates_args=())
_onednn.register_fake(_like_product)
_onednn.register_autograd(_differentiate, setup_context=_keep_for_backward)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``(..., I)``, ``(O, I)``, ``(O,)`` to ``(..., O)``, by whatever is fast."""
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    return _onednn(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    rows = x.numel() // x.shape[-1]
    plain = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return ONEDNN and x.device.type == "cpu" and plain and rows >= ROWS


class Linear(nn.Linear):
    """:class:`torch.nn.Linear` for float32 inputs ``(B, I)``, however few rows there are.

    PPO compares what it learns from with what it acted by: both come from the same products.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and ONEDNN:
            return _onednn(x, self.weight, self.bias)
        return super().forward(x)
