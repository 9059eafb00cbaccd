"""Environments by name.

``make("franka_pick", num_envs=16)`` builds one; ``list_envs()`` names them all. Importing this package imports neither
JAX nor torch: a task's module is loaded when it is made. Installed packages add theirs as entry points of
``sheeplike.envs``, which are imported when they are chosen.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sheeplike import entry_points

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


_BUILDERS: dict[str, Callable[..., "Task | gymnasium.vector.VectorEnv"]] = {
    "cartpole_balance": _cartpole_balance,
    "cartpole_swingup": _cartpole_swingup,
    "franka_pick": _franka_pick,
}
"""What makes each environment, from its options as keywords. One that takes ``num_envs`` makes a whole vector
environment, and also takes ``device``, ``image_size``, ``action_repeat`` and ``seed``; any other makes a task, which
our simulator steps and renders."""

GROUP = "sheeplike.envs"
"""The entry points that name builders of other packages, of the same form."""

_OF_A_VECTOR_ENV = ("num_envs", "device", "image_size", "action_repeat", "seed")


def list_envs() -> list[str]:
    """The names that ``make`` knows, sorted: built-in ones and those of installed packages."""
    return sorted({*_BUILDERS, *entry_points.plugins(GROUP)})


def origins(name: str) -> list[str]:
    """The packages that have an environment of this name, such as ``my-worlds 0.1.0``; none for a built-in one."""
    others = [plugin.distribution for plugin in entry_points.plugins(GROUP).get(name, ())]
    return ["sheeplike"] * (bool(others) and name in _BUILDERS) + others


def task_options(name: str) -> dict[str, object]:
    """The options of an environment and their defaults, such as ``{"episode_length": 125}``; its ``id`` apart.

    Raises:
        ValueError: no such environment.
    """
    return {option: p.default for option, p in _parameters(name).items() if option not in ("id", *_OF_A_VECTOR_ENV)}


def takes_id(name: str) -> bool:
    """Whether an environment is a family of which ``id`` names one.

    Raises:
        ValueError: no such environment.
    """
    return "id" in _parameters(name)


def simulated(name: str) -> bool:
    """Whether our own simulator steps and renders an environment: cameras can be chosen, for example.

    Raises:
        ValueError: no such environment.
    """
    return "num_envs" not in _parameters(name)


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
    **options: object,
) -> "gymnasium.vector.VectorEnv":
    """Builds the vector environment ``name``.

    Args:
        name: one of ``list_envs()``.
        num_envs: worlds.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``; where the observations appear, and the worlds live if they
            are simulated by us.
        image_size: pixels, ``(H, W)`` or one number.
        cameras: names of cameras, or all of the scene's.
        depth: depth images beside the frames.
        action_repeat: control steps for which an action is held; see :func:`sheeplike.envs.mjx.task.repeat_actions`.
        seed: of the first ``reset()``.
        **options: the environment's own keywords: ``episode_length`` for every task; ``picked_probability`` and
            ``box_range`` for ``franka_pick``. Any other keyword is refused.

    Raises:
        ValueError: an unknown environment, option or camera, or a value that cannot be served.
    """
    builder, known = _builder(name), sorted(_parameters(name).keys() - set(_OF_A_VECTOR_ENV))
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}: expected {_choices(option, known)}")
    if takes_id(name) and not options.get("id"):
        raise ValueError(f"{name} is a family of environments: expected id=<name of one>")
    common = {"num_envs": num_envs, "device": device, "image_size": image_size, "seed": seed}
    rendering = {"cameras": (cameras, None), "depth": (depth, False)}
    if not simulated(name):
        for option, (value, default) in rendering.items():
            if value != default:
                raise ValueError(f"{option}={value!r}: {name} renders its frames itself; expected {default}")
        made = builder(**common, action_repeat=action_repeat, **options)
        if name not in _BUILDERS:
            _check_made(name, made, num_envs)
        return made
    from sheeplike.envs.mjx.task import repeat_actions
    from sheeplike.envs.mjx.vector_env import MjxVectorEnv

    return MjxVectorEnv(
        repeat_actions(builder(**options), action_repeat),
        **common,
        **{option: value for option, (value, _) in rendering.items()},
    )


def _builder(name: str) -> Callable[..., Any]:
    if name not in list_envs():
        raise ValueError(f"environment {name!r} does not exist: expected {_choices(name, list_envs())}")
    if name in _BUILDERS and name not in entry_points.plugins(GROUP):
        return _BUILDERS[name]
    builder, plugin = entry_points.load(GROUP, name, "environment", built_in=name in _BUILDERS)
    if problem := _problem(builder):
        raise ValueError(f"environment {name!r} of {plugin} {problem}")
    return builder


def _problem(builder: object) -> str:
    """What is wrong with the form of a builder, or nothing."""
    try:
        parameters = inspect.signature(builder).parameters
    except (TypeError, ValueError):
        return "is no builder: expected a function or a class"
    for option, p in parameters.items():
        if p.kind is not p.KEYWORD_ONLY:
            return f"takes {p}: expected keyword-only options, behind a *"
        if option not in (*_OF_A_VECTOR_ENV, "id") and p.default is p.empty:
            return f"takes {option} without a default: expected {option}=<value>"
    common = [option for option in _OF_A_VECTOR_ENV if option in parameters]
    if common and len(common) < len(_OF_A_VECTOR_ENV):
        missing = [option for option in _OF_A_VECTOR_ENV if option not in common]
        return f"takes {', '.join(common)} but not {', '.join(missing)}: expected all, for a vector env, or none"
    return ""


def _check_made(name: str, made: "gymnasium.vector.VectorEnv", num_envs: int) -> None:
    from sheeplike.envs.contract import check

    try:
        check(made, num_envs=num_envs)
    except ValueError as error:
        raise ValueError(f"environment {name!r} of {', '.join(origins(name))} {error}") from None


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_builder(name)).parameters


def _choices(name: object, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
    return f"one of {', '.join(known)}" + (f" (nearest: {nearest[0]})" if nearest else "")
