"""``eval``: from a run's directory alone, with the same numbers every time, beside a run that goes on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from PIL import Image

from sheeplike import checkpoint, host
from sheeplike.__main__ import main
from sheeplike.commands import eval as command
from sheeplike.run.layout import choose_checkpoint
from sheeplike.run.run_dir import claim, lock
from sheeplike.trained import card, exported
from sheeplike.trained.playing import results_of

JOB = ("exp=dreamer_v3", "env=cartpole_balance")


# Refusals: one line, nothing written


@pytest.fixture
def begun(sheeplike):
    """Makes the directory ``mine`` of a run, with checkpoints: step to score."""

    def call(checkpoints: dict[int, float | None], *arguments: str) -> Path:
        (run,) = sheeplike(*JOB, "run_dir=mine", *arguments).runs
        with claim(run.run_dir, run.config):
            pass
        for step, score in checkpoints.items():
            meta = {} if score is None else {"score": score}
            with checkpoint.Writer(run.run_dir / "checkpoints", keep_last=9) as writer:
                writer.save(step, {"agent": {}}, meta, finite=(), wait=True)
        return run.run_dir

    return call


@pytest.fixture
def evaluated(sheeplike, monkeypatch):
    """Runs a command line up to where torch and JAX would be loaded; the arguments of what comes then."""

    def call(*arguments: str):
        calls = []
        monkeypatch.setattr(command, "evaluate_run", lambda *given: calls.append(given))
        result = sheeplike("eval", *arguments)
        assert result.status == 0, result.error
        return calls[0]

    return call


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["eval run=<run_dir>"]),
        (("run=nowhere",), ["run=nowhere", "config.yaml"]),
        (("run=mine", "episodes=0"), ["episodes=0", "65536", "nearest: episodes=1"]),
        (("run=mine", "episodes=many"), ["episodes=many", "nearest: episodes=100"]),
        (("run=mine", "seed=32768"), ["seed=32768", "nearest: seed=32767"]),
        (("run=mine", "sample=maybe"), ["sample=maybe", "true", "null"]),
        (("run=mine", "episodes=8", "num_envs=9"), ["num_envs=9", "episodes=8", "nearest: num_envs=8"]),
        (("run=mine", "num_env=4"), ["'num_env'", "nearest: num_envs"]),
        (
            ("run=mine", "checkpoint=bset"),
            ["checkpoint=bset", "best, last", "64, 128", "nearest: checkpoint=best"],
        ),
        (("run=mine", "checkpoint=99"), ["64, 128", "nearest: checkpoint=128"]),
        (("run=mine", "checkpoint=step_70"), ["nearest: checkpoint=64"]),
        (("run=mine", "checkpoint=best"), ["checkpoint=best", "nearest: checkpoint=last"]),
        (
            ("run=mine", "accelerator=cuda"),
            ["accelerator=cuda", "nearest: accelerator=cpu"],
        ),
        (("run=mine", "--config-dir=here"), ["--config-dir", "run=<run_dir>"]),
        (("nowhere",), ["run=nowhere", "config.yaml"]),
    ],
)
def test_what_is_refused(begun, refused, arguments, parts):
    begun({64: None, 128: None})
    assert refused("eval", *arguments).names(*parts)


def test_a_run_that_is_not_there_or_not_whole(begun, refused):
    line = refused("eval", "run=mine")
    assert "run=mine" in line
    Path("mine").mkdir()
    assert refused("eval", "run=mine") == line
    Path("mine").rmdir()
    run_dir = begun({})
    assert "run=mine" in refused("eval", "run=mine")
    (run_dir / "checkpoints/.tmp-0123").mkdir(parents=True)
    assert "run=mine" in refused("eval", "run=mine")
    with checkpoint.Writer(run_dir / "checkpoints", keep_last=1) as writer:
        writer.save(64, {"agent": {}}, {}, finite=(), wait=True)
    text = (run_dir / "config.yaml").read_text()
    for end in (0, text.index("env:") + 2, text.index("agent:") + 3):
        (run_dir / "config.yaml").write_text(text[:end])
        assert "mine/config.yaml" in refused("eval", "run=mine")


# What is asked for


def test_which_checkpoint(begun, evaluated):
    begun({64: 2.0, 128: 5.0, 192: 3.0})
    names = {
        "last": None,
        "best": "step_000000000128",
        "64": "step_000000000064",
        "step_000000000192": "step_000000000192",
    }
    for name, expected in names.items():
        assert evaluated("run=mine", f"checkpoint={name}")[2].checkpoint == name
        path = choose_checkpoint(Path("mine"), name)
        assert (path and path.name) == expected


def test_settings(begun, evaluated):
    begun({64: None}, "env.num_envs=16")
    run_dir, config, asked = evaluated("run=mine")
    assert (run_dir, config.env.name) == (Path("mine"), "cartpole_balance")
    assert (asked.episodes, asked.num_envs, asked.sample, asked.video, asked.seed) == (100, 16, None, True, 0)
    assert evaluated("run=mine", "episodes=3")[2].num_envs == 3
    assert evaluated("mine", "episodes=200", "num_envs=150")[2].num_envs == 150


def test_where_it_runs(begun, evaluated, sheeplike, monkeypatch):
    file = begun({64: None}) / "config.yaml"
    assert evaluated("run=mine")[2].accelerator == "cpu"
    file.write_text(file.read_text().replace("accelerator: cpu", "accelerator: cuda"))
    assert evaluated("run=mine")[2].accelerator == "cpu"  # here is no GPU
    assert "CPU" in sheeplike("eval", "run=mine").error
    monkeypatch.setattr(host, "gpu_problem", lambda: None)
    assert evaluated("run=mine")[2].accelerator == "cuda"
    assert evaluated("run=mine", "accelerator=cpu")[2].accelerator == "cpu"
    assert evaluated("run=mine", "accelerator=gpu")[2].accelerator == "cuda"


def test_help_says_every_key(sheeplike):
    text = sheeplike("eval", "--help").output
    assert all(f"  {name} " in text for name in ("checkpoint", "episodes", "num_envs", "sample", "video", "seed"))
    assert any(line.split()[:2] == ["episodes", "100"] for line in text.splitlines())
    assert "  eval " in sheeplike("--help").output


# Real worlds


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished dry run, evaluated at each of its two checkpoints by the mode of its policy."""
    run_dir = tmp_path_factory.mktemp("runs") / "cartpole"
    job = [*JOB, "profile=cpu", "dry_run=true", "env.options.episode_length=9", "eval.sample=false"]
    main([*job, f"run_dir={run_dir}"])
    return run_dir


