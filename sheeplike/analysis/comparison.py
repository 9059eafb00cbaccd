"""Comparison of several runs: which agent is better, and how certain that is.

Curves are straight lines between evaluations, and nothing is extrapolated: a comparison of groups ends where the
shortest of all runs ends, a group's own curve where the shortest run of the group ends.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sheeplike.analysis.runs import SUCCESS, Curve, Run, RunError
from sheeplike.analysis.statistics import (
    area_under_curve,
    first_reached,
    improvement_interval,
    iqm,
    iqm_interval,
    permutation_test,
    probability_of_improvement,
    success_interval,
)
from sheeplike.monitor.progress import format_seconds
from sheeplike.terminal import one_line

MIN_SEEDS = 3  # fewer have no interval
GRID = 200  # maximum number of points of a group's curve
AXES = {"steps": "policy steps", "time": "training time"}
READING = (
    "final: each seed's last evaluation in the compared range; best: its highest one; area: the mean height of its "
    "curve. The table shows interquartile means over seeds (means of fewer than 4 seeds) [95 % percentile-bootstrap "
    "intervals over seeds, which are too narrow for 3 to 5 seeds].",
    "P(A > B): the probability that a seed of A ends above a seed of B; p: how often groups formed at random would "
    "differ as much (never less than 0.1 with 3 against 3 seeds).",
    "success: over the episodes of all seeds' final evaluations [95 % Wilson interval]; to a threshold: the first "
    "evaluation that reaches it, median over seeds; a seed that never does counts as later than all others.",
)


@dataclass(frozen=True)
class Group:
    """The ``R`` seeds of one experiment, and its own curve of ``P`` points, up to the end of its shortest run."""

    label: str
    runs: Sequence[Run]
    curves: Sequence[Curve]  # one per run
    x: np.ndarray  # (P,) policy steps or seconds
    mean: np.ndarray  # (P,) interquartile mean over seeds
    band: tuple[np.ndarray, np.ndarray] | None  # (P,) each, interval of the mean; None with too few seeds
    finals: np.ndarray  # (R,) each seed's last evaluation in the common range
    bests: np.ndarray  # (R,) each seed's highest evaluation in the common range
    areas: np.ndarray  # (R,) mean height of each seed's curve in the common range


@dataclass(frozen=True)
class Comparison:
    """Content of the tables and the figure."""

    env: str | None
    metric: str
    x: str  # "steps" or "time"
    threshold: float | None
    end: float  # policy steps or seconds that all runs reach
    groups: Sequence[Group]
    verdicts: Sequence[str]  # one sentence per pair of groups
    notes: Sequence[str]  # sentences


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
        notes: sentences about the choice of the runs.
    """
    runs = [run for members in groups.values() for run in members]
    last = max(runs, key=lambda run: run.curves[metric].along(x)[0])
    shortest = min(runs, key=lambda run: run.curves[metric].along(x)[-1])
    start, end = last.curves[metric].along(x)[0], shortest.curves[metric].along(x)[-1]
    if start > end:
        ends = f"{metric} of {shortest.path} ends at {_position(end, x)}"
        begins = f"before that of {last.path} begins at {_position(start, x)}"
        other = "time" if x == "steps" else "steps"
        raise RunError(f"{ends}, {begins}: expected runs that overlap in {AXES[x]}; nearest: x={other}")
    compared = [_group(label, members, metric, x, start, end) for label, members in groups.items()]
    verdicts = [_verdict(a, b, metric) for a, b in itertools.combinations(compared, 2)]
    longer = any(run.curves[metric].along(x)[-1] > end for run in runs)
    ended = f", where {shortest.path} ends" if longer else ""
    notes = [*notes, f"Compared from {_position(start, x)} to {_position(end, x)}{ended}."]
    for run in runs:
        if count := run.nonfinite.get(metric):
            notes.append(f"{run.path}: values of {metric} that are not finite or too large, left out: {count}.")
    env = next((run.env for run in runs if run.env), None)
    return Comparison(env, metric, x, threshold, end, compared, verdicts, notes)


