"""What a person sees on standard output: the start-up banner, the progress line, and which phase takes long.

In a terminal the progress line is rewritten in place; in a file or a pipe plain lines come at longer intervals.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TextIO

_CLEAR = "\r\x1b[2K"
_SHOWN = {
    "rollout/return_mean": "return {:.4g}",
    "rollout/success_rate": "success {:.0%}",
    "time/env_sps": "{:,.0f} env steps/s",
    "time/grad_sps": "{:.3g} gradient steps/s",
}


def banner(sections: Mapping[str, Mapping[str, object]], *, file: TextIO | None = None) -> str:
    """Print titles with aligned key and value lines under them; values of several lines stay aligned.

    Args:
        sections: title to key to value; ``str()`` of a value is shown.
        file: standard output by default.

    Returns:
        The text as printed, without the last newline.
    """
    keys = [str(key) for entries in sections.values() for key in entries]
    width = max(map(len, keys), default=0)
    lines: list[str] = []
    for title, entries in sections.items():
        lines.append(title)
        for key, value in entries.items():
            first, *rest = str(value).splitlines() or [""]
            lines.append(f"  {key!s:<{width}}  {first}".rstrip())
            lines += [f"  {'':<{width}}  {line}".rstrip() for line in rest]
    text = "\n".join(lines)
    _write(file, text + "\n")
    return text


class Progress:
    """The progress line: policy steps of the total, return, success, speeds and the estimated time that remains.

    Args:
        total_steps: policy steps at which the run ends.
        initial_steps: policy steps that were done before, in a resumed run.
        interval: least seconds between two lines; by default 0.5 in a terminal and 10 elsewhere.
        file: standard output by default.
        clock: seconds, from any start.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        initial_steps: int = 0,
        interval: float | None = None,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self._file = file
        self._clock = clock
        self._interval = interval if interval is not None else (0.5 if _is_terminal(file) else 10.0)
        self._start = self._last = (clock(), initial_steps)
        self._seen = initial_steps
        self._speed: float | None = None
        self._expected: float | None = None
        self._stage = ("", self._start[0])
        self._written: float | None = None
        self._ended = False
        self._metrics: dict[str, float] = {}

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Show ``step`` policy steps and the newest of the metrics, unless a line has just been written.

        Args:
            metrics: any; ``rollout/return_mean``, ``rollout/success_rate``, ``time/env_sps`` and ``time/grad_sps`` are
                shown, and stay shown until a later call has newer ones.
        """
        self.show(metrics or {})
        self._seen = step
        now = self._clock()
        due = self._written is None or now - self._written >= self._interval
        ends = step >= self.total_steps and not self._ended
        if not due and not ends:
            return
        self._ended = step >= self.total_steps
        self._measure(now, step)
        self._written = now
        line = self._line(step)
        if _is_terminal(self._file):
            columns = shutil.get_terminal_size().columns
            _write(self._file, _CLEAR + line[: columns - 1])
        else:
            _write(self._file, line + "\n")

    def show(self, metrics: Mapping[str, float]) -> None:
        """Have newer metrics in the next line; see :meth:`update`."""
        self._metrics |= {name: value for name, value in metrics.items() if name in _SHOWN}

    def stage(self, name: str) -> None:
        """Say what the run is doing while it does not yet learn, with the time since; ``""``: it learns.

        Another stage has another speed: the estimate begins anew, from what :meth:`expect` said, and there is none
        before the run learns.
        """
        now = self._clock()
        self._stage = (name, now)
        self._speed, self._last = self._expected if not name else None, (now, self._seen)

    def expect(self, seconds: float) -> None:
        """Begin the estimate, once the run learns, with what the rest of it should take."""
        self._expected = (self.total_steps - self._seen) / seconds if seconds > 0 else None

    def note(self, text: str) -> None:
        """Print a line of its own; in a terminal the progress line comes back at its next update."""
        _write(self._file, (_CLEAR if _is_terminal(self._file) else "") + text + "\n")

    def close(self) -> None:
        """Leave the last line standing."""
        if self._written is not None and _is_terminal(self._file):
            _write(self._file, "\n")
        self._written = None

    def _measure(self, now: float, step: int) -> None:
        """Policy steps per second, of which the recent past counts most: learning starts late and slows the loop."""
        seconds, steps = now - self._last[0], step - self._last[1]
        if seconds <= 0 or steps <= 0:
            return
        keep = 0.5 ** (seconds / 60.0)
        recent = steps / seconds
        self._speed = recent if self._speed is None else keep * self._speed + (1 - keep) * recent
        self._last = (now, step)

    def _line(self, step: int) -> str:
        # The last iteration goes a little beyond the total where that is no multiple of the worlds.
        fraction = min(step / self.total_steps, 1.0) if self.total_steps else 1.0
        stage, since = self._stage
        parts = [f"{stage} {format_seconds(self._clock() - since)}"] if stage else []
        parts.append(f"{step:,}/{self.total_steps:,} policy steps ({fraction:.0%})")
        # A speed of 0 has not been measured yet.
        shown = {name: value for name, value in self._metrics.items() if value or not name.startswith("time/")}
        parts += [form.format(shown[name]) for name, form in _SHOWN.items() if name in shown]
        if step >= self.total_steps:
            parts.append(f"done in {format_seconds(self._clock() - self._start[0])}")
        elif self._speed and not stage:
            parts.append(f"ETA {format_seconds((self.total_steps - step) / self._speed)}")
        return " | ".join(parts)


@contextmanager
def phase(name: str, *, after: float = 2.0, every: float | None = None, file: TextIO | None = None) -> Iterator[None]:
    """Say what takes long: once ``after`` seconds have passed, show the name with elapsed seconds, then the duration.

    A phase that is over sooner prints nothing.

    Args:
        every: seconds between updates; by default 1 in a terminal, where they share a line. Elsewhere 10 at first, and
            twice as long after each line.
        file: standard output by default.
    """
    terminal = _is_terminal(file)
    longer = 2.0 if every is None and not terminal else 1.0
    every = every if every is not None else (1.0 if terminal else 10.0)
    start = time.monotonic()
    over = threading.Event()
    announced = False

    def tell(ending: str) -> None:
        line = f"{name} {ending}"
        _write(file, _CLEAR + line if terminal else line + "\n")

    def watch() -> None:
        nonlocal announced
        wait, following = after, every
        while not over.wait(wait):
            announced, wait, following = True, following, following * longer
            tell(f"… {format_seconds(time.monotonic() - start)}")

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
            tell(f"{outcome} {time.monotonic() - start:.1f} s")
            if terminal:
                _write(file, "\n")


def format_seconds(seconds: float) -> str:
    """``42 s``, ``3 min 20 s``, ``5 h 07 min``, ``2 d 04 h``."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600:02d} h"


def _is_terminal(file: TextIO | None) -> bool:
    try:
        return (file or sys.stdout).isatty()
    except (AttributeError, ValueError):
        return False


def info(text: str, *, file: TextIO | None = None) -> None:
    """Print a line that nobody has to read: a reader that has gone away does not end the run."""
    _write(file, text + "\n")


def warn(text: str) -> None:
    """Print a line to stderr that says what a user should know, and need not stop for."""
    info(f"sheeplike: {text}", file=sys.stderr)


def _write(file: TextIO | None, text: str) -> None:
    """Write and flush; a reader that has gone away, or an encoding without ``…``, does not end the run."""
    file = file or sys.stdout
    if file is None:  # as under pythonw, or with standard output closed
        return
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        file.write(text.encode(encoding, "replace").decode(encoding))
        file.flush()
    except BrokenPipeError:
        # Or Python would try again when it exits, fail, and end with a status of its own.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, file.fileno())
            os.close(nowhere)
    except (OSError, ValueError):
        pass
