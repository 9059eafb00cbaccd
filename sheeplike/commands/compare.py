"""Compare finished runs: which agent is better, and how certain that is.

``python -m sheeplike compare <directory>… [key=value …]``
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from sheeplike.commands import Request
from sheeplike.config.errors import UnknownName, as_command_errors, expand, require_writable, validated
from sheeplike.files import find_unusual, write_atomically
from sheeplike.options import CommandError, InvalidOption, Options, explain_keys, keys_of
from sheeplike.terminal import echo, one_line

USAGE = """python -m sheeplike compare <directory> [<directory> ...] [key=value ...]

Compares all runs in and below the directories: runs of this program, and TensorBoard events of other tools.
Runs that differ only in their seed are one group. What cannot be compared is left out, with a line each.
"""
DIRECTORY = "compare"
EXAMPLE = "python -m sheeplike compare logs/franka_pick metric=eval/success_rate threshold=0.9"


class CompareOptions(Options):
    """Keys of this command."""

    x: Literal["steps", "time"] = Field("steps", description="x axis: steps, or training time without pauses")
    scale: Literal["linear", "log"] = Field("linear", description="scale of the figure's x axis")
    metric: str = Field("eval/return_mean", description="a metric of metrics.jsonl; of a list a,b each run's first")
    threshold: float | None = Field(None, description="also show when each agent reaches this value")
    reference: str | None = Field(
        None, description="published curve to draw behind the runs: a file, or <file>#<task> if it holds several"
    )
    reference_label: str | None = Field(None, description="what it shows: size, ratio, date; null: the file's name")
    reference_frames: int = Field(1, ge=1, le=1000, strict=False, description="its steps for each policy step")
    out: str | None = Field(None, description="directory for the files; null: <first directory>/compare")


def main(request: Request) -> None:
    """Read the runs, compare them, write ``<metric>_by_<x>`` as .png, .svg, .csv and .md, and print the table."""
    if request.help:
        echo(USAGE, explain_keys(keys_of(CompareOptions)), "", f"for example: {EXAMPLE}")
        return
    if request.config_dirs:
        raise CommandError("--config-dir: expected only directories of runs, which hold their whole configuration")
    places, asked = _parse(request.arguments)
    x, metrics, threshold = asked.x, asked.metric.strip("[]").split(","), asked.threshold
    if threshold is not None and metrics[0].endswith("_rate") and not 0 <= threshold <= 1:
        close = min(max(threshold / 100 if threshold > 1 else threshold, 0), 1)
        raise InvalidOption("threshold", threshold, f"a number from 0 to 1, since {metrics[0]} is a rate", f"{close:g}")
    out = expand(asked.out) if asked.out else places[0] / DIRECTORY
    if not asked.out and (found := find_unusual(places[0], DIRECTORY)):  # a link could lead elsewhere
        raise CommandError(f"{found}: expected files and directories alone; nearest: out=<a directory of your own>")

    # Help and errors of the command line need no NumPy, errors of runs neither SciPy nor Matplotlib: each takes long.
    from sheeplike.analysis.runs import group_runs, read_runs

    runs, notes = read_runs(places, metrics)
    groups, doubles = group_runs(runs, metrics[0])

    from sheeplike.analysis.comparison import axis_of, compare, to_csv, to_markdown
    from sheeplike.analysis.figure import draw, encode, read_reference

    published = None
    if asked.reference:
        if x == "time":
            raise InvalidOption("x", x, "steps, since a reference has no time", "steps")
        published = read_reference(asked.reference, asked.reference_label, asked.reference_frames)
    comparison = compare(groups, metric=metrics[0], x=x, threshold=threshold, notes=notes + doubles)
    if asked.scale == "log" and max(run.curves[metrics[0]].along(x)[-1] for run in runs) <= 0:
        raise InvalidOption("scale", "log", f"linear, since no {axis_of(runs, x)} are above 0", "linear")
    task = comparison.env or one_line(places[0].resolve().name)
    title, name = f"{task}: {metrics[0]} by {axis_of(runs, x)}", re.sub(r"[^\w.-]+", "_", metrics[0]) + f"_by_{x}"
    table, figure = to_markdown(comparison), draw(comparison, task, log=asked.scale == "log", reference=published)
    files = {
        out / f"{name}.png": encode(figure, "png"),
        out / f"{name}.svg": encode(figure, "svg"),
        out / f"{name}.csv": to_csv(comparison).encode(),
        out / f"{name}.md": f"# {title}\n\n![{title}]({name}.png)\n\n{table}".encode(),
    }
    require_writable("out", out, *(path.name for path in files))
    with as_command_errors(OSError):
        out.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            write_atomically(path, content)
    echo(f"{title}\n\n{table}", *files)


def _parse(arguments: Sequence[str]) -> tuple[list[Path], CompareOptions]:
    """Return directories and options; ``a/b=c`` is a directory."""
    places: list[Path] = []
    given: dict[str, str | None] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or "/" in key:
            places.append(expand(argument))
        elif key not in CompareOptions.model_fields:
            raise UnknownName("key", key, CompareOptions.model_fields)
        elif not value:
            raise CommandError(f"{key}=: expected {CompareOptions.model_fields[key].description}")
        else:
            given[key] = None if value == "null" else value
    if not places:
        raise CommandError(f"compare: expected one or more directories of runs, for example: {EXAMPLE}")
    return places, validated(CompareOptions, given)
