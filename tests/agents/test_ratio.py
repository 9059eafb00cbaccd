"""Gradient steps that are due: exact in the long run, nothing early, never a burst."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from sheeplike.agents.agent import Ratio


@pytest.mark.parametrize(
    ("ratio", "worlds", "calls"),
    [
        ("1/4", 16, 3000),
        ("1/3", 7, 9001),
        ("0.0625", 1, 5000),
        ("3.7", 5, 1234),
        ("1/1024", 3, 20000),
        ("0.1", 1, 99999),
    ],
)
def test_the_ratio_is_met_exactly_in_the_long_run(ratio: str, worlds: int, calls: int) -> None:
    counter = Ratio(float(Fraction(ratio)))
    due = [counter(worlds * (i + 1)) for i in range(calls)]
    exact = Fraction(ratio) * worlds * calls
    assert exact - 1 <= sum(due) <= exact
    assert max(due) - min(due) <= 1, "evenly, not in bursts"


def test_the_fraction_is_carried() -> None:
    counter = Ratio(0.4)
    assert [counter(step) for step in range(1, 11)] == [0, 0, 1, 0, 1, 0, 0, 1, 0, 1]


def test_irregular_calls_miss_nothing() -> None:
    counter, total, steps = Ratio(0.3), 0, 0
    for i in range(1000):
        steps += 1 + i * i % 13
        total += counter(steps)
        assert total == pytest.approx(0.3 * steps, abs=1.0001)


def test_nothing_is_due_before_the_start_nor_made_up_for_afterwards() -> None:
    counter = Ratio(0.5, start=1000)
    assert [counter(step) for step in range(16, 1000, 16)] == [0] * 62
    assert counter(1000) == 0
    assert counter(1016) == 8


def test_calling_twice_at_the_same_step_gives_nothing_more() -> None:
    counter = Ratio(1.0)
    assert counter(5) == 5
    assert counter(5) == 0
    assert counter(3) == 0
    assert counter(6) == 1


def test_state_round_trip_carries_the_fraction() -> None:
    counter, whole = Ratio(0.3), Ratio(0.3)
    for step in range(1, 8):
        assert counter(step) == whole(step)
    resumed = Ratio(0.3)
    resumed.load_state_dict(counter.state_dict())
    assert [resumed(step) for step in range(8, 100)] == [whole(step) for step in range(8, 100)]


@pytest.mark.parametrize("carry", [-1.0, 1e18, math.nan])
def test_a_state_that_owes_more_than_it_can_is_refused(carry: float) -> None:
    with pytest.raises(ValueError, match="gradient step"):
        Ratio(0.3).load_state_dict({"counted": 8, "carry": carry})


@pytest.mark.parametrize("ratio", [4.0, 0.01])
def test_a_ratio_changed_between_runs_takes_effect_without_a_burst(ratio: float) -> None:
    counter = Ratio(0.25)
    for step in range(16, 100_001, 16):
        counter(step)
    resumed = Ratio(ratio)
    resumed.load_state_dict(counter.state_dict())
    assert resumed(100_016) <= 16 * ratio + 1
    assert sum(resumed(step) for step in range(100_032, 110_017, 16)) == pytest.approx(10_000 * ratio, abs=1)


def test_a_later_start_given_on_resume_is_kept_to() -> None:
    counter = Ratio(1.0)
    counter(500)
    resumed = Ratio(1.0, start=2000)
    resumed.load_state_dict(counter.state_dict())
    assert [resumed(step) for step in (501, 1000, 2000)] == [0, 0, 0]
    assert resumed(2010) == 10


# --- the agent's use of it -------------------------------------------------------------------------------------------


def test_training_begins_when_the_replay_holds_one_batch_of_steps(
    make_agent: Callable[..., Any], play: Callable[..., Any]
) -> None:
    """One world, batches of 4 x 8: the authors wait for 32 steps, not for the first 9 that make a sequence."""
    agent = make_agent(num_envs=1, batch_size=4, batch_length=8, replay_size=100, replay_ratio=1.0)
    player, due = agent.player(1), []
    for step in range(1, 41):
        play(agent, 1, player=player, seed=step)
        due.append(agent.updates_due(step))
    assert due[:31] == [0] * 31
    assert all(due[32:])


def test_no_updates_are_made_up_for_once_the_replay_is_ready(
    make_agent: Callable[..., Any], play: Callable[..., Any]
) -> None:
    """Sequences of 7 steps: the steps before the first of them is whole must not be owed as updates."""
    agent = make_agent(num_envs=3, batch_size=2, replay_ratio=0.5)
    player, due = agent.player(3), []
    for step in range(1, 21):
        play(agent, 1, player=player, seed=step)
        due.append(agent.updates_due(3 * step))
    assert sum(due) > 0
    assert max(due) <= 2


def test_resuming_without_the_replay_does_not_make_up_for_the_steps_that_fill_it(
    make_agent: Callable[..., Any], play: Callable[..., Any]
) -> None:
    agent = make_agent(replay_ratio=0.5)
    play(agent, 10)
    for step in range(30, 3001, 3):
        agent.updates_due(step)
    resumed = make_agent(replay_ratio=0.5)
    resumed.load_state_dict(agent.state_dict(replay=False))
    player, due = resumed.player(3), []
    for step in range(1, 21):
        play(resumed, 1, player=player, seed=step)
        due.append(resumed.updates_due(3000 + 3 * step))
    assert sum(due) > 0
    assert max(due) <= 2


def test_no_updates_before_learning_starts(make_agent: Callable[..., Any], play: Callable[..., Any]) -> None:
    agent = make_agent(replay_ratio=1.0, learning_starts=60)
    player = agent.player(3)
    due = []
    for step in range(1, 26):
        play(agent, 1, player=player, seed=step)
        due.append(agent.updates_due(3 * step))
    assert due[:20] == [0] * 20
    assert due[20:] == [3] * 5


def test_a_ring_smaller_than_a_batch_is_refused_or_learned_from_but_never_waited_for(
    make_agent: Callable[..., Any], play: Callable[..., Any]
) -> None:
    """20 steps in all, batches of 4 x 8 = 32: waiting for 32 would be waiting for ever, without a word."""
    try:
        agent = make_agent(num_envs=1, batch_size=4, batch_length=8, replay_size=20, replay_ratio=1.0)
    except ValueError as refusal:
        assert "replay size 20" in str(refusal)  # noqa: PT017
        return
    player, due = agent.player(1), 0
    for step in range(1, 61):
        play(agent, 1, player=player, seed=step)
        due += agent.updates_due(step)
    assert due > 0
