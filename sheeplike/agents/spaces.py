"""Observations chosen from a space, and actions translated between environment and model."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sheeplike.options import nearest

DEPTH = "depth/"  # prefix of observations that are float32 (H, W, 1) in metres
SEEN = "uint8 (H, W, C), float32 (D,), or float32 (H, W, 1) named depth/<camera>"


class ObservationKeys:
    """Observations chosen by glob patterns.

    Attributes:
        spaces: key to space, sorted.
        images: keys of uint8 ``(H, W, C)`` spaces, and of float32 ``(H, W, 1)`` spaces named ``depth/<camera>``.
        vectors: keys of float32 ``(D,)`` spaces.

    Raises:
        ValueError: a pattern matches no observation, or a space is neither image nor vector.
    """

    def __init__(self, space: gymnasium.spaces.Dict, patterns: Sequence[str]) -> None:
        chosen: set[str] = set()
        for pattern in patterns:
            found = [key for key in space if key == pattern or fnmatchcase(key, pattern)]
            if not found:
                near = nearest(pattern, space, cutoff=0.5) or min(space, default=None)
                raise ValueError(
                    f"observation {pattern!r}: expected some of {', '.join(sorted(space))}; nearest: {near}"
                )
            chosen.update(found)
        self.spaces = {key: space[key] for key in sorted(chosen)}
        for key, one in self.spaces.items():
            _check_observation(key, one)
        self.images = [key for key, one in self.spaces.items() if len(one.shape) == 3]
        self.vectors = [key for key, one in self.spaces.items() if len(one.shape) == 1]

    def channels(self, key: str) -> int:
        return self.spaces[key].shape[-1]

    def width(self, key: str) -> int:
        return self.spaces[key].shape[0]

    def dtype(self, key: str) -> torch.dtype:
        """Return uint8 for colours, float32 for depth and vectors."""
        return torch.uint8 if self.spaces[key].dtype == np.uint8 else torch.float32

    def stored(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each key of one step of one world."""
        return {key: (one.shape, self.dtype(key)) for key, one in self.spaces.items()}

    def refuse_names(self, names: Collection[str], what: str) -> None:
        """Raise ValueError if an observation has one of ``names``, which already mean ``what``."""
        if taken := self.spaces.keys() & set(names):
            raise ValueError(f"observation {sorted(taken)[0]!r}: the name of {what}; rename it in the environment")


def _check_observation(key: str, space: gymnasium.spaces.Space) -> None:
    if not isinstance(space, gymnasium.spaces.Box):
        raise ValueError(f"observation {key!r}: {space}; expected a Box: {SEEN}; nearest: a vector of one-hots")
    shape, dtype = space.shape, space.dtype
    found = f"observation {key!r}: {dtype} {shape}; expected {SEEN}"
    if 0 in shape:
        raise ValueError(f"{found}, with at least one number in it; nearest: leave it out")
    if len(shape) == 1 and dtype != np.float32:
        raise ValueError(f"{found}; nearest: float32 {shape}, cast in the environment")
    if len(shape) == 3 and dtype != np.uint8:
        if key.startswith(DEPTH):
            if shape[-1] != 1 or dtype != np.float32:
                raise ValueError(f"{found}; nearest: float32 {(*shape[:2], 1)} in metres")
        elif key.startswith("segmentation/"):
            raise ValueError(f"{found}; ids of things cannot be averaged; nearest: pixels/*, or depth/*")
        else:
            raise ValueError(f"{found}; nearest: uint8 {shape} from 0 to 255, scaled in the environment")
    if len(shape) not in (1, 3):
        near = (*shape, 1) if len(shape) == 2 and dtype == np.uint8 else (math.prod(shape),)
        raise ValueError(f"{found}; nearest: {'uint8' if len(near) == 3 else 'float32'} {near}")


class ActionCodec:
    """Translation of actions between environment and model.

    Continuous actions in ``[-1, 1]`` are the same on both sides. A discrete action is an index outside and a one-hot
    vector inside; those of a ``MultiDiscrete`` space are one-hot vectors side by side.

    Attributes:
        classes: number of choices of each discrete action; empty if actions are continuous.
        width: width ``A`` of an action inside.

    Raises:
        ValueError: the space is neither ``Discrete`` nor a ``MultiDiscrete`` or ``Box`` of one axis, or a box is not of
            floating-point numbers from -1 to 1.
    """

    def __init__(self, space: gymnasium.spaces.Space) -> None:
        expected = f"action space {space}: expected Discrete, MultiDiscrete of one axis or a Box of shape (A,)"
        shape = getattr(space, "shape", None) or ()
        self.space, self.classes, self.starts = space, (), ()
        self.joint = isinstance(space, gymnasium.spaces.MultiDiscrete)
        if isinstance(space, gymnasium.spaces.Discrete):
            self.classes, self.starts = (int(space.n),), (int(space.start),)
        elif self.joint and len(shape) == 1:
            self.classes, self.starts = tuple(map(int, space.nvec)), tuple(map(int, space.start))
        elif isinstance(space, gymnasium.spaces.Box) and len(shape) == 1:
            if not np.issubdtype(space.dtype, np.floating):
                raise ValueError(f"{expected} of floating-point numbers; nearest: float32")
            if not (np.all(space.low == -1) and np.all(space.high == 1)):
                raise ValueError(
                    f"action space {space}: expected bounds -1 and 1; wrap the environment in "
                    "gymnasium.wrappers.vector.RescaleAction"
                )
        elif isinstance(space, gymnasium.spaces.MultiBinary):
            raise ValueError(f"{expected}; nearest: MultiDiscrete({[2] * math.prod(shape)})")
        else:
            nearest = f"; nearest: shape ({math.prod(shape)},)" if isinstance(space, gymnasium.spaces.Box) else ""
            raise ValueError(f"{expected}{nearest}")
        self.discrete = bool(self.classes)
        self.width = sum(self.classes) if self.discrete else shape[0]
        if not self.width:
            raise ValueError(f"action space {space}: expected at least one action")

    def to_env(self, action: Tensor) -> Tensor:
        """Convert ``(N, A)`` to ``(N,)`` int64 if ``Discrete``, ``(N, K)`` int64 if ``MultiDiscrete``, else clipped."""
        if not self.discrete:
            return action.clamp(-1, 1)
        parts = zip(action.split(self.classes, -1), self.starts, strict=True)
        indices = [part.argmax(-1) + start if start else part.argmax(-1) for part, start in parts]
        return torch.stack(indices, -1) if self.joint else indices[0]

    def from_env(self, action: Tensor) -> Tensor:
        """Inverse of :meth:`to_env`: ``(N, A)`` float32."""
        if not self.discrete:
            return action.float()
        indices = action.long().unbind(-1) if self.joint else [action.long()]
        parts = zip(indices, self.starts, self.classes, strict=True)
        return torch.cat([F.one_hot(index - start, n) for index, start, n in parts], -1).float()
