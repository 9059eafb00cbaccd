"""The command line as a process: its status is delivered, and what cannot be shown or found is a line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BEGIN = "import threading; from sheeplike import __main__; __main__.PATIENCE = 0.5; "
LEAVES = "threading.Thread(target=threading.Event().wait).start(); "
EXITS = "__main__.main = lambda: exec('raise __main__.AskedToExit(9)'); "
FAILS = "__main__.main = lambda: 1 / 0; "
FULL = Path("/dev/full")


@pytest.mark.parametrize(
    ("code", "argument", "status"), [("", "--version", 0), ("", "nothing", 2), (EXITS, "", 9), (FAILS, "", 1)]
)
def test_a_thread_that_is_left_behind_does_not_keep_the_status(code: str, argument: str, status: int) -> None:
    command = [sys.executable, "-c", f"{BEGIN}{LEAVES}{code}__main__.program()", argument]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == status


ENVIRONMENT = """
import threading
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Leaves(CartPoleEnv):
    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)
        threading.Thread(target=threading.Event().wait, name="viewer").start()

gymnasium.register("Leaves-v0", Leaves, max_episode_steps=9)
"""


@pytest.mark.slow
def test_a_run_whose_environment_leaves_threads_behind_ends(workplace: Path) -> None:
    Path("leaves.py").write_text(ENVIRONMENT)
    job = ["exp=ppo", "env=gym", "env.id=leaves:Leaves-v0", "profile=cpu", "compile=off", "env.num_envs=2"]
    job += ["dry_run=true", "agent.observations=[state]", "run_dir=mine"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "sheeplike", *job]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "finished: mine" in done.stdout


@pytest.mark.skipif(not FULL.exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("line", ["--help", "compare --help", "exp=ppo env=cartpole_balance profile=cpu show=config"])
def test_a_full_standard_output_is_named(line: str) -> None:
    with FULL.open("w") as full:
        command = [sys.executable, "-m", "sheeplike", *line.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 74
    assert done.stderr.startswith("sheeplike: standard output: No space left on device")


@pytest.mark.parametrize("line", ["compare .", "eval run=x", "exp=ppo env=cartpole_balance profile=cpu"])
def test_a_working_directory_that_is_gone_is_named(workplace: Path, line: str) -> None:
    command = f"rmdir {workplace}; exec {sys.executable} -P -m sheeplike {line}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("sheeplike: the working directory is gone")
    assert done.stderr.count("\n") == 1
