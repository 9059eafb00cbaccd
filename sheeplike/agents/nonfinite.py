"""Updates with non-finite numbers: they are skipped on the device and counted."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sheeplike.agents.agent import own_randomness


class SkipCounter:
    """Counters of skipped updates, 0-dim int64, updated in place so that a captured update can write them."""

    def __init__(self, device: torch.device) -> None:
        self.skipped_in_a_row, self.skipped_total = (
            torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)
        )

    def count(self, finite: Tensor) -> Tensor:
        """Count one update; return 1 if it is to be skipped, 0-dim float32, for the optimizer's ``found_inf``."""
        skipped = (~finite).long()
        self.skipped_in_a_row.add_(1).mul_(skipped)
        self.skipped_total.add_(skipped)
        return (~finite).float()

    def state_dict(self) -> dict[str, Tensor]:
        return {"skipped_in_a_row": self.skipped_in_a_row, "skipped_total": self.skipped_total}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, counter in self.state_dict().items():
            counter.copy_(state[name])


def health(total: Tensor, skip: Tensor) -> dict[str, Tensor]:
    """Return metrics of an update that minimised ``total`` and was skipped where ``skip`` is 1."""
    return {"health/nonfinite_loss": (~total.isfinite()).float(), "health/skipped_update": skip}


@contextmanager
def preserve_state(
    networks: nn.Module, optimizer: torch.optim.Optimizer, skips: SkipCounter, device: torch.device
) -> Iterator[None]:
    """Restore networks, optimizer, counters and torch's random state on exit, in place."""
    before = copy.deepcopy((networks.state_dict(), optimizer.state_dict(), skips.state_dict()))
    try:
        with own_randomness(device):
            yield
    finally:
        networks.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        optimizer.zero_grad()
        skips.load_state_dict(before[2])
