"""MJX-Warp's batch ray caster, on a GPU or on all cores of a CPU."""

import copy
import dataclasses
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import warp as wp
from mujoco import mjx
from mujoco.mjx.third_party import mujoco_warp

from sheeplike.envs.mjx.host_call import call_for_all
from sheeplike.envs.mjx.patches import hide_side_effects
from sheeplike.envs.mjx.randomization.fields import leaf
from sheeplike.envs.mjx.rendering.cameras import place_cameras_and_lights
from sheeplike.envs.mjx.rendering.renderer import Frames, Renderer
from sheeplike.host import cpu_cores

INTRINSICS = frozenset({"cam_fovy", "cam_intrinsic"})
"""Fields of the model that determine the direction of a pixel's ray."""


class WarpRenderer(Renderer):
    """The default renderer. It draws geoms opaque, and not at all if their alpha is 0.

    With ``by_threads`` the cores of a CPU share the worlds; without, MJX's own functions cast the rays, as on a GPU.
    """

    def prepare(self) -> None:
        if self.model.nflex:
            raise ValueError(
                "the scene has flexes, which are not drawn: expected geoms alone; nearest: env.renderer=none"
            )
        self._precomputed_rays, self._varied = True, frozenset()
        self.by_threads = self.device == "cpu"
        self._context = None

    def vary(self, fields: Collection[str]) -> None:
        if "light_castshadow" in fields and not self.options.shadows:
            raise ValueError("variation of 'light_castshadow': shadows are not rendered; expected env.shadows=true")
        if "mat_texrepeat" in fields and not self.options.textures:
            raise ValueError("variation of 'mat_texrepeat': textures are not rendered; expected env.textures=true")
        # Precomputed rays would ignore a lens that varies.
        self._varied = frozenset(fields)
        self._precomputed_rays = not INTRINSICS & set(fields)

    def open(self) -> None:
        if self._context is not None:
            return
        options = {
            "mjm": self.model,
            "cam_active": list(self.cameras),
            "cam_res": [(width, height) for height, width in self.image_sizes.values()],
            "render_rgb": True,
            "render_depth": self.options.depth,
            "render_seg": self.options.segmentation,
            "use_precomputed_rays": self._precomputed_rays,
            "enabled_geom_groups": [0, 1, 2],  # collision shapes are in the groups above
            "use_shadows": self.options.shadows,
            "use_textures": bool(self.options.textures),
        }
        if self.by_threads:
            self._context = _Shares(self.num_envs, cpu_cores(), self._varied, options)
        else:
            self._context = mjx.create_render_context(nworld=self.num_envs, devices=[self.device], **options)
            # The pytree holds only a key into Warp's registry: the context itself must outlive every compiled step.
            self._handle = self._context.pytree()
        kinds = ["rgb", *["depth"] * self.options.depth, *["seg"] * self.options.segmentation]
        self._starts = {f"{kind}_data": getattr(self._context, f"{kind}_adr").numpy().tolist() for kind in kinds}

    def render(self, model: mjx.Model, data: mjx.Data) -> tuple[Frames, mjx.Data]:
        data = place_cameras_and_lights(model, data)
        rays, data = self._cast(model, data)
        frames: Frames = {}
        for index, (camera, size) in enumerate(self.image_sizes.items()):
            of = {name: rays[name][starts[index] :][: size[0] * size[1]] for name, starts in self._starts.items()}
            # One uint32 per pixel, bytes B G R A on a little-endian machine: reinterpret and reverse, no float frame.
            bgra = jax.lax.bitcast_convert_type(of["rgb_data"].reshape(size), jnp.uint8)
            frames[f"pixels/{camera}"] = bgra[..., 2::-1]
            if self.options.depth:
                frames[f"depth/{camera}"] = of["depth_data"].reshape(*size, 1)
            if self.options.segmentation:
                # Each pixel has an object's id and kind, which can only be a geom.
                frames[f"segmentation/{camera}"] = of["seg_data"][:, 0].reshape(*size, 1)
        return frames, data

    def _cast(self, model: mjx.Model, data: mjx.Data) -> tuple[dict[str, jax.Array], mjx.Data]:
        """Return the hits of all rays of one world, by Warp's name of the buffer, and ``data`` for the next render."""
        if isinstance(self._context, _Shares):
            return self._context.cast(model, data), data
        with hide_side_effects():
            data = mjx.refit_bvh(model, data, self._handle)
            # The returned data carries the token that orders this render after its refit and before the next one's.
            if self.options.segmentation:
                *rays, data = mjx.render_with_segmentation(model, data, self._handle)
            else:
                *rays, data = mjx.render(model, data, self._handle)
            return dict(zip(("rgb_data", "depth_data", "seg_data"), rays, strict=False)), data


