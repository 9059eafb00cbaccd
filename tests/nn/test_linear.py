"""The linear map by oneDNN against the definition, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sheeplike.nn import linear as module
from sheeplike.nn.linear import ONEDNN, ROWS, Linear, linear


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Agreement to the rounding of float32, by the largest number."""
    assert found.dtype == torch.float32
    error = (found.double() - expected).abs().max()
    assert error < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(("batch", "inputs", "outputs"), [(1, 1, 1), (7, 5, 3), (128, 700, 33), (256, 512, 1)])
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
@pytest.mark.parametrize(
    ("shape", "autocast", "taken"),
    [((ROWS, 5), False, 1), ((ROWS - 1, 5), False, 0), ((2, ROWS // 2, 5), False, 1), ((ROWS, 5), True, 0)],
    ids=["many rows", "few rows", "rows over two axes", "many in bfloat16"],
)
def test_onednn_has_the_large_products_in_float32(
    shape: tuple[int, ...], autocast: bool, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    operator = module._onednn
    monkeypatch.setattr(module, "_onednn", lambda *inputs: calls.append(1) or operator(*inputs))
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape), torch.randn(3, 5), torch.randn(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = linear(x, weight, bias)
    assert (len(calls), y.shape) == (taken, (*shape[:-1], 3))
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(y.float(), expected, atol=0.1 if autocast else 1e-5, rtol=1e-5)


@pytest.mark.skipif(not ONEDNN, reason="this torch has no oneDNN")
def test_the_operator_is_one_that_can_be_compiled() -> None:
    layer, x = Linear(5, 3), torch.randn(ROWS, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.sheeplike.linear.default, (x, layer.weight, layer.bias))


def test_what_needs_no_gradient_gets_none() -> None:
    layer, x = Linear(5, 3), torch.randn(ROWS, 5)
    layer(x).sum().backward()
    assert x.grad is None
    assert layer.weight.grad is not None
