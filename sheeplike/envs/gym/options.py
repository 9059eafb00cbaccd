"""``env=gym`` and the families ``minigrid``, ``atari``, ``dmc`` and ``envpool``: options, ids, what makes them.

Importing this module imports neither torch nor gymnasium, and no environment. Ids of the families are checked when the
environment is made, which imports their packages.
"""

from __future__ import annotations

import ctypes.util
import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from sheeplike import host
from sheeplike.envs.contract import Unusable
from sheeplike.options import InvalidOption, Options, nearest

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.envs.registration import EnvSpec

OURS = {
    "id": "that is env.id",
    "max_episode_steps": "that is env.options.episode_length",
    "render_mode": "images are rendered here, as env.options.frames says",
    "disable_env_checker": "the environment is checked here",
}
"""Arguments of ``gymnasium.make`` that users cannot give, and the reason."""
BACKENDS = {"egl": "EGL", "osmesa": "OSMesa"}  # values of `MUJOCO_GL` that need no screen, and their libraries


class BaseOptions(Options):
    """Options of every family; those that a family fixes are class variables in its class."""

    vector_env: ClassVar[str]  # the class of the vector environment, which gets what `recipe` returns

    id: str = Field(description="which environment of the family")
    episode_length: int | None = Field(
        None, ge=1, le=10**9, description="steps after which an episode is truncated; null: the environment's own limit"
    )

    def check(self) -> None:
        """Check what needs neither the environment nor torch nor JAX; raise ``Unusable`` or ``InvalidOption``."""
        raise NotImplementedError

    def recipe(self, image_size: tuple[int, int]) -> tuple[Callable[..., Any], Self]:
        """Return a function that makes one environment, given ``render_mode``, and these options, resolved."""
        raise NotImplementedError


class CommonOptions(BaseOptions):
    """Options of the families whose worlds are single environments."""

    vector_env: ClassVar[str] = "sheeplike.envs.gym.vector_env:GymVectorEnv"

    frame_stack: int = Field(1, ge=1, le=64, description="last frames in the channels of one image, oldest first")
    vectorization: Literal["sync", "async"] = Field(
        "sync", description="sync: one world after another; async: each in its own process"
    )
    max_restarts: int = Field(10, ge=0, description="replacements in a row of a failing world before the run ends")

    pool_frames: ClassVar[bool] = False  # the brighter pixels of a held action's last two frames: screens flicker


class GymOptions(CommonOptions):
    """Options of ``env=gym``."""

    id: str = Field(description="a registered environment; <module>:<id> imports the module first")
    frames: Literal["auto", "observation", "render", "none"] = Field(
        "auto", description="source of the images; auto: the first of the others that the environment has"
    )
    resize: Literal["auto", "pad", "area", "bilinear", "nearest"] = Field(
        "auto",
        description="pad: enlarge by the largest whole factor, 1 included, and fill up with black; area (mean of the "
        "covered pixels), bilinear and nearest: stretch to the size; auto: pad if the frame fits, otherwise area",
    )
    grayscale: bool = Field(False, description="one channel instead of three")
    clip_rewards: bool = Field(False, description="replace each reward by its sign")
    arguments: dict[str, Any] | None = Field(
        None, description="further arguments of gymnasium.make, such as {continuous: true}"
    )

    def check(self) -> None:
        for name in OURS.keys() & (self.arguments or {}):
            raise InvalidOption("arguments", self.arguments, f"others than {name}: {OURS[name]}")
        module = self.id.rpartition(":")[0]
        if not module:
            find(self.id)
        elif find_module(module.partition(".")[0]) is None:
            raise Unusable(f"id={self.id!r}: there is no module {module}")

    def recipe(self, image_size: tuple[int, int]) -> tuple[Callable[..., gymnasium.Env], Self]:
        choose_backend(required=False)
        spec = find(self.id)
        make = functools.partial(_make, spec, dict(self.arguments or {}), None)
        return make, self.replace(episode_length=self.episode_length or spec.max_episode_steps)


class FamilyOptions(CommonOptions):
    """Options of the environments of one package; errors call them ``kind``.

    With ``any_spelling``, ids may be written as ``pong`` or ``walker_walk``.
    """

    family: ClassVar[str]
    package: ClassVar[str]
    kind: ClassVar[str]
    any_spelling: ClassVar[bool] = True

    def check(self) -> None:
        if find_module(self.package) is None:
            raise Unusable(f"env={self.family} needs {self.package}: {host.install(self.family)}")

    def spelt(self, known: Sequence[str]) -> Self:
        """Return these options with the package's own spelling of the id, such as ``ALE/Pong-v5`` of ``pong``."""
        by_key, key = {_key(id): id for id in known}, _key(self.id)
        if self.id in known:
            return self
        if self.any_spelling and key in by_key:
            return self.replace(id=by_key[key])
        raise InvalidOption("env.id", self.id, self.kind, by_key[nearest(key, by_key)])


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
        None, ge=2, description="pixels per side of a cell; null: the largest even number with which the view fits"
    )

    def recipe(self, image_size: tuple[int, int]) -> tuple[Callable[..., gymnasium.Env], Self]:
        import gymnasium

        from sheeplike.envs.gym.minigrid import PartialView  # it registers the environments

        options = self.spelt([id for id in gymnasium.registry if id.startswith(("MiniGrid-", "BabyAI-"))])
        view = functools.partial(PartialView, tile=self.tile_size, image_size=image_size)
        return functools.partial(_make, find(options.id), {}, view), options


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
    clip_rewards: bool = Field(False, description="replace each reward by its sign")
    sticky_actions: bool = Field(False, description="the game repeats the last action with a probability of 0.25")
    all_actions: bool = Field(False, description="offer all 18 actions, also those that the game does not use")
    noops: int = Field(30, ge=0, description="maximum of frames without action at the start of an episode")
    terminal_on_life_loss: bool = Field(False, description="end an episode when a life is lost")

    def recipe(self, image_size: tuple[int, int]) -> tuple[Callable[..., gymnasium.Env], Self]:
        import gymnasium

        from sheeplike.envs.gym.atari import FRAMES, Protocol  # it registers the games

        options = self.spelt([id for id in gymnasium.registry if id.startswith("ALE/")])
        arguments = {
            "frameskip": 1,
            "repeat_action_probability": 0.25 if self.sticky_actions else 0.0,
            "full_action_space": self.all_actions,
            "max_num_frames_per_episode": None,  # the world counts
        }
        protocol = functools.partial(Protocol, noops=self.noops, terminal_on_life_loss=self.terminal_on_life_loss)
        make = functools.partial(_make, find(options.id), arguments, protocol)
        return make, options.replace(episode_length=self.episode_length or FRAMES)


