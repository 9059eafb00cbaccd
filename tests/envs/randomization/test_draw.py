"""Draws of one world, and the model that follows from it; on the pick scene, without stepping it."""

import itertools

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from mujoco import mjx
from scipy import stats
from scipy.spatial.transform import Rotation

from sheeplike.envs.mjx.randomization.draw import NOMINAL, Randomization, Variation
from sheeplike.envs.mjx.tasks.franka_pick import FrankaPick
from sheeplike.options import InvalidOption

SCENE = FrankaPick().model
MODEL = mjx.put_model(SCENE, impl="warp")
KEYS = jax.random.split(jax.random.key(0), 4000)


def bind(line=None, *, name="it", randomize=True, **lines):
    lines = {**({} if line is None else {name: line}), **lines}
    return Randomization(lines, SCENE, MODEL, cameras=("front", "wrist"), randomize=randomize)


def spec(field, operation, distribution, **more):
    return {"field": field, "operation": operation, "distribution": distribution, **more}


def sample(randomization, count=4000):
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(randomization.sample))(KEYS[:count]))


def geom(name):
    return SCENE.geom(name).id


UNIFORM = {"uniform": [0.5, 1.5]}


def test_only_what_a_line_names_changes_and_only_varied_fields_are_carried():
    variation = sample(bind(spec("geom_rgba", "scale", UNIFORM, of=["box", "floor"], component=[0, 2])), 50)
    assert variation.model.keys() == {"geom_rgba"}
    ratio = variation.model["geom_rgba"] / np.maximum(SCENE.geom_rgba, 1e-6)
    changed = np.zeros(SCENE.geom_rgba.shape, bool)
    changed[np.ix_([geom("box"), geom("floor")], [0, 2])] = True
    assert (np.abs(ratio - 1) > 1e-3)[:, changed].mean() > 0.95
    np.testing.assert_allclose(ratio[:, ~changed & (SCENE.geom_rgba > 0)], 1, rtol=1e-6)
    # In the order of the model, not of the names.
    drawn = variation.drawn["it"]
    assert drawn.shape == (50, 2, 2)
    order = sorted([geom("box"), geom("floor")])
    np.testing.assert_allclose(ratio[:, order][..., [0, 2]], drawn, rtol=1e-4)


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        ({"uniform": [2.0, 5.0]}, stats.uniform(2, 3)),
        ({"log_uniform": [0.5, 8.0]}, stats.loguniform(0.5, 8.0)),
        ({"normal": [1.0, 0.25]}, stats.truncnorm(-3, 3, 1.0, 0.25)),
    ],
)
def test_distributions(distribution, expected):
    drawn = sample(bind(spec("dof_damping", "set", distribution, of="joint1"))).model["dof_damping"][:, 0]
    assert stats.kstest(drawn, expected.cdf).pvalue > 1e-3


def test_bernoulli_and_choice():
    shadow = sample(bind(spec("light_castshadow", "set", {"bernoulli": 0.75}))).model["light_castshadow"]
    assert shadow.dtype == bool
    assert stats.binomtest(int(shadow.sum()), shadow.size, 0.75).pvalue > 1e-3
    picked = sample(bind(spec("dof_damping", "set", {"choice": [1, 2, 4]}, of="joint*"))).model["dof_damping"][:, :7]
    assert stats.chisquare([(picked == value).sum() for value in (1, 2, 4)]).pvalue > 1e-3
    assert (picked.std(1) > 0).mean() > 0.9, "each joint chooses on its own"


def test_a_choice_of_colours_keeps_them_whole():
    palette = [[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0.5]]
    line = spec("geom_rgba", "set", {"choice": palette}, of=["left_finger/*", "right_finger/*"], component=[0, 1, 2])
    rgb = sample(bind(line), 300).drawn["it"]
    assert rgb.shape == (300, 2, 3)
    assert {tuple(colour) for colour in rgb.reshape(-1, 3).tolist()} == {tuple(map(float, c)) for c in palette}
    assert (rgb[:, 0] != rgb[:, 1]).any()
    shared = sample(bind({**line, "shared": "elements"}), 300)
    assert shared.drawn["it"].shape == (300, 1, 3)
    fingers = [i for i in range(SCENE.ngeom) if SCENE.body(SCENE.geom_bodyid[i]).name.endswith("finger")]
    unnamed = [i for i in fingers if not SCENE.geom(i).name]
    assert len(unnamed) == 2
    colours = shared.model["geom_rgba"][:, unnamed, :3]
    assert (colours[:, 0] == colours[:, 1]).all()


