"""Both agents in environments of other people, through the whole command, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "sheeplike"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "MUJOCO_GL"} | {"OMP_NUM_THREADS": "1"}
FAMILIES = {
    "gym": ["env.id=CartPole-v1", "env.options.vectorization=async"],
    "minigrid": ["env.id=MiniGrid-DoorKey-5x5-v0"],
    "atari": ["env.options.noops=4"],
    "dmc": ["env.id=cartpole_balance", "env.options.shadow_map=256"],
    "envpool": ["env.id=MetaWorld/Reach-v3", "env.options.camera=2"],
}


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*COMMAND, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["dreamer_v3", "ppo"])
@pytest.mark.parametrize("env", FAMILIES)
def test_dry_runs(env: str, agent: str, tmp_path: Path) -> None:
    """A run from the first step to the last checkpoint, and on from there."""
    run_dir = tmp_path / "run"
    id = next((part for part in FAMILIES[env] if part.startswith("env.id=")), "env.id=ALE/Pong-v5").partition("=")[2]
    first = train(f"exp={agent}", f"env={env}", "profile=cpu", "dry_run=true", f"run_dir={run_dir}", *FAMILIES[env])
    assert f"{env} {id}: 2 " in first.stdout
    assert "approximate" not in first.stderr
    again = train(f"resume={run_dir}", "total_steps=192")
    assert "approximate" in again.stderr
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 192
    names = {name for row in rows for name in row}
    assert {"eval/return_mean", "rollout/return_mean", "loss/policy", "env/restarts"} <= names
    assert all(row["env/restarts"] == 0 for row in rows if "env/restarts" in row)
    assert {"wm/kl", "loss/reward"} <= names or agent == "ppo"
    losses = [value for row in rows for name, value in row.items() if name.startswith("loss/")]
    assert all(abs(value) < 1e6 for value in losses)


@pytest.mark.slow
def test_a_world_that_cannot_be_made_ends_in_one_line(tmp_path: Path) -> None:
    arguments = [
        "exp=ppo",
        "env=minigrid",
        "env.id=MiniGrid-WFC-MazeSimple-v0",
        "dry_run=true",
        f"run_dir={tmp_path}/r",
    ]
    done = subprocess.run([*COMMAND, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    told = done.stderr.splitlines()[-1]
    assert told.startswith("sheeplike: ")
    assert "imageio" in told or "No such file" in told
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r").exists()
