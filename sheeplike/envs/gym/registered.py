"""Environments of Gymnasium's registry, by id."""

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id

from sheeplike.envs.errors import InvalidOption, Unusable
from sheeplike.envs.gym.world import MakeEnv
from sheeplike.names import nearest


def find(id: str) -> EnvSpec:
    """What is registered as ``Name-v1`` or ``namespace/Name-v1``.

    Without a version the newest one is meant; a ``module:`` in front is imported first.

    Raises:
        Unusable: the module cannot be imported.
        InvalidOption: there is no such environment.
    """
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
        known = list(gymnasium.registry)
        elsewhere = "" if module else "; one of another package is <module>:<id>, whose import registers it"
        near = nearest(name, known)
        prefix = f"{module}:" if module else ""
        raise InvalidOption("id", id, f"a registered environment{elsewhere}", near and f"{prefix}{near}")
    return gymnasium.registry[name]


def maker(spec: EnvSpec, arguments: Mapping[str, Any] | None = None) -> MakeEnv:
    """Makes environments of ``spec``, without Gymnasium's own time limit and checks.

    The specification goes along to processes of their own, where nothing may have registered it.

    Args:
        arguments: further ones of ``gymnasium.make``.
    """
    return functools.partial(_make, spec, dict(arguments or {}))


def _make(spec: EnvSpec, arguments: Mapping[str, Any], render_mode: str | None) -> gymnasium.Env:
    # -1: no wrapper that truncates; the world counts.
    return gymnasium.make(spec, render_mode=render_mode, max_episode_steps=-1, disable_env_checker=True, **arguments)
