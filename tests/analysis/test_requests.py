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
        ((), ["python -m sheeplike compare logs/franka_pick"]),
        (("x=steps",), ["compare"]),
        (("logs/frankapick",), ["logs/frankapick", "nearest: logs/franka_pick"]),
        (("nowhere/at/all",), ["nowhere/at/all"]),
        (("empty",), ["empty", "metrics.jsonl", "events.out.tfevents."]),
        (("logs/franka_pick", "empty"), ["empty"]),
        (("file",), ["file"]),
        (("logs/franka_pick", "axis=time"), ["'axis'", "x, scale, metric, threshold, reference"]),
        (("logs/franka_pick", "tresholds=3"), ["key 'tresholds'", "nearest: threshold"]),
        (("logs/franka_pick", "x=step"), ["x=step", "steps, time", "nearest: x=steps"]),
        (("logs/franka_pick", "x=Time"), ["nearest: x=time"]),
        (("logs/franka_pick", "x="), ["x="]),
        (("logs/franka_pick", "metric="), ["metric="]),
        (("logs/franka_pick", "threshold=high"), ["threshold=high"]),
        (("logs/franka_pick", "threshold=nan"), ["threshold=nan"]),
        (("logs/franka_pick", f"metric={SUCCESS}", "threshold=90"), ["nearest: threshold=0.9"]),
        (("logs/franka_pick", f"metric={SUCCESS}", "threshold=-1"), ["nearest: threshold=0"]),
        (("logs/franka_pick", "--config-dir=empty"), ["--config-dir"]),
        (("logs/franka_pick", "--cfg"), ["'--cfg'", "--help"]),
        (("logs/franka_pick", "out=file"), ["out=file"]),
        (("logs/franka_pick", "reference_frames=0"), ["reference_frames=0", "from 1 to 1000"]),
        (("logs/franka_pick", "metric=eval/retrun_mean"), ["seed_0", "metric=eval/retrun_mean", f"metric={RETURN}"]),
        (
            ("logs/franka_pick", "metric=qqq"),
            ["metric=qqq", "eval/return_mean, loss/dyn, rollout/return_mean"],
        ),
    ],
)
def test_bad_requests(refused, trained, arguments, parts):
    trained({0: [1, 2]})
    Path("empty").mkdir()
    Path("file").touch()
    assert refused(*arguments).names(*parts)


def test_a_metric_that_was_never_finite(refused, trained):
    line = refused(str(trained({0: [math.nan, math.inf, 1e308]})))
    assert line.names(f"metric={RETURN}", "1e+100")


def test_a_logarithmic_axis_needs_something_above_zero(refused, trained):
    file = trained({0: [1]}) / "dreamer_v3/dreamer_v3/seed_0/metrics.jsonl"
    file.write_text('{"step": 0, "seconds": 1, "eval/return_mean": 1}\n')
    assert "scale=log" in refused("logs", "scale=log")


def test_runs_of_two_tasks(refused, trained):
    trained({0: [1, 2]})
    trained({0: [1, 2]}, env="cartpole_balance")
    line = refused("logs")
    assert "cartpole_balance (logs/cartpole_balance/" in line
    assert "franka_pick (logs/franka_pick/" in line


@pytest.mark.parametrize("content", ["", '{"step": 10', '{"step": 10, "seconds": 1, "rollout/return_mean": 2}\n'])
def test_a_run_without_an_evaluation(compared, refused, trained, content, begin):
    young = begin(Path("logs/franka_pick/dreamer_v3/dreamer_v3/seed_1"), seed=1, eval__every=7000)
    (young / "metrics.jsonl").write_text(content)
    line = refused("logs")
    assert all(fact in line for fact in (str(young), f"metric={RETURN}", "eval.every=7000"))
    assert ("nearest: metric=rollout/return_mean" in line) == ("rollout" in content)
    result = compared(str(trained({0: [1, 2]})))
    assert result.rows["dreamer_v3"]["seeds"] == "1", "the other one is compared"
    assert str(young) in result.output


def test_a_run_that_makes_no_evaluation(compared, trained, begin):
    logs = trained({0: [1, 2]})
    other = begin(logs / "dreamer_v3/seed_1", seed=1, eval__every=None)
    (other / "metrics.jsonl").write_text('{"step": 10, "seconds": 1, "loss/dyn": 2}\n')
    (line,) = (line for line in compared(str(logs)).output.splitlines() if f"{other}: expected" in line)
    assert f"metric={RETURN}" in line
    assert "loss/dyn" in line


def test_a_damaged_run_is_left_out(compared, trained):
    logs = trained({0: [1, 2], 1: [3, 4]})
    file = logs / "dreamer_v3/dreamer_v3/seed_1/metrics.jsonl"
    file.write_text("nonsense\n" + file.read_text())
    result = compared(str(logs))
    assert result.rows["dreamer_v3"]["seeds"] == "1"
    assert sum(str(file) in line for line in result.output.splitlines()) == 1


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
