"""Frames of any size as images of one size, uint8 (H, W, C), on the host."""

from collections.abc import Callable

import numpy as np
from PIL import Image

from sheeplike.envs.errors import InvalidOption

FILTERS = {"area": Image.Resampling.BOX, "bilinear": Image.Resampling.BILINEAR, "nearest": Image.Resampling.NEAREST}
GREY = np.array([0.299, 0.587, 0.114], np.float32)
"""ITU-R BT.601, as in ``danijar/dreamerv3`` ``embodied/envs/atari.py``."""


class Images:
    """Makes the image of one camera: of the size asked for, grey if wanted, and stacked.

    Args:
        size: ``(H, W)`` of the result.
        resize: ``pad`` keeps pixels as they are, or enlarges them by a whole factor, in the middle of black;
            ``area`` (mean of the pixels covered), ``bilinear`` (a triangle as wide as a pixel of the result) and
            ``nearest`` stretch to the size; ``auto`` pads what fits and averages what does not.
        grayscale: one channel instead of three.
        stack: newest frames in one image, oldest first in its channels.
    """

    def __init__(self, *, size: tuple[int, int], resize: str, grayscale: bool, stack: int) -> None:
        self.size, self.resize, self.grayscale, self.stack = size, resize, grayscale, stack
        self._image: np.ndarray | None = None
        self._place: Callable[[np.ndarray], np.ndarray] | None = None
        self._seen: tuple[int, ...] = ()

    def channels(self, frame_channels: int) -> int:
        """Channels of the result."""
        return (1 if self.grayscale and frame_channels == 3 else frame_channels) * self.stack

    def __call__(self, frame: np.ndarray, *, first: bool) -> np.ndarray:
        """The image after ``frame`` (H', W', C); it is written over by the next call.

        Args:
            first: an episode begins, whose first frame fills the whole stack.

        Raises:
            InvalidOption: the frame does not fit.
        """
        if frame.shape != self._seen:
            self._place, self._seen = self._placing(frame.shape), frame.shape
        image = self._place(frame)
        if self.grayscale and image.shape[-1] == 3:
            image = (image @ GREY).astype(np.uint8)[..., None]
        if self.stack == 1:
            return image
        if first or self._image is None:
            self._image = np.concatenate([image] * self.stack, -1)
        else:
            self._image = np.concatenate([self._image[..., image.shape[-1] :], image], -1)
        return self._image

    def _placing(self, shape: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
        """What brings frames of this shape to the size."""
        (height, width), channels = shape[:2], shape[2]
        fits = height <= self.size[0] and width <= self.size[1]
        if (height, width) == self.size:
            return lambda frame: frame
        if self.resize == "pad" or (self.resize == "auto" and fits):
            if not fits:
                fit = f"a frame of {height}x{width} does not fit into image_size={self.size}"
                raise InvalidOption("resize", "pad", f"area, or larger images, as {fit}", "area")
            return _padding(self.size, (height, width), channels)
        return _resampling(self.size, FILTERS["area" if self.resize == "auto" else self.resize])


def as_frame(frame: np.ndarray) -> np.ndarray:
    """A grey frame (H, W) as (H, W, 1)."""
    return frame[..., None] if frame.ndim == 2 else frame


def _padding(size: tuple[int, int], frame: tuple[int, int], channels: int) -> Callable[[np.ndarray], np.ndarray]:
    factor = min(side // of for side, of in zip(size, frame, strict=True))
    image = np.zeros((*size, channels), np.uint8)
    top, left = ((side - factor * of) // 2 for side, of in zip(size, frame, strict=True))
    inside = image[top : top + factor * frame[0], left : left + factor * frame[1]]

    def place(pixels: np.ndarray) -> np.ndarray:
        inside[...] = pixels if factor == 1 else pixels.repeat(factor, 0).repeat(factor, 1)
        return image

    return place


def _resampling(size: tuple[int, int], method: Image.Resampling) -> Callable[[np.ndarray], np.ndarray]:
    def one(pixels: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(pixels).resize(size[::-1], method))

    def place(pixels: np.ndarray) -> np.ndarray:
        if pixels.shape[-1] == 3:
            return one(pixels)
        return np.stack([one(np.ascontiguousarray(pixels[..., channel])) for channel in range(pixels.shape[-1])], -1)

    return place
