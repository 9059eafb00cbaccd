"""Plugins of other installed packages: found in their metadata, and imported only when they are chosen.

A package announces it in its ``pyproject.toml``::

    [project.entry-points."sheeplike.envs"]
    reach = "my_worlds.reach:Reach"

A configuration can choose such a name, but never a module.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")  # users type it behind `env=`, and it becomes part of a path


class Plugin(NamedTuple):
    """An entry point of another package."""

    distribution: str  # name and version of the package
    entry: EntryPoint

    def __str__(self) -> str:
        return f"{self.distribution} ({self.entry.value})"


def plugins(group: str) -> Mapping[str, tuple[Plugin, ...]]:
    """Return the plugins of ``group`` by name, without importing any; several packages may use one name."""
    return _plugins(group, tuple(sys.path))


def load(group: str, name: str, what: str, *, built_in: bool = False) -> tuple[Any, Plugin]:
    """Import the plugin ``name`` and return it with its origin; errors call it ``what``, such as "environment".

    Raises ``ValueError``, in one line, if it cannot be imported, or if not exactly one package has the name;
    ``built_in``: this package has it too.
    """
    found = plugins(group).get(name, ())
    if len(found) + built_in != 1:
        owners = " and in ".join(["sheeplike itself"] * built_in + [str(plugin) for plugin in found]) or "no package"
        hint = f"uninstall the other, or rename its entry point of {group}"
        raise ValueError(f"{what} {name!r} is in {owners}: expected one package that has it; {hint}")
    (plugin,) = found
    try:
        return plugin.entry.load(), plugin
    except Exception as error:  # any error of the module
        reason = " ".join(str(error).split())
        raise ValueError(f"{what} {name!r} of {plugin} cannot be imported: {type(error).__name__}: {reason}") from error


@functools.lru_cache(maxsize=8)
def _plugins(group: str, path: tuple[str, ...]) -> Mapping[str, tuple[Plugin, ...]]:
    from importlib import metadata  # this import is slower than all others of this package

    packages: dict[str, list[Plugin]] = {}
    for one in metadata.distributions(path=list(path)):
        with suppress(Exception):  # the metadata of an unrelated package may be broken
            entries = [entry for entry in one.entry_points if entry.group == group and _NAME.fullmatch(entry.name)]
            name = re.sub(r"[-_.]+", "-", one.name).lower()
            # Of a package that is on the path twice only the first copy is imported, so only its entry points count.
            packages.setdefault(name, [Plugin(f"{one.name} {one.version}", entry) for entry in entries])
    found: dict[str, list[Plugin]] = {}
    for plugin in itertools.chain(*packages.values()):
        found.setdefault(plugin.entry.name, []).append(plugin)
    return {name: tuple(sorted(found[name], key=str)) for name in sorted(found)}
