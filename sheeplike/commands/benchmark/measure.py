"""Measured quantities with their spread, and the interleaved rounds in which they are taken."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sheeplike.analysis.comparison import number

LEAST_ROUNDS = 3  # below that there is no spread to speak of

Task = Callable[[int], float]
"""Does something that many times, waits for the device once at the end; returns the seconds that it took."""


class Quantity(NamedTuple):
    """What was measured, once or several times.

    Attributes:
        unit: of the samples, such as ``ms``; empty for counts and ratios.
        samples: one per round, in the order in which they were taken.
    """

    unit: str
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between them lies the middle half of the samples."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def __str__(self) -> str:
        """``1,234 (1,200 to 1,250)``: the median and, where there are several samples, the quartiles."""
        if len(self.samples) == 1:
            return number(self.median)
        low, high = self.quartiles
        return f"{number(self.median)} ({number(low)} to {number(high)})"

    def to_json(self) -> dict[str, Any]:
        """Median, quartiles and every sample."""
        low, high = self.quartiles
        return {"unit": self.unit, "median": self.median, "low": low, "high": high, "samples": list(self.samples)}


def once(value: float, unit: str = "") -> Quantity:
    """What was counted, or measured only once."""
    return Quantity(unit, (float(value),))


def milliseconds(seconds: Sequence[float]) -> Quantity:
    """Seconds per call as milliseconds."""
    return Quantity("ms", tuple(1e3 * one for one in seconds))


def rate(seconds: Sequence[float], each: float, unit: str) -> Quantity:
    """Seconds per call as calls per second, where a call counts for ``each``."""
    return Quantity(unit, tuple(each / one for one in seconds))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Quantity:
    """Quotients round by round: what slows the machine down for a while slows both sides of each."""
    return Quantity("", tuple(a / b for a, b in zip(numerator, denominator, strict=True)))


def interleaved(
    tasks: Mapping[str, Task], *, seconds: float, rounds: int, alike: bool = False, warm: bool = False
) -> dict[str, list[float]]:
    """Take all measurements in turns, so that a machine that drifts does so for all of them.

    Every second round goes through the tasks backwards. Warm-up is not counted.

    Args:
        tasks: by name.
        seconds: time for each task, over all rounds.
        rounds: how many there are; fewer, but no fewer than three, where a single call takes longer than its share.
        alike: as many calls of each task per round: for tasks of which a call depends on those before it.
        warm: the tasks have been called before.

    Returns:
        Seconds per call, one number for each round.
    """
    for task in tasks.values() if not warm else ():
        task(1)
    estimate = {name: max(task(1), 1e-6) for name, task in tasks.items()}
    slowest = max(estimate.values(), default=seconds)
    rounds = max(min(rounds, LEAST_ROUNDS), min(rounds, int(seconds / slowest)))
    share = seconds / rounds
    calls = {name: max(int(share / (slowest if alike else one)), 1) for name, one in estimate.items()}
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(rounds):
        for name in list(tasks)[:: 1 if turn % 2 == 0 else -1]:
            taken[name].append(tasks[name](calls[name]) / calls[name])
    return taken
