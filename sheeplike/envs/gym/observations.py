"""Translation of an environment's spaces to ours: images of one size, vectors by name, actions in [-1, 1]."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import flatdim, flatten
from PIL import Image

from sheeplike.envs.gym.options import BaseOptions
from sheeplike.options import InvalidOption
from sheeplike.terminal import one_line

FILTERS = {"area": Image.Resampling.BOX, "bilinear": Image.Resampling.BILINEAR, "nearest": Image.Resampling.NEAREST}
GREY = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601, as in `danijar/dreamerv3` `embodied/envs/atari.py`
SMALLEST_IMAGE = 16  # pixels a side: smaller arrays of bytes are grids of symbols, or vectors
MOST_CHANNELS = 16
VECTORS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
RENDERED = "render"  # the camera's name where frames come from `render()`
ToEnv = Callable[[Any], Any]


class Part(NamedTuple):
    """One array among the observations."""

    name: str  # keys of nested spaces, joined by `/`; empty if the whole space is this array
    path: tuple[Any, ...]
    space: spaces.Space

    def of(self, observation: Any) -> Any:
        """Return its value in an observation."""
        for key in self.path:
            observation = observation[key]
        return observation


def parts_of(space: spaces.Space) -> tuple[list[Part], list[Part], list[Part]]:
    """Return the images, the vectors and all other arrays of an observation space, each in the order of its entries."""
    found = list(_walk(space, (), ()))
    images = [part for part in found if _is_image(part.space)]
    vectors = [part for part in found if part not in images and isinstance(part.space, VECTORS)]
    return images, vectors, [part for part in found if part not in images and part not in vectors]


def choose_frames(frames: str, env: gymnasium.Env) -> str:
    """Resolve ``auto`` to the first of ``observation``, ``render`` and ``none`` that the environment can serve."""
    space, render_modes = env.observation_space, list(env.metadata.get("render_modes") or [])
    can = {"observation": bool(parts_of(space)[0]), "render": "rgb_array" in render_modes, "none": True}
    if frames == "auto":
        return next(choice for choice, possible in can.items() if possible)
    if not can[frames]:
        why = f"the environment renders {', '.join(render_modes) or 'nothing'}, and no rgb_array"
        if frames == "observation":
            why = f"no image of at least {SMALLEST_IMAGE} pixels a side is among the observations {space}"
        raise ValueError(f"frames={frames!r}: {why}; nearest: {next(choice for choice in can if can[choice])}")
    return frames


class Observer:
    """Turns observations and frames of one world into the flat dict that agents see; its space is ``space``.

    ``pixels/<entry>`` uint8 (H, W, C) are the images among the observations (``pixels/observation`` if the observation
    is one image), or ``pixels/render``. Vectors float32 (D,) have their entries' names; ``state`` joins them in the
    order of their names, unless an entry is called that. Discrete values are one-hot. Texts are left out.
    """

    def __init__(self, space: spaces.Space, options: BaseOptions, image_size: tuple[int, int]) -> None:
        images, vectors, _ = parts_of(space)
        observed = {part.name or "observation": part for part in images}
        # None: the frame comes from render().
        self._cameras: dict[str, Part | None] = {"render": {RENDERED: None}, "observation": observed, "none": {}}[
            options.frames
        ]
        self._makers = {camera: Images(options, image_size) for camera in self._cameras}
        self._vectors = {part.name or "state": part for part in sorted(vectors, key=lambda part: str(part.name))}
        self._joined = bool(vectors) and "state" not in self._vectors
        entries: dict[str, spaces.Space] = {}
        for camera, part in self._cameras.items():
            channels = self._makers[camera].channels(3 if part is None else _channels(part.space))
            entries[f"pixels/{camera}"] = spaces.Box(0, 255, (*image_size, channels), np.uint8)
        widths = {name: flatdim(part.space) for name, part in self._vectors.items()}
        widths |= {"state": sum(widths.values())} if self._joined else {}
        entries |= {name: spaces.Box(-np.inf, np.inf, (width,), np.float32) for name, width in widths.items()}
        taken = any(str(name).startswith("pixels/") for name in self._vectors)
        if not entries or taken or len(observed) + len(self._vectors) < len(images) + len(vectors):
            raise ValueError(f"observation space {space}: expected images or vectors, named apart, or frames=render")
        self.space = spaces.Dict(dict(sorted(entries.items())))

    def __call__(
        self, observation: Any, render: Callable[[], Any], *, first: bool, earlier: Any = None
    ) -> dict[str, np.ndarray]:
        """Return the flat dict; images take the brighter pixels of this observation and an ``earlier`` one.

        ``render`` is called if frames come from it; ``first``: an episode begins.
        """
        seen: dict[str, np.ndarray] = {}
        for camera, part in self._cameras.items():
            frame = _checked(render()) if part is None else _oriented(part.of(observation), part.space)
            if part is not None and earlier is not None:
                frame = np.maximum(frame, _oriented(part.of(earlier), part.space))
            seen[f"pixels/{camera}"] = self._makers[camera](frame, first=first)
        vectors = {name: _vector(part.space, part.of(observation)) for name, part in self._vectors.items()}
        if self._joined:
            vectors["state"] = np.concatenate(list(vectors.values()))
        seen |= vectors
        for key, value in seen.items():
            if value.shape != self.space[key].shape:
                raise ValueError(f"{key} has shape {value.shape}: expected {self.space[key].shape}, as its space says")
        return {key: value.copy() for key, value in seen.items()}  # the environment may use its memory again

    def batch(self, observations: Any) -> dict[str, np.ndarray]:
        """Return the flat dict of several worlds, stacked, without frames from ``render`` and without a stack."""
        parts = {camera: part for camera, part in self._cameras.items() if part is not None}
        seen = {
            f"pixels/{camera}": self.fit(camera, [_oriented(frame, part.space) for frame in part.of(observations)])
            for camera, part in parts.items()
        }
        vectors = {name: _vectors(part.space, part.of(observations)) for name, part in self._vectors.items()}
        if self._joined:
            vectors["state"] = np.concatenate(list(vectors.values()), -1)
        return seen | vectors

    def fit(self, camera: str, frames: Any) -> np.ndarray:
        """Return the images (N, H, W, C) of several frames (H', W', C')."""
        return np.stack([self._makers[camera](frame, first=True) for frame in frames])


def _walk(space: spaces.Space, names: tuple[str, ...], path: tuple[Any, ...]) -> Iterator[Part]:
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        yield Part("/".join(names), path, space)
        return
    for key, entry in space.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
        yield from _walk(entry, (*names, str(key)), (*path, key))


def _is_image(space: spaces.Space) -> bool:
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return False
    sides = space.shape[1:] if _channels_first(space) else space.shape[:2]
    return min(sides) >= SMALLEST_IMAGE and _channels(space) <= MOST_CHANNELS


def _channels_first(space: spaces.Box) -> bool:
    """Return True if the shape can only mean (C, H, W)."""
    return len(space.shape) == 3 and space.shape[0] <= 4 and space.shape[2] > MOST_CHANNELS


def _channels(space: spaces.Box) -> int:
    if len(space.shape) == 2:
        return 1
    return space.shape[0] if _channels_first(space) else space.shape[2]


def _oriented(frame: Any, space: spaces.Box) -> np.ndarray:
    frame = np.asarray(frame)
    if frame.shape != space.shape or frame.dtype != np.uint8:
        raise ValueError(f"an image {frame.dtype} {frame.shape}: expected uint8 {space.shape}, as its space says")
    if _channels_first(space):
        return frame.transpose(1, 2, 0)
    return frame[..., None] if frame.ndim == 2 else frame


def _checked(frame: Any) -> np.ndarray:
    if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        what = f"{frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
        raise ValueError(f"render() returned {what}: expected uint8 (H, W, 3)")
    return frame


def _vector(space: spaces.Space, value: Any) -> np.ndarray:
    if isinstance(space, spaces.Box):
        value = np.asarray(value)
        if value.shape != space.shape or value.dtype.kind not in "biuf":
            raise ValueError(f"a vector {value.dtype} {value.shape}: expected {space.dtype} {space.shape}")
        return value.astype(np.float32).reshape(-1)
    value = np.asarray(value).astype(space.dtype)  # a flag for Discrete(2), say
    if not space.contains(value):  # a number out of range would be encoded as another
        raise ValueError(f"a vector {one_line(repr(value))}: expected one of {space}")
    return np.asarray(flatten(space, value), np.float32)


def _vectors(space: spaces.Space, values: np.ndarray) -> np.ndarray:
    """Return what :func:`_vector` does for each of some values; integers with limits are ``Discrete``."""
    if isinstance(space, spaces.Discrete):
        return np.eye(int(space.n), dtype=np.float32)[values.reshape(len(values)) - int(space.start)]
    return values.reshape(len(values), -1).astype(np.float32)


class Images:
    """Makes the images (H, W, C) of one camera from its frames: resized to ``size``, grey on demand, and stacked."""

    def __init__(self, options: BaseOptions, size: tuple[int, int]) -> None:
        self._options, self._size = options, size
        self._image: np.ndarray | None = None

    def channels(self, frame_channels: int) -> int:
        """Count the channels of the result."""
        return (1 if self._options.grayscale and frame_channels == 3 else frame_channels) * self._options.frame_stack

    def __call__(self, frame: np.ndarray, *, first: bool) -> np.ndarray:
        """Return the image after ``frame`` (H', W', C); the ``first`` frame of an episode fills the whole stack."""
        image, stack = _fit(frame, self._size, self._options.resize), self._options.frame_stack
        if self._options.grayscale and image.shape[-1] == 3:
            image = (image @ GREY).astype(np.uint8)[..., None]
        if stack == 1:
            return image
        older = [image] * (stack - 1) if first or self._image is None else [self._image[..., image.shape[-1] :]]
        self._image = np.concatenate([*older, image], -1)
        return self._image


def _fit(frame: np.ndarray, size: tuple[int, int], resize: str) -> np.ndarray:
    """Fit a frame (H', W', C) into ``size``; see :class:`~sheeplike.envs.gym.options.GymOptions`."""
    height, width, channels = frame.shape
    if (height, width) == size:
        return frame
    factor = min(size[0] // height, size[1] // width)  # 0: it does not fit
    if resize == "pad" or (resize == "auto" and factor):
        if not factor:
            fit = f"a frame of {height}x{width} does not fit into image_size={size}"
            raise InvalidOption("resize", "pad", f"area, or larger images, as {fit}", "area")
        image = np.zeros((*size, channels), np.uint8)
        top, left = (size[0] - factor * height) // 2, (size[1] - factor * width) // 2
        inside = image[top : top + factor * height, left : left + factor * width]
        inside[...] = frame if factor == 1 else frame.repeat(factor, 0).repeat(factor, 1)
        return image
    method = FILTERS["area" if resize == "auto" else resize]
    planes = [frame] if channels == 3 else [np.ascontiguousarray(frame[..., channel]) for channel in range(channels)]
    resized = [np.asarray(Image.fromarray(plane).resize(size[::-1], method)) for plane in planes]
    return resized[0] if channels == 3 else np.stack(resized, -1)


def translate(space: spaces.Space) -> tuple[spaces.Space, ToEnv]:
    """Return the space in which agents act, and a function that turns their action, or several, into ``space``'s.

    ``Discrete`` and ``MultiDiscrete`` (made flat) count from 0; ``MultiBinary(n)`` becomes ``MultiDiscrete([2] * n)``,
    and a ``Box`` with finite bounds a ``Box`` (A,) float32 in [-1, 1].
    """
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        # A number of Python, if it is one: some environments look it up in a table.
        return spaces.Discrete(int(space.n)), lambda action: action + start if np.ndim(action) else int(action) + start
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        shape, dtype, binary = space.shape, space.dtype, isinstance(space, spaces.MultiBinary)
        first = 0 if binary else np.asarray(space.start)
        counts = [2] * int(np.prod(shape)) if binary else space.nvec.ravel()
        return spaces.MultiDiscrete(counts), lambda action: (_unflatten(action, shape) + first).astype(dtype)
    if not isinstance(space, spaces.Box):
        expected = "expected Discrete, MultiDiscrete, MultiBinary or Box"
        raise ValueError(f"action space {space}: {expected}; nearest: wrap the environment")
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        nearest = "gymnasium.wrappers.RescaleAction"
        raise ValueError(f"action space {space}: expected finite bounds, which become -1 and 1; nearest: {nearest}")
    half, whole = (high - low) / 2, not np.issubdtype(space.dtype, np.floating)

    def to_env(action: np.ndarray) -> np.ndarray:
        scaled = low + (_unflatten(np.clip(action, -1.0, 1.0), low.shape).astype(np.float64) + 1.0) * half
        scaled = np.clip(scaled, low, high)  # the sum may round beyond a bound
        return (np.rint(scaled) if whole else scaled).astype(space.dtype)

    return spaces.Box(-1.0, 1.0, (int(np.prod(space.shape)),), np.float32), to_env


def _unflatten(action: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Shape the last axis of an action, or of several."""
    return np.reshape(action, (*np.shape(action)[:-1], *shape))
