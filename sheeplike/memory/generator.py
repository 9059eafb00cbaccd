"""State of torch's generators, for the memories and the agents that have one."""

from __future__ import annotations

import torch
from torch import Tensor

_STATES = ((5056,), (16,))  # shapes on a CPU and on a GPU


def load_generator(generator: torch.Generator, state: Tensor) -> None:
    """Restore the state of a generator, unless it is of another kind of device; ValueError if it is no such state."""
    state = state.cpu()
    if state.dtype != torch.uint8 or state.shape not in _STATES:
        raise ValueError(f"the state of a generator is {tuple(state.shape)} {state.dtype}")
    # A GPU cannot go on with the random numbers of a CPU, nor the other way round.
    if state.shape == generator.get_state().shape:
        generator.set_state(state)
