"""Simulator and renderer on a toy scene of two bodies, whose numbers can be worked out by hand."""

import atexit
import sys
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
import torch
from mujoco import mjx

from sheeplike.envs.mjx.options import SimulationOptions
from sheeplike.envs.mjx.rendering.warp import WarpRenderer
from sheeplike.envs.mjx.simulator import Simulator
from sheeplike.envs.mjx.task import Outcome
from sheeplike.envs.mjx.vector_env import MjxVectorEnv

SCENE = """
<mujoco>
  <option timestep="0.02" gravity="0 0 -10"/>
  <visual><headlight ambient="1 1 1" diffuse="0 0 0" specular="0 0 0"/></visual>
  <worldbody>
    <camera name="above" pos="0 0 6"/>
    <geom name="floor" type="plane" size="0 0 1" rgba="0.2 0.4 0.6 1"/>
    <body name="drone" pos="0 0 0">
      <joint name="height" type="slide" axis="0 0 1"/>
      <inertial pos="0 0 0" mass="1" diaginertia="1 1 1"/>
      <camera name="eye" pos="0 0 0.25"/>
      <geom type="sphere" size="0.1" pos="0 0 1" contype="0" conaffinity="0" rgba="1 1 1 1"/>
    </body>
  </worldbody>
  <actuator><motor name="thrust" joint="height" gear="20"/></actuator>
  <keyframe><key name="up" qpos="3"/></keyframe>
</mujoco>
"""


class Memory(NamedTuple):
    steps: jax.Array
    lowest: jax.Array


class Drone:
    """Falls from a drawn height; touching the floor is the end, being above 2 m is success."""

    name = "drone"
    episode_length, substeps = 12, 3
    contacts_per_world, constraints_per_world = 2, 8
    scene = SCENE

    def __init__(self):
        self.model = mujoco.MjModel.from_xml_string(self.scene)
        self.action_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)

    def reset(self, key, data):
        height = jax.random.uniform(key, (1,), minval=1.0, maxval=3.0)
        return data.replace(qpos=height), Memory(jnp.zeros((), jnp.int32), height[0])

    def control(self, data, memory, action):
        return data.replace(ctrl=action), memory._replace(steps=memory.steps + 1)

    def evaluate(self, data, memory, action):
        # From the kinematics and not from qpos: the test of its freshness.
        height = data.xpos[1, 2]
        terms = {"height": 0.1 * height, "thrust": -0.01 * action[0]}
        memory = memory._replace(lowest=jnp.minimum(memory.lowest, height))
        return Outcome(terms["height"] + terms["thrust"], height < 0.0, height > 2.0, terms, memory)

    def observe(self, data, memory):
        state = jnp.concatenate([data.qpos, data.qvel])
        extra = jnp.stack([memory.steps.astype(jnp.float32), memory.lowest, data.xpos[1, 2]])
        return {"state": state, "privileged_state": jnp.concatenate([state, extra])}


COLOUR = {
    "colour": {
        "field": "geom_rgba",
        "of": "floor",
        "component": [0, 1, 2],
        "operation": "set",
        "distribution": {"uniform": [0.2, 1.0]},
    }
}


@pytest.fixture(scope="module")
def drone(physics):
    return MjxVectorEnv(
        Drone(),
        num_envs=3,
        image_size=(6, 8),
        randomization=COLOUR,
        simulation=SimulationOptions(depth=True, physics=physics),
    )


