"""Variants of DreamerV3 in a run: each resumes exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sheeplike
from sheeplike.agents.dreamer_v3.plan2explore import Plan2Explore
from sheeplike.options import CommandError

VARIANTS = (
    "agent.representation=barlow",
    "agent.actor_gradient=dynamics",
    "agent.actor_gradient=both",
    "exp=plan2explore",
)


def run(place: Path, *overrides: str) -> sheeplike.Experiment:
    exp = () if any(override.startswith("exp=") for override in overrides) else ("exp=dreamer_v3",)
    job = (*exp, "env=line", "profile=cpu", "dry_run=true", "compile=off", "total_steps=96")
    job = (*job, "agent.observations=[state]", "agent.replay_ratio=0.25", "eval.every=null", "video_every=null")
    return sheeplike.init(*job, f"run_dir={place}", *overrides)


@pytest.mark.usefixtures("line")
@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_exact(variant: str, tmp_path: Path) -> None:
    with run(tmp_path / "whole", variant) as whole:
        whole.iterate()
        expected = whole.agent.networks.state_dict()
    with run(tmp_path / "parts", variant) as first:
        first.iterate(64)
    with run(tmp_path / "parts", variant, "resume=auto") as second:
        assert second.policy_steps == 64
        second.iterate()
        for name, value in second.agent.networks.state_dict().items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.usefixtures("line")
def test_a_task_begins_with_an_explored_model_and_its_replay(tmp_path: Path) -> None:
    with run(tmp_path / "explored", "exp=plan2explore") as explored:
        explored.iterate()
        learnt, stored = explored.agent.networks.state_dict(), explored.agent.replay.storage
    begin = f"agent.from={tmp_path / 'explored'}"
    with run(tmp_path / "task", begin) as task:
        for name, value in task.agent.networks.state_dict().items():
            assert torch.equal(value, learnt[name]), name
        for name, value in task.agent.replay.storage.items():
            assert torch.equal(value, stored[name]), name
        assert len(task.agent.replay) == 96
        task.iterate(64)
    draws = []
    for seed in (1, 2):
        with run(tmp_path / f"seed_{seed}", begin, f"seed={seed}") as other:
            draws.append(other.agent.generator.get_state())
    assert not torch.equal(*draws), "each run draws its own sequences"
    with run(tmp_path / "task", "resume=auto", begin) as task:
        assert task.policy_steps == 64, "a resumed run does not begin again"
        assert len(task.agent.replay) == 96 + 64
        task.iterate()
        assert task.finished


@pytest.mark.usefixtures("line")
def test_a_run_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with run(tmp_path / "explored", "exp=plan2explore") as explored:
        explored.iterate()
    misfits = (
        "env.num_envs=4",
        "agent.size=12m",
        "agent.reward_scaling=10",
        "agent.horizon=50",
        "env.options.episode_length=12",
    )
    for place, others in (*(("explored", (misfit,)) for misfit in misfits), ("nothing", ())):
        with pytest.raises(CommandError, match=r"agent\.from="):
            run(tmp_path / "task", f"agent.from={tmp_path / place}", *others)
        assert not (tmp_path / "task").exists()


@pytest.mark.usefixtures("line")
def test_a_run_that_cannot_be_begun_with_is_refused(tmp_path: Path) -> None:
    for name, made in (("ppo", "exp=ppo"), ("bare", "checkpoint.replay=false")):
        job = ("exp=dreamer_v3", made) if name == "bare" else (made,)
        job = (*job, "env=line", "profile=cpu", "dry_run=true", "compile=off", "agent.observations=[state]")
        with sheeplike.init(*job, "eval.every=null", "video_every=null", f"run_dir={tmp_path / name}") as earlier:
            earlier.iterate()
        with pytest.raises(CommandError, match=r"agent\.from="):
            run(tmp_path / "task", f"agent.from={tmp_path / name}")


@pytest.mark.usefixtures("line")
def test_training_explores_and_evaluation_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, player = [], Plan2Explore.player

    def listen(agent: Plan2Explore, num_envs: int, *, explore: bool = False) -> object:
        asked.append(explore)
        return player(agent, num_envs, explore=explore)

    monkeypatch.setattr(Plan2Explore, "player", listen)
    with run(tmp_path / "run", "exp=plan2explore") as first:
        assert asked[-1], "the player of the loop"
        first.iterate(64)
        del asked[:]
        first.evaluate()
        assert asked == [False]
    with run(tmp_path / "run", "exp=plan2explore", "resume=auto"):
        assert asked[-1]
