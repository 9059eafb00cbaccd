"""A run that a program drives, and what becomes of a run whose numbers, disk or program fail."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sheeplike.commands.faults import Halted, Unsaved, examine

import sheeplike
from sheeplike import checkpoint
from sheeplike.envs.mjx.vector_env import MjxVectorEnv
from sheeplike.memory import Rollout
from sheeplike.run.experiment import Experiment
from sheeplike.run.run_dir import checkpoint_steps

SMALL = ("env=cartpole_balance", "dry_run=true", "logger=jsonl", "video_every=null", "eval.every=null", "log_every=2")
PPO = ("exp=ppo", *SMALL, "total_steps=96", "checkpoint.every=32")
DREAMER = ("exp=dreamer_v3", *SMALL, "total_steps=96", "checkpoint.every=48", "agent.replay_ratio=0.5")


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., Experiment]:
    def call(*overrides: str, name: str = "run") -> Experiment:
        return sheeplike.init(*overrides, f"run_dir={tmp_path / name}")

    return call


def rows(run: Experiment) -> list[dict[str, float]]:
    """What a run has recorded, without times."""
    found = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds" and not k.startswith("time/")} for row in found]


def newest(run: Experiment) -> dict[str, Any]:
    return checkpoint.load_latest(run.run_dir / "checkpoints")[1]


def test_a_program_drives_a_run(begin: Callable[..., Experiment]) -> None:
    """In pieces, with evaluations in between: the same numbers as in one go."""
    with begin(*PPO, "eval.episodes=1") as run:
        metrics = run.iterate(41)
        assert run.policy_steps == 42
        assert {"loss/policy", "time/env_sps"} <= metrics.keys()
        assert run.evaluate()["eval/episodes"] == 1.0
        assert not run.over
        run.save()
        assert checkpoint_steps(run.run_dir) == [32, 42]
        while not run.over:
            run.iterate(20)
        assert run.iterate(20) == run.iterate()  # there is no more
        assert run.worlds.simulator.compilations == 1
    assert run.finished
    assert checkpoint_steps(run.run_dir)[-1] == 96
    with begin(*PPO, "eval.episodes=1", name="straight") as straight:
        straight.iterate()
    assert [row for row in rows(run) if "eval/episodes" not in row] == rows(straight)
    parts, expected = newest(run), newest(straight)
    for name, tensor in expected["agent"]["modules"].items():
        assert torch.equal(parts["agent"]["modules"][name], tensor), name
    assert torch.equal(parts["rng"]["torch"], expected["rng"]["torch"])


def test_what_is_finished_is_over_and_an_error_of_the_program_loses_nothing(
    begin: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
) -> None:
    with begin(*PPO, "total_steps=64") as run:
        run.iterate()
    with begin(*PPO, "total_steps=64", "resume=auto", "log_every=4") as again:
        assert "changed: log_every 2 -> 4" in capsys.readouterr().out
        assert again.over
        assert again.policy_steps == 64
    longer = begin(*PPO, "checkpoint.every=null", "resume=auto")
    assert not longer.over
    with pytest.raises(ZeroDivisionError), longer:
        1 / longer.iterate(10).get("nothing", 0)
    assert checkpoint_steps(run.run_dir) == [64, 70]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Rewards become NaN as long as that is asked for."""

    def call(lasts: Callable[[], bool]) -> None:
        step = MjxVectorEnv.step

        def poisoned(self: MjxVectorEnv, actions: torch.Tensor) -> tuple:
            obs, reward, *rest = step(self, actions)
            return obs, reward * float("nan") if lasts() else reward, *rest

        monkeypatch.setattr(MjxVectorEnv, "step", poisoned)

    return call


