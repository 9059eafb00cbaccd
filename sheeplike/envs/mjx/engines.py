"""Parts that are chosen by name: physics engines, renderers, and by the same class loggers.

Importing this module imports neither JAX nor MuJoCo.
"""

import pkgutil
from collections.abc import Mapping
from typing import NamedTuple

from sheeplike import entry_points
from sheeplike.options import InvalidOption, nearest


class Registry(NamedTuple):
    """Parts of one kind."""

    option: str  # the option that chooses one
    group: str  # the entry points of other packages
    built_in: Mapping[str, str]  # `<module>:<class>` by name
    automatic: tuple[str, ...] = ()  # values of the option that leave the choice to the simulator

    def names(self) -> list[str]:
        """Return the values that the option takes here, those of installed packages last."""
        return list(dict.fromkeys([*self.automatic, *self.built_in, *entry_points.plugins(self.group)]))

    def check(self, name: str) -> None:
        """Raise ``InvalidOption`` unless a part of this name is installed, without importing it."""
        if name not in (known := self.names()):
            raise InvalidOption(self.option, name, f"one of {', '.join(known)}", nearest(name, known))

    def load(self, name: str, base: type) -> type:
        """Import the part of this name; raise ``ValueError`` if that fails or it is no subclass of ``base``."""
        self.check(name)
        if name in self.built_in and name not in entry_points.plugins(self.group):
            return pkgutil.resolve_name(self.built_in[name])
        found, plugin = entry_points.load(self.group, name, self.option, built_in=name in self.built_in)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ValueError(f"{self.option} {name!r} of {plugin}: expected a subclass of {base.__qualname__}")
        return found


PHYSICS = Registry(
    "physics",
    "sheeplike.physics",
    {
        "warp": "sheeplike.envs.mjx.physics.physics:WarpPhysics",
        "native": "sheeplike.envs.mjx.physics.native:NativePhysics",
    },
    automatic=("auto",),
)
RENDERERS = Registry(
    "renderer",
    "sheeplike.renderers",
    {
        "warp": "sheeplike.envs.mjx.rendering.warp:WarpRenderer",
        "none": "sheeplike.envs.mjx.rendering.renderer:NoRenderer",
    },
)
