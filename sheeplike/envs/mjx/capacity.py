"""Whether a task allocates enough contacts and constraints for its scene."""

import mujoco

from sheeplike.envs.mjx.task import SteppingTask, Task


def check_capacity(task: Task | SteppingTask) -> None:
    """Compares the contacts and constraints allocated with what the scene makes in its default pose and keyframes.

    The worst moment of an episode cannot be known beforehand; Warp drops what exceeds the allocation and prints a
    warning, so a task should allocate well above this floor.

    Raises:
        ValueError: fewer allocated than a known pose needs.
    """
    contacts, constraints = least_capacity(task.model)
    needs = {"contacts_per_world": contacts, "constraints_per_world": constraints}
    for name, needed in needs.items():
        allocated = getattr(task, name)
        if allocated < needed:
            raise ValueError(f"{task.name}: {name}={allocated} is too few: expected at least {needed} for this scene")


def least_capacity(model: mujoco.MjModel) -> tuple[int, int]:
    """Contacts and constraints of a scene in its default pose and keyframes, at least one of each."""
    data = mujoco.MjData(model)
    contacts = constraints = 1
    for key in range(-1, model.nkey):
        if key >= 0:
            mujoco.mj_resetDataKeyframe(model, data, key)
        mujoco.mj_forward(model, data)
        contacts, constraints = max(contacts, data.ncon), max(constraints, data.nefc)
    return contacts, constraints
