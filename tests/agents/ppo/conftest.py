"""Small PPO agents, and a way to fill their rollouts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from sheeplike.agents.agent import Player, Step
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
        return {name for name in ours | theirs if not torch.equal(ours.get(name, EMPTY), theirs.get(name, EMPTY))}


EMPTY = torch.empty(0)


@pytest.fixture
def snapshot() -> type[Snapshot]:
    """Takes a :class:`Snapshot` of an agent."""
    return Snapshot


@pytest.fixture
def make_ppo(make_space: Callable[..., spaces.Dict]) -> Callable[..., PPO]:
    """Builds an agent of a few thousand parameters that sees everything; keywords override."""

    def make(
        *,
        cameras: Collection[str] = (),
        vectors: dict[str, int] | None = None,
        actions: gymnasium.spaces.Space | int = 2,
        **options: Any,
    ) -> PPO:
        space = make_space(cameras, {"state": 5} if vectors is None else vectors)
        actions = spaces.Box(-1, 1, (actions,), np.float32) if isinstance(actions, int) else actions
        defaults = {"num_envs": 3, "observations": ("*",), "rollout_length": 8, "minibatches": 4, "epochs": 2}
        defaults |= {"policy_layers": (16,), "value_layers": (16,)}
        return PPO(space, actions, **(defaults | options))

    return make


@pytest.fixture
def fill(play: Callable[..., list[Step]]) -> Callable[..., list[Step]]:
    """Plays until the agent's rollout is complete; returns the steps.

    ``after`` are the steps of the last call, to go on from; times in ``last`` and ``terminal`` count from this call.
    """

    def run(
        agent: PPO,
        *,
        last: Collection[tuple[int, int]] = (),
        terminal: Collection[tuple[int, int]] = (),
        seed: int = 0,
        player: Player | None = None,
        after: list[Step] | None = None,
    ) -> list[Step]:
        begin: Tensor | None = after[-1].is_last if after else None
        missing = agent.rollout.length + 1 - agent.rollout.steps
        return play(agent, missing, last=last, terminal=terminal, seed=seed, player=player, begin=begin)

    return run
