"""Worlds in processes of their own: what fails there, and processes that die."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import sheeplike.envs
from sheeplike.envs.contract import GaveUp
from sheeplike.envs.gym.options import GymOptions
from sheeplike.envs.gym.vector_env import GymVectorEnv

Make = Callable[..., Any]
# Other processes cannot import a module of the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Broken(Exception):
    """Error that only these environments raise."""


def test_in_processes_of_their_own_too(
    worlds: Make, row: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flag = tmp_path / "failed"

    def trouble(call: str, count: int, env: Any) -> Exception | None:
        if call == "step" and count == 3 and not flag.exists():
            flag.touch()
            return Broken("in there")
        return None

    env = worlds(trouble, vectorization="async", length=9)
    env.reset(seed=1)
    outputs = [row(*env.step(torch.zeros(1, dtype=torch.int64))) for _ in range(5)]
    assert [output[:5] for output in outputs] == [
        [1, 1, 0, 0, 0],
        [2, 1, 0, 0, 0],
        [2, 0, 0, 1, 1],
        [0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
    ]
    assert "world 0" in capfd.readouterr().err
    env.close()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("bad"), "^ValueError: bad; .*2 times in a row"),
        (Broken("odd"), "^Broken: odd; "),
        # What a connection raises when a process has died, which this one has not.
        (FileNotFoundError(2, "gone"), r"^FileNotFoundError: \[Errno 2\] gone; "),
        (EOFError("no more"), r"^EOFError"),
    ],
)
def test_given_up_in_processes_of_their_own(
    worlds: Make, error: Exception, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    env = worlds(lambda call, count, env: error if count == 1 else None, vectorization="async", max_restarts=1)
    env.reset()
    action = torch.zeros(1, dtype=torch.int64)
    assert env.step(action)[4]["restarted"].all()
    env.step(action)
    with pytest.raises(RuntimeError, match=line):
        env.step(action)
    assert env.counters == {"env/restarts": 1.0}
    assert "all worlds" not in capfd.readouterr().err
    env.close()


def test_what_fails_to_be_made_in_a_process_of_its_own_says_why(failing: type) -> None:
    class Exclusive(failing):
        def __init__(self) -> None:
            super().__init__(lambda *_: None)
            if multiprocessing.current_process().name.endswith("-1"):
                raise FileNotFoundError(2, "gone")

    options = GymOptions(id="e", frames="none", episode_length=9, vectorization="async", max_restarts=1)
    env = GymVectorEnv(lambda render_mode: Exclusive(), options, num_envs=2)
    with pytest.raises(RuntimeError, match=re.escape("FileNotFoundError: [Errno 2] gone")):
        env.reset()
    env.close()


def test_a_process_that_dies_ends_the_run(worlds: Make) -> None:
    env = worlds(lambda *_: None, num_envs=3, vectorization="async", length=99)
    env.reset(seed=4)
    action = torch.zeros(3, dtype=torch.int64)
    env.step(action)
    os.kill(env._worlds.processes[1].pid, signal.SIGKILL)
    with pytest.raises(GaveUp, match=r"world 1 .*-9") as ended:
        env.step(action)
    assert ended.value.status == 70
    env.close()


def test_processes_are_deaf_to_what_asks_a_run_to_stop() -> None:
    env = sheeplike.envs.make("gym", id="CartPole-v1", num_envs=2, frames="none", vectorization="async")
    env.reset()
    processes = env._worlds.processes
    for process in processes:
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGUSR1)
    assert not env.step(torch.zeros(2, dtype=torch.int64))[4]["restarted"].any()
    env.close()
    assert not any(process.is_alive() for process in processes)


def test_a_program_without_a_guard_begins_once_and_is_told(tmp_path: Path) -> None:
    program = tmp_path / "unguarded.py"
    made = "make('gym', id='CartPole-v1', num_envs=2, frames='none', vectorization='async')"
    program.write_text(f"from sheeplike.envs import make\n{made}\n")
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "__main__" in last
    assert "vectorization=sync" in last
    assert "bootstrapping" not in ended.stderr  # the start that fails in the other process


HANGS = """
import os, time, gymnasium, sheeplike.envs, torch
from gymnasium.envs.classic_control import CartPoleEnv

class Hangs(CartPoleEnv):
    def step(self, action):
        os.write(1, b"%d\\n" % os.getpid())  # at once, or two processes' lines would mix
        time.sleep(600)

gymnasium.register("Hangs-v0", Hangs, max_episode_steps=9)

if __name__ == "__main__":
    from hangs import Hangs  # by its name, which the others import
    env = sheeplike.envs.make("gym", id="hangs:Hangs-v0", num_envs=2, frames="none", vectorization="async")
    env.reset()
    env.step(torch.zeros(2, dtype=torch.int64))
"""


@pytest.mark.slow
def test_processes_end_with_the_run_however_it_ends(tmp_path: Path) -> None:
    """Even where an environment hangs and would never read that its parent is gone."""
    (tmp_path / "hangs.py").write_text(HANGS)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, str(tmp_path / "hangs.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | path) as run:
        try:
            pids = [int(run.stdout.readline()) for _ in range(2)]
        finally:
            run.kill()
    deadline = time.monotonic() + 120
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def _runs(pid: int) -> bool:
    """Not as a zombie, which waits for its parent in a container without one that would read its status."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
