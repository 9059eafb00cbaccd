"""A world model learns from recordings in each format that is read."""

import json
from dataclasses import replace

import gymnasium
import numpy as np
import pytest

import sheeplike
from sheeplike.data.reading import require
from sheeplike.data.writing import Recording
from sheeplike.options import CommandError

JOB = (
    *("exp=dreamer_v3", "profile=cpu", "dry_run=true", "compile=off", "checkpoint.every=null", "video_every=null"),
    *("total_steps=0", "data.updates=24", "eval.every=8", "eval.episodes=1", "data.held_out=0.5"),
)
SEES = "agent.observations=[state]"
CARTPOLE = ("env=cartpole_balance", "env.image_size=64", "env.options.episode_length=6")


def learn(tmp_path, place, *job):
    """Learn offline; return the likelihood of the held-out episodes at each evaluation."""
    with sheeplike.init(*JOB, *job, f"data.path={place}", f"run_dir={tmp_path / 'run'}") as run:
        run.iterate()
        assert run.finished
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row["held_out/nll"] for row in rows if "held_out/nll" in row]


@pytest.mark.filterwarnings("ignore:.* is set to None")
def test_minari_of_its_own_collector(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = minari.DataCollector(gymnasium.make("CartPole-v1"))
    env.action_space.seed(0)
    for episode in range(8):
        env.reset(seed=episode)
        ended = False
        while not ended:
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            ended = terminated or truncated
    env.create_dataset("poles/random-v0")
    env.close()
    place = tmp_path / "poles" / "random-v0"
    found = learn(
        tmp_path,
        place,
        "env=gym",
        "env.id=CartPole-v1",
        "env.options.frames=none",
        SEES,
        "data.keys={state:observation}",
    )
    assert found[-1] < found[0]


def test_pydreamer(cartpole, tmp_path):
    """Files by hand: several episodes in each, images under another name, actions that led to their row."""
    place = tmp_path / "npz"
    place.mkdir()
    for number in range(3):
        parts = [
            {
                "image": one.obs["pixels/fixed"],
                "action": np.roll(one.action, 1, axis=0),
                "reward": one.reward,
                "terminal": np.zeros(len(one), bool),
                "reset": np.arange(len(one)) == 0,
            }
            for one in cartpole.episodes
        ]
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        np.savez_compressed(place / f"ep{number:06}_{number:06}-0-r10-0014.npz", **arrays)
    found = learn(tmp_path, place, *CARTPOLE)
    assert found[-1] < found[0]


@pytest.mark.parametrize("layout", ["minari", "lerobot"])
def test_what_is_recorded_here(layout, cartpole, tmp_path):
    place, spaces = tmp_path / "made", cartpole.spaces | {"action": cartpole.action}
    try:
        require({"lerobot": "lerobot.datasets.lerobot_dataset"}.get(layout, layout))
    except CommandError as error:  # torchvision may not fit torch
        pytest.skip(str(error))
    writer = Recording(place, {"fps": cartpole.fps}, layout, spaces)
    for number in range(6):
        writer.add(replace(cartpole.episodes[number % 2], info={}))
    writer.finish()
    found = learn(tmp_path, place, *CARTPOLE)
    assert found[-1] < found[0]
