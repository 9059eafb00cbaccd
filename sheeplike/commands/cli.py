"""The front end: which command, its flags, and help that needs neither Hydra nor torch nor JAX."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import NamedTuple

import sheeplike
from sheeplike import envs
from sheeplike.commands import kinds
from sheeplike.commands.errors import CommandError, unknown
from sheeplike.commands.schema import all_keys
from sheeplike.commands.sources import GROUPS, Sources
from sheeplike.commands.validation import expectation

# Name to what it does. The module of the same name in this package has `main(arguments: list[str]) -> None`.
COMMANDS = {
    "train": "train an agent; the default command",
    "eval": "evaluate the agent of a run: return and success with their intervals, and videos",
    "compare": "read finished runs: which agent is better, and how sure that is",
    "export": "write the weights of a run's agent as safetensors, with what it takes to load them",
    "bench": "measure how fast simulation, acting and learning are on this machine",
}
FLAGS = {
    "--help": "this text",
    "--cfg": "print the composed configuration and stop",
    "--config-dir": "also look for configs in this directory (so does SHEEPLIKE_SEARCH_PATH, a list separated by ;)",
}


class Request(NamedTuple):
    """What stands on a command line."""

    overrides: list[str]
    config_dirs: list[str]
    help: bool
    print_config: bool


def dispatch(arguments: list[str]) -> None:
    """Run the command that the arguments name, ``train`` where they name none.

    Raises:
        CommandError: the command does not exist, or it refuses the arguments.
    """
    if arguments in (["--help"], ["-h"]):
        print(overview(Sources()))
        return
    if arguments == ["--version"]:
        print(sheeplike.__version__)
        return
    name = "train"
    if arguments and "=" not in arguments[0] and not arguments[0].startswith(("-", "~")):
        name, *arguments = arguments
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    importlib.import_module(f"sheeplike.commands.{name}").main(arguments)


def parse(arguments: Iterable[str]) -> Request:
    """Split flags from overrides.

    Raises:
        CommandError: an unknown flag, or one without its value.
    """
    overrides: list[str] = []
    config_dirs: list[str] = []
    wants_help = print_config = False
    rest = iter(arguments)
    for argument in rest:
        flag, _, value = argument.partition("=")
        if not argument.startswith("-"):
            overrides.append(argument)
        elif argument in ("--help", "-h"):
            wants_help = True
        elif flag in ("--cfg", "-c"):
            print_config = True
        elif flag in ("--config-dir", "-cd"):
            directory = value or next(rest, "")
            if not directory:
                raise CommandError("--config-dir: expected a directory behind it")
            config_dirs.append(directory)
        else:
            raise unknown("flag", flag, FLAGS)
    # Hydra writes `--cfg job`; there is only one configuration here.
    overrides = [one for one in overrides if not (print_config and one == "job")]
    return Request(overrides, config_dirs, wants_help, print_config)


def overview(sources: Sources) -> str:
    """The text of ``python -m sheeplike --help``."""
    lines = [
        "python -m sheeplike [train] exp=<recipe> env=<task> [key=value ...]",
        "python -m sheeplike exp=<recipe> env=<task> seeds=3      one run after another; seeds=[3,7,9] names them",
        "python -m sheeplike resume=<run_dir>                     go on with a run that was stopped",
        "python -m sheeplike exp=<recipe> env=<task> resume=auto  begin the run, or go on with it",
        "python -m sheeplike <command> --help",
        "",
        "commands",
        *(f"  {name:<12} {text}" for name, text in COMMANDS.items()),
        "",
        "choices, as in exp=dreamer_v3",
        *(f"  {group:<12} {', '.join(sources.choices(group))}" for group in GROUPS),
        *_of_other_packages(),
        "",
        "flags",
        *(f"  {flag:<12} {text}" for flag, text in FLAGS.items()),
        "",
        "python -m sheeplike train --help lists every key; the other commands have a --help too",
    ]
    return "\n".join(lines)


def _of_other_packages() -> list[str]:
    """Which of the choices are of other packages; none of these is imported for it."""
    found = {f"env={name}": envs.origins(name) for name in envs.list_envs()}
    found |= {f"agent={name}": kinds.origins(name) for name in kinds.list_agents()}
    lines = [
        f"  {choice:<24} {', '.join(origins)}{': refused, since one package must have it' * (len(origins) > 1)}"
        for choice, origins in found.items()
        if origins
    ]
    return ["", "of other packages", *lines] if lines else []


def keys(overrides: Iterable[str] = ()) -> str:
    """Every key with what it takes and what it means, for the help of a command that takes a configuration.

    Args:
        overrides: with ``agent=<name>`` among them, the keys of an agent of another package are listed too.
    """
    for override in overrides:
        key, _, name = override.partition("=")
        if key in ("agent", "exp"):
            kinds.find(name)
    lines = []
    for item in all_keys():
        if item.rule.choices and item.path == "agent.name":
            lines.append(f"  with agent.name={item.rule.choices[0]}:")
        elif item.rule.open:
            lines.append(f"  {item.path + '.*':<32} {item.rule.doc}")
        elif not item.section:
            lines.append(f"  {item.path:<32} {item.rule.doc} ({expectation(item)})")
    return "\n".join(lines)
