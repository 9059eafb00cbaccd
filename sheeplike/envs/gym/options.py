"""Options of Gymnasium environments, each written once, and the ids of each family.

Importing this module imports no environment: ids are read from the files of the family's package. Where a package looks
otherwise than expected no id is known here, and whoever makes the environment finds out.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from sheeplike.envs.contract import Unusable
from sheeplike.options import InvalidOption, Options, nearest

SEVERAL_PLAYERS = frozenset({"combat", "joust", "maze_craze", "warlords"})
"""Atari games without a mode for one player, which ale_py does not register."""
FROM_A_TABLE = "MiniGrid-WFC-"
"""How the ids begin that only MiniGrid itself can list."""


class CommonOptions(Options):
    """Options of every family. What a family does not leave to the user stands in its class as a ``ClassVar``."""

    id: str = Field(description="which environment of the family")
    episode_length: int | None = Field(
        None, ge=1, description="steps after which an episode is truncated; null: the environment's own limit"
    )
    frame_stack: int = Field(1, ge=1, description="newest frames in one image, oldest first in its channels")
    vectorization: Literal["sync", "async"] = Field(
        "sync", description="sync: one world after another; async: each in a process of its own"
    )
    max_restarts: int = Field(10, ge=0, description="how often in a row a world may fail before the run ends")

    pool_frames: ClassVar[bool] = False
    """Of the last two frames of a held action take, pixel by pixel, the brighter: screens flicker."""

    def resolve(self) -> Self:
        """These options, with the id as the family has it."""
        return self


class GymOptions(CommonOptions):
    """Options of ``env=gym``."""

    id: str = Field(description="of a registered environment, also <module>:<id>")
    frames: Literal["auto", "observation", "render", "none"] = Field(
        "auto", description="where images come from; auto: the first of the others that there is"
    )
    resize: Literal["auto", "pad", "area", "bilinear", "nearest"] = Field(
        "auto",
        description="pad: keep pixels, or enlarge them by a whole factor, in the middle of black; area (mean of the "
        "pixels covered), bilinear (a triangle as wide as a pixel of the result) and nearest stretch to the size; "
        "auto: pad what fits, average what does not",
    )
    grayscale: bool = Field(False, description="one channel instead of three")
    clip_rewards: bool = Field(False, description="a reward is its sign")
    arguments: dict[str, Any] | None = Field(
        None, description="further ones of gymnasium.make, such as {continuous: true}"
    )


class FamilyOptions(CommonOptions):
    """Options of the environments of one package.

    Class attributes:
        family, package: names of both.
        kind: of environments, in words.
        any_spelling: of an id will do: ``pong``, ``walker_walk``.
    """

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
        spec = find_spec(cls.package)
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
            return self.replace(id=by_key[key])
        raise InvalidOption("id", self.id, self.kind, by_key[nearest(key, by_key)])


class MinigridOptions(FamilyOptions):
    """Options of ``env=minigrid``."""

    family: ClassVar[str] = "minigrid"
    package: ClassVar[str] = "minigrid"
    kind: ClassVar[str] = "one of MiniGrid's environments"
    any_spelling: ClassVar[bool] = False
    frames: ClassVar[str] = "observation"
    resize: ClassVar[str] = "pad"
    grayscale: ClassVar[bool] = False
    clip_rewards: ClassVar[bool] = False

    id: str = Field("MiniGrid-Empty-5x5-v0", description="one of MiniGrid's")
    tile_size: int | None = Field(
        None, ge=2, description="pixels a side of a cell; null: the largest even number with which the view fits"
    )


class AtariOptions(FamilyOptions):
    """Options of ``env=atari``; the defaults are those of Atari 100k, and ``episode_length`` counts frames."""

    family: ClassVar[str] = "atari"
    package: ClassVar[str] = "ale_py"
    kind: ClassVar[str] = "one of ale_py's games"
    frames: ClassVar[str] = "observation"
    resize: ClassVar[str] = "bilinear"
    pool_frames: ClassVar[bool] = True

    id: str = Field("ALE/Pong-v5", description="one of ale_py's games, in any spelling")
    grayscale: bool = Field(False, description="one channel instead of three")
    clip_rewards: bool = Field(False, description="a reward is its sign")
    sticky_actions: bool = Field(False, description="the game repeats the last action with a probability of 0.25")
    all_actions: bool = Field(False, description="all 18, whether the game uses them or not")
    noops: int = Field(30, ge=0, description="frames of doing nothing at the start of an episode, at most")
    terminal_on_life_loss: bool = Field(False, description="an episode ends with a life")


class DmcOptions(FamilyOptions):
    """Options of ``env=dmc``."""

    family: ClassVar[str] = "dmc"
    package: ClassVar[str] = "dm_control"
    kind: ClassVar[str] = "a task of the suite"
    resize: ClassVar[str] = "auto"
    grayscale: ClassVar[bool] = False
    clip_rewards: ClassVar[bool] = False

    id: str = Field("walker-walk", description="<domain>-<task>, in any spelling")
    frames: Literal["render", "none"] = Field("render", description="where images come from")
    camera: int | None = Field(None, ge=0, description="number of the camera; null: the one to learn from")
    shadow_map: int | None = Field(
        None,
        ge=0,
        description="pixels a side of the map from which shadows are drawn, which takes most of the time where there "
        "is no GPU; 0: no shadows; null: the task's own",
    )


FAMILIES: dict[str, type[CommonOptions]] = {
    "gym": GymOptions,
    "minigrid": MinigridOptions,
    "atari": AtariOptions,
    "dmc": DmcOptions,
}


def find_spec(module: str) -> ModuleSpec | None:
    """As :func:`importlib.util.find_spec`, and None also where that raises."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


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
