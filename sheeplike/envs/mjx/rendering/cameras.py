"""Choice of cameras, sizes of their images, and poses of cameras and lights."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import mjx

from sheeplike.envs.contract import ImageSize, resolve_image_size
from sheeplike.envs.mjx.randomization.constants import subtrees
from sheeplike.options import one_of


def resolve_cameras(model: mujoco.MjModel, cameras: Sequence[str] | None) -> tuple[str, ...]:
    """Return the chosen cameras, by default all of the scene; raise ``ValueError`` for one that it lacks."""
    known = [model.camera(i).name for i in range(model.ncam)]
    chosen = tuple(known if cameras is None else cameras)
    if not chosen:
        raise ValueError(f"cameras={cameras!r}: expected at least one of {', '.join(known) or 'none in this scene'}")
    for name in chosen:
        if name not in known:
            has = one_of(name, known) if known else "none, since the scene has no camera"
            raise ValueError(f"camera {name!r} does not exist in the scene: expected {has}")
    return chosen


def resolve_image_sizes(
    image_size: ImageSize | Mapping[str, ImageSize], cameras: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Return ``(height, width)`` of each camera, from one size for all or one for each by name."""
    if not isinstance(image_size, Mapping):
        return dict.fromkeys(cameras, resolve_image_size(image_size))
    for name in image_size:
        if name not in cameras:
            raise ValueError(f"image_size of camera {name!r}, which is not rendered: expected {one_of(name, cameras)}")
    if missing := [name for name in cameras if name not in image_size]:
        given = ", ".join(map(str, image_size)) or "none"
        expected = f"expected one for each rendered camera, and got one for {given}"
        raise ValueError(f"image_size has no size for camera {', '.join(missing)}: {expected}")
    return {name: resolve_image_size(image_size[name]) for name in cameras}


def place_cameras_and_lights(model: mjx.Model, data: mjx.Data) -> mjx.Data:
    """Compute poses of cameras and lights from the bodies that carry them, or that they track or look at.

    Warp does this inside a full ``forward`` only. A tracking camera keeps the orientation, and the offset from its
    body, of the compiled scene. Source: MuJoCo's ``mj_camlight``.
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
    """Return poses (K, 3), (K, 3, 3) of cameras or lights, indices that track, that look at a point, and the points."""
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
    """Return the centres of mass, float32 (K, 3), of bodies (K,) together with all that they carry."""
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
    """Scale vectors (K, 3) to length one; a vector of zeros becomes the x axis, as in MuJoCo."""
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
