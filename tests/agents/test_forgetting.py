"""What an agent has seen can be taken from it: then it goes on as one that has just been built."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Make = Callable[..., Any]
NAN = float("nan")
# More steps than history, rewards that bootstrap, a ring that has wrapped.
PPO = {"cameras": ("front",), "frame_stack": 3, "augment": True, "learning_rate": 1e-2}
DREAMER = {"replay_size": 3 * 30, "replay_ratio": 0.5, "learning_rate": 1e-3}


def copied(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.fixture(params=["dreamer_v3", "ppo"])
def make(request: pytest.FixtureRequest, make_agent: Make, make_ppo: Make) -> Make:
    options = PPO if request.param == "ppo" else DREAMER
    return lambda **more: (make_ppo if request.param == "ppo" else make_agent)(**(options | more))


def on_policy(agent: Any) -> bool:
    return hasattr(agent, "rollout")


def go_on(agent: Any, play: Make, start: int, steps: int = 24) -> list[dict[str, float]]:
    """Play and learn from policy step ``start`` on, as the loop does; what every update said, and how many were due."""
    torch.manual_seed(7)
    player, begin, told = agent.player(3), None, []
    for t in range(steps):
        ends = {(0, t % 3)} if t % 5 == 4 else ()
        (step,) = play(agent, 1, seed=100 + t, player=player, begin=begin, terminal=ends)
        begin = step.is_last
        due = agent.updates_due(start + 3 * (t + 1))
        told.append({"due": due})
        told += [{name: value.item() for name, value in agent.update().items()} for _ in range(due)]
    return told


def poisoned(agent: Any, play: Make) -> None:
    """Full of steps that no update may see, some of whose updates have been skipped, in the middle of everything."""
    go_on(agent, play, 1000, 40)
    memory = agent.rollout if on_policy(agent) else agent.replay
    for ring in memory.storage.values():
        ring.fill_(NAN if ring.is_floating_point() else 1)
    if on_policy(agent):
        memory.age.fill_(2)
        for updates in (8, 1):  # a whole rollout's, whose first batch is kept, and some of the next one's
            while not memory.full:
                play(agent, 1)
                memory.storage["reward"].fill_(NAN)
            for _ in range(updates):
                agent.update()
    else:
        for _ in range(2):
            agent.update()
        play(agent, 14)  # sequences that wait to be served
        assert memory.fresh
    assert agent.skipped_in_a_row.item() > 0
    assert any(bool(value.any()) for value in agent.offending_batch().values())


def same(one: Any, other: Any) -> bool:
    """Bit for bit, as dicts of tensors and plain values."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(9), other.nan_to_num(9))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def held(agent: Any) -> list[Tensor]:
    """Everything that a captured update reads or writes where it is."""
    shared = [agent.skipped_in_a_row, agent.skipped_total, *agent.faults.first.values()]
    if on_policy(agent):
        rollout = agent.rollout
        shared += [agent.advantage, agent.target, agent.valid, agent.stopped, rollout.age, *rollout.storage.values()]
    else:
        shared += [agent.replay.head, *agent.replay.storage.values()]
    return shared


@pytest.mark.parametrize("foreign", [False, True], ids=["same device", "random numbers of another device"])
def test_it_goes_on_like_a_new_agent_from_a_state_without_memory(foreign: bool, make: Make, play: Make) -> None:
    trained = make(seed=5)
    go_on(trained, play, 0)
    while on_policy(trained) and not trained.rollout.full:
        play(trained, 1)
    for _ in range(trained.updates_due(0) if on_policy(trained) else 0):
        trained.update()
    state = copied(trained.state_dict(replay=False))
    if foreign and "generator" in state:
        state["generator"] = torch.zeros(16, dtype=torch.uint8)
    agent, new = make(), make()
    poisoned(agent, play)
    addresses = [tensor.data_ptr() for tensor in held(agent)]
    agent.forget()
    for one in (agent, new):
        one.load_state_dict(copied(state))
    assert [tensor.data_ptr() for tensor in held(agent)] == addresses
    assert same(agent.counters(72, 36), new.counters(72, 36))
    assert agent.report() == new.report() == ({}, {})
    told = [go_on(one, play, 72) for one in (agent, new)]
    assert same(*told)
    assert {row["health/skipped_update"] for row in told[0] if "due" not in row} == {0}
    assert sum(row.get("due", 0) for row in told[0]) >= 8
    assert same(agent.state_dict(replay=False), new.state_dict(replay=False))
    assert torch.equal(agent.generator.get_state(), new.generator.get_state())
    kept, fresh = (_read(one) for one in (agent, new))
    assert same(kept, fresh)


def _read(agent: Any) -> dict[str, Any]:
    """What is held of steps that have been added."""
    if not on_policy(agent):
        return agent.replay.state_dict()
    stop = agent.rollout.newest + 1
    # Older frames than the rollout's first are those of an earlier trajectory: there has been one.
    return {key: ring[:stop] for key, ring in agent.rollout.storage.items()} | {"age": agent.rollout.age[:stop]}


def test_nothing_of_what_was_seen_is_due_or_told(make: Make, play: Make) -> None:
    agent = make()
    poisoned(agent, play)
    before = agent.skipped_in_a_row.item(), agent.skipped_total.item()
    if agent.history is not None:
        agent.history.chunks = ["a file of these steps"]
    agent.forget()
    assert agent.updates_due(10_000) == 0
    assert all(bool((first == -1).all()) for first in agent.faults.first.values())
    if on_policy(agent):
        assert agent.unknown == PPO["frame_stack"] - 1
    else:
        assert agent.replay.head.item() == len(agent.replay) == 0
    batch = agent.offending_batch()
    assert not any(bool(value.any()) for key, value in batch.items() if key not in ("worlds", "times"))
    assert (agent.skipped_in_a_row.item(), agent.skipped_total.item()) == before, "these were learnt"
    if agent.history is not None:
        assert (agent.history.oldest, agent.history.added, agent.history.chunks) == (0, 0, [])
    assert copied(agent.state_dict())  # no rollout's updates are under way


def test_a_memory_that_was_put_back_in_part_is_given_up(make_agent: Make, play: Make) -> None:
    agent, other = make_agent(**DREAMER), make_agent(**DREAMER)
    play(agent, 20)
    other.load_state_dict(agent.state_dict(history=False))
    with pytest.raises(RuntimeError, match="put back up to"):
        play(other, 1)
    other.forget()
    play(other, 7)
    assert other.update()["health/skipped_update"] == 0


def test_steps_that_were_owed_are_not_made_up_for(make_agent: Make, play: Make) -> None:
    """From a state far behind: nothing is due before there is enough again, and then for the steps since alone."""
    agent = make_agent(**DREAMER)
    play(agent, 20)
    assert agent.updates_due(60) > 0
    agent.forget()
    assert agent.updates_due(3000) == 0
    play(agent, 7)
    assert agent.updates_due(3021) == 0, "one sequence, but less than a batch"
    play(agent, 1, begin=torch.zeros(3, dtype=torch.bool))
    assert agent.updates_due(3024) == 1
