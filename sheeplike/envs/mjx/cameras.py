"""Which cameras a scene has, and where they and the lights are."""

import difflib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import mujoco
from mujoco import mjx


def resolve_cameras(model: mujoco.MjModel, cameras: Sequence[str] | None) -> tuple[str, ...]:
    """The cameras asked for, or all that the scene has.

    Raises:
        ValueError: no camera at all, one that the scene lacks, or one named twice.
    """
    known = [model.camera(i).name for i in range(model.ncam)]
    if isinstance(cameras, str):
        raise ValueError(f"cameras={cameras!r}: expected a list of camera names, such as [{cameras!r}]")
    chosen = tuple(known if cameras is None else cameras)
    if not chosen:
        raise ValueError(f"cameras={cameras!r}: expected at least one of {', '.join(known) or 'none in this scene'}")
    for name in chosen:
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
            hint = f"; nearest: {nearest[0]}" if nearest else ""
            raise ValueError(f"camera {name!r} does not exist in the scene, which has: {', '.join(known)}{hint}")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"cameras={list(chosen)!r}: each camera may be named once")
    return chosen


def place_cameras_and_lights(model: mjx.Model, data: mjx.Data) -> mjx.Data:
    """Poses of cameras and lights from the poses of the bodies that carry them.

    Warp does this inside a full ``forward`` only; after a reset merge nothing but the kinematics is run, and a camera
    on a moving body would otherwise film from where its body stood one episode ago.
    """
    body, light_body = model.cam_bodyid, model._impl.light_bodyid
    rotation, light_rotation = data.xmat[body], data.xmat[light_body]
    camera_rotation = _quaternion_to_matrix(model.cam_quat)
    return data.tree_replace(
        {
            "cam_xpos": data.xpos[body] + jnp.einsum("bij,bj->bi", rotation, model.cam_pos),
            "cam_xmat": jnp.einsum("bij,bjk->bik", rotation, camera_rotation),
            "_impl.light_xpos": data.xpos[light_body] + jnp.einsum("bij,bj->bi", light_rotation, model.light_pos),
            "_impl.light_xdir": jnp.einsum("bij,bj->bi", light_rotation, model.light_dir),
        }
    )


def _quaternion_to_matrix(quat: jax.Array) -> jax.Array:
    """Unit quaternions (..., 4), w first, to rotation matrices (..., 3, 3)."""
    w, x, y, z = jnp.moveaxis(quat, -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)


def check_fixed(model: mujoco.MjModel) -> None:
    """Tracking and targeting modes need more than the pose of the carrying body."""
    for kind, modes in (("camera", model.cam_mode), ("light", model.light_mode)):
        for index, mode in enumerate(modes):
            if mode != mujoco.mjtCamLight.mjCAMLIGHT_FIXED:
                name = getattr(model, kind)(index).name or index
                raise ValueError(f'{kind} {name!r} has a tracking or targeting mode: expected mode="fixed"')
