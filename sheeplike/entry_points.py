"""What other installed packages add, by name: found in their metadata, and imported only when it is chosen.

A package announces it in its ``pyproject.toml``::

    [project.entry-points."sheeplike.envs"]
    reach = "my_worlds.reach:Reach"

Names come from the metadata of installed packages alone. What a configuration says can choose one of them, and never
name a module.
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

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")  # as it can be typed behind `env=`, and be part of a path


class Plugin(NamedTuple):
    """An entry point of another package."""

    distribution: str  # name and version of the package
    entry: EntryPoint  # not imported yet

    def __str__(self) -> str:
        return f"{self.distribution} ({self.entry.value})"


def plugins(group: str) -> Mapping[str, tuple[Plugin, ...]]:
    """What installed packages announce in ``group``, by name, which several may want; nothing of them is imported."""
    return _plugins(group, tuple(sys.path))


def load(group: str, name: str, what: str, *, built_in: bool = False) -> tuple[Any, Plugin]:
    """Import what ``name`` of :func:`plugins` stands for; also returns whose it is.

    Args:
        what: what errors call it, such as an environment.
        built_in: whether there is one of this name here too.

    Raises:
        ValueError: the name is not that of exactly one, or it cannot be imported; in one line, with the package.
    """
    found = plugins(group).get(name, ())
    if len(found) + built_in != 1:
        owners = " and in ".join(["sheeplike itself"] * built_in + [str(plugin) for plugin in found]) or "no package"
        hint = f"uninstall the other, or rename its entry point of {group}"
        raise ValueError(f"{what} {name!r} is in {owners}: expected one package that has it; {hint}")
    (plugin,) = found
    try:
        return plugin.entry.load(), plugin
    except Exception as error:  # whatever a module does when it is imported
        reason = " ".join(str(error).split())
        raise ValueError(f"{what} {name!r} of {plugin} cannot be imported: {type(error).__name__}: {reason}") from error


@functools.lru_cache(maxsize=8)
def _plugins(group: str, path: tuple[str, ...]) -> Mapping[str, tuple[Plugin, ...]]:
    from importlib import metadata  # takes longer than all else that this package imports

    # A package that is on the path twice is imported from where it comes first.
    packages: dict[str, list[Plugin]] = {}
    for one in metadata.distributions(path=list(path)):
        with suppress(Exception):  # the metadata of a package, which may be none of ours, is broken
            entries = [entry for entry in one.entry_points if entry.group == group and _NAME.fullmatch(entry.name)]
            name = re.sub(r"[-_.]+", "-", one.name).lower()
            # The first of a name hides those behind it, even where it announces nothing.
            packages.setdefault(name, [Plugin(f"{one.name} {one.version}", entry) for entry in entries])
    found: dict[str, list[Plugin]] = {}
    for plugin in itertools.chain(*packages.values()):
        found.setdefault(plugin.entry.name, []).append(plugin)
    return {name: tuple(sorted(found[name], key=str)) for name in sorted(found)}
