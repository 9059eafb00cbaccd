"""MuJoCo's own engine: what ``mj_step`` would make of one world after the other, regardless of others."""

import copy
import gc
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
import torch
from mujoco import mjx

import sheeplike.envs
from sheeplike.envs.mjx.physics.native import NativePhysics
from sheeplike.envs.mjx.randomization.constants import bounds
from sheeplike.envs.mjx.randomization.draw import Randomization
from sheeplike.envs.mjx.randomization.fields import DERIVED, OFFERED
from sheeplike.envs.mjx.tasks.franka_pick import FrankaPick

CPU = jax.devices("cpu")[0]
# Joints of all kinds and bodies that are simple; contacts, equalities, tendons, activations, sensors, a mocap body.
MIXED = """
<mujoco>
  <option timestep=".005" impratio="3"/>
  <asset><material name="paint"/></asset>
  <worldbody>
    <geom type="plane" size="1 1 .1" friction="2"/><site name="origin"/>
    <camera name="c" pos="0 -3 1"/><light pos="0 0 3"/>
    <body name="handle" mocap="true"><geom size=".1" contype="0" conaffinity="0" material="paint"/></body>
    <body name="free" pos="0 0 .4"><freejoint/><geom type="box" size=".1 .2 .3"/>
      <body name="ball" pos=".5 0 0"><joint type="ball" armature=".01"/>
        <geom type="capsule" size=".05 .2" pos=".2 .1 0"/>
        <body name="hinge" pos="0 0 .4"><joint name="h" axis="1 2 0" pos=".1 0 0" range="-10 10" limited="true"/>
          <geom size=".1" pos="0 .1 .1"/><site name="tip" pos="0 0 .1"/></body>
      </body>
    </body>
    <body name="rail" pos="3 0 0"><joint name="x" type="slide" axis="1 0 0" damping="1" stiffness="2"/>
      <joint name="z" type="slide" axis="0 0 1" armature=".2" frictionloss=".1"/><geom size=".1" mass="2"/></body>
    <body name="other" pos="3 0 1"><joint name="y" type="slide" axis="0 1 0"/><geom size=".1" mass="2"/></body>
    <body name="box" pos="-2 0 .1"><freejoint/><geom name="box" type="box" size=".1 .1 .1"/></body>
  </worldbody>
  <contact><pair geom1="box" geom2="box2"/></contact>
  <worldbody><geom name="box2" type="box" size=".1 .1 .1" pos="-2 .1 0"/></worldbody>
  <equality><weld body1="handle" body2="free"/><joint joint1="y" joint2="x"/></equality>
  <tendon>
    <fixed name="t" damping=".1"><joint joint="h" coef="1"/><joint joint="x" coef="-2"/></fixed>
    <spatial name="s" stiffness="1" limited="true" range="0 1"><site site="origin"/><site site="tip"/></spatial>
  </tendon>
  <actuator>
    <motor joint="h" gear="3"/><position tendon="t" kp="10"/>
    <intvelocity joint="x" kp="3" actrange="-1 1"/><general joint="z" dyntype="filter" dynprm=".1"/>
  </actuator>
  <sensor><accelerometer site="tip"/><touch site="tip"/><subtreelinvel body="free"/></sensor>
</mujoco>
"""


def delivered(data):
    return {f.name: getattr(data, f.name) for f in mjx.Data.fields() if f.name != "_impl"}


def stepped(scene, inputs, fields, *, threads=2, calls=10, substeps=3):
    """All fields of the data of all worlds after some calls of the engine; ``fields`` of the model (N, ...) by path."""
    physics = NativePhysics(SimpleNamespace(model=scene), num_envs=len(inputs["qpos"]), device=CPU, threads=threads)
    physics.vary(fields)

    def of_world(inputs, fields):
        model, data = physics.model.tree_replace(fields), physics.template.replace(**inputs)
        for _ in range(calls):
            data = physics.step(model, data, substeps)
        return delivered(data), delivered(physics.kinematics(model, data)), delivered(physics.forward(model, data))

    return jax.device_get(jax.jit(jax.vmap(of_world))(inputs, fields))


