"""A task that steps the physics itself is in all else a task like any other."""

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

from sheeplike.envs.mjx.options import SimulationOptions
from sheeplike.envs.mjx.physics.physics import make_physics
from sheeplike.envs.mjx.simulator import Resets
from sheeplike.envs.mjx.task import Outcome, repeat_actions
from sheeplike.envs.mjx.vector_env import MjxVectorEnv

SCENE = """
<mujoco>
  <option timestep="0.02" gravity="0 0 -10"/>
  <worldbody>
    <camera name="side" pos="0 -6 1" xyaxes="1 0 0 0 0 1"/>
    <body name="drone"><joint name="height" type="slide" axis="0 0 1"/><geom size="0.3" mass="1"/></body>
  </worldbody>
  <actuator><motor joint="height" gear="20"/></actuator>
</mujoco>
"""


class Memory(NamedTuple):
    lowest: jax.Array


class Drone:
    """Falls from a drawn height; below the floor is the end."""

    name = "drone"
    episode_length = 5
    contacts_per_world, constraints_per_world = 1, 1
    action_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)

    def __init__(self):
        self.model, self.substeps = mujoco.MjModel.from_xml_string(SCENE), 3

    def reset(self, key, data):
        height = jax.random.uniform(key, (1,), minval=0.02, maxval=0.4)
        return data.replace(qpos=height), Memory(height[0])

    def control(self, data, memory, action):
        return data.replace(ctrl=action), memory

    def evaluate(self, data, memory, action):
        height = data.qpos[0]
        terms = {"height": height, "thrust": -0.1 * action[0]}
        return Outcome(
            height + terms["thrust"], height < 0.0, height > 0.3, terms, Memory(jnp.minimum(*memory, height))
        )

    def observe(self, data, memory):
        state = jnp.concatenate([data.qpos, data.qvel])
        return {"state": state, "privileged_state": jnp.append(state, memory.lowest)}


class SteppingDrone(Drone):
    """The same, stepped by itself."""

    long_reset = True
    reset = control = evaluate = observe = None

    def begin(self, model, data, key):
        data, memory = Drone.reset(self, key, data)
        return data, memory, Drone.observe(self, data, memory)

    def advance(self, model, data, memory, action):
        data, memory = Drone.control(self, data, memory, action)
        data, _ = jax.lax.scan(lambda data, _: (mjx.step(model, data), None), data, None, length=self.substeps)
        outcome = Drone.evaluate(self, data, memory, action)
        return data, outcome, Drone.observe(self, data, outcome.memory)

    def repeated(self, repeat):
        task = type(self)()
        task.substeps, task.episode_length = self.substeps * repeat, self.episode_length // repeat
        return task


WEIGHT = {  # gravity of its own in each episode
    "gravity": {
        "field": "opt.gravity",
        "operation": "scale",
        "distribution": {"uniform": [1.0, 1.8]},
        "shared": "components",
    }
}

ACTIONS = torch.tensor([0.0, 1.0, 0.7]).view(3, 1) * torch.linspace(0.9, 1.0, 13).view(13, 1, 1)
"""One that falls and one that rises: (T, N, 1)."""


def played(env: MjxVectorEnv) -> list[dict[str, torch.Tensor]]:
    observed, info = env.reset(seed=3)
    steps = [observed | info["episode"]["reward_terms"]]
    for action in ACTIONS.to(env.device):
        observed, reward, terminated, truncated, info = env.step(action)
        episode = {f"episode/{name}": info["episode"][name] for name in ("return", "length", "success")}
        ends = {"reward": reward, "terminated": terminated, "truncated": truncated}
        steps.append(observed | info["reward_terms"] | episode | ends)
    return [{name: value.clone() for name, value in step.items()} for step in steps]


@pytest.fixture(scope="module")
def stepping(physics: str) -> MjxVectorEnv:
    return MjxVectorEnv(
        SteppingDrone(), num_envs=3, image_size=16, randomization=WEIGHT, simulation=SimulationOptions(physics=physics)
    )


