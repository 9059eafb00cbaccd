"""The DeepMind Control suite: our adapter against the suite itself."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch

import sheeplike.envs
from sheeplike.envs import InvalidOption, Unusable
from sheeplike.envs.gym import options
from sheeplike.envs.gym.options import DmcOptions
from sheeplike.envs.gym.world import derive_seed

if ctypes.util.find_library("EGL"):
    os.environ.setdefault("MUJOCO_GL", "egl")
suite = pytest.importorskip("dm_control.suite")
renders = pytest.mark.skipif(not os.environ.get("MUJOCO_GL"), reason="needs libEGL, or MUJOCO_GL")


@renders
def test_it_is_the_suite() -> None:
    """Frames, vectors, rewards and the end of an episode, step by step."""
    env = sheeplike.envs.make(
        "dmc", num_envs=1, id="cartpole-balance", action_repeat=2, image_size=48, episode_length=9
    )
    assert (env.name, env.episode_length) == ("cartpole-balance", 5)
    assert env.metadata["render_fps"] == 50.0  # 0.01 s a step, two by two
    obs, _ = env.reset(seed=2)
    theirs = suite.load("cartpole", "balance", task_kwargs={"random": derive_seed(2, 0, 0)})
    now = theirs.reset()
    rng = np.random.default_rng(0)
    for step in range(6):
        expected = {name: np.asarray(value, np.float32).reshape(1, -1) for name, value in now.observation.items()}
        assert set(obs) == {*expected, "state", "pixels/render"}
        for name, value in expected.items():
            assert np.array_equal(obs[name].numpy(), value), name
        assert np.array_equal(obs["state"], np.concatenate([expected[name] for name in sorted(expected)], -1))
        frame = theirs.physics.render(48, 48, camera_id=0)
        assert np.array_equal(obs["pixels/render"][0], frame)
        action = rng.uniform(-1, 1, 1).astype(np.float32)
        rewards = 0.0
        for _ in range(2 if step < 4 else 1):
            now = theirs.step(action)
            rewards += now.reward
        if step == 5:
            break
        obs, reward, terminated, truncated, _ = env.step(torch.from_numpy(action[None]))
        assert reward.item() == pytest.approx(rewards, abs=1e-5)
        assert (bool(terminated), bool(truncated)) == (False, step == 4)
        if step == 4:
            break
    env.close()


def test_its_own_time_limit_truncates() -> None:
    env = sheeplike.envs.make("dmc", num_envs=1, id="walker_walk", frames="none", action_repeat=2)
    assert env.episode_length == 500
    env.reset(seed=0)
    ends = []
    for _ in range(501):
        _, _, terminated, truncated, _ = env.step(torch.zeros(1, 6))
        ends.append((bool(terminated), bool(truncated)))
    assert ends[498:501] == [(False, False), (False, True), (False, False)]


def test_seeds_make_episodes() -> None:
    env = sheeplike.envs.make("dmc", num_envs=2, id="reacher-easy", frames="none")
    first = env.reset(seed=1)[0]["state"]
    later = env.reset()[0]["state"]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, later)
    assert torch.equal(env.reset(seed=1)[0]["state"], first)
    assert torch.equal(env.reset()[0]["state"], later)


@pytest.mark.parametrize(
    ("spelt", "meant"),
    [
        ("walker-walk", "walker-walk"),
        ("walker_walk", "walker-walk"),
        ("ball_in_cup-catch", "ball_in_cup-catch"),
        ("cup_catch", "ball_in_cup-catch"),
        ("humanoid_CMU-stand", "humanoid_CMU-stand"),
        ("point_mass_easy", "point_mass-easy"),
        ("finger_turn_hard", "finger-turn_hard"),
    ],
)
def test_tasks_by_any_spelling(spelt: str, meant: str) -> None:
    assert DmcOptions(id=spelt, frames="none").recipe((64, 64))[1].id == meant


def test_an_unknown_task_gets_the_nearest() -> None:
    with pytest.raises(InvalidOption, match=r"env.id=walker-wlk.*nearest: env.id=walker-walk"):
        sheeplike.envs.make("dmc", num_envs=1, id="walker-wlk", frames="none")


@renders
def test_the_camera_of_the_quadruped() -> None:
    env = sheeplike.envs.make("dmc", num_envs=1, id="quadruped-walk")
    own = env._worlds.envs[0]._env
    env.reset(seed=0)
    assert np.array_equal(own.render(), own._env.physics.render(64, 64, camera_id=2))
    with pytest.raises(ValueError, match=r"camera=9.*nearest: 0"):
        sheeplike.envs.make("dmc", num_envs=1, camera=9)
    with pytest.raises(InvalidOption, match=r"frames=observation.*render, none"):
        sheeplike.envs.make("dmc", num_envs=1, frames="observation")


@renders
def test_a_smaller_shadow_map_changes_little() -> None:
    frames = {}
    for shadow_map in (None, 512):
        env = sheeplike.envs.make("dmc", num_envs=1, id="walker-walk", shadow_map=shadow_map)
        frames[shadow_map] = env.reset(seed=0)[0]["pixels/render"].int()
        env.close()
    difference = (frames[None] - frames[512]).abs()
    assert difference.float().mean() < 0.5
    assert not torch.equal(frames[None], frames[512])


def test_the_backend_is_chosen_where_there_is_no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(libraries: set[str], **environment: str) -> str | None:
        for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(options.sys, "platform", "linux")
        monkeypatch.setattr(options.ctypes.util, "find_library", lambda name: name if name in libraries else None)
        options.choose_backend(required=True)
        return os.environ.get("MUJOCO_GL")

    assert choose({"EGL", "OSMesa"}) == "egl"
    assert choose({"OSMesa"}) == "osmesa"
    assert choose(set(), DISPLAY=":0") is None
    assert choose(set(), MUJOCO_GL="glfw") == "glfw"
    with pytest.raises(Unusable, match=r"libEGL.*libOSMesa"):
        choose(set())


@renders
@pytest.mark.slow
def test_every_task_of_the_suite_works() -> None:
    failed: dict[str, str] = {}
    for domain, task in suite.ALL_TASKS:
        try:
            options = {"max_restarts": 0, "shadow_map": 256} | ({"episode_length": 100} if domain == "lqr" else {})
            env = sheeplike.envs.make("dmc", id=f"{domain}-{task}", num_envs=1, **options)
            assert isinstance(env, gymnasium.vector.VectorEnv)
            env.reset(seed=0)
            for _ in range(3):
                obs, reward, *_ = env.step(torch.rand(env.action_space.shape) * 2 - 1)
            assert obs["pixels/render"].float().std() > 1
            assert reward.isfinite().all()
            env.close()
        except Exception as error:
            failed[f"{domain}-{task}"] = f"{type(error).__name__}: {error}"
    print(f"{len(suite.ALL_TASKS) - len(failed)} of {len(suite.ALL_TASKS)} work; the others: {failed}")
    assert not failed


def test_a_machine_that_cannot_render_says_so_before_anything_else() -> None:
    """A variable that names nothing, and a library that finds no screen; each in a process of its own."""
    code = "import sheeplike.envs as e\ntry: e.make('dmc', num_envs=1)\nexcept e.Unusable as error: print(error)"
    clean = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    for backend in ("nonsense", "glfw"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**clean, "MUJOCO_GL": backend},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout.startswith("walker-walk: "), done.stderr
        assert done.stdout.count("\n") == 1


@renders
def test_processes_of_their_own_render_as_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the server that starts them began before the variable was set."""
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.delenv("DISPLAY", raising=False)
    first = sheeplike.envs.make("gym", id="CartPole-v1", num_envs=1, frames="none", vectorization="async")
    first.close()
    monkeypatch.setenv("MUJOCO_GL", "egl")
    env = sheeplike.envs.make("dmc", num_envs=2, id="cartpole-balance", vectorization="async", shadow_map=256)
    assert env.reset(seed=0)[0]["pixels/render"].float().std() > 1
    env.close()
