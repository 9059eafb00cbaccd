"""Rows are written one interval late, so that no log point waits for the device; none is lost or out of order."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gymnasium import spaces

from sheeplike.envs.contract import OptionalMembers
from sheeplike.loop import Evaluation, LoopState, first_step
from sheeplike.monitor.logger import RunLogger
from sheeplike.monitor.progress import Progress
from sheeplike.run import snapshot
from sheeplike.run.recorder import Recorder

INTERVAL = 10


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def recorder(tmp_path: Path, screen: io.StringIO) -> Iterator[Recorder]:
    agent = SimpleNamespace(
        counters=lambda policy_steps, gradient_steps: {"replay/size": float(policy_steps)},
        report=lambda: ({"wm/psnr": torch.tensor(9.0)}, {}),
        dream=dict,
        history=None,
        skipped_in_a_row=torch.zeros((), dtype=torch.int64),
        skipped_total=torch.zeros((), dtype=torch.int64),
        state_dict=lambda replay, history=True: {"weights": torch.zeros(1)},
    )
    box = spaces.Box(-1, 1, (1,))
    envs = OptionalMembers()
    envs.num_envs, envs.device, envs.metadata, envs.state_dict = 2, "cpu", {"render_fps": 10}, dict
    envs.single_observation_space, envs.single_action_space = spaces.Dict({"state": box}), box
    logger = RunLogger(tmp_path)
    yield Recorder(agent, envs, Progress(1000, interval=0.0, file=screen), logger)
    logger.close()


@pytest.fixture
def state() -> LoopState:
    player = SimpleNamespace(state_dict=dict)
    return LoopState(player, first_step({"state": torch.zeros(2, 1)}, 2))


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[], list[tuple[int, int, float]]]:
    """Policy steps, gradient steps and loss of every row on the disk; -1 where there is no loss."""

    def read() -> list[tuple[int, int, float]]:
        found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["gradient_steps"], row.get("loss/total", -1.0)) for row in found]

    return read


def learn(recorder: Recorder, state: LoopState, *losses: float) -> None:
    """One interval of the loop up to its log point."""
    for loss in losses:
        recorder.learned({"loss/total": torch.tensor(loss)})
        state.gradient_steps += 1
    state.policy_steps += INTERVAL


def test_a_row_has_the_numbers_and_the_place_of_its_own_log_point(recorder, state, rows, tmp_path) -> None:
    learn(recorder, state, 1.0, 2.0)
    recorder.log(state)
    assert rows() == []
    learn(recorder, state, 5.0)
    recorder.log(state)
    assert rows() == [(10, 2, 1.5)]
    learn(recorder, state, 6.0, 8.0, 10.0)
    recorder.log(state)
    assert rows() == [(10, 2, 1.5), (20, 3, 5.0)]
    recorder.flush()
    assert rows() == [(10, 2, 1.5), (20, 3, 5.0), (30, 6, 8.0)]
    recorder.flush()
    assert len(rows()) == 3
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["replay/size"] == 30.0, "what the host knew is of the same moment"


def test_a_log_point_reads_nothing_that_has_just_been_issued(recorder, state, rows, monkeypatch) -> None:
    real, allowed, read = torch.Tensor.tolist, set(), []

    def guarded(tensor: torch.Tensor) -> list[float]:
        assert id(tensor) in allowed, "a tensor was read at the log point that made it"
        read.append(tensor)
        return real(tensor)

    def refuse(*args: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(torch.Tensor, "tolist", guarded)
    for name in ("item", "cpu", "numpy", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for number in range(4):
        learn(recorder, state, float(number))
        recorder.log(state)
        assert len(read) == 3 * number
        allowed = {id(taken._values) for taken in recorder.pending[2:]}
    assert rows() == [(10, 1, 0.0), (20, 2, 1.0), (30, 3, 2.0)]


def test_skipped_updates_are_counted_as_of_their_log_point(recorder, state, tmp_path) -> None:
    """Skipped updates in a row, and in all: the agent counts on where its counters are."""
    agent = recorder.agent
    for in_a_row, total in ((2, 2), (0, 2), (1, 3)):
        agent.skipped_in_a_row.fill_(in_a_row)
        agent.skipped_total.fill_(total)
        learn(recorder, state, 1.0)
        recorder.log(state)
    agent.skipped_total.fill_(9)
    recorder.flush()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(row["health/skipped_in_a_row"], row["health/skipped_updates_total"]) for row in rows]
    assert found == [(2, 2), (0, 2), (1, 3)]
    assert recorder.skipped == 1


def test_rows_of_evaluations_and_reports_stand_behind_what_came_before(recorder, state, rows) -> None:
    numbers = torch.ones(2)
    result = Evaluation(numbers, numbers.int(), numbers.bool(), {}, {})
    learn(recorder, state, 1.0)
    recorder.log(state)
    recorder.report(state)
    recorder.evaluated(result, state, {})
    assert rows() == [(10, 1, 1.0), (10, 1, -1.0), (10, 1, -1.0)]
    learn(recorder, state, 2.0)
    recorder.evaluated(result, state, {})  # between two log points
    assert rows()[3:] == [(20, 2, -1.0)]
    recorder.log(state)
    recorder.flush()
    assert rows()[4:] == [(20, 2, 2.0)]


@pytest.mark.parametrize("success", [1.0, math.nan])
def test_an_evaluation_says_what_came_out(recorder, state, screen, success) -> None:
    recorder.evaluated(
        Evaluation(torch.tensor([1.0, 1.0]), torch.ones(2).int(), torch.full((2,), success), {}, {}), state, {}
    )
    line = screen.getvalue().splitlines()[-1]
    assert f" {state.policy_steps:,}: return 1 (1 to 1)" in line
    assert ("100% (34% to 100%)" in line) == (success == 1)


def test_a_world_that_is_not_finite_costs_one_line(recorder, state, screen) -> None:
    for count in (0.0, 2.0, 1.0):
        recorder._write({"health/nonfinite_worlds": count}, state)
    assert screen.getvalue().count("health/nonfinite_worlds") == 1


def test_a_pause_does_not_count_for_the_time_that_remains(recorder, monkeypatch) -> None:
    skipped = []
    monkeypatch.setattr(recorder.progress, "skip", lambda seconds: skipped.append(1))
    with recorder.pause("evaluation"):
        assert not skipped
    assert skipped == [1]


def test_a_checkpoint_finds_all_rows_up_to_it_on_the_disk(recorder, state, rows, tmp_path) -> None:
    """A run that is resumed from it never comes to write them. What has been summed up since is part of it."""
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(replay=False),
        env=SimpleNamespace(name="corridor"),
        agent=SimpleNamespace(name="scribe"),
    )
    learn(recorder, state, 1.0)
    recorder.log(state)
    recorder.learned({"loss/total": torch.tensor(4.0)})
    parts, *_ = snapshot.take(recorder.agent, recorder.envs, recorder, config, state)
    assert rows() == [(10, 1, 1.0)]
    ((_, sums, counts),) = parts["monitor"]["metrics"]["groups"]
    assert (sums.tolist(), counts.tolist()) == ([4.0], [1.0])
    learn(recorder, state, 6.0)
    recorder.log(state)
    recorder.flush()
    assert rows()[1:] == [(20, 2, 5.0)]


def test_seconds_are_of_training_alone_and_pauses_have_columns_of_their_own(recorder, state, tmp_path) -> None:
    with recorder.training(state):
        time.sleep(0.01)
        with recorder.pause("evaluation"):
            before = recorder.seconds
            time.sleep(0.01)
            assert recorder.seconds == before
        recorder.log(state)
    trained = recorder.seconds
    with recorder.pause("checkpoint"):
        time.sleep(0.01)
    assert 0 < trained == recorder.seconds
    recorder.log(state)
    recorder.flush()
    first, second = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert first["time/evaluation_seconds"] == second["time/evaluation_seconds"] > 0
    assert first["time/checkpoint_seconds"] == 0 < second["time/checkpoint_seconds"]


def test_the_progress_line_is_not_set_back_by_a_late_row(recorder, state, screen) -> None:
    recorder.progress.stage("filling the replay")
    for loss in (1.0, 2.0, 3.0):
        learn(recorder, state, loss)
        recorder.progress.update(state.policy_steps)
        recorder.log(state)
    steps = [line.partition("/")[0] for line in screen.getvalue().splitlines() if "policy steps" in line]
    assert steps == ["10", "20", "30"], "and a stage ends with the first gradient step"
