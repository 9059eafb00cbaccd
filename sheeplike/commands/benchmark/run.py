"""Measures what was asked for, part by part, and saves after each of them."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sheeplike.commands.benchmark.breakdown import breakdown
from sheeplike.commands.benchmark.common import Bench
from sheeplike.commands.benchmark.facts import facts
from sheeplike.commands.benchmark.growth import growth
from sheeplike.commands.benchmark.layers import acting, acting_table, learning, order, simulation, steps_table
from sheeplike.commands.benchmark.memory import memory
from sheeplike.commands.benchmark.tables import Report, Table
from sheeplike.commands.benchmark.updates import possible_modes, updates
from sheeplike.commands.errors import as_command_errors
from sheeplike.commands.schema import Config
from sheeplike.commands.sources import Sources
from sheeplike.commands.training import launch
from sheeplike.monitor.progress import format_seconds

if TYPE_CHECKING:
    from sheeplike.commands.bench import Settings


def run(config: Config, asked: Settings, sources: Sources, arguments: Sequence[str], rest: Sequence[str]) -> None:
    """Measure, print and save.

    Args:
        asked: ``out`` is filled in.
        arguments: the whole command line behind ``bench``.
        rest: those of it that are not settings of ``bench``.

    Raises:
        CommandError: the worlds or the agent cannot be built, or nothing can be saved.
    """
    begun = time.monotonic()
    out = Path(asked.out)
    failures = (ValueError, TypeError, MemoryError, torch.OutOfMemoryError)
    with as_command_errors(*failures, OSError):
        out.mkdir(parents=True, exist_ok=True)
        fabric = launch(config)
        torch.manual_seed(config.seed)
        bench = Bench(config, fabric, asked.seconds, asked.rounds)
        bench.worlds  # noqa: B018, built here, where a failure is the configuration's
    title = f"Benchmark: {config.env.name}, {config.agent.name}"
    settings = {"bench": asdict(asked), "config": asdict(config)}
    report = Report(
        title, facts(shlex.join(["python", "-m", "sheeplike", "bench", *arguments]), bench.device), settings
    )
    steps, players = steps_table(), acting_table()

    def measure(parts: Sequence[str]) -> list[Table]:
        """The tables that there are after these parts."""
        match parts[0]:
            case "learning":
                learning(bench, steps)
            case "worlds" | "physics":
                simulation(bench, parts, steps)
            case "acting":
                acting(bench, steps, players)
            case "update":
                return [updates(bench, asked.modes or tuple(possible_modes(bench.device)))]
            case "breakdown":
                return [breakdown(bench)]
            case "growth":
                return [growth(config, sources, rest, seconds=asked.seconds)]
        order(steps)
        return [steps] if parts[0] != "acting" else [steps, players]

    # The run as a whole comes first: what it takes of the memory, nothing else has taken before.
    turns = [["learning"], [part for part in ("physics", "worlds") if part in asked.parts]]
    turns += [["acting"], ["update"], ["breakdown"], ["growth"]]
    turns = [turn for turn in turns if turn and turn[0] in asked.parts]
    for number, turn in enumerate(turns, 1):
        print(f"{number} of {len(turns)}: {' and '.join(turn)}", flush=True)
        if turn[0] in ("update", "breakdown", "growth"):
            bench.forget_agent()
        with as_command_errors(*failures):
            found = measure(turn)
        report.tables += [table for table in found if table not in report.tables]
        if number == 1:
            report.tables.append(memory(bench, " and ".join(turn)))
        report.facts["took"] = format_seconds(time.monotonic() - begun)
        with as_command_errors(OSError):
            save(out, report)
    bench.worlds.close()
    print(f"\n{report.to_text()}")
    print(f"saved: {out / 'bench.md'} and {out / 'bench.json'}")


def save(out: Path, report: Report) -> None:
    """Both files, each of them whole at any time."""
    files = {
        "bench.json": json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n",
        "bench.md": report.to_markdown(),
    }
    for name, content in files.items():
        fresh = out / f".{name}.{os.getpid()}"
        fresh.write_text(content, encoding="utf-8")
        fresh.replace(out / name)
