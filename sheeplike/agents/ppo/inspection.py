"""What made an update of PPO be skipped, kept to look into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sheeplike.agents.agent import own_randomness
from sheeplike.agents.faults import held_rows, inspect, masked
from sheeplike.agents.ppo.losses import JUDGED

if TYPE_CHECKING:
    from sheeplike.agents.ppo.agent import PPO


def keep_offending(agent: PPO) -> dict[str, Tensor]:
    """The batch to remember when a rollout is about to go: of this one, where the present streak began with it."""
    here = (agent.skipped_in_a_row > 0) & (agent.skipped_in_a_row <= agent.updates)
    seen = _first(agent, here)
    return {key: torch.where(here, value, agent.offending.get(key, value)) for key, value in seen.items()}


def offending_batch(agent: PPO) -> dict[str, Tensor]:
    """What the first update of the present streak of skipped ones saw, kept also when its rollout is gone.

    Empty if the last update was not skipped.

    Returns:
        A ``minibatch``; ``worlds`` and ``times`` ``(B,)``, which steps of its rollout these are; ``held`` ``(B,)``
        bool: false, and all else 0, where the streak began before the agent was loaded or forgot.
    """
    count = int(agent.skipped_in_a_row)
    if count > agent.updates and agent.offending:
        return dict(agent.offending)
    return _first(agent, count <= agent.updates) if count else {}


def examine(agent: PPO, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Losses and gradient norms on an :func:`offending_batch`, to see what is not finite; changes nothing.

    See :func:`sheeplike.agents.faults.inspect` for what is returned.

    Raises:
        ValueError: a key is missing, or nothing is held.
    """
    data = held_rows(batch, (*agent.keys.spaces, *JUDGED), agent.device)
    with own_randomness(agent.device), agent.compiled.paused():
        losses, _ = agent.losses(data, *(data[key] for key in JUDGED))
        return inspect(losses, agent.total(losses), agent.networks, data)


def _first(agent: PPO, here: Tensor | bool) -> dict[str, Tensor]:
    """The minibatch of the first update of the present streak, if it was ``here``, in the current rollout."""
    index = agent.faults.first["index"]
    steps = {"worlds": index % agent.num_envs, "times": index // agent.num_envs}
    return masked(agent.minibatch(index) | steps, (index >= 0) & here)