class DmcOptions(FamilyOptions):
    """Options of ``env=dmc``."""

    family: ClassVar[str] = "dmc"
    package: ClassVar[str] = "dm_control"
    kind: ClassVar[str] = "a task of the suite"
    resize: ClassVar[str] = "auto"
    grayscale: ClassVar[bool] = False
    clip_rewards: ClassVar[bool] = False

    id: str = Field("walker-walk", description="<domain>-<task>, in any spelling")
    frames: Literal["render", "none"] = Field("render", description="source of the images")
    camera: int | None = Field(None, ge=0, description="number of the camera; null: 0, for quadruped 2")
    shadow_map: int | None = Field(
        None,
        ge=0,
        description="pixels per side of the shadow map, which takes most of the time without a GPU; 0: no shadows; "
        "null: the task's own size",
    )

    def recipe(self, image_size: tuple[int, int]) -> tuple[Callable[..., gymnasium.Env], Self]:
        choose_backend(required=self.frames == "render")
        from sheeplike.envs.gym.dmc import ControlSuite
        from sheeplike.envs.gym.world import by_name

        with by_name(self.id):  # it fails without the library that MUJOCO_GL names
            from dm_control import suite
        options = self.spelt(["-".join(task) for task in suite.ALL_TASKS])
        own = {"camera": self.camera, "shadow_map": self.shadow_map}
        return functools.partial(ControlSuite, options.id, image_size=image_size, **own), options


class EnvpoolOptions(BaseOptions):
    """Options of ``env=envpool``; its ids are checked when the environment is made, since EnvPool imports JAX."""

    vector_env: ClassVar[str] = "sheeplike.envs.gym.envpool:EnvpoolVectorEnv"
    frame_stack: ClassVar[int] = 1
    resize: ClassVar[str] = "auto"

    id: str = Field(description="one of envpool.list_all_envs()")
    frames: Literal["auto", "observation", "render", "none"] = GymOptions.model_fields["frames"]
    camera: int | None = Field(None, ge=0, description="number of MuJoCo's camera that renders; null: the free one")
    grayscale: bool = Field(False, description="one channel instead of three")
    arguments: dict[str, Any] | None = Field(
        None, description="further arguments of the task, such as {reward_clip: true} of Atari, or num_threads"
    )

    def check(self) -> None:
        if find_module("envpool") is None:
            raise Unusable(f"env=envpool needs envpool: {host.install('envpool')}")

    def recipe(self, image_size: tuple[int, int]) -> tuple[Callable[..., Any], Self]:
        from sheeplike.envs.gym.envpool import Pool

        return functools.partial(Pool, self, image_size=image_size), self


FAMILIES: dict[str, type[BaseOptions]] = {
    "gym": GymOptions,
    "minigrid": MinigridOptions,
    "atari": AtariOptions,
    "dmc": DmcOptions,
    "envpool": EnvpoolOptions,
}


def find_module(module: str) -> ModuleSpec | None:
    """Return the module's spec; None if there is none, and if :func:`importlib.util.find_spec` raises."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def _key(id: str) -> str:
    """Return the same key for all spellings of an id; DreamerV3 calls the domain ``ball_in_cup`` ``cup``."""
    return re.sub(r"^ale/|-v\d+$|[-_]", "", re.sub(r"^cup[-_]", "ball_in_cup-", id.lower()))


def find(id: str) -> EnvSpec:
    """Return the registered environment ``Name-v1`` or ``namespace/Name-v1``.

    Without a version, return the newest; a ``module:`` in front is imported first.
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
    """Make an environment from its ``spec``, which is sent to other processes: it may not be registered there."""
    import gymnasium

    if render_mode or "render_mode" in spec.kwargs:  # an environment that renders nothing may not know the name
        arguments = {**arguments, "render_mode": render_mode}
    # -1: no wrapper that truncates, since the world counts the steps.
    env = gymnasium.make(spec, max_episode_steps=-1, disable_env_checker=True, **arguments)
    return env if wrap is None else wrap(env)


def choose_backend(*, required: bool) -> None:
    """Set ``MUJOCO_GL`` to ``egl``, or else ``osmesa``, if it is not set and there is no screen.

    ``required``: raise ``Unusable`` if the machine has neither.
    """
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame would look for a screen and complain
    if os.environ.get("MUJOCO_GL"):
        return
    for backend, library in BACKENDS.items():
        if ctypes.util.find_library(library):
            os.environ["MUJOCO_GL"] = backend
            return
    if required:
        raise Unusable(
            "there is no screen, and neither libEGL nor libOSMesa to render without one: expected one of them (on "
            "Debian and Ubuntu: apt-get install libegl1, or libosmesa6)"
        )
