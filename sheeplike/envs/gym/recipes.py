"""``env=gym`` and the recipes ``minigrid``, ``atari`` and ``dmc``: what makes their environments.

Importing this module imports neither torch nor gymnasium, and no environment.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sheeplike.envs.contract import Unusable
from sheeplike.envs.gym.options import (
    AtariOptions,
    CommonOptions,
    DmcOptions,
    FamilyOptions,
    MinigridOptions,
    find_spec,
)
from sheeplike.options import InvalidOption, nearest

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.envs.registration import EnvSpec


def check(options: CommonOptions) -> None:
    """Check the id before the environment, torch or JAX is imported.

    Raises:
        Unusable: a package is missing.
        InvalidOption: there is no such environment.
    """
    if isinstance(options, FamilyOptions):
        options.resolve()
        return
    module = options.id.rpartition(":")[0]
    if not module:
        find(options.id)
        return
    if find_spec(module.partition(".")[0]) is None:
        raise Unusable(f"id={options.id!r}: there is no module {module}")


def recipe(options: CommonOptions, image_size: tuple[int, int]) -> tuple[Callable[..., gymnasium.Env], CommonOptions]:
    """What a :class:`~sheeplike.envs.gym.vector_env.GymVectorEnv` is made from.

    Returns:
        what makes one environment, and the options with what the family decides.

    Raises:
        Unusable: the environment cannot be used here.
        InvalidOption: there is no such environment.
    """
    from sheeplike.envs.gym.world import choose_backend

    options = options.resolve()
    if isinstance(options, MinigridOptions):
        from sheeplike.envs.gym.minigrid import PartialView

        view = functools.partial(PartialView, tile=options.tile_size, image_size=image_size)
        return functools.partial(_make, find(options.id), {}, view), options
    if isinstance(options, AtariOptions):
        from sheeplike.envs.gym.atari import FRAMES, Protocol

        arguments = {
            "frameskip": 1,
            "repeat_action_probability": 0.25 if options.sticky_actions else 0.0,
            "full_action_space": options.all_actions,
            "max_num_frames_per_episode": None,  # the world counts
        }
        protocol = functools.partial(Protocol, noops=options.noops, terminal_on_life_loss=options.terminal_on_life_loss)
        make_env = functools.partial(_make, find(options.id), arguments, protocol)
        return make_env, options.replace(episode_length=options.episode_length or FRAMES)
    if isinstance(options, DmcOptions):
        choose_backend(required=options.frames == "render")
        from sheeplike.envs.gym.dmc import ControlSuite

        own = {"camera": options.camera, "shadow_map": options.shadow_map}
        return functools.partial(ControlSuite, options.id, image_size=image_size, **own), options
    choose_backend(required=False)
    spec = find(options.id)
    make_env = functools.partial(_make, spec, dict(options.arguments or {}), None)
    return make_env, options.replace(episode_length=options.episode_length or spec.max_episode_steps)


def find(id: str) -> EnvSpec:
    """The registered environment ``Name-v1`` or ``namespace/Name-v1``.

    Without a version it is the newest one; a ``module:`` in front is imported first.

    Raises:
        Unusable: the module cannot be imported.
        InvalidOption: there is no such environment.
    """
    import gymnasium
    from gymnasium.envs.registration import find_highest_version, get_env_id, parse_env_id

    module, _, name = id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Unusable(f"id={id!r}: the module {module} cannot be imported: {error}") from error
    try:
        namespace, short, version = parse_env_id(name)
        if version is None and (version := find_highest_version(namespace, short)) is not None:
            name = get_env_id(namespace, short, version)
    except gymnasium.error.Error:
        pass  # it is not even a name
    if name not in gymnasium.registry:
        elsewhere = "" if module else "; one of another package is <module>:<id>, whose import registers it"
        near = nearest(name, gymnasium.registry)
        prefix = f"{module}:" if module else ""
        raise InvalidOption("id", id, f"a registered environment{elsewhere}", near and f"{prefix}{near}")
    return gymnasium.registry[name]


def _make(
    spec: EnvSpec, arguments: Mapping[str, Any], wrap: Callable[..., gymnasium.Env] | None, render_mode: str | None
) -> gymnasium.Env:
    """Makes a registered environment; ``spec`` goes along to processes of their own, where it may not be registered."""
    import gymnasium

    # -1: no wrapper that truncates; the world counts.
    env = gymnasium.make(spec, render_mode=render_mode, max_episode_steps=-1, disable_env_checker=True, **arguments)
    return env if wrap is None else wrap(env)
