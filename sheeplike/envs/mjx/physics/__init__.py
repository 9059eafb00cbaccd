"""Engines that step the worlds: MJX-Warp on a GPU, MuJoCo's own on a CPU."""

from typing import get_args

import jax

from sheeplike.envs.mjx.physics.native import NativePhysics
from sheeplike.envs.mjx.physics.physics import Physics, PhysicsName
from sheeplike.envs.mjx.physics.warp import WarpPhysics
from sheeplike.envs.mjx.task import SteppingTask, Task
from sheeplike.host import cpu_cores
from sheeplike.options import one_of


def make_physics(name: PhysicsName, task: Task | SteppingTask, *, num_envs: int, device: jax.Device) -> Physics:
    """The engine of this name; ``auto``: MuJoCo's own on a CPU.

    Raises:
        ValueError: there is no such engine, or MuJoCo's own on a GPU.
    """
    if name not in get_args(PhysicsName):
        raise ValueError(f"physics={name!r}: expected {one_of(name, get_args(PhysicsName))}")
    on_cpu = device.platform == "cpu"
    if name == "native" and not on_cpu:
        raise ValueError("physics='native' steps worlds that live on a CPU: expected 'warp' on a GPU")
    if name == "native" or (name == "auto" and on_cpu):
        return NativePhysics(task.model, num_envs=num_envs, device=device, threads=cpu_cores())
    contacts, constraints = num_envs * task.contacts_per_world, task.constraints_per_world
    return WarpPhysics(task.model, device=device, contacts=contacts, constraints=constraints)
