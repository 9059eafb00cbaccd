"""A linear map by oneDNN on a CPU, which torch has for its convolutions.

torch multiplies float32 matrices with MKL, which on an AMD leaves half of the vector units idle; oneDNN uses them all,
in float32 too. That was measured on an AMD only.

Shape letters: ``B`` batch, ``I`` inputs, ``O`` outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ONEDNN = torch.backends.mkldnn.is_available()


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _like_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    to_x = _onednn(gradient, weight.T, None) if ctx.needs_input_grad[0] else None
    return to_x, _onednn(gradient.T, x.T, None), gradient.sum(0)


# An operator of our own is opaque to torch.compile, which would not know how to differentiate oneDNN's.
_onednn = torch.library.custom_op("sheeplike::linear", _multiply, mutates_args=())
_onednn.register_fake(_like_product)
_onednn.register_autograd(_differentiate, setup_context=_keep_for_backward)


class Linear(nn.Linear):
    """:class:`torch.nn.Linear` for float32 inputs ``(B, I)``."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and ONEDNN:
            return _onednn(x, self.weight, self.bias)
        return super().forward(x)
