"""Start of a run: the order of events, and what is left when the update cannot be compiled."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.agents.ppo import PPO
from sheeplike.commands import train
from sheeplike.config.compose import load
from sheeplike.config.schema import Config
from sheeplike.config.sources import Sources
from sheeplike.envs.gym.vector_env import GymVectorEnv
from sheeplike.loop import LoopState
from sheeplike.options import CommandError
from sheeplike.run import layout, run_dir
from sheeplike.run.run_dir import Plan

JOB = ("env=gym", "env.id=CartPole-v1", "env.options.frames=none", "agent.observations=[state]", "dry_run=true")
JOB += ("total_steps=64", "video_every=null", "eval.every=null", "checkpoint.every=null", "logger=[]")
WORLDS = 2


def configured(*overrides: str) -> Config:
    return load([*JOB, *overrides], Sources()).config


@pytest.fixture(scope="module")
def config() -> Config:
    """Two worlds, which begin to learn at 32 policy steps; of 64."""
    return configured("exp=dreamer_v3")


class Run(NamedTuple):
    directory: Path
    events: list[str]
    """Events of worlds and agent once the run has its state, in order."""
    output: str


def watched(config: Config, directory: Path) -> Run:
    """Train, and watch."""
    events: list[str] = []
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        agent = {"dreamer_v3": DreamerV3, "ppo": PPO}[config.agent.name]

        def note(kind: type, method: str) -> None:
            original = getattr(kind, method)
            patch.setattr(kind, method, lambda self, *args: events.append(method) or original(self, *args))

        for kind, method in ((GymVectorEnv, "step"), (agent, "warm_up"), (agent, "update")):
            note(kind, method)
        begin = LoopState.begin
        patch.setattr(LoopState, "begin", lambda *args: events.clear() or begin(*args))
        assert train.run(Plan(config, directory)) == 0
    return Run(directory, events, output.getvalue())


@pytest.fixture(scope="module")
def finished(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of 64 policy steps."""
    return watched(config, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates cannot be compiled."""

    def fail(agent: DreamerV3) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee the documentation")

    monkeypatch.setattr(DreamerV3, "warm_up", fail)


def rows(directory: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds" and not k.startswith("time/")} for row in found]


def test_what_is_told_in_which_order(finished: Run) -> None:
    assert finished.events.count("warm_up") == 1
    assert finished.events.index("update") > finished.events.index("warm_up")
    places = [finished.output.index(words) for words in ("filling the replay", "first gradient")]
    assert places == sorted(places)
    assert [row["step"] for row in rows(finished.directory)] == [32, 64]


@pytest.mark.usefixtures("no_memory")
def test_a_run_that_cannot_learn_leaves_its_directory_free(config: Config, tmp_path: Path) -> None:
    """The line names settings that would help."""
    with pytest.raises(CommandError) as refused:
        train.run(Plan(config, tmp_path / "run"))
    assert all(fact in str(refused.value) for fact in ("20.00 GiB", "env.num_envs=1", "agent.batch_length="))
    assert run_dir.check(config.replace(dry_run=False), tmp_path / "run") == tmp_path / "run"


@pytest.mark.usefixtures("no_memory")
def test_a_run_that_cannot_go_on_learning_keeps_what_it_has(config: Config, finished: Run) -> None:
    before = rows(finished.directory)
    with pytest.raises(CommandError):
        train.run(Plan(config.replace(total_steps=80), finished.directory, resume=True))
    assert layout.checkpoint_steps(finished.directory) == [64]
    assert rows(finished.directory) == before
    run_dir.lock(finished.directory).close()


@pytest.mark.parametrize(
    ("overrides", "policy_steps"),
    [
        (["exp=dreamer_v3", "agent.replay_ratio=1"], 32),
        (["exp=dreamer_v3", "agent.replay_ratio=1", "agent.learning_starts=41"], 40),
        (["exp=ppo"], 32),
    ],
)
def test_the_update_is_compiled_one_iteration_before_the_first_is_due(
    overrides: list[str], policy_steps: int, tmp_path: Path
) -> None:
    before = policy_steps // WORLDS
    events = watched(configured(*overrides), tmp_path / "run").events
    assert events[: before + 3] == [*["step"] * before, "warm_up", "step", "update"]