def test_vectors_frames_and_reward_show_the_same_moment(drone):
    """A falling camera: what it sees, what is observed and what is judged must be one state, at resets too."""
    drone.reset(seed=0)
    for time in range(30):
        obs, reward, terminated, truncated, _ = drone.step(torch.full((3, 1), 0.3))
        height = obs["state"][:, 0]
        torch.testing.assert_close(obs["privileged_state"][:, 4], height, rtol=0, atol=1e-6)
        seen = obs["depth/eye"][:, 3, 4, 0]
        above = height > -0.2
        torch.testing.assert_close(seen[above], height[above] + 0.25, rtol=0, atol=1e-4)
        ongoing = reward != 0
        torch.testing.assert_close(reward[ongoing], 0.1 * height[ongoing] - 0.003, rtol=0, atol=1e-5)
        assert torch.equal(terminated, (height < 0) & ongoing), time
        assert not (terminated & truncated).any()
        assert obs["depth/above"].shape == (3, 6, 8, 1)
        assert obs["depth/above"].dtype == torch.float32


def test_physics_is_that_of_a_falling_body(drone):
    obs, _ = drone.reset(seed=0)
    height, velocity = obs["state"].T.clone()
    obs, *_ = drone.step(torch.tensor([[0.0], [0.5], [9.0]]))
    # Semi-implicit Euler, three substeps of 20 ms; a thrust of 20 N at most against gravity of 10 m/s^2.
    acceleration = torch.tensor([-10.0, 0.0, 10.0])
    torch.testing.assert_close(obs["state"][:, 1], velocity + 0.06 * acceleration, rtol=0, atol=1e-5)
    torch.testing.assert_close(obs["state"][:, 0], height + 0.02**2 * 6 * acceleration, rtol=0, atol=1e-5)


def test_ends_of_both_kinds_and_memory_made_afresh(drone):
    drone.reset(seed=0)
    thrust = torch.tensor([[0.0], [0.5], [0.5]])
    # Kept apart from the environment's own rules: count, judge and reset by hand.
    count, lowest, ended = torch.zeros(3), torch.full((3,), 9.0), torch.zeros(3, dtype=torch.bool)
    kinds = set()
    for _ in range(40):
        obs, _, terminated, truncated, info = drone.step(thrust)
        height = obs["state"][:, 0]
        count = torch.where(ended, 0, count + 1)
        lowest = torch.where(ended, height, torch.minimum(lowest, height))
        assert torch.equal(info["episode"]["length"], count.int())
        assert torch.equal(obs["privileged_state"][:, 2], count)
        assert (obs["privileged_state"][:, 3] <= lowest + 1e-6).all()
        assert torch.equal(obs["privileged_state"][ended, 3], height[ended])
        assert torch.equal(truncated, (count == 12) & ~terminated)
        assert torch.equal(info["success"] & ended, torch.zeros(3, dtype=torch.bool))
        ended = terminated | truncated
        kinds |= {"terminated"} if terminated.any() else set()
        kinds |= {"truncated"} if truncated.any() else set()
        sums = info["episode"]["reward_terms"]
        torch.testing.assert_close(sums["height"] + sums["thrust"], info["episode"]["return"])
    assert kinds == {"terminated", "truncated"}


class Sensing(Drone):
    """The drone, which always begins at rest, with numbers that the kinematics alone leave as they were."""

    episode_length = 3
    scene = SCENE.replace("</mujoco>", '<sensor><framelinvel objtype="body" objname="drone"/></sensor></mujoco>')

    def reset(self, key, data):
        memory = Memory(jnp.zeros((), jnp.int32), data.xpos[1, 2])
        return data.replace(qpos=jnp.ones(1), qvel=jnp.zeros(1)), memory

    def observe(self, data, memory):
        return {
            "lowest": memory.lowest[None],
            "sensors": data.sensordata,
            "centre": data.subtree_com[1],
            "force": data.qfrc_bias,
        }


def test_no_field_of_a_first_observation_is_of_the_old_episode(physics):
    env = MjxVectorEnv(Sensing(), num_envs=2, simulation=SimulationOptions(renderer="none", physics=physics))
    first, _ = env.reset(seed=0)
    seen = [env.step(torch.ones(2, 1)) for _ in range(4)]
    assert seen[2][3].all()
    assert (seen[2][0]["sensors"][:, 2] > 0).all()
    for name, value in first.items():
        torch.testing.assert_close(seen[3][0][name], value, rtol=0, atol=0)
    env.close()


