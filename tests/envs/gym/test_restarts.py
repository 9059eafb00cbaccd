"""Environments that fail: what the agent sees, what is told, and when it is given up."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from sheeplike.envs import Unusable
from sheeplike.envs.gym.options import GymOptions
from sheeplike.envs.gym.vector_env import GymVectorEnv
from sheeplike.envs.gym.world import derive_seed
from sheeplike.loop import evaluate

Make = Callable[..., Any]


class Broken(Exception):
    """Error that only these environments raise."""


def once(call: str, count: int, error: Exception) -> Callable[[str, int, Any], Exception | None]:
    """Trouble at one call, of the first environment that comes to it."""
    done: list[bool] = []

    def trouble(now: str, at: int, env: Any) -> Exception | None:
        if (now, at) == (call, count) and not done:
            done.append(True)
            return error
        return None

    return trouble


class Still:
    """An agent and a player whose actions are zeros."""

    def player(self, num_envs: int, *, explore: bool = False) -> Still:
        return self

    def act(self, obs: Any, is_first: torch.Tensor, *, sample: bool = True) -> torch.Tensor:
        return torch.zeros(len(is_first), dtype=torch.int64)


def test_of_a_long_error_the_beginning_is_told(worlds: Make, capsys: pytest.CaptureFixture[str]) -> None:
    env = worlds(once("step", 1, Broken("x" * 100_000)), frames="none")
    env.reset(seed=1)
    env.step(torch.zeros(1, dtype=torch.int64))
    error = capsys.readouterr().err
    assert "Broken: xxx" in error
    assert len(error) < 1000


class Mute(Broken):
    def __str__(self) -> str:
        raise ValueError("not even this")


def test_a_world_is_replaced_whose_error_has_no_text(
    worlds: Make, failing: type, capsys: pytest.CaptureFixture[str]
) -> None:
    env = worlds(once("step", 3, Mute()), frames="none")
    env.reset(seed=1)
    for _ in range(5):
        env.step(torch.zeros(1, dtype=torch.int64))
    assert "Mute" in capsys.readouterr().err


@pytest.mark.parametrize("call", ["step", "render"])
def test_a_world_that_fails_is_cut_and_begins_anew(
    worlds: Make, failing: type, row: Make, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    env = worlds(once(call, 3, Broken("the simulator\nlost its mind")), frames="render" if call == "render" else "none")
    obs, _ = env.reset(seed=1)
    stream = float(obs["state"][0, 1])
    before = failing.made
    outputs = [env.step(torch.zeros(1, dtype=torch.int64)) for _ in range(5)]
    assert [row(*output) for output in outputs] == [
        # count, reward, terminated, truncated, restarted, return, length
        [1, 1, 0, 0, 0, 1, 1],
        [2, 1, 0, 0, 0, 2, 2],
        [2, 0, 0, 1, 1, 2, 3],  # the last good observation
        [0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 1],
    ]
    assert failing.made == before + 1
    anew = [float(output[0]["state"][0, 1]) for output in outputs]
    assert anew[:3] == [stream] * 3
    assert anew[3:] == [derive_seed(derive_seed(1, 0, 0), 1) % 2**20] * 2
    assert env.counters == {"env/restarts": 1.0}
    assert capsys.readouterr().err.endswith(": Broken: the simulator\n")


def test_a_reset_that_fails_is_tried_again_in_a_new_environment(
    worlds: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = iter([Broken("one"), OSError("two")])
    made: list[int] = []

    def trouble(call: str, count: int, env: Any) -> Exception | None:
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


def test_what_fails_is_closed(worlds: Make) -> None:
    failed: list[Any] = []

    def trouble(call: str, count: int, env: Any) -> Exception | None:
        if count == 2 and not failed:
            failed.append(env)
            return Broken()
        return None

    env = worlds(trouble)
    env.reset()
    for _ in range(2):
        env.step(torch.zeros(1, dtype=torch.int64))
    assert failed[0].closed


def test_only_the_world_that_failed_is_cut(worlds: Make) -> None:
    def trouble(call: str, count: int, env: Any) -> Exception | None:
        return Broken() if call == "step" and count == 2 and env.number % 3 == 1 else None

    env = worlds(trouble, num_envs=3, length=9)
    env.reset()
    env.step(torch.zeros(3, dtype=torch.int64))
    obs, reward, _, truncated, info = env.step(torch.zeros(3, dtype=torch.int64))
    assert truncated.sum() == 1
    assert torch.equal(truncated, info["restarted"])
    assert torch.equal(reward, (~truncated).float())
    assert torch.equal(obs["state"][:, 0], 2 - truncated.float())


def test_given_up_after_the_limit_with_the_original_error(worlds: Make) -> None:
    error = Broken("for good")
    env = worlds(lambda call, count, env: error if call == "step" else None, max_restarts=2)
    env.reset()
    action = torch.zeros(1, dtype=torch.int64)
    for _ in range(2):
        assert env.step(action)[3].all()
        assert not env.step(action)[3].any()  # a reset, that works
    with pytest.raises(RuntimeError, match=r"^Broken.*\(max_restarts\)$") as raised:
        env.step(action)
    assert raised.value.__cause__ is error


def test_an_episode_that_ends_by_itself_forgives(worlds: Make) -> None:
    """Trouble now and then does not end a long run."""
    episodes: list[int] = []

    def trouble(call: str, count: int, env: Any) -> Exception | None:
        if call == "reset":
            episodes.append(env.number)
        return Broken() if call == "step" and count == 2 and len(episodes) % 2 == 0 else None

    env = worlds(trouble, max_restarts=1, length=3)
    env.reset()
    for _ in range(60):
        env.step(torch.zeros(1, dtype=torch.int64))
    assert env.counters["env/restarts"] > 5


def test_what_is_not_installed_is_no_accident(worlds: Make, failing: type) -> None:
    error = gymnasium.error.DependencyNotInstalled("pygame is not installed")
    before = failing.made
    env = worlds(lambda call, count, env: error if call == "render" else None, frames="render")
    with pytest.raises(Unusable, match="pygame"):
        env.reset()
    assert failing.made == before + 2  # one to look at, one to use


@pytest.mark.parametrize("error", [ImportError("lazy"), gymnasium.error.DependencyNotInstalled("late"), Unusable("so")])
def test_an_import_that_fails_in_the_middle_of_a_run_is_an_accident(worlds: Make, error: Exception) -> None:
    env = worlds(once("step", 3, error), frames="none")
    env.reset(seed=1)
    ends = [bool(env.step(torch.zeros(1, dtype=torch.int64))[3]) for _ in range(4)]
    assert ends == [False, False, True, False]
    assert env.counters["env/restarts"] == 1


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_picture_that_does_not_fit_is_no_accident(worlds: Make, failing: type, vectorization: str) -> None:
    before = failing.made
    env = worlds(lambda *_: None, frames="render", image_size=8, resize="pad", vectorization=vectorization)
    told = "resize=pad: expected area, or larger images, as a frame of 16x16 does not fit into image_size=(8, 8)"
    with pytest.raises(Unusable, match=re.escape(f"{told}; nearest: resize=area")):
        env.reset()
    assert failing.made == before + 2
    env.close()


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_what_is_not_finite_is_cut(failing: type, row: Make, what: str) -> None:
    class Diverging(failing):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            obs, reward, terminated, truncated, info = super().step(action)
            if self.count == 2:
                obs, reward = (obs * np.nan, 5.0) if what == "observation" else (obs, float("inf"))
            return obs, reward, terminated, truncated, info

    options = GymOptions(id="d", frames="none", episode_length=9)
    env = GymVectorEnv(lambda render_mode: Diverging(lambda *_: None), options, num_envs=1)
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


def test_an_evaluation_counts_whole_episodes_only(worlds: Make) -> None:
    env = worlds(once("step", 3, Broken()), num_envs=3)
    result = evaluate(Still(), env, episodes=3, seed=0)
    assert env.counters == {"env/restarts": 1.0}
    assert (result.lengths.tolist(), result.returns.tolist()) == ([4] * 3, [4] * 3)
    env.close()


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit()])
@pytest.mark.parametrize("call", ["reset", "step", "render"])
def test_an_environment_cannot_end_the_program(
    worlds: Make, call: str, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    env = worlds(once(call, 0 if call == "reset" else 2, error), frames="render" if call == "render" else "none")
    restarted = env.reset(seed=0)[1]["restarted"].any()
    for _ in range(4):
        restarted |= env.step(torch.zeros(1, dtype=torch.int64))[4]["restarted"].any()
    assert restarted
    assert str(type(error).__name__) in capsys.readouterr().err


def test_whoever_asks_to_stop_is_heard(worlds: Make) -> None:
    env = worlds(once("step", 1, KeyboardInterrupt()))
    env.reset()
    with pytest.raises(KeyboardInterrupt):
        env.step(torch.zeros(1, dtype=torch.int64))


def test_an_environment_that_cannot_be_closed_is_left_alone(
    worlds: Make, failing: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env = worlds(once("step", 1, Broken()))
    env.reset()

    def close(self: Any) -> None:
        raise SystemExit("no")

    monkeypatch.setattr(failing, "close", close)
    assert env.step(torch.zeros(1, dtype=torch.int64))[4]["restarted"].all()
    env.step(torch.zeros(1, dtype=torch.int64))
    env.close()
    assert capsys.readouterr().err.count("closing it failed: SystemExit: no\n") == 2


def test_nor_does_it_keep_a_run_from_its_start(capsys: pytest.CaptureFixture[str]) -> None:
    class Stuck(gymnasium.wrappers.TransformReward):
        def close(self) -> None:
            raise Broken("no")

    make = partial(Stuck, gymnasium.make("CartPole-v1"), abs)
    options = GymOptions(id="Stuck", frames="none", episode_length=9)
    GymVectorEnv(lambda render_mode: make(), options, num_envs=1).close()
    assert capsys.readouterr().err.count("sheeplike: Stuck: closing it failed: Broken: no\n") == 2


@pytest.mark.parametrize("fails_at", [1, 2])
def test_an_environment_that_cannot_be_made_is_named(worlds: Make, failing: type, fails_at: int) -> None:
    """Be it the first, that is looked at, or the one of a world."""
    made: list[Any] = []

    def make(render_mode: str | None) -> Any:
        made.append(failing(lambda *_: None) if len(made) + 1 < fails_at else 1 / 0)
        return made[-1]

    options = GymOptions(id="Divides", frames="none", episode_length=9)
    with pytest.raises(Unusable, match=r"^Divides.*ZeroDivisionError"):
        GymVectorEnv(make, options, num_envs=1)


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 2), ()])
def test_what_is_not_as_its_space_says_is_a_failure_of_that_world(
    worlds: Make, failing: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shape: Any
) -> None:
    env = worlds(lambda call, count, env: None, num_envs=2)
    env.reset()
    whole = failing._seen
    sick: list[Any] = []

    def seen(self: Any) -> np.ndarray:
        sick[:] = sick or [self]
        return np.ones(shape, np.float32) if self.count == 2 and self is sick[0] else whole(self)

    monkeypatch.setattr(failing, "_seen", seen)
    env.step(torch.zeros(2, dtype=torch.int64))
    obs, _, _, truncated, info = env.step(torch.zeros(2, dtype=torch.int64))
    assert truncated.tolist() == info["restarted"].tolist() == [True, False]
    assert obs["state"][:, 0].tolist() == [1, 2]
    assert str(np.ones(shape).shape) in capsys.readouterr().err
    assert not env.step(torch.zeros(2, dtype=torch.int64))[3].any()


@pytest.mark.parametrize("reward", ["1.5", b"1", np.array("1.5"), None, 1j])
def test_a_reward_that_is_no_number_and_a_complex_observation_are_failures(failing: type, reward: object) -> None:
    class Odd(failing):
        def step(self, action: Any) -> tuple:
            obs, good, *rest, info = super().step(action)
            return (obs, reward, *rest, info) if action else (obs.astype(np.complex64), good, *rest, info)

    options = GymOptions(id="e", frames="none", episode_length=9)
    for action in (0, 1):
        env = GymVectorEnv(lambda render_mode: Odd(lambda *_: None), options, num_envs=1)
        env.reset()
        assert env.step(torch.tensor([action]))[4]["restarted"].all()


def test_the_last_good_observation_is_kept_although_its_memory_is_used_again(failing: type) -> None:
    class Reuses(failing):
        def _seen(self) -> np.ndarray:
            self.memory = getattr(self, "memory", np.zeros(2, np.float32))
            self.memory[:] = super()._seen()
            return self.memory

        def step(self, action: Any) -> tuple:
            outcome = super().step(action)
            if self.count == 3:
                self.memory[:] = -9
                raise ValueError("too late")
            return outcome

    options = GymOptions(id="e", frames="none", episode_length=9)
    env = GymVectorEnv(lambda render_mode: Reuses(lambda *_: None), options, num_envs=1)
    env.reset()
    action = torch.zeros(1, dtype=torch.int64)
    before = [env.step(action) for _ in range(2)][-1][0]["state"]
    obs, *_, info = env.step(action)
    assert info["restarted"].all()
    assert torch.equal(obs["state"], before)


@pytest.mark.parametrize("reward", [3.5e38, -1e300, np.float64(1e39), float("inf")])
def test_a_reward_is_finite_where_float32_is(
    worlds: Make, failing: type, monkeypatch: pytest.MonkeyPatch, reward: float
) -> None:
    env = worlds(lambda call, count, env: None)
    env.reset()
    step = failing.step
    monkeypatch.setattr(failing, "step", lambda self, action: (step(self, action)[0], reward, False, False, {}))
    _, given, terminated, truncated, info = env.step(torch.zeros(1, dtype=torch.int64))
    assert (given.item(), terminated.item(), truncated.item(), info["nonfinite"].item()) == (0, False, True, True)
    reward = 3.4e38
    env.step(torch.zeros(1, dtype=torch.int64))
    _, given, _, truncated, info = env.step(torch.zeros(1, dtype=torch.int64))
    assert given.item() == np.float32(3.4e38)
    assert not (truncated | info["nonfinite"]).any()
