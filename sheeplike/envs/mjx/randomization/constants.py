"""Constants that MuJoCo derives when it compiles a scene, derived again after randomization of their inputs.

Source: ``mj_setConst`` of MuJoCo, for changes that leave the pose ``qpos0`` of the bodies as it is.
"""

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

INERTIAL = frozenset({"body_mass", "body_inertia", "dof_armature"})
"""Fields that determine the inertia at ``qpos0``, and thereby the inverse weights that soften constraints."""

Fields = dict[str, jax.Array]


class Inertia:
    """The inertia of a scene in its reference pose, as a function of masses, inertias and armatures."""

    def __init__(self, scene: mujoco.MjModel) -> None:
        data = mujoco.MjData(scene)
        data.qpos[:] = scene.qpos0
        mujoco.mj_forward(scene, data)
        self._nominal = {name: np.float32(getattr(scene, name)) for name in INERTIAL}
        jacobians = np.zeros((scene.nbody, 2, 3, scene.nv))
        for body in range(scene.nbody):
            mujoco.mj_jacBodyCom(scene, data, jacobians[body, 0], jacobians[body, 1], body)
        self._linear, self._angular = np.float32(jacobians[:, 0]), np.float32(jacobians[:, 1])
        self._axes = np.float32(data.ximat.reshape(-1, 3, 3))
        self._moves = scene.body_weldid != 0
        self._slides = scene.body_simple == 2
        self._within = subtrees(scene.body_parentid)
        self._body_of = scene.dof_bodyid
        self._averaged = _averages(scene)
        # Jacobian of the tendons' lengths, and moment arms of the actuators.
        tendons = data.ten_J, scene.ten_J_rownnz, scene.ten_J_rowadr, scene.ten_J_colind
        moments = data.actuator_moment, data.moment_rownnz, data.moment_rowadr, data.moment_colind
        self._tendons, self._moments = _dense(scene.ntendon, scene, *tendons), _dense(scene.nu, scene, *moments)
        self._tendon_armature = np.float32(scene.tendon_armature)

    def constants(self, fields: Fields) -> Fields:
        """Return the constants of one world that follow from ``fields``; missing fields are nominal."""
        mass, inertia, armature = (
            jnp.asarray(fields.get(name, self._nominal[name])) for name in ("body_mass", "body_inertia", "dof_armature")
        )
        derived: Fields = {"body_subtreemass": self._within @ mass}
        if not armature.size:
            return derived
        angular = jnp.einsum("bji,bjv->biv", self._axes, self._angular)  # about the axes of each body's inertia
        matrix = jnp.einsum("b,biv,biw->vw", mass, self._linear, self._linear)
        matrix += jnp.einsum("bi,biv,biw->vw", inertia, angular, angular) + jnp.diag(armature)
        matrix += jnp.einsum("t,tv,tw->vw", self._tendon_armature, self._tendons, self._tendons)
        inverse = jnp.linalg.inv(matrix)
        weights = jnp.stack(
            [
                jnp.einsum("biv,vw,biw->b", jacobian, inverse, jacobian) / 3
                for jacobian in (self._linear, self._angular)
            ],
            axis=-1,
        )
        # MuJoCo has a special rule for bodies that only slide along the axes of the world, armature or not.
        weights = jnp.where(self._slides[:, None], jnp.stack([1 / mass, jnp.zeros_like(mass)], -1), weights)
        derived["body_invweight0"] = jnp.where(self._moves[:, None], weights, 0.0)
        body = self._body_of
        derived["dof_invweight0"] = jnp.where(self._slides[body], 1 / mass[body], self._averaged @ jnp.diag(inverse))
        if self._tendons.size:
            derived["tendon_invweight0"] = jnp.einsum("tv,vw,tw->t", self._tendons, inverse, self._tendons)
        if self._moments.size:
            derived["actuator_acc0"] = jnp.linalg.norm(self._moments @ inverse, axis=-1)
        return derived


def bounds(scene: mujoco.MjModel, sizes: jax.Array) -> Fields:
    """Return ``geom_rbound`` and ``geom_aabb`` of geoms of these sizes, (ngeom, 3); meshes and planes keep theirs."""
    shapes, first, second = mujoco.mjtGeom, sizes[:, 0], sizes[:, 1]
    rbound = jnp.asarray(scene.geom_rbound, jnp.float32)
    aabb = jnp.asarray(scene.geom_aabb, jnp.float32).reshape(-1, 2, 3)
    for shape, radius, half in (
        (shapes.mjGEOM_SPHERE, first, jnp.stack([first] * 3, -1)),
        (shapes.mjGEOM_CAPSULE, first + second, jnp.stack([first, first, first + second], -1)),
        (shapes.mjGEOM_CYLINDER, jnp.hypot(first, second), jnp.stack([first, first, second], -1)),
        (shapes.mjGEOM_ELLIPSOID, sizes.max(-1), sizes),
        (shapes.mjGEOM_BOX, jnp.linalg.norm(sizes, axis=-1), sizes),
    ):
        is_shape = scene.geom_type == shape
        rbound = jnp.where(is_shape, radius, rbound)
        aabb = aabb.at[:, 1].set(jnp.where(is_shape[:, None], half, aabb[:, 1]))
    return {"geom_rbound": rbound, "geom_aabb": aabb}


def subtrees(parents: np.ndarray) -> np.ndarray:
    """Return float32 (nbody, nbody): row i has 1 for body i and all bodies below it, else 0."""
    within = np.eye(len(parents), dtype=np.float32)
    for body in range(len(parents) - 1, 0, -1):
        within[parents[body]] += within[body]
    return within


def _averages(scene: mujoco.MjModel) -> np.ndarray:
    """Return float32 (nv, nv) that averages over a ball's degrees of freedom, and over each half of a free joint's."""
    groups = np.arange(scene.nv)
    for kind, first in zip(scene.jnt_type, scene.jnt_dofadr, strict=True):
        if kind == mujoco.mjtJoint.mjJNT_FREE:
            groups[first : first + 3], groups[first + 3 : first + 6] = first, first + 3
        elif kind == mujoco.mjtJoint.mjJNT_BALL:
            groups[first : first + 3] = first
    same = np.float32(groups[:, None] == groups[None])
    return same / same.sum(1, keepdims=True)


def _dense(rows: int, scene: mujoco.MjModel, *sparse: np.ndarray) -> np.ndarray:
    """Return float32 (rows, nv), from MuJoCo's sparse values, entries per row, their addresses and columns."""
    dense = np.zeros((rows, scene.nv))
    if rows:
        mujoco.mju_sparse2dense(dense, *sparse)
    return np.float32(dense)
