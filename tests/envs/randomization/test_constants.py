"""Derived constants against ``mj_setConst`` of MuJoCo itself."""

import jax
import mujoco
import numpy as np
import pytest

from sheeplike.envs.mjx.randomization.constants import Inertia, bounds
from sheeplike.envs.mjx.tasks.cartpole import Cartpole
from sheeplike.envs.mjx.tasks.franka_pick import FrankaPick

# A ball joint, a free joint, sliders along the world's axes and not, tendons, a body without joints, a fixed one.
MIXED = """
<mujoco>
  <worldbody>
    <body name="fixed"><geom size=".1" mass="3"/></body>
    <body name="free" pos="0 0 2"><freejoint/><geom type="box" size=".1 .2 .3"/>
      <body name="ball" pos=".5 0 0"><joint type="ball" armature=".01"/>
        <geom type="capsule" size=".05 .2" pos=".2 .1 0"/>
        <body name="stuck" pos="0 .3 0" euler="10 20 30"><geom type="ellipsoid" size=".1 .05 .2" mass=".5"/></body>
        <body name="hinge" pos="0 0 .4"><joint name="h" axis="1 2 0" pos=".1 0 0"/>
          <geom size=".1" pos="0 .1 .1"/></body>
      </body>
    </body>
    <body name="rail" pos="3 0 0"><joint name="x" type="slide" axis="1 0 0"/><joint name="z" type="slide" axis="0 0 1"
      armature=".2"/><geom size=".1" mass="2"/></body>
    <body name="oblique" pos="5 0 0"><joint name="o" type="slide" axis="1 1 0"/>
      <geom type="cylinder" size=".1 .3"/></body>
  </worldbody>
  <tendon><fixed name="t"><joint joint="h" coef="1"/><joint joint="x" coef="-2"/></fixed></tendon>
  <actuator><motor joint="h" gear="3"/><position tendon="t" kp="10"/><motor joint="o"/></actuator>
</mujoco>
"""
SCENES = {
    "mixed": lambda: mujoco.MjModel.from_xml_string(MIXED),
    "franka_pick": lambda: FrankaPick().model,
    "cartpole": lambda: Cartpole().model,
}


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_inertial_constants_are_those_of_set_const(scene, seed):
    model = SCENES[scene]()
    inertia = Inertia(model)
    fields = {}
    if seed is not None:
        rng = np.random.default_rng(seed)
        model.body_mass[:] *= rng.uniform(0.3, 3.0, model.nbody)
        model.body_inertia[:] *= rng.uniform(0.3, 3.0, (model.nbody, 1))
        model.dof_armature[:] *= rng.uniform(0.3, 3.0, model.nv)
        fields = {name: np.float32(getattr(model, name)) for name in ("body_mass", "body_inertia", "dof_armature")}
    mujoco.mj_setConst(model, mujoco.MjData(model))
    derived = jax.jit(inertia.constants)(fields)
    assert {"body_subtreemass", "body_invweight0", "dof_invweight0", "actuator_acc0"} <= derived.keys()
    assert ("tendon_invweight0" in derived) == (model.ntendon > 0)
    for name, value in derived.items():
        expected = getattr(model, name)
        np.testing.assert_allclose(value, expected, rtol=2e-4, atol=1e-5 * np.abs(expected).max(), err_msg=name)


def test_bounds_of_geoms_are_the_compilers():
    def scene(factor):
        shapes = {"sphere": [0.1], "capsule": [0.1, 0.3], "cylinder": [0.2, 0.1], "box": [0.1, 0.2, 0.3]}
        shapes |= {"ellipsoid": [0.1, 0.2, 0.3]}
        geoms = "".join(
            f'<body><freejoint/><geom type="{shape}" size="{" ".join(str(factor * s) for s in size)}"/></body>'
            for shape, size in shapes.items()
        )
        return mujoco.MjModel.from_xml_string(
            f'<mujoco><worldbody><geom type="plane" size="1 1 .1"/>{geoms}</worldbody></mujoco>'
        )

    small, large = scene(1.0), scene(1.7)
    sizes = np.float32(large.geom_size)
    derived = bounds(small, sizes)
    np.testing.assert_allclose(derived["geom_rbound"], large.geom_rbound, rtol=1e-5)
    np.testing.assert_allclose(np.reshape(derived["geom_aabb"], large.geom_aabb.shape), large.geom_aabb, atol=1e-6)
