"""Positions of objects according to the latent state, drawn over the frames.

A task may name the entries of ``privileged_state`` that are positions in the world, as ``positions``. A model that was
trained on ``privileged_state`` predicts them; for any other model a linear probe predicts them from its latents.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping

import mujoco
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from sheeplike.inspection import dissect, probes
from sheeplike.inspection.dissect import PRIVILEGED_STATE
from sheeplike.inspection.dream.session import Point, Points
from sheeplike.inspection.episodes import play
from sheeplike.inspection.model import Expected, States, TrainedModel

EPISODES = 16  # number of episodes that a probe is fitted to


def is_taught(model: TrainedModel) -> bool:
    """Return True if the model predicts ``privileged_state``."""
    return PRIVILEGED_STATE in model.world.decoder.keys.spaces


Reader = Callable[[States, Expected], Tensor]
"""Predicts ``privileged_state (n, N)`` from states ``(n,)`` and their decoded predictions."""


def taught(states: States, expected: Expected) -> Tensor:
    """Return the model's own prediction; a :data:`Reader`."""
    return expected.frames[PRIVILEGED_STATE]


def probed(model: TrainedModel, envs: VectorEnv) -> Reader:
    """Fit a linear probe to :data:`EPISODES` episodes of the agent's policy in ``envs``."""
    keys = [*model.observations, PRIVILEGED_STATE]
    played = play(model.networks, envs, episodes=EPISODES, keys=keys, act="policy")
    states = dissect.observe(model, played)
    number = torch.arange(EPISODES)[:, None].expand(played.valid.shape)[played.valid]
    features = states.features[played.valid].cpu()
    probe = probes.fit_linear(features, played.obs[PRIVILEGED_STATE][played.valid], number)
    return lambda states, expected: probe.predict(states.features.cpu())


def points(read: Reader, envs: VectorEnv) -> Points:
    """Make a function that projects the positions that ``read`` predicts into every camera fixed in the scene."""
    positions, model = envs.positions, copy.copy(envs.simulator.task.model)
    spaces = envs.single_observation_space.spaces
    sizes = {key: spaces[key].shape[:2] for key in spaces if key.startswith("pixels/")}

    def found(states: States, expected: Expected) -> list[Mapping[str, list[Point]]]:
        for name, values in envs.varied_fields.items():  # cameras may be randomized
            if name.startswith("cam_"):
                getattr(model, name)[:] = values[0].cpu().numpy()
        cameras = {key: projection(model, key.removeprefix("pixels/"), size) for key, size in sizes.items()}
        return [
            {
                key: [(name, *at) for name, where in positions.items() if (at := project(place[where])) is not None]
                for key, project in cameras.items()
                if project is not None
            }
            for place in read(states, expected).cpu().double().numpy()
        ]

    return found


def projection(
    model: mujoco.MjModel, camera: str, size: tuple[int, int]
) -> Callable[[np.ndarray], tuple[float, float] | None] | None:
    """Make the projection of positions ``(3,)`` to ``(x, y)`` in a camera's frame, in pixels from its top left corner.

    The projection returns None for positions behind the camera. A camera that moves has no projection: None.
    """
    if (number := mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, camera)) < 0 or model.cam_bodyid[number] != 0:
        return None
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    centre, rotation = data.cam_xpos[number].copy(), data.cam_xmat[number].reshape(3, 3).copy()
    height, width = size
    focal = height / 2 / math.tan(math.radians(model.cam_fovy[number]) / 2)

    def project(place: np.ndarray) -> tuple[float, float] | None:
        x, y, z = rotation.T @ (place - centre)  # axes point to the right, up, and towards the viewer
        return (width / 2 - focal * x / z, height / 2 + focal * y / z) if z < 0 else None

    return project
