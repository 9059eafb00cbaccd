"""The program of the page on tuning: killed and started again, shared by two processes, and with trials to prune."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sheeplike.commands.train import plan

optuna = pytest.importorskip("optuna")
RUNNING, COMPLETE, PRUNED, FAIL = (optuna.trial.TrialState[name] for name in ("RUNNING", "COMPLETE", "PRUNED", "FAIL"))
ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "howto" / "tune.md").read_text(encoding="utf-8")
PLACE = Path("logs/tune")


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program in an empty directory, with three trials of a few hundred steps."""
    (text,) = re.findall(r"^```python\n(# tune\.py\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    fewer = ["agent.rollout_length=16", "agent.minibatches=2", "eval.episodes=1", "compile=off", "logger=[]"]
    for long, short in (
        ("12, 10_000, 60", "3, 256, 3"),
        ('"total_steps=100_000"', '"total_steps=1024", "checkpoint.every=256", ' + ", ".join(map(repr, fewer))),
    ):
        assert text.count(long) == 1
        text = text.replace(long, short)
    (tmp_path / "tune.py").write_text(text)
    monkeypatch.chdir(tmp_path)


def start() -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "tune.py"], env=environment, **pipes)


def study() -> optuna.Study:
    return optuna.load_study(study_name="ppo", storage=f"sqlite:///{PLACE}/study.db")


def states() -> list[optuna.trial.TrialState]:
    return [trial.state for trial in study().trials]


def starts(number: int) -> int:
    return len((PLACE / f"trial_{number}" / "starts.jsonl").read_text().splitlines())


def evaluated(run_dir: Path) -> dict[int, float]:
    """The evaluations of a run in its file; a step that was made twice fails."""
    rows = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row["eval/return_mean"]) for row in rows if "eval/return_mean" in row]
    assert len(dict(found)) == len(found)
    return dict(found)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_study_that_was_stopped_goes_on_with_its_trial(signum: int) -> None:
    process = start()
    wait_for(lambda: any((PLACE / "trial_1" / "checkpoints").glob("step_*")), process)
    os.kill(process.pid, signum)
    process.communicate(timeout=120)
    assert process.returncode == (-signum if signum == signal.SIGKILL else 75)
    assert states() == [COMPLETE, RUNNING]
    time.sleep(8)  # without a sign of life
    again = start()
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert states() == [COMPLETE, FAIL, COMPLETE, COMPLETE]
    assert [starts(number) for number in (0, 1, 3)] == [1, 2, 1]
    assert not Path(PLACE / "trial_2").exists(), "it went on in the directory of trial 1"
    for trial in study().get_trials(states=[COMPLETE]):
        reported = trial.intermediate_values
        assert list(reported) == [256, 512, 768, 1024]
        assert trial.value == pytest.approx(sum(reported.values()) / 4)
        assert evaluated(Path(trial.user_attrs["run_dir"])).keys() == reported.keys()


@pytest.mark.slow
def test_two_processes_share_a_study_that_prunes() -> None:
    """Four trials of before were better than any can be, so the pruner ends the others at the first occasion."""
    PLACE.mkdir(parents=True)
    before = optuna.create_study(storage=f"sqlite:///{PLACE}/study.db", study_name="ppo", direction="maximize")
    ranges = {
        "agent.learning_rate": optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True),
        "agent.entropy_scale": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
    }
    for number in range(4):
        params = dict.fromkeys(ranges, 0.001 * (number + 1))
        values = dict.fromkeys((256, 512, 768, 1024), 600.0 + number)
        done = {"params": params, "distributions": ranges, "intermediate_values": values, "value": 600.0 + number}
        before.add_trial(optuna.trial.create_trial(**done))
    Path("tune.py").write_text(Path("tune.py").read_text().replace('Path("logs/tune"), 3,', 'Path("logs/tune"), 9,'))
    processes = [start(), start()]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    new = states()[4:]
    assert states() == [COMPLETE] * 4 + [PRUNED] * len(new)
    assert len(new) in (5, 6)
    assert [starts(4 + number) for number in range(len(new))] == [1] * len(new), "every trial ran once"
    assert all(list(trial.intermediate_values) == [256, 512] for trial in study().trials[4:])
    played = [output.count("policy steps, ") for output in outputs]
    assert all(played), "both took part"
    lines = {line for output in outputs for line in output.splitlines() if line.startswith("python -m sheeplike ")}
    (line,) = lines
    arguments = shlex.split(line.removeprefix("python -m sheeplike "))
    assert "seeds=[1,2,3]" in arguments
    config = plan([word for word in arguments if not word.startswith("seeds=")]).config
    assert (config.agent.learning_rate, config.agent.entropy_scale) == (0.004, 0.004)
    assert config.seed not in (1, 2, 3), "the seed of the trials"


def test_the_loop_on_the_page_is_the_answer_to_a_sweep(refused: Callable[..., str]) -> None:
    (loop,) = re.findall(r"^```bash\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
    assert refused("-m", "exp=ppo", "env=franka_pick", "agent.learning_rate=1e-4,3e-4").names(loop)
