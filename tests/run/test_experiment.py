"""A run that a program drives, and what becomes of a run whose numbers, disk or program fail."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import sheeplike
from sheeplike import checkpoint
from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.agents.ppo import PPO, PPOConfig
from sheeplike.commands import Request, train
from sheeplike.envs.gym.vector_env import GymVectorEnv
from sheeplike.memory import Rollout
from sheeplike.options import CommandError
from sheeplike.run.evaluation import Evaluator
from sheeplike.run.experiment import Experiment, Finished, Unsaved
from sheeplike.run.guards import Halted
from sheeplike.run.layout import checkpoint_steps
from sheeplike.run.run_dir import plan

SMALL = ("dry_run=true", "logger=[]", "video_every=null", "eval.every=null", "log_every=2")
# Without images, and most in worlds that nothing has to be compiled for.
CARTPOLE = ("env=cartpole_balance", "env.renderer=none", "agent.observations=[state]", *SMALL)
GYM = ("env=gym", "env.id=CartPole-v1", "env.options.frames=none", "agent.observations=[state]", *SMALL)
PPO_JOB = ("exp=ppo", "total_steps=96", "checkpoint.every=32")
DREAMER = ("exp=dreamer_v3", "agent.replay_ratio=0.25")


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., Experiment]:
    def call(*overrides: str, name: str = "run") -> Experiment:
        return sheeplike.init(*overrides, f"run_dir={tmp_path / name}")

    return call


def rows(run: Experiment) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds" and not k.startswith("time/")} for row in found]


def leaves(state: Any) -> Iterator[torch.Tensor]:
    """All tensors of a state."""
    if isinstance(state, torch.Tensor):
        yield state
    for entry in state.values() if isinstance(state, dict) else ():
        yield from leaves(entry)


def newest(run: Experiment) -> dict[str, Any]:
    return checkpoint.load_latest(run.run_dir / "checkpoints")[1]


@pytest.mark.parametrize("given", [5, None, ["exp=ppo"]])
def test_overrides_are_texts(given: object) -> None:
    with pytest.raises(TypeError, match=re.escape(repr(given))):
        sheeplike.init("exp=ppo", given)


@pytest.mark.parametrize("every", [0, -1, 0.5, "8", []])
def test_a_piece_is_a_whole_number_of_steps(every: object, begin: Callable[..., Experiment]) -> None:
    with begin(*PPO_JOB, *GYM) as run, pytest.raises(CommandError):
        run.iterate(every)


def test_the_threads_of_a_run_are_its_own(begin: Callable[..., Experiment]) -> None:
    before = torch.get_num_threads()
    with begin(*PPO_JOB, *GYM, f"fabric.threads={before + 1}"):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_program_drives_a_run(begin: Callable[..., Experiment]) -> None:
    """Pieces with evaluations in between give the same numbers as in one go."""
    with begin(*PPO_JOB, *CARTPOLE, "eval.episodes=1") as run:
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
        assert run.envs.simulator.compilations == 1
    assert run.finished
    assert checkpoint_steps(run.run_dir)[-1] == 96
    with begin(*PPO_JOB, *CARTPOLE, "eval.episodes=1", name="straight") as straight:
        straight.iterate()
    assert [row for row in rows(run) if "eval/episodes" not in row] == rows(straight)
    parts, expected = newest(run), newest(straight)
    for name, tensor in expected["agent"]["modules"].items():
        assert torch.equal(parts["agent"]["modules"][name], tensor), name
    assert torch.equal(parts["rng"]["torch"], expected["rng"]["torch"])


PICK = ("env=franka_pick", "env.options.box_range=0.02", "env.renderer=none", "env.num_envs=2")
CURRICULUM = (*SMALL, *PICK, "agent.observations=[privileged_state]", "checkpoint.every=16")


def widen(run: Experiment, at: Callable[[Experiment], None] = lambda run: None) -> None:
    """Train in pieces, widen the range of the boxes after each, and then call ``at``."""
    while not run.over:
        run.iterate(16)
        if run.interrupted:
            break
        run.envs.set_attr("box_range", 1.5 * run.envs.get_attr("box_range")[0])
        at(run)


def assert_same_agents(run: Experiment, other: Experiment) -> None:
    """Weights and worlds, with their ranges, are equal."""
    for name in ("agent", "envs"):
        parts, expected = leaves(newest(run)[name]), leaves(newest(other)[name])
        assert all(torch.equal(one, same) for one, same in zip(parts, expected, strict=True)), name


def test_a_program_that_is_killed_or_prolonged_keeps_its_decisions(
    begin: Callable[..., Experiment], tmp_path: Path
) -> None:
    """A copy of the directory is what a kill between two decisions leaves."""

    def copy(run: Experiment) -> None:
        run.storage.writer.close()
        if run.policy_steps == 32:
            shutil.copytree(run.run_dir, tmp_path / "killed")

    job = (*PPO_JOB, *CURRICULUM)
    with begin(*job, "total_steps=64", name="whole") as whole:
        widen(whole, copy)
    with sheeplike.init(f"resume={tmp_path / 'killed'}") as killed:
        assert killed.policy_steps == 16
        widen(killed)
    with begin(*job, "total_steps=48", name="short") as short:
        widen(short)
    with sheeplike.init(f"resume={short.run_dir}", "total_steps=64") as prolonged:
        widen(prolonged)
    for run in (killed, prolonged):
        assert_same_agents(run, whole)


@pytest.mark.parametrize("left", [0, 1])
def test_a_program_that_is_stopped_decides_once(
    begin: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """The signal comes in the last iteration of a piece, with ``left`` updates still to be made."""
    job = (*DREAMER, *CURRICULUM, "agent.targets=[]", "agent.replay_ratio=1", "total_steps=64")
    with begin(*job, name="whole") as whole:
        widen(whole)
    update = DreamerV3.update

    def counted(self: DreamerV3) -> dict[str, torch.Tensor]:
        metrics = update(self)
        if stopped.policy_steps == 48 and stopped.state.due == 1 + left:  # this one is not yet counted
            os.kill(os.getpid(), signal.SIGTERM)
        return metrics

    monkeypatch.setattr(DreamerV3, "update", counted)
    with begin(*job) as stopped:
        widen(stopped)
    assert (stopped.policy_steps, stopped.state.due) == (48, left)
    with sheeplike.init(f"resume={stopped.run_dir}") as run:
        widen(run)
    assert_same_agents(run, whole)


def test_what_is_finished_is_over_and_an_error_of_the_program_loses_nothing(
    begin: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
) -> None:
    with begin(*PPO_JOB, *GYM, "total_steps=64") as run:
        run.iterate()
    with begin(*PPO_JOB, *GYM, "total_steps=64", "resume=auto", "log_every=4") as again:
        assert "changed: log_every 2 -> 4" in capsys.readouterr().out
        assert again.over
        assert again.policy_steps == 64
    with pytest.raises(Finished):
        Experiment(plan([f"resume={run.run_dir}"]))
    auto = [*PPO_JOB, *GYM, "total_steps=64", "resume=auto", f"run_dir={run.run_dir}"]
    assert train.main(Request(auto, [], help=False)) == 0
    assert "finished before" in capsys.readouterr().out
    longer = begin(*PPO_JOB, *GYM, "checkpoint.every=null", "resume=auto")
    assert not longer.over
    with pytest.raises(ZeroDivisionError), longer:
        1 / longer.iterate(10).get("nothing", 0)
    assert checkpoint_steps(run.run_dir) == [64, 70]


def test_a_resume_adds_nothing_to_training_time(
    begin: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
) -> None:
    with begin(*PPO_JOB, *GYM) as run:
        run.iterate(32)
    assert PPOConfig.collecting in capsys.readouterr().out
    trained = run.recorder.seconds
    assert trained > 0
    with begin(*PPO_JOB, *GYM, "resume=auto") as again:
        assert again.recorder.seconds == trained
        assert again.recorder.pauses["start"] > run.recorder.pauses["start"] > 0
        again.iterate(64)
        assert again.recorder.seconds > trained
    assert PPOConfig.collecting not in capsys.readouterr().out, "its rollout was saved"


def test_a_resume_with_an_empty_memory_collects_first(
    begin: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint has no rollout, although the resumed run is to save it."""
    with begin(*PPO_JOB, *GYM, "checkpoint.replay=false") as run:
        run.iterate(32)
    capsys.readouterr()
    with sheeplike.init(f"resume={run.run_dir}", "checkpoint.replay=true") as again:
        again.iterate(64)
    assert PPOConfig.collecting in capsys.readouterr().out


