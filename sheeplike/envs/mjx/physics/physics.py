"""What every engine is, and which one steps the worlds."""

from collections.abc import Collection
from typing import Literal, Protocol

from mujoco import mjx

PhysicsName = Literal["auto", "warp", "native"]

INPUTS = (
    *("qpos", "qvel", "act", "ctrl", "qacc_warmstart", "time"),
    *("qfrc_applied", "xfrc_applied", "mocap_pos", "mocap_quat", "eq_active"),
)
"""The fields of ``mjx.Data`` that the next physics step reads; every other field is computed from these. A reset
replaces exactly these, so nothing of an old episode, non-finite numbers included, reaches the new one."""

POSES = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "xanchor", "xaxis"),
    *("geom_xpos", "geom_xmat", "site_xpos", "site_xmat"),
)
"""The fields that the kinematics compute from positions."""


class Physics(Protocol):
    """Steps one world; is traced inside the simulator's ``vmap``, so that all worlds are stepped together.

    Attributes:
        model: the scene on the device.
        template: data whose inputs stand at the model's defaults.
    """

    name: str
    model: mjx.Model
    template: mjx.Data

    def vary(self, fields: Collection[str]) -> None:
        """Takes the paths of the model's fields that differ between worlds; called before anything is traced."""

    def step(self, model: mjx.Model, data: mjx.Data, substeps: int = 1) -> mjx.Data:
        """``substeps`` physics steps. As with ``mj_step``, what follows from the state is that of the last one's
        beginning."""

    def forward(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        """Computes all that follows from the state."""

    def kinematics(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        """Computes :data:`POSES`."""
