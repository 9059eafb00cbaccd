"""Published curves that are drawn behind those of a comparison."""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sheeplike.data.reading import expecting
from sheeplike.options import CommandError, nearest

Curve = tuple[np.ndarray, np.ndarray]  # steps and values, in order of the steps


class Reference(NamedTuple):
    """Mean and standard deviation over the seeds of a published curve, ``(P,)`` each."""

    label: str
    step: np.ndarray  # policy steps
    mean: np.ndarray
    spread: np.ndarray


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


def _of_json(content: bytes, task: str) -> list[Curve]:
    runs: list[dict[str, Any]] = json.loads(content)
    tasks = sorted({run["task"] for run in runs})
    chosen = task or (tasks[0] if len(tasks) == 1 else "")
    if chosen not in tasks:
        near = nearest(chosen, tasks) or tasks[0]
        raise CommandError(f"reference=<file>#<task>: expected one of {', '.join(tasks)}; nearest: #{near}")
    return [_curve(zip(run["xs"], run["ys"], strict=True)) for run in runs if run["task"] == chosen]


def _of_csv(content: bytes) -> list[Curve]:
    rows: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for row in csv.DictReader(content.decode().splitlines()):
        rows[row.get("seed") or "0"].append((row["step"], row["value"]))
    return [_curve(points) for points in rows.values()]


def _curve(points: Iterable[tuple[Any, Any]]) -> Curve:
    values = np.array(list(points), np.float64)
    values = values[np.isfinite(values).all(1)]
    return tuple(values[np.argsort(values[:, 0], kind="stable")].T)
