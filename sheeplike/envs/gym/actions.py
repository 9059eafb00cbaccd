"""From what agents choose to what an environment takes."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

ToEnv = Callable[[Any], Any]


def translate(space: spaces.Space) -> tuple[spaces.Space, ToEnv]:
    """The space in which agents act, and what turns their action into one of ``space``.

    - ``Discrete(n)``: itself, counted from 0; ``MultiDiscrete``: likewise, flat; ``MultiBinary(n)`` becomes
      ``MultiDiscrete([2] * n)``.
    - ``Box`` with finite bounds: a ``Box`` (A,) float32 in [-1, 1], of which -1 is the lower bound and 1 the upper.

    Raises:
        ValueError: any other space, or a Box without bounds.
    """
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return spaces.Discrete(int(space.n)), lambda action: int(action) + start
    if isinstance(space, spaces.MultiDiscrete):
        shape, dtype, first = space.shape, space.dtype, np.asarray(space.start)
        return (
            spaces.MultiDiscrete(space.nvec.ravel()),
            lambda action: (np.reshape(action, shape) + first).astype(dtype),
        )
    if isinstance(space, spaces.MultiBinary):
        shape, dtype = space.shape, space.dtype
        return (
            spaces.MultiDiscrete([2] * int(np.prod(shape))),
            lambda action: np.reshape(action, shape).astype(dtype),
        )
    if isinstance(space, spaces.Box):
        return _box(space)
    raise ValueError(
        f"action space {space}: expected Discrete, MultiDiscrete, MultiBinary or Box; nearest: wrap the environment"
    )


def _box(space: spaces.Box) -> tuple[spaces.Box, ToEnv]:
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(
            f"action space {space}: expected finite bounds, which become -1 and 1; nearest: "
            "gymnasium.wrappers.RescaleAction"
        )
    half, whole = (high - low) / 2, np.issubdtype(space.dtype, np.integer)

    def to_env(action: np.ndarray) -> np.ndarray:
        scaled = low + (np.clip(action, -1.0, 1.0).reshape(low.shape).astype(np.float64) + 1.0) * half
        scaled = np.clip(scaled, low, high)  # the sum may round beyond a bound
        return (np.rint(scaled) if whole else scaled).astype(space.dtype)

    return spaces.Box(-1.0, 1.0, (int(np.prod(space.shape)),), np.float32), to_env
