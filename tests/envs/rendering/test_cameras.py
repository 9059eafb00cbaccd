"""Poses of cameras and lights of every mode, against MuJoCo's own; sizes of images."""

from __future__ import annotations

from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
import torch
from mujoco import mjx

from sheeplike.envs.contract import resolve_image_size
from sheeplike.envs.mjx.rendering.cameras import place_cameras_and_lights, resolve_image_sizes
from sheeplike.envs.mjx.task import Outcome
from sheeplike.envs.mjx.vector_env import MjxVectorEnv

MODES = ("fixed", "track", "trackcom", "targetbody", "targetbodycom")


def things(where: str) -> str:
    """A camera and a light of each mode in the body ``where``; those that look at something look at each body."""
    text = ""
    for mode in MODES:
        for target in ("trunk", "tail", "ghost") if "target" in mode else ("",):
            attributes = f'mode="{mode}"' + (f' target="{target}"' if target else "")
            name = f"{where}_{mode}{target}"
            text += f'<camera name="{name}" pos="0.3 -2 0.7" xyaxes="1 0.2 0 0 0.3 1" {attributes}/>'
            text += f'<light name="{name}" pos="0.1 0.4 2" dir="0.2 0.1 -1" {attributes}/>'
    return text


SCENE = f"""
<mujoco>
  <worldbody>
    {things("world")}
    <geom type="plane" size="5 5 0.1"/>
    <body name="trunk" pos="0 0.2 1">
      <freejoint/>
      <geom type="box" size="0.3 0.1 0.1" pos="0.1 0 0"/>
      <body name="tail" pos="0.4 0 0" euler="20 0 30">
        <joint type="hinge" axis="0 1 0.3"/>
        <geom type="capsule" size="0.05" fromto="0 0 0 0.5 0.2 0"/>
        {things("tail")}
        <body name="tip" pos="0.5 0 0"><joint type="ball"/><geom type="sphere" size="0.2" pos="0 0.3 0"/></body>
      </body>
    </body>
    <body name="ghost" mocap="true" pos="1 1 1"><site name="nothing"/></body>
  </worldbody>
</mujoco>
"""


@pytest.fixture(scope="module")
def scene() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(SCENE)


def expected(scene: mujoco.MjModel, qpos: np.ndarray, mocap_pos: np.ndarray) -> list[np.ndarray]:
    data = mujoco.MjData(scene)
    data.qpos[:], data.mocap_pos[:] = qpos, mocap_pos
    mujoco.mj_forward(scene, data)
    return [data.cam_xpos, data.cam_xmat.reshape(-1, 3, 3), data.light_xpos, data.light_xdir]


def test_every_mode_is_as_in_mujoco(scene: mujoco.MjModel) -> None:
    random, worlds = np.random.default_rng(0), 5
    qpos = random.normal(size=(worlds, scene.nq)).astype(np.float32)
    for start in (3, 8):
        qpos[:, start : start + 4] /= np.linalg.norm(qpos[:, start : start + 4], axis=1, keepdims=True)
    mocap = random.normal(size=(worlds, 1, 3)).astype(np.float32)
    model = mjx.put_model(scene, impl="warp")
    template = mjx.make_data(scene, impl="warp", naconmax=8 * worlds, njmax=64)

    @jax.jit
    @jax.vmap
    def poses(qpos: jax.Array, mocap_pos: jax.Array) -> tuple[jax.Array, ...]:
        data = mjx.kinematics(model, template.replace(qpos=qpos, mocap_pos=mocap_pos))
        data = place_cameras_and_lights(model, data)
        return data.cam_xpos, data.cam_xmat, data._impl.light_xpos, data._impl.light_xdir

    found = poses(jnp.asarray(qpos), jnp.asarray(mocap))
    assert scene.ncam == scene.nlight == 2 * 9
    for world in range(worlds):
        for ours, theirs in zip(found, expected(scene, qpos[world], mocap[world]), strict=True):
            np.testing.assert_allclose(ours[world], theirs, rtol=0, atol=3e-6)


