"""The interaction loop's bookkeeping: time alignment, counting, hooks, and fair evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from sheeplike.agents.agent import Step
from sheeplike.envs.contract import OptionalMembers
from sheeplike.loop import Every, LoopState, evaluate, first_step, train


class Corridor(OptionalMembers, VectorEnv):
    """World ``n`` plays episodes of ``lengths[n]`` steps; the last one terminates in even worlds, else is truncated.

    An observation tells episode, step and the action that led there, so that a test can tell what was seen when. The
    reward for arriving at step ``t`` of episode ``e`` is ``100 * e + 10 * n + t``; a reset frame has none.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, lengths: list[int]) -> None:
        self.num_envs, self.lengths = len(lengths), torch.tensor(lengths)
        self.worlds = torch.arange(self.num_envs)
        self.seeds: list[int | None] = []
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self.seeds.append(seed)
        self.episode = torch.zeros(self.num_envs, dtype=torch.int64)
        self.time = torch.zeros(self.num_envs, dtype=torch.int64)
        self.total = torch.zeros(self.num_envs)
        self.over = torch.zeros(self.num_envs, dtype=torch.bool)
        return self.observe(torch.full((self.num_envs, 1), -1.0)), self.info()

    def observe(self, action: Tensor) -> dict[str, Tensor]:
        state = torch.stack([self.episode.float(), self.time.float(), action[:, 0]], -1)
        frame = self.time.view(-1, 1, 1, 1).expand(-1, 2, 2, 3).to(torch.uint8)
        return {"pixels/front": frame, "state": state}

    def info(self) -> dict[str, Any]:
        success = self.over & (self.worlds == 1)
        episode = {"return": self.total.clone(), "length": self.time.int(), "success": success}
        return {"episode": episode | {"reward_terms": {"step": self.total.clone()}}}

    def step(self, action: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, dict[str, Any]]:
        self.steps += 1
        reset = self.over
        action = torch.where(reset[:, None], -1.0, action)
        self.episode = self.episode + reset
        self.time = torch.where(reset, 0, self.time + 1)
        reward = torch.where(reset, 0.0, (100 * self.episode + 10 * self.worlds + self.time).float())
        self.total = torch.where(reset, 0.0, self.total + reward)
        self.over = self.time >= self.lengths
        even = self.worlds % 2 == 0
        return self.observe(action), reward, self.over & even, self.over & ~even, self.info()