def to_markdown(comparison: Comparison) -> str:
    """Format the table, the verdicts, and how to read them."""
    groups, metric, x, threshold = comparison.groups, comparison.metric, comparison.x, comparison.threshold
    columns = {
        "agent": [group.label for group in groups],
        "seeds": [str(len(group.runs)) for group in groups],
        f"final {metric}": [_estimate(group.finals) for group in groups],
        "best": [number(iqm(group.bests)) for group in groups],
        "area under the curve": [_estimate(group.areas) for group in groups],
    }
    successes = [_success(group.runs, x, comparison.end) for group in groups]
    if any(successes):
        columns["success"] = [success or "not counted" for success in successes]
    if threshold is not None:
        for axis, name in AXES.items():
            columns[f"{name} to {number(threshold)}"] = [_reach(group.curves, axis, threshold) for group in groups]
    table = markdown_table([list(columns), *zip(*columns.values(), strict=True)])
    verdicts = comparison.verdicts or ["One experiment: nothing to compare it with."]
    paths = [f"{group.label}: {', '.join(str(run.path) for run in group.runs)}" for group in groups]
    sections = verdicts, [*comparison.notes, *READING], paths
    lists = ["\n".join(f"- {one_line(line)}" for line in lines) for lines in sections]
    return "\n\n".join([table, *lists]) + "\n"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells, the first of them the head, with aligned columns."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    lines = [[name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])] for name, *cells in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_csv(comparison: Comparison) -> str:
    """List every point of every run: group, seed, step (policy steps), seconds, value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["group", "seed", "step", "seconds", "value"])
    for group in comparison.groups:
        for run, curve in zip(group.runs, group.curves, strict=True):
            for step, seconds, value in zip(*curve, strict=True):
                writer.writerow([group.label, run.seed, int(step), round(float(seconds), 3), float(value)])
    return text.getvalue()


def number(value: float) -> str:
    """Format three digits, or whole thousands with commas: ``0.912``, ``182``, ``12,345``."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def compact(value: float) -> str:
    """Format three digits with k, M or G: ``500``, ``120k``, ``1.25M``."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def seeds(count: int) -> str:
    """Format a number of seeds, with a remark if it is too small for an interval."""
    return ("1 seed" if count == 1 else f"{count} seeds") + (": no interval" if count < MIN_SEEDS else "")


def _position(value: float, x: str) -> str:
    return f"{compact(value)} policy steps" if x == "steps" else format_seconds(value)


def _group(label: str, runs: Sequence[Run], metric: str, x: str, start: float, end: float) -> Group:
    curves = [run.curves[metric] for run in runs]
    values = [curve.value[curve.along(x) <= end] for curve in curves]
    finals, bests = np.array([one[-1] for one in values]), np.array([one.max() for one in values])
    areas = np.array([area_under_curve(curve.along(x), curve.value, start, end) for curve in curves])
    # The group's own curve has a point at each evaluation of a seed, or a regular grid if these are many.
    first, last = max(curve.along(x)[0] for curve in curves), min(curve.along(x)[-1] for curve in curves)
    grid = np.unique(np.concatenate([[first, last], *(curve.along(x) for curve in curves)]))
    grid = grid[(grid >= first) & (grid <= last)]
    if len(grid) > GRID:
        grid = np.linspace(first, last, GRID)
    heights = np.stack([np.interp(grid, curve.along(x), curve.value) for curve in curves])
    band = iqm_interval(heights) if len(runs) >= MIN_SEEDS else None
    return Group(label, runs, curves, grid, iqm(heights), band, finals, bests, areas)


def _estimate(values: np.ndarray) -> str:
    """Format the interquartile mean over seeds, with its interval if there are enough seeds."""
    if len(values) < MIN_SEEDS:
        return f"{number(iqm(values))} ({seeds(len(values))})"
    low, high = iqm_interval(values)
    return f"{number(iqm(values))} [{number(low)}, {number(high)}]"


def _reach(curves: Sequence[Curve], axis: str, threshold: float) -> str:
    """Format the median position at which seeds reach the threshold; infinite for those that never do."""
    times = np.array([first_reached(curve.along(axis), curve.value, threshold) for curve in curves])
    median, count = float(np.median(times)), f"({np.isfinite(times).sum()} of {len(times)})"
    if math.isinf(median):
        return f"not reached {count}"
    # A seed that ended before the median without reaching the threshold might have reached it before the median.
    ended = any(curve.along(axis)[-1] < min(median, time) for curve, time in zip(curves, times, strict=True))
    text = compact(median) if axis == "steps" else format_seconds(median)
    return f"at most {text} {count}" if ended else f"{text} {count}"


def _success(runs: Sequence[Run], x: str, end: float) -> str | None:
    """Format the success rate of the last evaluations up to ``end``; None if a run has no successes counted there."""
    successes = episodes = 0
    for run in runs:
        if not run.curves.keys() >= set(SUCCESS):
            return None
        rates, counts = (run.curves[name] for name in SUCCESS)
        until = int((rates.along(x) <= end).sum())
        count = counts.value[counts.step == rates.step[until - 1]] if until else np.zeros(0)
        if not count.size:
            return None
        successes += round(float(rates.value[until - 1] * count[0]))
        episodes += round(float(count[0]))
    if not episodes:
        return None
    low, high = success_interval(successes, episodes)
    return f"{successes / episodes:.0%} [{low:.0%}, {high:.0%}] of {episodes:,} episodes"


def _verdict(a: Group, b: Group, metric: str) -> str:
    """Say in one sentence which of two groups is better."""
    better = "better" if any(word in metric for word in ("return", "success", "reward", "score")) else "higher"
    if probability_of_improvement(a.finals, b.finals) < 0.5:
        a, b = b, a
    x, y = a.finals, b.finals
    text = f"P({a.label} > {b.label}) = {probability_of_improvement(x, y):.2f}"
    if min(len(x), len(y)) < MIN_SEEDS:
        counts = f"{len(x)} and {len(y)}, expected at least {MIN_SEEDS} each"
        return f"Not enough seeds to say which of {a.label} and {b.label} is {better}: {counts}; {text}, no interval"
    low, high = improvement_interval(x, y)
    chance = permutation_test(x, y)
    if low < high:  # an interval of width 0 would claim a certainty that a few seeds cannot give
        text += f" [{low:.2f}, {high:.2f}]"
    text += f", permutation test p = {chance:.2g}"
    if low <= 0.5:
        return f"No clear difference between {a.label} and {b.label}: {text}"
    if chance > 0.05:
        return f"{a.label} looks {better} than {b.label}, but more seeds are needed to be sure: {text}"
    return f"{a.label} is {better} than {b.label}: {text}"