def of_mujoco(scene, inputs, fields, *, calls=10, substeps=3):
    """Positions, velocities and activations by ``mj_step`` in one world after the other, rounded where JAX rounds."""
    found = []
    for world in range(len(inputs["qpos"])):
        model = copy.copy(scene)
        for path, values in fields.items():
            owner, _, name = path.rpartition(".")
            holder = model.opt if owner else model
            value = np.reshape(values[world], np.shape(getattr(holder, name)))
            setattr(holder, name, value if value.ndim else value.item())
        mujoco.mj_setConst(model, mujoco.MjData(model))
        data = mujoco.MjData(model)
        for name, values in inputs.items():
            getattr(data, name)[:] = values[world]
        for _ in range(calls):
            for _ in range(substeps):
                mujoco.mj_step(model, data)
            for name in ("qpos", "qvel", "act", "qacc_warmstart"):
                getattr(data, name)[:] = np.float32(getattr(data, name))
            data.time = np.float32(data.time)
        found.append({name: np.float32(getattr(data, name)) for name in ("qpos", "qvel", "act")})
    return {name: np.stack([world[name] for world in found]) for name in found[0]}


def states(scene, worlds, seed=0):
    rng = np.random.default_rng(seed)
    data = mujoco.MjData(scene)
    return {
        "qpos": np.float32(data.qpos + rng.normal(0, 0.02, (worlds, scene.nq))),
        "qvel": np.float32(rng.normal(0, 0.1, (worlds, scene.nv))),
        "ctrl": np.float32(rng.uniform(-1, 1, (worlds, scene.nu))),
    }


def scaled(scene, worlds, *names, low=0.5, high=2.0):
    """Fields of the model, those of the first world nominal."""
    rng, fields = np.random.default_rng(1), {}
    for name in names:
        owner, _, field = name.rpartition(".")
        nominal = np.float32(getattr(scene.opt if owner else scene, field))
        by_row = (worlds, *nominal.shape[:1], *[1] * (nominal.ndim - 1))
        factors = rng.uniform(low, high, by_row)
        factors[0] = 1.0
        fields[name] = np.float32(nominal * factors)
    return fields


def franka():
    scene = FrankaPick().model
    return scene, states(scene, 5) | {"ctrl": np.tile(np.float32(scene.keyframe("home").ctrl), (5, 1))}


PHYSICS = (
    *("body_mass", "body_inertia", "dof_armature", "dof_damping", "jnt_stiffness", "geom_friction", "geom_pos"),
    *("actuator_gainprm", "actuator_gear", "tendon_stiffness", "tendon_damping", "opt.gravity", "opt.timestep"),
)


@pytest.mark.parametrize("own", [*PHYSICS, "everything"])
def test_worlds_step_as_mujoco_steps_a_model_of_these_fields(own):
    scene = mujoco.MjModel.from_xml_string(MIXED)
    inputs, fields = states(scene, 4), scaled(scene, 4, *(PHYSICS if own == "everything" else [own]))
    found, _, _ = stepped(scene, inputs, fields)
    for name, expected in of_mujoco(scene, inputs, fields).items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
        assert np.isfinite(expected).all()
    nominal = {name: np.stack([values[0]] * 4) for name, values in fields.items()}
    assert (of_mujoco(scene, inputs, nominal)["qpos"][1:] != found["qpos"][1:]).any(1).all(), "the field has no effect"


