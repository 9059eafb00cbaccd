"""Options of Gymnasium environments, each written once, and the ids of each family.

Importing this module imports no environment: ids are read from the files of the family's package. Where a package looks
otherwise than expected no id is known here, and whoever makes the environment finds out.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from sheeplike.envs.contract import Unusable
from sheeplike.options import InvalidOption, nearest

SEVERAL_PLAYERS = frozenset({"combat", "joust", "maze_craze", "warlords"})
"""Atari games without a mode for one player, which ale_py does not register."""
FROM_A_TABLE = "MiniGrid-WFC-"
"""How the ids begin that only MiniGrid itself can list."""


def option(default: Any, *, choices: tuple[str, ...] = (), least: int | None = None) -> Any:
    """An option that is one of ``choices``, or a whole number of at least ``least``, or null where that is default."""
    return field(default=default, metadata={"choices": choices, "least": least})


def fixed(value: Any) -> Any:
    """An option that a family does not leave to the user."""
    return field(default=value, init=False)


@dataclass(frozen=True, kw_only=True)
class GymOptions:
    """Options of ``env=gym``; the other families fix some of them and add their own.

    Attributes:
        id: of a registered environment, also ``<module>:<id>``.
        episode_length: steps of the environment after which an episode is truncated; None: its own limit.
        frames: where images come from; ``auto``: the first that there is.
        resize: ``pad`` keeps pixels as they are, or enlarges them by a whole factor, in the middle of black; ``area``
            (mean of the pixels covered), ``bilinear`` (a triangle as wide as a pixel of the result) and ``nearest``
            stretch to the size; ``auto`` pads what fits and averages what does not.
        grayscale: one channel instead of three.
        frame_stack: newest frames in one image, oldest first in its channels.
        pool_frames: of the last two frames of a held action take, pixel by pixel, the brighter: screens flicker.
        clip_rewards: a reward is its sign.
        vectorization: ``sync``, one world after another, or ``async``, each in a process of its own.
        max_restarts: how often in a row a world, or a process, may fail before the run ends.
        arguments: further ones of ``gymnasium.make``.

    Raises:
        InvalidOption: a value that no environment can serve.
    """

    id: str
    episode_length: int | None = option(None, least=1)
    frames: str = option("auto", choices=("auto", "observation", "render", "none"))
    resize: str = option("auto", choices=("auto", "pad", "area", "bilinear", "nearest"))
    grayscale: bool = False
    frame_stack: int = option(1, least=1)
    pool_frames: bool = fixed(False)
    clip_rewards: bool = False
    vectorization: str = option("sync", choices=("sync", "async"))
    max_restarts: int = option(10, least=0)
    arguments: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value, choices, least = getattr(self, one.name), one.metadata.get("choices"), one.metadata.get("least")
            if choices and value not in choices:
                raise InvalidOption(one.name, value, f"one of {', '.join(choices)}", nearest(value, choices))
            if least is None or (value is None and one.default is None):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                expected = f"a whole number of at least {least}{', or null' * (one.default is None)}"
                raise InvalidOption(one.name, value, expected, least if isinstance(value, int) else None)
        given = {} if self.arguments is None else self.arguments
        if not (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
            expected = "names and values for gymnasium.make, such as {continuous: true}"
            raise InvalidOption("arguments", self.arguments, expected)


@dataclass(frozen=True, kw_only=True)
class FamilyOptions(GymOptions):
    """Options of the environments of one package.

    Class attributes:
        family, package: names of both.
        kind: of environments, in words.
        any_spelling: of an id will do: ``pong``, ``walker_walk``.
    """

    resize: str = fixed("auto")
    arguments: Mapping[str, Any] | None = fixed(None)

    family: ClassVar[str]
    package: ClassVar[str]
    kind: ClassVar[str]
    any_spelling: ClassVar[bool] = True

    @classmethod
    def find_package(cls) -> Path:
        """The directory of the package.

        Raises:
            Unusable: it is not installed.
        """
        try:
            spec = importlib.util.find_spec(cls.package)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise Unusable(f"env={cls.family} needs {cls.package}: pip install 'sheeplike[{cls.family}]'")
        return Path(spec.submodule_search_locations[0])

    @classmethod
    def list_ids(cls) -> tuple[str, ...]:
        """The ids that the files of the package tell.

        Raises:
            Unusable: the package is not installed.
        """
        return _read_ids(cls.family, cls.find_package())

    def resolve(self) -> Self:
        """These options, with the id as the package has it.

        Raises:
            Unusable: the package is not installed.
            InvalidOption: it has no such environment.
        """
        known, key = self.list_ids(), _key(self.id)
        if not known or self.id in known or self.id.startswith(FROM_A_TABLE):
            return self
        by_key = {_key(id): id for id in known}
        if self.any_spelling and key in by_key:
            return replace(self, id=by_key[key])
        raise InvalidOption("id", self.id, self.kind, by_key[nearest(key, by_key)])


@dataclass(frozen=True, kw_only=True)
class MinigridOptions(FamilyOptions):
    """Options of ``env=minigrid``.

    Attributes:
        tile_size: pixels a side of a cell; None: the largest even number with which the view fits.
    """

    family, package, kind = "minigrid", "minigrid", "one of MiniGrid's environments"
    any_spelling = False
    id: str = "MiniGrid-Empty-5x5-v0"
    frames: str = fixed("observation")
    resize: str = fixed("pad")
    grayscale: bool = fixed(False)
    clip_rewards: bool = fixed(False)
    tile_size: int | None = option(None, least=2)


@dataclass(frozen=True, kw_only=True)
class AtariOptions(FamilyOptions):
    """Options of ``env=atari``; the defaults are those of Atari 100k, and ``episode_length`` counts frames.

    Attributes:
        sticky_actions: the game repeats the last action with a probability of 0.25.
        all_actions: all 18, whether the game uses them or not.
        noops: frames of doing nothing at the start of an episode, at most.
        terminal_on_life_loss: an episode ends with a life.
    """

    family, package, kind = "atari", "ale_py", "one of ale_py's games"
    id: str = "ALE/Pong-v5"
    frames: str = fixed("observation")
    resize: str = fixed("bilinear")
    pool_frames: bool = fixed(True)
    sticky_actions: bool = False
    all_actions: bool = False
    noops: int = option(30, least=0)
    terminal_on_life_loss: bool = False


@dataclass(frozen=True, kw_only=True)
class DmcOptions(FamilyOptions):
    """Options of ``env=dmc``.

    Attributes:
        camera: number of the camera; None: the one to learn from.
        shadow_map: pixels a side of the map from which shadows are drawn, which takes most of the time where there is
            no GPU; 0: no shadows; None: the task's own.
    """

    family, package, kind = "dmc", "dm_control", "a task of the suite"
    id: str = "walker-walk"
    frames: str = option("render", choices=("render", "none"))
    grayscale: bool = fixed(False)
    clip_rewards: bool = fixed(False)
    camera: int | None = option(None, least=0)
    shadow_map: int | None = option(None, least=0)


@functools.cache
def _read_ids(family: str, package: Path) -> tuple[str, ...]:
    if family == "atari":
        games = sorted(path.stem for path in (package / "roms").glob("*.bin") if path.stem not in SEVERAL_PLAYERS)
        return tuple(f"ALE/{game.title().replace('_', '')}-v5" for game in games)
    found: list[str] = []
    files = [package / "__init__.py"] if family == "minigrid" else sorted((package / "suite").glob("*.py"))
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError:
            continue
        if family == "minigrid":
            found += re.findall(r"""register\(\s*(?:id=)?["']((?:MiniGrid|BabyAI)-[\w-]+)["']""", text)
        else:
            tasks = re.findall(r"^@SUITE\.add\([^)]*\)\s*^def (\w+)\(", text, re.MULTILINE)
            found += [f"{file.stem}-{task}" for task in tasks]
    return tuple(dict.fromkeys(found))


def _key(id: str) -> str:
    """What all spellings of an id have in common; DreamerV3 calls the domain ``ball_in_cup`` ``cup``."""
    return re.sub(r"^ale/|-v\d+$|[-_]", "", re.sub(r"^cup[-_]", "ball_in_cup-", id.lower()))
