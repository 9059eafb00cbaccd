"""MJX-Warp's batch ray caster, on a GPU or a CPU."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
from mujoco import mjx
from mujoco.mjx.warp import ffi

from sheeplike.envs.contract import ImageSize
from sheeplike.envs.mjx.rendering.cameras import place_cameras_and_lights, resolve_cameras, resolve_image_sizes
from sheeplike.envs.mjx.rendering.protocol import GEOM_GROUPS, Frames, frame_spaces

INTRINSICS = frozenset({"cam_fovy", "cam_intrinsic"})
"""Fields of the model that decide where the ray of a pixel goes."""


class WarpRenderer:
    """The default renderer.

    Frames are ``"pixels/<camera>"`` uint8 (H, W, 3), and if asked for

    - ``"depth/<camera>"`` float32 (H, W, 1): metres along the optical axis, not along the ray; 0 where nothing is hit;
    - ``"segmentation/<camera>"`` int32 (H, W, 1): the id of the geom that is hit, as ``model.geom(id)`` takes it, and
      -1 where nothing is.

    Transparent geoms are drawn as if they were opaque, except for those with an alpha of 0, which no ray hits.

    Args:
        model: the scene. Geom groups 0, 1 and 2 are drawn; 3 and above (collision shapes) are not.
        num_envs: worlds. Warp allocates for exactly this many.
        image_size: ``(H, W)`` or one number, in pixels, for all cameras; or a size for each of them, by name.
        cameras: names, or all of the scene's.
        depth: also depth images.
        segmentation: also segmentation images.
        shadows: of the lights that cast any; one more ray for each light and pixel.
        textures: of the materials that have any; without them, a geom has its colour alone.
        device: Warp's name of the device, such as ``"cpu"`` or ``"cuda:0"``.

    Raises:
        ValueError: a camera that the scene lacks or that is not fixed to its body, an impossible size, or segmentation
            of a scene with flexes, whose ids would be taken for those of geoms.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        *,
        num_envs: int,
        image_size: ImageSize | Mapping[str, ImageSize] = 64,
        cameras: Sequence[str] | None = None,
        depth: bool = False,
        segmentation: bool = False,
        shadows: bool = False,
        textures: bool = False,
        device: str = "cpu",
    ) -> None:
        self.num_envs = num_envs
        self.cameras = resolve_cameras(model, cameras)
        self.image_sizes = resolve_image_sizes(image_size, self.cameras)
        if segmentation and model.nflex:
            raise ValueError("segmentation=True: the scene has flexes, whose ids would be taken for those of geoms")
        self.spaces = frame_spaces(self.image_sizes, depth=depth, objects=model.ngeom if segmentation else None)
        self._model, self._device = model, device
        self._depth, self._segmentation = depth, segmentation
        self._look = {"use_shadows": shadows, "use_textures": textures}
        self._precomputed_rays = True
        self._context = None

    def vary(self, fields: Collection[str]) -> None:
        if "light_castshadow" in fields and not self._look["use_shadows"]:
            raise ValueError("variation of 'light_castshadow': no light casts a shadow; expected shadows=true")
        if "mat_texrepeat" in fields and not self._look["use_textures"]:
            raise ValueError("variation of 'mat_texrepeat': no material has its image; expected textures=true")
        # Rays that were computed once, from the model, would show every world with the nominal lens.
        self._precomputed_rays = not INTRINSICS & set(fields)

    def open(self) -> None:
        if self._context is not None:
            return
        self._context = mjx.create_render_context(
            mjm=self._model,
            nworld=self.num_envs,
            devices=[self._device],
            cam_active=list(self.cameras),
            cam_res=[(width, height) for height, width in self.image_sizes.values()],
            render_rgb=True,
            render_depth=self._depth,
            render_seg=self._segmentation,
            use_precomputed_rays=self._precomputed_rays,
            enabled_geom_groups=list(GEOM_GROUPS),
            **self._look,
        )
        # The pytree holds only a key into Warp's registry: the context itself must outlive every compiled step.
        self._handle = self._context.pytree()
        starts = {"pixels": self._context.rgb_adr, "depth": self._context.depth_adr, "seg": self._context.seg_adr}
        self._starts = {kind: [int(start) for start in array.numpy()] for kind, array in starts.items()}

    def render(self, model: mjx.Model, data: mjx.Data) -> tuple[Frames, mjx.Data]:
        data = place_cameras_and_lights(model, data)
        with _side_effects_undeclared():
            data = mjx.refit_bvh(model, data, self._handle)
            # The returned data carries the token that orders this render after its refit and before the next one's.
            if self._segmentation:
                packed, depth, hits, data = mjx.render_with_segmentation(model, data, self._handle)
            else:
                packed, depth, data = mjx.render(model, data, self._handle)
        frames: Frames = {}
        for index, (camera, size) in enumerate(self.image_sizes.items()):
            # One uint32 per pixel, bytes B G R A on a little-endian machine: reinterpret and reverse, no float frame.
            bgra = jax.lax.bitcast_convert_type(self._image("pixels", index, packed).reshape(size), jnp.uint8)
            frames[f"pixels/{camera}"] = bgra[..., 2::-1]
            if self._depth:
                frames[f"depth/{camera}"] = self._image("depth", index, depth).reshape(*size, 1)
            if self._segmentation:
                # Pairs of an object's id and its kind, which can only be a geom.
                frames[f"segmentation/{camera}"] = self._image("seg", index, hits)[:, 0].reshape(*size, 1)
        return frames, data

    def _image(self, kind: str, index: int, packed: jax.Array) -> jax.Array:
        """The pixels of one camera, out of those of all cameras in a row."""
        height, width = self.image_sizes[self.cameras[index]]
        start = self._starts[kind][index]
        return packed[start : start + height * width]


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
