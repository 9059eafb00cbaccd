"""A run that hangs says where, however it hangs; one that goes on says nothing."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import pytest

from sheeplike.run.guards import Watchdog

START = """
import ctypes, sys, threading, time
from contextlib import closing
from sheeplike.run.guards import Watchdog

def waiting_elsewhere():
    time.sleep(60)

threading.Thread(target=waiting_elsewhere, daemon=True).start()
with closing(Watchdog(0.4)) as watchdog:
    for _ in range(3):
        watchdog.beat()
"""
# PyDLL keeps the interpreter's lock while the function runs: no other Python thread can do anything.
HANGS = {
    "in C, with the lock": "ctypes.PyDLL(None).usleep(1_700_000)",
    "in Python": "time.sleep(1.7)",
}


def told(body: str) -> str:
    program = START + "".join(f"    {line}\n" for line in body.splitlines())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_the_stacks_of_a_run_that_hangs(hang: str) -> None:
    error = told(f"def stuck():\n    {hang}\nstuck()\nwatchdog.beat()")
    times = error.count("Timeout (0:00:00.500000)!")
    assert times >= 2
    assert error.count(" in stuck") == error.count(" in waiting_elsewhere") == times


def test_a_run_that_goes_on_says_nothing() -> None:
    assert told("for _ in range(60):\n    time.sleep(0.02)\n    watchdog.beat()") == ""


def test_what_may_take_long_is_not_reported_and_what_comes_then_is() -> None:
    pause = "with watchdog.patient():\n    time.sleep(1.1)"
    assert told(pause) == ""
    assert "Timeout (0:00:00.500000)!" in told(f"{pause}\ntime.sleep(0.8)")
    assert "Timeout (0:00:02.5" in told("with watchdog.patient():\n    time.sleep(2.7)")


def test_never() -> None:
    with closing(Watchdog(None)) as watchdog:
        watchdog.beat()
        with watchdog.patient():
            pass
    assert told("watchdog.close()\nwatchdog.close()\ntime.sleep(0.8)") == ""


def test_beats_start_no_threads() -> None:
    with closing(Watchdog(600)) as watchdog:
        armed = watchdog.armed
        for _ in range(1000):
            watchdog.beat()
        assert watchdog.armed - armed <= 2
