"""What agents see of an environment's observations: images and vectors by name, as a flat dict."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import flatdim, flatten

from sheeplike.envs.gym.images import Images, as_frame

SMALLEST_IMAGE = 16
"""Pixels a side: a smaller array of bytes is a grid of symbols or a vector."""
MOST_CHANNELS = 16
VECTORS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
RENDERED = "render"
"""The camera's name where frames come from ``render()``."""


class Part(NamedTuple):
    """One array among the observations.

    Attributes:
        name: entries of nested spaces are joined by ``/``; empty where the space is this array alone.
        path: keys that lead to it.
        space: of it.
    """

    name: str
    path: tuple[Any, ...]
    space: spaces.Space

    def of(self, observation: Any) -> Any:
        """Its value in an observation."""
        for key in self.path:
            observation = observation[key]
        return observation


class Parts(NamedTuple):
    """The arrays among the observations: as images, as vectors, and those that are neither."""

    images: list[Part]
    vectors: list[Part]
    others: list[Part]


def parts_of(space: spaces.Space) -> Parts:
    """The arrays of an observation space, in the order of its entries."""
    found = list(_walk(space, (), ()))
    images = [part for part in found if _is_image(part.space)]
    vectors = [part for part in found if part not in images and isinstance(part.space, VECTORS)]
    return Parts(images, vectors, [part for part in found if part not in images and part not in vectors])


def choose_frames(frames: str, space: spaces.Space, render_modes: list[str]) -> str:
    """Where frames come from: ``observation``, ``render`` or ``none``.

    Args:
        frames: one of those, which the environment must be able to serve, or ``auto``: the first that it can.

    Raises:
        ValueError: it cannot.
    """
    images, renders = parts_of(space).images, "rgb_array" in render_modes
    can = {"observation": bool(images), "render": renders, "none": True}
    if frames == "auto":
        return next(choice for choice, possible in can.items() if possible)
    if not can[frames]:
        why = {
            "observation": f"no image of at least {SMALLEST_IMAGE} pixels a side is among the observations {space}",
            "render": f"the environment renders {', '.join(render_modes) or 'nothing'}, and no rgb_array",
        }[frames]
        raise ValueError(f"frames={frames!r}: {why}; nearest: {next(choice for choice in can if can[choice])}")
    return frames


