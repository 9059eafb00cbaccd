"""A simulation without a renderer."""

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
import torch

import sheeplike.envs
from sheeplike.envs.mjx.options import SimulationOptions
from sheeplike.envs.mjx.rendering.renderer import NoRenderer
from sheeplike.envs.mjx.task import Outcome
from sheeplike.envs.mjx.vector_env import MjxVectorEnv

BLIND = "<mujoco><worldbody><body><joint type='slide'/><geom size='0.1'/></body></worldbody></mujoco>"


class Blind:
    """A scene without any camera."""

    name = "blind"
    episode_length, substeps = 5, 1
    contacts_per_world, constraints_per_world = 1, 1

    def __init__(self):
        self.model = mujoco.MjModel.from_xml_string(BLIND)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, key, data):
        return data.replace(qpos=jax.random.uniform(key, (1,))), ()

    def control(self, data, memory, action):
        return data, memory

    def evaluate(self, data, memory, action):
        return Outcome(data.qpos[0], jnp.zeros((), bool), jnp.zeros((), bool), {"height": data.qpos[0]}, memory)

    def observe(self, data, memory):
        return {"state": data.qpos}


def test_a_scene_needs_no_camera():
    env = MjxVectorEnv(Blind(), num_envs=3, simulation=SimulationOptions(renderer="none"))
    assert list(env.single_observation_space) == ["state"]
    obs, _ = env.reset(seed=0)
    assert list(obs) == ["state"]
    heights = [obs["state"]]
    for _ in range(3):
        obs, reward, *_ = env.step(torch.zeros(3, 1))
        heights.append(obs["state"])
        torch.testing.assert_close(reward, obs["state"][:, 0])
    # A free fall from rest.
    falls = torch.stack(heights).diff(dim=0).squeeze(-1)
    assert (falls.diff(dim=0).abs() < 1e-4).all()
    assert env.simulator.compilations == 1
    with pytest.raises(ValueError, match="none"):
        MjxVectorEnv(Blind(), num_envs=3)


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_the_worlds_are_those_that_are_rendered(swingup, physics):
    """The same seed and actions: the same numbers, to the bit."""
    options = {"renderer": "none", "cameras": ["fixed"], "image_size": 3}
    unseen = sheeplike.envs.make("cartpole_swingup", num_envs=2, physics=physics, **options)
    assert isinstance(unseen.simulator.renderer, NoRenderer)
    generator = torch.Generator().manual_seed(0)
    (one, _), (other, _) = swingup.reset(seed=7), unseen.reset(seed=7)
    for _ in range(5):
        assert other.keys() == one.keys() - {"pixels/fixed"}
        for name, value in other.items():
            assert torch.equal(value, one[name])
        action = torch.rand(2, 1, generator=generator) * 2 - 1
        (one, *_), (other, *_) = swingup.step(action), unseen.step(action)


@pytest.mark.parametrize("option", ["depth", "segmentation", "shadows", "textures"])
def test_what_would_not_be_rendered_cannot_be_asked_for(option):
    with pytest.raises(sheeplike.envs.InvalidOption) as error:
        SimulationOptions(renderer="none", **{option: True}).check()
    assert (error.value.key, error.value.nearest) == (option, False)


def test_unknown_renderers_are_refused():
    with pytest.raises(sheeplike.envs.InvalidOption) as error:
        sheeplike.envs.make("cartpole_swingup", num_envs=2, renderer="wrap")
    assert (error.value.key, error.value.nearest) == ("renderer", "warp")
