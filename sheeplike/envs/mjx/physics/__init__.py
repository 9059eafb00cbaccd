"""Engines that step the worlds: MJX-Warp on a GPU, MuJoCo's own on a CPU."""

import jax

from sheeplike.envs.mjx.physics.native import NativePhysics
from sheeplike.envs.mjx.physics.physics import Physics, PhysicsName
from sheeplike.envs.mjx.physics.warp import WarpPhysics
from sheeplike.envs.mjx.task import SteppingTask, Task
from sheeplike.host import cpu_cores


def make_physics(name: PhysicsName, task: Task | SteppingTask, *, num_envs: int, device: jax.Device) -> Physics:
    """The engine of this name; ``auto``: MuJoCo's own on a CPU.

    Raises:
        ValueError: MuJoCo's own engine on a GPU.
    """
    on_cpu = device.platform == "cpu"
    if name == "native" and not on_cpu:
        raise ValueError("physics='native' steps worlds that live on a CPU: expected 'warp' on a GPU")
    if name == "native" or (name == "auto" and on_cpu):
        return NativePhysics(task.model, num_envs=num_envs, device=device, threads=cpu_cores())
    contacts, constraints = num_envs * task.contacts_per_world, task.constraints_per_world
    return WarpPhysics(task.model, device=device, contacts=contacts, constraints=constraints)
