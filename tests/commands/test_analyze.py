"""``analyze``: from a run's directory alone, an export or a demo; and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sheeplike import checkpoint
from sheeplike.__main__ import main
from sheeplike.commands.analyze import AnalyzeOptions
from sheeplike.inspection.episodes import MIN_EPISODES
from sheeplike.run.run_dir import claim
from sheeplike.trained import exported
from sheeplike.trained.playing import name_results

JOB = ("exp=dreamer_v3", "env=cartpole_balance")


@pytest.fixture
def begun(alone: None, sheeplike: Callable) -> Callable[..., Path]:
    """Makes the directory ``mine`` of a run, with checkpoints at these steps."""

    def call(steps: tuple[int, ...], *arguments: str) -> Path:
        (run,) = sheeplike(*(arguments or JOB), "run_dir=mine").runs
        with claim(run.run_dir, run.config):
            pass
        for step in steps:
            with checkpoint.Writer(run.run_dir / "checkpoints", keep_last=9) as writer:
                writer.save(step, {"agent": {}}, {}, finite=(), wait=True)
        return run.run_dir

    return call


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["analyze run=<run_dir>"]),
        (("run=nowhere",), ["run=nowhere", "config.yaml"]),
        (("run=mine", "episodes=3"), ["episodes=3", "4096", "nearest: episodes=4"]),
        (("run=mine", "episodes=8", "num_envs=9"), ["num_envs=9", "episodes=8", "nearest: num_envs=8"]),
        (("run=mine", "checkpoint=99"), ["64, 128", "nearest: checkpoint=128"]),
        (("run=mine", "episode=9"), ["'episode'", "nearest: episodes"]),
        (("run=mine", "accelerator=cuda"), ["accelerator=cuda", "nearest: accelerator=cpu"]),
        (("mine", "theirs"), ["mine theirs"]),
        (("run=demo",), ["run=demo", "nearest: run=demo:franka_pick"]),
        (("run=demo:franka",), ["run=demo:franka", "nearest: run=demo:franka_pick"]),
        (("run=demo:franka_pick", "checkpoint=best"), ["checkpoint=best", "last"]),
        (
            ("run=demo:franka_pick_ppo",),
            ["run=demo:franka_pick_ppo", "dreamer_v3"],
        ),
    ],
)
def test_what_is_refused(begun: Callable, refused: Callable, arguments: tuple[str, ...], parts: list[str]) -> None:
    begun((64, 128))
    assert refused("analyze", *arguments).names(*parts)


def test_only_our_own_simulator_can_be_forked(begun: Callable, refused: Callable) -> None:
    begun((64,), "exp=dreamer_v3", "env=gym", "env.id=CartPole-v1")
    assert refused("analyze", "run=mine", "trust=true").names("trust=true", "nearest: trust=false")


def test_a_run_without_a_checkpoint(begun: Callable, refused: Callable) -> None:
    begun(())
    assert "run=mine" in refused("analyze", "run=mine")


def test_ppo_has_no_world_model(begun: Callable, refused: Callable) -> None:
    begun((64,), "exp=ppo", "env=cartpole_balance")
    assert refused("analyze", "run=mine").names("run=mine", "dreamer_v3")


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, "step_000000000640_50_episodes_2_worlds"),
        ({"episodes": 20}, "step_000000000640_20_episodes_2_worlds"),
        ({"num_envs": 4}, "step_000000000640_50_episodes_4_worlds"),
        ({"seed": 3}, "step_000000000640_50_episodes_2_worlds_seed_3"),
        ({"accelerator": "cuda"}, "step_000000000640_50_episodes_2_worlds_cuda"),
    ],
)
def test_what_makes_another_analysis_is_in_its_name(sheeplike: Callable, changed: dict[str, object], name: str) -> None:
    (run,) = sheeplike(*JOB, "profile=cpu", "fabric.accelerator=cpu", "run_dir=mine").runs
    asked = AnalyzeOptions(num_envs=2, accelerator="cpu").replace(**changed)
    assert name_results(640, asked, run.config) == name


def test_fewer_episodes_than_a_split_needs_are_refused_before() -> None:
    assert AnalyzeOptions(episodes=MIN_EPISODES).episodes == MIN_EPISODES
    with pytest.raises(ValueError, match="episodes"):
        AnalyzeOptions(episodes=MIN_EPISODES - 1)


def test_help_says_every_key(sheeplike: Callable) -> None:
    text = sheeplike("analyze", "--help").output
    assert all(f"  {name} " in text for name in ("run", "checkpoint", "episodes", "num_envs", "seed", "accelerator"))
    assert "  analyze " in sheeplike("--help").output


@pytest.mark.slow
def test_a_run_and_its_export_give_the_same_numbers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    main([*JOB, "profile=cpu", "dry_run=true", "env.options.episode_length=9", "eval.every=null", f"run_dir={run_dir}"])
    main(["analyze", f"run={run_dir}", "episodes=4"])
    place = run_dir / "analyze/step_000000000128_4_episodes_2_worlds"
    assert f"saved: {place}/analysis.html" in capfd.readouterr().out
    found = json.loads((place / "analysis.json").read_text())
    assert found["about"] == {
        "run": str(run_dir),
        "env": "cartpole_balance",
        "step": 128,
        "checkpoint": "last",
        "episodes": 4,
        "num_envs": 2,
        "seed": 0,
        "accelerator": "cpu",
        "trust": False,
    }
    assert found["episodes"]["policy"]["episodes"] == found["episodes"]["random"]["episodes"] == 4
    assert (found["probes"]["target"], found["probes"]["predicted"]) == ("privileged_state", False)
    assert {path.name.partition(".")[0] for path in place.iterdir()} == {"analysis", "events", "linear_probe"}

    main(["export", f"run={run_dir}", f"to={tmp_path}/export"])
    main(["analyze", f"{tmp_path}/export", "episodes=4"])
    same = json.loads((tmp_path / "export/analyze" / place.name / "analysis.json").read_text())
    same["about"]["run"] = str(run_dir)
    assert same == found


@pytest.mark.slow
def test_the_demo_knows_where_its_box_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted((path, path.stat().st_mtime_ns) for path in exported.DEMOS.rglob("*"))
    main(["analyze", "run=demo:franka_pick", "episodes=20"])
    assert sorted((path, path.stat().st_mtime_ns) for path in exported.DEMOS.rglob("*")) == before
    (file,) = Path("logs/demo/franka_pick/analyze").glob("*/analysis.json")
    found = json.loads(file.read_text())
    read = found["probes"]["policy"]["0"]["seen"]["linear"]["r2"]
    assert read[8] > 0.95, "the box along y"
    dream = found["open_loop"]["policy"]["pixels/front"]
    assert dream["mse@15"] < 0.5 * dream["copy_last_mse"][14]