def test_constants_follow_what_a_line_draws():
    """Not those that are derived for Warp in single precision."""
    scene = mujoco.MjModel.from_xml_string(MIXED)
    physics = NativePhysics(SimpleNamespace(model=scene), num_envs=3, device=CPU, threads=1)
    lines = {
        "mass": {"field": ["body_mass", "body_inertia"], "operation": "scale", "distribution": {"uniform": [0.5, 2.0]}},
        "armature": {"field": "dof_armature", "operation": "add", "distribution": {"uniform": [0.0, 0.1]}},
        "size": {"field": "geom_size", "of": "box", "operation": "scale", "distribution": {"uniform": [0.5, 2.0]}},
    }
    constants = {name for name, field in DERIVED.items() if field == "body_mass"}
    randomization = Randomization(lines, scene, physics.model)
    drawn = jax.jit(jax.vmap(lambda key: randomization.sample(key).model))(jax.random.split(jax.random.key(0), 3))
    assert drawn.keys() > constants
    physics.vary(drawn)

    def kinematics(fields):
        return physics.kinematics(physics.model.tree_replace(randomization.placed(fields)), physics.template).xpos

    jax.block_until_ready(jax.jit(jax.vmap(kinematics))(drawn))
    for world in range(3):
        model, own = copy.copy(scene), physics._batch.get_model(world)
        for name in ("body_mass", "body_inertia", "dof_armature", "geom_size"):
            getattr(model, name)[:] = drawn[name][world]
        mujoco.mj_setConst(model, mujoco.MjData(model))
        for name in (*constants, "dof_M0", "geom_rbound", "body_mass"):
            np.testing.assert_array_equal(getattr(own, name), getattr(model, name), err_msg=name)


def test_bodies_of_many_geoms_collide_where_these_have_been_varied_to():
    """MuJoCo sorts pairs out by boxes around the geoms of a body, which it made when it compiled the scene."""
    geoms = "".join(f'<geom size=".02" pos="{x} {y} 0"/>' for x in (-0.3, 0, 0.3) for y in (-0.3, 0, 0.3))
    scene = mujoco.MjModel.from_xml_string(f"""<mujoco><worldbody>
      <body pos="0 0 0"><joint type="slide" axis="0 0 1" stiffness="1000" damping="10"/>{geoms}</body>
      <body pos="0.12 0.12 .5"><joint type="slide" axis="0 0 1"/>{geoms}</body></worldbody></mujoco>""")
    sizes = np.stack([np.float32(scene.geom_size), np.float32(scene.geom_size) * [6, 1, 1]])
    places = np.stack([np.float32(scene.geom_pos)] * 2)
    places[0, :9, :2] += 0.12  # below the geoms that fall, beyond the box around where they were
    inputs = {name: np.zeros((2, 2), np.float32) for name in ("qpos", "qvel")}
    fields = {"geom_size": np.float32(sizes), "geom_pos": places}
    extents = [bounds(scene, size) for size in fields["geom_size"]]
    fields |= {name: np.stack([extent[name] for extent in extents]) for name in extents[0]}
    found, _, _ = stepped(scene, inputs, fields, calls=40, substeps=5)
    assert (found["qpos"][:, 1] > -0.6).all(), "it fell through"
    brute = copy.copy(scene)
    brute.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_MIDPHASE
    for name, expected in of_mujoco(brute, inputs, fields, calls=40, substeps=5).items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


