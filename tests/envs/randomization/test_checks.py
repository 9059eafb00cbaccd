"""Lines that a scene refuses, and what it says."""

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
import yaml
from mujoco import mjx

from sheeplike.config.sources import CONFIGS
from sheeplike.envs.mjx.randomization.draw import Randomization
from sheeplike.envs.mjx.tasks.cartpole import Cartpole
from sheeplike.envs.mjx.tasks.franka_pick import FrankaPick
from sheeplike.options import InvalidOption

SCENE = FrankaPick().model
MODEL = mjx.put_model(SCENE, impl="warp")
UNIFORM = {"uniform": [0.5, 1.5]}


def bind(line=None, **lines):
    return Randomization({"it": line} if line else lines, SCENE, MODEL, cameras=("front", "wrist"))


def spec(field, operation, distribution, **more):
    return {"field": field, "operation": operation, "distribution": distribution, **more}


@pytest.mark.parametrize(
    ("recipe", "task"), [("franka_vision", FrankaPick), ("franka_physics", FrankaPick), ("cartpole_vision", Cartpole)]
)
def test_shipped_recipes_fit_their_scenes_without_a_remark(recipe, task):
    lines = yaml.safe_load((CONFIGS / "randomization" / f"{recipe}.yaml").read_text(encoding="utf-8"))
    scene = task().model
    cameras = [scene.camera(i).name for i in range(scene.ncam)]
    randomization = Randomization(lines, scene, mjx.put_model(scene, impl="warp"), cameras=cameras)
    assert tuple(randomization.draw(jax.random.key(0))) == tuple(lines)
    assert randomization.warnings == []


def test_constants_that_stay_are_remarked():
    (warning,) = bind(spec("body_ipos", "add", {"uniform": [-0.01, 0.01]}, of="box")).warnings
    assert all(part in warning for part in ("randomization.it", "body_ipos", "body_invweight0"))
    assert "nominal" in warning
    assert bind(spec("body_mass", "scale", UNIFORM)).warnings == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            spec("geom_colour", "set", UNIFORM),
            r"field=geom_colour.*geom_friction.*nearest: .*geom_",
        ),
        (spec("opt.gravty", "set", UNIFORM), r"field=opt.gravty.*nearest: .*opt.gravity"),
        (spec("opt.wind", "add", UNIFORM), r"field=opt.wind"),
        (spec("pair_adhesion", "set", UNIFORM), "field=pair_adhesion"),
        (spec("geom_dataid", "set", {"choice": [0]}), "field=geom_dataid"),
        (spec("opt.iterations", "set", UNIFORM), r"field=opt.iterations"),
        (spec("body_subtreemass", "set", UNIFORM), "nearest: .*body_mass"),
        (
            spec("geom_rgba", "set", UNIFORM, of="bx"),
            r"of=bx.*floor, strip.*nearest: .*box",
        ),
        (spec("geom_rgba", "set", UNIFORM, of=["box", "!box"]), "at least one of"),
        (spec("geom_rgba", "set", UNIFORM, component=4), r"component=\[4\]"),
        (
            spec("opt.gravity", "set", UNIFORM, of="box"),
            r"of=\[box\].*opt.gravity",
        ),
        (spec("mat_rgba", "set", UNIFORM, of="wood"), "of=wood"),
        (spec("geom_rgba", "set", {"uniform": [[0, 0], [1, 1]]}), " 4"),
        (spec("geom_matid", "set", UNIFORM), r"operation=set.*bernoulli"),
        (spec("geom_matid", "set", {"choice": ["wood"]}), "choice=.*a list of values"),
        (spec("geom_rgba", "rotate", UNIFORM), "field=geom_rgba"),
        (spec("cam_quat", "rotate", UNIFORM, component=0), r"component=\[0\]"),
        (spec("cam_pos", "aim", UNIFORM), r"field=cam_pos.*light_dir"),
        (spec("geom_pos", "add", UNIFORM, of="strip"), "of=strip"),
        (spec("body_pos", "add", UNIFORM, of="link0"), "of=link0"),
        (
            spec("pixels", "scale", UNIFORM, of="fornt"),
            r"of=fornt.*front, wrist.*nearest: .*front",
        ),
        (spec("action.delay", "set", {"choice": [1]}, of="x"), "world"),
        (spec(["geom_rgba", "body_mass"], "scale", UNIFORM), "fields"),
        (spec("cam_mat0", "set", UNIFORM), "cam_quat"),
        (
            spec("body_mass", "scale", {"normal": [1.0, 0.4]}, of="box"),
            r"normal=\[1.0,0.4\].*body_mass.* -0.",
        ),
        (
            spec("body_mass", "scale", {"choice": [0, 1]}, of="box"),
            "body_mass",
        ),
        (spec("geom_friction", "add", {"uniform": [-2, 0]}, of="box"), "geom_friction"),
        (spec("dof_damping", "set", {"uniform": [-1, 1]}, of="joint1"), "joint1"),
        (spec("geom_size", "set", {"choice": [[0.1, 0, 0.1]]}, of="box"), "geom_size"),
    ],
)
def test_lines_that_do_not_fit_the_scene(line, message):
    with pytest.raises(InvalidOption, match=message):
        bind(line)


