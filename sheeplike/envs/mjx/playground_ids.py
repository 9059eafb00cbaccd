"""What is known of MuJoCo Playground without importing it."""

import importlib.util
from collections.abc import Mapping

from sheeplike.envs.contract import Unusable
from sheeplike.options import InvalidOption

IDS = (
    *("AcrobotSwingup", "AcrobotSwingupSparse", "BallInCup", "CartpoleBalance", "CartpoleBalanceSparse"),
    *("CartpoleSwingup", "CartpoleSwingupSparse", "CheetahRun", "FingerSpin", "FingerTurnEasy", "FingerTurnHard"),
    *("FishSwim", "HopperHop", "HopperStand", "HumanoidRun", "HumanoidStand", "HumanoidWalk", "PendulumSwingup"),
    *("PointMass", "ReacherEasy", "ReacherHard", "SwimmerSwimmer6", "WalkerRun", "WalkerStand", "WalkerWalk"),
)
"""Its tasks of the DeepMind Control suite, whose scenes it brings along; all others need meshes that it does not."""


def check(*, id: str, options: Mapping[str, object]) -> None:
    """What can be said against a task before Playground, JAX and torch are imported.

    Raises:
        Unusable: Playground is not installed.
        InvalidOption: a value that no task can serve.
    """
    if importlib.util.find_spec("mujoco_playground") is None:
        raise Unusable("env=playground needs MuJoCo Playground: pip install 'sheeplike[playground]'")
    length, overrides = options.get("episode_length"), options.get("overrides")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        close = 1 if isinstance(length, int) else None
        raise InvalidOption("episode_length", length, "a whole number of at least 1, or null", close)
    if overrides is not None and not isinstance(overrides, Mapping):
        raise InvalidOption("overrides", overrides, "keys and values of Playground's, such as {ctrl_dt: 0.02}, or null")