class _Shares:
    """Casts rays on a CPU, where each thread renders its share of the worlds.

    MJX's functions keep their state in globals of a module; this class calls Warp's own, with a context for each share.
    """

    DATA = ("geom_xpos", "geom_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir", "flexvert_xpos")

    def __init__(self, num_envs: int, threads: int, varied: Collection[str], options: dict[str, Any]) -> None:
        bounds = np.linspace(0, num_envs, min(threads, num_envs) + 1).astype(int)
        self._slices = [slice(*pair) for pair in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
        with wp.ScopedDevice("cpu"):
            self._model = mujoco_warp.put_model(options["mjm"])
            self._contexts = [
                mujoco_warp.create_render_context(nworld=share.stop - share.start, **options) for share in self._slices
            ]
        blank = {field.name: None for field in dataclasses.fields(mujoco_warp.Data) if field.init}
        self._data = mujoco_warp.Data(**blank)
        self._num_envs, self._built = num_envs, False
        self._fields = sorted(name for name in varied if isinstance(getattr(self._model, name, None), wp.array))
        self._threads = ThreadPoolExecutor(len(self._slices), thread_name_prefix="render")
        first = self._contexts[0]
        self.rgb_adr, self.depth_adr, self.seg_adr = first.rgb_adr, first.depth_adr, first.seg_adr
        outputs = {
            "rgb_data": jax.ShapeDtypeStruct(first.rgb_data.shape[1:], jnp.uint32),
            "depth_data": jax.ShapeDtypeStruct(first.depth_data.shape[1:], jnp.float32),
            "seg_data": jax.ShapeDtypeStruct((first.seg_data.shape[1], 2), jnp.int32),
        }
        self._outputs = {name: shape for name, shape in outputs.items() if shape.size}

    def cast(self, model: mjx.Model, data: mjx.Data) -> dict[str, jax.Array]:
        """Return ``rgb_data`` uint32 (R,), and on demand ``depth_data`` float32 (R,) and ``seg_data`` int32 (R, 2)."""
        inputs = {name: leaf(data if name in self.DATA else model, name) for name in (*self.DATA, *self._fields)}
        inputs = {name: value for name, value in inputs.items() if value.size}
        shapes = self._outputs.values()
        cast = call_for_all(self._render, tuple(inputs), tuple(inputs.values()), tuple(shapes), num_envs=self._num_envs)
        return dict(zip(self._outputs, cast, strict=True))

    def _render(self, names: tuple[str, ...], *arrays: np.ndarray) -> None:
        # First calls run one after the other: only one thread at a time can build kernels.
        each = self._threads.map if self._built else map
        named = list(zip((*names, *self._outputs), arrays, strict=True))
        list(each(self._render_share, self._slices, self._contexts, [named] * len(self._slices)))
        self._built = True

    def _render_share(self, share: slice, context: Any, named: list[tuple[str, np.ndarray]]) -> None:
        model, data = copy.copy(self._model), copy.copy(self._data)
        data.nworld = share.stop - share.start
        for name, values in named:
            if name in self.DATA:
                holder, kind = data, wp.vec3 if values.ndim == 3 else wp.mat33
            else:
                holder = context if name in self._outputs else model
                kind = getattr(holder, name).dtype
            setattr(holder, name, wp.array(values[share], dtype=kind, device="cpu", copy=False))
        mujoco_warp.refit_bvh(model, data, context)
        mujoco_warp.render(model, data, context)