@pytest.fixture(scope="module")
def steps(stepping: MjxVectorEnv) -> list[dict[str, torch.Tensor]]:
    return played(stepping)


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_the_same_task_in_both_forms_plays_the_same(
    stepping: MjxVectorEnv, steps: list[dict[str, torch.Tensor]], physics: str
) -> None:
    """Every output of every step: ends of both kinds, resets, fields that differ between worlds."""
    other = played(
        MjxVectorEnv(
            Drone(), num_envs=3, image_size=16, randomization=WEIGHT, simulation=SimulationOptions(physics=physics)
        )
    )
    for number, (step, expected) in enumerate(zip(steps, other, strict=True)):
        assert step.keys() == expected.keys()
        for name, value in step.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=f"step {number}: {name}")
    for end in ("terminated", "truncated"):
        assert any(step[end].any() for step in steps[1:])
    assert stepping.simulator.compilations == 1


def test_a_reset_that_is_branched_around_is_the_same(steps: list[dict[str, torch.Tensor]], physics: str) -> None:
    """On a GPU a cheap reset is made in every step."""
    env = MjxVectorEnv(
        SteppingDrone(), num_envs=3, image_size=16, randomization=WEIGHT, simulation=SimulationOptions(physics=physics)
    )
    assert env.simulator._resets._branch
    env.simulator._resets._branch = False
    for step, expected in zip(played(env), steps, strict=True):
        for name, value in step.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)
    assert env.simulator.compilations == 1


def test_worlds_go_on_from_a_saved_state(stepping: MjxVectorEnv, steps: list[dict[str, torch.Tensor]]) -> None:
    stepping.reset(seed=3)
    for action in ACTIONS[:6]:
        stepping.step(action)
    saved = stepping.state_dict()
    stepping.reset(seed=9)
    stepping.load_state_dict(saved)
    for action, expected in zip(ACTIONS[6:], steps[7:], strict=True):
        observed, *_ = stepping.step(action)
        assert torch.equal(observed["privileged_state"], expected["privileged_state"])


def test_actions_are_repeated_by_the_task() -> None:
    task = SteppingDrone()
    task.episode_length = 6
    with pytest.raises(ValueError, match="episode_length=6"):
        repeat_actions(task, 4)
    assert repeat_actions(SteppingDrone(), 5).substeps == 15


class ForgetsVectors(SteppingDrone):
    def advance(self, model, data, memory, action):
        data, outcome, vectors = super().advance(model, data, memory, action)
        return data, outcome, {"state": vectors["state"]}


class ForgetsMemory(SteppingDrone):
    def advance(self, model, data, memory, action):
        data, outcome, vectors = super().advance(model, data, memory, action)
        return data, outcome._replace(memory=Memory(outcome.memory.lowest[None])), vectors


class IntegerReward(SteppingDrone):
    def advance(self, model, data, memory, action):
        data, outcome, vectors = super().advance(model, data, memory, action)
        return data, outcome._replace(reward=jnp.ones((), jnp.int32)), vectors


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (ForgetsVectors, r"drone.advance"),
        (ForgetsMemory, r"drone.advance"),
        (IntegerReward, r"int32.*float32"),
    ],
)
def test_tasks_that_break_the_protocol_are_refused(task: type, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        MjxVectorEnv(task(), num_envs=2, image_size=16)


def test_a_reset_is_not_made_where_no_episode_begins(physics: str) -> None:
    """The branch stays one when it is mapped over the worlds: both sides are not computed."""
    task, device = SteppingDrone(), jax.devices("cpu")[0]
    engine = make_physics(physics, task, num_envs=2, device=device)
    model, template = engine.model, engine.template
    resets = Resets(task, engine, device)

    def begin(key: jax.Array, due: jax.Array) -> jax.Array:
        return resets.begin(model, template, key, due)[0].qpos

    mapped = jax.vmap(begin, axis_name="envs")
    keys = jax.random.split(jax.random.key(0), 2)
    assert "cond[" in str(jax.make_jaxpr(mapped)(keys, jnp.array([True, False])))
    assert (np.asarray(mapped(keys, jnp.array([False, False]))) == 0.0).all()
    assert (np.asarray(mapped(keys, jnp.array([True, False]))) > 0.0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_both_ways_of_resetting_play_the_same_on_a_gpu() -> None:
    envs = [
        MjxVectorEnv(SteppingDrone(), num_envs=3, image_size=16, randomization=WEIGHT, device="cuda") for _ in range(2)
    ]
    envs[1].simulator._resets._branch = False
    for step, other in zip(*map(played, envs), strict=True):
        for name, value in step.items():
            torch.testing.assert_close(value, other[name], rtol=0, atol=1e-5, msg=name)