class Blind(Drone):
    """The drone without vectors, and with a camera for films alone."""

    film_camera = "above"

    def observe(self, data, memory):
        return {}


def test_vectors_are_optional_and_the_camera_of_films_is_no_observation(physics):
    env = MjxVectorEnv(Blind(), num_envs=1, image_size=8, simulation=SimulationOptions(physics=physics))
    assert env.reset(seed=0)[0].keys() == env.step(torch.ones(1, 1))[0].keys() == {"pixels/eye"}
    env.close()


def test_variation_is_drawn_anew_for_each_episode_and_only_then(drone):
    obs, _ = drone.reset(seed=0)
    colours = set()
    drawn, ended = drone.varied_fields["geom_rgba"].numpy(), torch.zeros(3, dtype=torch.bool)
    thrust = torch.tensor([[0.0], [0.5], [0.5]])
    for _ in range(30):
        obs, _, terminated, truncated, _ = drone.step(thrust)
        now = drone.varied_fields["geom_rgba"].numpy()
        changed = (now != drawn).any(axis=(1, 2))
        np.testing.assert_array_equal(changed, ended.numpy())
        # Ambient light alone: the floor's pixels are its colour.
        pixel = obs["pixels/above"][:, 0, 0].numpy().astype(float) / 255
        np.testing.assert_allclose(pixel, now[:, 0, :3], atol=2 / 255)
        colours |= {tuple(world) for world in now[:, 0, :3].tolist()}
        drawn, ended = now, terminated | truncated
    assert len(colours) >= 6
    assert drone.simulator.compilations == 1


@pytest.mark.parametrize("by_threads", [True, False])
def test_frames_are_mjx_own_to_the_bit(by_threads):
    """Against MJX's float unpacking of its own render."""
    task = Drone()
    options = SimulationOptions(cameras=("eye", "above"), depth=True, segmentation=True)
    renderer = WarpRenderer(task.model, options, num_envs=3, image_size=(6, 8))
    renderer.by_threads = by_threads
    renderer.open()
    model = mjx.put_model(task.model, impl="warp")
    template = mjx.make_data(task.model, impl="warp", naconmax=6, njmax=8)
    context = mjx.create_render_context(
        task.model, nworld=3, cam_active=["eye", "above"], cam_res=(8, 6), render_rgb=True, render_depth=True
    )
    handle = context.pytree()

    @jax.jit
    @jax.vmap
    def render(height):
        data = mjx.kinematics(model, template.replace(qpos=height))
        frames, data = renderer.render(model, data)
        data = mjx.refit_bvh(model, data, handle)
        packed, depth, _ = mjx.render(model, data, handle)
        rgb = {name: mjx.get_rgb(handle, i, packed) for i, name in enumerate(renderer.cameras)}
        metres = {name: mjx.get_depth(handle, i, depth, 1e3) for i, name in enumerate(renderer.cameras)}
        return frames, rgb, metres

    frames, rgb, metres = render(jnp.array([[1.0], [2.0], [1.5]]))
    assert {name.partition("/")[0] for name in frames} == {"pixels", "depth", "segmentation"}
    for name in renderer.cameras:
        assert frames[f"pixels/{name}"].dtype == jnp.uint8
        assert frames[f"pixels/{name}"].shape == (3, 6, 8, 3)
        np.testing.assert_array_equal(np.round(np.asarray(rgb[name]) * 255), frames[f"pixels/{name}"])
        np.testing.assert_allclose(metres[name] * 1e3, frames[f"depth/{name}"], rtol=1e-5)
        assert ((frames[f"segmentation/{name}"] >= 0) == (frames[f"depth/{name}"] > 0)).all()
    assert len(np.unique(frames["pixels/above"])) > 2