def test_the_banner_says_what_is_not_seen(begin: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]) -> None:
    begin(*PPO_JOB, *CARTPOLE).close()
    assert "privileged_state" in capsys.readouterr().out


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Rewards become NaN as long as that is asked for."""
    step = GymVectorEnv.step

    def call(lasts: Callable[[], bool]) -> None:
        def poisoned(self: GymVectorEnv, actions: torch.Tensor) -> tuple:
            obs, reward, *rest = step(self, actions)
            return obs, reward * float("nan") if lasts() else reward, *rest

        monkeypatch.setattr(GymVectorEnv, "step", poisoned)

    return call


@pytest.mark.parametrize("job", [(*DREAMER, *GYM), (*PPO_JOB, *GYM)], ids=["dreamer_v3", "ppo"])
def test_updates_that_stay_non_finite_stop_the_run_with_its_last_good_checkpoint(
    job: tuple[str, ...], begin: Callable[..., Experiment], poison: Callable[..., None]
) -> None:
    """The batch is there to be looked at, and the command that goes on is named; given, it goes on from there."""
    run = begin(*job, "max_skipped=3", "checkpoint.every=60", "total_steps=128")
    run.iterate(70)
    poison(lambda: True)
    with pytest.raises(Halted, match=r"step \d+") as halted, run:
        run.iterate()
    assert halted.value.status == 70
    (sound,), text = checkpoint_steps(run.run_dir), str(halted.value)
    assert f"{run.run_dir / 'nonfinite_batch.pt'}" in text
    assert f"step {sound}" in text
    assert text.endswith(f"python -m sheeplike resume={run.run_dir} seed=1")
    before = newest(run)["agent"]
    assert (sound, int(before["skipped_in_a_row"])) == (60, 0), "what is not sound is not saved"
    seen = torch.load(run.run_dir / "nonfinite_batch.pt", weights_only=True)
    assert any(value.isnan().any() for value in leaves(seen) if value.is_floating_point())
    poison(lambda: False)
    with sheeplike.init(f"resume={run.run_dir}", "seed=1") as again:
        assert again.policy_steps == sound
        same = torch.equal(torch.get_rng_state(), newest(run)["rng"]["torch"])
        assert not same, "or it would come to the same place"
        again.iterate()
    steps = [row["step"] for row in rows(run)]
    assert steps == sorted(set(steps)), "what came after it is dropped"
    before, after = before["modules"], newest(run)["agent"]["modules"]
    assert all(value.isfinite().all() for value in after.values() if value.is_floating_point())
    assert any(not torch.equal(after[name], before[name]) for name in before), "it went on learning"


def test_what_the_last_row_of_a_part_shows_halts_the_next(begin: Callable[..., Experiment]) -> None:
    """A program reads a part's rows at its end, and would go on for ever if the next part did nothing."""
    run = begin(*PPO_JOB, *GYM, "max_skipped=3", "total_steps=128")
    run.iterate(70)
    run.recorder.skipped = 3.0
    run.agent.skipped_in_a_row.fill_(3)
    with pytest.raises(Halted), run:
        run.iterate()


