"""Learning from recorded episodes: prefill, a share of each batch, offline; exact resume with each."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import sheeplike
from sheeplike.data.episodes import Episode
from sheeplike.data.writing import NpzWriter
from sheeplike.options import CommandError

JOB = (
    *("exp=dreamer_v3", "env=line", "profile=cpu", "dry_run=true", "compile=off", "total_steps=128"),
    *("agent.observations=[state]", "eval.every=null", "video_every=null"),
)
FPS = 12.5
WAYS = {
    "prefill": (),
    "share": ("data.fraction=0.25",),
    "offline": ("total_steps=0", "data.updates=8", "data.held_out=0.25"),
}


pytestmark = pytest.mark.usefixtures("line")


def record(place: Path, episodes: int = 8, length: int = 20, fps: float = FPS) -> Path:
    """Write episodes whose vectors tell episode and step."""
    writer = NpzWriter(place, {"fps": fps})
    for number in range(episodes):
        steps = np.arange(length)
        state = np.stack([np.full(length, number), steps, steps, steps, steps], 1)[:, :5].astype(np.float32)
        action = np.linspace(-1, 1, length, dtype=np.float32)[:, None]
        reward = (steps > 0).astype(np.float32) * number
        writer.add(Episode({"state": state}, action, reward, terminal=number % 2 == 0))
    return place


@pytest.fixture
def run(tmp_path: Path):
    def begin(way: str, name: str, *overrides: str) -> sheeplike.Experiment:
        data = tmp_path / "demos"
        if not data.exists():
            record(data)
        job = (*JOB, f"data.path={data}", *WAYS[way], f"run_dir={tmp_path / name}", *overrides)
        return sheeplike.init(*job)

    return begin


def everything(experiment) -> dict[str, torch.Tensor]:
    """Return every tensor of the agent's state by its path."""
    found = {}

    def walk(prefix: str, value) -> None:
        if isinstance(value, torch.Tensor):
            found[prefix] = value.clone()
        elif isinstance(value, dict):
            for key, below in value.items():
                walk(f"{prefix}/{key}", below)

    walk("", experiment.agent.state_dict())
    return found


@pytest.mark.parametrize("way", WAYS)
def test_resume_is_exact(run, way):
    with run(way, "whole") as whole:
        whole.iterate()
        expected = everything(whole)
    half = 4 if way == "offline" else 64
    with run(way, "parts") as first:
        first.iterate(half)
        assert first.policy_steps == half
    with run(way, "parts", "resume=auto") as second:
        assert second.policy_steps == half
        second.iterate()
        found = everything(second)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def test_resume_is_exact_with_all_of_it_on_an_empty_machine(run, tmp_path, monkeypatch):
    """Recorded episodes, a replay on the disk, whole episodes, copies elsewhere, and every logger that is installed."""
    installed = [name for name in ("wandb", "mlflow") if importlib.util.find_spec(name)]
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    everywhere = (f"logger=[{','.join(['tensorboard', *installed])}]", "checkpoint.every=32")
    everywhere += ("agent.replay_device=disk", "agent.sampling=episode")
    with run("share", "whole", *everywhere) as whole:
        whole.iterate()
        expected = everything(whole)
    everywhere += (f"checkpoint.mirror=file://{tmp_path / 'bucket'}", "resume=auto")
    with run("share", "parts", *everywhere) as first:
        first.iterate(64)
    shutil.rmtree(tmp_path / "parts")
    with run("share", "parts", *everywhere) as second:
        assert second.policy_steps == 64
        second.iterate()
        found = everything(second)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def test_prefill_stores_every_step(run):
    with run("prefill", "run") as experiment:
        replay = experiment.agent.replay
        assert len(replay) == 160
        state = replay.storage["state"][: replay.added].transpose(0, 1).flatten(0, 1)
        assert sorted(map(tuple, state[:, :2].tolist())) == sorted((n, t) for n in range(8) for t in range(20))
        assert experiment.policy_steps == 0
        assert replay.storage["deter"][: replay.added].abs().sum() > 0


def test_a_share_of_each_batch_is_recorded(run):
    with run("share", "run") as experiment:
        agent = experiment.agent
        experiment.iterate()
        batch = agent.last_batch()
        assert len(batch["state"]) == 4
        assert not (batch["state"][:3, :, 0] == batch["state"][:3, :, 0].round()).all()
        assert (batch["state"][3, :, 0] == batch["state"][3, :, 0].round()).all()
        assert "data" not in experiment.recorder.latest


@pytest.mark.parametrize(("episodes", "length"), [(1, 10), (8, 18)])
def test_few_steps_are_cut_into_pieces_that_hold_a_sequence(run, tmp_path, episodes, length):
    record(tmp_path / "demos", episodes, length)
    with run("share", "run") as experiment:
        experiment.iterate()
        assert experiment.finished


