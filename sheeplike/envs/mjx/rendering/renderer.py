"""Base class of renderers, and the one that renders nothing."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import mujoco
import numpy as np
from gymnasium import spaces
from mujoco import mjx

from sheeplike.envs.contract import ImageSize
from sheeplike.envs.mjx.options import SimulationOptions
from sheeplike.envs.mjx.rendering.cameras import resolve_cameras, resolve_image_sizes

Frames = dict[str, jax.Array]

ENVS = "envs"  # the name of the axis over which the simulator maps its worlds


class Renderer:
    """Renders one world; traced inside the simulator's ``vmap``, so that all worlds become one batch.

    A renderer implements ``render``, and ``prepare``, ``vary`` and ``open`` if it needs them. Frames are
    ``"pixels/<camera>"`` uint8 (H, W, 3), and if asked for

    - ``"depth/<camera>"`` float32 (H, W, 1): metres along the optical axis, not along the ray; 0 where nothing is hit;
    - ``"segmentation/<camera>"`` int32 (H, W, 1): the id of the geom that is hit, and -1 where nothing is.

    Args:
        device: Warp's name of the device, such as ``"cpu"`` or ``"cuda:0"``.

    Attributes:
        cameras: names, in the order in which they are rendered.
        image_sizes: ``(H, W)`` of each camera, in that order.
        spaces: the spaces of the frames of one world, by name.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        options: SimulationOptions = SimulationOptions(),  # noqa: B008, immutable
        *,
        num_envs: int,
        image_size: ImageSize | Mapping[str, ImageSize] = 64,
        device: str = "cpu",
    ) -> None:
        self.model, self.options, self.num_envs, self.device = model, options, num_envs, device
        self.cameras = resolve_cameras(model, options.cameras)
        self.image_sizes = resolve_image_sizes(image_size, self.cameras)
        self.spaces: dict[str, spaces.Box] = {}
        for camera, size in self.image_sizes.items():
            self.spaces[f"pixels/{camera}"] = spaces.Box(0, 255, (*size, 3), np.uint8)
            if options.depth:
                self.spaces[f"depth/{camera}"] = spaces.Box(0.0, np.inf, (*size, 1), np.float32)
            if options.segmentation:
                self.spaces[f"segmentation/{camera}"] = spaces.Box(-1, model.ngeom - 1, (*size, 1), np.int32)
        self.prepare()

    def prepare(self) -> None:
        """Raise ``ValueError`` for an option that this renderer cannot serve; allocate nothing."""

    def vary(self, fields: Collection[str]) -> None:
        """Receive, before ``open``, the paths of fields that differ between worlds; ValueError for one not rendered."""

    def open(self) -> None:
        """Allocate and compile all that rendering needs, before the first ``render``; a second call does nothing."""

    def render(self, model: mjx.Model, data: mjx.Data) -> tuple[Frames, mjx.Data]:
        """Render one world with up-to-date positions; return frames and ``data``, changed only to order the renders."""
        raise NotImplementedError


class NoRenderer(Renderer):
    """Renders no frames, for agents that learn from vectors; the scene needs no camera."""

    def __init__(self, model: mujoco.MjModel, options: SimulationOptions, *, num_envs: int, **unused: Any) -> None:
        self.model, self.options, self.num_envs = model, options, num_envs
        self.cameras, self.image_sizes, self.spaces = (), {}, {}

    def render(self, model: mjx.Model, data: mjx.Data) -> tuple[Frames, mjx.Data]:
        return {}, data
