"""The convolutional encoders: shapes, parameters, and their arithmetic one pixel at a time in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor, nn

from sheeplike.nn.cnn import ACTIVATIONS, CNN, LAYOUTS, orthogonal_, to_unit

# The last feature map, by hand. Each convolution halves (or quarters) and rounds up, each pool halves and rounds down;
# with 84 pixels the second convolution of "nature" starts from 21 features, of which the last has no full window.
MAPS = {
    ("max_pool", 48, 48): (3, 3, 32),
    ("max_pool", 64, 64): (4, 4, 32),
    ("max_pool", 84, 84): (5, 5, 32),
    ("max_pool", 48, 64): (3, 4, 32),
    ("max_pool", 96, 40): (6, 2, 32),
    ("nature", 48, 48): (6, 6, 64),
    ("nature", 64, 64): (8, 8, 64),
    ("nature", 84, 84): (10, 10, 64),
    ("nature", 48, 64): (6, 8, 64),
    ("nature", 96, 40): (12, 5, 64),
}


HEADS = ("flatten", "average", "max", "spatial_softmax")


def make(height: int, width: int, channels: int, **options: Any) -> CNN:
    defaults = {"layout": "max_pool", "head": "flatten", "activation": "elu", "normalise_channels": False}
    return CNN(height, width, channels, **(defaults | options))


def image(*shape: int, seed: int = 0, low: int = 0, high: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("layout", "height", "width"), MAPS)
def test_shapes(layout: str, height: int, width: int, head: str) -> None:
    cnn = make(height, width, 3, layout=layout, head=head)
    h, w, channels = MAPS[layout, height, width]
    expected = {"flatten": h * w * channels, "average": channels, "max": channels, "spatial_softmax": 2 * channels}
    features = cnn(image(2, height, width, 3))
    assert features.shape == (2, cnn.outputs) == (2, expected[head])
    assert features.dtype == torch.float32


@pytest.mark.parametrize(
    ("layout", "channels", "features", "parameters"),
    [
        # 5*5*3*16 + 16 and 3*3*16*32 + 32; 4 * 4 * 32 features
        ("max_pool", 3, 512, 1_216 + 4_640),
        ("max_pool", 9, 512, 3_616 + 4_640),
        # 8*8*3*32 + 32, 4*4*32*64 + 64 and 3*3*64*64 + 64; 8 * 8 * 64 features
        ("nature", 3, 4_096, 6_176 + 32_832 + 36_928),
    ],
)
def test_published_networks_at_64_pixels(layout: str, channels: int, features: int, parameters: int) -> None:
    cnn = make(64, 64, channels, layout=layout)
    assert cnn.outputs == features
    assert sum(p.numel() for p in cnn.parameters()) == parameters


# --- arithmetic -------------------------------------------------------------------------------------------------------


def activate(name: str, x: np.ndarray) -> np.ndarray:
    return {
        "elu": lambda: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
        "relu": lambda: np.maximum(x, 0),
        "silu": lambda: x / (1 + np.exp(-x)),
        "tanh": lambda: np.tanh(x),
    }[name]()


def convolve(x: np.ndarray, conv: nn.Conv2d, *, stride: int, padding: int) -> np.ndarray:
    """``(H, W, C)``, padded with zeros, by the definition of a convolution."""
    weight, bias = (p.detach().double().numpy() for p in (conv.weight, conv.bias))
    padded = np.pad(x, ((padding, padding), (padding, padding), (0, 0)))
    windows = sliding_window_view(padded, weight.shape[2:], (0, 1))[::stride, ::stride]
    return np.einsum("hwcij,ocij->hwo", windows, weight) + bias


def pool(x: np.ndarray) -> np.ndarray:
    h, w = x.shape[0] // 2, x.shape[1] // 2
    return x[: 2 * h, : 2 * w].reshape(h, 2, w, 2, -1).max((1, 3))


def feature_map(pixels: np.ndarray, cnn: CNN, layout: str, activation: str) -> np.ndarray:
    x = pixels / 255.0
    if layout == "max_pool":
        for conv, padding in zip(cnn.convs, (2, 1), strict=True):
            x = pool(activate(activation, convolve(x, conv, stride=2, padding=padding)))
        return x
    for conv, stride, padding in zip(cnn.convs, (4, 2, 1), (2, 1, 1), strict=True):
        x = activate(activation, convolve(x, conv, stride=stride, padding=padding))
    return x


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_features_are_those_of_the_published_network(layout: str, activation: str) -> None:
    torch.manual_seed(0)
    cnn = make(48, 32, 2, layout=layout, activation=activation)
    pixels = image(2, 48, 32, 2)
    found = cnn(pixels).detach().double().numpy()
    for row, single in zip(found, pixels.numpy(), strict=True):
        expected = feature_map(single, cnn, layout, activation).reshape(-1)
        np.testing.assert_allclose(row, expected, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_summarise_the_feature_map(layout: str) -> None:
    """All heads of the same weights, from the one that keeps everything."""
    torch.manual_seed(0)
    whole = make(48, 80, 3, layout=layout, activation="tanh")
    h, w = (3, 5) if layout == "max_pool" else (6, 10)
    pixels = image(4, 48, 80, 3)
    x = whole(pixels).detach().double().numpy().reshape(4, h, w, -1).transpose(0, 3, 1, 2)
    weight = np.exp(x) / np.exp(x).sum((2, 3), keepdims=True)
    rows = np.zeros(x.shape[:2])
    columns = np.zeros(x.shape[:2])
    for i in range(h):
        for j in range(w):
            rows += weight[:, :, i, j] * (2 * i / (h - 1) - 1)
            columns += weight[:, :, i, j] * (2 * j / (w - 1) - 1)
    expected = {
        "average": x.mean((2, 3)),
        "max": x.max((2, 3)),
        "spatial_softmax": np.concatenate([rows, columns], 1),
    }
    for head, values in expected.items():
        cnn = make(48, 80, 3, layout=layout, activation="tanh", head=head)
        cnn.load_state_dict(whole.state_dict())
        np.testing.assert_allclose(cnn(pixels).detach(), values, atol=1e-5)


@pytest.mark.parametrize("cell", [(0, 0), (1, 3), (2, 5), (1, 0)])
def test_spatial_softmax_says_where_a_bright_spot_is(cell: tuple[int, int]) -> None:
    """Filters pass one pixel on: each of 3 x 6 features watches a block of 16 x 16 pixels."""
    cnn = make(48, 96, 1, head="spatial_softmax", activation="relu")
    with torch.no_grad():
        for conv, gain in zip(cnn.convs, (10.0, 10.0), strict=True):
            conv.weight.zero_()
            conv.bias.zero_()
            conv.weight[0, 0, conv.padding[0], conv.padding[1]] = gain
    row, column = cell
    pixels = torch.zeros(1, 48, 96, 1, dtype=torch.uint8)
    pixels[:, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16] = 255
    features = cnn(pixels)[0]
    assert features[0].item() == pytest.approx(row - 1, abs=1e-6)  # rows at -1, 0 and 1
    assert features[32].item() == pytest.approx(2 * column / 5 - 1, abs=1e-6)
    # A channel that sees nothing is everywhere at once: in the middle.
    assert features[1].item() == features[33].item() == pytest.approx(0, abs=1e-6)


# --- brightness -------------------------------------------------------------------------------------------------------


def test_whitened_images_have_mean_zero_and_deviation_one_per_channel() -> None:
    cnn = make(48, 64, 4, normalise_channels=True)
    seen = []
    cnn.convs[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    pixels = image(3, 48, 64, 4)
    pixels[:, :, :, 1] //= 10
    cnn(pixels)
    assert seen[0].shape == (3, 4, 48, 64)
    np.testing.assert_allclose(seen[0].mean((2, 3)), np.zeros((3, 4)), atol=1e-5)
    np.testing.assert_allclose(seen[0].std((2, 3), correction=0), np.ones((3, 4)), rtol=2e-3)


def test_whitening_hides_brightness_and_contrast_of_each_channel() -> None:
    torch.manual_seed(0)
    cnn = make(48, 48, 3, normalise_channels=True)
    pixels = image(2, 48, 48, 3, high=80)
    changed = pixels.clone()
    changed[0, :, :, 1] = 3 * pixels[0, :, :, 1] + 10  # one channel of one image
    changed[1] = 2 * pixels[1] + 40
    torch.testing.assert_close(cnn(changed), cnn(pixels), atol=1e-3, rtol=0)
    plain = make(48, 48, 3)
    plain.load_state_dict(cnn.state_dict())
    assert (plain(changed) - plain(pixels)).abs().max() > 0.05


def test_whitening_keeps_images_apart_and_survives_a_uniform_one() -> None:
    torch.manual_seed(0)
    cnn = make(48, 48, 3, normalise_channels=True)
    pixels = image(3, 48, 48, 3)
    pixels[1] = 77
    features = cnn(pixels)
    assert bool(features.isfinite().all())
    torch.testing.assert_close(features[2:], cnn(pixels[2:]))
    features.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in cnn.parameters())


# --- weights and errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gain", [None, 0.3])
def test_orthogonal_weights_and_no_bias(gain: float | None) -> None:
    """Rows, or columns where there are fewer, are orthogonal and as long as the gain: by default sqrt(2)."""
    module = nn.Sequential(make(48, 48, 3, layout="nature"), nn.Linear(7, 12), nn.Linear(12, 5))
    nn.init.ones_(module[1].bias)
    orthogonal_(module) if gain is None else orthogonal_(module, gain)
    square = (math.sqrt(2) if gain is None else gain) ** 2
    maps = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    assert len(maps) == 5
    for part in maps:
        weight = part.weight.detach().flatten(1).double()
        weight = weight if weight.shape[0] <= weight.shape[1] else weight.T
        torch.testing.assert_close(weight @ weight.T, square * torch.eye(len(weight)).double(), atol=1e-5, rtol=0)
        assert not part.bias.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_too_small_are_refused_before_they_are_seen(layout: str) -> None:
    with pytest.raises(ValueError, match=r"64x5.*16x16"):
        make(64, 5, 3, layout=layout)
    for head in HEADS:
        assert make(16, 16, 3, layout=layout, head=head)(image(1, 16, 16, 3)).isfinite().all()
    for side in range(1, 16):
        try:
            cnn = make(side, 20, 3, layout=layout)
        except ValueError:
            continue
        assert cnn(image(1, side, 20, 3)).shape == (1, cnn.outputs)


# --- pixels and depth as numbers from 0 to 1 --------------------------------------------------------------------------


def test_colours_are_divided_by_255() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1)
    assert to_unit(values).dtype == torch.float32
    np.testing.assert_allclose(to_unit(values).flatten(), np.arange(256) / 255, rtol=1e-6)


@pytest.mark.parametrize(
    ("metres", "expected"),
    [(0.0, 0.0), (0.001, 0.000999), (0.25, 0.2), (1.0, 0.5), (3.0, 0.75), (99.0, 0.99), (float("inf"), 1.0), (-2.0, 0)],
)
def test_depth_is_squashed_and_nothing_hit_stays_nothing(metres: float, expected: float) -> None:
    assert to_unit(torch.tensor(metres)).item() == pytest.approx(expected, abs=1e-6)


def test_depth_that_is_no_number_stays_none() -> None:
    """An update that sees it is skipped, instead of learning from a made-up image."""
    assert bool(to_unit(torch.tensor(float("nan"))).isnan())
