"""Camera frames of all worlds in one batch, straight to uint8.

The simulator knows only the :class:`Renderer` protocol, so that another back-end can take the place of MJX-Warp's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import mujoco
from mujoco import mjx
from mujoco.mjx.warp import ffi

from sheeplike.envs.mjx.cameras import place_cameras_and_lights, resolve_cameras

Frames = dict[str, jax.Array]


class Renderer(Protocol):
    """Renders one world; is traced inside the simulator's ``vmap``, so that all worlds become one batch."""

    num_envs: int
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    depth: bool

    def open(self) -> None:
        """Allocates and compiles what rendering needs; called before the first ``render``, and again to no effect."""

    def render(self, model: mjx.Model, data: mjx.Data) -> tuple[Frames, mjx.Data]:
        """Frames of one world whose kinematics are fresh, and the data to carry on with.

        Returns:
            ``{"pixels/<camera>": uint8 (H, W, 3)}``, with depth also ``{"depth/<camera>": float32 (H, W, 1)}`` in
            metres, and ``data``, whose returned form must replace the one passed in.
        """


def resolve_image_size(image_size: int | Sequence[int]) -> tuple[int, int]:
    """``64`` or ``(48, 64)`` to ``(height, width)``.

    Raises:
        ValueError: not one or two positive whole numbers.
    """
    pair = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair):
        raise ValueError(f"image_size={image_size!r}: expected a positive int or (height, width), such as (48, 64)")
    return pair


class WarpRenderer:
    """MJX-Warp's batch ray caster, on a GPU or a CPU.

    Args:
        model: the scene. Geom groups 0, 1 and 2 are drawn; 3 and above (collision shapes) are not.
        num_envs: worlds. Warp allocates for exactly this many.
        image_size: ``(H, W)`` or one number, in pixels; the same for every camera.
        cameras: names, or all of the scene's.
        depth: also depth images, in metres along the optical axis.
        textures: draw the textures of materials, which costs some speed.
        device: Warp's name of the device, such as ``"cpu"`` or ``"cuda:0"``.

    Raises:
        ValueError: a camera that the scene lacks, or an impossible size.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        *,
        num_envs: int,
        image_size: int | Sequence[int] = 64,
        cameras: Sequence[str] | None = None,
        depth: bool = False,
        textures: bool = False,
        device: str = "cpu",
    ) -> None:
        self.num_envs = num_envs
        self.image_size = resolve_image_size(image_size)
        self.cameras = resolve_cameras(model, cameras)
        self.depth = depth
        self._model, self._textures, self._device = model, textures, device
        self._context = None

    def open(self) -> None:
        if self._context is not None:
            return
        height, width = self.image_size
        self._context = mjx.create_render_context(
            mjm=self._model,
            nworld=self.num_envs,
            devices=[self._device],
            cam_active=list(self.cameras),
            cam_res=(width, height),
            render_rgb=True,
            render_depth=self.depth,
            render_seg=False,
            use_textures=self._textures,
            use_shadows=False,
            enabled_geom_groups=[0, 1, 2],
        )
        # The pytree holds only a key into Warp's registry: the context itself must outlive every compiled step.
        self._handle = self._context.pytree()
        self._rgb_address = [int(address) for address in self._context.rgb_adr.numpy()]
        self._depth_address = [int(address) for address in self._context.depth_adr.numpy()]

    def render(self, model: mjx.Model, data: mjx.Data) -> tuple[Frames, mjx.Data]:
        height, width = self.image_size
        size = height * width
        data = place_cameras_and_lights(model, data)
        with _side_effects_undeclared():
            data = mjx.refit_bvh(model, data, self._handle)
            # The returned data carries the token that orders this render after its refit and before the next one's.
            packed, depth, data = mjx.render(model, data, self._handle)
        frames: Frames = {}
        for camera, start in zip(self.cameras, self._rgb_address, strict=True):
            # One uint32 per pixel, bytes B G R A on a little-endian machine: reinterpret and reverse, no float frame.
            bgra = jax.lax.bitcast_convert_type(packed[start : start + size].reshape(height, width), jnp.uint8)
            frames[f"pixels/{camera}"] = bgra[..., 2::-1]
        if self.depth:
            for camera, start in zip(self.cameras, self._depth_address, strict=True):
                frames[f"depth/{camera}"] = depth[start : start + size].reshape(height, width, 1)
        return frames, data


@contextmanager
def _side_effects_undeclared() -> Iterator[None]:
    """What is traced inside tells XLA nothing of the side effects of refit and render.

    JAX dispatches a computation with side effects in Python, leaf by leaf: 3 to 5 ms for each step of the worlds. They
    need not be declared, for the token in the data orders these calls, and the frames that are delivered keep them from
    being dropped.
    """
    declared = ffi.jax_callable_variadic_tuple

    def undeclared(*args: Any, has_side_effect: bool = False, **options: Any) -> Any:
        return declared(*args, **options)

    ffi.jax_callable_variadic_tuple = undeclared
    try:
        yield
    finally:
        ffi.jax_callable_variadic_tuple = declared
