"""Updates that are made to see how they run, and then have not been."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sheeplike.agents.agent import own_randomness
from sheeplike.agents.faults import Faults
from sheeplike.nn.optimizers import load_in_place


@contextmanager
def rehearsal(networks: nn.Module, optimizer: torch.optim.Optimizer, faults: Faults, device: torch.device) -> Iterator:
    """Within it updates may change these: afterwards they are as before, at their addresses, and so is randomness."""
    before = copy.deepcopy((networks.state_dict(), optimizer.state_dict()))
    try:
        with own_randomness(device), faults.paused():
            yield
    finally:
        networks.load_state_dict(before[0])
        load_in_place(optimizer, optimizer.load_state_dict, before[1])
        optimizer.zero_grad(set_to_none=False)
