"""Initialisation, RMS normalisation and block-diagonal maps, against numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from sheeplike.nn.layers import MLP, BlockLinear, Linear, NormAct, RMSNorm, init_truncated_normal_
from sheeplike.nn.vision import Conv2d


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms_normalised(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-4)


def randomise(module: nn.Module, seed: int = 0) -> dict[str, np.ndarray]:
    """Give every parameter random values, so that biases and scales count; returns them in float64."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
    return {name: p.detach().double().numpy() for name, p in module.named_parameters()}


@pytest.mark.parametrize("fan_in", [64, 2500])
def test_truncated_normal_has_the_variance_of_its_fan_in_and_is_cut_at_two_deviations(fan_in: int) -> None:
    torch.manual_seed(0)
    weight = init_truncated_normal_(torch.empty(700, 700), fan_in)
    std = 1 / math.sqrt(fan_in)
    # Fixed bounds of +-2 would cut nothing and give 1.1368 times this deviation.
    assert float(weight.std()) == pytest.approx(std, rel=0.01)
    assert float(weight.mean()) == pytest.approx(0, abs=0.01 * std)
    edge = 2 * 1.1368 * std
    assert 0.99 * edge < float(weight.abs().max()) <= 1.0001 * edge


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [(Linear(256, 1024), 256), (BlockLinear(512, 4096, 8), 512), (Conv2d(16, 256), 16 * 5 * 5)],
    ids=["linear", "block linear: the whole input, not one block's", "convolution"],
)
def test_fan_in_of_each_layer_and_zero_bias(layer: nn.Module, fan_in: int) -> None:
    assert layer.weight.std().item() == pytest.approx(1 / math.sqrt(fan_in), rel=0.02)
    assert torch.equal(layer.bias, torch.zeros_like(layer.bias))


def test_output_scale_multiplies_the_deviation_and_zero_gives_exact_zeros() -> None:
    assert Linear(256, 1024, scale=0.01).weight.std().item() == pytest.approx(0.01 / 16, rel=0.02)
    assert not Linear(64, 255, scale=0.0).weight.any()


def test_block_linear_is_one_product_per_block() -> None:
    layer = BlockLinear(12, 20, 4)
    p = randomise(layer)
    x = np.random.default_rng(0).standard_normal((2, 3, 12))
    expected = np.empty((2, 3, 20))
    for g in range(4):
        for o in range(5):
            expected[..., 5 * g + o] = sum(x[..., 3 * g + i] * p["weight"][g, i, o] for i in range(3))
            expected[..., 5 * g + o] += p["bias"][5 * g + o]
    np.testing.assert_allclose(layer(torch.tensor(x, dtype=torch.float32)).detach(), expected, rtol=1e-4, atol=1e-5)


def test_block_linear_is_block_diagonal() -> None:
    layer = BlockLinear(24, 16, 8)
    jacobian = torch.autograd.functional.jacobian(layer, torch.randn(24))  # (16, 24)
    for out_block, rows in enumerate(jacobian.split(2)):
        for in_block, block in enumerate(rows.split(3, dim=1)):
            assert bool(block.all()) if in_block == out_block else not bool(block.any())


@pytest.mark.parametrize(("inputs", "outputs"), [(20, 16), (16, 20)])
def test_block_linear_refuses_widths_that_do_not_divide(inputs: int, outputs: int) -> None:
    with pytest.raises(AssertionError):
        BlockLinear(inputs, outputs, 8)


def test_rms_norm_divides_by_the_root_mean_square_of_the_last_axis() -> None:
    norm = RMSNorm(6)
    p = randomise(norm)
    x = np.random.default_rng(0).standard_normal((3, 4, 5, 6))
    expected = rms_normalised(x) * p["weight"]
    np.testing.assert_allclose(norm(torch.tensor(x, dtype=torch.float32)).detach(), expected, rtol=1e-5)


def test_rms_norm_has_eps_1e_4_and_a_scale_but_no_shift() -> None:
    norm = RMSNorm(8)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    assert torch.equal(norm.weight, torch.ones(8))
    # A mean square of 1e-4 is doubled by eps: the output is 1 / sqrt(2). With eps 1e-3 it would be 0.30.
    np.testing.assert_allclose(norm(torch.full((8,), 0.01)).detach(), 1 / math.sqrt(2), rtol=1e-5)
    # No mean is subtracted: a constant vector stays a constant of size 1.
    np.testing.assert_allclose(norm(torch.full((8,), -50.0)).detach(), -1.0, rtol=1e-5)
    assert not norm(torch.zeros(8)).any()


def test_rms_norm_computes_in_float32_under_bfloat16() -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(64, 768)).bfloat16()
    norm = RMSNorm(768)
    got = norm(x)
    assert got.dtype == torch.bfloat16
    rounded_once = torch.tensor(rms_normalised(x.double().numpy())).bfloat16()
    # Rounding also the mean square or its root to bfloat16 would move a third of the values.
    assert float((got == rounded_once).float().mean()) > 0.99


def test_norm_act_normalises_before_silu() -> None:
    x = np.random.default_rng(0).standard_normal((5, 6)) * 4
    layer = NormAct(6)
    expected = silu(rms_normalised(x))
    np.testing.assert_allclose(layer(torch.tensor(x, dtype=torch.float32)).detach(), expected, rtol=1e-4, atol=1e-6)


def test_mlp_is_linear_with_bias_then_norm_then_silu_in_every_layer() -> None:
    mlp = MLP(5, 7, 3)
    p = list(randomise(mlp).values())  # weight, bias, scale of each layer
    assert [v.shape for v in p] == [(7, 5), (7,), (7,), (7, 7), (7,), (7,), (7, 7), (7,), (7,)]
    x = out = np.random.default_rng(0).standard_normal((4, 5))
    for weight, bias, scale in zip(p[0::3], p[1::3], p[2::3], strict=True):
        out = silu(rms_normalised(out @ weight.T + bias) * scale)
    np.testing.assert_allclose(mlp(torch.tensor(x, dtype=torch.float32)).detach(), out, rtol=1e-4, atol=1e-5)