def test_updates_that_are_not_finite_go_back_to_a_checkpoint_and_then_on(
    begin: Callable[..., Experiment], poison: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with begin(*DREAMER, "faults.max_skipped=3") as run:
        run.iterate(50)
        assert run.writer.holds(48)
        before = {name: value.clone() for name, value in newest(run)["agent"]["modules"].items()}
        poison(lambda: not (run.run_dir / "faults").exists())
        run.iterate()
    output = capsys.readouterr().out
    assert "3 updates in a row were not finite" in output
    assert "going back to policy step 48" in output
    assert checkpoint_steps(run.run_dir)[-1] == 96
    steps = [row["step"] for row in rows(run)]
    assert steps == sorted(set(steps)), "what came before is dropped"
    (dumped,) = (run.run_dir / "faults").iterdir()
    found = torch.load(dumped, weights_only=True)
    assert found["batch"]["reward"].isnan().any()
    seen = examine(dumped)
    assert not math.isfinite(seen["loss/reward"])
    assert seen["nonfinite/reward"] > 0
    assert math.isfinite(seen["loss/dyn"])
    after = newest(run)["agent"]["modules"]
    assert all(value.isfinite().all() for value in after.values() if value.is_floating_point())
    assert any(not torch.equal(after[name], before[name]) for name in before), "it went on learning"


def test_a_run_that_stays_non_finite_halts(begin: Callable[..., Experiment], poison: Callable[..., None]) -> None:
    run = begin(*PPO, "faults.max_skipped=3", "total_steps=160")
    run.iterate(36)
    poison(lambda: True)
    with run, pytest.raises(Halted, match="halted after 1 rollbacks") as halted:
        run.iterate()
    assert halted.value.status == 70
    assert checkpoint_steps(run.run_dir) == [32, 64], "nothing is saved of what is not sound"
    assert list((run.run_dir / "faults").iterdir())
    assert all(value.isfinite().all() for value in newest(run)["agent"]["modules"].values())


@pytest.mark.slow
def test_without_a_checkpoint_it_halts_at_once(begin: Callable[..., Experiment], poison: Callable[..., None]) -> None:
    run = begin(*PPO, "faults.max_skipped=1", "checkpoint.every=null")
    poison(lambda: True)
    with run, pytest.raises(Halted, match="halted: there is no sound checkpoint"):
        run.iterate()


def test_a_full_disk_is_reported_and_training_goes_on(
    begin: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files can be made; flushing them says that there is no room, as delayed allocation does."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = begin(*PPO)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        run.iterate(40)
        assert not run.writer.holds(32)
    assert checkpoint_steps(run.run_dir) == []
    assert "No space left on device" in capsys.readouterr().err
    run.iterate(35)
    assert run.writer.holds(64)
    assert checkpoint_steps(run.run_dir) == [64]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unsaved, match=r"its newest checkpoint is of policy step 64.*No space left") as unsaved, run:
        pass
    assert unsaved.value.status == 74


def test_a_rollback_without_a_memory_begins_with_an_empty_one(
    begin: Callable[..., Experiment], poison: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise what is not finite stays in the replay, and the run halts again. Saves that fail do not undo the count.

    The last updates of the second part are skipped: that is not saved in place of what is sound.
    """
    run = begin(*DREAMER, "faults.max_skipped=3", "checkpoint.replay=false", "total_steps=192")
    run.iterate(50)
    poison(lambda: not (run.run_dir / "faults").exists())
    run.iterate(96)
    output = capsys.readouterr().out
    assert "going back to policy step 48" in output
    assert "what had been seen is forgotten" in output
    assert not run.agent.replay.storage["reward"][: run.agent.replay.added].isnan().any()
    assert run._rollbacks == 1
    poison(lambda: True)
    with run, pytest.raises(Halted, match="halted after 1 rollbacks"):
        run.iterate()
    assert checkpoint_steps(run.run_dir)[-1] <= 144


def test_what_a_program_does_after_a_checkpoint_is_saved(begin: Callable[..., Experiment]) -> None:
    """Although there is a checkpoint of the same step already."""
    with begin(*PPO, "eval.episodes=1") as run:
        run.iterate(32)
        assert run.writer.holds(32)
        evaluated = run.evaluate()
    assert newest(run)["monitor"]["latest"]["eval/return_mean"] == evaluated["eval/return_mean"]


@pytest.mark.slow
def test_weights_that_are_not_finite_are_never_saved(
    begin: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(*PPO, "faults.max_rollbacks=0")
    run.iterate(40)
    with torch.no_grad():
        next(run.agent.networks.parameters()).fill_(float("inf"))
    with run, pytest.raises(Halted, match=r"holds NaN or infinity.*halted after 0 rollbacks"):
        run.iterate()
    assert checkpoint_steps(run.run_dir) == [32]
    assert "no checkpoint at policy step 64" in capsys.readouterr().out


@pytest.mark.slow
def test_an_error_in_an_iteration_saves_nothing_that_is_half_done(
    begin: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = begin(*PPO)
    run.iterate(40)

    def fail(self: Rollout, step: dict[str, torch.Tensor]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ZeroDivisionError

    monkeypatch.setattr(Rollout, "add", fail)
    with pytest.raises(ZeroDivisionError), run:
        run.iterate(40)
    assert checkpoint_steps(run.run_dir) == [32]
    assert "saved; go on" not in capfd.readouterr().out, "although it was asked to stop as well"
