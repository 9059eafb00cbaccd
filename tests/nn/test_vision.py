"""Convolutional encoder and decoder against explicit convolutions in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sheeplike.nn.vision import ImageDecoder, ImageEncoder, UpsampleConv2d, nearest_side


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms_normalised(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-4)


def convolved(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """5x5 cross-correlation of ``x (B, H, W, C)`` with ``weight (O, C, 5, 5)``, zeros around the border."""
    batch, height, width, _ = x.shape
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))
    out = np.zeros((batch, height, width, len(bias))) + bias
    for i in range(5):
        for j in range(5):
            out += padded[:, i : i + height, j : j + width] @ weight[:, :, i, j].T
    return out


def halved(x: np.ndarray) -> np.ndarray:
    return np.maximum.reduce([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)])


def doubled(x: np.ndarray) -> np.ndarray:
    return x.repeat(2, axis=1).repeat(2, axis=2)


def randomise(module: nn.Module, spread: float) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(spread * torch.randn_like(p))
    return {name: p.detach().double().numpy() for name, p in module.named_parameters()}


def test_encoder_is_four_times_convolution_max_pool_norm_silu_on_centred_pixels() -> None:
    encoder = ImageEncoder(48, 64, 4, depth=2)
    p = randomise(encoder, 0.3)
    image = np.random.default_rng(0).integers(0, 256, (2, 48, 64, 4), dtype=np.uint8)
    x = image / 255 - 0.5
    for stage, width in enumerate((4, 6, 8, 8)):
        x = halved(convolved(x, p[f"convs.{stage}.weight"], p[f"convs.{stage}.bias"]))
        x = silu(rms_normalised(x) * p[f"norms.{stage}.norm.weight"])
        assert x.shape == (2, 48 >> (stage + 1), 64 >> (stage + 1), width)
    out = encoder(torch.tensor(image))
    assert encoder.outputs == 3 * 4 * 8
    np.testing.assert_allclose(out.detach(), x.reshape(2, -1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("pixel", "seen"), [(0, -0.5), (255, 0.5), (102, -0.1)])
def test_encoder_sees_pixels_between_minus_and_plus_a_half(pixel: int, seen: float) -> None:
    encoder = ImageEncoder(48, 48, 3, depth=2)
    inputs = []
    encoder.convs[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    encoder(torch.full((1, 48, 48, 3), pixel, dtype=torch.uint8))
    np.testing.assert_allclose(inputs[0], np.full((1, 48, 48, 3), seen), atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 4, 5), (1, 6, 2, 3)])
def test_upsample_convolution_equals_nearest_doubling_then_a_5x5_convolution(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = UpsampleConv2d(shape[-1], 4).double()
    nn.init.normal_(layer.bias)
    probe = torch.randn(shape[0], 2 * shape[1], 2 * shape[2], 4, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    plain = [t.detach().clone().requires_grad_() for t in (x, layer.weight, layer.bias)]
    big = F.interpolate(plain[0].permute(0, 3, 1, 2), scale_factor=2, mode="nearest")
    expected = F.conv2d(big, plain[1], plain[2], padding=2).permute(0, 2, 3, 1)
    out = layer(x)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    gradients = torch.autograd.grad((out * probe).sum(), (x, layer.weight, layer.bias))
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * probe).sum(), plain), rtol=1e-9, atol=1e-9)


@pytest.fixture
def decoder() -> ImageDecoder:
    torch.manual_seed(0)
    return ImageDecoder(32, 12, 48, 64, 5, depth=4, units=6, blocks=8)


def test_decoder_paints_blocks_and_adds_the_stochastic_state_then_doubles_four_times(decoder: ImageDecoder) -> None:
    p = randomise(decoder, 0.2)
    rng = np.random.default_rng(0)
    deter, stoch = rng.standard_normal((2, 32)), rng.standard_normal((2, 12))
    h, w, c = 3, 4, 16
    x = np.empty((2, h, w, c))
    for g in range(8):  # each block of 4 inputs makes all pixels of its own 2 channels
        flat = deter[:, 4 * g : 4 * g + 4] @ p["from_deter.weight"][g]
        flat = flat + p["from_deter.bias"][g * h * w * 2 : (g + 1) * h * w * 2]
        x[..., 2 * g : 2 * g + 2] = flat.reshape(2, h, w, 2)
    hidden = silu(
        rms_normalised(stoch @ p["from_stoch.0.weight"].T + p["from_stoch.0.bias"]) * p["from_stoch.1.norm.weight"]
    )
    x = x + (hidden @ p["from_stoch.2.weight"].T + p["from_stoch.2.bias"]).reshape(2, h, w, c)
    x = silu(rms_normalised(x) * p["norm.norm.weight"])
    for stage in range(3):
        x = convolved(doubled(x), p[f"convs.{stage}.weight"], p[f"convs.{stage}.bias"])
        x = silu(rms_normalised(x) * p[f"norms.{stage}.norm.weight"])
    x = 1 / (1 + np.exp(-convolved(doubled(x), p["out.weight"], p["out.bias"])))
    out = decoder(torch.tensor(deter, dtype=torch.float32), torch.tensor(stoch, dtype=torch.float32))
    assert out.shape == (2, 48, 64, 5)
    assert out.dtype == torch.float32
    np.testing.assert_allclose(out.detach(), x, rtol=1e-3, atol=1e-4)


def test_decoder_ends_in_a_sigmoid(decoder: ImageDecoder) -> None:
    with torch.no_grad():
        decoder.out.weight.zero_()
        decoder.out.bias.copy_(torch.tensor([0.0, 100.0, -100.0, 1.0, -1.0]))
        out = decoder(torch.randn(1, 32), torch.randn(1, 12))
    np.testing.assert_allclose(out[0, 7, 9], [0.5, 1.0, 0.0, 0.73105858, 0.26894142], atol=1e-6)


@pytest.mark.parametrize(("side", "nearest"), [(48, 48), (256, 256), (32, 48), (72, 64), (90, 96), (512, 256)])
def test_the_nearest_side_that_the_stages_can_halve(side: int, nearest: int) -> None:
    assert nearest_side(side) == nearest
