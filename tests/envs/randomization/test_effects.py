"""Effects of what is drawn: worlds that differ from the first one in a single line each."""

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
from sheeplike.envs.mjx.overrides import replace_fields
from sheeplike.envs.mjx.randomization.draw import Randomization
from sheeplike.envs.mjx.task import Outcome
from sheeplike.envs.mjx.vector_env import MjxVectorEnv

SCENE = """
<mujoco>
  <option timestep="0.01" gravity="0 0 -10"/>
  <visual><headlight ambient=".3 .3 .3" diffuse="0 0 0" specular="0 0 0"/></visual>
  <asset><material name="red" rgba="1 0 0 1"/><material name="blue" rgba="0 0 1 1"/></asset>
  <worldbody>
    <light pos="0 0 5" dir="0 0 -1" type="directional" diffuse=".6 .6 .6" specular="0 0 0"/>
    <camera name="above" pos="0 0 6" fovy="45"/>
    <geom name="floor" type="plane" size="0 0 1" rgba="0.2 0.4 0.6 1"/>
    <body name="drone" pos="0 0 1">
      <joint name="height" type="slide" axis="0 0 1"/>
      <geom name="hull" type="sphere" size="0.5" mass="2" contype="0" conaffinity="0" material="red"/>
    </body>
  </worldbody>
  <actuator><general name="thrust" joint="height" gainprm="20"/></actuator>
</mujoco>
"""
THRUST, STEP = 20.0, 0.01


class Memory(NamedTuple):
    target: jax.Array


class Nested(NamedTuple):
    obs: jax.Array
    info: dict
    metrics: dict


class Hover:
    name, episode_length, substeps = "hover", 50, 1
    contacts_per_world, constraints_per_world = 2, 4

    def __init__(self):
        self.model = mujoco.MjModel.from_xml_string(SCENE)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, key, data):
        return data, Memory(jax.random.uniform(key, (2,)))

    def control(self, data, memory, action):
        return data.replace(ctrl=action), memory

    def evaluate(self, data, memory, action):
        zero = jnp.zeros(())
        return Outcome(zero, jnp.zeros((), bool), jnp.zeros((), bool), {"none": zero}, memory)

    def observe(self, data, memory):
        state = jnp.concatenate([data.qpos, data.qvel])
        return {"state": state, "privileged_state": jnp.concatenate([state, memory.target])}


def scaled(field, **more):
    return {"field": field, "operation": "scale", "distribution": {"uniform": [0.5, 2.0]}, **more}


def chosen(field, operation, values, **more):
    return {"field": field, "operation": operation, "distribution": {"choice": values}, **more}


