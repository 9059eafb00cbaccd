"""``seeds=``: one run per seed, each in a process of its own; the same command goes on where it stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from sheeplike.agents.registry.dreamer_v3 import DreamerV3Kind

from sheeplike.commands import series
from sheeplike.config.sources import CONFIGS
from sheeplike.run.run_dir import CHECKPOINTS, CONFIG_FILE, checkpoint_steps, lock
from sheeplike.run.signals import INTERRUPTED, PREEMPTED

JOB = ("exp=dreamer_v3", "env=cartpole_balance")
DEFAULT = Path("logs/cartpole_balance/dreamer_v3/dreamer_v3")


@pytest.fixture
def begun(sheeplike):
    """Makes the directory of a run as training does, with a checkpoint at ``step``."""

    def call(*arguments: str, step: int | None = 64) -> Path:
        run_dir = sheeplike(*arguments).runs[0].run_dir
        run_dir.mkdir(parents=True)
        (run_dir / CONFIG_FILE).write_text(sheeplike(*arguments, "--cfg").output)
        if step is not None:
            (run_dir / CHECKPOINTS / f"step_{step:012d}").mkdir(parents=True)
        return run_dir

    return call


@pytest.fixture
def started(sheeplike, monkeypatch):
    """Runs a series whose processes are only noted down; their arguments behind ``train``, and the result."""

    def call(*arguments: str, statuses: tuple[int, ...] = (0,) * 9):
        commands, left = [], list(statuses)
        monkeypatch.setattr(series.Child, "run", lambda self, command: commands.append(command[4:]) or left.pop(0))
        return commands, sheeplike(*arguments)

    return call


@pytest.mark.parametrize(
    ("arguments", "seeds"),
    [
        (("seeds=3",), [0, 1, 2]),
        (("seed=5", "seeds=2"), [5, 6]),
        (("seeds=[3,7,9]",), [3, 7, 9]),
        (("seeds=1",), [0]),
    ],
)
def test_which_seeds(started, arguments, seeds):
    commands, result = started(*JOB, *arguments)
    assert [command[-2:] for command in commands] == [[f"seed={s}", f"run_dir='{DEFAULT}/seed_{s}'"] for s in seeds]
    titles = [f"seed {seed} ({number} of {len(seeds)})" for number, seed in enumerate(seeds, 1)]
    assert [line.partition(":")[0] for line in result.output.splitlines()] == [*titles, "finished"]


def test_a_run_dir_is_the_parent_of_all(started, sheeplike, tmp_path):
    (tmp_path / "search/exp").mkdir(parents=True)
    (tmp_path / "search/exp/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /agent: dreamer_v3\ntotal_steps: 5_000"
    )
    search = ("--config-dir", str(tmp_path / "search"))
    place = "run_dir='it\\'s there'"
    commands, _ = started("exp=mine", "env=cartpole_balance", *search, place, "seeds=2")
    (run,) = sheeplike(*commands[1]).runs
    assert (run.run_dir, run.config.seed, run.config.total_steps) == (Path("it's there/seed_1"), 1, 5_000)


def test_the_configuration_that_is_printed_is_the_first(sheeplike, tmp_path):
    printed = yaml.safe_load(sheeplike(*JOB, "seeds=[4,2]", "--cfg").output)
    assert (printed["seed"], printed["run_dir"]) == (4, f"{DEFAULT}/seed_4")
    assert not list((tmp_path / "workplace").iterdir())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("seeds=0",), ["seeds=0: expected how many", "nearest: seeds=1"]),
        (("seeds=-2",), ["nearest: seeds=1"]),
        (("seeds=two",), ["seeds=two", "or a list of different ones", "nearest: seeds=3"]),
        (("seeds=",), ["seeds=: expected", "nearest: seeds=3"]),
        (("seeds=true",), ["seeds=true", "nearest: seeds=3"]),
        (("seeds=1.5",), ["seeds=1.5", "nearest: seeds=3"]),
        (("seeds=[",), ["seeds=[", "nearest: seeds=3"]),
        (("seeds=[]",), ["seeds=[]", "nearest: seeds=3"]),
        (("seeds=0,1,2",), ["seeds=0,1,2", "nearest: seeds=[0,1,2]"]),
        (("seeds=[1,1,2]",), ["different", "nearest: seeds=[1,2]"]),
        (("seeds=[0,-1]",), ["seed=-1", "nearest: seed=0"]),
        (("seed=2147483647", "seeds=2"), ["seed=2147483648", "nearest: seed=2147483647"]),
        (("seeds=[1,2]", "seed=1"), ["seeds=[1,2] and seed=1: expected one of them"]),
        (("seeds=2", "resume=there"), ["seeds=2 and resume=: expected one of them"]),
        (("seed=0,1,2",), ["several seeds seeds=[a,b]"]),
        (("seeds=2", "log_every=0"), ["log_every=0", "nearest: log_every=1"]),
    ],
)
def test_what_is_refused(refused, arguments, parts):
    line = refused(*JOB, *arguments)
    assert all(part in line for part in parts), line


def test_a_recipe_with_a_run_dir_of_its_own(refused, tmp_path):
    (tmp_path / "search/exp").mkdir(parents=True)
    (tmp_path / "search/exp/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /agent: dreamer_v3\nrun_dir: there"
    )
    line = refused("exp=mine", "env=cartpole_balance", "--config-dir", str(tmp_path / "search"), "seeds=2")
    assert "run_dir=there comes from a config" in line


def test_finished_ones_are_skipped_and_stopped_ones_resumed(begun, started):
    total = "total_steps=10_000"
    begun(*JOB, total, step=10_016)
    begun(*JOB, total, "seed=1", step=64)
    commands, result = started(*JOB, total, "seeds=3")
    assert commands[0] == [f"resume={DEFAULT}/seed_1"]
    assert commands[1][-2] == "seed=2"
    assert len(commands) == 2
    assert "seed 0 (1 of 3): finished before" in result.output


def test_one_that_stopped_before_its_first_checkpoint_begins_again(begun, started):
    begun(*JOB, step=None)
    commands, _ = started(*JOB, "seeds=1")
    assert commands == [[*JOB, "seed=0", f"run_dir='{DEFAULT}/seed_0'", "resume=auto"]]


def test_resume_auto_is_what_a_series_does_anyway(begun, started, refused):
    begun(*JOB, "seed=1", step=64)
    commands, _ = started(*JOB, "seeds=2", "resume=auto")
    assert [command[-1] for command in commands] == [f"run_dir='{DEFAULT}/seed_0'", f"resume={DEFAULT}/seed_1"]
    assert "expected one of them" in refused(*JOB, "seeds=2", f"resume={DEFAULT}/seed_1")


def test_a_series_is_extended_but_not_shortened(begun, started, refused):
    begun(*JOB, "total_steps=10_000", step=10_016)
    commands, _ = started(*JOB, "total_steps=20_000", "seeds=1")
    assert commands == [[f"resume={DEFAULT}/seed_0", "total_steps=20000"]]
    assert "another total_steps" in refused(*JOB, "total_steps=5_000", "seeds=1")


def test_directories_are_looked_at_before_the_first_run_begins(begun, refused):
    seed_1 = begun(*JOB, "seed=1", "agent.batch_size=8", step=64)
    line = refused(*JOB, "seeds=2")
    assert f"run_dir={seed_1} holds a run with another agent.batch_size: expected the command line" in line
    assert line.endswith(f"nearest: run_dir={DEFAULT}_2\n")
    with lock(seed_1):
        assert f"run_dir={seed_1} is in use" in refused(*JOB, "seeds=2", "agent.batch_size=8")
    Path(DEFAULT / "seed_3").mkdir()
    Path(DEFAULT / "seed_3/thesis.tex").touch()
    assert "is not empty" in refused(*JOB, "seeds=[0,3]")


def test_a_run_that_fails_ends_the_series(started):
    commands, result = started(*JOB, "seeds=3", statuses=(0, 1))
    assert (len(commands), result.status) == (2, 1)
    assert result.error == "sheeplike: seed 1 (2 of 3) failed; the seeds behind it were not started\n"


@pytest.mark.parametrize("status", [INTERRUPTED, PREEMPTED])
def test_a_run_that_is_stopped_ends_the_series(started, status):
    commands, result = started(*JOB, "seeds=3", "total_steps=20_000", statuses=(status,))
    assert (len(commands), result.status) == (1, status)
    assert result.output.splitlines()[-1].endswith(f"python -m sheeplike {' '.join(JOB)} seeds=3 total_steps=20_000")


def test_a_signal_reaches_a_child_once_and_no_further_child_is_started(tmp_path):
    code = (
        "import pathlib, signal, time\n"
        "caught = []\n"
        "signal.signal(signal.SIGINT, lambda *_: caught.append(1))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "while not caught: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "raise SystemExit(len(caught))\n"
    )
    parent = (
        "import sys\n"
        "from sheeplike.commands.series import Child\n"
        "with Child() as child:\n"
        f"    print(child.run([sys.executable, '-c', {code!r}]), child.asked, child.run(['false']))\n"
    )
    # Its own group, so that the signal can be sent to the whole of it, as a terminal does.
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        _wait_for((tmp_path / "ready").exists, 60)
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=60)[0] == f"1 {int(signal.SIGINT)} 130\n"
    finally:
        process.kill()


def test_a_series_is_paused_and_goes_on_as_one(tmp_path):
    """Ctrl-Z stops the child too, although it is in a group of its own."""
    code = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    parent = (
        "import sys\n"
        "from sheeplike.commands.series import Child\n"
        f"with Child() as child: sys.exit(child.run([sys.executable, '-c', {code!r}]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])

    def states() -> list[str]:
        pids = [process.pid, int((tmp_path / "pid").read_text())]
        return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]

    try:
        _wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 60)
        process.send_signal(signal.SIGTSTP)
        _wait_for(lambda: states() == ["T", "T"], 60)
        process.send_signal(signal.SIGCONT)
        _wait_for(lambda: "T" not in states(), 60)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()


@pytest.mark.slow
def test_a_real_series_is_interrupted_continued_and_left_alone_once_finished(tmp_path):
    # Short, but no dry run, which would be replaced.
    small = [*yaml.safe_load((CONFIGS / "dry_run.yaml").read_text()), *DreamerV3Kind.dry_run]
    command = [sys.executable, "-m", "sheeplike", *JOB, "profile=cpu", *small, "eval.every=null", "video_every=null"]
    command += ["total_steps=320", f"run_dir={tmp_path}", "seeds=[3,5]"]
    options = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "text": True, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, **options, stderr=subprocess.PIPE)
    try:
        _wait_for(lambda: checkpoint_steps(tmp_path / "seed_3"), 240)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert "seed 3 (1 of 2): " in output
    assert "stopped at seed 3 (1 of 2); go on with all that is left: python -m sheeplike exp=dreamer_v3" in output
    stopped = checkpoint_steps(tmp_path / "seed_3")[-1]
    assert 0 < stopped < 320
    assert not (tmp_path / "seed_5").exists()

    done = subprocess.run(command, **options, timeout=240)
    assert done.returncode == 0
    assert f"continued from policy step {stopped}" in done.stdout
    assert done.stdout.splitlines()[-1] == f"finished: 2 seeds in {tmp_path}"
    rows = {seed: (tmp_path / f"seed_{seed}/metrics.jsonl").read_text().splitlines() for seed in (3, 5)}
    last = {seed: json.loads(lines[-1]) for seed, lines in rows.items()}
    assert [row["step"] for row in last.values()] == [320, 320]
    assert last[3]["loss/total"] != last[5]["loss/total"]
    assert [yaml.safe_load((tmp_path / f"seed_{seed}/config.yaml").read_text())["seed"] for seed in (3, 5)] == [3, 5]

    contents = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    done = subprocess.run(command, **options, timeout=60)
    assert done.stdout.count("finished before") == 2
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == contents


def _wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_help_names_it(sheeplike):
    assert "seeds=3" in sheeplike("--help").output
