"""How ``bench`` takes its measurements, sums them up and shows them."""

from __future__ import annotations

import json

import pytest

from sheeplike.commands.bench import PARTS
from sheeplike.commands.benchmark.growth import rows
from sheeplike.commands.benchmark.layers import period
from sheeplike.commands.benchmark.measure import Quantity, interleaved, milliseconds, once, rate, ratio
from sheeplike.commands.benchmark.tables import Report, Table
from sheeplike.config.compose import load
from sheeplike.config.sources import Sources


class Clock:
    """Tasks that take as long as they say, and what was called in which order."""

    def __init__(self, **seconds: float) -> None:
        self.calls: list[tuple[str, int]] = []
        self.tasks = {name: self._task(name, one) for name, one in seconds.items()}

    def _task(self, name: str, seconds: float):
        def task(calls: int) -> float:
            self.calls.append((name, calls))
            return seconds * calls

        return task


def test_median_and_quartiles():
    quantity = Quantity("ms", (4.0, 1.0, 3.0, 2.0, 100.0))
    assert (quantity.median, *quantity.quartiles) == (3.0, 2.0, 4.0)
    assert str(quantity) == "3 (2 to 4)"
    assert quantity.to_json() == {"unit": "ms", "median": 3.0, "low": 2.0, "high": 4.0, "samples": [4, 1, 3, 2, 100]}
    assert Quantity("", (1.0, 2.0)).quartiles == (1.25, 1.75)
    single = once(12_345.6, "MiB")
    assert (single.median, *single.quartiles, str(single)) == (12_345.6, 12_345.6, 12_345.6, "12,346")


def test_units():
    assert milliseconds([0.5, 0.25]).samples == (500, 250)
    assert rate([0.5, 0.25], 16, "steps/s").samples == (32, 64)
    assert ratio([1.0, 3.0], [2.0, 2.0]).samples == (0.5, 1.5)
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])


def test_rounds_are_taken_in_turns_there_and_back():
    clock = Clock(a=0.125, b=0.5)
    taken = interleaved(clock.tasks, seconds=8, rounds=4)
    assert taken == {"a": [0.125] * 4, "b": [0.5] * 4}
    warm_up, estimate, rounds = clock.calls[:2], clock.calls[2:4], clock.calls[4:]
    assert warm_up == estimate == [("a", 1), ("b", 1)]
    assert rounds == [("a", 16), ("b", 4), ("b", 4), ("a", 16)] * 2


def test_tasks_that_depend_on_their_calls_make_as_many():
    clock = Clock(a=0.125, b=0.5)
    interleaved(clock.tasks, seconds=8, rounds=4, alike=True, warm=True)
    assert clock.calls[2:] == [("a", 4), ("b", 4), ("b", 4), ("a", 4)] * 2


@pytest.mark.parametrize(("seconds", "rounds", "expected"), [(8, 8, 4), (1, 8, 3), (1, 2, 2), (100, 8, 8)])
def test_slow_tasks_have_fewer_rounds(seconds, rounds, expected):
    taken = interleaved(Clock(a=2.0, b=0.01).tasks, seconds=seconds, rounds=rounds)
    assert {name: len(samples) for name, samples in taken.items()} == {"a": expected, "b": expected}


def test_nothing_to_measure():
    assert interleaved({}, seconds=1, rounds=3) == {}


@pytest.fixture
def report() -> Report:
    table = Table("update", "One update", ["ms", "why"])
    table.rows = {"eager": [Quantity("ms", (1.0, 2.0, 3.0)), ""], "captured": ["-", "no | GPU"]}
    table.notes = ["A note. " * 20]
    report = Report("Benchmark", {"date": "today"}, {"bench": {"rounds": 3}})
    report.add([table, Table("steps", "Steps", ["steps/s"], {"physics": [once(1234.5, "steps/s")]})])
    return report


def test_tables_are_read_in_one_order_and_hold_every_sample(report):
    data = json.loads(json.dumps(report.to_json()))
    assert list(data["tables"]) == ["steps", "update"]
    assert data["tables"]["update"]["rows"]["eager"]["ms"]["samples"] == [1, 2, 3]
    assert data["tables"]["update"]["rows"]["captured"] == {"ms": "-", "why": "no | GPU"}
    assert data["settings"] == {"bench": {"rounds": 3}}


def test_markdown(report):
    lines = report.to_markdown().splitlines()
    assert lines[0] == "# Benchmark"
    for line in (
        "| date | today |",
        "| physics | 1,234 |",
        "| eager | 2 (1.5 to 2.5) |  |",
        "| captured | - | no / GPU |",
    ):
        assert line in lines
    widths = {line.count("|") for line in lines if line.startswith(("| eager", "| captured", "| --- | ---: | ---: |"))}
    assert widths == {4}


def test_columns_are_aligned(report):
    text = report.to_text().splitlines()
    head, eager, captured = text[text.index("One update") + 1 :][:3]
    assert head.index("ms") + len("ms") == eager.index(")") + 1 == captured.index(" - ") + 2
    assert max(map(len, text)) <= 115


JOB = ["exp=dreamer_v3", "env=franka_pick", "profile=cpu"]


@pytest.mark.parametrize(
    ("num_envs", "replay_ratio", "expected"),
    [(32, 0.125, 1), (2, 0.0625, 8), (16, 0.3, 5), (512, 0.0625, 1), (3, 0.1, 10), (16, 1e-3, 125)],
)
def test_a_round_is_made_of_whole_periods(num_envs, replay_ratio, expected):
    config = load([*JOB, f"env.num_envs={num_envs}", f"agent.replay_ratio={replay_ratio}"], Sources())
    assert period(config) == expected
    updates = expected * num_envs * replay_ratio
    assert updates == pytest.approx(round(updates))


def test_the_period_of_ppo_is_a_rollout():
    assert period(load(["exp=ppo", "env=franka_pick", "agent.rollout_length=24"], Sources())) == 24


def test_growth_changes_one_key_at_a_time():
    found = rows(load([*JOB, "env.num_envs=2", "agent.batch_size=1"], Sources()), Sources())
    worlds = [f"env.num_envs={count}" for count in (1, 2, 8)]
    assert [row.change for row in found] == [*worlds, "agent.batch_size=1", "agent.batch_size=2", "agent/size=12m"]
    assert {row.part for row in found} == {"worlds", "update"} <= set(PARTS)
    found = rows(load(["exp=ppo", "env=franka_pick", "profile=cpu"], Sources()), Sources())
    assert [row.change for row in found[3:]] == [f"agent.minibatches={count}" for count in (16, 8, 4)]
    largest = rows(load([*JOB, "agent/size=400m"], Sources()), Sources())
    assert [row.change for row in largest[3:]] == [f"agent.batch_size={count}" for count in (8, 16, 32)]
    gpu = rows(load([*JOB[:2], "profile=gpu", "fabric.accelerator=cuda"], Sources()), Sources())
    assert [row.change for row in gpu[6:]] == ["agent/size=25m", "agent/size=50m"]
