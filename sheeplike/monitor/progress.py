"""Banner, progress line and long phases on standard output.

In a terminal the progress line is rewritten in place; in a file or a pipe plain lines come at longer intervals.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TextIO

from sheeplike.terminal import info, is_terminal, write

_SHOWN = {
    "rollout/return_mean": "return {:.4g}",
    "rollout/success_rate": "success {:.0%}",
    "speed": "{}",
    "time/grad_sps": "{:.3g} gradient steps/s",
}
MEASURED = 5.0  # seconds of a stage before a speed is shown and the time that remains is estimated
RECENT_EPISODES = 20  # least number of episodes in the means of return and success


def banner(title: str, entries: Mapping[str, object]) -> None:
    """Print a title and, below it, aligned keys and values, which may have several lines."""
    width = max(map(len, entries), default=0)
    lines = [title]
    for key, value in entries.items():
        first, *rest = str(value).splitlines() or [""]
        lines.append(f"  {key:<{width}}  {first}".rstrip())
        lines += [f"  {'':<{width}}  {line}".rstrip() for line in rest]
    info("\n".join(lines))


class Progress:
    """Progress line: policy steps of the total, the estimated time that remains, return, success and speeds.

    ``interval`` is the minimum time between two lines, by default 0.5 s in a terminal and 10 s elsewhere.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        initial_steps: int = 0,
        interval: float | None = None,
        unit: str = "policy steps",
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps, self._unit = total_steps, unit
        self._file = file
        self._clock = clock
        self._interval = interval if interval is not None else (0.5 if is_terminal(file) else 10.0)
        self._begun = clock()
        self._seen = initial_steps  # policy steps at the last call of update
        self._stage, self._since = "", (self._begun, initial_steps)  # with time and policy steps since when it counts
        self._gradient_steps: int | None = None  # None: not known yet in this stage
        self._speed = 0.0  # 0: not measured yet
        self._written: float | None = None  # time of the last line
        self._metrics: dict[str, float] = {}
        self._episodes: deque[tuple[float, dict[str, float]]] = deque()  # number of episodes, and their means

    def update(self, step: int, gradient_steps: int | None = None) -> None:
        """Show ``step`` policy steps and the newest metrics, unless a line was written less than an interval ago.

        An agent may act for long and then learn for long, so the speed is a mean over whole cycles: from one change of
        ``gradient_steps`` to another.
        """
        now, ends = self._clock(), self._seen < self.total_steps <= step
        self._seen = step
        if gradient_steps is None or self._stage or self._gradient_steps not in (None, gradient_steps):
            seconds = now - self._since[0]
            self._speed = (step - self._since[1]) / seconds if seconds >= MEASURED else 0.0
        elif self._gradient_steps is None:
            self._since = now, step
        self._gradient_steps = gradient_steps
        if self._written is not None and now - self._written < self._interval and not ends:
            return
        self._written = now
        parts = self._parts(step)
        if is_terminal(self._file):
            width = shutil.get_terminal_size().columns - 1
            while len(parts) > 1 and len(" | ".join(parts)) > width:
                parts.pop()
            _show(" | ".join(parts)[:width], self._file, in_place=True)
        else:
            _show(" | ".join(parts) + "\n", self._file)

    def show(self, metrics: Mapping[str, float]) -> None:
        """Show these metrics in the next lines; return and success as means over the last 20 episodes or more."""
        shown = {name: value for name, value in metrics.items() if name in _SHOWN}
        if ended := metrics.get("rollout/episodes"):
            means = {name: value for name, value in shown.items() if name.startswith("rollout/")}
            self._episodes.append((ended, means))
            while sum(count for count, _ in self._episodes) - self._episodes[0][0] >= RECENT_EPISODES:
                self._episodes.popleft()
            for name in means:
                known = [(count, before[name]) for count, before in self._episodes if name in before]
                shown[name] = sum(count * mean for count, mean in known) / sum(count for count, _ in known)
        self._metrics |= shown

    def stage(self, name: str) -> None:
        """Show a stage and its duration instead of the ETA, and restart the speed; ``""`` ends the stage: learning."""
        self._stage, self._since = name, (self._clock(), self._seen)
        self._gradient_steps, self._speed = None, 0.0
        self._metrics = {key: value for key, value in self._metrics.items() if not key.startswith("time/")}

    def skip(self, seconds: float) -> None:
        """Exclude a pause, which has just ended, from the speed."""
        self._since = (self._since[0] + seconds, self._since[1])

    def note(self, text: str) -> None:
        """Print a separate line."""
        _show(text + "\n", self._file, in_place=is_terminal(self._file))

    def close(self) -> None:
        """End the last line."""
        if self._written is not None and is_terminal(self._file):
            _show("\n", self._file)
        self._written = None

    def _parts(self, step: int) -> list[str]:
        """Return the parts of the line, the most important one first: a narrow terminal shows as many as fit."""
        # The last iteration exceeds a total that is no multiple of the worlds.
        fraction = min(step / self.total_steps, 1.0) if self.total_steps else 1.0
        parts = [f"{self._stage} {format_seconds(self._clock() - self._since[0])}"] if self._stage else []
        parts.append(f"{step:,}/{self.total_steps:,} {self._unit} ({fraction:.0%})")
        if step >= self.total_steps:
            parts.append(f"done in {format_seconds(self._clock() - self._begun)}")
        elif self._speed and not self._stage:
            parts.append(f"ETA {format_seconds((self.total_steps - step) / self._speed)}")
        # A speed of 0 means that it was not measured yet.
        shown = {name: value for name, value in self._metrics.items() if value or not name.startswith("time/")}
        if (speed := self._speed) and self._unit != "gradient steps":  # these have a metric
            shown["speed"] = f"{speed:,.0f} {self._unit}/s" if speed >= 10 else f"{speed:.2g} {self._unit}/s"
        return parts + [form.format(shown[name]) for name, form in _SHOWN.items() if name in shown]


def _show(text: str, file: TextIO | None, *, in_place: bool = False) -> None:
    with suppress(OSError):  # a run goes on without a reader
        write(text, file, in_place=in_place)


@contextmanager
def phase(name: str, *, after: float = 2.0, file: TextIO | None = None) -> Iterator[None]:
    """Print ``name`` and its duration if a phase takes longer than ``after`` seconds.

    In a terminal the line is rewritten every second; elsewhere a new one comes 10, 20, 40, … seconds after the last.
    """
    terminal, start, over, announced = is_terminal(file), time.monotonic(), threading.Event(), False

    def announce(ending: str) -> None:
        end = "" if terminal and ending.startswith("…") else "\n"
        _show(f"{name} {ending}{end}", file, in_place=terminal)

    def watch() -> None:
        nonlocal announced
        wait, following = after, 1.0 if terminal else 10.0
        while not over.wait(wait):
            announced, wait, following = True, following, following if terminal else 2 * following
            announce(f"… {format_seconds(time.monotonic() - start)}")

    watcher = threading.Thread(target=watch, name=f"phase {name}", daemon=True)
    watcher.start()
    outcome = "failed after"
    try:
        yield
        outcome = "took"
    except KeyboardInterrupt:
        outcome = "interrupted after"
        raise
    finally:
        over.set()
        watcher.join()
        if announced:
            announce(f"{outcome} {time.monotonic() - start:.1f} s")


def format_seconds(seconds: float) -> str:
    """Format seconds as ``42 s``, ``3 min 20 s``, ``5 h 07 min`` or ``2 d 04 h``."""
    seconds = round(seconds)
    for size, unit, part, part_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // part:02d} {part_unit}"
    return f"{seconds} s"
