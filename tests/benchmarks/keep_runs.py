"""Keep the part of runs that a figure of the pages rests on: configurations and returns.

``python tests/benchmarks/keep_runs.py logs/cartpole_balance howto/runs/cartpole_balance`` copies every run below the
first directory to the second one; ``compare`` reads the copies as it reads the runs.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from sheeplike.analysis.runs import CONFIG_FILE, METRICS_FILE, find_runs

KEPT = ("step", "gradient_steps", "seconds")
RETURNS = {"eval/return_mean", "rollout/return_mean"}
KINDS = ("eval/", "held_out/", "rollout/return")


def keep(run: Path, place: Path) -> None:
    """Copy the configuration of ``run``, and its rows of returns without other metrics, to ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run / CONFIG_FILE, place / CONFIG_FILE)
    with (run / METRICS_FILE).open() as rows, (place / METRICS_FILE).open("w") as kept:
        for row in map(json.loads, rows):
            if RETURNS & row.keys():
                chosen = {name: value for name, value in row.items() if name in KEPT or name.startswith(KINDS)}
                kept.write(json.dumps(chosen) + "\n")


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    for run in find_runs([source]):
        keep(run, target / run.relative_to(source))
