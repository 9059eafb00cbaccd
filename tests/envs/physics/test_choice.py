"""Choice of the engine that steps a task, and warnings where it is another one."""

import re
import warnings
from types import SimpleNamespace

import gymnasium
import mujoco
import numpy as np
import pytest

import sheeplike.envs
from sheeplike.envs.mjx.options import SimulationOptions
from sheeplike.envs.mjx.physics.physics import make_physics
from sheeplike.envs.mjx.task import Outcome
from sheeplike.envs.mjx.tasks.cartpole import Cartpole
from sheeplike.envs.mjx.vector_env import MjxVectorEnv

SCENE = """
<mujoco>
  <option>{option}</option>
  <worldbody>
    <geom name="floor" type="plane" size="1 1 .1"/>
    <body name="ball" pos="0 0 .09"><freejoint/><geom size=".1"/></body>
    <body name="arm" pos="2 0 1"><joint name="j" pos=".1 0 0"/><geom size=".1" pos=".3 0 0"/></body>
  </worldbody>
  <actuator><general joint="j" {delay}/></actuator>
</mujoco>
"""


class Ball:
    name, episode_length, substeps = "ball", 5, 1
    contacts_per_world, constraints_per_world = 8, 32
    option = delay = ""

    def __init__(self):
        self.model = mujoco.MjModel.from_xml_string(SCENE.format(option=self.option, delay=self.delay))
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, key, data):
        return data, ()

    def control(self, data, memory, action):
        return data.replace(ctrl=action), memory

    def evaluate(self, data, memory, action):
        height = data.xpos[1, 2]
        return Outcome(height, height < 0, height > 9, {"height": height}, memory)

    def observe(self, data, memory):
        return {"state": data.qpos, "privileged_state": data.qvel}


class Touching(Ball):
    def observe(self, data, memory):
        return {"state": data.qpos, "privileged_state": data._impl.efc__force}


class Judging(Ball):
    def evaluate(self, data, memory, action):
        deepest = data._impl.contact__dist.min()
        return Outcome(deepest, deepest < 0, deepest > 9, {"deepest": deepest}, memory)


class Reacting(Ball):
    def control(self, data, memory, action):
        return data.replace(ctrl=action + data._impl.efc__force.sum()), memory


class Sleeping(Ball):
    option = '<flag sleep="enable"/>'


class Delayed(Ball):
    delay = 'delay=".02" nsample="12"'


def make(task, physics="auto", **options):
    simulation = SimulationOptions(physics=physics, renderer="none")
    return MjxVectorEnv(task, num_envs=2, simulation=simulation, **options)


def chosen(task, **options):
    """The engine under ``auto``, and the warnings."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        engine = type(make(task, **options).simulator.physics).__name__.removesuffix("Physics").lower()
    return engine, [str(warning.message) for warning in caught if warning.category is UserWarning]


def recentred(of):
    line = {"field": "body_ipos", "of": of, "operation": "add", "distribution": {"uniform": [-0.01, 0.01]}}
    return {"randomization": {"centre": line}}


@pytest.mark.parametrize(
    ("task", "options", "needs"),
    [
        (Touching, {}, r"data._impl.efc__force.*Warp"),
        (Judging, {}, r"data._impl.contact__dist.*Warp"),
        (Reacting, {}, r"data._impl.efc__force.*Warp"),
        (Sleeping, {}, "sleep.*Warp"),
        (Delayed, {}, "delays.*Warp"),
        (Ball, recentred("ball"), r"body_ipos.*body_iquat.*Warp"),
    ],
)
def test_what_mujocos_own_engine_lacks_goes_to_warp_and_is_said_once(task, options, needs):
    engine, said = chosen(task(), **options)
    assert engine == "warp"
    (line,) = [text for text in said if not text.startswith("randomization.")]
    assert re.search(f"ball.*{needs}.*physics=warp", line)
    with pytest.raises(ValueError, match=r"^physics='native'.*nearest: 'warp'$"):
        make(task(), physics="native", **options)


@pytest.mark.parametrize("options", [{}, recentred("arm"), {**recentred("ball"), "randomize": False}])
def test_all_else_is_stepped_by_mujocos_own_engine_without_a_word(options):
    assert chosen(Ball(), **options) == ("native", [])


def test_on_a_gpu_it_is_warp_and_nothing_else():
    gpu = SimpleNamespace(platform="gpu")  # the engines for a GPU cannot be built here
    with pytest.raises(ValueError, match=r"^physics='native'.*'warp'"):
        make_physics("native", Cartpole(), num_envs=1, device=gpu)


def test_an_engine_that_does_not_exist_is_refused():
    with pytest.raises(sheeplike.envs.InvalidOption) as error:
        sheeplike.envs.make("cartpole_balance", num_envs=1, renderer="none", physics="nativ")
    assert (error.value.key, error.value.nearest) == ("physics", "native")


@pytest.mark.parametrize(
    ("name", "id"), [("gym", "CartPole-v1"), ("dmc", "cartpole-balance"), ("minigrid", "MiniGrid-Empty-5x5-v0")]
)
@pytest.mark.parametrize("physics", ["warp", "native"])
def test_environments_that_simulate_themselves_take_no_engine(name, id, physics):
    with pytest.raises(ValueError, match=rf"^physics={physics}.*auto"):
        sheeplike.envs.make(name, id=id, num_envs=1, physics=physics)
