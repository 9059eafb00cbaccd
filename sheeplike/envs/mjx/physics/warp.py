"""MJX-Warp: all worlds in kernels of the accelerator. On a CPU its kernels are sequential."""

import jax
from mujoco import mjx
from mujoco.mjx.third_party.mujoco_warp import OverflowType

from sheeplike.envs.mjx.patches import mjx_forward, repeat_step
from sheeplike.envs.mjx.physics.physics import Physics
from sheeplike.envs.mjx.task import World


class WarpPhysics(Physics):
    """Steps worlds by MJX-Warp, which reads the fields that vary by itself."""

    name = "warp"

    def __init__(self, task: World, *, num_envs: int, device: jax.Device) -> None:
        contacts, constraints = num_envs * task.contacts_per_world, task.constraints_per_world
        super().__init__(task, num_envs=num_envs, device=device, contacts=contacts, constraints=constraints)
        # Too few contacts or constraints stay reported; a solver of few iterations is cut off by intention.
        quiet = OverflowType.ITERATIONS | OverflowType.LS_ITERATIONS
        shown = self.model.opt._impl.warn_overflow & ~int(quiet)
        self.model = self.model.tree_replace({"opt._impl.warn_overflow": shown})

    def step(self, model: mjx.Model, data: mjx.Data, substeps: int = 1) -> mjx.Data:
        return repeat_step(substeps)(model, data)

    def forward(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        return mjx_forward(model, data)

    def kinematics(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        return mjx.kinematics(model, data)
