"""Environments of other people on the command line: refused early where they cannot be, and told apart."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sheeplike.__main__ import main
from sheeplike.config.compose import load
from sheeplike.config.saved import to_yaml
from sheeplike.config.sources import Sources
from sheeplike.envs.gym import options
from sheeplike.options import CommandError


def compose(*overrides: str):
    return load(["profile=cpu", *overrides], Sources()).config


@pytest.mark.parametrize("agent", ["dreamer_v3", "ppo"])
@pytest.mark.parametrize(
    ("env", "task", "repeat"),
    [
        ("minigrid", "minigrid MiniGrid-Empty-5x5-v0", 1),
        ("atari", "atari ALE/Pong-v5", 4),
        ("dmc", "dmc walker-walk", 2),
        ("gym", "gym CartPole-v1", 1),
        ("envpool", "envpool CartPole-v1", 1),
    ],
)
def test_recipes_compose_with_few_worlds(agent: str, env: str, task: str, repeat: int) -> None:
    id = ["env.id=CartPole-v1"] * (env in ("gym", "envpool"))
    few = {("atari", "dreamer_v3"): 1, ("atari", "ppo"): 8, ("envpool", "ppo"): 64}
    for profile in ("cpu", "gpu"):
        config = compose(f"exp={agent}", f"env={env}", f"profile={profile}", "fabric.accelerator=cpu", *id)
        assert (config.env.task, config.env.action_repeat) == (task, repeat)
        assert config.env.num_envs == few.get((env, agent), 16)
    assert compose(f"exp={agent}", f"env={env}", *id, "env.num_envs=3")


def test_the_protocol_of_atari_100k() -> None:
    config = compose("exp=dreamer_v3", "env=atari", "profile=gpu", "fabric.accelerator=cpu")
    a = config.agent
    assert (config.total_steps, a.replay_ratio * a.batch_size * a.batch_length) == (100_000, 256)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["env=gym"], ["env.id=null", "CartPole-v1"]),
        (["env=gym", "env.id=CartPol-v1"], ["env.id=CartPol-v1", "<module>:<id>", "nearest: env.id=CartPole-v1"]),
        (["env=gym", "env.id=nowhere:It-v0"], ["id='nowhere:It-v0'"]),
        (["env=dmc", "eval.randomize=false"], ["eval.randomize=false", "true", "dmc"]),
        (["env=dmc", "randomization=franka_vision"], ["dmc"]),
        (["env=dmc", "env.cameras=[side]"], ["env.cameras=[side]", "null", "dmc"]),
        (["env=minigrid", "env.depth=true"], ["env.depth=true", "false", "minigrid"]),
        (["env=minigrid", "env.options.tile_size=0"], ["env.options.tile_size=0", "2"]),
        (["env=atari", "env.options.noops=many"], ["env.options.noops=many"]),
        (["env=atari", "env.options.sticky=true"], ["'env.options.sticky'", "nearest: env.options.sticky_actions"]),
        (["env=dmc", "env.options.vectorization=threads"], ["sync, async"]),
        (["env=cartpole_balance", "env.id=CartPole-v1"], ["env.id=CartPole-v1", "null"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_heavy(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(CommandError) as error:
        compose("exp=ppo", *overrides)
    for part in parts:
        assert part in str(error.value)


def test_checking_imports_neither_torch_nor_what_is_optional() -> None:
    pytest.importorskip("dm_control")
    pytest.importorskip("envpool")
    code = (
        "import sys; from sheeplike.config.compose import load; from sheeplike.config.sources import Sources\n"
        "for env in ('gym', 'minigrid', 'atari', 'dmc', 'envpool'):\n"
        "    id = ['env.id=CartPole-v1'] * (env in ('gym', 'envpool'))\n"
        "    load(['exp=ppo', f'env={env}', *id], Sources())\n"
        "heavy = ('torch', 'jax', 'mujoco', 'minigrid', 'ale_py', 'dm_control', 'envpool')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("env", "package"), [("minigrid", "minigrid"), ("atari", "ale_py"), ("dmc", "dm_control"), ("envpool", "envpool")]
)
def test_a_missing_extra_names_the_line_that_installs_it(
    env: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(CommandError, match=rf"env={env}.*{package}.*\[{env}\]'"):
        compose("exp=ppo", f"env={env}", *["env.id=Pong-v5"] * (env == "envpool"))


def test_runs_of_two_environments_of_a_family_lie_apart() -> None:
    places = {
        compose("exp=ppo", "env=gym", f"env.id={id}").run_dir
        for id in ("CartPole-v1", "Acrobot-v1", "minigrid:MiniGrid-Empty-5x5-v0")
    }
    assert places == {
        "logs/gym/CartPole-v1/ppo/seed_0",
        "logs/gym/Acrobot-v1/ppo/seed_0",
        "logs/gym/minigrid_MiniGrid-Empty-5x5-v0/ppo/seed_0",
    }


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[str, str], Path]:
    def record(id: str, name: str) -> Path:
        place = tmp_path / name
        place.mkdir()
        (place / "config.yaml").write_text(to_yaml(compose("exp=ppo", "env=minigrid", f"env.id={id}")))
        rows = "".join(f'{{"step": {s}, "seconds": {s}, "eval/return_mean": {s}}}\n' for s in (1, 2))
        (place / "metrics.jsonl").write_text(rows)
        return place

    return record


def test_a_comparison_tells_them_apart(
    recorded: Callable[[str, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, id in enumerate(("MiniGrid-Empty-5x5-v0", "MiniGrid-Empty-8x8-v0")):
        recorded(id, f"run_{number}")
    with pytest.raises(SystemExit):
        main(["compare", str(tmp_path)])
    error = capsys.readouterr().err
    assert "minigrid MiniGrid-Empty-5x5-v0" in error
    assert "minigrid MiniGrid-Empty-8x8-v0" in error
    main(["compare", str(tmp_path / "run_1")])
    assert "minigrid MiniGrid-Empty-8x8-v0" in capsys.readouterr().out
