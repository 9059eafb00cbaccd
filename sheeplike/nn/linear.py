"""Linear layers by oneDNN on a CPU.

torch multiplies float32 matrices with MKL, which leaves half of the vector units of an AMD processor idle; oneDNN,
which torch uses for convolutions, does not. Measured on AMD only.

Shape letters: ``B`` batch, ``I`` inputs, ``O`` outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ONEDNN = torch.backends.mkldnn.is_available()
ROWS = 128  # with fewer rows the gain is smaller than the cost of the call


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


# torch.compile cannot differentiate oneDNN's product, but takes a custom operator as it is.
_onednn = torch.library.custom_op("sheeplike::linear", _multiply, mutates_args=())
_onednn.register_fake(_like_product)
_onednn.register_autograd(_differentiate, setup_context=_keep_for_backward)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` by the fastest library: ``(..., I)``, ``(O, I)``, ``(O,)`` to ``(..., O)``."""
    plain = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if ONEDNN and plain and x.device.type == "cpu" and x.numel() // x.shape[-1] >= ROWS:
        return _onednn(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """:class:`torch.nn.Linear` by oneDNN for float32 inputs ``(B, I)`` of any number of rows.

    PPO compares probabilities of acting with those of learning, so both need the same products.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and ONEDNN and not torch.compiler.is_exporting():
            return _onednn(x, self.weight, self.bias)
        return super().forward(x)
