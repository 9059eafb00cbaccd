"""Read finished runs: which agent is better, and how sure that is.

``python -m sheeplike compare <directory>… [key=value …]``
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from sheeplike.commands import Request
from sheeplike.config.errors import CommandError, InvalidValue, as_command_errors, nearest, unknown

CHOICES = {"x": ("steps", "time"), "scale": ("linear", "log")}
KEYS = {
    "x": "steps (policy steps, the default) or time (wall-clock)",
    "scale": "linear (the default) or log: of the picture's x axis",
    "metric": "a metric of metrics.jsonl, eval/return_mean by default; of a list a,b each run's first",
    "threshold": "also say when each agent reaches this value",
    "out": "where the files go, <first directory>/compare by default",
}
EXAMPLE = "python -m sheeplike compare logs/franka_pick metric=eval/success_rate threshold=0.9"
USAGE = """python -m sheeplike compare <directory> [<directory> ...] [key=value ...]

Compares all runs in and below the directories, those of train and other tools' TensorBoard events.
Runs that differ in nothing but their seed are one group.
"""


def main(request: Request) -> None:
    """Read the runs, compare them, write ``<metric>_by_<x>`` as .png, .svg, .csv and .md, and print the table.

    Raises:
        CommandError: the request cannot be met; nothing was written.
    """
    if request.help:
        print("\n".join([USAGE, *(f"  {key:<12} {text}" for key, text in KEYS.items()), "", f"for example: {EXAMPLE}"]))
        return
    places, settings = _parse(request.arguments)
    x, metrics = settings["x"], settings["metric"].strip("[]").split(",")
    threshold = _threshold(settings["threshold"], metrics[0]) if "threshold" in settings else None
    out = Path(settings.get("out") or places[0] / "compare").expanduser()

    # Help and mistakes on the command line do without NumPy, unreadable runs without SciPy and Matplotlib.
    from sheeplike.analysis.runs import RunError, group_runs, read_runs

    with as_command_errors(RunError):
        runs, notes = read_runs(places, metrics)
        groups = group_runs(runs)

    from sheeplike.analysis.comparison import AXES, compare, to_csv, to_markdown
    from sheeplike.analysis.figure import draw, encode

    with as_command_errors(RunError):
        comparison = compare(groups, metric=metrics[0], x=x, threshold=threshold, notes=notes)
    task = comparison.env or places[0].resolve().name
    title, name = f"{task}: {metrics[0]} by {AXES[x]}", re.sub(r"[^\w.-]+", "_", metrics[0]) + f"_by_{x}"
    table, figure = to_markdown(comparison), draw(comparison, task, log=settings["scale"] == "log")
    files = {
        out / f"{name}.png": encode(figure, "png"),
        out / f"{name}.svg": encode(figure, "svg"),
        out / f"{name}.csv": to_csv(comparison).encode(),
        out / f"{name}.md": f"# {title}\n\n![{title}]({name}.png)\n\n{table}".encode(),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            path.write_bytes(content)
    except OSError as error:
        raise CommandError(f"out={out}: expected a directory that can be written; {error.strerror}") from None
    print(f"{title}\n\n{table}", *files, sep="\n")


def _parse(arguments: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """Directories and settings; ``a/b=c`` is a directory."""
    places: list[Path] = []
    settings = {"x": "steps", "scale": "linear", "metric": "eval/return_mean"}
    for argument in arguments:
        key, equals, value = argument.partition("=")
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
    for key, choices in CHOICES.items():
        if settings[key] not in choices:
            raise InvalidValue(key, settings[key], " or ".join(choices), nearest(settings[key], choices))
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
