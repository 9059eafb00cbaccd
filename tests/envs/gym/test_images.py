"""Frames brought to one size."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image
from sheeplike.envs.gym.images import Images

from sheeplike.envs import InvalidOption


def images(
    size: tuple[int, int] = (64, 64), *, resize: str = "auto", grayscale: bool = False, stack: int = 1
) -> Images:
    return Images(size=size, resize=resize, grayscale=grayscale, stack=stack)


def frame(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


@pytest.mark.parametrize("resize", ["auto", "pad"])
def test_what_fits_is_padded_in_the_middle_and_stays_crisp(resize: str) -> None:
    tiles = frame(56, 56)
    image = images(resize=resize)(tiles, first=True)
    assert image.shape == (64, 64, 3)
    assert np.array_equal(image[4:60, 4:60], tiles)
    assert image.sum() == tiles.sum()  # black around it
    small = frame(20, 30)
    doubled = images()(small, first=True)
    assert np.array_equal(doubled[12:52, 2:62], small.repeat(2, 0).repeat(2, 1))
    assert np.array_equal(images((64, 48))(frame(64, 48), first=True), frame(64, 48))


def test_what_does_not_fit_is_refused_by_pad_and_averaged_otherwise() -> None:
    large = frame(128, 192)
    told = "area, or larger images, as a frame of 128x192 does not fit into image_size=(64, 64); nearest: area"
    with pytest.raises(InvalidOption, match=re.escape(f"resize='pad': expected {told}")):
        images(resize="pad")(large, first=True)
    mean = large.reshape(64, 2, 64, 3, 3).mean((1, 3))
    for resize in ("auto", "area"):
        assert np.abs(images(resize=resize)(large, first=True) - mean).max() <= 1  # rounded twice
    nearest = images(resize="nearest")(large, first=True)
    assert {tuple(pixel) for pixel in nearest.reshape(-1, 3)} <= {tuple(pixel) for pixel in large.reshape(-1, 3)}


def test_bilinear_is_what_the_authors_of_dreamer_use() -> None:
    screen = frame(210, 160)
    expected = np.asarray(Image.fromarray(screen).resize((64, 64), Image.BILINEAR))
    assert np.array_equal(images(resize="bilinear")(screen, first=True), expected)
    grey = images(resize="bilinear", grayscale=True)
    assert grey.channels(3) == 1
    weighted = (expected * np.array([0.299, 0.587, 1 - (0.299 + 0.587)])).sum(-1)
    assert np.abs(grey(screen, first=True)[..., 0] - weighted).max() <= 1


@pytest.mark.parametrize("channels", [1, 2, 4, 12])
def test_any_number_of_channels(channels: int) -> None:
    large = frame(128, 128, channels)
    image = images(grayscale=True)(large, first=True)  # which only changes colours
    assert image.shape == (64, 64, channels)
    assert np.abs(image - large.reshape(64, 2, 64, 2, channels).mean((1, 3))).max() <= 1


def test_frames_of_changing_size() -> None:
    maker = images()
    for height, width in ((56, 56), (130, 70), (56, 56), (8, 100)):
        assert maker(frame(height, width), first=False).shape == (64, 64, 3)


def test_stacks() -> None:
    maker = images((16, 16), grayscale=True, stack=3)
    assert maker.channels(3) == 3
    grey = [
        maker(np.full((16, 16, 3), value, np.uint8), first=value == 40)[0, 0].tolist() for value in (10, 20, 40, 50)
    ]
    expected = [[10, 10, 10], [10, 10, 20], [40, 40, 40], [40, 40, 50]]
    assert np.abs(np.array(grey) - expected).max() <= 1
