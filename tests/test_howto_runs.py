"""Commands of the pages on stopping, clusters and curricula, as small as can be."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

import sheeplike
from sheeplike.run.signals import PREEMPTED
from sheeplike.trained.exported import DEMOS, load_agent

HOWTO = Path(__file__).parents[1] / "howto"
SMALL = ["dry_run=true", "total_steps=100000", "eval.every=null", "video_every=null", "logger=[]"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.slow


def blocks(page: str, language: str) -> list[str]:
    text = (HOWTO / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def commands(page: str) -> list[list[str]]:
    lines = [line for block in blocks(page, "") for line in block.splitlines() if "python -m sheeplike " in line]
    return [shlex.split(line.partition("python -m sheeplike ")[2]) for line in lines]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def start(command: list[str], environment: dict[str, str] = ENVIRONMENT) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def stop_when_it_runs(process: subprocess.Popen[str], signum: int) -> str:
    """Send a signal to everything in the session once the banner is out, as a scheduler does; returns the output."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("  simulation "):
            time.sleep(3)
            os.killpg(process.pid, signum)
            break
    return "".join(lines) + process.communicate(timeout=120)[0]


def small(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "sheeplike", *arguments, *SMALL]


def executable(path: Path, script: str) -> None:
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_slurm_script(tmp_path: Path) -> None:
    """Under a SLURM of two lines: srun runs its command, scontrol notes what it is told."""
    (script,) = blocks("run_on_a_cluster.md", "bash")
    job, tools = tmp_path / "job.sh", tmp_path / "tools"
    tools.mkdir()
    executable(job, script)
    executable(tools / "srun", f'#!/bin/bash\nexec "$@" {" ".join(SMALL)}\n')
    executable(tools / "scontrol", '#!/bin/bash\necho "$@" >> requeued\n')
    executable(tools / "python", f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    path = f"{tools}:{os.environ['PATH']}"
    environment = ENVIRONMENT | {"PATH": path, "SLURM_JOB_ID": "7", "PYTHONPATH": str(HOWTO.parent)}
    # The system sends the signal to the steps and not to the script; bash waits for its step before it minds one.
    executable(job, script.replace("#!/bin/bash\n", "#!/bin/bash\ntrap : USR1\n", 1))
    first = stop_when_it_runs(start([str(job)], environment), signal.SIGUSR1)
    assert "SIGUSR1: saving" in first
    assert Path("requeued").read_text() == "requeue 7\n"
    process = start([str(job)], environment)
    second = stop_when_it_runs(process, signal.SIGUSR1)
    assert process.returncode == PREEMPTED
    assert "continued from policy step" in second


def test_the_kubernetes_job() -> None:
    (text,) = blocks("run_on_a_cluster.md", "yaml")
    job = yaml.safe_load(text)
    spec = job["spec"]["template"]["spec"]
    (exits,) = [rule["onExitCodes"] for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert exits == {"operator": "In", "values": [PREEMPTED]}
    assert spec["restartPolicy"] == "Never", "or a pod failure policy is refused"
    python, *arguments = spec["containers"][0]["command"]
    assert (python, arguments[:2]) == ("python", ["-m", "sheeplike"])
    process = start(small(arguments[2:]))
    assert "SIGTERM" in stop_when_it_runs(process, signal.SIGTERM)
    assert process.returncode == PREEMPTED


def test_the_commands_on_clusters() -> None:
    single, series = commands("run_on_a_cluster.md")
    process = start(small(single))
    assert "saved; go on with" in stop_when_it_runs(process, signal.SIGTERM)
    process = start(small(single))
    assert "continued from policy step" in stop_when_it_runs(process, signal.SIGINT)
    assert process.returncode == 130
    # A dry run begins anew, so the series is not one.
    process = start([sys.executable, "-m", "sheeplike", *series])
    output = stop_when_it_runs(process, signal.SIGTERM)
    assert "seeds=" in output.splitlines()[-1]
    assert process.returncode == PREEMPTED


def test_the_commands_on_resuming() -> None:
    resumed = [command for command in commands("resume.md") if command[0].startswith("resume=")]
    (run_dir,) = {command[0].removeprefix("resume=") for command in resumed}
    begun = ["exp=dreamer_v3", "env=franka_pick", f"run_dir={run_dir}"]
    assert "saved" in stop_when_it_runs(start(small(begun)), signal.SIGINT)
    for command in resumed:
        process = start([sys.executable, "-m", "sheeplike", *command])
        output = stop_when_it_runs(process, signal.SIGINT)
        assert "continued from policy step" in output
        assert process.returncode == 130
    assert "changed: total_steps 100000 -> 2000000" in output


def test_the_programs_with_a_curriculum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent always succeeds: the range of the boxes widens, and nothing is compiled for it."""
    curriculum, evaluations = blocks("write_a_curriculum.md", "python")
    runs = []

    def init(*overrides: str) -> object:
        few = [
            "total_steps=96",
            "agent.minibatches=2",
            "logger=[]",
            "eval.episodes=1",
            "video_every=null",
        ]
        run = real(*overrides, "dry_run=true", *few)
        iterate = run.iterate
        monkeypatch.setattr(run, "iterate", lambda every: iterate(32) | {"rollout/success_rate": 1.0}, raising=False)
        runs.append(run)
        return run

    real = sheeplike.init
    monkeypatch.setattr(sheeplike, "init", init, raising=False)
    with pytest.raises(SystemExit, match=r"^0$"):
        exec(compile(curriculum, "write_a_curriculum.md", "exec"), {})
    (run,) = runs
    assert run.finished
    assert run.envs.simulator.compilations == 1
    reach = 0.02 * 1.3**3
    assert run.envs.get_attr("box_range") == pytest.approx((reach, reach))
    with real(f"resume={run.run_dir}", "total_steps=128") as again:
        assert again.envs.get_attr("box_range") == pytest.approx((reach, reach))
        again.close()
    exec(compile(evaluations, "write_a_curriculum.md", "exec"), {"sheeplike": sheeplike})
    assert runs[-1].finished


def test_the_program_that_begins_with_networks_of_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = blocks("learn_to_pick.md", "python")
    few = ["dry_run=true", "total_steps=96", "agent.minibatches=2", "logger=[]", "eval.every=null"]
    runs, real = [], sheeplike.init

    def init(*overrides: str) -> object:
        run = real(*overrides, *few)
        monkeypatch.setattr(run, "iterate", lambda: None, raising=False)  # nothing is learnt yet
        runs.append(run)
        return run

    monkeypatch.setattr(sheeplike, "init", init, raising=False)
    with pytest.raises(SystemExit, match=r"^75$|^0$"):
        exec(compile(program, "learn_to_pick.md", "exec"), {})
    networks, demo = runs[0].agent.networks, load_agent(DEMOS / "franka_pick_ppo")
    known, widened = (one.value_head[0].in_features for one in (demo, networks))
    pixels, state = torch.randint(256, (2, 48, 48, 3), dtype=torch.uint8), torch.randn(2, widened)
    with torch.no_grad():
        expected, value = demo({"pixels/front": pixels, "privileged_state": state[:, :known]})
        found, of_all = networks({"pixels/front": pixels, "privileged_state": state})
    assert known < widened
    torch.testing.assert_close((found.mean, found.std, of_all), (expected.mean, expected.std, value))
