"""Several runs side by side: which agent is better, how sure that is, and the tables that say so.

Curves are straight lines between evaluations, and nothing is extrapolated: what is compared across groups ends where
the shortest run ends, a group's own curve where its shortest run ends.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sheeplike.monitor.intervals import (
    area_under_curve,
    first_reached,
    improvement_interval,
    iqm,
    iqm_interval,
    permutation_test,
    probability_of_improvement,
    wilson_interval,
)
from sheeplike.monitor.progress import format_seconds
from sheeplike.monitor.runs import ACTION_REPEAT, Curve, Run, RunError

MIN_SEEDS = 3  # with fewer, an interval over seeds would say nothing
GRID = 200  # most points of a group's curve
SUCCESS = ("eval/success_rate", "eval/episodes")
AXES = {"steps": "policy steps", "time": "wall-clock time"}


class Estimate(NamedTuple):
    """An interquartile mean over seeds, with its 95 % interval where there are seeds enough for one."""

    value: float
    interval: tuple[float, float] | None


class Reach(NamedTuple):
    """When a threshold is reached: the median over seeds, of which those that never reach it count as infinite.

    Attributes:
        median: infinite if less than half of the seeds reached it.
        bound: a seed that did not reach it ended before the median, which may thus be too high.
        reached, seeds: how many did, of how many.
    """

    median: float
    bound: bool
    reached: int
    seeds: int


class Band(NamedTuple):
    """A group's curve. ``x (P,)`` in policy steps or seconds, ``iqm (P,)``; ``low`` and ``high (P,)``, or None."""

    x: np.ndarray
    iqm: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None


@dataclass(frozen=True)
class Group:
    """The seeds of one experiment.

    Attributes:
        runs: one per seed.
        curves: the compared metric of each.
        band: over seeds, as far as all of them go.
        finals: ``(R,)`` each seed's last evaluation in the common range.
        final, best, area: over seeds: the last and the highest evaluation, and the mean height of the curve, in the
            common range.
        success: successes and episodes of the last evaluations; None where a run has not counted them.
        reach: axis to when the threshold is reached; empty without a threshold.
    """

    label: str
    runs: Sequence[Run]
    curves: Sequence[Curve]
    band: Band
    finals: np.ndarray
    final: Estimate
    best: Estimate
    area: Estimate
    success: tuple[int, int] | None
    reach: Mapping[str, Reach]


@dataclass(frozen=True)
class Comparison:
    """All that the tables and the figure show.

    Attributes:
        x: ``"steps"`` or ``"time"``. start, end: the range that all runs cover, in policy steps or seconds.
        shortest: the run that ends it.
        verdicts: one sentence per pair of groups.
        notes: what a reader must know beside the numbers.
    """

    env: str | None
    metric: str
    x: str
    threshold: float | None
    start: float
    end: float
    groups: Sequence[Group]
    verdicts: Sequence[str]
    notes: Sequence[str]


def compare(
    groups: Mapping[str, Sequence[Run]],
    *,
    metric: str,
    x: str = "steps",
    threshold: float | None = None,
    notes: Sequence[str] = (),
) -> Comparison:
    """Compare the seeds of one or more experiments on one task.

    Args:
        groups: label to runs, each of which has a curve of ``metric``.
        x: ``"steps"`` or ``"time"``.
        notes: what a reader must know about the choice of runs.

    Raises:
        RunError: one run ends before another begins.
    """
    runs = [run for members in groups.values() for run in members]
    last = max(runs, key=lambda run: run.curves[metric].along(x)[0])
    shortest = min(runs, key=lambda run: run.curves[metric].along(x)[-1])
    start, end = last.curves[metric].along(x)[0], shortest.curves[metric].along(x)[-1]
    if start > end:
        raise RunError(
            f"{metric} of {shortest.path} ends at {place(end, x)}, before that of {last.path} begins at "
            f"{place(start, x)}: expected runs that overlap in {AXES[x]}; nearest: "
            f"x={'time' if x == 'steps' else 'steps'}"
        )
    compared = [_group(label, members, metric, x, threshold, start, end) for label, members in groups.items()]
    verdicts = [_verdict(a, b, metric) for a, b in itertools.combinations(compared, 2)]
    envs = sorted({run.env for run in runs if run.env})
    ended = f", where {shortest.path} ends" * any(run.curves[metric].along(x)[-1] > end for run in runs)
    notes = [*notes, f"Compared from {place(start, x)} to {place(end, x)}{ended}."]
    unsaid = sum(run.env is None for run in runs)
    if unsaid and envs:
        notes.append(f"{unsaid} of {len(runs)} runs do not say their task; taken to be {envs[0]}.")
    repeats = sorted({run.settings[ACTION_REPEAT] for run in runs if ACTION_REPEAT in run.settings})
    if len(repeats) > 1:
        notes.append(f"A policy step is {' or '.join(map(str, repeats))} control steps: action_repeat differs.")
    for run in runs:
        if count := run.nonfinite.get(metric):
            notes.append(f"{run.path}: values of {metric} that are not finite, left out: {count}.")
    return Comparison(envs[0] if envs else None, metric, x, threshold, start, end, compared, verdicts, notes)


