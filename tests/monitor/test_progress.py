"""Progress lines, in a terminal and elsewhere."""

import io
import sys
import threading
import time

import pytest

from sheeplike.monitor.progress import Progress, banner, format_seconds, info, phase

CLEAR = "\r\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_banner_is_aligned(capsys):
    banner("sheeplike", {"policy steps": 100, "replay": "1 GiB\nof 4 GiB", "none": ""})
    assert capsys.readouterr().out.splitlines() == [
        "sheeplike",
        "  policy steps  100",
        "  replay        1 GiB",
        "                of 4 GiB",
        "  none",
    ]


def test_everything_goes_to_standard_output(capsys):
    banner("a", {"b": 1})
    Progress(10).update(10)
    with phase("slow", after=0.0):
        time.sleep(0.05)
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "a\n  b  1\n" in captured.out
    assert "10/10 policy steps" in captured.out
    assert "slow took" in captured.out


def test_a_line_names_everything():
    out, clock = io.StringIO(), Clock()
    progress = Progress(10_000, interval=0, file=out, clock=clock)
    progress.update(0)
    clock.now = 20.0
    shown = {"rollout/return_mean": 12.345, "rollout/success_rate": 0.256, "time/env_sps": 1234.5, "loss/dyn": 1.0}
    progress.show(shown | {"time/grad_sps": 3.14159})
    progress.update(2_000)
    assert out.getvalue().splitlines()[1] == (
        "2,000/10,000 policy steps (20%) | ETA 1 min 20 s | return 12.35 | success 26% | 100 policy steps/s"
        " | 3.14 gradient steps/s"
    )


def test_the_last_known_metrics_stay():
    out = io.StringIO()
    progress = Progress(100, interval=0, file=out)
    progress.show({"rollout/return_mean": 5.0})
    progress.show({"time/grad_sps": 10.0})
    progress.update(20)
    assert "return 5 | 10 gradient steps/s" in out.getvalue()


def test_lines_in_a_file_are_plain_and_limited():
    out, clock = io.StringIO(), Clock()
    progress = Progress(1000, file=out, clock=clock)
    for step in range(1, 1001):
        clock.now = step * 0.05
        progress.update(step)
    progress.close()
    lines = out.getvalue().splitlines()
    assert [line.split("/")[0] for line in lines] == ["1", "201", "401", "601", "801", "1,000"]
    assert " 50 s " in lines[-1]
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()


def test_a_terminal_rewrites_one_line_that_fits(monkeypatch):
    monkeypatch.setenv("COLUMNS", "41")
    out = Terminal()
    progress = Progress(1_000_000, interval=0, file=out)
    progress.show({"rollout/return_mean": 1.0, "time/grad_sps": 1e6})  # 40 characters with the first
    progress.update(1)
    progress.update(2)
    assert out.getvalue().count(CLEAR) == 2
    assert "\n" not in out.getvalue()
    lines = out.getvalue().split(CLEAR)[1:]
    assert lines == [f"{step}/1,000,000 policy steps (0%) | return 1" for step in (1, 2)], "the last parts go first"
    progress.close()
    progress.close()
    assert out.getvalue().endswith("\n")
    assert out.getvalue().count("\n") == 1


def test_a_resumed_run_is_timed_from_where_it_resumed():
    out, clock = io.StringIO(), Clock()
    progress = Progress(10_000, initial_steps=9_000, interval=0, file=out, clock=clock)
    clock.now = 10.0
    progress.update(9_100)
    assert " | ETA 1 min 30 s | " in out.getvalue()


def test_a_quick_phase_prints_nothing():
    out = io.StringIO()
    with phase("building kernels", file=out):
        pass
    assert out.getvalue() == ""


def test_a_slow_phase_is_named_with_its_time():
    out = io.StringIO()
    with phase("building kernels", after=0.05, file=out):
        time.sleep(0.3)
    first, last = out.getvalue().splitlines()
    assert first == "building kernels … 0 s"
    assert last.startswith("building kernels took 0.")


def test_lines_about_a_phase_become_rare_in_a_file(monkeypatch):
    waits = []

    class Impatient(threading.Event):
        def wait(self, timeout=None):
            if timeout is None:  # a thread's own, which says that it has started
                return super().wait()
            waits.append(timeout)
            return super().wait(0)

    monkeypatch.setattr(threading, "Event", Impatient)
    out = io.StringIO()
    with phase("compiling", file=out):
        while len(waits) <= 5:
            time.sleep(0.001)
    assert waits[:5] == [2.0, 10.0, 20.0, 40.0, 80.0]
    terminal = Terminal()
    waits.clear()
    with phase("compiling", file=terminal):
        while len(waits) <= 5:
            time.sleep(0.001)
    assert waits[:5] == [2.0, 1.0, 1.0, 1.0, 1.0]


def test_a_slow_phase_in_a_terminal_shares_a_line():
    out = Terminal()
    with phase("building kernels", after=0.05, file=out):
        time.sleep(0.2)
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().count(CLEAR) >= 2


def test_a_phase_that_fails_says_so_and_raises():
    out = io.StringIO()

    def build():
        with phase("building kernels", after=0.0, file=out):
            time.sleep(0.05)
            raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="compiler"):
        build()
    assert "building kernels failed after" in out.getvalue()


