"""Observation and action spaces of one world, as plain data in checkpoints and exports."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from gymnasium import spaces

DTYPES = ("uint8", "float16", "float32", "float64")
Count = Annotated[int, Field(ge=1, le=2**24)]
Start = Annotated[int, Field(ge=-(2**31), le=2**31)]


class Data(BaseModel):
    """A part of a file from an unknown source: types are strict, and sizes have limits."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Box(Data):
    """Array of numbers; a bound of null is infinite."""

    type: Literal["Box"] = "Box"
    shape: tuple[Count, ...]
    dtype: Literal[DTYPES]
    low: float | None
    high: float | None


class Discrete(Data):
    type: Literal["Discrete"] = "Discrete"
    n: Count
    start: Start


class MultiDiscrete(Data):
    type: Literal["MultiDiscrete"] = "MultiDiscrete"
    nvec: tuple[Count, ...] = Field(min_length=1, max_length=2**8)
    start: tuple[Start, ...]


Space = Annotated[Box | Discrete | MultiDiscrete, Field(discriminator="type")]


class Spaces(Data):
    """Spaces of one world, as checkpoints describe them."""

    observations: dict[str, Space]
    actions: Space

    @classmethod
    def of(cls, observations: spaces.Dict, actions: spaces.Space) -> Spaces | None:
        """Describe the observations that an agent can use; None if no agent here can act in ``actions``."""
        from gymnasium import spaces

        if not isinstance(actions, spaces.Box | spaces.Discrete | spaces.MultiDiscrete):
            return None
        usable = {key: one for key, one in observations.items() if str(one.dtype) in DTYPES and 0 not in one.shape}
        return cls(observations={key: describe(one) for key, one in usable.items()}, actions=describe(actions))

    def build(self) -> tuple[spaces.Dict, spaces.Space]:
        """Return observations and actions as spaces of Gymnasium."""
        from gymnasium import spaces

        return spaces.Dict({key: to_space(one) for key, one in self.observations.items()}), to_space(self.actions)


def to_space(data: Box | Discrete | MultiDiscrete) -> spaces.Space:
    from gymnasium import spaces

    if isinstance(data, Discrete):
        return spaces.Discrete(data.n, start=data.start)
    if isinstance(data, MultiDiscrete):
        return spaces.MultiDiscrete(data.nvec, start=data.start)
    if math.prod(data.shape) > 2**24:
        raise ValueError(f"a space of {data.shape}: expected at most {2**24} numbers")
    low, high = -math.inf if data.low is None else data.low, math.inf if data.high is None else data.high
    return spaces.Box(low, high, data.shape, data.dtype)


def describe(space: spaces.Space) -> Box | Discrete | MultiDiscrete:
    """Describe a space; the inverse of :func:`to_space`."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(n=int(space.n), start=int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiDiscrete(nvec=tuple(space.nvec.tolist()), start=tuple(space.start.tolist()))
    low, high = (bound if math.isfinite(bound) else None for bound in (float(space.low.min()), float(space.high.max())))
    return Box(shape=space.shape, dtype=str(space.dtype), low=low, high=high)
