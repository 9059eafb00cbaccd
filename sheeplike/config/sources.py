"""Directories of configs: that of the package, and those of ``SHEEPLIKE_SEARCH_PATH`` and ``--config-dir``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from sheeplike import envs
from sheeplike.agents import registry
from sheeplike.agents.registry import AGENTS
from sheeplike.config.errors import expand
from sheeplike.config.schema import LOGGERS
from sheeplike.envs.gym.options import find_module
from sheeplike.envs.mjx.engines import PHYSICS, RENDERERS
from sheeplike.envs.registry import ENVS
from sheeplike.options import CommandError

GROUPS = ("exp", "env", "randomization", "agent", "profile")
PACKAGE = Path(__file__).resolve().parents[1]
# A wheel carries configs/ inside the package; in a clone and an editable install it lies beside it.
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"


class Sources:
    """Directories of configs, the package's own first; refuses a file that would hide behind one of the same name."""

    def __init__(self, config_dirs: Iterable[str] = ()) -> None:
        listed = os.environ.get("SHEEPLIKE_SEARCH_PATH", "").split(";")
        given = [("SHEEPLIKE_SEARCH_PATH", entry.strip()) for entry in listed if entry.strip()]
        given += [("--config-dir", entry) for entry in config_dirs]
        self.directories = [CONFIGS]
        for origin, entry in given:
            directory = _directory(origin, entry)
            if directory not in self.directories:
                self._refuse_hidden(directory)
                self.directories.append(directory)

    def choices(self, group: str) -> list[str]:
        """Return the names in a group; ``auto`` chooses a profile and is no file."""
        names = sorted({*self._files(group), *self.without_file(group)})
        return ["auto", *names] if group == "profile" else names

    def without_file(self, group: str) -> list[str]:
        """Return environments and agents without a config file; an agent's name is also a recipe."""
        registered = {"env": envs.list_envs, "agent": registry.list_agents, "exp": registry.list_agents}
        return [name for name in registered.get(group, list)() if name not in self._files(group)]

    def describe(self) -> str:
        """Return a text of all choices, and of the packages that add environments, agents, engines or loggers."""
        lines = ["choices, as in exp=dreamer_v3"]
        lines += [f"  {group:<13} {', '.join(self.choices(group))}" for group in GROUPS]
        kinds = {"env": ENVS, "agent": AGENTS, "env.physics": PHYSICS, "env.renderer": RENDERERS, "logger": LOGGERS}
        others = []
        for choice, name in ((choice, name) for choice, kind in kinds.items() for name in kind.names()):
            if origins := kinds[choice].origins(name):
                refused = ": refused, since one package must have it" if len(origins) > 1 else ""
                others.append(f"  {f'{choice}={name}':<24} {', '.join(origins)}{refused}")
        return "\n".join([*lines, *(["", "of other packages", *others] if others else [])])

    def find(self, config_path: str) -> Path | None:
        """Return the file of ``<group>/<name>``, or None."""
        files = (directory / f"{config_path}.yaml" for directory in self.directories)
        return next((file for file in files if file.is_file()), None)

    def _files(self, group: str) -> set[str]:
        return {path.stem for directory in self.directories for path in (directory / group).glob("*.yaml")}

    def _refuse_hidden(self, directory: Path) -> None:
        for group in GROUPS:
            for path in sorted((directory / group).glob("*.yaml")):
                built_in = [options.model_fields["name"].default for options in registry.built_in()]
                if path.stem in self._files(group) or (group == "agent" and path.stem in built_in):
                    raise CommandError(
                        f"{path}: {group}={path.stem} exists already: expected another name; "
                        f"nearest: {path.stem}_2.yaml"
                    )


def _directory(origin: str, entry: str) -> Path:
    """Return the directory of an entry: a plain path, ``file://path`` or ``pkg://package.name``."""
    if entry.startswith("pkg://"):
        package, *below = entry.removeprefix("pkg://").strip("/").replace("/", ".").split(".")
        spec = find_module(package)
        places = [Path(place, *below) for place in (spec.submodule_search_locations or ())] if spec else []
        directory = next((place for place in places if place.is_dir()), None)
        if directory is None:
            raise CommandError(f"{origin} {entry}: expected a package that can be imported")
        return directory.resolve()
    directory = expand(entry.removeprefix("file://")).resolve()
    if not directory.is_dir():
        raise CommandError(
            f"{origin} {entry}: expected a directory of configs, with folders such as env/ and exp/; "
            f"{directory} does not exist"
        )
    return directory