class Counter:
    """A player whose actions number its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Tensor], Tensor, bool]] = []
        self.extras: dict[str, Tensor] = {}

    def act(self, obs: dict[str, Tensor], is_first: Tensor, *, sample: bool = True) -> Tensor:
        self.calls.append((obs, is_first, sample))
        number = torch.full((len(is_first), 1), float(len(self.calls)))
        self.extras = {"number": number[:, 0]}
        return number


class Scribe:
    """An agent that writes everything down; ``due`` updates after every call."""

    def __init__(self, due: Callable[[int], int] = lambda steps: 0) -> None:
        self.due, self.log = due, []
        self.steps: list[Step] = []
        self.players: list[Counter] = []

    def player(self, num_envs: int, *, explore: bool = False) -> Counter:
        self.players.append(Counter())
        return self.players[-1]

    def add(self, step: Step) -> None:
        self.log.append("add")
        self.steps.append(Step(**{name: getattr(step, name) for name in step.__dataclass_fields__}))

    def updates_due(self, policy_steps: int) -> int:
        self.log.append(f"due at {policy_steps}?")
        return self.due(policy_steps)

    def update(self) -> dict[str, Tensor]:
        self.log.append("update")
        return {"loss/total": torch.tensor(float(len(self.log)))}


class Observer:
    def __init__(self, log: list[str] | None = None) -> None:
        self.log = [] if log is None else log
        self.seen: list[tuple[Step, dict[str, Any]]] = []
        self.metrics: list[dict[str, Tensor]] = []

    def stepped(self, step: Step, info: dict[str, Any]) -> None:
        self.log.append("stepped")
        self.seen.append((step, info))

    def learned(self, metrics: dict[str, Tensor]) -> None:
        self.log.append("learned")
        self.metrics.append(metrics)


def run(lengths: list[int], iterations: int) -> tuple[Scribe, LoopState, Observer]:
    agent, envs, observer = Scribe(), Corridor(lengths), Observer()
    state = LoopState.begin(agent, envs, seed=5)
    train(agent, envs, state, total_steps=iterations * envs.num_envs, observer=observer)
    assert envs.seeds == [5]
    return agent, state, observer


def column(steps: list[Step], world: int, field: str) -> list[Any]:
    return [getattr(step, field)[world].tolist() for step in steps]


def test_stored_steps_follow_the_time_diagram() -> None:
    """World 0: episodes of 3 steps that terminate. World 1: of 2 steps, truncated."""
    agent, _, _ = run([3, 2], 7)
    steps = agent.steps
    states = torch.stack([step.obs["state"] for step in steps], 1).tolist()  # episode, time, action that led there
    assert states[0] == [[0, 0, -1], [0, 1, 1], [0, 2, 2], [0, 3, 3], [1, 0, -1], [1, 1, 5], [1, 2, 6]]
    assert states[1] == [[0, 0, -1], [0, 1, 1], [0, 2, 2], [1, 0, -1], [1, 1, 4], [1, 2, 5], [2, 0, -1]]
    # The action stored with a step was chosen after seeing it: it leads to the next.
    assert column(steps, 0, "action") == [[1], [2], [3], [4], [5], [6], [7]]
    # The reward stored with a step is for arriving at it; a reset frame has none.
    assert column(steps, 0, "reward") == [0, 1, 2, 3, 0, 101, 102]
    assert column(steps, 1, "reward") == [0, 11, 12, 0, 111, 112, 0]
    assert column(steps, 0, "is_first") == [True, False, False, False, True, False, False]
    assert column(steps, 0, "is_last") == [False, False, False, True, False, False, False]
    assert column(steps, 0, "is_terminal") == column(steps, 0, "is_last")
    assert column(steps, 1, "is_first") == [True, False, False, True, False, False, True]
    assert column(steps, 1, "is_last") == [False, False, True, False, False, True, False]
    assert column(steps, 1, "is_terminal") == [False] * 7, "a truncated episode is not terminal"


def test_the_player_sees_what_is_stored_and_its_extras_are_stored_beside_it() -> None:
    agent, _, _ = run([3, 2], 6)
    (player,) = agent.players
    for number, ((obs, is_first, sample), step) in enumerate(zip(player.calls, agent.steps, strict=True)):
        assert obs is step.obs
        assert torch.equal(is_first, step.is_first)
        assert sample
        assert step.extras["number"].tolist() == [number + 1] * 2


def test_every_iteration_counts_one_policy_step_per_world_resets_included() -> None:
    _, state, observer = run([3, 2, 4], 10)
    assert state.policy_steps == 30
    assert len(observer.seen) == 10
    assert state.step is observer.seen[-1][0]


@pytest.mark.parametrize(("total", "iterations"), [(0, 0), (1, 1), (3, 1), (4, 2), (30, 10), (31, 11)])
def test_the_loop_stops_at_the_first_iteration_that_reaches_the_total(total: int, iterations: int) -> None:
    agent, envs = Scribe(), Corridor([3, 2, 4])
    state = LoopState.begin(agent, envs, seed=0)
    assert train(agent, envs, state, total_steps=total, observer=Observer()) is state
    assert envs.steps == iterations
    assert state.policy_steps == 3 * iterations


def test_one_iteration_acts_adds_steps_learns_then_calls_hooks() -> None:
    agent, envs = Scribe(due=lambda steps: 2 if steps == 4 else 0), Corridor([3, 2])
    hook = Every(2, lambda state: agent.log.append(f"hook {state.policy_steps} {state.gradient_steps}"))
    state = LoopState.begin(agent, envs, seed=0)
    observer = Observer(agent.log)
    train(agent, envs, state, total_steps=6, observer=observer, hooks=[hook])
    learning = ["update", "learned"] * 2
    assert agent.log == [
        *("add", "stepped", "due at 2?", "hook 2 0"),
        *("add", "stepped", "due at 4?", *learning, "hook 4 2"),
        *("add", "stepped", "due at 6?", "hook 6 2"),
    ]
    assert state.gradient_steps == len(observer.metrics) == 2


def test_the_loop_stops_between_iterations_when_told_to() -> None:
    agent, envs = Scribe(), Corridor([3, 2])
    state = LoopState.begin(agent, envs, seed=0)
    train(agent, envs, state, total_steps=100, observer=Observer(), stop=lambda: len(agent.steps) >= 3)
    assert state.policy_steps == 6
    assert len(agent.steps) == 3


@pytest.mark.parametrize("made", range(1, 5))
def test_a_stop_between_two_updates_leaves_the_others_for_later(made: int) -> None:
    """And the hooks of that step."""
    logs = []
    for stops in (False, True):
        agent, envs = Scribe(due=lambda steps: 5 if steps in (4, 6) else 0), Corridor([3, 2])
        hook = Every(2, lambda state, log=agent.log: log.append(f"hook {state.policy_steps} {state.gradient_steps}"))
        state, observer = LoopState.begin(agent, envs, seed=0), Observer(agent.log)
        if stops:
            stop = lambda state=state: state.gradient_steps >= made  # noqa: E731
            train(agent, envs, state, total_steps=6, observer=observer, hooks=[hook], stop=stop)
            assert (state.policy_steps, state.gradient_steps, state.due) == (4, made, 5 - made)
            assert "hook 4" not in " ".join(agent.log)
            stop = lambda state=state: state.gradient_steps >= 5 + made  # noqa: E731
            train(agent, envs, state, total_steps=6, observer=observer, hooks=[hook], stop=stop)
            assert (state.policy_steps, state.gradient_steps, state.due) == (6, 5 + made, 5 - made)
            train(agent, envs, state, total_steps=6, observer=observer, hooks=[hook])
        else:
            train(agent, envs, state, total_steps=6, observer=observer, hooks=[hook])
        assert (state.policy_steps, state.gradient_steps, state.due) == (6, 10, 0)
        logs.append(agent.log)
    assert logs[0] == logs[1]


def test_a_loop_continued_is_a_loop_uninterrupted() -> None:
    whole, _, _ = run([3, 2], 9)
    agent, envs = Scribe(), Corridor([3, 2])
    state = LoopState.begin(agent, envs, seed=5)
    for total in (2, 8, 10, 18):
        train(agent, envs, state, total_steps=total, observer=Observer())
    assert len(agent.steps) == len(whole.steps)
    for ours, theirs in zip(agent.steps, whole.steps, strict=True):
        for name in ("action", "reward", "is_first", "is_last", "is_terminal"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        assert torch.equal(ours.obs["state"], theirs.obs["state"])


@pytest.mark.parametrize(
    ("interval", "increment", "expected"),
    [(10, 2, [10, 20, 30]), (10, 7, [14, 21, 35]), (3, 7, [7, 14, 21, 28, 35]), (100, 7, [])],
    ids=["divides", "does not divide", "shorter than an iteration", "never"],
)
def test_every_calls_once_per_interval_passed(interval: int, increment: int, expected: list[int]) -> None:
    called: list[int] = []
    every = Every(interval, lambda state: called.append(state.policy_steps))
    state = LoopState(Counter(), first_step({"state": torch.zeros(1, 1)}, 1))
    while state.policy_steps + increment <= 35:
        state.policy_steps += increment
        every(state)
    assert called == expected


def test_every_can_resume_where_it_was() -> None:
    called: list[int] = []
    every = Every(10, lambda state: called.append(state.policy_steps), done=50 // 10)
    state = LoopState(Counter(), first_step({"state": torch.zeros(1, 1)}, 1))
    for state.policy_steps in (52, 58, 60, 61):
        every(state)
    assert called == [60]


def test_first_step_begins_an_episode_in_every_world() -> None:
    step = first_step({"state": torch.zeros(4, 2)}, 4)
    assert step.is_first.tolist() == [True] * 4
    assert step.is_last.tolist() == step.is_terminal.tolist() == [False] * 4
    assert step.reward.tolist() == [0.0] * 4
    assert step.reward.dtype == torch.float32


# --- evaluation ------------------------------------------------------------------------------------------------------


def arrived(world: int, length: int) -> float:
    """Return of a first episode: rewards 10 n + 1 ... 10 n + length."""
    return sum(10.0 * world + t for t in range(1, length + 1))


@pytest.mark.parametrize("episodes", [1, 3, 4, 7])
def test_each_world_plays_exactly_one_episode_a_round(episodes: int) -> None:
    """World 1 could finish four episodes while world 2 plays one; only its first counts."""
    lengths = [4, 2, 9]
    agent, envs = Scribe(), Corridor(lengths)
    result = evaluate(agent, envs, episodes=episodes, seed=100)
    expected = [arrived(n % 3, lengths[n % 3]) for n in range(episodes)]
    assert result.returns.tolist() == expected
    assert result.lengths.tolist() == [lengths[n % 3] for n in range(episodes)]
    assert result.success.tolist() == [n % 3 == 1 for n in range(episodes)]
    assert result.reward_terms["step"].tolist() == expected
    assert result.frames == {}
    rounds = -(-episodes // 3)
    assert envs.seeds == [100 + 3 * i for i in range(rounds)], "no two rounds play the same episodes"
    assert len(agent.players) == rounds, "with a player of its own"
    assert not agent.log, "evaluation is neither stored nor learned from"


@pytest.mark.parametrize("sample", [True, False])
def test_evaluation_hands_on_whether_to_sample_and_samples_by_default(sample: bool) -> None:
    agent = Scribe()
    evaluate(agent, Corridor([2, 3]), episodes=2, seed=0, **({} if sample else {"sample": False}))
    assert {call[2] for call in agent.players[0].calls} == {sample}


def test_evaluation_tells_the_player_where_episodes_begin() -> None:
    agent = Scribe()
    evaluate(agent, Corridor([2, 5]), episodes=2, seed=0)
    firsts = torch.stack([is_first for _, is_first, _ in agent.players[0].calls], 1).tolist()
    assert firsts == [[True, False, False, True, False], [True, False, False, False, False]]


def test_evaluation_films_the_first_worlds_of_the_first_round() -> None:
    result = evaluate(Scribe(), Corridor([2, 4, 3]), episodes=6, seed=0, video_envs=2)
    film = result.frames["front"]
    assert film.dtype == torch.uint8
    assert film.shape[1:] == (2, 2, 2, 3)
    assert film[:3, 0, 0, 0, 0].tolist() == [0, 1, 2]
    assert film[:, 1, 0, 0, 0].tolist()[:4] == [0, 1, 2, 3]


def test_the_film_of_a_long_episode_ends_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sheeplike.loop.LONGEST_VIDEO", 3)
    result = evaluate(Scribe(), Corridor([2, 9]), episodes=2, seed=0, video_envs=2)
    assert result.frames["front"].shape[0] == 3
    assert result.lengths.tolist() == [2, 9]


def test_the_film_shows_the_last_frame_of_every_filmed_episode() -> None:
    """Success happens on the last frame: a film that stops one frame short of it never shows it."""
    film = evaluate(Scribe(), Corridor([2, 4]), episodes=2, seed=0, video_envs=2).frames["front"]
    assert film[:, 1, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert film[:, 0, 0, 0, 0].tolist() == [0, 1, 2, 2, 2]
