"""Tasks of MuJoCo Playground, against Playground's own reset and step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
import torch
from gymnasium.vector import VectorEnv

import sheeplike.envs
from sheeplike.envs.mjx.options import PLAYGROUND_IDS, PlaygroundOptions, SimulationOptions
from sheeplike.envs.mjx.playground import PlaygroundTask
from sheeplike.envs.mjx.vector_env import MjxVectorEnv

registry = pytest.importorskip("mujoco_playground").registry

SEED, WORLDS, LENGTH = 3, 2, 6


def reset_keys(episode: int) -> jax.Array:
    """The keys from which our simulator begins an episode, as Playground takes them: uint32 (N, 2)."""

    def of_world(index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), index), episode)
        return jax.random.key_data(jax.random.split(key)[1])

    return jax.vmap(of_world)(jnp.arange(WORLDS))


def reference(id: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Playground's own reset and step, mapped over worlds of which each has a gravity of its own."""
    env = registry.load(id, config_overrides={"impl": "warp"})
    nominal = env._mjx_model

    @contextmanager
    def pulled(gravity: jax.Array) -> Iterator[None]:
        env._mjx_model = nominal.tree_replace({"opt.gravity": gravity})
        yield
        env._mjx_model = nominal

    def reset(gravity: jax.Array, key: jax.Array) -> Any:
        with pulled(gravity):
            return env.reset(key)

    def step(gravity: jax.Array, state: Any, action: jax.Array) -> Any:
        with pulled(gravity):
            return env.step(state, action)

    return jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step))


def task(id: str, **options: Any) -> PlaygroundTask:
    return PlaygroundTask(PlaygroundOptions(id=id, **options))


GRAVITY = {
    "gravity": {"field": "opt.gravity", "component": 2, "operation": "scale", "distribution": {"uniform": [0.5, 1.0]}}
}


def assert_same(env: MjxVectorEnv, id: str, tolerance: float = 1e-5) -> None:
    """Observations, rewards and terms of two episodes, step for step."""
    reset, step = reference(id)
    random = torch.Generator().manual_seed(0)
    observed, _ = env.reset(seed=SEED)
    for episode in range(2):
        pull = jnp.copy(env._variation.model["opt.gravity"])  # the next step takes it
        state = reset(pull, reset_keys(episode))
        np.testing.assert_allclose(observed["state"], state.obs, rtol=0, atol=tolerance)
        for number in range(1, LENGTH + 1):
            action = torch.rand(env.action_space.shape, generator=random) * 2 - 1
            observed, reward, terminated, truncated, info = env.step(action)
            state = step(pull, state, jnp.asarray(action.numpy()))
            np.testing.assert_allclose(observed["state"], state.obs, rtol=0, atol=tolerance)
            np.testing.assert_allclose(reward, state.reward, rtol=0, atol=tolerance)
            for name, value in (state.metrics or {"reward": state.reward}).items():
                np.testing.assert_allclose(
                    info["reward_terms"][name.removeprefix("reward/")], value, rtol=0, atol=tolerance
                )
            assert truncated.tolist() == [number == LENGTH] * WORLDS
            assert not terminated.any()
        first = observed["state"].clone()
        observed, reward, *_ = env.step(action)
        assert (reward == 0).all()
        assert not torch.equal(first, observed["state"])
    assert env.simulator.compilations == 1


@pytest.fixture(scope="module", params=["native", pytest.param("warp", marks=pytest.mark.slow)])
def physics(request: pytest.FixtureRequest) -> str:
    """Both engines, one after the other."""
    return request.param


@pytest.fixture(scope="module")
def balance(physics: str) -> MjxVectorEnv:
    made = task("CartpoleBalance", episode_length=LENGTH)
    return MjxVectorEnv(
        made, num_envs=WORLDS, image_size=48, randomization=GRAVITY, simulation=SimulationOptions(physics=physics)
    )


def test_the_ids_listed_are_those_that_need_no_meshes() -> None:
    assert sorted(PLAYGROUND_IDS) == sorted(registry.dm_control_suite.ALL_ENVS)


