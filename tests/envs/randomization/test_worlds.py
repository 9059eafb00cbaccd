"""Randomization in running worlds: the pick task under every kind of line at once."""

import pytest
import torch
import yaml

from sheeplike.config.sources import CONFIGS
from sheeplike.envs.mjx.options import FrankaPickOptions, SimulationOptions
from sheeplike.envs.mjx.tasks.franka_pick import FrankaPick
from sheeplike.envs.mjx.vector_env import MjxVectorEnv

EXTRA = {
    "brightness": {
        "field": "pixels",
        "operation": "scale",
        "distribution": {"uniform": [0.5, 1.5]},
        "shared": "components",
    },
    "field_of_view": {"field": "cam_fovy", "operation": "scale", "distribution": {"uniform": [0.8, 1.2]}},
    "pad_size": {"field": "geom_size", "of": "*_pad", "operation": "scale", "distribution": {"uniform": [0.9, 1.1]}},
    "dark": {"field": "light_active", "operation": "set", "distribution": {"bernoulli": 0.5}},
}
CONSTANT = {"light_type", "light_aim"}


def recipe(name):
    return yaml.safe_load((CONFIGS / "randomization" / f"{name}.yaml").read_text(encoding="utf-8"))


LINES = {**recipe("franka_vision"), **recipe("franka_physics"), **EXTRA}


def make(num_envs, lines=LINES, physics="auto", **options):
    # Worlds end at different times: after five steps, or when the box has been shaken off.
    simulation = SimulationOptions(cameras=("front",), physics=physics)
    task = FrankaPick(FrankaPickOptions(episode_length=5))
    return MjxVectorEnv(task, num_envs=num_envs, image_size=16, randomization=lines, simulation=simulation, **options)


@pytest.fixture(scope="module")
def worlds(physics):
    env = make(6, physics=physics)
    yield env
    env.close()


def still(env):
    return torch.zeros(env.action_space.shape)


def test_two_episodes_of_a_world_differ_in_every_line_and_one_episode_in_none(worlds):
    worlds.reset(seed=3)
    # End the worlds at different times: half of them begin anew two steps before the others.
    for _ in range(2):
        worlds.step(still(worlds))
    worlds._state = worlds._state._replace(ended=worlds._state.ended.at[:3].set(True))
    before, fields = worlds.variation, worlds.varied_fields
    assert before.keys() == LINES.keys()
    ended, begun = torch.tensor([True] * 3 + [False] * 3), torch.zeros(6, dtype=torch.int)
    for _ in range(20):
        _, _, terminated, truncated, _ = worlds.step(still(worlds))
        now, now_fields = worlds.variation, worlds.varied_fields
        for values, earlier in ((now, before), (now_fields, fields)):
            for name, value in values.items():
                assert torch.equal(value[~ended], earlier[name][~ended]), f"{name} changed within an episode"
        for name, value in now.items():
            if name not in CONSTANT | {"action_delay", "dark"}:
                changed = (value != before[name]).flatten(1).any(1)
                assert changed[ended].all(), f"{name} did not change with the episode"
        begun += ended
        before, fields, ended = now, now_fields, terminated | truncated
    assert (begun >= 3).all()
    assert worlds.simulator.compilations == 1


def test_discrete_lines_change_too(worlds):
    seen = []
    for seed in range(4):
        worlds.reset(seed=seed)
        seen.append(worlds.variation)
    for name, values in {"action_delay": {0.0, 1.0}, "dark": {0.0, 1.0}}.items():
        assert {float(value) for variation in seen for value in variation[name].flatten()} == values


@pytest.mark.slow
@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_the_same_seed_gives_the_same_variations_whatever_the_number_of_worlds(worlds):
    worlds.reset(seed=11)
    worlds.reset()
    few = make(2)
    few.reset(seed=11)
    few.reset()
    for name, values in few.variation.items():
        assert torch.equal(values, worlds.variation[name][:2]), name
    first = few.variation
    few.reset(seed=12)
    assert (few.variation["robot_white"] != first["robot_white"]).any()
    few.close()


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_variation_is_observed_and_only_by_the_critic(worlds):
    obs, _ = worlds.reset(seed=0)
    flat = torch.cat([value.flatten(1) for _, value in sorted(worlds.variation.items())], 1)
    assert torch.equal(obs["variation"], flat)
    assert torch.equal(obs["privileged_state"][:, -flat.shape[1] :], flat)
    plain = make(2, lines=None)
    assert plain.single_observation_space["state"].shape == obs["state"].shape[1:]
    assert (
        plain.single_observation_space["privileged_state"].shape[0] + flat.shape[1] == obs["privileged_state"].shape[1]
    )
    assert "variation" not in plain.single_observation_space.spaces
    plain.close()


@pytest.mark.slow
def test_nominal_worlds_are_those_without_randomization():
    action = torch.tensor([[0.3, -0.2, -1.0]]).repeat(2, 1)
    nominal, plain = make(2, randomize=False), make(2, lines=None)
    seen = []
    for env in (nominal, plain):
        obs = [env.reset(seed=4)[0]] + [env.step(action)[0] for _ in range(8)]
        seen.append(obs)
    for here, there in zip(*seen, strict=True):
        assert torch.equal(here["state"], there["state"])
        assert torch.equal(here["pixels/front"], there["pixels/front"])
    assert nominal.single_observation_space == make_space()
    with pytest.raises(ValueError, match="randomized"):
        nominal.reset(options={"variation": {"gravity": 1.0}})
    nominal.close()
    plain.close()


def make_space():
    env = make(1)
    env.close()
    return env.single_observation_space
