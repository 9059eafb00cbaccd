"""A run that hangs says where, however it hangs; one that goes on says nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from sheeplike.commands.watchdog import Watchdog

START = """
import ctypes, sys, threading, time
from sheeplike.commands.watchdog import Watchdog

def waiting_elsewhere():
    time.sleep(60)

threading.Thread(target=waiting_elsewhere, daemon=True).start()
with Watchdog(0.4, sys.argv[1]) as watchdog:
    for _ in range(3):
        watchdog.beat()
"""
# PyDLL keeps the interpreter's lock while the function runs: no other Python thread can do anything.
HANGS = {
    "in C, with the lock": "ctypes.PyDLL(None).usleep(1_700_000)",
    "in Python": "time.sleep(1.7)",
}


def run(tmp_path: Path, body: str) -> tuple[str, str | None]:
    """What a program that does ``body`` under a watchdog of 0.4 seconds leaves on stderr and in the file."""
    file = tmp_path / "stacks.txt"
    program = START + "".join(f"    {line}\n" for line in body.splitlines())
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr, file.read_text() if file.exists() else None


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_the_stacks_of_a_run_that_hangs(tmp_path: Path, hang: str) -> None:
    (tmp_path / "stacks.txt").write_text("of an earlier hang\n")
    error, written = run(tmp_path, f"def stuck():\n    {hang}\nstuck()\nwatchdog.beat()")
    assert written == f"of an earlier hang\n{error}"
    times = error.count("Timeout (0:00:00.500000)!")
    assert times >= 2  # at 0.5, 1.0 and 1.5 seconds
    assert error.count(" in stuck") == error.count(" in waiting_elsewhere") == times


def test_a_run_that_goes_on_says_nothing_and_leaves_no_file(tmp_path: Path) -> None:
    beats = "for _ in range(60):\n    time.sleep(0.02)\n    watchdog.beat()"
    assert run(tmp_path, beats) == ("", None)


def test_what_may_take_long_is_not_reported_and_what_comes_then_is(tmp_path: Path) -> None:
    nested = "    with watchdog.paused():\n        pass\n"
    pause = f"with watchdog.paused():\n{nested}    time.sleep(0.2)\n    watchdog.beat()\n    time.sleep(0.9)"
    assert run(tmp_path, pause) == ("", None)
    error, written = run(tmp_path, f"{pause}\ntime.sleep(0.8)")
    assert "Timeout" in error
    assert written == error


def test_never(tmp_path: Path) -> None:
    with Watchdog(None, tmp_path / "stacks.txt") as watchdog:
        watchdog.beat()
        with watchdog.paused():
            pass
    assert not (tmp_path / "stacks.txt").exists()


def test_beats_cost_little(tmp_path: Path) -> None:
    """Arming starts a thread: 100,000 of them would take seconds."""
    with Watchdog(600, tmp_path / "stacks.txt") as watchdog:
        first, start = watchdog.armed, time.monotonic()
        for _ in range(100_000):
            watchdog.beat()
        assert time.monotonic() - start < 2
        assert watchdog.armed - first <= 2


def test_a_process_that_is_killed_leaves_no_other_behind(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom sheeplike.commands.watchdog import Watchdog\n"
        "watchdog = Watchdog(60, sys.argv[1])\nprint(watchdog.copier.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "x"], capture_output=True, text=True, timeout=60)
    shell = Path("/proc") / done.stdout.strip() / "stat"
    deadline = time.monotonic() + 10
    while shell.exists() and shell.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not shell.exists() or shell.read_text().split()[2] == "Z"
