"""Agents by name: built-in ones, and those that installed packages add as entry points of ``sheeplike.agents``.

What an agent of another package is written with comes from here: :class:`AgentKind`, :class:`Setup`, :class:`Rule` and
what its optional parts return.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Annotated, get_args, get_origin, get_type_hints

from sheeplike import entry_points
from sheeplike.commands import schema
from sheeplike.commands.errors import CommandError, InvalidValue, as_command_errors, unknown
from sheeplike.commands.kinds.dreamer_v3 import DreamerV3Kind
from sheeplike.commands.kinds.kind import AgentKind, Benchmark, MemoryEstimate, Setup
from sheeplike.commands.kinds.ppo import PPOKind
from sheeplike.commands.schema import Config, Rule, Size, all_keys, keys_of, kind_name

__all__ = [
    "AgentKind",
    "Benchmark",
    "CommandError",
    "Config",
    "InvalidValue",
    "MemoryEstimate",
    "Rule",
    "Setup",
    "find",
    "kind_of",
    "list_agents",
    "origins",
]

GROUP = "sheeplike.agents"
"""The entry points that name an :class:`AgentKind` of another package."""

_BUILT_IN: dict[str, AgentKind] = {kind.name: kind for kind in (DreamerV3Kind(), PPOKind())}
_LOADED: dict[entry_points.Plugin, AgentKind] = {}


def list_agents() -> list[str]:
    """The names of all agents, sorted; nothing is imported."""
    return sorted({*_BUILT_IN, *entry_points.plugins(GROUP)})


def origins(name: str) -> list[str]:
    """The packages that have an agent of this name, such as ``my-agents 0.1.0``; none for a built-in one."""
    others = [plugin.distribution for plugin in entry_points.plugins(GROUP).get(name, ())]
    return ["sheeplike"] * (bool(others) and name in _BUILT_IN) + others


def find(name: object) -> AgentKind | None:
    """The agent of a name, or None. One of another package is imported, and its keys are known from then on.

    Raises:
        CommandError: it cannot be imported, or is no agent, or two packages have one of this name.
    """
    if not isinstance(name, str) or name not in list_agents():
        return None
    if name in _BUILT_IN and name not in entry_points.plugins(GROUP):
        return _BUILT_IN[name]
    with as_command_errors(ValueError):
        found, plugin = entry_points.load(GROUP, name, "agent", built_in=name in _BUILT_IN)
    if plugin not in _LOADED:
        try:
            _LOADED[plugin] = _checked(name, found)
        except Exception as error:  # whatever its own code raises
            raise CommandError(f"agent {name!r} of {plugin}: {error}") from error
    schema.AGENTS[name] = _LOADED[plugin].section
    return _LOADED[plugin]


def kind_of(section: object) -> AgentKind:
    """The kind of the agent that a section of the configuration describes.

    Raises:
        CommandError: there is none.
    """
    kind = find(section.name)
    if kind is None:
        raise unknown("agent", str(section.name), list_agents())
    return kind


def _checked(name: str, found: object) -> AgentKind:
    """What an entry point names, as an agent's kind.

    Raises:
        TypeError: it is none.
    """
    if not (isinstance(found, type) and issubclass(found, AgentKind)):
        raise TypeError(f"expected a subclass of {AgentKind.__module__.rpartition('.')[0]}.AgentKind")
    kind = found()
    if not isinstance(kind.dry_run, tuple | list) or not all(isinstance(line, str) for line in kind.dry_run):
        raise TypeError(f'its dry_run={kind.dry_run!r}: expected overrides, such as ("agent.batch_size=4",)')
    section = getattr(kind, "section", None)
    if not isinstance(section, type) or not is_dataclass(section):
        raise TypeError("expected a dataclass of keys as its section")
    for key, hint in get_type_hints(section, include_extras=True).items():
        if get_origin(hint) is not Annotated or not isinstance(get_args(hint)[1], Rule):
            raise TypeError(f"its key {key!r}: expected Annotated[<type>, Rule(<what it means>)]")
    for item in all_keys(keys_of(section)):
        kinds = get_args(item.type)[:1] if get_origin(item.type) is tuple else (item.type,)
        if not item.section and kinds[0] not in (bool, int, float, str):
            raise TypeError(f"its key {item.path!r} is {item.type}: expected bool, int, float, str or a tuple of one")
        if item.path == "size" and item.type is not Size:  # the group agent/size writes there
            raise TypeError("its key 'size': expected another name; this one is that of the presets in agent/size")
    if kind_name(section) != name:
        raise TypeError(
            f'its section: expected the key name: Annotated[str, Rule("the algorithm", choices=("{name}",))]'
        )
    return kind
