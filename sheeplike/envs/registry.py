"""Environments by name: their builders and options, both checked before anything heavy is imported.

Functions that take the name of an environment raise :class:`InvalidOption` for an unknown name.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import create_model

from sheeplike.entry_points import Registry
from sheeplike.envs.contract import ImageSize, check_vector_env, resolve_image_size
from sheeplike.envs.gym.options import FAMILIES, BaseOptions
from sheeplike.envs.mjx.options import PLAYGROUND_IDS, TASKS, PlaygroundOptions, SimulationOptions, TaskOptions
from sheeplike.options import InvalidOption, Options, build, format_value, nearest

if TYPE_CHECKING:
    import gymnasium
    import torch

BUILT_IN: dict[str, type[Options]] = {**TASKS, **FAMILIES}  # the options of each environment of this package
ENVS = Registry("name", "sheeplike.envs", BUILT_IN, what="environment")
"""Entry points name builders: functions and classes whose keywords are the options. A builder that takes the arguments
:data:`OF_A_VECTOR_ENV` makes a vector environment; any other makes a task for our simulator."""
OF_A_VECTOR_ENV = ("num_envs", "device", "image_size", "action_repeat", "seed")
"""Arguments of a builder that makes a whole vector environment."""
origins = ENVS.origins


def list_envs() -> list[str]:
    """Return the names that ``make`` takes, sorted: built-in ones and those of installed packages."""
    return sorted(ENVS.names())


def task_options(name: str) -> dict[str, object]:
    """Return an environment's options other than ``id``, and their defaults, such as ``{"episode_length": 125}``."""
    return {option: field.default for option, field in options_of(name).model_fields.items() if option != "id"}


def options_of(name: str) -> type[Options]:
    """Return the class of an environment's options, with ``id``; of another package's builder its keywords."""
    builder = _find(name)
    if _is_options(builder):
        return builder
    fields: dict[str, Any] = {}
    for option, p in inspect.signature(builder).parameters.items():
        if option not in OF_A_VECTOR_ENV:
            kind = type(p.default) if isinstance(p.default, bool | int | float | str) else Any
            fields[option] = (str, ...) if p.default is p.empty else (kind, p.default)
    return create_model(name, __base__=Options, **fields)


def simulated(name: str) -> bool:
    """Return True if our own simulator steps and renders the environment."""
    builder = _find(name)
    if _is_options(builder):
        return issubclass(builder, TaskOptions)
    return "num_envs" not in inspect.signature(builder).parameters


def check(
    name: str,
    *,
    id: str | None = None,
    options: Mapping[str, object] | None = None,
    image_size: object = 64,
    randomization: Mapping[str, object] | None = None,
    randomize: bool = True,
    simulation: SimulationOptions = SimulationOptions(),  # noqa: B008, immutable
) -> Options:
    """Check all that can be checked without torch and JAX; return the options, ``id`` included.

    Raises:
        Unusable: a package that the environment needs is missing, or MuJoCo cannot be imported.
        InvalidOption: its ``key`` names the argument or the option that is not valid. For an unknown option ``key`` is
            ``options``, and ``value`` the unknown name.
    """
    given = dict(options or {})
    is_family = "id" in options_of(name).model_fields
    if is_family != (id is not None):
        ids = ", ".join(PLAYGROUND_IDS) if name == "playground" else "such as CartPole-v1"
        raise InvalidOption("id", id, f"which of {name}: {ids}" if is_family else f"null: {name} is not a family")
    known = task_options(name)
    for option in given:
        if option not in known:
            expected = f"one of {name}'s options: {', '.join(known) or 'none'}"
            raise InvalidOption("options", option, expected, nearest(option, known))
    try:
        checked = build(options_of(name), given if id is None else given | {"id": id})
    except InvalidOption as error:
        if error.nearest is None:
            error.nearest = known.get(error.key)
        raise
    if simulated(name):
        simulation.check()
    else:
        for option, field in SimulationOptions.model_fields.items():
            if (value := getattr(simulation, option)) != field.default:
                expected = f"{format_value(field.default)}, since {name} simulates and renders itself"
                raise InvalidOption(option, value, expected, field.default)
        if isinstance(image_size, Mapping):
            raise InvalidOption("image_size", image_size, f"one size, since {name} renders its images itself")
        if randomization:
            raise InvalidOption("randomization", list(randomization), f"nothing: {name} is not simulated here", "none")
        if not randomize:
            raise InvalidOption("randomize", False, f"true: {name} is not simulated here", True)
    if isinstance(checked, BaseOptions | PlaygroundOptions):
        checked.check()
    return checked


