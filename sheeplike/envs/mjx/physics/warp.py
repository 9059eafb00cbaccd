"""MJX-Warp: all worlds in kernels of the accelerator. On a CPU its kernels are sequential."""

import functools
from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import jax
import mujoco
from mujoco import mjx
from mujoco.mjx.third_party.mujoco_warp import OverflowType
from mujoco.mjx.warp import ffi, forward

_forward = mjx.forward


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
        return _steps(substeps)(model, data)

    def forward(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        return _forward(model, data)

    def kinematics(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        return mjx.kinematics(model, data)


@functools.cache
def _steps(number: int) -> Callable[[mjx.Model, mjx.Data], mjx.Data]:
    """``mjx.step`` so many times over, in a single call from XLA to Warp.

    Each such call reads the addresses of some 560 arrays in Python, and on a GPU looks for the CUDA graph that was
    captured with them: a scan would do so once for each step.
    """
    once = forward._step_shim

    @functools.wraps(once)  # Warp reads from its signature what XLA hands over
    def repeated(*arguments: Any) -> None:
        for _ in range(number):  # each where the one before has left its results: what a step changes, it changes there
            once(*arguments)

    # As MJX declares its own.
    @jax.custom_batching.custom_vmap
    @ffi.marshal_jax_warp_callable
    def step(model: mjx.Model, data: mjx.Data) -> mjx.Data:
        with mock.patch.object(forward, "_step_shim", repeated):
            return forward._step_jax_impl(model, data)

    @step.def_vmap
    @ffi.marshal_custom_vmap
    def step_all(_: int, batched: list[Any], model: mjx.Model, data: mjx.Data) -> tuple[mjx.Data, Any]:
        return step(model, data), batched[1]

    return step
