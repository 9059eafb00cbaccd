"""Parts by name: this package's own, and plugins of other installed packages, which are imported only when chosen.

A package announces a plugin in its ``pyproject.toml``::

    [project.entry-points."sheeplike.envs"]
    reach = "my_worlds.reach:Reach"

A configuration can choose such a name, but never a module.
"""

from __future__ import annotations

import functools
import itertools
import pkgutil
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from sheeplike.options import InvalidOption, nearest

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


class Registry(NamedTuple):
    """Parts of one kind by name, each from one package."""

    option: str  # the option that chooses one
    group: str  # the entry points of other packages
    built_in: Mapping[str, Any]
    what: str  # the kind, in errors
    automatic: tuple[str, ...] = ()  # values of the option that leave the choice to the program

    def names(self) -> list[str]:
        """Return the values that the option takes here, those of installed packages last."""
        return list(dict.fromkeys([*self.automatic, *self.built_in, *plugins(self.group)]))

    def origins(self, name: str) -> list[str]:
        """Return the packages that have a part, such as ``my-worlds 0.1.0``; none if it is built in."""
        others = [plugin.distribution for plugin in plugins(self.group).get(name, ())]
        return ["sheeplike"] * (name in self.built_in) + others if others else []

    def check(self, name: object) -> None:
        """Raise ``InvalidOption`` unless a part of this name is installed, without importing it."""
        if name not in (known := self.names()):
            raise InvalidOption(self.option, name, f"one of {', '.join(known)}", nearest(name, known))

    def find(self, name: str) -> tuple[Any, Plugin | None]:
        """Return a part, and the plugin that was imported for it, if it is not built in.

        Raises ``ValueError``, in one line, if the plugin cannot be imported, or if several packages have the name.
        """
        self.check(name)
        found = plugins(self.group).get(name, ())
        if not found:
            return self.built_in[name], None
        if len(owners := [*["sheeplike itself"] * (name in self.built_in), *map(str, found)]) > 1:
            hint = f"expected one package that has it; uninstall the other, or rename its entry point of {self.group}"
            raise ValueError(f"{self.what} {name!r} is in {' and in '.join(owners)}: {hint}")
        (plugin,) = found
        try:
            return plugin.entry.load(), plugin
        except Exception as error:  # any error of the module
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(f"{self.what} {name!r} of {plugin} cannot be imported: {reason}") from error

    def load(self, name: str, base: type) -> type:
        """Import a class, built in as ``<module>:<class>``; raise ``ValueError`` if it is no subclass of ``base``."""
        found, plugin = self.find(name)
        if plugin is None:
            return pkgutil.resolve_name(found)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ValueError(f"{self.what} {name!r} of {plugin}: expected a subclass of {base.__qualname__}")
        return found


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
