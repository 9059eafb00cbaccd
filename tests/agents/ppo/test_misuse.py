"""Misuse of PPO that would go wrong silently, and an ignored step that would poison its minibatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sheeplike.agents.agent import Step
from sheeplike.agents.ppo import PPO


def test_no_update_before_the_rollout_is_complete(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    agent = make_ppo()
    with pytest.raises(AssertionError):
        agent.update()
    fill(agent)
    for _ in range(agent.updates_due(0)):
        agent.update()
    with pytest.raises(AssertionError):
        agent.update()


def test_an_overflow_on_an_ignored_step_stops_nobody(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]], snapshot: Callable[..., Any]
) -> None:
    """Its ratio is infinite; 0 x inf is not 0."""
    agent = make_ppo(minibatches=1, epochs=1)
    fill(agent, last={(3, 1)})
    agent.rollout.trajectory("log_prob")[3, 1] = -1000.0
    before = snapshot(agent)
    metrics = agent.update()
    assert all(bool(value.isfinite()) for value in metrics.values())
    assert metrics["ppo/skipped"] == 0
    assert before.changed(snapshot(agent))


@pytest.mark.parametrize("cameras", [(), ("front",)])
def test_two_keys_that_differ_in_a_dot(make_ppo: Callable[..., PPO], cameras: tuple[str, ...]) -> None:
    agent = make_ppo(vectors={"a.b": 2, "a_b": 3}, cameras=tuple(f"{name}{dot}1" for name in cameras for dot in "._"))
    assert len(agent.networks.policy_trunk.norms) == 2
    assert len(agent.networks.policy_trunk.cnns) == 2 * len(cameras)


def test_a_player_keeps_no_frames_that_are_not_stacked(make_ppo: Callable[..., PPO]) -> None:
    assert make_ppo(cameras=("front",)).player(2).state_dict() == {}
    frames = make_ppo(cameras=("front",), frame_stack=3).player(2).state_dict()
    assert frames["pixels/front"].shape[:2] == torch.Size([2, 3])
