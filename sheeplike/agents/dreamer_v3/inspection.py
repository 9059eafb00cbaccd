"""What made an update of DreamerV3 be skipped, to look into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from sheeplike.agents.agent import own_randomness
from sheeplike.agents.faults import held_rows, inspect, masked

if TYPE_CHECKING:
    from sheeplike.agents.dreamer_v3.agent import DreamerV3


def offending_batch(agent: DreamerV3) -> dict[str, Tensor]:
    """What the first update of the present streak of skipped ones saw; empty if the last one was not skipped.

    Returns:
        The replay's keys to ``(B, CONTEXT + T, ...)``; ``worlds`` ``(B,)`` and ``times`` ``(B, CONTEXT + T)``, as
        :class:`~sheeplike.memory.replay.Sequences` has them; ``held`` of the same shape, bool: false where the ring has
        lost the step since, or where the streak began before the agent was loaded or forgot. There the rest is 0.
    """
    if not int(agent.skipped_in_a_row):
        return {}
    first, replay = agent.faults.first, agent.replay
    data, worlds, times = replay.gather(*(first[name].clamp_min(0) for name in ("worlds", "starts")))
    held = (times >= replay.added - replay.length) & (first["starts"] >= 0)[:, None]
    return masked(data, held) | {"worlds": worlds, "times": times}


def examine(agent: DreamerV3, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Losses and gradient norms on an :func:`offending_batch`, to see what is not finite; changes nothing.

    Sequences that have lost a step are left out. See :func:`sheeplike.agents.faults.inspect` for what is returned.

    Raises:
        ValueError: a key is missing, or no sequence is whole.
    """
    data = held_rows(batch, agent.replay.storage, agent.device)
    returns = agent.actor_critic.return_scale.range
    before = returns.clone()
    try:
        with own_randomness(agent.device), agent.compiled.paused():
            with agent.autocast():
                losses, _, _ = agent.losses(data)
            means, total = agent.total(losses)
            return inspect(means, total, agent.modules, data)
    finally:
        returns.copy_(before)