@pytest.mark.slow
def test_cartpole_is_playgrounds_step_for_step(balance: MjxVectorEnv) -> None:
    """Gravity differs between worlds: the model is the simulator's."""
    assert_same(balance, "CartpoleBalance")


@pytest.mark.slow
@pytest.mark.parametrize("id", ["CheetahRun", "FingerTurnHard", "HumanoidWalk"])
def test_tasks_are_playgrounds_step_for_step(
    id: str, physics: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that falls to rest in its reset, one whose scene got a geom and a target, and a large one."""
    monkeypatch.chdir(tmp_path)
    with find_body():
        options = {"num_envs": WORLDS, "randomization": GRAVITY, "simulation": SimulationOptions(physics=physics)}
        # Rounding differs between the two compilations, and grows over steps in contact with the floor.
        tolerance = 1e-5 if id == "FingerTurnHard" else 1e-3
        assert_same(MjxVectorEnv(task(id, episode_length=LENGTH), **options), id, tolerance)


@contextmanager
def find_body() -> Iterator[None]:
    mujoco.MjSpec.find_body = mujoco.MjSpec.body
    yield
    del mujoco.MjSpec.find_body


def test_no_task_defines_success(balance: MjxVectorEnv) -> None:
    _, info = balance.reset(seed=0)
    assert info["success"].isnan().all()
    assert info["episode"]["success"].isnan().all()


def test_nothing_of_playground_is_left_changed(balance: MjxVectorEnv) -> None:
    from mujoco_playground._src import mjx_env

    assert mjx_env.make_data.__module__ == mjx_env.ensure_menagerie_exists.__module__ == mjx_env.__name__
    assert mujoco.MjSpec.compile.__name__ == "compile"
    assert not hasattr(mujoco.MjSpec, "find_body")
    assert not isinstance(balance.simulator.task._env.mjx_model.opt.gravity, jax.core.Tracer)


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_one_camera_is_the_default_and_any_can_be_asked_for(balance: MjxVectorEnv) -> None:
    assert list(balance.single_observation_space) == ["pixels/fixed", "privileged_state", "state", "variation"]
    assert balance.simulator.renderer.cameras == task("CartpoleBalance").default_cameras == ("fixed",)
    assert task("FishSwim").default_cameras == ("fixed_top",)
    env = sheeplike.envs.make("playground", id="CheetahRun", num_envs=1, cameras=["back", "side"])
    assert [name for name in env.single_observation_space if "pixels" in name] == ["pixels/back", "pixels/side"]


def test_textures_are_not_asked_of_a_simulation_that_nobody_looks_at() -> None:
    env = sheeplike.envs.make("playground", id="CheetahRun", num_envs=1, renderer="none")
    assert list(env.single_observation_space) == ["state"]


def test_a_repeated_action_lowers_the_control_rate() -> None:
    env = sheeplike.envs.make(
        "playground", id="CheetahRun", num_envs=1, action_repeat=4, overrides={"ctrl_dt": 0.02}, episode_length=24
    )
    made = env.simulator.task
    assert (made.substeps, made._env.dt, env.episode_length) == (8, 0.08, 6)
    assert env.metadata["render_fps"] == pytest.approx(12.5)
    assert task("CheetahRun").episode_length == 1000


def test_only_a_reset_that_runs_physics_is_long() -> None:
    assert task("CheetahRun").long_reset
    assert not task("HumanoidWalk").long_reset


def test_a_target_that_is_a_site_becomes_visible_and_weighs_nothing() -> None:
    shown, plain = task("FingerTurnHard").model, task("FingerSpin").model
    assert shown.ngeom == plain.ngeom + 2
    for field in ("body_mass", "body_inertia", "body_ipos", "dof_invweight0", "body_invweight0"):
        np.testing.assert_array_equal(getattr(shown, field), getattr(plain, field))
    assert shown.geom_bodyid[-1] == shown.body("target").id
    assert shown.geom_contype[-1] == shown.geom_conaffinity[-1] == 0


def make(**options: Any) -> VectorEnv:
    return sheeplike.envs.make("playground", **{"num_envs": 1, "id": "CheetahRun", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"id": None},
            r"id=null.*AcrobotSwingup.*WalkerWalk",
        ),
        ({"id": "CheetaRun"}, r"id=CheetaRun.*AcrobotSwingup.*nearest: .*CheetahRun"),
        ({"id": "PandaPickCub"}, r"; nearest: .*PandaPickCube$"),
        ({"id": "PandaPickCube"}, r"id='PandaPickCube'.*mujoco_menagerie"),
        ({"episode_length": 0}, r"episode_length=0.*1000000000.*null.*nearest: .*1"),
        ({"episode_length": 2.5}, r"episode_length=2.5"),
        ({"overrides": {"ctr_dt": 1}}, r"'ctr_dt'.*nearest: ctrl_dt"),
        (
            {"overrides": {"vision": True}},
            r"vision=True.*CheetahRun",
        ),
        ({"overrides": {"impl": "jax"}}, r"impl='jax'.*CheetahRun.*warp"),
        ({"overrides": {"episode_length": 9}}, r"env.options.episode_length"),
        ({"overrides": {"ctrl_dt": 0.015}}, r"ctrl_dt=0.015.*sim_dt=0.01.*nearest: 0.02"),
        ({"overrides": 3}, r"overrides=3.*null"),
        ({"cameras": ["sid"]}, r"'sid'.*nearest: side"),
        ({"action_repeat": 3}, r"action_repeat=3.*episode_length=1000"),
    ],
)
def test_bad_values_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make(**options)
    assert "\n" not in str(error.value)


def test_without_playground_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco_playground", None)
    with pytest.raises(sheeplike.envs.Unusable, match=r"Playground.*\[playground\]'"):
        make()


def test_a_playground_that_is_broken_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco_playground._src", None)
    with pytest.raises(sheeplike.envs.Unusable, match=r"pip install"):
        make()


@pytest.mark.slow
@pytest.mark.parametrize("id", PLAYGROUND_IDS)
def test_every_task_steps_and_shows_something_that_moves(id: str, physics: str) -> None:
    env = sheeplike.envs.make("playground", id=id, num_envs=2, image_size=64, episode_length=20, physics=physics)
    (camera,) = [name for name in env.single_observation_space if name.startswith("pixels/")]
    observed, _ = env.reset(seed=0)
    random = torch.Generator().manual_seed(0)
    before, ends = observed[camera].clone(), 0
    for _ in range(50):
        observed, reward, terminated, truncated, info = env.step(
            torch.rand(env.action_space.shape, generator=random) * 2 - 1
        )
        frames = observed[camera].clone()
        assert frames.float().std() > 5
        assert (frames != before).any()
        assert torch.isfinite(observed["state"]).all()
        assert torch.isfinite(reward).all()
        assert not (terminated | info["nonfinite"]).any()
        before, ends = frames, ends + int(truncated.sum())
    assert ends == 2 * 2
    assert env.simulator.compilations == 1


def trains(arguments: list[str], place: Path) -> str:
    command = [sys.executable, "-m", "sheeplike", *arguments, "profile=cpu", "dry_run=true"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_ppo_passes_through_every_stage(tmp_path: Path) -> None:
    said = trains(["exp=ppo", "env=playground", "env.id=CartpoleBalance"], tmp_path)
    assert "CartpoleBalance" in said
    assert (tmp_path / "dry_runs/playground/CartpoleBalance/ppo/seed_0/metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("id", PLAYGROUND_IDS)
@pytest.mark.parametrize("more", [["exp=ppo"], ["exp=dreamer_v3", "env.action_repeat=2"]], ids=["ppo", "dreamer_v3"])
def test_both_agents_pass_through_every_stage(more: list[str], id: str, tmp_path: Path) -> None:
    trains([*more, "env=playground", f"env.id={id}", f"run_dir={tmp_path}/run"], tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"rollout/return_mean", "eval/return_mean", "loss/policy"} <= {name for row in rows for name in row}
    assert rows[-1]["step"] == 128
    values = [value for row in rows for name, value in row.items() if name.startswith(("loss/", "rollout/", "eval/"))]
    assert np.isfinite(values).all()
