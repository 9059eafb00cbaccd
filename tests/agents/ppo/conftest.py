"""Small PPO agents, and a way to fill their rollouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sheeplike.agents.ppo import PPO


class Snapshot:
    """A copy of an agent's parameters and of Adam's moments and step counters, to compare bit for bit.

    Attributes:
        parameters: by name.
        adam: by name and kind: ``exp_avg``, ``exp_avg_sq`` or ``step``; empty before the first update.
    """

    def __init__(self, agent: PPO) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.adam: dict[tuple[str, str], Tensor] = {}
        for name, p in agent.networks.named_parameters():
            self.parameters[name] = p.detach().clone()
            self.adam |= {(name, kind): x.clone() for kind, x in agent.optimizer.state.get(p, {}).items()}

    def changed(self, other: Snapshot) -> set[Any]:
        """Names of what differs."""
        ours, theirs = self.parameters | self.adam, other.parameters | other.adam
        zeros = {name: torch.zeros_like(value) for name, value in (ours | theirs).items()}  # Adam's state at first
        return {name for name in zeros if not torch.equal((zeros | ours)[name], (zeros | theirs)[name])}


@pytest.fixture
def snapshot() -> type[Snapshot]:
    """Takes a :class:`Snapshot` of an agent."""
    return Snapshot
