"""Comparison of several runs: which agent is better, and how certain that is.

Curves are straight lines between evaluations, and nothing is extrapolated: an equal budget is one that all runs reach,
and the mean curve of a group ends where its shortest run ends.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sheeplike.analysis.runs import SUCCESS, Curve, Run
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
from sheeplike.options import InvalidOption
from sheeplike.terminal import one_line

LOSSES = ("loss/", "held_out/")  # prefixes of metrics of which less is better
MIN_SEEDS = 3  # fewer have no interval
GRID = 200  # maximum number of points of a group's curve
READING = {
    "final": "final: each seed's last evaluation, wherever its training ended; best or highest: its highest one. The "
    "table shows interquartile means over seeds (means of fewer than 4 seeds) [95 % percentile-bootstrap intervals "
    "over seeds, which are too narrow for 3 to 5 seeds].",
    "at equal budget": "at equal budget: each seed's last evaluation until then; mean of the curve: its mean height.",
    "P(": "P(A > B): the probability that a seed of A is above a seed of B.",
    "permutation test": "p: how often groups formed at random would differ as much (at least 0.1, 3 against 3 seeds).",
    "success": "success rate: mean over seeds [95 % interval for the mean of all seeds, from how much these differ]; "
    "that of one seed is over its episodes and says nothing of other seeds.",
    "steps to": "to a threshold: the first evaluation that reaches it, median over seeds; a seed that never "
    "does counts as later than all others.",
}
"""Notes by a word of the columns or verdicts that they explain; the label of a group may have it too."""


@dataclass(frozen=True)
class Group:
    """The ``R`` seeds of one experiment, and their mean curve of ``P`` points, where all of them have one."""

    label: str
    runs: Sequence[Run]
    curves: Sequence[Curve]  # one per run
    x: np.ndarray  # (P,) steps or seconds; empty if no range is common to all seeds
    mean: np.ndarray  # (P,) interquartile mean over seeds
    band: tuple[np.ndarray, np.ndarray] | None  # (P,) each, interval of the mean; None with too few seeds


@dataclass(frozen=True)
class Comparison:
    """Content of the tables and the figure."""

    env: str | None
    metric: str
    x: str  # "steps" or "time"
    threshold: float | None
    budget: tuple[float, float] | None  # first and last position that all runs have; None if there is none
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
    if threshold is not None and metric.startswith(LOSSES):
        raise InvalidOption("threshold", threshold, f"none, since less of {metric} is better")
    compared = [_group(label, members, metric, x) for label, members in groups.items()]
    verdicts = [_verdict(a, b, metric, x) for a, b in itertools.combinations(compared, 2)]
    notes = list(notes)
    for group in compared:
        if not len(group.x):
            notes.append(f"No mean curve of {group.label}: its seeds have no {axis_of(group.runs, x)} in common.")
        for run in group.runs:
            if count := run.nonfinite.get(metric):
                notes.append(f"{run.path}: values of {metric} that are not finite or too large, left out: {count}.")
    env = next((run.env for group in compared for run in group.runs if run.env), None)
    start, end = _common([curve for group in compared for curve in group.curves], x)
    budget = (start, end) if len(compared) > 1 and start <= end else None
    return Comparison(env, metric, x, threshold, budget, compared, verdicts, notes)


def axis_of(runs: Iterable[Run], x: str) -> str:
    """Return the name of an axis."""
    return "training time" if x == "time" else " or ".join(sorted({run.unit for run in runs}))


def to_markdown(comparison: Comparison) -> str:
    """Format the table, the verdicts, and how to read them."""
    groups, metric, x, threshold = comparison.groups, comparison.metric, comparison.x, comparison.threshold
    finals, successes = [_estimate(_last(group, x)) for group in groups], [_success(group.runs) for group in groups]
    bests = [number(iqm(np.array([curve.value.max() for curve in group.curves]))) for group in groups]
    if metric == SUCCESS[0]:
        finals = [success or final for success, final in zip(successes, finals, strict=True)]
    columns = {
        "agent": [group.label for group in groups],
        "seeds": [str(len(group.runs)) for group in groups],
        "trained for": [f"{_ends(group.curves, 'steps')} steps, {_ends(group.curves, 'time')}" for group in groups],
        f"final {metric}": finals,
        "best" if _is_good(metric) else "highest": bests,
    }
    if any(successes) and metric != SUCCESS[0]:
        columns["final success rate"] = [success or "not counted" for success in successes]
    if threshold is not None:
        for axis in ("steps", "time"):
            name = axis_of([run for group in groups for run in group.runs], axis)
            columns[f"{name} to {number(threshold)}"] = [_reach(group.curves, axis, threshold) for group in groups]
    if comparison.budget:
        start, end = comparison.budget
        columns[f"at equal budget, {_short(end, x)}"] = [_estimate(_last(group, x, end)) for group in groups]
        columns[f"mean of the curve, {_short(start, x)} to {_short(end, x)}"] = [
            _estimate(np.array([area_under_curve(curve.along(x), curve.value, start, end) for curve in group.curves]))
            for group in groups
        ]
    table = markdown_table([list(columns), *zip(*columns.values(), strict=True)])
    verdicts = comparison.verdicts or ["One experiment: nothing to compare it with."]
    paths = [f"{group.label}: {', '.join(str(run.path) for run in group.runs)}" for group in groups]
    shown = " ".join([*columns, *verdicts])
    reading = [note for word, note in READING.items() if word in shown]
    sections = verdicts, [*comparison.notes, *reading], paths
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
    """List every point of every run: group, seed, step, seconds, value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(["group", "seed", "step", "seconds", "value"])
    for group in comparison.groups:
        for run, curve in zip(group.runs, group.curves, strict=True):
            names = [_text_cell(group.label), _text_cell(run.seed)]
            for step, seconds, value in zip(*curve, strict=True):
                writer.writerow([*names, int(step), round(float(seconds), 3), float(value)])
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


