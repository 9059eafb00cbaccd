"""The linear map by oneDNN against the definition, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sheeplike.nn.linear import ONEDNN, Linear


def assert_close(found: Tensor, expected: Tensor) -> None:
    """To the rounding of float32, by the largest number."""
    assert found.dtype == torch.float32
    error = (found.double() - expected).abs().max()
    assert error < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(("batch", "inputs", "outputs"), [(1, 1, 1), (7, 5, 3), (64, 700, 33), (256, 512, 1)])
@pytest.mark.parametrize("spread", ["dense", "expanded", "transposed"])
def test_outputs_and_gradients_are_those_of_a_linear_map(batch: int, inputs: int, outputs: int, spread: str) -> None:
    """However the gradient lies in memory: of a sum it is one number for all."""
    torch.manual_seed(0)
    layer = Linear(inputs, outputs)
    x = torch.randn(inputs, batch).T if spread == "transposed" else torch.randn(batch, inputs)
    x.requires_grad_()
    gradient = {
        "dense": torch.randn(batch, outputs),
        "expanded": torch.randn(1, 1).expand(batch, outputs),
        "transposed": torch.randn(outputs, batch).T,
    }[spread]
    y = layer(x)
    y.backward(gradient)
    x64, weight, gradient = x.detach().double(), layer.weight.detach().double(), gradient.double()
    assert_close(y.detach(), x64 @ weight.T + layer.bias.detach().double())
    assert_close(x.grad, gradient @ weight)
    assert_close(layer.weight.grad, gradient.T @ x64)
    assert_close(layer.bias.grad, gradient.sum(0))


@pytest.mark.skipif(not ONEDNN, reason="this torch has no oneDNN")
def test_the_operator_is_one_that_can_be_compiled() -> None:
    layer, x = Linear(5, 3), torch.randn(4, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.sheeplike.linear.default, (x, layer.weight, layer.bias))


def test_what_needs_no_gradient_gets_none() -> None:
    layer, x = Linear(5, 3), torch.randn(4, 5)
    layer(x).sum().backward()
    assert x.grad is None
    assert layer.weight.grad is not None
