"""All physics steps of a control step in one call to Warp: the same numbers as of one call each."""

import jax
import pytest
import torch
import yaml
from mujoco import mjx
from warp._src.jax.ffi import FfiCallable

import sheeplike.envs
from sheeplike.config.sources import CONFIGS
from sheeplike.envs.mjx.physics.physics import WarpPhysics

mjx_step = mjx.step


def scanned(self, model, data, substeps=1):
    """A call for each step."""
    return jax.lax.scan(lambda data, _: (mjx_step(model, data), None), data, None, length=substeps)[0]


def play(env, steps=10):
    """All that is carried over after random actions, and how often XLA has called Warp in each policy step."""
    generator = torch.Generator().manual_seed(0)
    env.reset(seed=3)
    env.state_dict()  # waits for the reset
    build, calls = FfiCallable._build_arg_list, []

    def counted(self, *arguments):
        calls.append(self)
        return build(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FfiCallable, "_build_arg_list", counted)
        for _ in range(steps):
            env.step(torch.rand(env.action_space.shape, generator=generator) * 2 - 1)
        state = env.state_dict()
    return {name: value.numpy() for name, value in state.items()}, len(calls) / steps


WEIGHT = {"field": "opt.gravity", "component": 2, "operation": "scale", "distribution": {"uniform": [0.5, 1.5]}}
PHYSICS = yaml.safe_load((CONFIGS / "randomization" / "franka_physics.yaml").read_text(encoding="utf-8"))
TASKS = {
    "cartpole_balance": {"episode_length": 4},
    "cartpole_swingup": {"episode_length": 4, "randomization": {"gravity": WEIGHT}},
    "franka_pick": {"episode_length": 4, "randomization": PHYSICS},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_states_are_those_of_single_steps_bit_by_bit(name, monkeypatch):
    """Over the ends of episodes, with fields of the model that vary."""

    def make():
        return sheeplike.envs.make(name, num_envs=3, renderer="none", physics="warp", **TASKS[name])

    together, calls = play(make())
    monkeypatch.setattr(WarpPhysics, "step", scanned)
    env = make()
    one_by_one, more_calls = play(env)
    assert together.keys() == one_by_one.keys()
    for field, values in together.items():
        assert values.tobytes() == one_by_one[field].tobytes(), field
    # One more for the kinematics.
    assert (calls, more_calls) == (2, 1 + env.simulator.task.substeps)
    assert env.simulator.task.substeps > 1
