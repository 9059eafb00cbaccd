"""Forward and inverse kinematics of the Franka Emika Panda, in JAX.

Source: the arm's published Denavit-Hartenberg parameters (Franka Control Interface documentation, Craig's convention)
and damped least squares (Wampler 1986; Nakamura and Hanafusa 1986).
"""

import jax
import jax.numpy as jnp
import numpy as np

JOINT_LOW = np.array([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973], np.float32)
JOINT_HIGH = np.array([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973], np.float32)  # joint limits, radians

DAMPING = 1e-2  # chosen by measurement: 1e-3 diverges near the edge of the workspace, 5e-2 lags by millimetres
NULL_SPACE_GAIN = 0.1

# Twist alpha (rad), length a (m), offset d (m) of each joint.
_LINKS = (
    (0.0, 0.0, 0.333),
    (-np.pi / 2, 0.0, 0.0),
    (np.pi / 2, 0.0, 0.316),
    (np.pi / 2, 0.0825, 0.0),
    (-np.pi / 2, -0.0825, 0.384),
    (np.pi / 2, 0.0, 0.0),
    (np.pi / 2, 0.088, 0.0),
)
# The hand is turned by -45 degrees about the flange; the tip lies between the finger pads, 0.107 + 0.1034 m along it.
_HAND_ANGLE = -np.pi / 4
_TIP_OFFSET = 0.2104


def forward(joints: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return position float32 (3,), metres, and rotation (3, 3) of the tip in the base frame, and its Jacobian (6, 7).

    The Jacobian's first three rows are m/rad, its last three the rotation vector. ``joints`` are (7,), radians.
    """
    position, rotation = jnp.zeros(3, joints.dtype), jnp.eye(3, dtype=joints.dtype)
    axes, origins = [], []
    for (alpha, length, offset), angle in zip(_LINKS, joints, strict=True):
        ca, sa = float(np.cos(alpha)), float(np.sin(alpha))
        ct, st = jnp.cos(angle), jnp.sin(angle)
        local = jnp.stack(
            [
                jnp.stack([ct, -st, jnp.zeros_like(ct)]),
                jnp.stack([st * ca, ct * ca, -sa * jnp.ones_like(ct)]),
                jnp.stack([st * sa, ct * sa, ca * jnp.ones_like(ct)]),
            ]
        )
        position = position + rotation @ jnp.array([length, -sa * offset, ca * offset], joints.dtype)
        rotation = rotation @ local
        axes.append(rotation[:, 2])
        origins.append(position)
    position = position + rotation[:, 2] * _TIP_OFFSET
    c, s = float(np.cos(_HAND_ANGLE)), float(np.sin(_HAND_ANGLE))
    rotation = rotation @ jnp.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]], joints.dtype)
    axis = jnp.stack(axes)
    jacobian = jnp.concatenate([jnp.cross(axis, position - jnp.stack(origins)), axis], axis=1).T
    return position, rotation, jacobian


def inverse_step(joints: jax.Array, position: jax.Array, rotation: jax.Array, rest: jax.Array) -> jax.Array:
    """Take one damped least-squares step of joints (7,), radians, towards a tip pose in the base frame.

    With one call per control step and targets that move by millimetres, the error stays below a millimetre. The
    redundant degree of freedom is pulled towards the joints ``rest``.
    """
    tip, turn, jacobian = forward(joints)
    difference = rotation @ turn.T
    axis_angle = 0.5 * jnp.stack(
        [difference[2, 1] - difference[1, 2], difference[0, 2] - difference[2, 0], difference[1, 0] - difference[0, 1]]
    )
    error = jnp.concatenate([position - tip, axis_angle])
    pull = NULL_SPACE_GAIN * (rest - joints)
    gram = jacobian @ jacobian.T + DAMPING**2 * jnp.eye(6, dtype=joints.dtype)
    # J^+ e + (I - J^+ J) pull, with one factorisation.
    step = pull + jacobian.T @ jax.scipy.linalg.solve(gram, error - jacobian @ pull, assume_a="pos")
    return jnp.clip(joints + step, JOINT_LOW, JOINT_HIGH)