def test_a_step_is_dispatched_and_not_waited_for(drone):
    """JAX's fast path: some work for each node of the tree, none in Python for each of two hundred leaves."""
    simulator = drone.simulator
    variation, state = simulator.start(0)
    actions = jax.device_put(np.zeros(3, np.float32), simulator.device)
    for _ in range(2):
        variation, state, output = simulator.step(variation, state, actions)
    jax.block_until_ready(output)
    calls, waited = 0, []

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    for _ in range(3):
        sys.setprofile(count)
        variation, state, output = simulator.step(variation, state, actions)
        sys.setprofile(None)
        waited.append(output.results.words.is_ready())
        jax.block_until_ready(output)
    assert calls / 3 < 10 * len(jax.tree.leaves(state))
    assert not all(waited)
    assert simulator.compilations == 1


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_the_process_ends_after_the_last_step_has(physics, monkeypatch):
    """A step calls Python: it would never end if Python had gone, and neither would the process."""
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda function, *arguments: at_exit.append((function, arguments)))
    simulator = MjxVectorEnv(
        Drone(), num_envs=3, image_size=(6, 8), randomization=COLOUR, simulation=SimulationOptions(physics=physics)
    ).simulator
    actions = jax.device_put(np.zeros(3, np.float32), simulator.device)
    worlds = simulator.step(*simulator.start(0), actions)
    (finish, arguments), *_ = [entry for entry in at_exit if entry[0].__module__ == Simulator.__module__]
    finish(*arguments)
    assert all(leaf.is_ready() for leaf in jax.tree.leaves(worlds))


def test_cameras_come_in_the_order_asked_for(drone):
    assert list(drone.single_observation_space)[:4] == ["depth/above", "depth/eye", "pixels/above", "pixels/eye"]
    renderer = WarpRenderer(Drone().model, SimulationOptions(cameras=("eye", "above")), num_envs=1, image_size=4)
    assert renderer.cameras == ("eye", "above")


class FewContacts(Drone):
    scene = SCENE.replace('conaffinity="0" rgba="1', 'conaffinity="1" rgba="1').replace(
        'pos="0 0 1" con', 'pos="0 0 0" con'
    )
    contacts_per_world = 0


class FewConstraints(FewContacts):
    contacts_per_world, constraints_per_world = 4, 2


class MovesKinematics(Drone):
    def reset(self, key, data):
        data, memory = super().reset(key, data)
        return data.replace(xpos=data.xpos + 1.0), memory


class ForgetsMemory(Drone):
    def evaluate(self, data, memory, action):
        return super().evaluate(data, memory, action)._replace(memory=(memory.steps,))


class IntegerReward(Drone):
    def evaluate(self, data, memory, action):
        return super().evaluate(data, memory, action)._replace(reward=jnp.ones((), jnp.int32))


class FloatEnd(Drone):
    def evaluate(self, data, memory, action):
        outcome = super().evaluate(data, memory, action)
        return outcome._replace(terminated=outcome.terminated.astype(jnp.float32))


class FewJoints(Drone):
    def reset(self, key, data):
        data, memory = super().reset(key, data)
        return data.replace(qpos=data.qpos[:0]), memory


class FewMotors(Drone):
    def control(self, data, memory, action):
        data, memory = super().control(data, memory, action)
        return data.replace(ctrl=data.ctrl[:0]), memory


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (FewContacts, ValueError, "contacts_per_world=0"),
        (FewConstraints, ValueError, "constraints_per_world=2"),
        (MovesKinematics, TypeError, r"data.xpos.*qpos"),
        (ForgetsMemory, TypeError, r"evaluate returned memory"),
        (IntegerReward, TypeError, r"int32.*float32"),
        (FloatEnd, TypeError, r"terminated.*bool"),
        (FewMotors, TypeError, r"control.*ctrl"),
        (FewJoints, TypeError, r"reset.*qpos"),
    ],
)
def test_tasks_that_break_the_protocol_are_refused(task, error, message):
    with pytest.raises(error, match=message):
        MjxVectorEnv(task(), num_envs=2, image_size=4)
