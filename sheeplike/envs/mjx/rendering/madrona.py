"""Madrona's batch renderer, for those who have built it; see :class:`MadronaRenderer`."""

import hashlib
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import mjx

from sheeplike.envs.contract import ImageSize
from sheeplike.envs.mjx.cameras import place_cameras_and_lights, resolve_cameras
from sheeplike.envs.mjx.rendering.protocol import GEOM_GROUPS, Frames, frame_spaces
from sheeplike.envs.mjx.rendering.sizes import resolve_image_sizes

SOURCE = "https://github.com/shacklettbp/madrona_mjx"

MODEL_FIELDS = (
    *("mesh_vert", "mesh_face", "mesh_vertadr", "mesh_faceadr"),
    *("mesh_texcoord", "mesh_texcoordadr", "mesh_texcoordnum"),
    *("geom_type", "geom_group", "geom_dataid", "geom_size", "geom_matid", "geom_rgba", "geom_bodyid", "geom_quat"),
    *("mat_rgba", "mat_texid", "tex_data", "tex_adr", "tex_width", "tex_height", "tex_nchannel"),
    *("nlight", "ncam"),
)
"""What ``BatchRenderer`` reads of the model when it is built, and ``geom_bodyid`` and ``geom_quat`` at each render."""

LOOK_FIELDS = (
    *("geom_type", "geom_matid", "geom_rgba", "geom_size"),
    *("light_pos", "light_dir", "light_type", "light_castshadow", "light_cutoff"),
)
"""What ``BatchRenderer.init`` reads of each world's model, once and for all."""

UPLOADED_ONCE = ("geom_quat", "geom_rgba", "geom_matid", "geom_size", "mat_", "tex_", "light_", "cam_fovy", "cam_intr")
"""How the names of the fields begin that the frames of an episode do not follow."""

_in_use: "tuple[_Scene, _Drawing | None] | None" = None
"""Madrona can have one renderer per process: what it draws, and the renderer once it is open."""


class World(NamedTuple):
    """What ``BatchRenderer`` reads of one world's data, under the names that ``mjx.Data`` has for it."""

    geom_xpos: jax.Array
    xquat: jax.Array
    cam_xpos: jax.Array
    cam_xmat: jax.Array


class _Scene(NamedTuple):
    """What one renderer draws; two environments that agree in it can share one."""

    model: bytes
    num_envs: int
    cameras: tuple[str, ...]
    size: tuple[int, int]
    shadows: bool
    textures: bool
    device: str


class _Drawing(NamedTuple):
    renderer: Any
    token: jax.Array


