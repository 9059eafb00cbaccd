"""``python -m sheeplike compare <directory>… [key=value …]``: which agent is better, and how sure that is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sheeplike.commands.errors import CommandError, InvalidValue, as_command_errors, nearest, unknown

if TYPE_CHECKING:
    from sheeplike.monitor.runs import Run

KEYS = {
    "x": "steps (policy steps, the default) or time (wall-clock)",
    "scale": "linear (the default) or log: of the picture's x axis",
    "metric": "a metric of metrics.jsonl, eval/return_mean by default; of a list a,b each run's first",
    "threshold": "also say when each agent reaches this value",
    "out": "where the files go, <first directory>/compare by default",
}
EXAMPLE = "python -m sheeplike compare logs/franka_pick metric=eval/success_rate threshold=0.9"


def main(arguments: list[str]) -> None:
    """Read the runs, compare them, write ``<metric>_by_<x>`` as .png, .svg, .csv and .md, and print the table.

    Raises:
        CommandError: the request cannot be met; nothing was written.
    """
    if {"--help", "-h"} & set(arguments):
        print(usage())
        return
    places, settings = _parse(arguments)
    x = settings.get("x", "steps")
    if x not in ("steps", "time"):
        raise InvalidValue("x", x, "steps or time", nearest(x, ("steps", "time")))
    scale = settings.get("scale", "linear")
    if scale not in ("linear", "log"):
        raise InvalidValue("scale", scale, "linear or log", nearest(scale, ("linear", "log")))
    metric, *others = settings.get("metric", "eval/return_mean").strip("[]").split(",")
    threshold = _threshold(settings["threshold"], metric) if "threshold" in settings else None
    out = Path(settings.get("out") or places[0] / "compare").expanduser()

    # NumPy and Matplotlib, which help and mistakes on the command line do without.
    from sheeplike.monitor.comparison import AXES, SUCCESS, compare, to_csv, to_markdown
    from sheeplike.monitor.figure import draw, encode
    from sheeplike.monitor.runs import RunError, find_runs, group_runs, read_run

    with as_command_errors(RunError):
        runs, notes = _without_dry_runs([read_run(path, {metric, *others, *SUCCESS}) for path in find_runs(places)])
        _check_task(runs)
        runs = [_stand_in(run, metric, others, notes) for run in runs]
        for run in runs:
            _check_metric(run, metric, runs)
        comparison = compare(group_runs(runs), metric=metric, x=x, threshold=threshold, notes=notes)
    task = comparison.env or places[0].resolve().name
    title, name = f"{task}: {metric} by {AXES[x]}", re.sub(r"[^\w.-]+", "_", metric) + f"_by_{x}"
    table, figure = to_markdown(comparison), draw(comparison, task, log=scale == "log")
    files = {
        f"{name}.png": encode(figure, "png"),
        f"{name}.svg": encode(figure, "svg"),
        f"{name}.csv": to_csv(comparison).encode(),
        f"{name}.md": f"# {title}\n\n![{title}]({name}.png)\n\n{table}".encode(),
    }
    _write(out, files)
    print(f"{title}\n\n{table}")
    print("\n".join(str(out / file) for file in files))


def usage() -> str:
    """The text of ``python -m sheeplike compare --help``."""
    lines = [
        "python -m sheeplike compare <directory> [<directory> ...] [key=value ...]",
        "",
        "Compares all runs in and below the directories, those of train and other tools' TensorBoard events.",
        "Runs that differ in nothing but their seed are one group.",
        "",
        *(f"  {key:<12} {text}" for key, text in KEYS.items()),
        "",
        f"for example: {EXAMPLE}",
    ]
    return "\n".join(lines)


def _parse(arguments: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """Directories and settings; ``a/b=c`` is a directory."""
    places: list[Path] = []
    settings: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument.startswith("-"):
            raise unknown("flag", key, ["--help"])
        if not equals or "/" in key:
            places.append(Path(argument).expanduser())
        elif key not in KEYS:
            raise unknown("key", key, KEYS)
        elif not value:
            raise CommandError(f"{key}=: expected {KEYS[key]}")
        else:
            settings[key] = value
    if not places:
        raise CommandError(f"compare: expected one or more directories of runs, for example: {EXAMPLE}")
    for place in places:
        if not place.exists():
            beside = [str(entry) for entry in place.parent.iterdir()] if place.parent.is_dir() else []
            match = nearest(str(place), beside)
            hint = f"; nearest: {match}" if match else ""
            raise CommandError(f"{place} does not exist: expected a directory of runs{hint}")
    return places, settings


def _threshold(text: str, metric: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidValue("threshold", text, "a number")
    if metric.endswith("_rate") and not 0 <= value <= 1:
        close = value / 100 if 1 < value <= 100 else min(max(value, 0.0), 1.0)
        raise InvalidValue("threshold", text, f"a number from 0 to 1, since {metric} is a rate", f"{close:g}")
    return value


def _without_dry_runs(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """The runs that count, and a note on those that do not."""
    real = [run for run in runs if not run.dry_run]
    left_out = len(runs) - len(real)
    if not real:
        raise CommandError(
            f"{runs[0].path}: expected runs, and {'this is a dry run' if left_out == 1 else 'all of them are dry runs'}"
            ": that shows whether everything works, not what an agent learns"
        )
    return real, [f"{left_out} dry run{'s' * (left_out > 1)} left out."] if left_out else []


def _check_task(runs: Sequence[Run]) -> None:
    tasks: Mapping[str, Run] = {run.env: run for run in reversed(runs) if run.env}
    if len(tasks) > 1:
        found = " and ".join(f"{task} ({tasks[task].path})" for task in sorted(tasks))
        raise CommandError(f"expected runs of one task, and found {found}; nearest: the directory of one of them")


def _stand_in(run: Run, metric: str, others: Sequence[str], notes: list[str]) -> Run:
    """The run with the first of the other metrics under the name of ``metric``, if that is the one it lacks."""
    found = next((name for name in (metric, *others) if name in run.curves), metric)
    if found == metric:
        return run
    notes.append(f"{run.path}: {found} stands for {metric}, and its steps for policy steps.")
    return replace(run, curves={**run.curves, metric: run.curves[found]})


def _check_metric(run: Run, metric: str, runs: Sequence[Run]) -> None:
    if metric in run.curves:
        return
    others = run.metrics - {metric}
    match = nearest(metric, sorted(others))
    if match:
        hint = f"nearest: metric={match}"
    else:
        hint = f"there are {', '.join(sorted(others))}" if others else "there are no rows at all yet"
    if any(metric in other.curves for other in runs):
        hint += "; other runs have it: wait for this one, or leave it out"
    found = "none of them is finite" if metric in run.metrics else "there are none"
    raise CommandError(f"{run.path}: expected values of metric={metric}, and {found}; {hint}")


def _write(out: Path, files: Mapping[str, bytes]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out / name).write_bytes(content)
    except OSError as error:
        raise CommandError(f"out={out}: expected a directory that can be written; {error.strerror}") from None
