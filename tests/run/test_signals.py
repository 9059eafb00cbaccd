"""A signal leaves a note; what comes of it is decided by ordinary code, and others who listen are told afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from sheeplike.run import signals
from sheeplike.run.signals import INTERRUPTED, PREEMPTED, SIGNALS, stoppable

HERE = os.getpid()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Statuses with which the process would have ended at once."""
    statuses: list[int] = []
    monkeypatch.setattr(signals.os, "_exit", statuses.append)
    monkeypatch.setattr(signals, "_ENDING", threading.Lock())
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
    yield statuses
    signal.signal(signal.SIGHUP, hangup)


def send(signum: int) -> None:
    os.kill(HERE, signum)
    time.sleep(0.01)  # the handler runs between two byte codes


@pytest.mark.parametrize("signum", SIGNALS)
def test_one_signal_is_noted_and_nothing_else_happens(signum: int, exits: list[int]) -> None:
    with stoppable() as stop:
        stop.ready = True
        assert not stop()
        send(signum)
        assert stop()
        assert stop.status == (INTERRUPTED if signum == signal.SIGINT else PREEMPTED)
    assert exits == []
    assert signal.getsignal(signum) == (signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


def test_the_signal_of_another_rank_may_still_come_here(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_REQUEST", 0.0)
    with stoppable() as stop:
        stop.ready = True
        stop.adopt(signal.SIGTERM)
        assert stop.status == PREEMPTED
        send(signal.SIGTERM)
        assert exits == []
        send(signal.SIGTERM)
    assert exits == [128 + signal.SIGTERM]


@pytest.mark.parametrize(("first", "second"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGUSR1, signal.SIGINT)])
def test_a_second_signal_exits_at_once(
    first: int, second: int, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "SAME_REQUEST", 0.02)
    with stoppable() as stop:
        stop.ready = True
        send(first)
        time.sleep(0.03)
        assert exits == []
        send(second)
    assert exits == [128 + second]


def test_the_same_signal_twice_within_a_moment_is_one_request(exits: list[int]) -> None:
    with stoppable() as stop:
        stop.ready = True
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        send(signal.SIGHUP)  # the session is closed
        assert exits == []
        send(signal.SIGINT)  # another one is a second request, however soon
    assert exits == [130]
    assert stop.signals[:1] == [signal.SIGTERM]


def test_whoever_listened_before_is_told_when_all_is_saved(exits: list[int]) -> None:
    told: list[int] = []
    bypass = lambda signum, frame: told.append(signum)  # noqa: E731
    signal.signal(signal.SIGTERM, bypass)
    signal.signal(signal.SIGUSR2, bypass)
    with stoppable() as stop:
        stop.ready = True
        send(signal.SIGTERM)
        time.sleep(0.02)
        send(signal.SIGUSR2)
        send(signal.SIGUSR2)
        assert (told, exits) == ([], [])
    assert signal.getsignal(signal.SIGUSR2) is bypass
    stop.call_previous_handlers()
    assert told == [signal.SIGTERM, signal.SIGUSR2]


def test_nobody_is_told_where_the_handlers_were_the_systems_own(exits: list[int]) -> None:
    with stoppable() as stop:
        stop.ready = True
        send(signal.SIGINT)
    stop.call_previous_handlers()  # the default handler of SIGINT would raise KeyboardInterrupt
    assert exits == []


def test_the_next_run_of_a_program_can_be_stopped_too(exits: list[int]) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        with stoppable(ready=True) as stop:
            send(signum)
            assert stop()
            stop.settled = True
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_is_ignored_stays_ignored(exits: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stoppable() as stop:
        stop.ready = True
        send(signal.SIGINT)
        assert not stop()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_reader_that_has_gone_away_changes_nothing() -> None:
    code = (
        "import os, signal\nfrom sheeplike.run.signals import stoppable\n"
        "from sheeplike.monitor.progress import info\n"
        "with stoppable() as stop:\n    stop.ready = True\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    info('saved')\n"
        "raise SystemExit(stop.status)"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (PREEMPTED, "")


def test_in_another_thread_nothing_changes() -> None:
    seen: list[Callable] = []

    def work() -> None:
        with stoppable() as stop:
            stop.ready = True
            seen.append(stop())

    before = [signal.getsignal(signum) for signum in SIGNALS]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_a_process_that_is_asked_twice_ends_although_it_hangs() -> None:
    code = (
        "import signal, time; from sheeplike.run.signals import stoppable\n"
        "with stoppable() as stop:\n    stop.ready = True\n    print('ready', flush=True)\n"
        "    while True: time.sleep(0.05)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(signals.SAME_REQUEST + 0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert "SIGTERM: saving" in process.stdout.read()


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, PREEMPTED), (signal.SIGINT, INTERRUPTED)])
@pytest.mark.parametrize("within", ["nullcontext", "stoppable"])
def test_a_wait_in_a_library_is_ended(within: str, signum: int, status: int) -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from contextlib import nullcontext\nfrom datetime import timedelta\nfrom torch.distributed import TCPStore\n"
        "from sheeplike.run.signals import handle_all_at_once, stoppable\nhandle_all_at_once()\n"
        f"with {within}():\n    print('ready', flush=True)\n"
        "    TCPStore('127.0.0.1', 0, 2, True, timedelta(seconds=100))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signum)
    assert process.wait(timeout=60) == status


def test_a_rank_ends_with_the_process_that_started_it() -> None:
    rank = (
        "import os, time\nfrom sheeplike.run.signals import end_with_launcher\nend_with_launcher()\n"
        "print('begun', flush=True)\ntime.sleep(20)\nprint('left alone', flush=True)"
    )
    launcher = (
        "import os, subprocess, sys, time\nfrom sheeplike.run.signals import LAUNCHER\n"
        f"subprocess.Popen([sys.executable, '-c', {rank!r}], env=os.environ | {{LAUNCHER: str(os.getpid())}})\n"
        "time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    process.kill()
    assert process.stdout.read() == ""
    process.wait()
    late = subprocess.run([sys.executable, "-c", rank], env=os.environ | {signals.LAUNCHER: "1"}, check=False)
    assert late.returncode == PREEMPTED


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, PREEMPTED), (signal.SIGINT, INTERRUPTED)])
def test_during_the_start_a_signal_ends_the_process(signum: int, status: int, exits: list[int]) -> None:
    with stoppable():
        send(signum)
    assert exits[0] == status