# Each line, its value in its own world, and in all others.
PHYSICS = {
    "gravity": (scaled("opt.gravity", component=2), 2.0, 1.0),
    "mass": (scaled(["body_mass", "body_inertia"], of="drone"), 4.0, 1.0),
    "gain": (scaled("actuator_gainprm", component=0), 0.5, 1.0),
    "damping": (chosen("dof_damping", "add", [0.0], of="height"), 6.0, 0.0),
    "armature": (chosen("dof_armature", "add", [0.0]), 2.0, 0.0),
    "timestep": (scaled("opt.timestep"), 0.5, 1.0),
    "delay": (chosen("action.delay", "set", [0, 2]), 2.0, 0.0),
}
VISION = {
    "colour": (chosen("geom_rgba", "set", [0.0], of="floor", component=[0, 1, 2]), [1.0, 0.0, 0.5], [0.2, 0.4, 0.6]),
    "material": (chosen("geom_matid", "set", [0, 1], of="hull"), 1.0, 0.0),
    "camera": (chosen("cam_pos", "add", [0.0], of="above"), [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    "turn": (chosen("cam_quat", "rotate", [0.0], of="above"), [0.0, 20.0, 0.0], [0.0, 0.0, 0.0]),
    "view": (scaled("cam_fovy"), 0.5, 1.0),
    "light": (chosen("light_diffuse", "scale", [1.0], shared="components"), 0.25, 1.0),
    "direction": (chosen("light_dir", "rotate", [0.0]), [0.0, 60.0, 0.0], [0.0, 0.0, 0.0]),
    "size": (scaled("geom_size", of="hull", component=0), 2.0, 1.0),
    "brightness": (chosen("pixels", "scale", [1.0], shared="components"), 0.5, 1.0),
}


@pytest.fixture(scope="module")
def hover(physics):
    lines = {name: line for name, (line, _, _) in (PHYSICS | VISION).items()}
    env = MjxVectorEnv(
        Hover(),
        num_envs=len(lines) + 1,
        image_size=32,
        randomization=lines,
        simulation=SimulationOptions(physics=physics),
    )
    yield env
    env.close()


def options(**more):
    """World 0 has no line's own value, world 1 that of the first, and so on."""
    variation = {}
    for world, (name, (_, own, others)) in enumerate((PHYSICS | VISION).items(), 1):
        value = np.tile(np.float32(others).reshape(-1), (len(PHYSICS | VISION) + 1, 1))
        value[world] = own
        variation[name] = value
    return {"variation": variation, **more}


def in_world(name):
    return 1 + list(PHYSICS | VISION).index(name)


def test_physics_follows_what_was_drawn(hover):
    hover.reset(seed=0, options=options())
    velocities = [hover.step(torch.full((hover.num_envs, 1), 0.75))[0]["state"][:, 1] for _ in range(3)]
    first, second, third = (v.numpy() for v in velocities)
    thrust, mass, gravity = 0.75 * THRUST, 2.0, -10.0
    expected = {
        "gravity": (thrust / mass + 2 * gravity) * STEP,
        "mass": (thrust / (4 * mass) + gravity) * STEP,
        "gain": (0.5 * thrust / mass + gravity) * STEP,
        "damping": (thrust / mass + gravity) * STEP / (1 + STEP * 6.0 / mass),  # implicit in the velocity
        "armature": (thrust + mass * gravity) / (mass + 2.0) * STEP,
        "timestep": (thrust / mass + gravity) * STEP / 2,
        "delay": gravity * STEP,
    }
    plain = (thrust / mass + gravity) * STEP
    np.testing.assert_allclose(first[0], plain, rtol=1e-4)
    for name, velocity in expected.items():
        np.testing.assert_allclose(first[in_world(name)], velocity, rtol=1e-3, err_msg=name)
    for name in VISION:
        np.testing.assert_allclose(first[in_world(name)], plain, rtol=1e-4, err_msg=name)
    delayed = in_world("delay")
    np.testing.assert_allclose(second[delayed] - first[delayed], gravity * STEP, rtol=1e-4)
    np.testing.assert_allclose(third[delayed] - second[delayed], plain, rtol=1e-3)


def test_pixels_follow_what_was_drawn(hover):
    obs, _ = hover.reset(seed=0, options=options())
    frames = obs["pixels/above"].float()
    plain, corner, middle = frames[0], (0, 0), (16, 16)
    for name in PHYSICS:
        assert torch.equal(frames[in_world(name)], plain), name

    def frame(name):
        return frames[in_world(name)]

    assert plain[middle][0] > 100
    assert plain[middle][1:].max() == 0, "the hull is red"
    torch.testing.assert_close(
        frame("colour")[corner] / plain[corner], torch.tensor([5.0, 0.0, 0.5 / 0.6]), rtol=0.1, atol=0
    )
    assert torch.equal(frame("colour")[middle], plain[middle])
    assert frame("material")[middle][2] > 100
    assert frame("material")[middle][:2].max() == 0

    def red(image):
        mask = (image[..., 0] > image[..., 2]).float()
        return mask.sum(), (mask.sum(0) * torch.arange(32)).sum() / mask.sum()

    (area, column), (moved_area, moved) = red(plain), red(frame("camera"))
    assert moved < column - 3, "the camera went to the right"
    assert abs(red(frame("turn"))[1] - column) > 3
    assert red(frame("view"))[0] > 2 * area
    assert red(frame("size"))[0] > 2 * area
    assert moved_area > 0.5 * area
    assert frame("light")[corner].sum() < 0.75 * plain[corner].sum()
    assert frame("direction")[corner].sum() < 0.8 * plain[corner].sum()
    torch.testing.assert_close(frame("brightness"), plain * 0.5, atol=0.6, rtol=0)


def test_worlds_that_are_not_chosen_draw_and_the_next_episode_draws_again(hover):
    hover.reset(seed=5)
    drawn = hover.variation
    given = {"variation": {"mass": 1.25, "camera": [1, 2, 3]}, "worlds": [2, 4]}
    hover.reset(seed=5, options=given)
    overridden = hover.variation
    for world in range(hover.num_envs):
        if world in (2, 4):
            assert overridden["mass"][world].item() == 1.25
            assert overridden["camera"][world].flatten().tolist() == [1, 2, 3]
        else:
            assert torch.equal(overridden["mass"][world], drawn["mass"][world])
    assert torch.equal(overridden["gravity"], drawn["gravity"])
    assert hover.varied_fields["body_mass"][2, 1].item() == 2.5
    compilations = hover.simulator.compilations
    hover.reset()
    assert (hover.variation["mass"] != 1.25).all()
    hover.reset(options=given)
    assert hover.simulator.compilations == compilations, "once for the names, and never again"


def test_memory_can_be_set_beside_the_variation(hover):
    mask = torch.arange(hover.num_envs) == 3
    target = np.float32([[0.25, 0.5]])
    obs, _ = hover.reset(seed=5, options={"variation": {"gravity": -0.5}, "memory": {"target": target}, "worlds": mask})
    seen = obs["privileged_state"][:, 2:4]
    assert seen[3].tolist() == [0.25, 0.5]
    assert (seen[~mask] != seen[3]).any(1).all()
    assert hover.varied_fields["opt.gravity"][3].tolist() == [0, 0, 5]
    assert (hover.varied_fields["opt.gravity"][:3, 2] < 0).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"variaton": {}}, r"options\['variaton'\].*variation, memory, worlds.*nearest: variation"),
        ({"variation": {"mas": 1}}, r"\['mas'\].*nearest: mass"),
        ({"variation": {"opt.gravity": 1}}, r"\['opt.gravity'\].*nearest: gravity"),
        ({"variation": 3}, r"options\['variation'\]=3"),
        ({"variation": {"mass": [1, 2]}}, r"\['mass'\].*int64 \(2,\).*float32 \(1, 1\)"),
        ({"variation": {"mass": "heavy"}}, r"\['mass'\]"),
        ({"variation": {"mass": float("nan")}}, r"finite"),
        ({"variation": {"mass": -1}}, r"\['mass'\]=-1.*body_mass"),
        (
            {"variation": {"damping": [-1.0]}, "worlds": [3]},
            "dof_damping",
        ),
        ({"variation": {"material": 2}}, r"\['material'\]=2.*geom_matid"),
        ({"variation": {"material": 0.5}}, "geom_matid"),
        ({"variation": {"delay": 3}}, r"\['delay'\]=3"),
        ({"memory": {"targt": 0}}, r"\['targt'\].*nearest: target"),
        ({"worlds": [99]}, r"options\['worlds'\]=\[99\]"),
        ({"worlds": [1, 1]}, r"indices"),
        ({"worlds": [0.5]}, r"indices"),
    ],
)
def test_options_that_do_not_fit_leave_the_worlds_alone(hover, given, message):
    hover.reset(seed=1)
    before = hover.state_dict()
    with pytest.raises(ValueError, match=message):
        hover.reset(seed=2, options=given)
    after = hover.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("mass", "more", "facts"),
    [
        (1.0, 0.0, None),
        ([1.0, 0.5], [-1.5, 0.0], None),
        ([1.0, 0.5], [-0.5, -1.5], ("body_mass", "-0.5")),
        (0.1, 0.0, None),  # though not everything that could be drawn goes with it
        (0.1, None, ("body_mass", "-0.8")),
    ],
)
def test_values_of_several_lines_are_checked_together(mass, more, facts):
    scene = Hover().model
    lines = {"mass": scaled("body_mass", of="drone"), "load": chosen("body_mass", "add", [-1.0, 0.0], of="drone")}
    lines["mass"]["distribution"] = {"uniform": [0.75, 2.0]}
    randomization = Randomization(lines, scene, mjx.put_model(scene, impl="warp"))
    given = {"mass": mass} if more is None else {"mass": mass, "load": more}
    found = randomization.check({name: np.float32(value).reshape(-1, 1, 1) for name, value in given.items()})
    assert found is None if facts is None else all(fact in found[1] for fact in facts)


