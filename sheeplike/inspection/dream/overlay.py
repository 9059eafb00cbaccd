"""Positions of objects: drawn over the frames as a latent state has them, and dragged there.

A task may name the entries of ``privileged_state`` that are positions in the world, as ``positions``. A model that was
trained on ``privileged_state`` predicts them; for any other model a linear probe predicts them from its latents.

In the simulator a body with a free joint is moved by its joint. In a dream the features are moved along their
regression on all positions, so that the others stay; the decoder hardly follows the least change that a probe reads.
There a body slides on the ground, z being upwards: a dream has seen no body in the air without what holds it.

Shape letters: ``M`` steps, ``F`` features, ``N`` entries of ``privileged_state``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import mujoco
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from sheeplike.inspection import dissect, probes
from sheeplike.inspection.dissect import PRIVILEGED_STATE
from sheeplike.inspection.episodes import Episodes, play
from sheeplike.inspection.model import Expected, States, TrainedModel

EPISODES = 8  # number of episodes that everything here is fitted to, and the alarm
CORRECTIONS = 8  # most steps of a drag in a dream: what is read follows each by a part
NEAR = 0.002  # metres; a drag in a dream ends so near to its goal
LIFT = 0.02  # metres above the ground from which a drag asks for a lift
PUSHES = 4  # times that a dragged body is pushed out of what it touches
QPOS, QVEL = "[1].data.qpos", "[1].data.qvel"  # entries of the simulator's state_dict
Point = tuple[str, float, float]
Points = Mapping[str, Sequence[Point]]
"""Labelled points ``(label, x, y)`` by camera, in pixels of its frame from the top left corner."""

Reader = Callable[[States, Expected], Tensor]
"""Predicts ``privileged_state (n, N)`` from states ``(n,)`` and their decoded predictions."""


def is_taught(model: TrainedModel) -> bool:
    """Return True if the model predicts ``privileged_state``."""
    return PRIVILEGED_STATE in model.world.decoder.keys.spaces


def taught(states: States, expected: Expected) -> Tensor:
    """Return the model's own prediction; a :data:`Reader`."""
    return expected.frames[PRIVILEGED_STATE]


