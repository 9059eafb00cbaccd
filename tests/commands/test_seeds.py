"""``seeds=``: one run per seed, each in a process of its own; the same command goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from sheeplike.agents.dreamer_v3.config import DreamerV3Config
from sheeplike.config.sources import CONFIGS
from sheeplike.run.layout import CHECKPOINTS, checkpoint_steps
from sheeplike.run.run_dir import claim, lock
from sheeplike.run.signals import INTERRUPTED, PREEMPTED

JOB = ("exp=dreamer_v3", "env=cartpole_balance")
DEFAULT = Path("logs/cartpole_balance/dreamer_v3")
MINE = "# @package _global_\ndefaults:\n  - override /agent: dreamer_v3\n"
POPEN = subprocess.Popen


@pytest.fixture
def begun(sheeplike):
    """Makes the directory of a run as training does, with a checkpoint at ``step``."""

    def call(*arguments: str, step: int | None = 64) -> Path:
        (run,) = sheeplike(*arguments).runs
        with claim(run.run_dir, run.config):
            pass
        if step is not None:
            (run.run_dir / CHECKPOINTS / f"step_{step:012d}").mkdir(parents=True)
        return run.run_dir

    return call


@pytest.fixture
def started(sheeplike, monkeypatch):
    """Runs seeds whose processes run ``code`` or end with ``statuses``; the arguments of each, and the result."""

    def call(*arguments: str, statuses: tuple[int, ...] = (0,) * 9, code: str = ""):
        commands, left = [], list(statuses)

        def popen(command: list[str], **options: object) -> subprocess.Popen:
            assert command[1:4] == ["-m", "sheeplike", "train"]
            commands.append(command[4:])
            if code:
                return POPEN([sys.executable, "-c", code], **options)
            return type("Ended", (), {"wait": lambda self: left.pop(0)})()

        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", popen)
            return commands, sheeplike(*arguments)

    return call


@pytest.mark.parametrize(
    ("arguments", "seeds"),
    [
        (("seeds=3",), [0, 1, 2]),
        (("seed=5", "seeds=2", "resume=auto"), [5, 6]),
        (("seeds=[3,7,9]",), [3, 7, 9]),
        (("seeds=1",), [0]),
    ],
)
def test_which_seeds(started, sheeplike, arguments, seeds):
    """Each command goes on with what a seed has, if it has anything."""
    commands, result = started(*JOB, *arguments)
    plans = [sheeplike(*command).runs[0] for command in commands]
    assert [planned.run_dir for planned in plans] == [DEFAULT / f"seed_{seed}" for seed in seeds]
    assert [planned.config.seed for planned in plans] == seeds
    assert {command[-1] for command in commands} == {"resume=auto"}
    titles = [f"seed {seed} ({number} of {len(seeds)})" for number, seed in enumerate(seeds, 1)]
    assert [line.partition(":")[0] for line in result.output.splitlines()] == [*titles, "finished", "next"]


@pytest.mark.parametrize(("every", "named"), [("1000", True), ("1001", False), ("null", False)])
def test_compare_is_named_only_after_evaluations(started, every, named):
    _, result = started(*JOB, "seeds=2", "total_steps=1000", f"eval.every={every}")
    assert ("compare" in result.output) == named


def test_each_seed_has_a_mirror_of_its_own(started):
    commands, _ = started(*JOB, "seeds=[4,5]", "checkpoint.mirror=memory://bucket/x")
    assert [[word for word in line if "mirror" in word][-1] for line in commands] == [
        f"checkpoint.mirror=memory://bucket/x/seed_{seed}" for seed in (4, 5)
    ]


def test_a_run_dir_is_the_parent_of_all(started, sheeplike, tmp_path):
    (tmp_path / "search/exp").mkdir(parents=True)
    (tmp_path / "search/exp/mine.yaml").write_text(f"{MINE}total_steps: 5_000")
    search = ("--config-dir", str(tmp_path / "search"))
    commands, _ = started("exp=mine", "env=cartpole_balance", *search, "run_dir='it\\'s there'", "seeds=2")
    (run,) = sheeplike(*commands[1]).runs
    assert (run.run_dir, run.config.seed, run.config.total_steps) == (Path("it's there/seed_1"), 1, 5_000)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("seeds=0",), ["seeds=0", "nearest: seeds=1"]),
        (("seeds=two",), ["seeds=two"]),
        (("seeds=null",), ["seeds=null", "nearest: seeds=3"]),
        (("seeds=",), ["seeds="]),
        (("seeds=true",), ["seeds=true"]),
        (("seeds=1.5",), ["seeds=1.5"]),
        (("seeds=[",), ["seeds=["]),
        (("seeds=[]",), ["seeds=[]", "nearest: seeds=3"]),
        (("seeds=0,1,2",), ["seeds=0,1,2", "[a,b]"]),
        (("seeds=[1,1,2]",), ["nearest: seeds=[1,2]"]),
        (("seeds=[0,-1]",), ["seed=-1", "nearest: seed=0"]),
        (("seed=2147483647", "seeds=2"), ["seed=2147483648", "nearest: seed=2147483647"]),
        (("seeds=[1,2]", "seed=1"), ["seeds=[1,2]", "seed=1"]),
        (("seeds=2", "resume=there"), ["seeds=", "resume="]),
        (("seed=0,1,2",), ["seeds=[a,b]"]),
        (("seeds=2", "log_every=0"), ["log_every=0", "nearest: log_every=1"]),
    ],
)
def test_what_is_refused(refused, arguments, parts):
    assert refused(*JOB, *arguments).names(*parts)


def test_a_recipe_with_a_run_dir_of_its_own(refused, tmp_path):
    (tmp_path / "search/exp").mkdir(parents=True)
    (tmp_path / "search/exp/mine.yaml").write_text(f"{MINE}run_dir: there")
    line = refused("exp=mine", "env=cartpole_balance", "--config-dir", str(tmp_path / "search"), "seeds=2")
    assert "run_dir=there" in line


def test_directories_are_looked_at_before_the_first_run_begins(begun, refused):
    seed_1 = begun(*JOB, "seed=1", "agent.batch_size=8")
    line = refused(*JOB, "seeds=2")
    assert line.names(f"run_dir={seed_1}", "agent.batch_size 8 -> 16")
    with lock(seed_1):
        assert f"run_dir={seed_1}" in refused(*JOB, "seeds=2", "agent.batch_size=8")
    (DEFAULT / "seed_3").mkdir()
    (DEFAULT / "seed_3/thesis.tex").touch()
    assert "seed_3" in refused(*JOB, "seeds=[0,3]")


def test_dry_runs_begin_again_unless_they_are_to_go_on(begun, started, sheeplike):
    begun(*JOB, "dry_run=true")
    for arguments, resumed in ((("seeds=1",), False), (("seeds=1", "resume=auto"), True)):
        (command,), _ = started(*JOB, "dry_run=true", *arguments)
        assert sheeplike(*command).runs[0].resume == resumed


def test_a_run_that_fails_ends_them_all(started):
    commands, result = started(*JOB, "seeds=3", statuses=(0, 1))
    assert (len(commands), result.status) == (2, 1)
    assert result.error.startswith("sheeplike: seed 1 ")
    assert result.error.count("\n") == 1


@pytest.mark.parametrize("status", [INTERRUPTED, PREEMPTED])
def test_a_run_that_is_stopped_ends_them_all(started, status):
    commands, result = started(*JOB, "seeds=3", "total_steps=20_000", statuses=(status,))
    assert (len(commands), result.status) == (1, status)
    assert result.output.splitlines()[-1].endswith(f"python -m sheeplike {' '.join(JOB)} seeds=3 total_steps=20_000")


def test_a_signal_reaches_the_run_that_is_going_on_and_no_further_one_is_started(started, tmp_path):
    code = (
        "import pathlib, signal, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: exit({PREEMPTED}))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(60)\n"
    )
    before = signal.getsignal(signal.SIGTERM)

    def send() -> None:
        _wait_for((tmp_path / "ready").exists, 60)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    commands, result = started(*JOB, "seeds=3", code=code)
    sender.join()
    assert (len(commands), result.status) == (1, PREEMPTED)
    assert "seed 0 (1 of 3)" in result.output
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("listens", ["no longer", "not yet"])
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, PREEMPTED), (signal.SIGINT, INTERRUPTED)])
def test_a_signal_counts_before_a_run_listens_and_after_it_ended(started, tmp_path, listens, signum, status):
    action = "signal.SIG_IGN" if listens == "no longer" else "signal.SIG_DFL"
    code = (
        "import pathlib, signal, time\n"
        f"signal.signal({int(signum)}, {action})\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(1)\n"
    )

    def send() -> None:
        _wait_for((tmp_path / "ready").exists, 60)
        os.kill(os.getpid(), signum)

    sender = threading.Thread(target=send)
    sender.start()
    commands, result = started(*JOB, "seeds=3", code=code)
    sender.join()
    assert (len(commands), result.status) == (1, status)


@pytest.mark.slow
def test_real_runs_are_interrupted_continued_and_left_alone_once_finished(tmp_path):
    # Short, but no dry run, which would be replaced.
    dry = yaml.safe_load((CONFIGS / "dry_run.yaml").read_text())
    small = [f"agent.{name}={value}" for name, value in DreamerV3Config.dry_run.items()]
    small += [f"{name}={dry[name]}" for name in ("compile", "log_every")]
    small += ["env.num_envs=2", "env.options.episode_length=24", "checkpoint.every=64"]
    command = [sys.executable, "-m", "sheeplike", *JOB, "profile=cpu", *small, "eval.every=null", "video_every=null"]
    command += ["total_steps=320", f"run_dir={tmp_path}", "seeds=[3,5]"]
    options = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "text": True, "stdout": subprocess.PIPE}
    # A group of its own, so that the signal can be sent to the whole of it, as a terminal does.
    process = subprocess.Popen(command, **options, stderr=subprocess.PIPE, process_group=0)
    try:
        _wait_for(lambda: checkpoint_steps(tmp_path / "seed_3"), 240)
        os.killpg(process.pid, signal.SIGINT)
        output, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert "seed 3 (1 of 2)" in output
    assert "python -m sheeplike exp=dreamer_v3" in output
    stopped = checkpoint_steps(tmp_path / "seed_3")[-1]
    assert 0 < stopped < 320
    assert not (tmp_path / "seed_5").exists()

    done = subprocess.run(command, **options, timeout=240)
    assert done.returncode == 0
    assert f"step {stopped}" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(f" {tmp_path}")
    rows = {seed: (tmp_path / f"seed_{seed}/metrics.jsonl").read_text().splitlines() for seed in (3, 5)}
    last = {seed: json.loads(lines[-1]) for seed, lines in rows.items()}
    assert [row["step"] for row in last.values()] == [320, 320]
    assert last[3]["loss/total"] != last[5]["loss/total"]
    assert [yaml.safe_load((tmp_path / f"seed_{seed}/config.yaml").read_text())["seed"] for seed in (3, 5)] == [3, 5]

    contents = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.name != ".lock")
    done = subprocess.run(command, **options, timeout=60)
    assert done.stdout.count("finished before") == 2
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.name != ".lock") == contents


def _wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
