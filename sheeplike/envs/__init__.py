"""Environments by name.

``make("franka_pick", num_envs=16)`` builds one; ``list_envs()`` names them all. Importing this package imports neither
JAX nor torch: a task's module is loaded when it is made. Installed packages add theirs as entry points of
``sheeplike.envs``, which are imported when they are chosen.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sheeplike import entry_points
from sheeplike.envs.errors import InvalidOption, Unusable
from sheeplike.envs.gym import builders
from sheeplike.envs.mjx import playground_ids
from sheeplike.names import one_of

if TYPE_CHECKING:
    import gymnasium
    import torch

    from sheeplike.envs.mjx.randomization.spec import Lines
    from sheeplike.envs.mjx.rendering import ImageSize
    from sheeplike.envs.mjx.task import SteppingTask, Task

__all__ = ["InvalidOption", "Unusable", "check", "list_envs", "make", "simulated", "takes_id", "task_options"]


def _cartpole_balance(*, episode_length: int = 125) -> "Task":
    from sheeplike.envs.mjx.tasks.cartpole import Cartpole

    return Cartpole(swing_up=False, episode_length=episode_length)


def _cartpole_swingup(*, episode_length: int = 125) -> "Task":
    from sheeplike.envs.mjx.tasks.cartpole import Cartpole

    return Cartpole(swing_up=True, episode_length=episode_length)


def _franka_pick(*, episode_length: int = 200, picked_probability: float = 0.05, box_range: float = 0.05) -> "Task":
    from sheeplike.envs.mjx.tasks.franka_pick import FrankaPick

    return FrankaPick(episode_length=episode_length, picked_probability=picked_probability, box_range=box_range)


def _playground(
    *, id: str, episode_length: int | None = None, overrides: Mapping[str, Any] | None = None
) -> "SteppingTask":
    from sheeplike.envs.mjx.playground import PlaygroundTask

    return PlaygroundTask(id, episode_length=episode_length, overrides=overrides)


_BUILDERS: dict[str, Callable[..., "Task | SteppingTask | gymnasium.vector.VectorEnv"]] = {
    "cartpole_balance": _cartpole_balance,
    "cartpole_swingup": _cartpole_swingup,
    "franka_pick": _franka_pick,
    "gym": builders.gym,
    "minigrid": builders.minigrid,
    "atari": builders.atari,
    "dmc": builders.dmc,
    "playground": _playground,
}
"""What makes each environment, from its options as keywords. One that takes ``num_envs`` makes a whole vector
environment, and also takes ``device``, ``image_size``, ``action_repeat`` and ``seed``; any other makes a task, which
our simulator steps and renders."""

GROUP = "sheeplike.envs"
"""The entry points that name builders of other packages, of the same form."""

RENDERING: Mapping[str, object] = {
    "cameras": None,
    "renderer": "warp",
    "depth": False,
    "segmentation": False,
    "shadows": False,
    "textures": None,
}
"""How our simulator renders, unless it is asked for something else: keywords of ``make`` and their defaults. An
environment that renders itself takes nothing else."""

_CHECKS: dict[str, Callable[..., None]] = {
    name: functools.partial(builders.check, name) for name in ("gym", "minigrid", "atari", "dmc")
} | {"playground": playground_ids.check}
"""What each family can say against an ``id`` and ``options`` before anything heavy is imported."""

_IDS: dict[str, tuple[str, ...]] = {"playground": playground_ids.IDS}
"""Of a family, those that can be used at once; there may be others."""

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


def check(name: str, *, id: str, options: Mapping[str, object]) -> None:
    """Refuse what an environment of a family cannot be, as far as that is known without torch and JAX.

    Args:
        name: of the family.
        id: of its environment.
        options: known to exist, their types checked.

    Raises:
        Unusable: a package that the family needs is missing.
        InvalidOption: there is no such environment, or an option has an impossible value.
        ValueError: no such family.
    """
    _builder(name)
    if name in _CHECKS:
        _CHECKS[name](id=id, options=options)


def list_ids(name: str) -> tuple[str, ...]:
    """The environments of a family that can be used as soon as it is installed; it may have others.

    Raises:
        ValueError: no such environment.
    """
    _builder(name)
    return _IDS.get(name, ())


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
    image_size: "ImageSize | Mapping[str, ImageSize]" = 64,
    cameras: Sequence[str] | None = None,
    renderer: str = "warp",
    depth: bool = False,
    segmentation: bool = False,
    shadows: bool = False,
    textures: bool | None = None,
    action_repeat: int = 1,
    seed: int = 0,
    randomization: "Lines | None" = None,
    nominal: bool = False,
    **options: object,
) -> "gymnasium.vector.VectorEnv":
    """Builds the vector environment ``name``.

    Args:
        name: one of ``list_envs()``.
        num_envs: worlds.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``; where the observations appear, and the worlds live if they
            are simulated by us.
        image_size: pixels, ``(H, W)`` or one number; where we simulate, also a size for each camera, by name.
        cameras: names of cameras, or the task's choice: all of the scene's, for ``playground`` the first.
        renderer: ``"warp"``, ``"madrona"`` where it is installed, or ``"none"``: vectors alone.
        depth, segmentation: such images beside the frames.
        shadows: of lights that cast any.
        textures: of materials that have any; None: as the task says, which for ``playground`` is yes.
        action_repeat: control steps for which an action is held; see :func:`sheeplike.envs.mjx.task.repeat_actions`.
        seed: of the first ``reset()``.
        randomization: what differs between worlds and episodes; see :mod:`sheeplike.envs.mjx.randomization.spec`.
        nominal: with randomization's observations, but in the scene as it was compiled.
        **options: the environment's own keywords: ``id`` of a family; ``episode_length`` for every environment;
            ``picked_probability`` and ``box_range`` for ``franka_pick``; ``overrides`` for ``playground``; see
            :mod:`sheeplike.envs.gym.builders` for the others. Any other keyword is refused.

    Raises:
        Unusable: a package that the environment needs is missing.
        ValueError: an unknown environment, option or camera, or a value that cannot be served.
    """
    builder, known = _builder(name), sorted(_parameters(name).keys() - set(_OF_A_VECTOR_ENV))
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}: expected {one_of(option, known)}")
    if takes_id(name) and not options.get("id", _parameters(name)["id"].default is not inspect.Parameter.empty):
        ids = f", {', '.join(list_ids(name))}" if list_ids(name) else ""
        raise ValueError(f"{name} is a family of environments: expected id=<name of one>{ids}")
    common = {"num_envs": num_envs, "device": device, "image_size": image_size, "seed": seed}
    looks = {"depth": depth, "segmentation": segmentation, "shadows": shadows, "textures": textures}
    rendering = {"cameras": cameras, "renderer": renderer, **looks}
    if not simulated(name):
        for option, value in rendering.items():
            if value != (default := RENDERING[option]):
                raise ValueError(f"{option}={value!r}: {name} renders its frames itself; expected {default}")
        if isinstance(image_size, Mapping):
            raise ValueError(f"image_size={image_size!r}: {name} renders its frames itself; expected one size")
        if randomization:
            raise ValueError(f"randomization={list(randomization)}: {name} is not simulated here; expected none")
        if nominal:
            raise ValueError(f"nominal=True: {name} is not simulated here; expected False")
        made = builder(**common, action_repeat=action_repeat, **options)
        if name not in _BUILDERS:
            _check_made(name, made, num_envs)
        return made
    from sheeplike.envs.mjx.task import repeat_actions
    from sheeplike.envs.mjx.vector_env import MjxVectorEnv

    return MjxVectorEnv(
        repeat_actions(builder(**options), action_repeat),
        **common,
        **rendering,
        randomization=randomization,
        randomize=not nominal,
    )


def _builder(name: str) -> Callable[..., Any]:
    if name not in list_envs():
        raise ValueError(f"environment {name!r} does not exist: expected {one_of(name, list_envs())}")
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
