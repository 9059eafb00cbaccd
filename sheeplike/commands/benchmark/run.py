"""Measures what was asked for, part by part, and saves after each of them."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sheeplike.commands.benchmark.breakdown import breakdown
from sheeplike.commands.benchmark.checkpoints import checkpoints
from sheeplike.commands.benchmark.common import Bench
from sheeplike.commands.benchmark.facts import facts
from sheeplike.commands.benchmark.growth import growth
from sheeplike.commands.benchmark.layers import acting, learning, simulation, steps_table
from sheeplike.commands.benchmark.memory import memory
from sheeplike.commands.benchmark.tables import Report, Table
from sheeplike.commands.benchmark.updates import MODES, updates
from sheeplike.commands.benchmark.variation import variation
from sheeplike.commands.building import launch
from sheeplike.commands.errors import as_command_errors
from sheeplike.commands.schema import Config
from sheeplike.commands.sources import Sources
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
    fabric = launch(config)
    torch.manual_seed(config.seed)
    bench = Bench(config, fabric, asked.seconds, asked.rounds)
    command = shlex.join(["python", "-m", "sheeplike", "bench", *arguments])
    settings = {"bench": asdict(asked), "config": asdict(config)}
    report = Report(f"Benchmark: {config.env.name}, {config.agent.name}", facts(command, fabric.device), settings)
    steps = steps_table()
    # The run as a whole comes first: of what it takes of the memory, nothing else has taken any before.
    plan: dict[tuple[str, ...], Callable[[Sequence[str]], list[Table]]] = {
        ("learning",): lambda parts: [learning(bench, steps)],
        ("physics", "worlds"): lambda parts: [simulation(bench, parts, steps)],
        ("variation",): lambda parts: [variation(bench)],
        ("acting",): lambda parts: acting(bench, steps),
        ("update",): lambda parts: [updates(bench, asked.modes or tuple(MODES))],
        ("breakdown",): lambda parts: [breakdown(bench)],
        ("checkpoint",): lambda parts: [checkpoints(bench, Path(asked.out))],
        ("growth",): lambda parts: [growth(bench, sources, rest)],
    }
    turns = [([part for part in parts if part in asked.parts], measure) for parts, measure in plan.items()]
    turns = [(parts, measure) for parts, measure in turns if parts]
    for number, (parts, measure) in enumerate(turns, 1):
        name = " and ".join(parts)
        print(f"{number} of {len(turns)}: {name}", flush=True)
        with as_command_errors(torch.OutOfMemoryError, OSError):
            report.add(measure(parts))
        if number == 1:
            report.add([memory(bench, name)])
        report.facts["took"] = format_seconds(time.monotonic() - begun)
        with as_command_errors(OSError):
            save(Path(asked.out), report)
    bench.worlds.close()
    print(f"\n{report.to_text()}")
    print(f"saved: {asked.out}/bench.md and bench.json")


def save(out: Path, report: Report) -> None:
    """Both files, each of them whole at any time."""
    out.mkdir(parents=True, exist_ok=True)
    files = {
        "bench.json": json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n",
        "bench.md": report.to_markdown(),
    }
    for name, content in files.items():
        fresh = out / f".{name}.{os.getpid()}"
        fresh.write_text(content, encoding="utf-8")
        fresh.replace(out / name)
