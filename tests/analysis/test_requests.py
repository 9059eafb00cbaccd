"""Requests and runs that are refused, with one line and nothing written; help, and how fast it starts."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

RETURN, SUCCESS = "eval/return_mean", "eval/success_rate"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["compare: expected one or more directories of runs", "python -m sheeplike compare logs/franka_pick"]),
        (("x=steps",), ["expected one or more directories"]),
        (("logs/frankapick",), ["logs/frankapick does not exist", "nearest: logs/franka_pick"]),
        (("nowhere/at/all",), ["nowhere/at/all does not exist"]),
        (("empty",), ["empty: expected runs in it", "metrics.jsonl", "events.out.tfevents.", "found none"]),
        (("logs/franka_pick", "empty"), ["empty: expected runs in it"]),
        (("file",), ["file is a file: expected a directory of runs"]),
        (("logs/franka_pick", "axis=time"), ["key 'axis' does not exist", "x, scale, metric, threshold, out"]),
        (("logs/franka_pick", "tresholds=3"), ["key 'tresholds'", "nearest: threshold"]),
        (("logs/franka_pick", "x=step"), ["x=step: expected one of steps, time", "nearest: x=steps"]),
        (("logs/franka_pick", "x=Time"), ["nearest: x=time"]),
        (("logs/franka_pick", "x="), ["x=: expected policy steps"]),
        (("logs/franka_pick", "metric="), ["metric=: expected a metric"]),
        (("logs/franka_pick", "threshold=high"), ["threshold=high: expected a number"]),
        (("logs/franka_pick", "threshold=nan"), ["threshold=nan: expected a number"]),
        (("logs/franka_pick", f"metric={SUCCESS}", "threshold=90"), ["from 0 to 1", "nearest: threshold=0.9"]),
        (("logs/franka_pick", f"metric={SUCCESS}", "threshold=-1"), ["nearest: threshold=0"]),
        (("logs/franka_pick", "--config-dir=empty"), ["--config-dir: expected only directories of runs"]),
        (("logs/franka_pick", "--cfg"), ["flag '--cfg' does not exist: expected one of --help"]),
        (("logs/franka_pick", "out=file"), ["out=file: expected a directory that can be written"]),
        (("logs/franka_pick", "metric=eval/retrun_mean"), ["seed_0", "metric=eval/retrun_mean", f"metric={RETURN}"]),
        (
            ("logs/franka_pick", "metric=qqq"),
            ["metric=qqq", "there are eval/return_mean, loss/dyn, rollout/return_mean"],
        ),
    ],
)
def test_bad_requests(refused, trained, arguments, parts):
    trained({0: [1, 2]})
    Path("empty").mkdir()
    Path("file").touch()
    line = refused(*arguments)
    assert all(part in line for part in parts), line


def test_a_metric_that_was_never_finite(refused, trained):
    line = refused(str(trained({0: [math.nan, math.inf, 1e308]})))
    assert f"metric={RETURN}, and none is finite and below 1e+100" in line


def test_a_logarithmic_axis_needs_something_above_zero(refused, trained):
    file = trained({0: [1]}) / "dreamer_v3/dreamer_v3/seed_0/metrics.jsonl"
    file.write_text('{"step": 0, "seconds": 1, "eval/return_mean": 1}\n')
    assert "scale=log: expected linear" in refused("logs", "scale=log")


def test_runs_of_two_tasks(refused, trained):
    trained({0: [1, 2]})
    trained({0: [1, 2]}, env="cartpole_balance")
    line = refused("logs")
    assert "expected runs of one task, and found cartpole_balance (logs/cartpole_balance/" in line
    assert "and franka_pick (logs/franka_pick/" in line


@pytest.mark.parametrize("content", ["", '{"step": 10', '{"step": 10, "seconds": 1, "rollout/return_mean": 2}\n'])
def test_a_run_without_an_evaluation(refused, trained, content, begin):
    logs = trained({0: [1, 2]})
    young = begin(logs / "dreamer_v3/dreamer_v3/seed_1", seed=1, eval__every=7000)
    (young / "metrics.jsonl").write_text(content)
    line = refused(str(logs))
    expected = f"{young}: expected values of metric={RETURN}, and the first evaluation comes at policy step 7,000"
    assert expected in line
    assert ("; meanwhile: metric=rollout/return_mean" in line) == ("rollout" in content)
    assert "other runs have it" in line


def test_a_run_that_makes_no_evaluation(refused, trained, begin):
    logs = trained({0: [1, 2]})
    other = begin(logs / "dreamer_v3/seed_1", seed=1, eval__every=None)
    (other / "metrics.jsonl").write_text('{"step": 10, "seconds": 1, "loss/dyn": 2}\n')
    assert f"{other}: expected values of metric={RETURN}, and there are none; there are loss/dyn" in refused(str(logs))


def test_it_starts_without_torch_and_jax(two_agents):
    with SummaryWriter("logs/franka_pick/sac_1") as writer:
        writer.add_scalar(RETURN, 3.0, 1000)
    code = (
        "import sys; from sheeplike.__main__ import main\n"
        f"main(['compare', {str(two_agents)!r}])\n"
        "heavy = {'torch', 'jax', 'hydra', 'lightning', 'mujoco', 'matplotlib.pyplot'} & set(sys.modules)\n"
        "print(heavy or 'light')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "light"


def test_help(compared):
    for flag in ("--help", "-h"):
        text = compared(flag).output
        for word in ("x ", "metric ", "threshold ", "out ", "python -m sheeplike compare <directory>"):
            assert word in text
    code = "import sys; from sheeplike.__main__ import main; main(['compare', '--help']); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
