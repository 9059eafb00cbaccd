"""The whole command, in a process of its own, on real physics, frames and gradients."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sheeplike.__main__ import main
from sheeplike.run.run_dir import lock

COMMAND = [sys.executable, "-m", "sheeplike"]
# One thread: the tests share their cores, and threads that spin while they wait would only take them from each other.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SMALL = ["env.image_size=48", "agent.size={deter:64,hidden:16,classes:4,depth:2,units:16}"]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished dry run of the main job; its directory."""
    run_dir = tmp_path_factory.mktemp("runs") / "franka"
    arguments = ["exp=dreamer_v3", "env=franka_pick", "profile=cpu", "dry_run=true", *SMALL, f"run_dir={run_dir}"]
    done = subprocess.run([*COMMAND, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for line in (
        "first gradient step",
        "one iteration",
        "train_ratio",
        "replay of",
        "profile cpu",
        "simulation  ",
        "done in",
    ):
        assert line in done.stdout, line
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["dreamer_v3", "ppo"])
def test_agents_that_see_vectors_alone_need_no_renderer(
    agent: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And are told so; without one they train, are evaluated and go on, without a film."""
    job = [f"exp={agent}", "env=cartpole_balance", "profile=cpu", "dry_run=true", "agent.observations=[state]"]
    for renderer, hinted in (("warp", True), ("none", False)):
        run_dir = tmp_path / renderer
        main([*job, f"env.renderer={renderer}", f"run_dir={run_dir}"])
        printed = capfd.readouterr()
        assert ("env.renderer=none saves rendering" in printed.err) == hinted
        assert not re.search(rf"sheeplike dream .*{renderer}", printed.out), "it would be refused"
    events = EventAccumulator(str(run_dir), size_guidance={"images": 0}).Reload()
    assert events.Tags()["images"] == []
    assert any("eval/return_mean" in row for row in rows(run_dir))
    main([f"resume={run_dir}", "total_steps=160"])
    main(["eval", str(run_dir), "episodes=2", "num_envs=2"])
    (place,) = (run_dir / "eval").iterdir()
    assert sorted(file.name for file in place.iterdir()) == ["card.md", "result.json"]


def test_ppo_trains_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The baseline through the same command: stacked and shifted frames, and a value that sees more."""
    run_dir = tmp_path / "run"
    arguments = ["exp=ppo", "env=cartpole_balance", "profile=cpu", "dry_run=true", f"run_dir={run_dir}"]
    arguments += ["agent.value_observations=['pixels/*',privileged_state]", "agent.frame_stack=2", "agent.augment=true"]
    # 16 steps of 2 worlds, one more that bootstraps; 2 epochs of 2 minibatches.
    for command, steps, updates in ((arguments, 128, 12), ([f"resume={run_dir}", "total_steps=192"], 192, 20)):
        main(command)
        output = capfd.readouterr().out
        assert "rollout of" in output
        assert f" {updates - 12 * (steps == 192)} gradient steps" in output
        assert (rows(run_dir)[-1]["step"], rows(run_dir)[-1]["gradient_steps"]) == (steps, updates)
    found = rows(run_dir)
    groups = {name.split("/")[0] for row in found for name in row if "/" in name}
    assert groups >= {"rollout", "eval", "reward_terms", "loss", "ppo", "actor", "critic", "grad_norm", "opt", "health"}
    assert all(row["health/nonfinite_loss"] == 0 for row in found if "health/nonfinite_loss" in row)
    assert all(row["ppo/approx_kl"] >= 0 for row in found if "ppo/approx_kl" in row)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("agent.distribution=categorical", ["tanh_normal", "clipped_normal"]),
        ("agent.value_observations=[pixels/*,privileged]", ["'privileged'", "nearest: privileged_state"]),
    ],
)
def test_what_does_not_suit_the_task_is_refused_in_one_line(
    tmp_path: Path, refusal: Callable[..., str], override: str, parts: list[str]
) -> None:
    line = refusal("exp=ppo", "env=cartpole_balance", "dry_run=true", f"run_dir={tmp_path / 'run'}", override)
    assert all(part in line for part in parts), line
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("exp", ["dreamer_v3", "ppo"])
def test_the_same_run_on_a_gpu(tmp_path: Path, exp: str) -> None:
    """Simulation, rendering, bridge, autocast, memory, evaluation, checkpoint and resume, all on the device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    run_dir = tmp_path / "run"
    arguments = [f"exp={exp}", "env=franka_pick", "profile=gpu", "dry_run=true", f"run_dir={run_dir}"]
    for command in (arguments, [f"resume={run_dir}", "total_steps=192"], ["eval", f"run={run_dir}", "episodes=2"]):
        done = subprocess.run([*COMMAND, *command], env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    assert rows(run_dir)[-1]["step"] == 192
    assert all(row["health/nonfinite_loss"] == 0 for row in rows(run_dir) if "health/nonfinite_loss" in row)
    assert len(list(run_dir.glob("eval/step_000000000192_*/*.gif"))) == 1


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_group_of_curves_is_written(dry_run: Path) -> None:
    names = {name for row in rows(dry_run) for name in row}
    groups = {name.split("/")[0] for name in names if "/" in name}
    expected = "rollout eval reward_terms loss wm actor critic grad_norm opt replay time health"
    assert groups >= set(expected.split())
    assert names >= {
        "rollout/return_mean",
        "rollout/length_mean",
        "rollout/success_rate",
        "eval/return_mean",
        "eval/return_lo",
        "eval/success_hi",
        "replay/ratio_actual",
        "replay/size",
        "time/env_sps",
        "time/grad_sps",
    }
    assert all({"step", "gradient_steps", "seconds"} <= row.keys() for row in rows(dry_run))
    # Non-finite numbers are written as null.
    assert all(value is not None for row in rows(dry_run) for name, value in row.items() if name.startswith("loss/"))


def test_tensorboard_has_the_same_curves_and_videos_of_every_camera(dry_run: Path) -> None:
    events = EventAccumulator(str(dry_run), size_guidance={"images": 0, "scalars": 0}).Reload()
    names = {name for row in rows(dry_run) for name in row if "/" in name}
    assert set(events.Tags()["scalars"]) >= names
    videos = {tag.removesuffix("/image/0") for tag in events.Tags()["images"]}
    cameras = {name.removeprefix("wm/psnr/") for name in names if name.startswith("wm/psnr/")}
    assert len(cameras) >= 1
    assert videos >= {f"{kind}/{camera}" for kind in ("open_loop", "eval") for camera in cameras}
    tag = next(tag for tag in events.Tags()["images"] if tag.startswith("open_loop/"))
    film = Image.open(io.BytesIO(events.Images(tag)[-1].encoded_image_string))
    assert film.n_frames > 1
    corner = film.width - 1, 0
    first, last = [film.seek(index) or film.convert("RGB").getpixel(corner) for index in (0, film.n_frames - 1)]
    assert first[1] > 2 * first[0], "a green border while the model observes"
    assert last[0] > 2 * last[1], "a red border while it imagines"


@pytest.mark.slow
def test_a_run_is_continued_where_it_stopped(dry_run: Path) -> None:
    before = rows(dry_run)
    stopped = max(row["step"] for row in before)
    resumed = [*COMMAND, f"resume={dry_run}", f"total_steps={stopped + 64}"]
    done = subprocess.run(resumed, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    after = rows(dry_run)
    assert after[: len(before)] == before
    added = after[len(before) :]
    assert min(row["step"] for row in added) > stopped
    assert max(row["step"] for row in added) == stopped + 64
    # No burst of updates makes up for anything: 64 policy steps at the same ratio.
    gained = added[-1]["gradient_steps"] - before[-1]["gradient_steps"]
    assert 64 * 0.0625 - 1 <= gained <= 64 * 0.0625 + 1
    assert added[0]["seconds"] > before[-1]["seconds"]


def test_a_run_is_not_begun_twice_nor_resumed_while_it_goes_on_or_once_it_is_finished(
    dry_run: Path, refusal: Callable[..., str]
) -> None:
    contents = sorted((path, path.stat().st_mtime_ns) for path in dry_run.rglob("*") if path.name != ".lock")
    assert f"resume={dry_run}" in refusal("exp=dreamer_v3", "env=franka_pick", f"run_dir={dry_run}")
    with lock(dry_run):
        assert str(os.getpid()) in refusal(f"resume={dry_run}", "total_steps=9999")
    assert "total_steps=" in refusal(f"resume={dry_run}")
    assert sorted((path, path.stat().st_mtime_ns) for path in dry_run.rglob("*") if path.name != ".lock") == contents


def test_ctrl_c_during_the_start_leaves_nothing_behind(tmp_path: Path) -> None:
    """Wherever it comes: an exception raised in a callback of a library would be ignored."""
    wants_interrupts = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from sheeplike.__main__ import program; program()"
    )
    command = [sys.executable, "-c", wants_interrupts, "exp=ppo", "env=cartpole_balance", f"run_dir={tmp_path / 'run'}"]
    run = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert "loading torch and JAX" in run.stdout.readline()
    time.sleep(1.0)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=60) == 130
    assert not (tmp_path / "run").exists()