FALLING = """
<mujoco>
  <option><flag contact="disable"/></option>
  <worldbody>
    <camera name="com" pos="0 -2 0" mode="trackcom"/>
    <camera name="look" pos="0 -2 1" mode="targetbodycom" target="trunk"/>
    <body name="trunk" pos="0 0 1">
      <freejoint/>
      <light name="above" pos="0 0 2" mode="trackcom"/>
      <camera name="beside" pos="1 0 0" mode="track"/>
      <geom type="box" size="0.3 0.1 0.1"/>
    </body>
  </worldbody>
</mujoco>
"""


class Memory(NamedTuple):
    steps: jax.Array


class Faller:
    """Falls from somewhere else in every episode."""

    name = "faller"
    episode_length, substeps = 3, 2
    contacts_per_world, constraints_per_world = 1, 1
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self):
        self.model = mujoco.MjModel.from_xml_string(FALLING)

    def reset(self, key, data):
        return data.replace(qpos=data.qpos.at[:3].set(jax.random.normal(key, (3,)))), Memory(jnp.zeros((), jnp.int32))

    def control(self, data, memory, action):
        return data, memory

    def evaluate(self, data, memory, action):
        no = jnp.zeros((), bool)
        return Outcome(data.qpos[2], no, no, {"height": data.qpos[2]}, memory)

    def observe(self, data, memory):
        return {"state": data.qpos, "privileged_state": data.qpos}


def test_a_film_camera_is_one_of_the_scene() -> None:
    task = Faller()
    task.film_camera = "side"
    with pytest.raises(ValueError, match="'side'"):
        MjxVectorEnv(task, num_envs=2, image_size=16)


def test_they_are_fresh_in_every_step_and_after_every_reset() -> None:
    """The frames show the state that is observed, in worlds that were just reset too."""
    task = Faller()
    env = MjxVectorEnv(task, num_envs=2, image_size=16)
    observed, _ = env.reset(seed=0)
    for _ in range(6):
        data = env._state.data
        found = [data.cam_xpos, data.cam_xmat, data._impl.light_xpos, data._impl.light_xdir]
        for world, qpos in enumerate(observed["state"].numpy()):
            for ours, theirs in zip(found, expected(task.model, qpos, np.zeros((0, 3))), strict=True):
                np.testing.assert_allclose(ours[world], theirs, rtol=0, atol=1e-5)
        observed, *_ = env.step(torch.zeros(2, 1))


CAMERAS = ("front", "wrist")


def test_one_size_is_that_of_all_cameras() -> None:
    assert resolve_image_sizes(64, CAMERAS) == {"front": (64, 64), "wrist": (64, 64)}
    assert resolve_image_sizes([48, 64], CAMERAS) == {"front": (48, 64), "wrist": (48, 64)}


def test_sizes_by_name_come_in_the_order_of_the_cameras() -> None:
    sizes = resolve_image_sizes({"wrist": (48, 64), "front": 32}, CAMERAS)
    assert list(sizes.items()) == [("front", (32, 32)), ("wrist", (48, 64))]


@pytest.mark.parametrize(
    ("image_size", "message"),
    [
        ({"front": 64}, r"wrist.*front"),
        ({}, "front, wrist"),
        ({"front": 64, "wrst": 32}, r"'wrst'.*front, wrist.*nearest: wrist"),
        ({"front": 64, "wrist": 0}, "image_size=0"),
        ({"front": 64, "wrist": {"x": 1}}, r"image_size=\{'x'"),
    ],
)
def test_sizes_that_do_not_fit_the_cameras_are_refused(image_size, message) -> None:
    with pytest.raises(ValueError, match=message) as error:
        resolve_image_sizes(image_size, CAMERAS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [True, 64.0, "64", None, (64,), (64, 64.0), (64, -1)])
def test_what_is_no_size(size) -> None:
    with pytest.raises(ValueError, match=r"\(48, 64\)"):
        resolve_image_size(size)
