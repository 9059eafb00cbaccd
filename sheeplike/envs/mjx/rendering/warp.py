"""MJX-Warp's batch ray caster, on a GPU or a CPU."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from mujoco import mjx
from mujoco.mjx.warp import ffi

from sheeplike.envs.mjx.rendering.cameras import place_cameras_and_lights
from sheeplike.envs.mjx.rendering.renderer import GEOM_GROUPS, Frames, Renderer

INTRINSICS = frozenset({"cam_fovy", "cam_intrinsic"})
"""Fields of the model that decide where the ray of a pixel goes."""


class WarpRenderer(Renderer):
    """The default renderer. Transparent geoms are opaque in it, except for those with an alpha of 0, which no ray hits.

    Raises:
        ValueError: also for segmentation of a scene with flexes.
    """

    def prepare(self) -> None:
        if self.segmentation and self.model.nflex:
            raise ValueError("segmentation=True: the scene has flexes, whose ids would be taken for those of geoms")
        self._precomputed_rays = True
        self._context = None

    def vary(self, fields: Collection[str]) -> None:
        if "light_castshadow" in fields and not self.shadows:
            raise ValueError("variation of 'light_castshadow': no light casts a shadow; expected shadows=true")
        if "mat_texrepeat" in fields and not self.textures:
            raise ValueError("variation of 'mat_texrepeat': no material has its image; expected textures=true")
        # Rays that were computed once, from the model, would show every world with the nominal lens.
        self._precomputed_rays = not INTRINSICS & set(fields)

    def open(self) -> None:
        if self._context is not None:
            return
        self._context = mjx.create_render_context(
            mjm=self.model,
            nworld=self.num_envs,
            devices=[self.device],
            cam_active=list(self.cameras),
            cam_res=[(width, height) for height, width in self.image_sizes.values()],
            render_rgb=True,
            render_depth=self.depth,
            render_seg=self.segmentation,
            use_precomputed_rays=self._precomputed_rays,
            enabled_geom_groups=list(GEOM_GROUPS),
            use_shadows=self.shadows,
            use_textures=self.textures,
        )
        # The pytree holds only a key into Warp's registry: the context itself must outlive every compiled step.
        self._handle = self._context.pytree()
        starts = {"pixels": self._context.rgb_adr, "depth": self._context.depth_adr, "seg": self._context.seg_adr}
        self._starts = [(kind, array.numpy().tolist()) for kind, array in starts.items()]

    def render(self, model: mjx.Model, data: mjx.Data) -> tuple[Frames, mjx.Data]:
        data = place_cameras_and_lights(model, data)
        with _side_effects_undeclared():
            data = mjx.refit_bvh(model, data, self._handle)
            # The returned data carries the token that orders this render after its refit and before the next one's.
            if self.segmentation:
                packed, depth, hits, data = mjx.render_with_segmentation(model, data, self._handle)
            else:
                packed, depth, data = mjx.render(model, data, self._handle)
        frames: Frames = {}
        for index, (camera, size) in enumerate(self.image_sizes.items()):
            places = {kind: slice(starts[index], starts[index] + size[0] * size[1]) for kind, starts in self._starts}
            # One uint32 per pixel, bytes B G R A on a little-endian machine: reinterpret and reverse, no float frame.
            bgra = jax.lax.bitcast_convert_type(packed[places["pixels"]].reshape(size), jnp.uint8)
            frames[f"pixels/{camera}"] = bgra[..., 2::-1]
            if self.depth:
                frames[f"depth/{camera}"] = depth[places["depth"]].reshape(*size, 1)
            if self.segmentation:
                # Pairs of an object's id and its kind, which can only be a geom.
                frames[f"segmentation/{camera}"] = hits[places["seg"], 0].reshape(*size, 1)
        return frames, data


@contextmanager
def _side_effects_undeclared() -> Iterator[None]:
    """Hides the side effects of refit and render from XLA.

    JAX dispatches a computation with side effects in Python, leaf by leaf: 3 to 5 ms for each step of the worlds. They
    need not be declared: the token in the data orders these calls, and the delivered frames keep them from being
    dropped.
    """
    declared = ffi.jax_callable_variadic_tuple

    def undeclared(*args: Any, has_side_effect: bool = False, **options: Any) -> Any:
        return declared(*args, **options)

    with mock.patch.object(ffi, "jax_callable_variadic_tuple", undeclared):
        yield
