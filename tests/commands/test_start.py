"""How a run starts: what comes before what, and what is left when the update cannot be compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.commands import run_directory, training
from sheeplike.commands.agents import learning_begins
from sheeplike.commands.config import load
from sheeplike.commands.errors import CommandError
from sheeplike.commands.schema import Config
from sheeplike.commands.sources import Sources
from sheeplike.envs.mjx.vector_env import MjxVectorEnv
from sheeplike.loop import LoopState

QUIET = ("video_every=null", "eval.every=null", "checkpoint.every=null", "logger=jsonl")
WORLDS = 2


@pytest.fixture
def config() -> Config:
    """Two worlds, which begin to learn at 32 policy steps; of 64."""
    return load(["exp=dreamer_v3", "env=cartpole_balance", "dry_run=true", "total_steps=64", *QUIET], Sources([]))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to worlds and agent from the moment that the run has its state, in order."""
    happened: list[str] = []

    def told(kind: type, method: str) -> None:
        original = getattr(kind, method)
        monkeypatch.setattr(kind, method, lambda self, *args: happened.append(method) or original(self, *args))

    for kind, method in ((MjxVectorEnv, "step"), (DreamerV3, "warm_up"), (DreamerV3, "update")):
        told(kind, method)
    begin = LoopState.begin
    monkeypatch.setattr(LoopState, "begin", lambda *args: happened.clear() or begin(*args))
    return happened


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets every later update fail to compile."""

    def fail(agent: DreamerV3) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee the documentation")

    return lambda: monkeypatch.setattr(DreamerV3, "warm_up", fail)


def rows(run_dir: Path) -> list[dict[str, float]]:
    """What a run has recorded, without times."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds" and not k.startswith("time/")} for row in found]


def test_the_worlds_begin_and_the_update_is_compiled_when_the_replay_is_full(
    config: Config, events: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """When it is compiled changes nothing of a run: where filling takes long, it is before the replay is full."""
    assert training.run(config, tmp_path / "run")
    compiled = events.index("warm_up")
    assert events[:compiled] == ["step"] * (learning_begins(config) // WORLDS)
    assert events.count("warm_up") == 1
    assert events.index("update") > compiled
    output = capsys.readouterr().out
    assert output.index("filling the replay") < output.index("s per gradient step") < output.index("first gradient")

    monkeypatch.setattr(training, "COLLECT_FIRST", 0)
    assert training.run(config, tmp_path / "eager")
    assert events[0] == "warm_up"
    assert rows(tmp_path / "eager") == rows(tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")] == [32, 64]


def test_a_run_that_cannot_learn_is_refused_and_leaves_nothing(
    config: Config, no_memory: Callable[[], None], tmp_path: Path
) -> None:
    no_memory()
    with pytest.raises(CommandError, match=r"^CUDA out of memory. Tried to allocate 20.00 GiB.$"):
        training.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert run_directory.check(replace(config, run_dir=str(tmp_path / "run"), dry_run=False)) == tmp_path / "run"


def test_a_run_that_cannot_go_on_learning_keeps_what_it_has(
    config: Config, no_memory: Callable[[], None], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    assert training.run(config, run_dir)
    before = rows(run_dir)
    no_memory()
    with pytest.raises(CommandError, match="CUDA out of memory"):
        training.run(replace(config, total_steps=80), run_dir, resume=True)
    assert run_directory.checkpoint_steps(run_dir) == [64]
    assert rows(run_dir) == before
    run_directory.lock(run_dir).close()  # nobody holds it


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["exp=dreamer_v3", "learning_starts=null"], 32),
        (["exp=dreamer_v3", "learning_starts=41"], 40),
        (["exp=ppo"], 32),
    ],
)
def test_learning_begins_one_iteration_before_an_update_can_be_due(overrides: list[str], expected: int) -> None:
    config = load([*overrides, "env=cartpole_balance", "dry_run=true"], Sources([]))
    assert learning_begins(config) == expected
