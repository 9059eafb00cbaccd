"""MJX-Warp's batch ray caster, on a GPU or on all cores of a CPU."""

import copy
import dataclasses
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import warp as wp
from mujoco import mjx
from mujoco.mjx.third_party import mujoco_warp
from mujoco.mjx.warp import ffi

from sheeplike.envs.mjx.host_call import HostCall
from sheeplike.envs.mjx.rendering.cameras import place_cameras_and_lights
from sheeplike.envs.mjx.rendering.renderer import GEOM_GROUPS, Frames, Renderer
from sheeplike.host import cpu_cores

INTRINSICS = frozenset({"cam_fovy", "cam_intrinsic"})
"""Fields of the model that decide where the ray of a pixel goes."""


class WarpRenderer(Renderer):
    """The default renderer. Transparent geoms are opaque in it, except for those with an alpha of 0, which no ray hits.

    Attributes:
        by_threads: the cores of a CPU share the worlds. If not, MJX's own functions cast the rays, as on a GPU.

    Raises:
        ValueError: also for segmentation of a scene with flexes.
    """

    def prepare(self) -> None:
        if self.segmentation and self.model.nflex:
            raise ValueError("segmentation=True: the scene has flexes, whose ids would be taken for those of geoms")
        self._precomputed_rays, self._varied = True, frozenset()
        self.by_threads = self.device == "cpu"
        self._context = None

    def vary(self, fields: Collection[str]) -> None:
        if "light_castshadow" in fields and not self.shadows:
            raise ValueError("variation of 'light_castshadow': no light casts a shadow; expected shadows=true")
        if "mat_texrepeat" in fields and not self.textures:
            raise ValueError("variation of 'mat_texrepeat': no material has its image; expected textures=true")
        # Rays that were computed once, from the model, would show every world with the nominal lens.
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
            "render_depth": self.depth,
            "render_seg": self.segmentation,
            "use_precomputed_rays": self._precomputed_rays,
            "enabled_geom_groups": list(GEOM_GROUPS),
            "use_shadows": self.shadows,
            "use_textures": self.textures,
        }
        if self.by_threads:
            self._context = _Shares(self.num_envs, cpu_cores(), self._varied, options)
        else:
            self._context = mjx.create_render_context(nworld=self.num_envs, devices=[self.device], **options)
            # The pytree holds only a key into Warp's registry: the context itself must outlive every compiled step.
            self._handle = self._context.pytree()
        starts = {"pixels": self._context.rgb_adr, "depth": self._context.depth_adr, "seg": self._context.seg_adr}
        self._starts = [(kind, array.numpy().tolist()) for kind, array in starts.items()]

    def render(self, model: mjx.Model, data: mjx.Data) -> tuple[Frames, mjx.Data]:
        data = place_cameras_and_lights(model, data)
        packed, depth, hits, data = self._cast(model, data)
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

    def _cast(self, model: mjx.Model, data: mjx.Data) -> tuple[jax.Array, jax.Array, jax.Array | None, mjx.Data]:
        """Colours, depths and hits of all rays of one world, and the data to go on with."""
        if isinstance(self._context, _Shares):
            return *self._context.cast(model, data), data
        with _side_effects_undeclared():
            data = mjx.refit_bvh(model, data, self._handle)
            # The returned data carries the token that orders this render after its refit and before the next one's.
            if self.segmentation:
                return mjx.render_with_segmentation(model, data, self._handle)
            packed, depth, data = mjx.render(model, data, self._handle)
            return packed, depth, None, data


class _Shares:
    """Rays of the worlds of a CPU, each thread casting those of its share of them.

    MJX's functions keep what they work on in globals of a module, so that no two threads can use them: here are Warp's
    own functions, with a context for each share.

    Args:
        num_envs: worlds.
        threads: shares.
        varied: names of the model's fields that differ between worlds.
        options: of Warp's render context.
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
        self._built = False
        self._fields = sorted(name for name in varied if isinstance(getattr(self._model, name, None), wp.array))
        self._threads = ThreadPoolExecutor(len(self._slices), thread_name_prefix="render")
        first = self._contexts[0]
        self.rgb_adr, self.depth_adr, self.seg_adr = first.rgb_adr, first.depth_adr, first.seg_adr
        self._shapes = [
            jax.ShapeDtypeStruct((num_envs, first.rgb_data.shape[1]), jnp.uint32),
            jax.ShapeDtypeStruct((num_envs, first.depth_data.shape[1]), jnp.float32),
            jax.ShapeDtypeStruct((num_envs, first.seg_data.shape[1], 2), jnp.int32),
        ]
        self._num_envs = num_envs

    def cast(self, model: mjx.Model, data: mjx.Data) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Colours uint32, depths float32 and hits int32 (R, 2) of the rays of one world; traced inside a ``vmap``."""
        inputs = [_leaf(data, name) for name in self.DATA] + [_leaf(model, name) for name in self._fields]
        kept = [index for index, leaf in enumerate(inputs) if leaf.size]
        shapes = [jax.ShapeDtypeStruct((self._num_envs, *leaf.shape), leaf.dtype) for leaf in inputs]
        self._names = [[*self.DATA, *self._fields][index] for index in kept]
        shown = [index for index, shape in enumerate(self._shapes) if shape.size]
        call = HostCall(self._render, [shapes[index] for index in kept], [self._shapes[index] for index in shown])
        self._shown = shown

        @jax.custom_batching.custom_vmap
        def cast(*leaves: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros(shape.shape[1:], shape.dtype) for shape in self._shapes)

        @cast.def_vmap
        def cast_all(size: int, batched: list[bool], *leaves: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
            each = [
                leaf if own else jnp.broadcast_to(leaf, (size, *leaf.shape))
                for leaf, own in zip(leaves, batched, strict=True)
            ]
            found = dict(zip(shown, call(*each), strict=True))
            blank = [jnp.zeros(shape.shape, shape.dtype) for shape in self._shapes]
            return tuple(found.get(index, blank[index]) for index in range(3)), (True,) * 3

        return cast(*(inputs[index] for index in kept))

    def _render(self, *arrays: np.ndarray) -> None:
        # The first time one after the other: each builds its kernel then, and Python parses source in one thread only.
        each = self._threads.map if self._built else map
        list(each(lambda index: self._render_share(index, arrays), range(len(self._slices))))
        self._built = True

    def _render_share(self, index: int, arrays: tuple[np.ndarray, ...]) -> None:
        share, context = self._slices[index], self._contexts[index]
        model, data = copy.copy(self._model), copy.copy(self._data)
        for name, values in zip(self._names, arrays, strict=False):
            holder = data if name in self.DATA else model
            kind = getattr(self._model, name).dtype if holder is model else _VECTORS[values.shape[2:]]
            setattr(holder, name, wp.array(values[share], dtype=kind, device="cpu", copy=False))
        data.nworld = share.stop - share.start
        names = ("rgb_data", "depth_data", "seg_data")
        for number, values in zip(self._shown, arrays[len(self._names) :], strict=True):
            kind = getattr(context, names[number]).dtype
            setattr(context, names[number], wp.array(values[share], dtype=kind, device="cpu", copy=False))
        mujoco_warp.refit_bvh(model, data, context)
        mujoco_warp.render(model, data, context)


_VECTORS = {(3,): wp.vec3, (3, 3): wp.mat33}


def _leaf(tree: mjx.Model | mjx.Data, name: str) -> jax.Array:
    own = {field.name for field in type(tree).fields()}  # where hasattr would find what is deprecated
    return getattr(tree if name in own else tree._impl, name)


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