@pytest.mark.parametrize(("shared", "shape"), [(None, (3, 2)), ("elements", (1, 2)), ("components", (3, 1))])
def test_shared_axes(shared, shape):
    line = spec("geom_friction", "scale", UNIFORM, of=["box", "*_pad"], component=[0, 1], shared=shared)
    variation = sample(bind(line), 20)
    assert variation.drawn["it"].shape == (20, *shape)
    chosen = sorted(geom(name) for name in ("box", "left_pad", "right_pad"))
    ratio = (variation.model["geom_friction"] / np.float32(SCENE.geom_friction))[:, chosen, :2]
    np.testing.assert_allclose(ratio, np.broadcast_to(variation.drawn["it"], ratio.shape), rtol=1e-5)


def test_fields_of_a_line_share_the_draw():
    line = spec(["body_mass", "body_inertia"], "scale", {"log_uniform": [0.5, 2]}, of=["box", "hand"])
    variation = sample(bind(line), 20)
    chosen = sorted(SCENE.body(name).id for name in ("box", "hand"))
    factor = variation.drawn["it"]
    assert factor.shape == (20, 2, 1)
    mass = variation.model["body_mass"] / np.where(SCENE.body_mass, SCENE.body_mass, 1)
    np.testing.assert_allclose(mass[:, chosen], factor[..., 0], rtol=1e-5)
    inertia = variation.model["body_inertia"][:, chosen] / SCENE.body_inertia[chosen]
    np.testing.assert_allclose(inertia, np.broadcast_to(factor, inertia.shape), rtol=1e-4)
    # And what rests on them follows: a free box of twice the mass has half the inverse weight.
    invweight = variation.model["body_invweight0"][:, chosen[1]] / SCENE.body_invweight0[chosen[1]]
    np.testing.assert_allclose(invweight, 1 / np.repeat(factor[:, 1], 2, 1), rtol=1e-3)
    subtree = variation.model["body_subtreemass"][:, 0]
    np.testing.assert_allclose(subtree, variation.model["body_mass"].sum(-1), rtol=1e-5)


def test_lines_act_one_after_the_other():
    first = spec("dof_damping", "set", {"choice": [3.0]}, of="joint1")
    second = spec("dof_damping", "scale", {"choice": [2.0]}, of="joint*")
    third = spec("dof_damping", "add", {"choice": [0.5]}, of="joint1")
    damping = sample(bind(a=first, b=second, c=third), 2).model["dof_damping"]
    np.testing.assert_allclose(damping[:, 0], 6.5)
    np.testing.assert_allclose(damping[:, 1], 2 * SCENE.dof_damping[1])


def test_vectors_of_the_whole_scene_and_single_numbers():
    pull = spec("opt.gravity", "set", {"uniform": [[-1, 0, 2], [1, 0, 3]]})
    time = spec("opt.timestep", "scale", {"uniform": [0.9, 1.1]})
    variation = sample(bind(pull=pull, time=time), 100)
    assert variation.model.keys() == {"opt.gravity", "opt.timestep"}
    x, y, z = variation.model["opt.gravity"].T
    assert (np.abs(x) <= 1).all()
    assert x.min() < -0.5
    assert (y == 0).all()
    assert ((z >= 2) & (z <= 3)).all()
    ratio = variation.model["opt.timestep"] / SCENE.opt.timestep
    np.testing.assert_allclose(ratio, variation.drawn["time"][:, 0, 0], rtol=1e-5)


@pytest.mark.parametrize("degrees", [10.0, 150.0])
def test_rotation_of_a_camera_stays_in_the_cone(degrees):
    variation = sample(bind(spec("cam_quat", "rotate", {"uniform": [0, degrees]}, of="front")))
    camera, other = SCENE.camera("front").id, SCENE.camera("wrist").id
    quaternions = variation.model["cam_quat"]
    np.testing.assert_allclose(np.linalg.norm(quaternions[:, camera], axis=-1), 1, atol=1e-5)
    np.testing.assert_array_equal(quaternions[:, other], np.tile(np.float32(SCENE.cam_quat[other]), (4000, 1)))
    nominal = Rotation.from_quat(SCENE.cam_quat[camera], scalar_first=True)
    turn = Rotation.from_quat(quaternions[:, camera], scalar_first=True) * nominal.inv()
    angle = np.rad2deg(turn.magnitude())
    assert stats.kstest(angle, stats.uniform(0, degrees).cdf).pvalue > 1e-3
    np.testing.assert_allclose(np.rad2deg(turn.as_rotvec()), variation.drawn["it"][:, 0], atol=0.05)
    # Uniform over all axes: each coordinate of the axis is uniform, after Archimedes.
    axis = turn.as_rotvec() / turn.magnitude()[:, None]
    for coordinate in axis[angle > 1].T:
        assert stats.kstest(coordinate, stats.uniform(-1, 2).cdf).pvalue > 1e-3