def test_output_that_is_gone_or_plain_ascii_does_not_end_the_run():
    closed = io.StringIO()
    closed.close()
    Progress(10, file=closed).update(1)
    info("text", file=closed)

    raw = io.BytesIO()
    plain = io.TextIOWrapper(raw, encoding="ascii")
    with phase("building", after=0.0, file=plain):
        time.sleep(0.05)
    assert b"building ? 0 s" in raw.getvalue()


def test_no_standard_output_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    Progress(10).update(1)
    banner("a", {"b": 1})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(42.4, "42 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (18420, "5 h 07 min"), (187200, "2 d 04 h")],
)
def test_seconds_are_readable(seconds, text):
    assert format_seconds(seconds) == text


def test_the_estimate_begins_anew_with_the_step_of_that_moment() -> None:
    """Steps taken before learning began are not counted as if learning had made them."""
    now = [0.0]
    out = io.StringIO()
    progress = Progress(1000, interval=10.0, file=out, clock=lambda: now[0])
    progress.update(0)
    now[0] = 9.0
    progress.update(500)  # too soon for a line
    progress.stage("")
    now[0] = 19.0
    progress.update(510)
    assert " | ETA 8 min 10 s | " in out.getvalue().splitlines()[-1]  # 490 steps at one a second


def test_a_pause_does_not_count_and_a_short_time_is_no_estimate() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(1000, interval=0, file=out, clock=clock)
    for clock.now, step in ((4.0, 4), (20.0, 20)):
        progress.update(step)
    clock.now = 320.0  # an evaluation took five minutes
    progress.skip(300.0)
    for clock.now, step in ((330.0, 30), (340.0, 40)):
        progress.update(step)
    lines = [line.partition("ETA ")[2].partition(" |")[0] for line in out.getvalue().splitlines()]
    assert lines == ["", "16 min 20 s", "16 min 10 s", "16 min 00 s"]


def test_the_estimate_of_an_agent_that_learns_in_bursts_is_of_whole_cycles() -> None:
    """A rollout of 64 steps takes 1 s, and the updates after it 9 s."""
    out, clock = io.StringIO(), Clock()
    progress = Progress(1000, interval=0, file=out, clock=clock)
    progress.stage("collecting")
    for second in range(1, 5):
        clock.now = second / 4
        progress.update(16 * second, 0)
    progress.stage("")
    lines = []
    for cycle in range(3):
        clock.now = 10.0 * (cycle + 1)
        progress.update(64 * (cycle + 1), 8 * (cycle + 1))
        for quarter in (1, 2, 3):
            clock.now += 0.25
            progress.update(64 * (cycle + 1) + 16 * quarter, 8 * (cycle + 1))
        lines.append(out.getvalue().splitlines()[-1])
    assert "ETA" not in lines[0]
    assert [line.partition("ETA ")[2].partition(" |")[0] for line in lines[1:]] == ["2 min 09 s", "1 min 59 s"]


def test_return_and_success_are_those_of_the_last_twenty_episodes() -> None:
    out = io.StringIO()
    progress = Progress(100, interval=0, file=out)
    for episodes, value in ((30, 100.0), (1, 1.0), (15, 4.0), (5, 16.0), (0, None)):
        means = {} if value is None else {"rollout/return_mean": value}
        progress.show({"rollout/episodes": episodes, "rollout/success_rate": 0.5, **means})
        progress.update(20)
    shown = [line.split(" | ")[1] for line in out.getvalue().splitlines()]
    # 30; 30 and 1; 30, 1 and 15; 15 and 5; nothing has ended
    assert shown == ["return 100", "return 96.81", "return 66.54", "return 7", "return 7"]


def test_a_speed_that_is_not_measured_yet_is_not_shown() -> None:
    out = io.StringIO()
    progress = Progress(1000, interval=0.0, file=out, clock=lambda: 0.0)
    progress.show({"time/grad_sps": 0.0, "rollout/success_rate": 0.0})
    progress.update(1010)
    line = out.getvalue().splitlines()[-1]
    assert "steps/s" not in line
    assert "success 0%" in line
    assert "(100%)" in line


def test_a_new_stage_does_not_show_the_speed_of_the_one_before() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(100_000, interval=0.0, file=out, clock=clock)
    progress.stage("prefilling")
    clock.now = 10.0
    progress.update(20_000)
    progress.stage("")
    clock.now = 12.0
    progress.update(20_010)  # two seconds say little yet
    clock.now = 20.0
    progress.update(20_100)
    before, first, later = out.getvalue().splitlines()
    assert "2,000 policy steps/s" in before
    assert "policy steps/s" not in first
    assert "10 policy steps/s" in later


def test_a_stage_before_learning_is_named_with_its_time_and_without_an_estimate() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(1000, interval=0, file=out, clock=clock)
    clock.now = 100.0
    progress.stage("filling the replay")
    for clock.now, step in ((100.0, 10), (115.0, 30)):
        progress.update(step)
    progress.stage("")
    clock.now = 125.0
    progress.update(40)
    assert out.getvalue().splitlines() == [
        "filling the replay 0 s | 10/1,000 policy steps (1%)",
        "filling the replay 15 s | 30/1,000 policy steps (3%) | 2 policy steps/s",
        "40/1,000 policy steps (4%) | ETA 16 min 00 s | 1 policy steps/s",
    ]
