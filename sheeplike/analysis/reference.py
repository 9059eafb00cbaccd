"""Published curves that are drawn behind those of a comparison."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sheeplike.files import open_regular
from sheeplike.options import CommandError, nearest

BYTES = 2**28  # limit of a file, unpacked


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
    try:
        with open_regular(Path(name)) as file:
            content = file.read(BYTES + 1)
        if name.endswith(".gz"):
            with gzip.open(io.BytesIO(content)) as unpacked:
                content = unpacked.read(BYTES + 1)
        if len(content) > BYTES:
            raise ValueError(f"more than {BYTES:,} bytes")
        curves = _of_csv(content) if ".csv" in name else _of_json(content, task)
    except CommandError as error:
        raise CommandError(f"reference={place}: {error}") from None
    except (OSError, ValueError, LookupError, TypeError, EOFError) as error:
        expected = "a list of {task, method, seed, xs, ys} as .json or .json.gz, or columns step,value,seed as .csv"
        raise CommandError(f"reference={place}: expected {expected}; {type(error).__name__}: {error}") from None
    ends = [min(x[-1] for x, _ in curves), max(x[0] for x, _ in curves)]
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    grid = grid[(grid >= ends[1]) & (grid <= ends[0])]
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    label = label or f"{Path(name).name}{f' {task}' if task else ''} ({len(curves)} seeds)"
    return Reference(label, grid / frames, values.mean(0), values.std(0))


def _of_json(content: bytes, task: str) -> list[tuple[np.ndarray, np.ndarray]]:
    runs: list[dict[str, Any]] = json.loads(content)
    tasks = sorted({run["task"] for run in runs})
    chosen = task or (tasks[0] if len(tasks) == 1 else "")
    if chosen not in tasks:
        near = nearest(chosen, tasks) or tasks[0]
        raise CommandError(f"expected <file>#<task> with one of {', '.join(tasks)}; nearest: #{near}")
    return [_curve(run["xs"], run["ys"]) for run in runs if run["task"] == chosen]


def _of_csv(content: bytes) -> list[tuple[np.ndarray, np.ndarray]]:
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in csv.DictReader(io.StringIO(content.decode())):
        rows[row.get("seed") or "0"].append((float(row["step"]), float(row["value"])))
    return [_curve(*zip(*points, strict=True)) for points in rows.values()]


def _curve(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    steps, values = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if steps.ndim != 1 or steps.shape != values.shape or not len(steps):
        raise ValueError("a curve without as many steps as values")
    known = np.isfinite(steps) & np.isfinite(values)
    order = np.argsort(steps[known], kind="stable")
    return steps[known][order], values[known][order]
