"""How speed and memory grow with worlds, batch and size.

Each row is this very command with one key changed, in a process of its own: peaks of memory are then its own, and a
size that does not fit costs only its own row.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sheeplike.commands.benchmark.common import Bench
from sheeplike.commands.benchmark.measure import LEAST_ROUNDS, Quantity
from sheeplike.commands.benchmark.tables import Cell, Table
from sheeplike.commands.benchmark.updates import MODES
from sheeplike.commands.kinds import kind_of
from sheeplike.commands.kinds.kind import around
from sheeplike.commands.schema import Config
from sheeplike.commands.sources import Sources
from sheeplike.monitor.progress import phase

PATIENCE = 600  # seconds after which a row is given up


class Row(NamedTuple):
    """One key changed, and the part of ``bench`` that shows what follows from it."""

    change: str
    part: str


def rows(config: Config, sources: Sources) -> list[Row]:
    """Worlds, batch and size: as configured, and somewhat smaller and larger."""
    changes = kind_of(config.agent).benchmark(config, sources.choices("agent/size")).growth
    found = [Row(f"env.num_envs={count}", "worlds") for count in around(config.env.num_envs, 4)]
    return found + [Row(change, "update") for change in changes]


def growth(bench: Bench, sources: Sources, command: Sequence[str]) -> Table:
    """One row for each change.

    Args:
        command: the overrides of the configuration, and ``--config-dir``.
    """
    bench.forget_agent()
    cuda = bench.device.type == "cuda"
    memory = ["torch, allocated", "JAX", "Warp", "process, resident set"] if cuda else ["process, resident set"]
    headings = [f"{name.partition(',')[0]}, MiB" for name in memory]
    table = Table("growth", "Growth", ["steps/s of the vector env", "ms per update", *headings])
    mode = update_mode(bench.config)
    table.notes.append(f"Each row in a process of its own, whose peak of memory it has. Updates are {MODES[mode]}.")
    for change, part in rows(bench.config, sources):
        own = [f"parts=[{part}]", f"modes=[{mode}]", f"rounds={LEAST_ROUNDS}", f"seconds={bench.seconds / 2:g}"]
        key = change.partition("=")[0]
        kept = [word for word in command if word.partition("=")[0].lstrip("+") != key]
        with phase(f"growth: {change}"):
            tables, problem = _bench([*kept, change, *own])
        if problem:
            table.rows[change] = ["-"] * len(table.columns)
            table.notes.append(f"{change}: {problem}.")
            continue
        table.rows[change] = [
            _cell(tables, "steps", "+ vector env", "steps/s"),
            _cell(tables, "update", MODES[mode], "ms"),
            *(_cell(tables, "memory", name, "MiB") for name in memory),
        ]
    return table


def update_mode(config: Config) -> str:
    """How updates are made in the rows: as in the run, but eager on a CPU, where compiling would take the longest."""
    if config.fabric.accelerator == "cpu":
        return "off"
    return "graph" if config.compile == "auto" else config.compile


def _bench(arguments: list[str]) -> tuple[dict[str, Any], str]:
    """The tables of ``bench`` in another process, or why there are none."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "sheeplike", "bench", *arguments, f"out={out}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        except subprocess.TimeoutExpired:
            return {}, f"given up after {PATIENCE} s"
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return {}, (lines[-1] if lines else f"status {done.returncode}").removeprefix("sheeplike: ")
        return json.loads((Path(out) / "bench.json").read_text())["tables"], ""


def _cell(tables: dict[str, Any], table: str, row: str, column: str) -> Cell:
    """A quantity that another process found, or the text that it has in its place."""
    cell = tables.get(table, {}).get("rows", {}).get(row, {}).get(column, "")
    return cell if isinstance(cell, str) else Quantity(cell["unit"], tuple(cell["samples"]))