def test_rotation_and_aim_of_a_light():
    where = spec("light_pos", "set", {"uniform": [[1.5, -0.2, 0.8], [3, 0.2, 1.5]]})
    at = spec("light_dir", "aim", {"choice": [[0.6, 0.0, 0.2]]})
    tilt = spec("light_dir", "rotate", {"uniform": [0, 20]})
    straight = sample(bind(where=where, at=at), 200).model
    towards = np.array([0.6, 0, 0.2]) - straight["light_pos"]
    np.testing.assert_allclose(
        straight["light_dir"], towards / np.linalg.norm(towards, axis=-1, keepdims=True), atol=1e-5
    )
    tilted = sample(bind(where=where, at=at, tilt=tilt), 200)
    np.testing.assert_array_equal(tilted.model["light_pos"], straight["light_pos"])
    cosine = (tilted.model["light_dir"] * straight["light_dir"]).sum(-1)
    assert (cosine >= np.cos(np.deg2rad(20)) - 1e-5).all()
    assert cosine.min() < 0.98
    vector = Rotation.from_rotvec(np.deg2rad(tilted.drawn["tilt"][:, 0])).apply(straight["light_dir"][:, 0])
    np.testing.assert_allclose(tilted.model["light_dir"][:, 0], vector, atol=1e-4)


def test_brightness_of_the_frames():
    line = spec("pixels", "scale", {"choice": [0.5, 2.0]}, of="front", shared=["components"])
    offset = spec("pixels", "add", {"choice": [0.1]}, of="*", component=2)
    variation = jax.jit(bind(gain=line, offset=offset).sample)(jax.random.key(1))
    assert variation.model == {}
    image = jnp.arange(0, 256, dtype=jnp.uint8).repeat(3).reshape(16, 16, 3)
    frames = {"pixels/front": image, "pixels/wrist": image, "depth/front": jnp.ones(3)}
    changed = jax.jit(Variation.adjust)(variation, frames)
    gain = float(variation.drawn["gain"][0, 0])
    expected = np.asarray(image, np.float32) * np.float32(gain) + np.float32([0, 0, 25.5])
    np.testing.assert_array_equal(changed["pixels/front"], np.clip(np.round(expected), 0, 255).astype(np.uint8))
    np.testing.assert_array_equal(changed["pixels/wrist"][..., :2], image[..., :2])
    assert changed["pixels/front"].dtype == jnp.uint8
    np.testing.assert_array_equal(changed["depth/front"], 1)


def test_delay_of_actions():
    randomization = bind(spec("action.delay", "set", {"choice": [0, 2, 3]}))
    assert randomization.max_delay == 3
    variation = sample(randomization, 300)
    assert set(variation.delay["action.delay"].tolist()) == {0, 2, 3}
    assert variation.delay["action.delay"].dtype == np.int32


def test_a_line_draws_the_same_whatever_other_lines_there_are():
    colour = spec("geom_rgba", "set", {"uniform": [0, 1]}, of="box")
    other = spec("opt.gravity", "scale", UNIFORM)
    alone, both, other_way = (
        sample(bind(c=colour), 5),
        sample(bind(c=colour, g=other), 5),
        sample(bind(g=other, c=colour), 5),
    )
    np.testing.assert_array_equal(alone.drawn["c"], both.drawn["c"])
    np.testing.assert_array_equal(alone.drawn["c"], other_way.drawn["c"])
    renamed = sample(bind(d=colour), 5)
    assert (alone.drawn["c"] != renamed.drawn["d"]).any()