def test_a_suspicion_that_is_not_confirmed_changes_nothing(begin: Callable[..., Experiment]) -> None:
    run = begin(*PPO_JOB, *GYM, "max_skipped=3", "total_steps=128")
    run.iterate(70)
    run.recorder.skipped = 3.0
    run.iterate()
    assert run.finished
    run.close()


def test_memory_that_runs_out_on_the_way_is_no_refusal(
    begin: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 2 would say that nothing was created."""

    def too_large(_: Evaluator) -> None:
        raise MemoryError("worlds")

    monkeypatch.setattr(Evaluator, "__call__", too_large)
    run = begin(*PPO_JOB, *GYM, "total_steps=128", "checkpoint.every=32", "eval.every=96")
    run.iterate(70)
    with pytest.raises(CommandError, match="worlds") as caught, run:
        run.iterate()
    assert caught.value.status == 70
    assert checkpoint_steps(run.run_dir)


def test_a_few_skipped_updates_stop_nothing_and_without_a_checkpoint_there_is_nothing_to_go_on_from(
    begin: Callable[..., Experiment], poison: Callable[..., None]
) -> None:
    run = begin(*PPO_JOB, *GYM, "max_skipped=5", "checkpoint.every=null", "total_steps=256")
    poison(lambda: run.policy_steps < 20)
    run.iterate(128)
    last = rows(run)[-1]
    found = [last[f"health/{name}"] for name in ("skipped_updates_total", "skipped_in_a_row")]
    assert (run.policy_steps, found) == (128, [4, 0])
    poison(lambda: True)
    with pytest.raises(Halted), run:
        run.iterate()
    assert checkpoint_steps(run.run_dir) == []


def test_a_full_disk_is_reported_and_training_goes_on(
    begin: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files can be made; flushing them says that there is no room, as delayed allocation does."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = begin(*PPO_JOB, *GYM)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        run.iterate(40)
        run.storage.writer.close()
    assert checkpoint_steps(run.run_dir) == []
    assert os.strerror(errno.ENOSPC) in capsys.readouterr().err
    run.iterate(35)
    run.storage.writer.close()
    assert checkpoint_steps(run.run_dir) == [64]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unsaved, match="step 64") as unsaved, run:
        pass
    assert unsaved.value.status == 74


def test_the_reason_is_told_if_the_last_checkpoint_cannot_be_written(
    begin: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any) -> None:
        raise RuntimeError("a short write")

    run = begin(*PPO_JOB, *GYM)
    run.iterate(32)
    monkeypatch.setattr(checkpoint.Writer, "_write_directory", short)
    with pytest.raises(Unsaved, match="a short write"), run:
        pass


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_run_whose_directory_was_begun_anew_leaves_the_other_run_alone(
    how: str, begin: Callable[..., Experiment], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = begin(*PPO_JOB, *GYM)
    first.iterate(35)
    first.storage.writer.wait()  # the checkpoint is written while the loop goes on
    if how == "removed":
        shutil.rmtree(first.run_dir)
    else:
        first.run_dir.rename(tmp_path / "old")
    first.iterate(64)
    assert not first.run_dir.exists(), "it is not made again"
    with begin(*PPO_JOB, *GYM, "agent.learning_rate=1e-4", "total_steps=64") as second:
        second.iterate()
    with pytest.raises(Unsaved) as unsaved, first:
        first.iterate()
    assert unsaved.value.status == 74
    assert "Errno" not in str(unsaved.value)
    assert "checkpoint" not in str(unsaved.value), "those there are the other run's"
    assert capsys.readouterr().err.count(str(first.run_dir)) == 1
    assert checkpoint_steps(second.run_dir) == [32, 64]
    assert yaml.safe_load((second.run_dir / "config.yaml").read_text())["agent"]["learning_rate"] == 1e-4


def test_what_a_program_does_after_a_checkpoint_is_saved(begin: Callable[..., Experiment]) -> None:
    """Although there is a checkpoint of the same step already."""
    with begin(*PPO_JOB, *GYM, "eval.episodes=1") as run:
        run.iterate(32)
        run.save()
        evaluated = run.evaluate()
    assert newest(run)["monitor"]["latest"]["eval/return_mean"] == evaluated["eval/return_mean"]


def test_weights_that_are_not_finite_are_never_saved(
    begin: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(*PPO_JOB, *GYM)
    run.iterate(40)
    with torch.no_grad():
        next(run.agent.networks.parameters()).fill_(float("inf"))
    with pytest.raises(Halted, match="step 32"), run:
        run.iterate()
    assert checkpoint_steps(run.run_dir) == [32]
    assert "step 64" in capsys.readouterr().out


def test_at_the_end_what_is_not_finite_is_no_fault_of_the_disk(begin: Callable[..., Experiment]) -> None:
    run = begin(*PPO_JOB, *GYM)
    run.iterate(40)
    with torch.no_grad():
        next(run.agent.networks.parameters()).fill_(float("nan"))
    with pytest.raises(Halted) as halted, run:
        pass
    assert halted.value.status == 70


def test_the_end_is_saved_even_where_the_last_update_was_skipped(
    begin: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
) -> None:
    with begin(*PPO_JOB, *GYM, "total_steps=64") as run:
        run.iterate(63)
        run.agent.skips.skipped_in_a_row.fill_(1)
        run._save_if_finite()
    assert "1 in a row" in capsys.readouterr().out
    assert checkpoint_steps(run.run_dir)[-1] == 64


def test_ctrl_c_saves_and_says_how_to_go_on(
    begin: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, step = begin(*PPO_JOB, *GYM, "checkpoint.every=null"), GymVectorEnv.step

    def interrupted(self: GymVectorEnv, actions: torch.Tensor) -> tuple:
        if run.policy_steps == 40:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, actions)

    monkeypatch.setattr(GymVectorEnv, "step", interrupted)
    with run:
        run.iterate()
    assert (run.over, run.finished, run.status) == (True, False, 130)
    assert checkpoint_steps(run.run_dir) == [40], "after the iteration that was going on"
    assert rows(run)[-1]["step"] == 40
    assert "resume=auto" in capfd.readouterr().out


def test_an_error_in_an_iteration_saves_nothing_that_is_half_done(
    begin: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = begin(*PPO_JOB, *GYM)
    run.iterate(40)

    def fail(self: Rollout, step: dict[str, torch.Tensor]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ZeroDivisionError

    monkeypatch.setattr(Rollout, "add", fail)
    with pytest.raises(ZeroDivisionError), run:
        run.iterate(40)
    assert checkpoint_steps(run.run_dir) == [32]
    assert f"resume={run.run_dir}" not in capfd.readouterr().out, "although it was asked to stop as well"


def test_a_program_cannot_go_on_after_a_stop(begin: Callable[..., Experiment]) -> None:
    with begin(*PPO_JOB, *GYM) as run:
        run.iterate(8)
        os.kill(os.getpid(), signal.SIGTERM)
        run.iterate(8)
        assert (run.policy_steps, run.interrupted) == (8, True)
        with pytest.raises(SystemExit, match="75"):
            run.iterate(8)
    assert checkpoint_steps(run.run_dir) == [8]


@pytest.mark.usefixtures("line")
@pytest.mark.parametrize("stop", [1, 4])
def test_a_run_that_stops_between_two_updates_is_one_run(
    begin: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """Also if the attempt after it is killed: each row is there once, with the numbers of a run that never stopped."""
    job = ("exp=ppo", "env=line", "agent.observations=[state]", *SMALL, "checkpoint.every=null", "total_steps=72")
    job += ("agent.kl_control=early_stop",)
    with begin(*job, name="straight") as straight:
        straight.iterate()
    update, made = PPO.update, []

    def counted(self: PPO) -> dict[str, torch.Tensor]:
        made.append(update(self))
        if len(made) == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return made[-1]

    monkeypatch.setattr(PPO, "update", counted)
    with begin(*job) as stopped:
        stopped.iterate()
    assert (stopped.state.gradient_steps, stopped.over, stopped.finished) == (stop, True, False)
    again = sheeplike.init(f"resume={stopped.run_dir}")
    again.iterate(8)
    again.close()
    with sheeplike.init(f"resume={stopped.run_dir}") as last:
        last.iterate()
    assert last.finished
    assert rows(last) == rows(straight)
    (_, parts), (_, expected) = (checkpoint.load_latest(run.run_dir / "checkpoints") for run in (last, straight))
    assert all(torch.equal(a, b) for a, b in zip(leaves(parts["agent"]), leaves(expected["agent"]), strict=True))


def test_the_host_waits_for_a_gpu_that_is_four_updates_behind(
    begin: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Event] = []

    class Event:
        def __init__(self) -> None:
            self.recorded = self.awaited = False
            made.append(self)

        def record(self) -> None:
            self.recorded = True

        def synchronize(self) -> None:
            self.awaited = True

    with begin(*PPO_JOB, *GYM) as run:
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(run.envs, "device", SimpleNamespace(type="cuda"))
        for _ in range(9):
            assert not run._must_stop()
            assert all(event.recorded for event in made)
            assert [event.awaited for event in made] == [True] * (len(made) - 4) + [False] * min(len(made), 4)
        monkeypatch.undo()
