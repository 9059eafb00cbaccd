"""Choice of cameras, sizes of their images, and poses of cameras and lights."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import mjx

from sheeplike.envs.contract import ImageSize, resolve_image_size
from sheeplike.envs.mjx.randomization.constants import subtrees
from sheeplike.options import nearest


def resolve_cameras(model: mujoco.MjModel, cameras: Sequence[str] | None) -> tuple[str, ...]:
    """Return the cameras asked for, or all that the scene has; raise ``ValueError`` for what it lacks."""
    known = [model.camera(i).name for i in range(model.ncam)]
    chosen = tuple(known if cameras is None else cameras)
    if not chosen:
        raise ValueError(f"cameras={cameras!r}: expected at least one of {', '.join(known) or 'none in this scene'}")
    for name in chosen:
        if name not in known:
            hint = f"; nearest: {nearest(name, known)}" if known else ""
            raise ValueError(f"camera {name!r} does not exist in the scene, which has: {', '.join(known)}{hint}")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"cameras={list(chosen)!r}: each camera may be named once")
    return chosen


def resolve_image_sizes(
    image_size: ImageSize | Mapping[str, ImageSize], cameras: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Return ``(height, width)`` of each camera, from one size for all or from one for each by name."""
    if not isinstance(image_size, Mapping):
        return dict.fromkeys(cameras, resolve_image_size(image_size))
    for name in image_size:
        if name not in cameras:
            raise ValueError(
                f"image_size has a size for camera {name!r}, which is not rendered: expected {', '.join(cameras)}; "
                f"nearest: {nearest(name, cameras)}"
            )
    missing = [name for name in cameras if name not in image_size]
    if missing:
        given = ", ".join(map(str, image_size)) or "none"
        raise ValueError(
            f"image_size has no size for camera {', '.join(missing)}: expected one for each that is rendered, and has "
            f"{given}; or fewer cameras"
        )
    return {name: resolve_image_size(image_size[name]) for name in cameras}


def place_cameras_and_lights(model: mjx.Model, data: mjx.Data) -> mjx.Data:
    """Compute poses of cameras and lights from the bodies that carry them, or that they track or look at.

    Warp does this inside a full ``forward`` only. A camera that tracks keeps the orientation, and the offset from its
    body, of the scene as it was compiled. Source: MuJoCo's ``mj_camlight``.
    """
    position, rotation, tracking, looking, at = _mounted(model, data, "cam")
    rotation = jnp.einsum("bij,bjk->bik", rotation, _quaternion_to_matrix(model.cam_quat))
    rotation = _replace(rotation, tracking, model.cam_mat0[tracking])
    rotation = _replace(rotation, looking, _looking(position[looking] - at))
    light_position, light_rotation, tracking, looking, at = _mounted(model, data, "light")
    direction = jnp.einsum("bij,bj->bi", light_rotation, model.light_dir)
    direction = _replace(direction, tracking, model.light_dir0[tracking])
    direction = _replace(direction, looking, _unit(at - light_position[looking]))
    lights = {"_impl.light_xpos": light_position, "_impl.light_xdir": direction}
    return data.tree_replace({"cam_xpos": position, "cam_xmat": rotation, **lights})


def _mounted(
    model: mjx.Model, data: mjx.Data, kind: str
) -> tuple[jax.Array, jax.Array, np.ndarray, np.ndarray, jax.Array]:
    """Return poses (K, 3), (K, 3, 3) of cameras or lights, who tracks, who looks at a body, and where that is."""
    mode, offset, offset_body, offset_centre = (
        getattr(model, f"{kind}_{name}") for name in ("mode", "pos", "pos0", "poscom0")
    )
    holder = model if kind == "cam" else model._impl
    body, target = getattr(holder, f"{kind}_bodyid"), getattr(holder, f"{kind}_targetbodyid")
    of_mode = {
        name: np.flatnonzero(np.asarray(mode) == getattr(mujoco.mjtCamLight, f"mjCAMLIGHT_{name}"))
        for name in ("TRACK", "TRACKCOM", "TARGETBODY", "TARGETBODYCOM")
    }
    tracks, tracks_centre, sees, sees_centre = of_mode.values()
    sees, sees_centre = sees[target[sees] >= 0], sees_centre[target[sees_centre] >= 0]
    rotation = data.xmat[body]
    position = data.xpos[body] + jnp.einsum("bij,bj->bi", rotation, offset)
    position = _replace(position, tracks, data.xpos[body[tracks]] + offset_body[tracks])
    centres = _centres(model, data, body[tracks_centre])
    position = _replace(position, tracks_centre, centres + offset_centre[tracks_centre])
    seen = jnp.concatenate([data.xpos[target[sees]], _centres(model, data, target[sees_centre])])
    return position, rotation, np.append(tracks, tracks_centre), np.append(sees, sees_centre), seen


def _centres(model: mjx.Model, data: mjx.Data, bodies: np.ndarray) -> jax.Array:
    """Return centres of mass of bodies (K,) with all that they carry, float32 (K, 3), of this moment's kinematics."""
    carried = subtrees(model.body_parentid)[bodies]
    mass = carried @ model.body_mass
    weighted = carried @ (model.body_mass[:, None] * data.xipos)
    massless = (mass < mujoco.mjMINVAL)[:, None]
    return jnp.where(massless, data.xipos[bodies], weighted / jnp.where(massless, 1.0, mass[:, None]))


def _replace(array: jax.Array, index: np.ndarray, values: jax.Array) -> jax.Array:
    return array.at[index].set(values) if index.size else array


def _looking(backwards: jax.Array) -> jax.Array:
    """Return rotations (K, 3, 3) of cameras that look along ``-backwards`` (K, 3), with the horizon level."""
    z = _unit(backwards)
    x = _unit(jnp.cross(jnp.array([0.0, 0.0, 1.0]), z))
    return jnp.stack([x, _unit(jnp.cross(z, x)), z], axis=-1)


def _unit(vector: jax.Array) -> jax.Array:
    """Scale vectors (K, 3) to length one; the x axis where there is no direction, as in MuJoCo."""
    length = jnp.linalg.norm(vector, axis=-1, keepdims=True)
    short = length < mujoco.mjMINVAL
    return jnp.where(short, jnp.array([1.0, 0.0, 0.0]), vector / jnp.where(short, 1.0, length))


def _quaternion_to_matrix(quat: jax.Array) -> jax.Array:
    """Turn unit quaternions (..., 4), w first, into rotation matrices (..., 3, 3)."""
    w, x, y, z = jnp.moveaxis(quat, -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)