def make(
    name: str,
    *,
    num_envs: int,
    device: torch.device | str = "cpu",
    image_size: ImageSize | Mapping[str, ImageSize] = 64,
    action_repeat: int = 1,
    seed: int = 0,
    first_env: int = 0,
    stagger: bool = False,
    randomization: Mapping[str, Mapping[str, Any]] | None = None,
    randomize: bool = True,
    simulation: SimulationOptions = SimulationOptions(),  # noqa: B008, immutable
    **options: Any,
) -> gymnasium.vector.VectorEnv:
    """Build the vector environment ``name``.

    For ``stagger`` to ``simulation`` see :class:`~sheeplike.envs.mjx.vector_env.MjxVectorEnv`. ``options`` are the
    environment's own, with the ``id`` of a family. Those of ``simulation`` may be given one by one as well, such as
    ``cameras=["front"]``.

    ``first_env`` is the number of the first world among those of all ranks: our worlds and those of Gymnasium draw from
    ``seed`` and their numbers, however they are divided.
    """
    builder, id_field = _find(name), options_of(name).model_fields.get("id")
    id = options.pop("id", None if id_field is None or id_field.is_required() else id_field.default)
    of_simulation = SimulationOptions.model_fields.keys() & options.keys() - task_options(name).keys()
    if of_simulation:
        given = {option: options.pop(option) for option in of_simulation}
        simulation = build(type(simulation), dict(simulation) | given)
    varied = {"randomization": randomization, "randomize": randomize, "simulation": simulation}
    checked = check(name, id=id, options=options, image_size=image_size, **varied)
    options |= {} if id is None else {"id": id}
    common = {"num_envs": num_envs, "device": device, "image_size": image_size, "seed": seed}
    if isinstance(checked, BaseOptions):
        make_env, own = checked.recipe(resolve_image_size(image_size))
        vector_env = pkgutil.resolve_name(own.vector_env)
        return vector_env(make_env, own, action_repeat=action_repeat, first_env=first_env, **common)
    if not simulated(name):
        common["seed"] = seed + first_env  # its worlds have no numbers
        env = builder(**common, action_repeat=action_repeat, **options)
        try:
            check_vector_env(env, num_envs=num_envs)
        except ValueError as error:
            raise ValueError(f"environment {name!r} of {', '.join(origins(name))} {error}") from None
        return env
    from sheeplike.envs.mjx.task import repeat_actions
    from sheeplike.envs.mjx.vector_env import MjxVectorEnv

    task = pkgutil.resolve_name(checked.task)(checked) if isinstance(checked, TaskOptions) else builder(**options)
    return MjxVectorEnv(repeat_actions(task, action_repeat), **common, **varied, stagger=stagger, first_env=first_env)


def _find(name: str) -> Any:
    """Return the class of a built-in environment's options, or import and return another package's builder."""
    builder, plugin = ENVS.find(name)
    if plugin is None:
        return builder
    if problem := _problem(builder):
        raise ValueError(f"environment {name!r} of {plugin} {problem}")
    return builder


def _problem(builder: object) -> str:
    """Describe the first fault in a builder's signature; empty if there is none."""
    try:
        parameters = inspect.signature(builder).parameters
    except (TypeError, ValueError):
        return "is no builder: expected a function or a class"
    for option, p in parameters.items():
        if p.kind is not p.KEYWORD_ONLY:
            return f"takes {p}: expected keyword-only options, behind a *"
        if option not in (*OF_A_VECTOR_ENV, "id") and p.default is p.empty:
            return f"takes {option} without a default: expected {option}=<value>"
    common = [option for option in OF_A_VECTOR_ENV if option in parameters]
    if common and len(common) < len(OF_A_VECTOR_ENV):
        missing = [option for option in OF_A_VECTOR_ENV if option not in common]
        return f"takes {', '.join(common)} but not {', '.join(missing)}: expected all, for a vector env, or none"
    return ""


def _is_options(builder: object) -> bool:
    return isinstance(builder, type) and issubclass(builder, Options)