def test_nominal_worlds_are_the_scene_in_the_same_terms():
    lines = {
        "colour": spec("geom_rgba", "set", {"uniform": [0, 1]}, of="*", shared=["elements", "components"]),
        "mass": spec("body_mass", "scale", UNIFORM),
        "turn": spec("cam_quat", "rotate", {"uniform": [5, 10]}),
        "light": spec("pixels", "scale", UNIFORM),
        "late": spec("action.delay", "set", {"choice": [1, 2]}),
        "place": spec("cam_pos", "add", {"uniform": [1, 2]}),
    }
    drawn, nominal = (jax.jit(bind(**lines, randomize=value).sample)(jax.random.key(0)) for value in (True, False))
    assert [v.shape for v in drawn.drawn.values()] == [v.shape for v in nominal.drawn.values()]
    assert drawn.drawn.keys() == nominal.drawn.keys()
    assert all((drawn.model, drawn.frames, drawn.delay))
    assert nominal == NOMINAL._replace(drawn=nominal.drawn)
    for name, value in {"mass": 1, "turn": 0, "late": 0, "place": 0, "light": 1}.items():
        np.testing.assert_array_equal(nominal.drawn[name], value)
    np.testing.assert_allclose(nominal.drawn["colour"], SCENE.geom_rgba.mean(), rtol=1e-5)
    assert bind(**lines, randomize=False).max_delay == 0


def test_names_leave_out_what_is_marked():
    line = spec("geom_rgba", "set", {"choice": [0.0]}, of=["!box", "!*_pad"])
    kept = (sample(bind(line), 1).model["geom_rgba"][0] == np.float32(SCENE.geom_rgba)).all(-1)
    assert {i for i in range(SCENE.ngeom) if kept[i]} == {geom("box"), geom("left_pad"), geom("right_pad")}


def test_nominal_colours_are_those_that_are_seen():
    xml = """<mujoco><asset><material name="red" rgba="1 0 0 1"/></asset><worldbody><body>
      <geom name="painted" size=".1" material="red"/></body></worldbody></mujoco>"""
    scene = mujoco.MjModel.from_xml_string(xml)
    line = {"colour": spec("geom_rgba", "set", {"uniform": [0, 1]})}
    nominal = Randomization(line, scene, mjx.put_model(scene, impl="warp"), randomize=False)
    assert nominal.sample(jax.random.key(0)).drawn["colour"].tolist() == [[1, 0, 0, 1]]


def test_colours_begin_as_those_of_the_material():
    xml = """<mujoco><asset><material name="red" rgba="1 0 0 1"/></asset><worldbody><body>
      <geom name="plain" size=".1" rgba="0 0 1 1"/><geom name="painted" size=".1" material="red"/>
      <geom name="left" size=".1" material="red"/></body></worldbody></mujoco>"""
    scene = mujoco.MjModel.from_xml_string(xml)
    line = {"tint": spec("geom_rgba", "scale", {"choice": [0.5]}, of=["plain", "painted"], component=[0, 1, 2])}
    model = mjx.put_model(scene, impl="warp")
    colours = jax.jit(Randomization(line, scene, model).sample)(jax.random.key(0)).model["geom_rgba"]
    np.testing.assert_allclose(colours, [[0, 0, 0.5, 1], [0.5, 0, 0, 1], [0.5, 0.5, 0.5, 1]])


def test_tracking_cameras_cannot_be_moved():
    xml = """<mujoco><worldbody><body name="b"><freejoint/><geom size=".1"/>
      <camera name="follow" mode="track" pos="0 -1 0"/></body></worldbody></mujoco>"""
    scene = mujoco.MjModel.from_xml_string(xml)
    with pytest.raises(InvalidOption, match="of=follow"):
        Randomization({"m": spec("cam_pos", "add", UNIFORM)}, scene, mjx.put_model(scene, impl="warp"))


def test_every_field_on_offer_can_be_found():
    """Every field that Warp calls batchable is where this module looks for it, with a name for every row."""
    from sheeplike.envs.mjx.randomization.fields import LEFT_OUT, OFFERED, find

    found = {}
    for path in sorted(OFFERED - LEFT_OUT.keys()):
        found[path] = find("it", path, SCENE, MODEL)
    indices = {path for path, field in found.items() if np.dtype(field.nominal.dtype).kind in "iu"}
    assert indices == {"geom_matid", "light_type"}
    assert len(found) > 80
    for field in found.values():
        if field.elements is not None:
            assert len(field.elements) == field.nominal.shape[0], field.path
    assert found["dof_damping"].elements[:2] == ("joint1", "joint2")
    assert len(set(itertools.chain(found["geom_rgba"].elements))) == SCENE.ngeom
