"""Environments by name.

``make("franka_pick", num_envs=16)`` builds one; ``list_envs()`` names them all. Importing this package imports neither
JAX nor torch: a task's module is loaded when it is made.
"""

import difflib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gymnasium
    import torch

    from sheeplike.envs.mjx.task import Task


def _cartpole_balance(*, episode_length: int = 125) -> "Task":
    from sheeplike.envs.mjx.tasks.cartpole import Cartpole

    return Cartpole(swing_up=False, episode_length=episode_length)


def _cartpole_swingup(*, episode_length: int = 125) -> "Task":
    from sheeplike.envs.mjx.tasks.cartpole import Cartpole

    return Cartpole(swing_up=True, episode_length=episode_length)


def _franka_pick(*, episode_length: int = 200, picked_probability: float = 0.05, box_range: float = 0.05) -> "Task":
    from sheeplike.envs.mjx.tasks.franka_pick import FrankaPick

    return FrankaPick(episode_length=episode_length, picked_probability=picked_probability, box_range=box_range)


_TASKS: dict[str, Callable[..., "Task"]] = {
    "cartpole_balance": _cartpole_balance,
    "cartpole_swingup": _cartpole_swingup,
    "franka_pick": _franka_pick,
}


def list_envs() -> list[str]:
    """The names that ``make`` knows, sorted."""
    return sorted(_TASKS)


def task_options(name: str) -> dict[str, object]:
    """The options of a task and their defaults, such as ``{"episode_length": 125}``.

    Raises:
        ValueError: no such environment.
    """
    return dict(_builder(name).__kwdefaults__ or {})


def make(
    name: str,
    *,
    num_envs: int,
    device: "torch.device | str" = "cpu",
    image_size: int | tuple[int, int] = 64,
    cameras: Sequence[str] | None = None,
    depth: bool = False,
    action_repeat: int = 1,
    seed: int = 0,
    **task_options: object,
) -> "gymnasium.vector.VectorEnv":
    """Builds the vector environment ``name``.

    Args:
        name: one of ``list_envs()``.
        num_envs: worlds.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``; where the worlds live and the observations appear.
        image_size: pixels, ``(H, W)`` or one number.
        cameras: names of cameras, or all of the scene's.
        depth: depth images beside the frames.
        action_repeat: control steps for which an action is held; see :func:`sheeplike.envs.mjx.task.repeat_actions`.
        seed: of the first ``reset()``.
        **task_options: the task's own keywords: ``episode_length`` for every task; ``picked_probability`` and
            ``box_range`` for ``franka_pick``. Any other keyword is refused.

    Raises:
        ValueError: an unknown environment, option or camera, or a value that cannot be served.
    """
    builder = _builder(name)
    known = builder.__kwdefaults__ or {}
    for option in task_options:
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}: expected {_choices(option, sorted(known))}")
    from sheeplike.envs.mjx.task import repeat_actions
    from sheeplike.envs.mjx.vector_env import MjxVectorEnv

    return MjxVectorEnv(
        repeat_actions(builder(**task_options), action_repeat),
        num_envs=num_envs,
        device=device,
        image_size=image_size,
        cameras=cameras,
        depth=depth,
        seed=seed,
    )


def _builder(name: str) -> Callable[..., "Task"]:
    if name not in _TASKS:
        raise ValueError(f"environment {name!r} does not exist: expected {_choices(name, list_envs())}")
    return _TASKS[name]


def _choices(name: object, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
    return f"one of {', '.join(known)}" + (f" (nearest: {nearest[0]})" if nearest else "")
