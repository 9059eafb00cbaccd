"""``python -m sheeplike bench env=… agent=… [key=value …]``: how fast all of it is on this machine."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

from sheeplike.commands import cli
from sheeplike.commands.errors import CommandError, InvalidValue, nearest, show
from sheeplike.commands.machine import check_accelerator
from sheeplike.commands.schema import Rule, all_keys, keys_of
from sheeplike.commands.sources import GROUPS, Sources
from sheeplike.commands.validation import expectation
from sheeplike.envs import list_envs, simulated

PARTS = {
    "physics": "the jitted simulation without rendering",
    "worlds": "the same with rendering, as a bare loop and as torch sees it",
    "variation": "the worlds again, with more and more that differs between them",
    "acting": "with the agent's actions; and acting alone",
    "learning": "the loop of a run, and the memory that it takes",
    "update": "one update, eager, compiled and captured",
    "breakdown": "one update by part",
    "checkpoint": "saving, with 100,000 and with a million steps in the replay",
    "growth": "all that with other numbers of worlds, batches and sizes",
}
# It ends by itself, and learns as soon as it can: waiting for longer would be nothing but warm-up.
OWN_PACE = ("total_steps=1000000000000", "learning_starts=null")
EXAMPLE = "python -m sheeplike bench env=franka_pick agent=dreamer_v3"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of this command, beside those of the run that it measures."""

    parts: Annotated[tuple[str, ...], Rule("what is measured; see below", choices=tuple(PARTS))] = tuple(PARTS)
    modes: Annotated[
        tuple[str, ...] | None,
        Rule("ways to make an update; null: all that are possible here", choices=("off", "inductor", "graph")),
    ] = None
    seconds: Annotated[float, Rule("for each measurement, over its rounds", above=0)] = 5.0
    rounds: Annotated[int, Rule("of each measurement; fewer where a single call takes long", at_least=1)] = 8
    out: Annotated[str | None, Rule("where bench.md and bench.json go; null: bench/<env>_<agent>_<time>")] = None


def main(arguments: list[str]) -> None:
    """Measure, print the tables and save them as Markdown and JSON.

    Raises:
        CommandError: the request cannot be met; nothing was written.
    """
    request = cli.parse(arguments)
    sources = Sources(request.config_dirs)
    if request.help:
        print(usage())
        return
    from sheeplike.commands.config import load, load_settings, to_yaml  # Hydra, which help does without

    own = {field.name for field in fields(Settings)}
    rest = [override for override in request.overrides if _key(override) not in own]
    asked = load_settings(Settings, [override for override in request.overrides if override not in rest])
    _check_keys(rest, own)
    config = load([*_recipe(rest, sources), *rest, *OWN_PACE], sources)
    if not simulated(config.env.name):
        own = [name for name in list_envs() if simulated(name)]
        raise InvalidValue("env", config.env.name, f"a task that is simulated here: {', '.join(own)}")
    if asked.out is None:
        name = f"{config.env.name}_{config.agent.name}_{datetime.now():%Y-%m-%d_%H-%M-%S}"
        asked = replace(asked, out=f"bench/{name}")
    if request.print_config:
        print(to_yaml(config), end="")
        settings = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(asked).items()}
        print("\n".join(["bench:", *(f"  {name}: {show(value)}" for name, value in settings.items())]))
        return
    check_accelerator(config)
    asked = replace(asked, out=str(_check_out(Path(asked.out).expanduser())))
    print("loading torch and JAX", flush=True)
    from sheeplike.commands.preemption import stops_at_once

    # What has been measured is saved already: there is nothing to wait for after Ctrl-C.
    with stops_at_once():
        from sheeplike.commands.benchmark.run import run

        flags = [part for directory in request.config_dirs for part in ("--config-dir", directory)]
        run(config, asked, sources, arguments, [*flags, *rest])


def usage() -> str:
    """The text of ``python -m sheeplike bench --help``."""
    defaults = {field.name: field.default for field in fields(Settings)}
    lines = [f"python -m sheeplike bench env=<task> agent=<algorithm> [key=value ...]: {cli.COMMANDS['bench']}"]
    lines += ["", "Measures the run that the same keys would train, which learns as soon as it can and ends by itself."]
    lines += ["Nothing of that run is created.", "", "keys"]
    for item in keys_of(Settings):
        lines.append(f"  {item.name:<12} {item.rule.doc} ({expectation(item)}; default {show(defaults[item.name])})")
    lines += ["", "parts", *(f"  {name:<12} {text}" for name, text in PARTS.items())]
    lines += [
        "",
        "Further keys are those of train: python -m sheeplike train --help lists them.",
        "",
        f"for example: {EXAMPLE}",
    ]
    return "\n".join(lines)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _check_keys(overrides: list[str], own: set[str]) -> None:
    """Refuse a key that is a misspelt one of this command; all others are looked at with the configuration."""
    known = [*GROUPS, *(item.path for item in all_keys())]
    for key in map(_key, overrides):
        match = nearest(key, [*known, *own]) if key not in known and "." not in key else None
        if match in own:
            raise CommandError(
                f"unknown key {key!r}: nearest: {match}; python -m sheeplike bench --help lists every key"
            )


def _recipe(overrides: list[str], sources: Sources) -> list[str]:
    """The recipe of the agent's name, where none is given: a benchmark asks only for an agent."""
    given = {_key(override): override.partition("=")[2] for override in overrides}
    if "exp" in given:
        return []
    agents, recipes = sources.choices("agent"), sources.choices("exp")
    if "agent" not in given:
        raise CommandError(f"agent= is missing: expected one of {', '.join(agents)}; for example: {EXAMPLE}")
    return [f"exp={given['agent'] if given['agent'] in recipes else recipes[0]}"]


def _check_out(out: Path) -> Path:
    """Where the files go; an older benchmark there is replaced, nothing else is touched.

    Raises:
        CommandError: it cannot be written.
    """
    ancestor = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        raise CommandError(f"out={out}: expected a directory that can be written, and {ancestor} is none")
    return out
