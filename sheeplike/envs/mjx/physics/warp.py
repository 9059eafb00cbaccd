"""MJX-Warp: all worlds in kernels of the accelerator. On a CPU its kernels are sequential."""

from collections.abc import Collection

import jax
import mujoco
from mujoco import mjx
from mujoco.mjx.third_party.mujoco_warp import OverflowType

_step, _forward = mjx.step, mjx.forward


class WarpPhysics:
    """Steps worlds by MJX-Warp; see :class:`~sheeplike.envs.mjx.physics.physics.Physics`.

    Args:
        scene: compiled.
        device: where the worlds live.
        contacts: to allocate for all worlds together.
        constraints: rows to allocate in each world.
    """

    name = "warp"

    def __init__(self, scene: mujoco.MjModel, *, device: jax.Device, contacts: int, constraints: int) -> None:
        model = mjx.put_model(scene, device=device, impl="warp")
        # Too few contacts or constraints stay reported; a solver of few iterations is cut off by intention.
        quiet = OverflowType.ITERATIONS | OverflowType.LS_ITERATIONS
        self.model = model.tree_replace({"opt._impl.warn_overflow": model.opt._impl.warn_overflow & ~int(quiet)})
        self.template = mjx.make_data(scene, device=device, impl="warp", naconmax=contacts, njmax=constraints)

    def vary(self, fields: Collection[str]) -> None:
        """Nothing to do: Warp reads the fields of each world."""

    def step(self, model: mjx.Model, data: mjx.Data, substeps: int = 1) -> mjx.Data:
        return jax.lax.scan(lambda data, _: (_step(model, data), None), data, None, length=substeps)[0]

    def forward(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        return _forward(model, data)

    def kinematics(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        return mjx.kinematics(model, data)