def _text_cell(text: str) -> str:
    """Mark a text that a spreadsheet would take for a formula, also one that begins with a full-width sign."""
    return f"'{text}" if unicodedata.normalize("NFKC", text).startswith(("=", "+", "-", "@")) else text


def _short(value: float, x: str) -> str:
    return compact(value) if x == "steps" else format_seconds(value)


def _is_good(metric: str) -> bool:
    """Return True if more of it is better."""
    return (
        not metric.startswith(LOSSES)
        and "error" not in metric
        and any(word in metric for word in ("return", "success", "reward", "score"))
    )


def _common(curves: Sequence[Curve], x: str) -> tuple[float, float]:
    """Return the first and the last position that all curves have; the first is above the last if there are none."""
    return max(curve.along(x)[0] for curve in curves), min(curve.along(x)[-1] for curve in curves)


def _group(label: str, runs: Sequence[Run], metric: str, x: str) -> Group:
    curves = [run.curves[metric] for run in runs]
    first, last = _common(curves, x)
    # The mean curve has a point at each evaluation of a seed, or a regular grid if these are many.
    grid = np.unique(np.concatenate([[first, last], *(curve.along(x) for curve in curves)]))
    grid = grid[(grid >= first) & (grid <= last)]
    if len(grid) > GRID:
        grid = np.linspace(first, last, GRID)
    heights = np.stack([np.interp(grid, curve.along(x), curve.value) for curve in curves])
    band = iqm_interval(heights) if len(runs) >= MIN_SEEDS and len(grid) else None
    return Group(label, runs, curves, grid, iqm(heights), band)


def _last(group: Group, x: str, end: float = math.inf) -> np.ndarray:
    """Return each seed's last value up to a position."""
    return np.array([curve.value[curve.along(x) <= end][-1] for curve in group.curves])


def _estimate(values: np.ndarray) -> str:
    """Format the interquartile mean over seeds, with its interval if there are enough seeds."""
    if len(values) < MIN_SEEDS:
        return f"{number(iqm(values))} ({seeds(len(values))})"
    low, high = iqm_interval(values)
    return f"{number(iqm(values))} [{number(low)}, {number(high)}]"


