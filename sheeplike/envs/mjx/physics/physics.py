"""Base class of physics engines, which step the worlds, and MJX-Warp as one of them."""

from collections.abc import Collection, Iterable
from typing import ClassVar

import jax
from mujoco import mjx
from mujoco.mjx.third_party.mujoco_warp import OverflowType

from sheeplike.envs.mjx.engines import PHYSICS
from sheeplike.envs.mjx.patches import mjx_forward, repeat_step
from sheeplike.envs.mjx.randomization.draw import Randomization
from sheeplike.envs.mjx.task import World

INPUTS = (
    *("qpos", "qvel", "act", "ctrl", "qacc_warmstart", "time"),
    *("qfrc_applied", "xfrc_applied", "mocap_pos", "mocap_quat", "eq_active"),
)
"""Fields of ``mjx.Data`` that a physics step reads; all others are computed from these. A reset replaces exactly these,
so nothing of an old episode, not even a NaN, reaches the new one."""

POSES = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "xanchor", "xaxis"),
    *("geom_xpos", "geom_xmat", "site_xpos", "site_xmat"),
)
"""The fields that the kinematics compute from positions."""


class Physics:
    """Steps one world; traced inside the simulator's ``vmap``, so that all worlds are stepped together.

    An engine implements ``step``, ``forward`` and ``kinematics``; everything else has a default. ``contacts`` are
    allocated for all worlds together, ``constraints`` for each. ``model`` is the scene on the device, in MJX's Warp
    layout, which renderers read; the inputs of ``template`` have the model's defaults.
    """

    derives_constants: ClassVar[bool] = False
    """The engine itself derives constants such as ``body_invweight0`` from the fields that vary."""

    def __init__(
        self, task: World, *, num_envs: int, device: jax.Device, contacts: int = 1, constraints: int = 1
    ) -> None:
        self.num_envs = num_envs
        self.model = mjx.put_model(task.model, device=device, impl="warp")
        self.template = mjx.make_data(task.model, device=device, impl="warp", naconmax=contacts, njmax=constraints)

    def lacks(self, randomization: Randomization, read: Iterable[str]) -> str | None:
        """Return what the task needs and this engine lacks, or None; ``read``: leaves of data that the task reads."""
        return None

    def saves(self, leaf: str) -> bool:
        """Return True if a checkpoint needs this leaf of the worlds' state."""
        return True

    def vary(self, fields: Collection[str]) -> None:
        """Receive the paths of the model's fields that differ between worlds, before anything is traced."""

    def step(self, model: mjx.Model, data: mjx.Data, substeps: int = 1) -> mjx.Data:
        """Take physics steps; derived fields are one physics step old, as after ``mj_step``."""
        raise NotImplementedError

    def forward(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        """Compute all fields that follow from the inputs."""
        raise NotImplementedError

    def kinematics(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        """Compute :data:`POSES`."""
        raise NotImplementedError


class WarpPhysics(Physics):
    """Steps worlds in MJX-Warp's kernels, which are sequential on a CPU and need not be told which fields vary."""

    def __init__(self, task: World, *, num_envs: int, device: jax.Device) -> None:
        contacts, constraints = num_envs * task.contacts_per_world, task.constraints_per_world
        super().__init__(task, num_envs=num_envs, device=device, contacts=contacts, constraints=constraints)
        # Too few contacts or constraints stay reported; few iterations of the solver are intended.
        quiet = OverflowType.ITERATIONS | OverflowType.LS_ITERATIONS
        shown = self.model.opt._impl.warn_overflow & ~int(quiet)
        self.model = self.model.tree_replace({"opt._impl.warn_overflow": shown})

    def step(self, model: mjx.Model, data: mjx.Data, substeps: int = 1) -> mjx.Data:
        return repeat_step(substeps)(model, data)

    def forward(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        return mjx_forward(model, data)

    def kinematics(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        return mjx.kinematics(model, data)


def make_physics(name: str, task: World, *, num_envs: int, device: jax.Device) -> Physics:
    """Build the engine of this name; ``auto``: MuJoCo's own on a CPU, and Warp's on a GPU."""
    if name == "auto":
        name = "native" if device.platform == "cpu" else "warp"
    return PHYSICS.load(name, Physics)(task, num_envs=num_envs, device=device)