def test_the_same_numbers_every_time_and_those_of_training(trained, tmp_path, capfd):
    """Play twice, without the replay, while the run is in use."""
    run_dir = shutil.copytree(trained, tmp_path / "run")
    for part in run_dir.glob("checkpoints/*/*.pt"):
        if part.name != "agent.pt":
            part.unlink()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    training = {row["step"]: row for row in rows if "eval/return_mean" in row}
    assert training.keys() == {64, 128}
    arguments = ["eval", f"run={run_dir}", "checkpoint=best", "episodes=2"]

    with lock(run_dir):
        before = sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*") if path.is_file())
        main(arguments)
        (place,) = (run_dir / "eval").iterdir()
        first = {path.name: path.read_bytes() for path in place.iterdir()}
        main(arguments)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == first
    printed = capfd.readouterr().out
    assert printed.splitlines()[-1] == f"saved: {place}"
    assert "95 % interval" in printed

    result = json.loads(first["result.json"])
    step = max(training, key=lambda step: training[step]["eval/return_mean"])
    assert (result["step"], place.name) == (step, f"step_{step:012d}_2_episodes_2_worlds_mode")
    assert result["metrics"] == {name: value for name, value in training[step].items() if name.startswith("eval/")}
    assert len(result["episodes"]["return"]) == 2
    run = {"env": "cartpole_balance", "id": None, "agent": "dreamer_v3", "exp": "dreamer_v3", "seed": 0}
    assert result["run"] == run
    film = Image.open(place / "fixed.gif")
    assert (film.size, film.n_frames) == ((192, 96), max(result["episodes"]["length"]) + 1)
    assert [entry for entry in before if not entry[0].exists() or entry[0].stat().st_mtime_ns != entry[1]] == []

    # A film that cannot be written costs no result.
    (place / "result.json").unlink()
    (place / "fixed.gif").unlink()
    (place / "fixed.gif").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "fixed.gif" in capfd.readouterr().err
    assert (place / "result.json").read_bytes() == first["result.json"]

    # Other settings go elsewhere, and are another evaluation.
    others = ["episodes=3", "num_envs=2", "seed=1", "sample=true", "video_size=100"]
    main([*arguments[:2], f"checkpoint={step}", *others])
    other = run_dir / "eval" / f"step_{step:012d}_3_episodes_2_worlds_seed_1"
    assert Image.open(other / "fixed.gif").size == (100, 100), "of one world, and rendered as large as that"
    played = json.loads((other / "result.json").read_text())["episodes"]["return"]
    assert len(set(played)) == 3
    assert not set(played) & set(result["episodes"]["return"])


