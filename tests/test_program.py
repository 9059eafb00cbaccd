"""The command line as a process: its status is delivered, and what cannot be shown or found is a line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BEGIN = "import atexit, sys, threading, time; from sheeplike import __main__; __main__.PATIENCE = 0.5; "
LEAVES = "threading.Thread(target=threading.Event().wait, name='viewer\\x1b').start(); "
WAITS = "atexit.register(lambda: print('closed')); atexit.register(time.sleep, 1.5); "
ASKED = "__main__.main = lambda: exec('raise __main__.AskedToExit(9)'); "
FAILS = "__main__.main = lambda: 1 / 0; "
FULL = Path("/dev/full")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"{BEGIN}{code}__main__.program()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("code", "argument", "status"), [("", "--version", 0), ("", "nothing", 2), (ASKED, "", 9), (FAILS, "", 1)]
)
def test_a_thread_that_is_left_behind_does_not_keep_the_status(code: str, argument: str, status: int) -> None:
    began = time.monotonic()
    done = python(LEAVES + code, argument)
    assert time.monotonic() - began < 30
    assert done.returncode == status, done.stderr
    line = "sheeplike: something in the run left a thread behind, ended now: viewer\\x1b"
    assert done.stderr.splitlines()[-1] == line
    assert bool(done.stdout) == (argument == "--version")


def test_what_libraries_do_at_the_exit_is_not_cut_short() -> None:
    done = python(WAITS, "--version")
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "closed", "")


def test_the_end_does_not_wait_until_all_is_taken_down() -> None:
    slow = "Slow = type('Slow', (), {'__del__': lambda self: print('taken down')}); kept = Slow(); "
    done = python(slow + WAITS, "--version")
    assert (done.returncode, "closed" in done.stdout, "taken down" in done.stdout) == (0, True, False)


def test_a_signal_after_the_end_does_not_change_the_status() -> None:
    done = python("import os, signal; atexit.register(os.kill, os.getpid(), signal.SIGTERM); ", "--version")
    assert done.returncode == 0


def test_what_the_process_before_has_blocked_or_ignored_is_heard() -> None:
    """A blocked SIGTERM could not stop a run, and with SIGCHLD ignored the status of a child is lost."""
    told = "print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL)"
    code = f"import signal; from sheeplike import __main__; __main__.main = lambda: {told}; __main__.program()"

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=block, check=False)
    assert (done.returncode, done.stdout) == (0, "set() True\n"), done.stderr


ENVIRONMENT = """
import threading
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Leaves(CartPoleEnv):
    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)
        threading.Thread(target=threading.Event().wait, name="viewer").start()

gymnasium.register("Leaves-v0", Leaves, max_episode_steps=9)
"""


@pytest.mark.slow
def test_a_run_whose_environment_leaves_threads_behind_ends(workplace: Path) -> None:
    Path("leaves.py").write_text(ENVIRONMENT)
    job = ["exp=ppo", "env=gym", "env.id=leaves:Leaves-v0", "profile=cpu", "compile=off", "env.num_envs=2"]
    job += ["dry_run=true", "agent.observations=[state]", "run_dir=mine"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "sheeplike", *job]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "finished: mine" in done.stdout
    assert "left threads behind, ended now: viewer, viewer" in done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("line", ["--help", "compare --help", "exp=ppo env=cartpole_balance profile=cpu show=config"])
def test_a_full_standard_output_is_named(line: str) -> None:
    with FULL.open("w") as full:
        command = [sys.executable, "-m", "sheeplike", *line.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 74
    assert done.stderr.startswith("sheeplike: standard output: No space left on device")


@pytest.mark.parametrize("line", ["compare .", "eval run=x", "exp=ppo env=cartpole_balance profile=cpu"])
def test_a_working_directory_that_is_gone_is_named(workplace: Path, line: str) -> None:
    command = f"rmdir {workplace}; exec {sys.executable} -P -m sheeplike {line}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("sheeplike: the working directory is gone")
    assert done.stderr.count("\n") == 1