def _ends(curves: Sequence[Curve], axis: str) -> str:
    """Format where curves end, as a range if seeds differ."""
    ends = sorted(curve.along(axis)[-1] for curve in curves)
    return " to ".join(dict.fromkeys(_short(end, axis) for end in (ends[0], ends[-1])))


def _reach(curves: Sequence[Curve], axis: str, threshold: float) -> str:
    """Format the median position at which seeds reach the threshold; infinite for those that never do."""
    times = np.array([first_reached(curve.along(axis), curve.value, threshold) for curve in curves])
    median, count = float(np.median(times)), f"({np.isfinite(times).sum()} of {len(times)})"
    if math.isinf(median):
        return f"not reached {count}"
    # A seed that ended before the median without reaching the threshold might have reached it before the median.
    ended = any(curve.along(axis)[-1] < min(median, time) for curve, time in zip(curves, times, strict=True))
    return f"{'at most ' if ended else ''}{_short(median, axis)} {count}"


def _success(runs: Sequence[Run]) -> str | None:
    """Format the mean success rate of the last evaluations; None if a run has no successes counted there."""
    finals = []
    for run in runs:
        if not run.curves.keys() >= set(SUCCESS):
            return None
        rates, counts = (run.curves[name] for name in SUCCESS)
        count = counts.value[counts.step == rates.step[-1]]
        if not count.size or count[0] < 1 or not 0 <= rates.value[-1] <= 1:
            return None
        finals.append((rates.value[-1], count[0]))
    rates, episodes = np.array(finals).T
    if 1 < len(runs) < MIN_SEEDS:
        return f"{rates.mean():.0%} ({seeds(len(runs))})"
    low, high = success_interval(rates, episodes)
    alone = f" of this seed's {episodes[0]:,.0f} episodes alone" if len(runs) == 1 else ""
    return f"{rates.mean():.0%} [{low:.0%}, {high:.0%}]{alone}"


def _verdict(a: Group, b: Group, metric: str, x: str) -> str:
    """Say in one sentence which of two groups is better at equal budget."""
    start, end = _common([*a.curves, *b.curves], x)
    unit = "of training" if x == "time" else axis_of([*a.runs, *b.runs], x)
    if start > end:
        other = "time" if x == "steps" else "steps"
        first, last = _common([*a.curves, *b.curves], other)
        hint = f"; nearest: x={other}" if first <= last else ""
        ends = f"a run ends at {_short(end, x)} {unit}, and another begins at {_short(start, x)} {unit}"
        return f"No equal budget of {a.label} and {b.label}: {ends}{hint}"
    if probability_of_improvement(_last(a, x, end), _last(b, x, end)) < 0.5:
        a, b = b, a
    highs, lows = _last(a, x, end), _last(b, x, end)
    better, pair = "better" if _is_good(metric) else "higher", f"{a.label} and {b.label}"
    at = f"after {_short(end, x)} {unit}, {number(iqm(highs))} against {number(iqm(lows))}"
    text = f"P({a.label} > {b.label}) = {probability_of_improvement(highs, lows):.2f}"
    if min(len(highs), len(lows)) < MIN_SEEDS:
        counts = f"{len(highs)} and {len(lows)}, expected at least {MIN_SEEDS} each"
        return f"Not enough seeds to say which of {pair} is {better} {at}: {counts}; {text}, no interval"
    low, high = improvement_interval(highs, lows)
    chance = permutation_test(highs, lows)
    if low < high:  # an interval of width 0 would claim a certainty that a few seeds cannot give
        text += f" [{low:.2f}, {high:.2f}]"
    text += f", permutation test p = {chance:.2g}"
    if low <= 0.5:
        return f"No clear difference between {pair} {at}: {text}"
    if chance > 0.05:
        return f"{a.label} looks {better} than {b.label} {at}, but more seeds are needed to be sure: {text}"
    return f"{a.label} is {better} than {b.label} {at}: {text}"