def test_an_agent_without_a_replay_in_worlds_of_others(tmp_path, refusal, capfd):
    run_dir = tmp_path / "run"
    family = ["env=gym", "env.id=CartPole-v1", "env.options.frames=none", "agent.observations=[state]"]
    main(["exp=ppo", *family, "profile=cpu", "dry_run=true", "eval.episodes=3", f"run_dir={run_dir}"])
    main(["eval", str(run_dir), "episodes=3"])
    (file,) = run_dir.glob("eval/*/result.json")
    result = json.loads(file.read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (training,) = [row for row in rows if row["step"] == result["step"] and "eval/return_mean" in row]
    assert result["metrics"] == {name: value for name, value in training.items() if name.startswith("eval/")}
    output = capfd.readouterr().out
    assert "return  " in output
    assert "success" not in output + file.read_text().partition('"episodes": {')[0], "CartPole defines none"
    assert refusal("eval", str(run_dir), "video_size=96").names("video_size=96", "null")
    assert result["run"] == {"env": "gym", "id": "CartPole-v1", "agent": "ppo", "exp": "ppo", "seed": 0}
    assert Image.open(file.with_name("render.gif")).n_frames > 5, "filmed, although it learns without frames"


def test_a_simulated_agent_that_learns_without_frames_is_filmed(tmp_path):
    run_dir, length = tmp_path / "run", 7
    family = ["env=cartpole_balance", "env.renderer=none", f"env.options.episode_length={length}"]
    main(["exp=dreamer_v3_proprio", *family, "profile=cpu", "dry_run=true", f"run_dir={run_dir}"])
    main(["eval", str(run_dir), "episodes=2"])
    (film,) = run_dir.glob("eval/*/fixed.gif")
    assert Image.open(film).n_frames == length + 1
    assert film.name in film.with_name("card.md").read_text()
    main(["eval", str(run_dir), "episodes=1", "video=false"])
    assert len(list(run_dir.glob("eval/*/result.json"))) == 2
    assert list(run_dir.glob("eval/*/*.gif")) == [film]
    main(["eval", str(run_dir), "episodes=3", "video_size=100"])
    (large,) = run_dir.glob("eval/*_3_episodes_*/fixed.gif")
    assert Image.open(large).size == (100, 100)


def test_a_film_that_fails_costs_no_result(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    family = ["env=gym", "env.id=CartPole-v1", "env.options.frames=none", "agent.observations=[state]"]
    main(["exp=ppo", *family, "profile=cpu", "dry_run=true", f"run_dir={run_dir}"])

    def fail(*args):
        raise RuntimeError("no screen")

    monkeypatch.setattr(CartPoleEnv, "render", fail)
    main(["eval", str(run_dir), "episodes=3"])
    (file,) = run_dir.glob("eval/*/result.json")
    assert len(json.loads(file.read_text())["episodes"]["return"]) == 3
    assert file.with_name("card.md").exists()
    assert not list(run_dir.glob("eval/*/*.gif"))


def test_a_checkpoint_that_is_damaged_or_of_another_agent(trained, tmp_path, refusal, capfd):
    run_dir = shutil.copytree(trained, tmp_path / "run")
    contents = sorted(run_dir.rglob("*"))
    config = run_dir / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("size: 1m", "size: 12m"))
    with pytest.raises(SystemExit):
        main(["eval", f"run={run_dir}", "episodes=2"])
    error = capfd.readouterr().err
    assert "agent.size 1m -> 12m" in error
    config.write_text(text)
    for path in run_dir.glob("checkpoints/*/agent.pt"):
        path.write_bytes(path.read_bytes()[:100])
    error = refusal("eval", f"run={run_dir}")
    assert error.count("agent.pt") >= 2
    assert refusal("eval", f"run={run_dir}", "checkpoint=64").names("agent.pt", "100")
    assert sorted(run_dir.rglob("*")) == contents


def test_an_export_plays_as_its_run_does(trained, tmp_path, refusal):
    run_dir, place = shutil.copytree(trained, tmp_path / "run"), tmp_path / "export"
    main(["export", f"run={run_dir}", f"to={place}"])
    for played in (run_dir, place):
        main(["eval", f"run={played}", "episodes=2", "video=false"])
    (first,), (second,) = run_dir.glob("eval/*/result.json"), place.glob("eval/*/result.json")
    assert (second.read_bytes(), second.parent.name) == (first.read_bytes(), first.parent.name)
    assert "nearest: checkpoint=last" in refusal("eval", f"run={place}", "checkpoint=best")
    weights = place / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "weights.safetensors" in refusal("eval", f"run={place}")
    weights.unlink()
    weights.symlink_to(weights)
    assert "weights.safetensors" in refusal("eval", f"run={place}")
    weights.unlink()
    os.mkfifo(weights)
    assert "weights.safetensors" in refusal("eval", f"run={place}")
    shutil.rmtree(place / "eval")
    (place / "eval").symlink_to(tmp_path)
    assert f"{place}/eval" in refusal("eval", f"run={place}")


def test_no_result_is_written_where_the_program_is_installed(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(exported.DEMOS)
    monkeypatch.chdir(exported.DEMOS)
    for place in (exported.DEMOS, Path(), Path("../models"), tmp_path / "link"):
        assert results_of(place / "franka_pick", "eval") == Path("logs/demo/franka_pick/eval")
    assert results_of(tmp_path / "run", "eval") == tmp_path / "run/eval"


def test_which_agents_come_along():
    assert exported.demos() == ["franka_pick", "franka_pick_ppo"]


@pytest.mark.parametrize("name", exported.demos())
def test_the_agents_that_come_along_pick_up_the_box(name, tmp_path, monkeypatch, refusal, capfd):
    monkeypatch.chdir(tmp_path)
    line = refusal("eval", f"run=demo:{name}s")
    assert line.endswith(f"nearest: run=demo:{name}")
    before = sorted((path, path.stat().st_mtime_ns) for path in exported.DEMOS.rglob("*"))
    video = name == "franka_pick"
    main(["eval", f"run=demo:{name}", "episodes=4", f"video={str(video).lower()}"])
    assert f" of demo:{name}\n" in capfd.readouterr().out, "as it was typed"
    assert sorted((path, path.stat().st_mtime_ns) for path in exported.DEMOS.rglob("*")) == before
    (file,) = (tmp_path / "logs/demo" / name / "eval").glob("*/result.json")
    assert json.loads(file.read_text())["metrics"]["eval/success_rate"] >= 0.75
    if video:
        sizes = {film.name: Image.open(film).size for film in file.parent.glob("*.gif")}
        assert sizes == {"scene.gif": (480, 360), "front.gif": (192, 192)}


@pytest.mark.parametrize(("episodes", "low", "lines"), [(16, 0.9, 1), (15, 0.9, 2), (16, 1.0, 2), (2, 1.0, 3)])
def test_an_interval_that_promises_too_much_is_said_to(episodes, low, lines):
    metrics = {"return_mean": 1.0, "return_lo": low, "return_hi": 1.0, "length_mean": 9.0}
    settings = command.EvalOptions(episodes=episodes, num_envs=1).model_dump()
    shown = card.describe(metrics, settings)["return"].splitlines()
    assert len(shown) == lines
    assert max(map(len, shown)) < 100