@pytest.mark.parametrize("scene", ["mixed", "franka_pick"])
def test_the_number_of_threads_changes_no_bit(scene):
    if scene == "mixed":
        scene = mujoco.MjModel.from_xml_string(MIXED)
        inputs = states(scene, 5)
    else:
        scene, inputs = franka()
    fields = scaled(scene, 5, "body_mass", "geom_friction", "opt.gravity")
    one, other = (stepped(scene, inputs, fields, threads=threads) for threads in (1, 3))
    assert (np.diff(one[0]["qpos"], axis=0) != 0).any(1).all()
    for a, b in zip(one, other, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_every_field_that_may_vary_means_the_same_to_the_engine():
    """The nominal values, as Warp has them, leave its model as it is."""
    scene = mujoco.MjModel.from_xml_string(MIXED)
    physics = NativePhysics(SimpleNamespace(model=scene), num_envs=1, device=CPU, threads=1)
    fields = {}
    for path in sorted(OFFERED | DERIVED.keys()):
        owner, _, name = path.rpartition(".")
        holder = physics.model.opt if owner else physics.model
        inside = name not in {f.name for f in type(holder).fields()}
        value = getattr(holder._impl if inside else holder, name)
        if value.size:
            fields[path] = (f"{owner}." if owner else "") + ("_impl." if inside else "") + name, value
    physics.vary(fields)
    assert len(physics._varied) == len(fields.keys() - DERIVED.keys())
    placed = {place: value[None] for place, value in fields.values()}
    run = jax.vmap(lambda placed: physics.kinematics(physics.model.tree_replace(placed), physics.template).xpos)
    jax.block_until_ready(jax.jit(run)(placed))
    own = physics._batch.get_model(0)
    for name in physics._varied:
        owner, _, field = name.rpartition(".")
        found, nominal = (getattr(model.opt if owner else model, field) for model in (own, scene))
        np.testing.assert_allclose(found, nominal, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("scene", "num_envs"),
    [
        ("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>", 3),
        ("<mujoco><worldbody><body mocap='true' pos='1 2 3'><geom size='1'/></body></worldbody></mujoco>", 3),
        ("<mujoco><worldbody><body pos='1 2 3'><joint/><geom size='1'/></body></worldbody></mujoco>", 1),
        (MIXED, 1),
        (MIXED, 3),
    ],
    ids=["nothing_moves", "mocap", "one_joint", "mixed_1", "mixed_3"],
)
def test_every_field_is_delivered_even_where_worlds_are_all_alike(scene, num_envs):
    scene = mujoco.MjModel.from_xml_string(scene)
    physics = NativePhysics(SimpleNamespace(model=scene), num_envs=num_envs, device=CPU, threads=2)
    physics.vary(())
    forward = jax.vmap(lambda _: delivered(physics.forward(physics.model, physics.template)))
    data = jax.jit(forward)(jnp.arange(num_envs))
    expected = mujoco.MjData(scene)
    for name in ("qpos", "mocap_pos", "mocap_quat"):
        getattr(expected, name)[:] = np.float32(getattr(expected, name))
    mujoco.mj_forward(scene, expected)
    for name, values in data.items():
        if name in ("history", "userdata", "plugin_state", "qfrc_inverse"):
            continue
        own = np.broadcast_to(np.reshape(getattr(expected, name), values.shape[1:]), values.shape)
        np.testing.assert_allclose(values, own, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.fixture(scope="module")
def cartpole():
    return sheeplike.envs.make("cartpole_swingup", num_envs=5, renderer="none", physics="native")


def play(env, steps=6):
    played = []
    for action in torch.linspace(-1, 1, steps):
        obs, reward, terminated, truncated, info = env.step(torch.full((env.num_envs, 1), float(action)))
        parts = {**obs, "reward": reward, "terminated": terminated, "truncated": truncated, "bad": info["nonfinite"]}
        played.append({name: value.clone() for name, value in parts.items()})
    return played


@pytest.mark.parametrize(
    "field_and_value", [("qvel", 1e11), ("qpos", torch.inf), ("qfrc_applied", 1e15), ("qfrc_applied", torch.nan)]
)
def test_a_world_that_explodes_is_cut_off_in_silence(cartpole, field_and_value, tmp_path, monkeypatch, capfd):
    """MuJoCo itself would begin it anew, and write about it to a file in the working directory."""
    monkeypatch.chdir(tmp_path)
    field, value = field_and_value
    cartpole.reset(seed=0)
    state = cartpole.state_dict()
    clean = play(cartpole)
    for world in (1, 3):
        state[f"[1].data.{field}"][world] = value
    cartpole.load_state_dict(state)
    sick = play(cartpole)
    assert [step["bad"].tolist() for step in sick] == [[False, True, False, True, False]] + [[False] * 5] * 5
    assert sick[0]["truncated"].tolist() == [False, True, False, True, False]
    assert all(bool(value.isfinite().all()) for step in sick for value in step.values())
    for a, b in zip(clean, sick, strict=True):
        assert all(torch.equal(a[name][[0, 2, 4]], b[name][[0, 2, 4]]) for name in a)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_an_environment_that_is_gone_has_freed_its_worlds():
    env = sheeplike.envs.make("cartpole_balance", num_envs=2, image_size=8, physics="native")
    env.reset(seed=0)
    env.step(torch.zeros(2, 1))
    alive = [weakref.ref(env.simulator.physics._batch), weakref.ref(env.simulator.renderer._context)]
    env.close()
    del env
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
