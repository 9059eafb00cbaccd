"""Measure how fast simulation, acting and learning are on this machine.

``python -m sheeplike bench env=… agent=… [key=value …]`` measures the run that the same keys would train.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from pydantic import Field

from sheeplike import envs
from sheeplike.commands import Request
from sheeplike.config.compose import Composed, explain, load, load_options
from sheeplike.config.errors import UnknownKey, as_command_errors, expand, require_writable
from sheeplike.config.schema import all_keys, to_data
from sheeplike.config.sources import GROUPS, Sources
from sheeplike.monitor.progress import format_seconds
from sheeplike.options import CommandError, Options, explain_keys, keys_of
from sheeplike.run.run_dir import check_accelerator
from sheeplike.terminal import echo, info

PARTS = {
    "physics": "the jitted simulation without rendering",
    "envs": "simulation and rendering, as a bare loop and as torch's vector environment",
    "acting": "environments under the agent's actions; and acting alone",
    "learning": "the whole loop of a run, at its ratio of updates to steps",
    "update": "one update, eager, compiled and captured",
    "memory": "peak memory of a run that has begun to learn",
}
MODES = ("off", "inductor", "graph")
EXAMPLE = "python -m sheeplike bench env=franka_pick agent=dreamer_v3"


class BenchOptions(Options):
    """Keys of this command, beside those of the run that it measures."""

    parts: tuple[Literal[*PARTS], ...] = Field(tuple(PARTS), min_length=1, description="parts to measure; see below")
    modes: tuple[Literal[*MODES], ...] = Field(MODES, min_length=1, description="compilations of the update to measure")
    seconds: float = Field(5.0, gt=0, le=3600, description="time for each measurement, over all rounds")
    rounds: int = Field(
        8, ge=1, le=1000, description="rounds of each measurement; as few as 3 if a single call takes long"
    )
    out: str | None = Field(
        None, min_length=1, description="directory for bench.md and bench.json; null: bench/<env>_<agent>_<time>"
    )
    show: Literal["config"] | None = Field(None, description="config: print the configuration of the run, and stop")


def main(request: Request) -> None:
    """Measure, print the tables and save them after each part."""
    if request.help:
        echo(f"{EXAMPLE} [key=value ...]", "", explain_keys(keys_of(BenchOptions)), "", "parts")
        echo(*(f"  {name:<32} {text}" for name, text in PARTS.items()), "")
        echo("Further keys are those of the run: python -m sheeplike train --help lists them.")
        return
    asked, composed = compose(request.arguments, Sources(request.config_dirs))
    if asked.show:
        echo(explain(composed))
        return
    config = composed.config
    check_accelerator(config)
    name = re.sub(r"[^\w.-]+", "_", f"{config.env.task} {config.agent.name} {datetime.now():%Y-%m-%d_%H-%M-%S}")
    asked = asked.replace(out=asked.out or f"bench/{name}")
    require_writable("out", expand(asked.out), "bench.md", "bench.json")
    info("loading torch and JAX")
    from sheeplike.run.build import explain_oom
    from sheeplike.tools.bench import Bench, save

    start, tables = time.monotonic(), []
    facts = {"command": f"`{shlex.join(['python', '-m', 'sheeplike', 'bench', *request.arguments])}`"}
    settings = {"bench": asked.model_dump(mode="json"), "config": to_data(config)}
    with explain_oom(config), as_command_errors(OSError, envs.Unusable):
        bench = Bench(config, seconds=asked.seconds, rounds=asked.rounds)
        facts |= bench.facts()
        for table in bench.measure(asked.parts, asked.modes):
            tables.append(table)
            facts["took"] = format_seconds(time.monotonic() - start)
            save(expand(asked.out), f"Benchmark: {config.env.task}, {config.agent.name}", facts, settings, tables)
    echo("", *tables, f"saved: {asked.out}/bench.md and bench.json")


def compose(arguments: Sequence[str], sources: Sources) -> tuple[BenchOptions, Composed]:
    """Return this command's options, and the configuration of the run that the other arguments describe."""
    known, given = {*GROUPS, *(key.path for key in all_keys())}, {}
    for key, value in (argument.split("=", 1) for argument in arguments if "=" in argument):
        given[key] = value
        if "." not in key and key not in known | BenchOptions.model_fields.keys():
            raise UnknownKey(key, [*keys_of(BenchOptions), *all_keys()])
    if not given.keys() & {"agent", "exp"}:
        agents = ", ".join(sources.choices("agent"))
        raise CommandError(f"agent= is missing: expected one of {agents}; for example: {EXAMPLE}")
    for key, instead in {"run_dir": "out=<directory>", "total_steps": "seconds=<time>"}.items():
        if key in given:
            raise CommandError(f"{key}={given[key]}: a benchmark makes no run and has its own end; nearest: {instead}")
    own = [argument for argument in arguments if argument.partition("=")[0] in BenchOptions.model_fields]
    rest = [argument for argument in arguments if argument not in own]
    if "exp" not in given and given["agent"] in sources.choices("exp"):
        rest.insert(0, f"exp={given['agent']}")  # agent= alone is enough for a benchmark
    # total_steps of the run must not end a benchmark.
    return load_options(BenchOptions, own), load([*rest, "total_steps=1000000000000"], sources)
