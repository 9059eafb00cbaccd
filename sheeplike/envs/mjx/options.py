"""Options of simulated tasks, each written once. Importing this module imports neither JAX nor MuJoCo."""

import importlib.util
import os
import sys
from ctypes.util import find_library
from importlib.resources import files
from typing import Any, ClassVar

from pydantic import Field

from sheeplike import host
from sheeplike.envs.contract import Unusable
from sheeplike.envs.mjx.engines import PHYSICS, RENDERERS
from sheeplike.options import InvalidOption, Options, format_value

PLAYGROUND_IDS = (
    *("AcrobotSwingup", "AcrobotSwingupSparse", "BallInCup", "CartpoleBalance", "CartpoleBalanceSparse"),
    *("CartpoleSwingup", "CartpoleSwingupSparse", "CheetahRun", "FingerSpin", "FingerTurnEasy", "FingerTurnHard"),
    *("FishSwim", "HopperHop", "HopperStand", "HumanoidRun", "HumanoidStand", "HumanoidWalk", "PendulumSwingup"),
    *("PointMass", "ReacherEasy", "ReacherHard", "SwimmerSwimmer6", "WalkerRun", "WalkerStand", "WalkerWalk"),
)
"""Playground's tasks of the DeepMind Control suite, whose scenes are part of it; all others need meshes."""


# Values of MUJOCO_GL with which mujoco can be imported: 3.17.0, rendering/classic/gl_context.py.
_OPENGL = {"", "glfw", "enable", "enabled", "on", "true", "1", "disable", "disabled", "off", "false", "0"}
_OPENGL.update({"linux": ("glx", "egl", "osmesa"), "win32": ("wgl",), "darwin": ("cgl",)}.get(sys.platform, ()))


class SimulationOptions(Options):
    """Options of simulation and rendering, each a key ``env.<name>`` of a run.

    An image option is one line here; renderers read it as ``self.options.<name>``. ``stagger`` and ``randomize`` are
    not among these options, since evaluations change them in the same simulation.
    """

    cameras: tuple[str, ...] | None = Field(
        None, min_length=1, description="names of the cameras to render; null: all, or the task's choice"
    )
    physics: str = Field(
        "auto",
        description="native: MuJoCo's own engine, on all cores of a CPU; warp: MJX-Warp's; auto: native on a CPU and "
        "warp on a GPU; or the engine of an installed package",
    )
    renderer: str = Field(
        "warp",
        description="warp: MJX-Warp's; none: no images, for agents that see vectors; or one of an installed package",
    )
    depth: bool = Field(False, description="render depth beside the colours")
    segmentation: bool = Field(False, description="render which geom each pixel shows, beside the colours")
    shadows: bool = Field(False, description="render the shadows of lights that cast any")
    textures: bool | None = Field(None, description="render the textures of materials; null: the task's choice")

    def check(self) -> None:
        """Check the names of the engines, and that no image option is set if nothing is rendered.

        ``Unusable`` for a value of ``MUJOCO_GL`` that keeps MuJoCo from being imported.
        """
        chosen = os.environ.get("MUJOCO_GL", "").lower().strip()
        if chosen not in _OPENGL or (chosen == "osmesa" and not find_library("OSMesa")):
            raise Unusable(
                f"MUJOCO_GL={chosen}: MuJoCo cannot be imported; expected egl, osmesa or, with a screen, glfw"
            )
        PHYSICS.check(self.physics)
        RENDERERS.check(self.renderer)
        once = tuple(dict.fromkeys(self.cameras or ()))
        if len(once) < len(self.cameras or ()):
            raise InvalidOption("cameras", self.cameras, "each camera once", once)
        others = ("cameras", "physics", "renderer")
        for name in SimulationOptions.model_fields if self.renderer == "none" else ():
            if name not in others and (value := getattr(self, name)):
                off = type(value)()
                raise InvalidOption(name, value, f"{format_value(off)}, since env.renderer=none renders nothing", off)


class TaskOptions(Options):
    """Options of one task: ``<module>:<class>`` in ``task`` takes them.

    ``scene`` is the file of its scene in ``tasks/``; None for a scene made in code.
    """

    task: ClassVar[str]
    scene: ClassVar[str | None] = None

    @classmethod
    def read_scene(cls) -> str:
        """Return the scene, as XML."""
        return files(f"{__package__}.tasks").joinpath(cls.scene).read_text(encoding="utf-8")


class CartpoleOptions(TaskOptions):
    """Options of both tasks with a pole on a cart."""

    task: ClassVar[str] = "sheeplike.envs.mjx.tasks.cartpole:Cartpole"
    scene: ClassVar[str | None] = "cartpole.xml"

    episode_length: int = Field(125, ge=1, le=10**9, description="control steps of 80 ms")


class CartpoleBalanceOptions(CartpoleOptions):
    """Options of ``env=cartpole_balance``."""

    fall_ends: bool = Field(True, description="end the episode when the pole falls below the horizontal")


class CartpoleSwingupOptions(CartpoleOptions):
    """Options of ``env=cartpole_swingup``, which starts with the pole hanging."""


class FrankaPickOptions(TaskOptions):
    """Options of ``env=franka_pick``; the front camera shows the whole box up to ``box_range=0.2``."""

    task: ClassVar[str] = "sheeplike.envs.mjx.tasks.franka_pick:FrankaPick"
    scene: ClassVar[str | None] = "franka_pick.xml"

    episode_length: int = Field(200, ge=1, le=10**9, description="control steps of 50 ms")
    picked_probability: float = Field(
        0.05, ge=0, le=1, description="fraction of episodes that start with the box grasped, to help exploration"
    )
    box_range: float = Field(
        0.05, ge=0, le=0.2, description="metres to either side within which the box starts; programs may change it"
    )


class PlaygroundOptions(TaskOptions):
    """Options of ``env=playground``."""

    task: ClassVar[str] = "sheeplike.envs.mjx.playground:PlaygroundTask"

    id: str = Field(description="name in Playground's registry, such as CheetahRun")
    episode_length: int | None = Field(None, ge=1, le=10**9, description="control steps; null: Playground's own")
    overrides: dict[str, Any] | None = Field(
        None, description="changes of Playground's configuration, such as {ctrl_dt: 0.02}; keys nested or dotted"
    )

    def check(self) -> None:
        """Raise ``Unusable`` where Playground is missing."""
        if importlib.util.find_spec("mujoco_playground") is None:
            raise Unusable(f"env=playground needs MuJoCo Playground: {host.install('playground')}")


TASKS: dict[str, type[TaskOptions]] = {
    "cartpole_balance": CartpoleBalanceOptions,
    "cartpole_swingup": CartpoleSwingupOptions,
    "franka_pick": FrankaPickOptions,
    "playground": PlaygroundOptions,
}
