"""Pick up a box with a Franka Emika Panda, controlled in a vertical plane, at 20 Hz.

The box starts at rest on a strip on the floor; the arm has to grasp it and lift it to the height of the green rod. The
tip moves in the plane above the strip; damped least-squares inverse kinematics turn its motion into joint targets.

Five weighted terms measure how far along the pick is, 14.75 at most:

    gripper_box          4     1 - tanh(5 distance of tip and box)
    box_target           8     1 - tanh(5 (0.9 position error + 0.1 rotation error)), once the tip has reached the box
    no_floor_collision   0.25  neither hand nor finger pads touch the floor
    lifted               0.5   box centre above 5 cm
    success              2

The reward is progress: the amount by which their sum exceeds the best sum of the episode so far, which begins with that
of the first step. The return is therefore (best sum - first sum), and no posture pays twice. ``reward_terms`` splits
each reward by term; a term can be negative.

Source of the task, its weights and its limits: MuJoCo Playground's ``PandaPickCubeCartesian`` (Zakka et al. 2025). Here
the box does not start inside the floor, its place changes in every episode, and terms that are always 0 are left out.
"""

from typing import ClassVar, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import mjx

from sheeplike.envs.mjx.options import FrankaPickOptions
from sheeplike.envs.mjx.task import Outcome
from sheeplike.envs.mjx.tasks import panda

WEIGHTS = {"gripper_box": 4.0, "box_target": 8.0, "no_floor_collision": 0.25, "lifted": 0.5, "success": 2.0}
MAX_RETURN = sum(WEIGHTS.values())

TARGET_HEIGHT = 0.20
BOX_HALF_HEIGHT = 0.03
TIP_STEP = 0.005
GRIPPER_STEP = 0.02
TIP_LOW = np.array([0.25, -0.32, 0.02], np.float32)
TIP_HIGH = np.array([0.77, 0.32, 0.50], np.float32)
REACHED_DISTANCE = 0.012
LIFTED_HEIGHT = 0.05
HELD_DISTANCE = 0.03
SUCCESS_TOLERANCE = 0.05


class Memory(NamedTuple):
    """State of an episode of pick."""

    tip: jax.Array  # float32 (3,), target of the tip, metres
    reached: jax.Array  # bool (), the tip has been at the box in this episode
    begun: jax.Array  # bool (), the first step has set `best`
    best: jax.Array  # float32 (5,), the weighted terms, in the order of `WEIGHTS`, when their sum was highest