def to_markdown(comparison: Comparison) -> str:
    """The table, the verdicts, and how to read them."""
    groups, metric = comparison.groups, comparison.metric
    columns = {
        "agent": [group.label for group in groups],
        "seeds": [str(len(group.runs)) for group in groups],
        f"final {metric}": [_say(group.final, len(group.runs)) for group in groups],
        "best": [number(group.best.value) for group in groups],
        "area under the curve": [_say(group.area, len(group.runs)) for group in groups],
    }
    if any(group.success for group in groups):
        columns["success"] = [_say_success(group.success) for group in groups]
    if comparison.threshold is not None:
        for axis, name in AXES.items():
            columns[f"{name} to {number(comparison.threshold)}"] = [_say_reach(g.reach[axis], axis) for g in groups]
    rows = [list(columns), ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    verdicts = [f"- {verdict}" for verdict in comparison.verdicts] or ["- One experiment: nothing to compare it with."]
    lines = [*table, "", *verdicts, "", *(f"- {note}" for note in [*comparison.notes, *_reading(comparison)]), ""]
    lines += [f"- {group.label}: {', '.join(str(run.path) for run in group.runs)}" for group in groups]
    return "\n".join(lines) + "\n"


def to_csv(comparison: Comparison) -> str:
    """Every point of every run: group, seed, step (policy steps), seconds, value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["group", "seed", "step", "seconds", "value"])
    for group in comparison.groups:
        for run, curve in zip(group.runs, group.curves, strict=True):
            for step, seconds, value in zip(*curve, strict=True):
                writer.writerow([group.label, run.seed, int(step), round(float(seconds), 3), float(value)])
    return text.getvalue()


def number(value: float) -> str:
    """Three digits, or whole thousands with commas: ``0.912``, ``182``, ``12,345``."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def compact(value: float) -> str:
    """Three digits with k, M or G: ``500``, ``120k``, ``1.25M``."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def place(value: float, x: str) -> str:
    """A place on an axis, with its unit."""
    return f"{compact(value)} policy steps" if x == "steps" else format_seconds(value)


def seeds(group: Group) -> str:
    """How many seeds a group has, and whether that is enough for an interval."""
    count = len(group.runs)
    return f"{count} seed{'s' * (count != 1)}" + (": no interval" if count < MIN_SEEDS else "")


def _group(
    label: str, runs: Sequence[Run], metric: str, x: str, threshold: float | None, start: float, end: float
) -> Group:
    curves = [run.curves[metric] for run in runs]
    last = [int(np.searchsorted(curve.along(x), end, "right")) for curve in curves]
    finals = np.array([curve.value[stop - 1] for curve, stop in zip(curves, last, strict=True)])
    best = np.array([curve.value[:stop].max() for curve, stop in zip(curves, last, strict=True)])
    areas = np.array([area_under_curve(curve.along(x), curve.value, start, end) for curve in curves])
    reach = {} if threshold is None else {axis: _reach(curves, axis, threshold) for axis in AXES}
    estimates = (_estimate(values) for values in (finals, best, areas))
    return Group(label, runs, curves, _band(curves, x), finals, *estimates, _success(runs, x, end), reach)


def _estimate(values: np.ndarray) -> Estimate:
    if len(values) < MIN_SEEDS:
        return Estimate(float(iqm(values)), None)
    low, high = iqm_interval(values[:, None])
    return Estimate(float(iqm(values)), (float(low), float(high)))


def _band(curves: Sequence[Curve], x: str) -> Band:
    """On the places where any of the seeds was evaluated, or on a regular grid where these are very many."""
    start, end = max(curve.along(x)[0] for curve in curves), min(curve.along(x)[-1] for curve in curves)
    places = np.unique(np.concatenate([[start, end], *(curve.along(x) for curve in curves)]))
    places = places[(places >= start) & (places <= end)]
    if len(places) > GRID:
        places = np.linspace(start, end, GRID)
    values = np.stack([np.interp(places, curve.along(x), curve.value) for curve in curves])
    low, high = (None, None) if len(curves) < MIN_SEEDS else iqm_interval(values[:, None])
    return Band(places, iqm(values, 0), low, high)


def _reach(curves: Sequence[Curve], axis: str, threshold: float) -> Reach:
    times = np.array([first_reached(curve.along(axis), curve.value, threshold) for curve in curves])
    median = float(np.median(times))
    ended = [curve.along(axis)[-1] for curve, time in zip(curves, times, strict=True) if math.isinf(time)]
    bound = math.isfinite(median) and any(end < median for end in ended)
    return Reach(median, bound, int(np.isfinite(times).sum()), len(times))


def _success(runs: Sequence[Run], x: str, end: float) -> tuple[int, int] | None:
    """Successes and episodes of every run's last evaluation up to ``end``."""
    successes = trials = 0
    for run in runs:
        rate, episodes = (run.curves.get(name) for name in SUCCESS)
        if rate is None or episodes is None:
            return None
        stop = int(np.searchsorted(rate.along(x), end, "right"))
        same = episodes.value[episodes.step == rate.step[stop - 1]] if stop else []
        if len(same) == 0:
            return None
        successes += round(float(rate.value[stop - 1] * same[0]))
        trials += round(float(same[0]))
    return (successes, trials) if trials else None


def _verdict(a: Group, b: Group, metric: str) -> str:
    """Which of two groups is better, in one sentence."""
    better = "better" if any(word in metric for word in ("return", "success", "reward", "score")) else "higher"
    x, y = a.finals[:, None], b.finals[:, None]
    if probability_of_improvement(x, y) < 0.5:
        a, b, x, y = b, a, y, x
    text = f"P({a.label} > {b.label}) = {probability_of_improvement(x, y):.2f}"
    if min(len(x), len(y)) < MIN_SEEDS:
        return (
            f"Not enough seeds to say which of {a.label} and {b.label} is {better}: {len(x)} and {len(y)}, "
            f"expected at least {MIN_SEEDS} each; {text}, no interval"
        )
    low, high = improvement_interval(x, y)
    chance = permutation_test(x[:, 0], y[:, 0])
    # An interval without width would claim a certainty that a few seeds cannot give.
    text += f" [{low:.2f}, {high:.2f}]" * (low < high) + f", permutation test p = {chance:.2g}"
    if low <= 0.5:
        return f"No clear difference between {a.label} and {b.label}: {text}"
    if chance > 0.05:
        return f"{a.label} looks {better} than {b.label}, but more seeds are needed to be sure: {text}"
    return f"{a.label} is {better} than {b.label}: {text}"


def _reading(comparison: Comparison) -> list[str]:
    """What the numbers are."""
    lines = [
        "final, best and area: interquartile mean over seeds [95 % percentile-bootstrap interval over seeds]; "
        "of fewer than 4 seeds it is the mean. With 3 to 5 seeds such intervals are too narrow.",
        "final: each run's last evaluation up to the end of the compared range; best: the highest up to there; area: "
        "the curve's mean height in it.",
    ]
    if len(comparison.groups) > 1:
        lines.append(
            "P(A > B): how likely the final evaluation of a seed of A is above that of a seed of B; p: how often "
            "groups dealt out at random would differ as much (3 against 3 seeds: never less than 0.1)."
        )
    if any(group.success for group in comparison.groups):
        lines.append(
            "success: over the episodes of all seeds' final evaluations [95 % Wilson interval, which says nothing of "
            "how much seeds differ]."
        )
    if comparison.x == "time":
        lines.append("wall-clock time: from the first policy step on, evaluations and videos included.")
    if len(comparison.groups) > 2:
        lines.append("Each pair of groups is tested on its own: of many pairs, some will look different by chance.")
    if comparison.threshold is not None:
        lines.append(
            f"to {number(comparison.threshold)}: the first evaluation that is at least as high, median over seeds; "
            "a seed that never is counts as later than all others."
        )
    return lines


def _say(estimate: Estimate, count: int) -> str:
    if estimate.interval is None:
        return f"{number(estimate.value)} ({count} seed{'s' * (count != 1)}: no interval)"
    return f"{number(estimate.value)} [{number(estimate.interval[0])}, {number(estimate.interval[1])}]"


def _say_success(success: tuple[int, int] | None) -> str:
    if success is None:
        return "not counted"
    low, high = wilson_interval(*success)
    return f"{success[0] / success[1]:.0%} [{low:.0%}, {high:.0%}] of {success[1]:,} episodes"


def _say_reach(reach: Reach, axis: str) -> str:
    count = f"({reach.reached} of {reach.seeds})"
    if math.isinf(reach.median):
        return f"not reached {count}"
    value = compact(reach.median) if axis == "steps" else format_seconds(reach.median)
    return f"{'at most ' * reach.bound}{value} {count}"