class MadronaRenderer:
    """Madrona's ray tracer behind the protocol of this package.

    **It was never run**: Madrona is built from source and needs CUDA. This is written against the source of
    ``madrona_mjx`` (``src/madrona_mjx/renderer.py``) and the way in which MuJoCo Playground called it, and tested
    against a recording double of that interface. Its last version was written for JAX below 0.6, older than what this
    project needs, so that it has to be ported before the two can be imported together; it is deprecated in favour of
    MJX-Warp's renderer. Frames have the names and types of Warp's. Depth is as Madrona delivers it.

    Madrona's own rules, all of them checked here:

    - one renderer per process, which environments of the same scene, size and number of worlds share, such as those of
      training and evaluation: ``eval.num_envs`` has to equal ``env.num_envs``;
    - all worlds at once, as many as it was built for: ``render`` has to be under exactly one ``vmap``, the outermost
      one, over all of them. Steps go around it, ``scan(vmap(render))``, never inside;
    - one image size for all cameras;
    - what a scene looks like is uploaded once, so colours, materials, sizes of geoms, lights and lenses cannot differ
      from episode to episode. Poses can.

    Args:
        model, num_envs, cameras, depth: see :class:`~sheeplike.envs.mjx.rendering.warp.WarpRenderer`.
        image_size: the same for all cameras.
        segmentation: False; Madrona has none.
        shadows, textures: of lights and materials that have any.
        device: ``"cuda:<index>"``.

    Raises:
        ValueError: ``madrona_mjx`` cannot be imported, what Madrona lacks is asked for, or another scene is drawn in
            this process.
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
        device: str = "cuda:0",
    ) -> None:
        self._batch_renderer = _import()
        if not device.startswith("cuda"):
            raise ValueError(f"device={device!r}: renderer='madrona' needs a GPU; nearest: renderer=warp")
        if segmentation:
            raise ValueError("segmentation=True: renderer='madrona' has none; nearest: renderer=warp")
        self.num_envs = num_envs
        self.cameras = resolve_cameras(model, cameras)
        self.image_sizes = resolve_image_sizes(image_size, self.cameras)
        self.spaces = frame_spaces(self.image_sizes, depth=depth)
        sizes = sorted(set(self.image_sizes.values()))
        if len(sizes) > 1:
            raise ValueError(f"image_size={dict(self.image_sizes)}: renderer='madrona' has one size for all cameras")
        self._model, self._depth = model, depth
        self._scene = _Scene(_digest(model), num_envs, tuple(self.cameras), sizes[0], shadows, textures, device)
        _claim(self._scene)
        # It numbers the cameras that it draws from 0, in the order in which the scene has them.
        self._ids = sorted(model.camera(name).id for name in self.cameras)
        self._indices = [self._ids.index(model.camera(name).id) for name in self.cameras]
        self._drawing: _Drawing | None = None

    def vary(self, fields: Collection[str]) -> None:
        for field in fields:
            if field.startswith(UPLOADED_ONCE):
                raise ValueError(
                    f"variation of {field!r}: renderer='madrona' uploads it once, and no episode would show another; "
                    "nearest: renderer=warp"
                )

    def open(self) -> None:
        global _in_use
        if self._drawing is None:
            scene, drawing = _in_use
            self._drawing = drawing or self._build()
            _in_use = scene, self._drawing

    def render(self, model: mjx.Model, data: mjx.Data) -> tuple[Frames, mjx.Data]:
        data = place_cameras_and_lights(model, data)
        rgba, depth = self._draw(World(data.geom_xpos, data.xquat, data.cam_xpos, data.cam_xmat))
        frames: Frames = {}
        for camera, index in zip(self.cameras, self._indices, strict=True):
            frames[f"pixels/{camera}"] = rgba[index, ..., :3]
            if self._depth:
                frames[f"depth/{camera}"] = depth[index]
        return frames, data

    def _build(self) -> _Drawing:
        height, width = self._scene.size
        renderer = self._batch_renderer(
            m=_view(self._model, MODEL_FIELDS, textures=self._scene.textures),
            gpu_id=int(self._scene.device.partition(":")[2] or 0),
            num_worlds=self.num_envs,
            batch_render_view_width=width,
            batch_render_view_height=height,
            enabled_geom_groups=np.asarray(GEOM_GROUPS, np.int32),
            enabled_cameras=np.asarray(self._ids, np.int32),
            add_cam_debug_geo=False,
            use_rasterizer=False,
            viz_gpu_hdls=None,
        )
        # Poses in which the scene stands before its first episode; each render comes with its own.
        start = mujoco.MjData(self._model)
        mujoco.mj_forward(self._model, start)
        poses = start.geom_xpos, start.xquat, start.cam_xpos, start.cam_xmat.reshape(-1, 3, 3)
        world = World(*(jnp.asarray(pose, jnp.float32) for pose in poses))
        look = vars(_view(self._model, LOOK_FIELDS, shadows=self._scene.shadows))
        look["light_directional"] = look["light_type"] == int(mujoco.mjtLightType.mjLIGHT_DIRECTIONAL)  # as it once was
        worlds = jax.tree.map(self._everywhere, (world, look))
        token, *_ = jax.jit(jax.vmap(lambda world, look: renderer.init(world, SimpleNamespace(**look))))(*worlds)
        return _Drawing(renderer, token)

    def _draw(self, world: World) -> tuple[jax.Array, jax.Array]:
        """RGBA uint8 (cameras, H, W, 4) and depth float32 (cameras, H, W, 1) of one world, drawn with all others."""
        renderer, token = self._drawing
        count = len(self.cameras)
        one = (
            jax.ShapeDtypeStruct((count, *self._scene.size, 4), jnp.uint8),
            jax.ShapeDtypeStruct((count, *self._scene.size, 1), jnp.float32),
        )

        @jax.custom_batching.custom_vmap
        def draw_all(*worlds: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jax.vmap(renderer.render)(token, World(*worlds))[1:]

        @draw_all.def_vmap
        def _(axis_size: int, in_batched: list[bool], *worlds: jax.Array) -> Any:
            raise ValueError("renderer='madrona' was mapped twice: expected one vmap, over all worlds")

        @jax.custom_batching.custom_vmap
        def draw(*world: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jax.pure_callback(_refuse, one)  # traced always, and run only where there is no vmap

        @draw.def_vmap
        def _(axis_size: int, in_batched: list[bool], *world: jax.Array) -> Any:
            if axis_size != self.num_envs:
                raise ValueError(f"renderer='madrona' draws {self.num_envs} worlds at once: got {axis_size}")
            worlds = (x if batched else self._everywhere(x) for batched, x in zip(in_batched, world, strict=True))
            return draw_all(*worlds), (True, True)

        return draw(*world)

    def _everywhere(self, value: Any) -> jax.Array:
        value = jnp.asarray(value)
        return jnp.broadcast_to(value, (self.num_envs, *value.shape))


def _import() -> Callable[..., Any]:
    """Madrona's renderer.

    Raises:
        ValueError: it is not installed, or not for the JAX that is.
    """
    nearest = "nearest: renderer=warp"
    try:
        return importlib.import_module("madrona_mjx.renderer").BatchRenderer
    except ModuleNotFoundError as error:
        if error.name in ("madrona_mjx", "madrona_mjx.renderer"):
            raise ValueError(f"madrona_mjx is not installed: it is built from source, {SOURCE}; {nearest}") from None
        raise ValueError(f"madrona_mjx cannot be imported beside JAX {jax.__version__}: {error}; {nearest}") from error
    except (ImportError, AttributeError) as error:
        raise ValueError(f"madrona_mjx cannot be imported beside JAX {jax.__version__}: {error}; {nearest}") from error


def _refuse() -> Any:
    raise RuntimeError("renderer='madrona' draws all worlds at once: expected to be under a vmap over them")


def _claim(scene: _Scene) -> None:
    """Reserves the process's one renderer for a scene.

    Raises:
        ValueError: it draws another.
    """
    global _in_use
    if _in_use is None:
        _in_use = scene, None
    for field, asked, used in zip(_Scene._fields, scene, _in_use[0], strict=True):
        if asked != used and field == "model":
            raise ValueError("renderer='madrona' draws another scene in this process: expected one scene in each")
        if asked != used:
            raise ValueError(
                f"{field}={asked!r}: renderer='madrona' draws with {field}={used!r} in this process, and there is one "
                "renderer in each: training and evaluation have to agree"
            )


def _digest(model: mujoco.MjModel) -> bytes:
    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return hashlib.sha256(buffer).digest()


def _view(
    model: mujoco.MjModel, fields: Sequence[str], *, textures: bool = True, shadows: bool = True
) -> SimpleNamespace:
    """The fields of a model alone, with real numbers as float32, as MJX has them."""
    found = {name: getattr(model, name) for name in fields}
    if not textures and "mat_texid" in found:
        found["mat_texid"] = np.full_like(found["mat_texid"], -1)
    if not shadows and "light_castshadow" in found:
        found["light_castshadow"] = np.zeros_like(found["light_castshadow"])
    real = {name for name, value in found.items() if getattr(value, "dtype", None) == np.float64}
    return SimpleNamespace(**{name: found[name].astype(np.float32) if name in real else found[name] for name in found})