def test_offline_takes_no_policy_step(run, tmp_path):
    with run("offline", "run", "eval.every=4") as experiment:
        before = everything(experiment)
        experiment.iterate()
        assert experiment.finished
        assert len(experiment.agent.replay) == 0
        after = everything(experiment)
        assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("/modules"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = [row for row in rows if "held_out/nll" in row]
    assert [row["step"] for row in held_out] == [4, 8]
    assert all(row["gradient_steps"] == row["step"] for row in held_out)
    parts = {name: held_out[0][f"held_out/{name}"] for name in ("state", "reward", "continue", "kl")}
    assert held_out[0]["held_out/nll"] == pytest.approx(sum(parts.values()), rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_begins_with_another_is_told_what_its_replay_lacks(run, tmp_path, capfd, way):
    with run(way, "earlier") as experiment:
        experiment.iterate()
    begin = (*JOB, f"agent.from={tmp_path / 'earlier'}")
    with sheeplike.init(*begin, f"run_dir={tmp_path / 'later'}"):
        assert ("set data.path" in capfd.readouterr().out) == (way != "prefill")
    with sheeplike.init(*begin, *WAYS["share"], f"data.path={tmp_path / 'demos'}", f"run_dir={tmp_path / 'taught'}"):
        assert "set data.path" not in capfd.readouterr().out


def test_held_out_episodes_are_not_learnt_from(run):
    with run("offline", "run") as experiment:
        agent = experiment.agent
        seen = {int(n) for n in agent.recorded.storage["state"][..., 0].unique()}
        kept = {int(n) for n in agent.held_out.storage["state"][..., 0].unique()}
        assert len(kept) == 2
        assert not seen & kept
        assert seen | kept == set(range(8))


def test_held_out_episodes_do_not_move_the_whitening(run):
    """Vectors are whitened by the mean of what is learnt from: episodes 0, 1, 2, 4, 5 and 6 of 8."""
    with run("offline", "run", "agent.probes=[state]") as experiment:
        (norm,) = experiment.agent.probes.heads["norms"]
        assert norm.mean[0].item() == pytest.approx(3.0)


def test_after_a_prefill_the_files_are_not_needed(run, tmp_path):
    with run("prefill", "run") as experiment:
        experiment.iterate(64)
    shutil.rmtree(tmp_path / "demos")
    with sheeplike.init(f"resume={tmp_path / 'run'}") as experiment:
        experiment.iterate()
        assert experiment.finished


@pytest.mark.parametrize(("way", "held_out"), [("share", ()), ("prefill", ("data.held_out=0.25",))])
def test_other_episodes_do_not_resume(run, tmp_path, way, held_out):
    with run(way, "run", *held_out) as experiment:
        experiment.iterate(64)
    record(tmp_path / "demos", episodes=8)
    with pytest.raises(CommandError):
        run(way, "run", *held_out, "resume=auto")


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (("data.path=nowhere", "data.fraction=0.5", "agent.batch_size=1"), ("agent.batch_size=1",)),
        (("data.fraction=0.5",), ("data.fraction=0.5", "data.path=")),
        (("total_steps=0",), ("total_steps=0", "data.updates")),
        (("data.path=nowhere", "data.updates=5"), ("total_steps=128", "0")),
        (("data.path=nowhere", "data.updates=5", "total_steps=0", "data.fraction=0.5"), ("data.fraction=0.5",)),
        (("data.path=nowhere", "fabric.devices=2"), ("fabric.devices=2", "data.path=")),
        (("data.path=nowhere", "exp=ppo"), ("data.path=nowhere", "ppo")),
    ],
)
def test_keys_that_contradict(refused, overrides, facts):
    job = [key for key in JOB if not any(key.split("=")[0] == other.split("=")[0] for other in overrides)]
    assert refused(*job, *overrides).names(*facts)


@pytest.mark.parametrize(
    ("spoil", "fact"),
    [
        ({"fps": 10}, "10"),
        ({"fps": FPS / 2}, "env.action_repeat=2"),
        ({"length": 9, "episodes": 1}, "9 steps"),
    ],
)
def test_recordings_that_do_not_suit(run, tmp_path, spoil, fact):
    record(tmp_path / "demos", **spoil)
    with pytest.raises(CommandError, match=fact):
        run("share", "run")
    assert not (tmp_path / "run").exists()


def test_a_key_that_names_no_observation(run):
    with pytest.raises(CommandError, match=r"pixels/front"):
        run("prefill", "run", "data.keys={pixels/front:image}")


def test_more_steps_than_the_replay_holds(run):
    with pytest.raises(CommandError, match="replay_size=160"):
        run("prefill", "run", "agent.replay_size=128")
    with pytest.raises(CommandError, match="replay_size=162"):  # each world's column has as many
        run("prefill", "run", "env.num_envs=3", "agent.replay_size=161")
    with run("share", "other", "agent.replay_size=128"):
        pass


def test_pieces_too_short_for_a_sequence(run):
    """80 steps for 32 worlds would be three in a row for each."""
    with pytest.raises(CommandError, match=r"data\.fraction"):
        run("prefill", "run", "env.num_envs=32", "total_steps=800")
    with run("share", "other", "env.num_envs=32", "total_steps=800"):
        pass


def test_no_files(tmp_path):
    with pytest.raises(CommandError, match="nowhere"):
        sheeplike.init(*JOB, f"data.path={tmp_path / 'nowhere'}", f"run_dir={tmp_path / 'run'}")
