"""What the simulator knows of a renderer, and the one that renders nothing."""

from collections.abc import Collection, Mapping
from typing import Protocol

import jax
import numpy as np
from gymnasium import spaces
from mujoco import mjx

Frames = dict[str, jax.Array]

ENVS = "envs"
"""The name of the axis over which the simulator maps its worlds."""

GEOM_GROUPS = (0, 1, 2)
"""Which geoms are drawn; collision shapes are in the groups above."""


class Renderer(Protocol):
    """Renders one world; is traced inside the simulator's ``vmap``, so that all worlds become one batch."""

    num_envs: int
    image_sizes: Mapping[str, tuple[int, int]]
    """``(H, W)`` of each camera, in the order in which they are rendered."""
    spaces: Mapping[str, spaces.Box]
    """What ``render`` delivers of one world, by name."""

    def vary(self, fields: Collection[str]) -> None:
        """Is told which fields of the model differ between worlds, by path; called before ``open``.

        Raises:
            ValueError: a field whose differences would not be seen.
        """

    def open(self) -> None:
        """Allocates and compiles what rendering needs; called before the first ``render``, and again to no effect."""

    def render(self, model: mjx.Model, data: mjx.Data) -> tuple[Frames, mjx.Data]:
        """Frames of one world whose kinematics are fresh, and the data to carry on with.

        Returns:
            What ``spaces`` names: ``"pixels/<camera>"`` uint8 (H, W, 3), ``"depth/<camera>"`` float32 (H, W, 1) in
            metres, ``"segmentation/<camera>"`` int32 (H, W, 1); and ``data``, whose returned form must replace the one
            passed in.
        """


class NoRenderer:
    """No frames, for agents that learn from vectors: allocates nothing, and a scene without a camera will do."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.image_sizes: dict[str, tuple[int, int]] = {}
        self.spaces: dict[str, spaces.Box] = {}

    def vary(self, fields: Collection[str]) -> None: ...

    def open(self) -> None: ...

    def render(self, model: mjx.Model, data: mjx.Data) -> tuple[Frames, mjx.Data]:
        return {}, data


def frame_spaces(
    image_sizes: Mapping[str, tuple[int, int]], *, depth: bool = False, objects: int | None = None
) -> dict[str, spaces.Box]:
    """The spaces of what cameras see.

    Args:
        image_sizes: ``(H, W)`` of each camera.
        depth: depth images too.
        objects: how many there are to tell apart in segmentation images; None: there are no such images.
    """
    found: dict[str, spaces.Box] = {}
    for camera, size in image_sizes.items():
        found[f"pixels/{camera}"] = spaces.Box(0, 255, (*size, 3), np.uint8)
        if depth:
            found[f"depth/{camera}"] = spaces.Box(0.0, np.inf, (*size, 1), np.float32)
        if objects is not None:
            found[f"segmentation/{camera}"] = spaces.Box(-1, objects - 1, (*size, 1), np.int32)
    return found