class Places:
    """The positions that an environment of one world names.

    Attributes:
        read: predicts ``privileged_state``.
        trust: position to the share of its variance that ``read`` explains in episodes that it was not fitted to;
            empty if that was not measured.
        cameras: key of a picture to its size ``(H, W)``; those whose camera moves show no positions.
    """

    def __init__(self, envs: VectorEnv, read: Reader, *, scene: Mapping[str, Tensor] | None = None) -> None:
        self.envs, self.read, self.positions = envs, read, dict(envs.positions)
        self.trust: dict[str, float] = {}
        self._slopes: Tensor | None = None  # (P, F), of the P entries that are positions
        self._entries = torch.empty(0, dtype=torch.int64)  # of all positions
        self._limits: dict[str, tuple[Tensor, Tensor]] = {}  # lowest and highest position (3,)
        self._model = copy.copy(envs.simulator.task.model)
        self._data = mujoco.MjData(self._model)  # its cameras are posed
        self._joints = {name: joint for name in self.positions if (joint := _free_joint(self._model, name)) is not None}
        spaces = envs.single_observation_space.spaces
        self.cameras = {key: spaces[key].shape[:2] for key in spaces if key.startswith("pixels/")}
        self.cameras |= {key: tuple(frame.shape[1:3]) for key, frame in (scene or {}).items()}

    @property
    def movable(self) -> list[str]:
        """Names of the positions that are of bodies with a free joint, once :meth:`fit` was called."""
        return [*self._limits]

    def fit(self, features: Tensor, state: Tensor) -> None:
        """Regress features ``(M, F)`` on all positions in ``privileged_state (M, N)`` together."""
        self._entries = torch.cat([torch.arange(state.shape[1])[where] for where in self.positions.values()])
        self._slopes = probes.directions(features, state[:, self._entries])
        for name in self._joints:
            self._limits[name] = torch.aminmax(state[:, self.positions[name]], dim=0)

    def project(self, state: Tensor, names: Sequence[str]) -> list[Points]:
        """Project named positions of ``privileged_state (n, N)`` into every camera that is fixed in the scene."""
        seen, where = self._projections(), self.positions
        return [
            {
                key: [(name, *at) for name in names if (at := camera.project(place[where[name]])) is not None]
                for key, camera in seen.items()
            }
            for place in state.cpu().double().numpy()
        ]

    def aim(self, name: str, key: str, x: float, y: float, near: np.ndarray) -> np.ndarray:
        """Return the position ``(3,)`` at a pixel, in the plane through ``near (3,)`` in which the thing moves most."""
        low, high = (limit.double().numpy() for limit in self._limits[name])
        place = self._projections()[key].unproject(x, y, near, int((high - low).argmin()))
        beyond = (high - low).max()  # a pixel near the horizon is far away
        return np.clip(place, low - beyond, high + beyond)

    def moved(self, state: Mapping[str, Tensor], placed: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Return an environment's state with bodies at rest in other positions, pushed out of what they would enter."""
        changed, data = dict(state), mujoco.MjData(self._model)
        qpos, qvel = (state[key].clone() for key in (QPOS, QVEL))
        for name, place in placed.items():
            joint = self._joints[name]
            at, velocity = self._model.jnt_qposadr[joint], self._model.jnt_dofadr[joint]
            qvel[0, velocity : velocity + 6] = 0
            data.qpos[:] = qpos[0].numpy()
            data.qpos[at : at + 3] = place
            body, bodies = self._model.jnt_bodyid[joint], self._model.geom_bodyid
            for _ in range(PUSHES):
                mujoco.mj_forward(self._model, data)
                touching = [contact for contact in data.contact if body in bodies[contact.geom] and contact.dist < 0]
                if touching:
                    deepest = min(touching, key=lambda contact: contact.dist)
                    sign = 1 if bodies[deepest.geom[1]] == body else -1  # a normal points to the second geom
                    data.qpos[at : at + 3] -= deepest.dist * sign * deepest.frame[:3]
            qpos[0, at : at + 3] = torch.from_numpy(data.qpos[at : at + 3])
        return changed | {QPOS: qpos, QVEL: qvel}

    def dreamt(self, model: TrainedModel, states: States, name: str, place: np.ndarray) -> tuple[States, str | None]:
        """Return a state ``(1,)`` read as having one thing near ``place (3,)`` on the ground, and a remark or None."""

        def believed(states: States) -> Tensor:
            return self.read(states, model.decode(states))[0].cpu()

        low, high = self._limits[name]
        goal, asked, rate = believed(states), torch.tensor(place, dtype=torch.float32), 1.0
        start, lifts = goal[self._entries], asked[2] > low[2] + LIFT
        asked[2] = low[2]
        goal[self.positions[name]] = reached = asked.clamp(low, high)
        missing = goal[self._entries] - start
        for _ in range(CORRECTIONS):
            if missing.norm() < NEAR:
                break
            moved = states.features + rate * (missing @ self._slopes).to(model.device)
            tried = States(model.rssm.split(moved), states.logits)
            left = (goal - believed(tried))[self._entries]
            if left.norm() < missing.norm():
                states, missing = tried, left
            else:  # what is read is not linear in the features
                rate /= 2
        remarks = [f"the dream cannot lift the {name}: it slides on the ground"] if lifts else []
        if not torch.allclose(asked, reached, atol=0.005):  # metres
            remarks.append(f"the model has never seen the {name} so far out")
        return states, "; ".join(remarks) or None

    def _projections(self) -> dict[str, Projection]:
        for name, values in self.envs.varied_fields.items():  # cameras may be randomized
            if name.startswith("cam_"):
                getattr(self._model, name)[:] = values[0].cpu().numpy()
        seen = {key: projection(self._data, key.removeprefix("pixels/"), size) for key, size in self.cameras.items()}
        return {key: camera for key, camera in seen.items() if camera is not None}


def watch(model: TrainedModel, worlds: VectorEnv) -> tuple[Episodes, States]:
    """Play :data:`EPISODES` episodes of the policy; return them with the model's states."""
    keys = [key for key in worlds.single_observation_space if key in {*model.observations, PRIVILEGED_STATE}]
    played = play(model.networks, worlds, episodes=EPISODES, keys=keys, act="policy")
    return played, dissect.observe(model, played)


def learn(model: TrainedModel, envs: VectorEnv, played: Episodes, states: States) -> Places:
    """Fit directions, a probe if the model was not taught, and the trust, in episodes of the policy."""
    steps = played.valid
    features, truth = states.features[steps].cpu(), played.obs[PRIVILEGED_STATE][steps]
    number = torch.arange(len(played))[:, None].expand(steps.shape)[steps]
    held_out, read = torch.ones(len(number), dtype=torch.bool), taught
    if is_taught(model):
        found = model.decode(states[steps]).frames[PRIVILEGED_STATE].cpu()
    else:
        held_out = torch.isin(number, probes.split(len(played))[1])
        found = probes.fit_linear(features[~held_out], truth[~held_out], number[~held_out]).predict(features)
        probe = probes.fit_linear(features, truth, number)
        read = lambda states, expected: probe.predict(states.features.cpu())  # noqa: E731
    places = Places(envs, read, scene=envs.film())
    places.fit(features, truth)
    for name, where in places.positions.items():
        target = truth[held_out][:, where].double()
        error = (found[held_out][:, where] - target).square().sum()
        places.trust[name] = 1 - float(error / (target - target.mean(0)).square().sum().clamp_min(1e-12))
    return places


class Projection:
    """A camera that is fixed in the scene, and the size ``(H, W)`` of its frames."""

    def __init__(self, centre: np.ndarray, rotation: np.ndarray, fovy: float, size: tuple[int, int]) -> None:
        self.centre, self.rotation, self.size = centre, rotation, size
        self.focal = size[0] / 2 / math.tan(math.radians(fovy) / 2)

    def project(self, place: np.ndarray) -> tuple[float, float] | None:
        """Return a position's ``(x, y)`` in pixels from the top left corner; None behind the camera."""
        # Axes point to the right, up, and towards the viewer.
        x, y, z = self.rotation.T @ (place - self.centre)
        height, width = self.size
        return (width / 2 - self.focal * x / z, height / 2 + self.focal * y / z) if z < 0 else None

    def unproject(self, x: float, y: float, near: np.ndarray, axis: int) -> np.ndarray:
        """Return the position ``(3,)`` at a pixel, in the plane through ``near`` across an axis of the world.

        A ray that does not meet the plane in front of the camera leads to ``near``.
        """
        height, width = self.size
        ray = self.rotation @ np.array([(x - width / 2) / self.focal, (height / 2 - y) / self.focal, -1.0])
        # A plane that is seen from its edge is replaced by the one that faces the camera.
        normal = np.eye(3)[axis] if abs(self.rotation[axis, 2]) > 0.2 else self.rotation[:, 2]
        depth, slope = normal @ (near - self.centre), normal @ ray
        return self.centre + ray * depth / slope if depth * slope > 0 else near


def projection(data: mujoco.MjData, camera: str, size: tuple[int, int]) -> Projection | None:
    """Make the projection of a camera; None if it moves."""
    model = data.model
    if (number := mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, camera)) < 0 or model.cam_bodyid[number] != 0:
        return None
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    mujoco.mj_camlight(model, data)
    pose = data.cam_xpos[number].copy(), data.cam_xmat[number].reshape(3, 3).copy()
    return Projection(*pose, model.cam_fovy[number], size)


def _free_joint(model: mujoco.MjModel, body: str) -> int | None:
    """Return the number of the free joint of a body of this name, if there is one."""
    number = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_BODY, body)
    joint = model.body_jntadr[number] if number >= 0 else -1
    return int(joint) if joint >= 0 and model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_FREE else None