class Observer:
    """Turns what one world observes and renders into the flat dict that agents see.

    ``pixels/<entry>`` are images among the observations (``pixels/observation`` where there is nothing else), or
    ``pixels/render``. Vectors have their entries' names; ``state`` is all of them together, in the order of their
    names, unless an entry is called that. Discrete values are one-hot. Texts are left out.

    Args:
        space: of the environment.
        frames: ``observation``, ``render`` or ``none``.
        image_size, resize, grayscale, frame_stack: see :class:`~sheeplike.envs.gym.images.Images`.

    Attributes:
        space: of the result; uint8 (H, W, C) and float32 (D,).

    Raises:
        ValueError: nothing remains to be seen.
    """

    def __init__(
        self,
        space: spaces.Space,
        *,
        frames: str,
        image_size: tuple[int, int],
        resize: str,
        grayscale: bool,
        frame_stack: int,
    ) -> None:
        images, vectors, _ = parts_of(space)
        self._rendered = frames == "render"
        self._images = {part.name or "observation": part for part in images} if frames == "observation" else {}
        cameras = [RENDERED] if self._rendered else list(self._images)
        settings = {"size": image_size, "resize": resize, "grayscale": grayscale, "stack": frame_stack}
        self._makers = {f"pixels/{camera}": Images(**settings) for camera in cameras}
        self._vectors = {part.name or "state": part for part in sorted(vectors)} if vectors else {}
        self._joined = bool(vectors) and "state" not in self._vectors
        entries: dict[str, spaces.Space] = {}
        for key, maker in self._makers.items():
            part = self._images.get(key.removeprefix("pixels/"))
            channels = 3 if part is None else _channels(part.space)
            entries[key] = spaces.Box(0, 255, (*image_size, maker.channels(channels)), np.uint8)
        widths = {name: flatdim(part.space) for name, part in self._vectors.items()}
        widths |= {"state": sum(widths.values())} if self._joined else {}
        entries |= {name: spaces.Box(-np.inf, np.inf, (width,), np.float32) for name, width in widths.items()}
        if not entries:
            raise ValueError(f"observation space {space}: expected an image or a vector in it, or frames=render")
        self.space = spaces.Dict(dict(sorted(entries.items())))

    def __call__(
        self, observation: Any, render: Callable[[], Any], *, first: bool, earlier: Any = None
    ) -> dict[str, np.ndarray]:
        """The flat dict; its images are written over by the next call.

        Args:
            observation: of the environment.
            render: called where frames come from it.
            first: an episode begins.
            earlier: an observation of which, pixel by pixel, the brighter is taken, or None.

        Raises:
            ValueError: an image is not what the space says.
        """
        seen: dict[str, np.ndarray] = {}
        if self._rendered:
            key = f"pixels/{RENDERED}"
            seen[key] = self._makers[key](_checked(render()), first=first)
        for name, part in self._images.items():
            frame = _oriented(part.of(observation), part.space)
            if earlier is not None:
                frame = np.maximum(frame, _oriented(part.of(earlier), part.space))
            seen[f"pixels/{name}"] = self._makers[f"pixels/{name}"](frame, first=first)
        vectors = {name: _vector(part.space, part.of(observation)) for name, part in self._vectors.items()}
        if self._joined:
            joined = list(vectors.values())
            vectors["state"] = joined[0] if len(joined) == 1 else np.concatenate(joined)
        return seen | vectors


def _walk(space: spaces.Space, names: tuple[str, ...], path: tuple[Any, ...]) -> Iterator[Part]:
    inside: Mapping[Any, spaces.Space] = {}
    if isinstance(space, spaces.Dict):
        inside = space.spaces
    elif isinstance(space, spaces.Tuple):
        inside = dict(enumerate(space.spaces))
    if not inside and not isinstance(space, spaces.Dict | spaces.Tuple):
        yield Part("/".join(names), path, space)
    for key, entry in inside.items():
        yield from _walk(entry, (*names, str(key)), (*path, key))


def _is_image(space: spaces.Space) -> bool:
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return False
    height, width = _sides(space)
    return min(height, width) >= SMALLEST_IMAGE and _channels(space) <= MOST_CHANNELS


def _channels_first(space: spaces.Box) -> bool:
    """Whether the shape can only mean (C, H, W)."""
    return len(space.shape) == 3 and space.shape[0] <= 4 and space.shape[2] > MOST_CHANNELS


def _sides(space: spaces.Box) -> tuple[int, int]:
    return space.shape[1:] if _channels_first(space) else space.shape[:2]


def _channels(space: spaces.Box) -> int:
    if len(space.shape) == 2:
        return 1
    return space.shape[0] if _channels_first(space) else space.shape[2]


def _oriented(frame: Any, space: spaces.Box) -> np.ndarray:
    frame = np.asarray(frame)
    if frame.shape != space.shape or frame.dtype != np.uint8:
        raise ValueError(f"an image {frame.dtype} {frame.shape}: expected uint8 {space.shape}, as its space says")
    return frame.transpose(1, 2, 0) if _channels_first(space) else as_frame(frame)


def _checked(frame: Any) -> np.ndarray:
    if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        what = f"{frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
        raise ValueError(f"render() returned {what}: expected uint8 (H, W, 3)")
    return frame


def _vector(space: spaces.Space, value: Any) -> np.ndarray:
    if isinstance(space, spaces.Box):
        return np.asarray(value, np.float32).reshape(-1)
    return np.asarray(flatten(space, value), np.float32)
