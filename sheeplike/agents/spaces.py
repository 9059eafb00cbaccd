"""What an agent sees of an environment's spaces: which observations, and how actions are translated."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import gymnasium
import numpy as np
import torch.nn.functional as F
from torch import Tensor


class ObservationKeys:
    """The observations chosen by glob patterns, split into images and vectors.

    Attributes:
        spaces: key to space, in sorted order.
        images: sorted keys of uint8 ``(H, W, C)`` spaces.
        vectors: sorted keys of float32 ``(D,)`` spaces.

    Raises:
        ValueError: a pattern matches no observation, or a space is neither image nor vector.
    """

    def __init__(self, space: gymnasium.spaces.Dict, patterns: Sequence[str]) -> None:
        chosen: set[str] = set()
        for pattern in patterns:
            found = [key for key in space if fnmatchcase(key, pattern)]
            if not found:
                near = get_close_matches(pattern, list(space), 1, 0.0)
                raise ValueError(
                    f"observation {pattern!r}: the environment has {', '.join(sorted(space))}; nearest is {near[0]!r}"
                )
            chosen.update(found)
        self.spaces = {key: space[key] for key in sorted(chosen)}
        self.images = [key for key, s in self.spaces.items() if len(s.shape) == 3 and s.dtype == "uint8"]
        self.vectors = [key for key, s in self.spaces.items() if len(s.shape) == 1 and s.dtype == "float32"]
        for key in self.spaces.keys() - {*self.images, *self.vectors}:
            s = self.spaces[key]
            raise ValueError(
                f"observation {key!r}: shape {s.shape} {s.dtype}; expected uint8 (H, W, C) or float32 (D,)"
            )

    def channels(self, key: str) -> int:
        """Channels of a camera."""
        return self.spaces[key].shape[-1]

    def width(self, key: str) -> int:
        """Length of a vector."""
        return self.spaces[key].shape[0]


class ActionCodec:
    """Translates between what the environment takes and what the model sees.

    Continuous actions in ``[-1, 1]`` are the same on both sides; a discrete action is an index outside and a one-hot
    vector inside.

    Raises:
        ValueError: the space is neither ``Discrete`` nor a ``Box`` of one axis with bounds -1 and 1.
    """

    def __init__(self, space: gymnasium.spaces.Space) -> None:
        self.discrete = isinstance(space, gymnasium.spaces.Discrete)
        if self.discrete:
            self.width = int(space.n)
        elif isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1:
            if not (np.all(space.low == -1) and np.all(space.high == 1)):
                raise ValueError(
                    f"action space {space}: expected bounds -1 and 1; wrap the environment in "
                    "gymnasium.wrappers.vector.RescaleAction"
                )
            self.width = space.shape[0]
        else:
            raise ValueError(f"action space {space}: expected Discrete or a Box of shape (A,)")

    def to_env(self, action: Tensor) -> Tensor:
        """``(N, A)`` to ``(N,)`` int64 if discrete, else unchanged."""
        return action.argmax(-1) if self.discrete else action

    def from_env(self, action: Tensor) -> Tensor:
        """Inverse of :meth:`to_env`: ``(N, A)`` float32."""
        return F.one_hot(action.long(), self.width).float() if self.discrete else action.float()
