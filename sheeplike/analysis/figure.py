"""Figure of a comparison, without a display and without Matplotlib's global state; published curves behind it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from sheeplike.analysis.comparison import Comparison, axis_of, compact, number, seeds
from sheeplike.data.reading import expecting
from sheeplike.options import CommandError, nearest

# Colours that remain distinct in all common kinds of colour blindness: Okabe and Ito, in the order of Wong,
# Nature Methods 8, 441 (2011), the dark ones first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))  # groups beyond the number of colours differ in their dashes
Points = tuple[np.ndarray, np.ndarray]  # steps and values of a published curve, in order of the steps
NAMES = {"eval/return_mean": "return (eval/return_mean)", "eval/success_rate": "success rate (eval/success_rate)"}


class Reference(NamedTuple):
    """Mean and standard deviation over the seeds of a published curve, ``(P,)`` each."""

    label: str
    step: np.ndarray  # policy steps
    mean: np.ndarray
    spread: np.ndarray


def draw(comparison: Comparison, title: str, *, log: bool = False, reference: Reference | None = None) -> Figure:
    """Draw thin lines for seeds, a thick one for their interquartile mean, a band for its 95 % interval.

    A reference is grey, with a band of one standard deviation, as far as the runs reach. Long labels are wrapped.
    """
    labels = [f"{group.label} ({seeds(len(group.runs))})" for group in comparison.groups]
    labels += [] if reference is None else [reference.label]
    labels = [textwrap.fill(label.replace(" seed", "\u00a0seed"), 85).replace("\u00a0", " ") for label in labels]
    lines = "\n".join(labels).split("\n")
    columns = max(1, min(len(labels), 105 // (max(map(len, lines)) + 8)))
    figure = Figure(figsize=(7.5, 4.6 + 0.22 * max(len(lines) / columns - 4, 0)), layout="constrained")
    axes = figure.add_subplot()
    unit = 60.0 if comparison.x == "time" else 1.0
    for index, group in enumerate(comparison.groups):
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index // len(COLOURS) % len(DASHES)]}
        for curve in group.curves:
            marker = "." if len(curve.step) == 1 else None  # a curve of one point has no line
            axes.plot(curve.along(comparison.x) / unit, curve.value, linewidth=0.8, alpha=0.4, marker=marker, **style)
        if group.band is not None:
            axes.fill_between(group.x / unit, *group.band, color=style["color"], alpha=0.18, linewidth=0)
        marker = "o" if len(group.x) == 1 else None
        axes.plot(group.x / unit, group.mean, label=plain(labels[index]), linewidth=2.2, marker=marker, **style)
    if reference is not None:
        furthest = max(curve.along(comparison.x)[-1] for group in comparison.groups for curve in group.curves)
        shown = reference.step <= furthest
        low, high = reference.mean - reference.spread, reference.mean + reference.spread
        axes.fill_between(reference.step[shown], low[shown], high[shown], color="0.5", alpha=0.25, linewidth=0)
        style = {"color": "0.4", "linewidth": 1.6, "zorder": 1}
        axes.plot(reference.step[shown], reference.mean[shown], label=plain(labels[-1]), **style)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if comparison.threshold is not None:
        label = f"threshold {number(comparison.threshold)}"
        axes.axhline(comparison.threshold, color="0.3", linewidth=1, linestyle=(0, (5, 3)), label=label)
    curves = [curve for group in comparison.groups for curve in group.curves]
    if comparison.budget and any(curve.along(comparison.x)[-1] > comparison.budget[1] for curve in curves):
        axes.axvline(comparison.budget[1] / unit, color="0.3", linewidth=0.8, linestyle=":", label="equal budget")
    runs = [run for group in comparison.groups for run in group.runs]
    axes.set_xlabel("minutes of training" if comparison.x == "time" else axis_of(runs, "steps"), fontsize=11)
    axes.set_ylabel(plain(NAMES.get(comparison.metric, comparison.metric)), fontsize=11)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    if not log:
        axes.set_xlim(left=0)
    axes.tick_params(labelsize=10)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(plain(title), fontsize=13, loc="left", fontweight="bold")
    # The interquartile mean of fewer than four seeds is their mean.
    mean = "mean" if all(len(group.runs) < 4 for group in comparison.groups) else "interquartile mean"
    band = " · band: 95 % interval" if any(group.band is not None for group in comparison.groups) else ""
    axes.set_title(f"thin: seeds · thick: {mean}{band}", fontsize=8.5, loc="right", color="0.35")
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=10)
    return figure


def encode(figure: Figure, kind: str) -> bytes:
    """Encode a figure as ``"png"`` or ``"svg"``; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    # Names inside an SVG come from this salt, or else from chance; the date would differ as well.
    with matplotlib.rc_context({"svg.hashsalt": "sheeplike"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font lacks are drawn as boxes
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def plain(text: str) -> str:
    """Escape signs that would begin a formula, and a first ``_``, which would hide a label from the legend."""
    return f" {text}".replace("$", "\\$") if text.startswith("_") else text.replace("$", "\\$")


def read_reference(place: str, label: str | None, frames: int) -> Reference:
    """Read ``<file>`` or ``<file>#<task>``.

    A file holds a list of ``{task, method, seed, xs, ys}``, as ``danijar/dreamerv3`` publishes its scores (``.json`` or
    ``.json.gz``), or the columns ``step``, ``value`` and, if there are several, ``seed`` (``.csv``).

    Args:
        label: text of the legend; None: the file's name and the number of seeds.
        frames: steps of the file for each policy step, such as an action repeat.

    Raises:
        CommandError: the file cannot be read, or holds several tasks.
    """
    name, _, task = place.partition("#")
    with expecting(f"reference={place}", "a list of {task, method, seed, xs, ys}, or columns step,value,seed as .csv"):
        content = Path(name).read_bytes()
        if name.endswith(".gz"):
            content = gzip.decompress(content)
        curves = _of_csv(content) if ".csv" in name else _of_json(content, task)
        begin, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
        grid = np.unique(np.concatenate([x for x, _ in curves]))
        grid = grid[(grid >= begin) & (grid <= end)]
        values = np.stack([np.interp(grid, x, y) for x, y in curves])
    label = label or f"{Path(name).name}{f' {task}' if task else ''} ({len(curves)} seeds)"
    return Reference(label, grid / frames, values.mean(0), values.std(0))


def _of_json(content: bytes, task: str) -> list[Points]:
    runs: list[dict[str, Any]] = json.loads(content)
    tasks = sorted({run["task"] for run in runs})
    chosen = task or (tasks[0] if len(tasks) == 1 else "")
    if chosen not in tasks:
        near = nearest(chosen, tasks) or tasks[0]
        raise CommandError(f"reference=<file>#<task>: expected one of {', '.join(tasks)}; nearest: #{near}")
    return [_curve(zip(run["xs"], run["ys"], strict=True)) for run in runs if run["task"] == chosen]


def _of_csv(content: bytes) -> list[Points]:
    rows: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for row in csv.DictReader(content.decode("utf-8-sig").splitlines(), skipinitialspace=True):
        rows[row.get("seed") or "0"].append((row["step"], row["value"]))
    return [_curve(points) for points in rows.values()]


def _curve(points: Iterable[tuple[Any, Any]]) -> Points:
    values = np.array(list(points), np.float64)
    values = values[np.isfinite(values).all(1)]
    return tuple(values[np.argsort(values[:, 0], kind="stable")].T)
