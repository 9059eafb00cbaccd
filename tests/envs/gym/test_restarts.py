"""Environments that fail: what the agent sees, what is told, and when it is given up."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import sheeplike.envs
from sheeplike.envs import Unusable
from sheeplike.envs.gym.vector_env import GymVectorEnv
from sheeplike.envs.gym.world import derive_seed
from sheeplike.loop import evaluate

# Other processes cannot import a module of the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Failing(gymnasium.Env):
    """Counts its steps; every call asks ``trouble`` (the call, the count, this object) for an exception to raise."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012, as Gymnasium has it
    made = 0

    def __init__(self, trouble: Callable[[str, int, Failing], Exception | None], length: int = 4) -> None:
        Failing.made += 1
        self.number, self.trouble, self.length = Failing.made, trouble, length
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.count, self.stream, self.closed = 0, -1, False

    def _may(self, call: str) -> None:
        error = self.trouble(call, self.count, self)
        if error is not None:
            raise error

    def _seen(self) -> np.ndarray:
        return np.array([self.count, self.stream % 2**20], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.stream, self.count = self.stream if seed is None else seed, 0
        self._may("reset")
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self._may("step")
        return self._seen(), 1.0, self.count >= self.length, False, {}

    def render(self) -> np.ndarray:
        self._may("render")
        return np.full((16, 16, 3), self.count, np.uint8)

    def close(self) -> None:
        self.closed = True


class Broken(Exception):
    """What only these environments raise."""


def worlds(trouble: Any, *, num_envs: int = 1, length: int = 4, **options: Any) -> GymVectorEnv:
    settings = {"frames": "none", "episode_length": 100, "image_size": 16} | options
    return GymVectorEnv(lambda render_mode: Failing(trouble, length), name="Failing", num_envs=num_envs, **settings)


def once(call: str, count: int, error: Exception) -> Callable[[str, int, Failing], Exception | None]:
    """Trouble at one call, of the first environment that comes to it."""
    done: list[bool] = []

    def trouble(now: str, at: int, env: Failing) -> Exception | None:
        if (now, at) == (call, count) and not done:
            done.append(True)
            return error
        return None

    return trouble


def row(obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> list[float]:
    numbers = [obs["state"][0, 0], reward[0], terminated[0], truncated[0], info["restarted"][0]]
    return [float(x) for x in [*numbers, info["episode"]["return"][0], info["episode"]["length"][0]]]


@pytest.mark.parametrize("call", ["step", "render"])
def test_a_world_that_fails_is_cut_and_begins_anew(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    env = worlds(once(call, 3, Broken("the simulator\nlost its mind")), frames="render" if call == "render" else "none")
    obs, _ = env.reset(seed=1)
    stream = float(obs["state"][0, 1])
    before = Failing.made
    outputs = [env.step(torch.zeros(1, dtype=torch.int64)) for _ in range(5)]
    assert [row(*output) for output in outputs] == [
        # count, reward, terminated, truncated, restarted, return, length
        [1, 1, 0, 0, 0, 1, 1],
        [2, 1, 0, 0, 0, 2, 2],
        [2, 0, 0, 1, 1, 2, 3],  # the last good observation
        [0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 1],
    ]
    assert Failing.made == before + 1
    anew = [float(output[0]["state"][0, 1]) for output in outputs]
    assert anew[:3] == [stream] * 3
    assert anew[3:] == [derive_seed(derive_seed(1, 0, 0), 1) % 2**20] * 2  # of its own
    assert env.counters == {"env/restarts": 1.0}
    assert capsys.readouterr().err == "sheeplike: world 0 of Failing was restarted: Broken: the simulator\n"


def test_a_reset_that_fails_is_tried_again_in_a_new_environment(capsys: pytest.CaptureFixture[str]) -> None:
    failures = iter([Broken("one"), OSError("two")])
    made: list[int] = []

    def trouble(call: str, count: int, env: Failing) -> Exception | None:
        if call == "reset":
            made.append(env.number)
            return next(failures, None)
        return None

    env = worlds(trouble, num_envs=2)
    obs, info = env.reset(seed=0)
    assert len(set(made)) == 4  # two worlds, the first of them three times
    assert info["restarted"].tolist() == [True, False]
    assert obs["state"][:, 0].tolist() == [0, 0]
    told = capsys.readouterr().err.splitlines()
    assert told == ["sheeplike: world 0 of Failing was restarted: Broken: one; OSError: two"]


def test_what_fails_is_closed() -> None:
    failed: list[Failing] = []

    def trouble(call: str, count: int, env: Failing) -> Exception | None:
        if count == 2 and not failed:
            failed.append(env)
            return Broken()
        return None

    env = worlds(trouble)
    env.reset()
    for _ in range(2):
        env.step(torch.zeros(1, dtype=torch.int64))
    assert failed[0].closed


def test_only_the_world_that_failed_is_cut() -> None:
    def trouble(call: str, count: int, env: Failing) -> Exception | None:
        return Broken() if call == "step" and count == 2 and env.number % 3 == 1 else None

    env = worlds(trouble, num_envs=3, length=9)
    env.reset()
    env.step(torch.zeros(3, dtype=torch.int64))
    obs, reward, _, truncated, info = env.step(torch.zeros(3, dtype=torch.int64))
    assert truncated.sum() == 1
    assert torch.equal(truncated, info["restarted"])
    assert torch.equal(reward, (~truncated).float())
    assert torch.equal(obs["state"][:, 0], 2 - truncated.float())


def test_given_up_after_the_limit_with_the_original_error() -> None:
    error = Broken("for good")
    env = worlds(lambda call, count, env: error if call == "step" else None, max_restarts=2)
    env.reset()
    action = torch.zeros(1, dtype=torch.int64)
    for _ in range(2):
        assert env.step(action)[3].all()
        assert not env.step(action)[3].any()  # a reset, that works
    with pytest.raises(Broken, match="for good") as raised:
        env.step(action)
    assert raised.value is error
    assert raised.value.__notes__ == ["the environment failed 3 times in a row (max_restarts)"]


def test_an_episode_that_ends_by_itself_forgives() -> None:
    """Trouble now and then does not end a long run."""
    episodes: list[int] = []

    def trouble(call: str, count: int, env: Failing) -> Exception | None:
        if call == "reset":
            episodes.append(env.number)
        return Broken() if call == "step" and count == 2 and len(episodes) % 2 == 0 else None

    env = worlds(trouble, max_restarts=1, length=3)
    env.reset()
    for _ in range(60):
        env.step(torch.zeros(1, dtype=torch.int64))
    assert env.counters["env/restarts"] > 5


def test_what_is_not_installed_is_no_accident() -> None:
    error = gymnasium.error.DependencyNotInstalled("pygame is not installed")
    before = Failing.made
    env = worlds(lambda call, count, env: error if call == "render" else None, frames="render")
    with pytest.raises(Unusable, match="pygame is not installed"):
        env.reset()
    assert Failing.made == before + 2  # one to look at, one to use


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_picture_that_does_not_fit_is_no_accident(vectorization: str) -> None:
    before = Failing.made
    env = worlds(lambda *_: None, frames="render", image_size=8, resize="pad", vectorization=vectorization)
    told = "resize='pad': expected area, or larger images, as a frame of 16x16 does not fit into image_size=(8, 8)"
    with pytest.raises(Unusable, match=re.escape(f"{told}; nearest: area")):
        env.reset()
    assert Failing.made == before + 2
    env.close()


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_what_is_not_finite_is_cut(what: str) -> None:
    class Diverging(Failing):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            obs, reward, terminated, truncated, info = super().step(action)
            if self.count == 2:
                obs, reward = (obs * np.nan, 5.0) if what == "observation" else (obs, float("inf"))
            return obs, reward, terminated, truncated, info

    env = GymVectorEnv(
        lambda render_mode: Diverging(lambda *_: None), name="d", num_envs=1, frames="none", episode_length=9
    )
    env.reset()
    outputs = [env.step(torch.zeros(1, dtype=torch.int64)) for _ in range(3)]
    assert [bool(info["nonfinite"]) for *_, info in outputs] == [False, True, False]
    assert [row(*output)[:5] for output in outputs] == [
        [1, 1, 0, 0, 0],
        [outputs[1][0]["state"][0, 0], 0, 0, 1, 0],
        [0] * 5,
    ]
    assert outputs[1][0]["state"].tolist() == (
        [[0, 0]] if what == "observation" else [[2, outputs[0][0]["state"][0, 1]]]
    )


# --- processes ------------------------------------------------------------------------------------------------------


def test_in_processes_of_their_own_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flag = tmp_path / "failed"

    def trouble(call: str, count: int, env: Failing) -> Exception | None:
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
    assert "sheeplike: world 0 of Failing was restarted: Broken: in there\n" in capfd.readouterr().err
    env.close()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("bad"), "^bad$"),
        (Broken("odd"), "^Broken: odd$"),
        # What a connection raises when a process has died, which this one has not.
        (FileNotFoundError(2, "gone"), r"^FileNotFoundError: \[Errno 2\] gone$"),
        (EOFError("no more"), "^EOFError: no more$"),
    ],
)
def test_given_up_in_processes_of_their_own(error: Exception, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    env = worlds(lambda call, count, env: error if count == 1 else None, vectorization="async", max_restarts=1)
    env.reset()
    action = torch.zeros(1, dtype=torch.int64)
    assert env.step(action)[4]["restarted"].all()
    env.step(action)
    with pytest.raises(ValueError if type(error) is ValueError else RuntimeError, match=told):
        env.step(action)
    assert env.counters == {"env/restarts": 1.0}
    assert "all worlds" not in capfd.readouterr().err
    env.close()


def test_what_fails_to_be_made_in_a_process_of_its_own_says_why() -> None:
    class Exclusive(Failing):
        def __init__(self) -> None:
            super().__init__(lambda *_: None)
            if multiprocessing.current_process().name.endswith("-1"):
                raise FileNotFoundError(2, "gone")

    env = GymVectorEnv(
        lambda render_mode: Exclusive(), name="e", num_envs=2, frames="none", episode_length=9, vectorization="async"
    )
    with pytest.raises(Unusable, match=re.escape("FileNotFoundError: [Errno 2] gone")):
        env.reset()
    env.close()


def test_a_process_that_dies_cuts_all_worlds_and_all_begin_anew(capfd: pytest.CaptureFixture[str]) -> None:
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
    assert first[0]["state"][:, 1].tolist() == seeds  # of which none was there before
    assert env.step(action)[0]["state"][:, 0].tolist() == [1, 1, 1]
    assert env.counters == {"env/restarts": 1.0}
    told = "all worlds of Failing were restarted, since a process has died: that of world 1 ended with status -9"
    assert f"sheeplike: {told}\n" in capfd.readouterr().err
    env.close()


def test_a_world_that_was_about_to_begin_when_a_process_dies_shows_how() -> None:
    def trouble(call: str, count: int, env: Failing) -> None:
        env.length = 3 if multiprocessing.current_process().name.endswith("-0") else 9

    env = worlds(trouble, num_envs=2, vectorization="async", frames="render", image_size=48)
    env.reset(seed=4)
    action = torch.zeros(2, dtype=torch.int64)
    before = [env.step(action) for _ in range(3)][-1]
    assert before[2].tolist() == [True, False]
    os.kill(env._worlds.processes[1].pid, signal.SIGKILL)
    obs, _, terminated, truncated, info = env.step(action)
    assert obs["state"][:, 0].tolist() == [0, 3]
    assert torch.equal(obs["state"][1], before[0]["state"][1])
    assert obs["pixels/render"].amax((1, 2, 3)).tolist() == [0, 3]
    assert (terminated.tolist(), truncated.tolist()) == ([False] * 2, [True] * 2)
    assert info["episode"]["length"].tolist() == [0, 3]
    assert info["restarted"].all()
    first = env.step(action)
    assert torch.equal(first[0]["state"][0], obs["state"][0])
    assert first[0]["state"][:, 0].tolist() == [0, 0]
    assert not (first[3] | first[4]["restarted"]).any()
    env.close()


def test_processes_that_go_on_dying_end_the_run() -> None:
    env = worlds(lambda *_: None, vectorization="async", length=99, max_restarts=1)
    env.reset()
    action = torch.zeros(1, dtype=torch.int64)
    for _ in range(2):
        os.kill(env._worlds.processes[0].pid, signal.SIGKILL)
        if env._deaths.any():
            with pytest.raises(RuntimeError, match=r"Failing: processes died 2 times in a row \(max_restarts\)"):
                env.step(action)
        else:
            env.step(action)
            env.step(action)
    env.close()


def test_a_process_that_goes_on_dying_ends_the_run_however_well_the_others_do() -> None:
    def trouble(call: str, count: int, env: Failing) -> None:
        env.length = 2 if multiprocessing.current_process().name.endswith("-0") else 9
        if count == 3 and multiprocessing.current_process().name.endswith("-1"):
            os.kill(os.getpid(), signal.SIGKILL)

    env = worlds(trouble, num_envs=2, vectorization="async", max_restarts=2)
    env.reset()
    for _ in range(10):
        env.step(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"processes died 3 times in a row .*that of world 1 ended with status -9"):
        env.step(torch.zeros(2, dtype=torch.int64))
    env.close()


# --- evaluation -----------------------------------------------------------------------------------------------------


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


def test_an_evaluation_counts_whole_episodes_only() -> None:
    env = worlds(once("step", 3, Broken()), num_envs=3)
    result = evaluate(Idle(), env, episodes=3, seed=0)
    assert env.counters == {"env/restarts": 1.0}
    assert (result.lengths.tolist(), result.returns.tolist()) == ([4] * 3, [4] * 3)
    env.close()


def test_nor_does_it_count_what_the_death_of_a_process_cut() -> None:
    """World 0 has long finished its first episode then, which stays the one that counts."""

    def trouble(call: str, count: int, env: Failing) -> None:
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
