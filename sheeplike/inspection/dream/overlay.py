"""Where the latent believes things to be, drawn over the frames.

A task may name the entries of ``privileged_state`` that are places in the world, as ``positions``. A model that was
taught ``privileged_state`` is asked for them; in the latents of another one a linear probe reads them.
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

EPISODES = 16  # that a probe learns from


def positions_of(envs: VectorEnv) -> dict[str, slice]:
    """Names of things to where in ``privileged_state`` their place is; empty where the task says nothing of it."""
    task = getattr(getattr(envs, "simulator", None), "task", None)
    return getattr(task, "positions", {})


def is_taught(model: TrainedModel) -> bool:
    """Whether the model predicts where things are."""
    return PRIVILEGED_STATE in model.world.decoder.keys.spaces


Reader = Callable[[States, Expected], Tensor]
"""States ``(n,)``, and what is expected in them, to ``privileged_state (n, N)``."""


def taught(states: States, expected: Expected) -> Tensor:
    """What a model that was taught it says itself; a :data:`Reader`."""
    return expected.frames[PRIVILEGED_STATE]


def probed(model: TrainedModel, envs: VectorEnv) -> Reader:
    """What a linear probe says that learns from :data:`EPISODES` episodes of the agent's policy in ``envs``."""
    keys = [*model.observations, PRIVILEGED_STATE]
    played = play(model.networks, envs, episodes=EPISODES, keys=keys, act="policy")
    states = dissect.observe(model, played)
    number = torch.arange(EPISODES)[:, None].expand(played.valid.shape)[played.valid]
    features = states.features[played.valid].cpu()
    probe = probes.fit_linear(features, played.obs[PRIVILEGED_STATE][played.valid], number)
    return lambda states, expected: probe.predict(states.features.cpu())


def points(read: Reader, envs: VectorEnv) -> Points:
    """Where ``read`` says that the things of the one world are, in every camera that is fixed in its scene."""
    positions, model = positions_of(envs), copy.copy(envs.simulator.task.model)
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
    """From a place ``(3,)`` in the world to ``(x, y)`` in a camera's frame, in pixels from its top left corner.

    The function returns None for what is behind the camera. There is none, None, for a camera that moves.
    """
    if (number := mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, camera)) < 0 or model.cam_bodyid[number] != 0:
        return None
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    centre, rotation = data.cam_xpos[number].copy(), data.cam_xmat[number].reshape(3, 3).copy()
    height, width = size
    focal = height / 2 / math.tan(math.radians(model.cam_fovy[number]) / 2)

    def project(place: np.ndarray) -> tuple[float, float] | None:
        x, y, z = rotation.T @ (place - centre)  # to the right, up, and towards the viewer
        return (width / 2 - focal * x / z, height / 2 + focal * y / z) if z < 0 else None

    return project