def test_dictionaries_in_a_memory_are_reached_by_path():
    memory = Nested(jnp.zeros(3), {"goal": jnp.zeros((3, 2)), "deep": {"time": jnp.zeros(3)}}, {})
    choice = jnp.array([False, True, False]), jnp.full(3, 7.0)
    new = jax.vmap(lambda memory, choice: replace_fields(memory, {"info.deep.time": choice}))(memory, choice)
    assert new.info["deep"]["time"].tolist() == [0, 7, 0]
    assert memory.info["deep"]["time"].tolist() == [0, 0, 0]
    assert new.info["goal"].tolist() == memory.info["goal"].tolist()


def test_saved_worlds_go_on_as_they_were(hover):
    hover.reset(seed=9)
    hover.step(still(hover))
    saved = hover.state_dict()
    ahead = [hover.step(torch.full((hover.num_envs, 1), 0.3))[0] for _ in range(3)]
    hover.reset(seed=10)
    hover.load_state_dict(saved)
    for expected in ahead:
        obs = hover.step(torch.full((hover.num_envs, 1), 0.3))[0]
        assert all(torch.equal(obs[key], value) for key, value in expected.items())


def test_what_varies_stays_where_it_is(hover):
    """CUDA graphs are captured for addresses: of the variation as of the state, through episodes that begin and end."""

    def addresses():
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((hover._variation, hover._state)) if leaf.size]

    hover.reset(seed=0)
    hover.step(still(hover))
    before, mass = addresses(), hover.variation["mass"]
    assert len(set(before)) == len(before)
    for _ in range(60):  # an episode has 50 steps
        hover.step(still(hover))
        assert addresses() == before
    assert (hover.variation["mass"] != mass).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_worlds_on_a_gpu_vary_as_on_a_cpu(hover):
    lines = {name: line for name, (line, _, _) in (PHYSICS | VISION).items()}
    there = MjxVectorEnv(Hover(), num_envs=hover.num_envs, image_size=32, randomization=lines, device="cuda")
    here, _ = hover.reset(seed=0, options=options())
    obs, _ = there.reset(seed=0, options=options())
    for name, value in there.variation.items():
        torch.testing.assert_close(value.cpu(), hover.variation[name])
    for _ in range(5):
        action = torch.full((hover.num_envs, 1), 0.75)
        here, obs = hover.step(action)[0], there.step(action.cuda())[0]
    torch.testing.assert_close(obs["state"].cpu(), here["state"], rtol=1e-4, atol=1e-5)
    assert (obs["pixels/above"].cpu().float() - here["pixels/above"].float()).abs().mean() < 2
    assert there.simulator.compilations == 1
    there.close()


def still(env):
    return torch.zeros(env.action_space.shape)
