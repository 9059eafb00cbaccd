"""Madrona's batch renderer, for those who have built it."""

import copy
import hashlib
import importlib
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import mjx

from sheeplike.envs.mjx.rendering.cameras import place_cameras_and_lights
from sheeplike.envs.mjx.rendering.renderer import ENVS, GEOM_GROUPS, Frames, Renderer

SOURCE = "https://github.com/shacklettbp/madrona_mjx"

# What BatchRenderer reads: of the scene when it is built, and of each world when it is opened, once and for all.
SCENE_FIELDS = (
    *("mesh_vert", "mesh_face", "mesh_vertadr", "mesh_faceadr"),
    *("mesh_texcoord", "mesh_texcoordadr", "mesh_texcoordnum"),
    *("geom_type", "geom_group", "geom_dataid", "geom_size", "geom_matid", "geom_rgba", "geom_bodyid", "geom_quat"),
    *("mat_rgba", "mat_texid", "tex_data", "tex_adr", "tex_width", "tex_height", "tex_nchannel"),
    *("nlight", "ncam"),
)
LOOK_FIELDS = (
    *("geom_type", "geom_matid", "geom_rgba", "geom_size"),
    *("light_pos", "light_dir", "light_type", "light_castshadow", "light_cutoff"),
)
POSES = ("geom_xpos", "xquat", "cam_xpos", "cam_xmat")

UPLOADED_ONCE = ("geom_quat", "geom_rgba", "geom_matid", "geom_size", "mat_", "tex_", "light_", "cam_fovy", "cam_intr")
"""How the names of the fields begin that the frames of an episode do not follow."""

_process: dict[str, Any] = {}
"""Madrona can have one renderer per process: ``scene``, what it draws; ``drawing``, it and its tokens, once open."""


class MadronaRenderer(Renderer):
    """Madrona's ray tracer.

    **It was never run**: Madrona is built from source and needs CUDA. This is written against the source of
    ``madrona_mjx`` (``src/madrona_mjx/renderer.py``) and tested against a double of that interface. Its last version is
    for JAX below 0.6, older than what this project needs, so it has to be ported first; it is deprecated in favour of
    MJX-Warp's renderer.

    Raises:
        ValueError: ``madrona_mjx`` cannot be imported, what Madrona lacks is asked for (segmentation, a CPU, sizes that
            differ), or this process draws something else already: environments of one process, such as those of
            training and evaluation, have to agree.
    """

    def prepare(self) -> None:
        try:
            self._batch_renderer = importlib.import_module("madrona_mjx.renderer").BatchRenderer
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"renderer='madrona': madrona_mjx, which is built from source ({SOURCE}), cannot be imported beside "
                f"JAX {jax.__version__}: {error}; nearest: renderer=warp"
            ) from error
        if not self.device.startswith("cuda"):
            raise ValueError(f"device={self.device!r}: renderer='madrona' needs a GPU; nearest: renderer=warp")
        if self.segmentation:
            raise ValueError("segmentation=True: renderer='madrona' has none; nearest: renderer=warp")
        if len({*self.image_sizes.values()}) > 1:
            raise ValueError(f"image_size={self.image_sizes}: renderer='madrona' has one size for all cameras")
        # It draws the cameras in the order in which the scene has them.
        self._ids = sorted(self.model.camera(name).id for name in self.cameras)
        self._index = {name: self._ids.index(self.model.camera(name).id) for name in self.cameras}
        self._gpu = int(self.device.partition(":")[2] or 0)
        self._model = copy.copy(self.model)
        if not self.textures:
            self._model.mat_texid[:] = -1
        if not self.shadows:
            self._model.light_castshadow[:] = 0
        compiled = np.empty(mujoco.mj_sizeModel(self._model), np.uint8)
        mujoco.mj_saveModel(self._model, None, compiled)
        sha256 = hashlib.sha256(compiled).hexdigest()
        scene = {"num_envs": self.num_envs, **self.image_sizes, "gpu": self._gpu, "sha256": sha256}
        if (drawn := _process.setdefault("scene", scene)) != scene:
            raise ValueError(f"renderer='madrona' draws one scene per process: expected {drawn}, got {scene}")

    def vary(self, fields: Collection[str]) -> None:
        for field in fields:
            if field.startswith(UPLOADED_ONCE):
                raise ValueError(f"variation of {field!r}: renderer='madrona' uploads it once; nearest: renderer=warp")

    def open(self) -> None:
        if "drawing" in _process:
            return
        (height, width), *_ = self.image_sizes.values()
        renderer = self._batch_renderer(
            m=SimpleNamespace(**_read(self._model, SCENE_FIELDS)),
            gpu_id=self._gpu,
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
        poses, look = _read(start, POSES), _read(self._model, LOOK_FIELDS)
        poses["cam_xmat"] = poses["cam_xmat"].reshape(-1, 3, 3)
        look["light_directional"] = look["light_type"] == int(mujoco.mjtLightType.mjLIGHT_DIRECTIONAL)  # as it once was
        worlds = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_envs, *x.shape)), (poses, look))
        init = jax.vmap(lambda poses, look: renderer.init(SimpleNamespace(**poses), SimpleNamespace(**look)))
        tokens, *_ = jax.jit(init)(*worlds)
        _process["drawing"] = renderer, tokens

    def render(self, model: mjx.Model, data: mjx.Data) -> tuple[Frames, mjx.Data]:
        data = place_cameras_and_lights(model, data)
        renderer, tokens = _process["drawing"]
        # RGBA uint8 (cameras, H, W, 4) and depth float32 (cameras, H, W, 1), as Madrona delivers it.
        _, rgba, depth = renderer.render(tokens[jax.lax.axis_index(ENVS)], data)
        frames: Frames = {f"pixels/{name}": rgba[index, ..., :3] for name, index in self._index.items()}
        if self.depth:
            frames |= {f"depth/{name}": depth[index] for name, index in self._index.items()}
        return frames, data


def _read(source: Any, names: Sequence[str]) -> dict[str, Any]:
    """Fields by name; arrays of real numbers as float32, as MJX has them."""
    found = {name: getattr(source, name) for name in names}
    real = {name for name, value in found.items() if getattr(value, "dtype", None) == np.float64}
    return {name: np.float32(value) if name in real else value for name, value in found.items()}
