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
from sheeplike.envs.gym.options import GymOptions
from sheeplike.envs.gym.vector_env import GymVectorEnv
from sheeplike.envs.gym.world import derive_seed
from sheeplike.loop import evaluate

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


def test_a_process_that_dies_cuts_all_worlds_and_all_begin_anew(
    worlds: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    env = worlds(lambda *_: None, num_envs=3, vectorization="async", length=99)
    env.reset(seed=4)
    action = torch.zeros(3, dtype=torch.int64)
    before = [env.step(action) for _ in range(3)][-1]
    os.kill(env._worlds.processes[1].pid, signal.SIGKILL)
    obs, reward, terminated, truncated, info = env.step(action)
    assert torch.equal(obs["state"], before[0]["state"])
    assert (reward.tolist(), terminated.tolist(), truncated.tolist()) == ([0] * 3, [False] * 3, [True] * 3)
    assert info["restarted"].tolist() == [True] * 3
    assert info["episode"]["return"].tolist() == [3, 3, 3]
    first = env.step(action)
    assert first[0]["state"][:, 0].tolist() == [0, 0, 0]
    assert not first[3].any()
    seeds = [derive_seed(4, world, 1) % 2**20 for world in range(3)]
    assert first[0]["state"][:, 1].tolist() == seeds
    assert env.step(action)[0]["state"][:, 0].tolist() == [1, 1, 1]
    assert env.counters == {"env/restarts": 1.0}
    told = "all worlds of Failing were restarted, since a process has died: that of world 1 ended with status -9"
    assert f"sheeplike: {told}\n" in capfd.readouterr().err
    env.close()


def test_a_world_whose_episode_had_ended_when_a_process_dies_begins_once_more(worlds: Make) -> None:
    def trouble(call: str, count: int, env: Any) -> None:
        env.length = 3 if multiprocessing.current_process().name.endswith("-0") else 9

    env = worlds(trouble, num_envs=2, vectorization="async", frames="render", image_size=48)
    env.reset(seed=4)
    action = torch.zeros(2, dtype=torch.int64)
    before = [env.step(action) for _ in range(3)][-1]
    assert before[2].tolist() == [True, False]
    os.kill(env._worlds.processes[1].pid, signal.SIGKILL)
    obs, _, terminated, truncated, info = env.step(action)
    assert all(torch.equal(obs[key], before[0][key]) for key in ("state", "pixels/render"))
    assert (terminated.tolist(), truncated.tolist()) == ([False] * 2, [True] * 2)
    assert (info["episode"]["length"].tolist(), info["episode"]["return"].tolist()) == ([0, 4], [0, 3])
    assert info["restarted"].all()
    first = env.step(action)
    assert first[0]["state"][:, 0].tolist() == [0, 0]
    assert not (first[3] | first[4]["restarted"]).any()
    env.close()


def test_processes_that_go_on_dying_end_the_run(worlds: Make) -> None:
    env = worlds(lambda *_: None, vectorization="async", length=99, max_restarts=1)
    env.reset()
    action = torch.zeros(1, dtype=torch.int64)
    for _ in range(2):
        os.kill(env._worlds.processes[0].pid, signal.SIGKILL)
        if env._deaths:
            with pytest.raises(RuntimeError, match=r"Failing.*\(max_restarts\)"):
                env.step(action)
        else:
            env.step(action)
            env.step(action)
    env.close()


def test_deaths_with_a_whole_episode_between_them_do_not_end_the_run(worlds: Make) -> None:
    env = worlds(lambda *_: None, vectorization="async", length=2, episode_length=3, max_restarts=1)
    env.reset()
    action = torch.zeros(1, dtype=torch.int64)
    for _ in range(3):
        os.kill(env._worlds.processes[0].pid, signal.SIGKILL)
        assert env.step(action)[4]["restarted"].all()
        for _ in range(4):
            assert not env.step(action)[4]["restarted"].any()
    env.close()


def test_a_process_that_goes_on_dying_ends_the_run_however_well_the_others_do(worlds: Make) -> None:
    def trouble(call: str, count: int, env: Any) -> None:
        env.length = 2 if multiprocessing.current_process().name.endswith("-0") else 9
        if count == 3 and multiprocessing.current_process().name.endswith("-1"):
            os.kill(os.getpid(), signal.SIGKILL)

    env = worlds(trouble, num_envs=2, vectorization="async", max_restarts=2)
    env.reset()
    for _ in range(10):
        env.step(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="world 1"):
        env.step(torch.zeros(2, dtype=torch.int64))
    env.close()


class Idle:
    """An agent and a player whose actions are zeros; each time it acts, ``before`` is called with how often it has."""

    def __init__(self, before: Callable[[int], None] = lambda acted: None) -> None:
        self.before, self.acted = before, 0

    def player(self, num_envs: int) -> Idle:
        return self

    def act(self, obs: Any, is_first: torch.Tensor, *, sample: bool = True) -> torch.Tensor:
        self.before(self.acted)
        self.acted += 1
        return torch.zeros(len(is_first), dtype=torch.int64)


def test_nor_does_it_count_what_the_death_of_a_process_cut(worlds: Make) -> None:
    """World 0 has long finished its first episode then, which stays the one that counts."""

    def trouble(call: str, count: int, env: Any) -> None:
        env.length = 3 if multiprocessing.current_process().name.endswith("-0") else 9

    def kill(acted: int) -> None:
        if acted == 5:
            os.kill(env._worlds.processes[1].pid, signal.SIGKILL)

    env = worlds(trouble, num_envs=3, vectorization="async")
    agent = Idle(kill)
    result = evaluate(agent, env, episodes=3, seed=0)
    assert env.counters == {"env/restarts": 1.0}
    assert (result.lengths.tolist(), result.returns.tolist()) == ([3, 9, 9], [3, 9, 9])
    assert agent.acted == 5 + 1 + 1 + 9  # the cut, the reset and a whole episode
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