class FrankaPick:
    """Lift the red box to the green rod; see the module's docstring, and ``howto/tasks.md`` for actions and inputs.

    Success: the box's centre within 5 cm of the target height and within 3 cm of the tip. It terminates the episode, as
    does a box that leaves the scene (more than 1 m away along an axis, or below the floor).
    """

    name = "franka_pick"
    substeps = 10
    default_cameras = ("front", "wrist")
    film_camera = "scene"
    positions: ClassVar[dict[str, slice]] = {"tip": slice(0, 3), "box": slice(7, 10)}
    entries: ClassVar[dict[str, slice]] = {
        "tip to its target, m": slice(3, 5),
        "gripper, m": slice(5, 7),
        "tip to box, m": slice(10, 13),
        "box to goal, m": slice(13, 16),
        "rotation of the box": slice(16, 22),
        "arm joint, rad": slice(22, 29),
        "arm velocity, rad/s": slice(29, 36),
        "finger velocity, m/s": slice(36, 38),
        "box velocity, m/s": slice(38, 41),
        "box velocity, rad/s": slice(41, 44),
        "best term": slice(44, 49),
        "reached": slice(49, 50),
        "begun": slice(50, 51),
        "time left": slice(51, 52),
    }
    action_names: ClassVar[tuple[str, ...]] = ("sideways", "up", "gripper")
    # A grasp on the floor makes 12 contacts; each takes four rows beside the fingers' equality and the joint limits.
    contacts_per_world = 24
    constraints_per_world = 96

    def __init__(self, options: FrankaPickOptions = FrankaPickOptions()) -> None:  # noqa: B008, immutable
        self.settings = {"box_range": options.box_range}
        self.episode_length = options.episode_length
        self.picked_probability = options.picked_probability
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.model = model = mujoco.MjModel.from_xml_string(options.read_scene())
        self._duration = self.episode_length * self.substeps * model.opt.timestep
        self._home_qpos, self._home_ctrl, self._home_tip = self._keyframe("home")
        self._picked_qpos, self._picked_ctrl, self._picked_tip = self._keyframe("picked")
        self._rest = self._home_ctrl[:7]
        self._target = np.array([self._home_tip[0], 0.0, TARGET_HEIGHT], np.float32)
        self._tip_site = model.site("tip").id
        self._box_body = model.body("box").id
        self._box_qpos = model.joint("box").qposadr[0]
        self._pads = np.array([model.geom(name).id for name in ("left_pad", "right_pad")])
        self._capsule = model.geom("hand_capsule").id

    def _keyframe(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return positions (16,), controls (8,) and the place (3,) of the tip at these controls."""
        key = self.model.keyframe(name)
        data = mujoco.MjData(self.model)
        data.qpos[:7] = key.ctrl[:7]
        mujoco.mj_kinematics(self.model, data)
        return tuple(vector.astype(np.float32) for vector in (key.qpos, key.ctrl, data.site("tip").xpos))

    def reset(self, key: jax.Array, data: mjx.Data, *, box_range: jax.Array) -> tuple[mjx.Data, Memory]:
        box_key, picked_key = jax.random.split(key)
        box_y = jax.random.uniform(box_key, minval=-box_range, maxval=box_range)
        placed = jnp.stack([self._home_tip[0], box_y, BOX_HALF_HEIGHT])
        home_qpos = jnp.asarray(self._home_qpos).at[self._box_qpos : self._box_qpos + 3].set(placed)
        picked = jax.random.uniform(picked_key) < self.picked_probability
        data = data.replace(
            qpos=jnp.where(picked, self._picked_qpos, home_qpos),
            ctrl=jnp.where(picked, self._picked_ctrl, self._home_ctrl),
            mocap_pos=jnp.asarray(self._target)[None],
        )
        memory = Memory(
            tip=jnp.where(picked, self._picked_tip, self._home_tip),
            reached=jnp.zeros((), bool),
            begun=jnp.zeros((), bool),
            best=jnp.zeros(len(WEIGHTS), jnp.float32),
        )
        return data, memory

    def control(self, data: mjx.Data, memory: Memory, action: jax.Array) -> tuple[mjx.Data, Memory]:
        move = jnp.stack([jnp.zeros(()), action[0], action[1]]) * TIP_STEP
        tip = jnp.clip(memory.tip + move, TIP_LOW, TIP_HIGH)
        straight_down = jnp.diag(jnp.array([1.0, -1.0, -1.0]))
        joints = panda.inverse_step(data.ctrl[:7], tip, straight_down, self._rest)
        gripper = data.ctrl[7] + jnp.where(action[2] < 0.0, -GRIPPER_STEP, GRIPPER_STEP)
        ctrl = jnp.concatenate([joints, jnp.clip(gripper, 0.0, 0.04)[None]])
        return data.replace(ctrl=ctrl), memory._replace(tip=tip)

    def evaluate(self, data: mjx.Data, memory: Memory, action: jax.Array) -> Outcome:
        tip, box = data.site_xpos[self._tip_site], data.xpos[self._box_body]
        distance = jnp.linalg.norm(tip - box)
        position_error = jnp.linalg.norm(self._target - box)
        # Two columns of the rotation are enough to tell how far the box is turned from upright and square.
        rotation_error = jnp.linalg.norm((data.xmat[self._box_body] - jnp.eye(3))[:, :2])
        reached = memory.reached | (distance < REACHED_DISTANCE)
        success = (jnp.abs(box[2] - TARGET_HEIGHT) < SUCCESS_TOLERANCE) & (distance < HELD_DISTANCE)
        raw = {
            "gripper_box": 1.0 - jnp.tanh(5.0 * distance),
            "box_target": reached * (1.0 - jnp.tanh(5.0 * (0.9 * position_error + 0.1 * rotation_error))),
            "no_floor_collision": self._above_floor(data),
            "lifted": box[2] > LIFTED_HEIGHT,
            "success": success,
        }
        terms = jnp.stack([WEIGHTS[name] * raw[name].astype(jnp.float32) for name in WEIGHTS])

        progress = terms - memory.best
        better = progress.sum() > 0.0
        paid = jnp.where(memory.begun & better, progress, 0.0)
        out_of_bounds = (jnp.abs(box) > 1.0).any() | (box[2] < 0.0)
        return Outcome(
            reward=paid.sum(),
            terminated=success | out_of_bounds,
            success=success,
            reward_terms=dict(zip(WEIGHTS, paid, strict=True)),
            memory=memory._replace(
                reached=reached, begun=jnp.ones((), bool), best=jnp.where(better | ~memory.begun, terms, memory.best)
            ),
        )

    def _above_floor(self, data: mjx.Data) -> jax.Array:
        """Return a bool (), by geometry: contacts would be those before the last physics step."""
        pad_reach = jnp.abs(data.geom_xmat[self._pads, 2]) * self.model.geom_size[self._pads]
        pads = data.geom_xpos[self._pads, 2] - pad_reach.sum(-1)
        radius, half_length, _ = self.model.geom_size[self._capsule]
        tilt = jnp.abs(data.geom_xmat[self._capsule, 2, 2])
        hand = data.geom_xpos[self._capsule, 2] - half_length * tilt - radius
        return (pads > 0.0).all() & (hand > 0.0)

    def observe(self, data: mjx.Data, memory: Memory) -> dict[str, jax.Array]:
        tip, box = data.site_xpos[self._tip_site], data.xpos[self._box_body]
        state = jnp.concatenate(
            [
                tip,
                (memory.tip - tip)[1:],
                jnp.stack([data.qpos[7], data.ctrl[7]]),
                box,
                box - tip,
                self._target - box,
                data.xmat[self._box_body][:, :2].T.reshape(-1),
            ]
        )
        flags = jnp.stack([memory.reached.astype(jnp.float32), memory.begun.astype(jnp.float32)])
        time_left = 1.0 - data.time / self._duration
        privileged = jnp.concatenate([state, data.qpos[:7], data.qvel, memory.best, flags, time_left[None]])
        return {"state": state, "privileged_state": privileged}