def test_colours_of_materials_that_nobody_sees():
    xml = """<mujoco><asset><material name="red"/><material name="hidden"/></asset><worldbody><body>
      <geom size=".1" material="red"/><geom size=".1" material="hidden" rgba="1 1 1 1"/></body></worldbody></mujoco>"""
    scene = mujoco.MjModel.from_xml_string(xml)
    model = mjx.put_model(scene, impl="warp")
    lines = {"m": spec("mat_rgba", "set", UNIFORM, of=["red"])}
    assert Randomization(lines, scene, model).draw(jax.random.key(0))["m"].shape == (1, 4)
    anybodys = {**lines, "g": spec("geom_matid", "set", {"choice": [0, 1]})}
    anybodys["m"] = spec("mat_rgba", "set", UNIFORM, of=["hidden"])
    assert "m" in Randomization(anybodys, scene, model).draw(jax.random.key(0))
    for line in (
        {"m": spec("mat_rgba", "set", UNIFORM, of=["hidden"])},
        {**lines, "c": spec("geom_rgba", "set", UNIFORM)},
    ):
        with pytest.raises(InvalidOption, match=r"randomization.m.of="):
            Randomization(line, scene, model)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            {
                "a": ("geom_friction", "add", {"uniform": [-0.6, 0]}),
                "b": ("geom_friction", "add", {"uniform": [-0.6, 0]}),
            },
            r"randomization.b.*geom_friction.*-0.2",
        ),
        (
            {
                "a": ("geom_friction", "set", {"choice": [0.1, 2]}),
                "b": ("geom_friction", "add", {"uniform": [-0.5, 0]}),
            },
            r"randomization.b.*-0.4",
        ),
        ({"a": ("geom_friction", "set", {"choice": [3]}), "b": ("geom_friction", "add", {"uniform": [-2, 0]})}, None),
        (
            {"a": ("geom_friction", "add", {"choice": [-2]}), "b": ("geom_friction", "scale", {"uniform": [-1, -0.5]})},
            r"randomization.a.*-1",
        ),
        (
            {"a": ("geom_friction", "set", {"choice": [0, 1]}), "b": ("geom_friction", "scale", {"normal": [1, 0.4]})},
            r"randomization.b.*-0.2",
        ),
    ],
)
def test_what_lines_can_reach_together(lines, message):
    lines = {name: spec(*line, of="box", component=0) for name, line in lines.items()}
    assert SCENE.geom("box").friction[0] == 1
    if message is None:
        bind(**lines)
        return
    with pytest.raises(InvalidOption, match=message):
        bind(**lines)


@pytest.mark.slow
@pytest.mark.parametrize("integrator", ["discrete", "implicitfast", "Euler"])
def test_tendons_pull_where_the_scene_has_none_that_do(integrator):
    xml = f"""<mujoco><option integrator="{integrator}" gravity="0 0 0"/><worldbody><body><joint name="j" type="slide"/>
      <geom size=".1" mass="1"/></body></worldbody>
      <tendon><fixed name="t" springlength="0 0"><joint joint="j" coef="1"/></fixed></tendon></mujoco>"""
    scene = mujoco.MjModel.from_xml_string(xml)
    model = mjx.put_model(scene, impl="warp")
    data = mjx.make_data(scene, impl="warp", naconmax=8, njmax=8)
    randomization = Randomization({"t": spec("tendon_stiffness", "set", {"uniform": [5, 10]})}, scene, model)

    def velocity(key):
        fields = randomization.sample(key).model
        world = mjx.step(model.tree_replace(randomization.placed(fields)), data.replace(qpos=jnp.array([0.5])))
        return world.qvel[0], fields["tendon_stiffness"][0]

    velocities, stiffness = jax.jit(jax.vmap(velocity))(jax.random.split(jax.random.key(0), 4))
    np.testing.assert_allclose(velocities, -0.5 * stiffness * 0.002, rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "values", "least"), [("true", [0], 1), ("true", [1, 3], 1), ("false", [3], 0), ("false", [0.5], 0)]
)
def test_lights_are_of_kinds_that_the_renderer_has(kind, values, least):
    xml = f'<mujoco><worldbody><light directional="{kind}"/><geom size="1"/></worldbody></mujoco>'
    scene = mujoco.MjModel.from_xml_string(xml)
    model = mjx.put_model(scene, impl="warp")
    with pytest.raises(InvalidOption, match="light_type"):
        Randomization({"l": spec("light_type", "set", {"choice": values})}, scene, model)
    Randomization({"l": spec("light_type", "set", {"choice": [least, 1, 2]})}, scene, model)
