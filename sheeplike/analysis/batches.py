"""What is computed of many states, a batch at a time, so that it fits into the memory of the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sheeplike.analysis.model import DECODED, States, TrainedModel


def at_once(model: TrainedModel) -> int:
    """How many states, each with all that is observed and predicted there, are in a batch."""
    spaces = {**model.world.decoder.keys.spaces, **model.observations}
    numbers = sum(math.prod(space.shape) for space in spaces.values())
    return max(DECODED // (numbers + model.deter + model.groups * model.classes), 1)


def batched(model: TrainedModel, function: Callable[..., Tensor], *rows: States | Tensor, states: int = 1) -> Tensor:
    """``function`` of ``rows``, ``(M, ...)`` each and in step with one another: ``(M, ...)``, on the CPU.

    Args:
        states: that one row stands for.
    """
    size = max(at_once(model) // states, 1)
    starts = range(0, len(rows[0]), size)
    return torch.cat([function(*(one[start : start + size] for one in rows)).cpu() for start in starts])
