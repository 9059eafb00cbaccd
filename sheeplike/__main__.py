"""``python -m sheeplike [command] overrides…``, also installed as the console script ``sheeplike``."""

from __future__ import annotations

import ast
import errno
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import sheeplike
from sheeplike import commands
from sheeplike.commands import Request
from sheeplike.config.errors import UnknownName
from sheeplike.config.sources import GROUPS, Sources
from sheeplike.options import CommandError, nearest
from sheeplike.run import signals
from sheeplike.run.signals import FAILED, INTERRUPTED, UNSAVED, AskedToExit
from sheeplike.terminal import echo, reason_of, warn, warnings_as_lines

COMMANDS = Path(commands.__file__).parent
PATIENCE = 10.0  # seconds that leftover threads of libraries may delay the exit
# Values of errno that get one line instead of a traceback; 0: raised by this package.
FILE_ERRORS = {0, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG}
FILE_ERRORS |= {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EMFILE, errno.ENFILE}
FLAGS = {
    "--help": "this text",
    "--version": "the version",
    "--config-dir": "also look for configs in this directory (so does SHEEPLIKE_SEARCH_PATH, a list separated by ;)",
}


def program() -> None:
    """Run :func:`main` as a whole process."""
    status = 1
    signals.unblock()
    signals.handle_all_at_once()
    signals.end_with_launcher()
    try:
        main()
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else 1
        raise
    finally:
        signals.ignore()  # everything is saved: a late signal must not change the status
        gc.freeze()  # Python would look for garbage in all of torch and JAX, for seconds
        # Python would wait forever for a thread that an environment leaves running.
        timer = threading.Timer(PATIENCE, os._exit, [status])
        timer.daemon = True
        timer.start()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; ``arguments`` default to those of the process.

    Raises:
        SystemExit: with status 2 and one line on stderr if the request cannot be met, with 130 after Ctrl-C, or with
            another status that the error names. ``SHEEPLIKE_DEBUG=1`` lets the exception through instead.
    """
    try:
        with warnings_as_lines():
            status = dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        status = INTERRUPTED
    except AskedToExit:
        raise
    except (CommandError, OSError, SystemExit) as error:
        is_defect = isinstance(error, OSError) and error.errno not in FILE_ERRORS
        if os.environ.get("SHEEPLIKE_DEBUG") == "1" or is_defect:
            raise
        text, status = error, getattr(error, "status", FAILED)
        if isinstance(error, OSError):
            text, status = f"{reason_of(error)}; SHEEPLIKE_DEBUG=1 shows where", UNSAVED
        elif isinstance(error, SystemExit):  # raised by an environment or its libraries, never by a command
            text = f"something in the run called sys.exit({error.code!r}); SHEEPLIKE_DEBUG=1 shows what"
        warn(text)
    if status:
        raise SystemExit(status)


def dispatch(arguments: list[str]) -> int:
    """Run the command that the arguments name, ``train`` by default; returns the exit status."""
    if arguments in (["--help"], ["-h"]):
        echo(overview())
        return 0
    if arguments == ["--version"]:
        echo(sheeplike.__version__)
        return 0
    name = "train"
    if arguments and "=" not in arguments[0] and not arguments[0].startswith(("-", "~")):
        name, *arguments = arguments
    if name in GROUPS:
        raise _expected_key(name, name, arguments)
    try:
        os.getcwd()
    except FileNotFoundError:
        raise CommandError("the working directory is gone: expected one that exists") from None
    if name.startswith("_") or not (COMMANDS / f"{name}.py").is_file():
        raise UnknownName("command", name, list_commands())
    if sweep := next((word for word in arguments if word.partition("=")[0] in ("-m", "--multirun")), ""):
        from sheeplike.config.compose import as_loop  # Hydra takes half a second to import

        line = as_loop(name, [word for word in arguments if word != sweep])
        raise CommandError(f"{sweep}: expected one run for each command, or seeds=3; nearest: {line}")
    request = parse(arguments)
    return importlib.import_module(f"sheeplike.commands.{request.module(name)}").main(request) or 0


def list_commands() -> dict[str, str]:
    """Return name and first line of every command, ``train`` first, without importing any."""
    files = sorted(COMMANDS.glob("[!_]*.py"), key=lambda file: (file.stem != "train", file.stem))
    docs = {file.stem: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" for file in files}
    return {name: doc.partition("\n")[0].rstrip(".") for name, doc in docs.items()}


def parse(arguments: Iterable[str]) -> Request:
    """Split flags from the rest."""
    others: list[str] = []
    config_dirs: list[str] = []
    wants_help = False
    rest = iter(arguments)
    for argument in rest:
        flag, _, value = argument.partition("=")
        if not argument.startswith("-"):
            others.append(argument)
        elif argument in ("--help", "-h"):
            wants_help = True
        elif flag in ("--config-dir", "-cd"):
            if not (directory := value or next(rest, "")):
                raise CommandError("--config-dir: expected a directory behind it")
            config_dirs.append(directory)
        elif not value and flag.lstrip("-") in GROUPS:
            raise _expected_key(flag, flag.lstrip("-"), rest)
        elif value and not nearest(flag, FLAGS, cutoff=0.8):
            key = flag.lstrip("-").replace("-", "_")
            raise CommandError(f"{argument}: expected key=value, without dashes: {key}={value}")
        else:
            raise UnknownName("flag", flag, FLAGS)
    return Request(others, config_dirs, wants_help)


def _expected_key(typed: str, group: str, rest: Iterable[str]) -> CommandError:
    """Return the error of ``exp ppo`` and ``--exp ppo``."""
    word, choices = next(iter(rest), ""), Sources().choices(group)
    choice = nearest(word, choices, cutoff=0.6) or ("franka_pick" if group == "env" else choices[0])
    typed = f"{typed} {word}".rstrip()
    return CommandError(f"{typed}: expected key=value in one word, without dashes; nearest: {group}={choice}")


def overview() -> str:
    """Return the text of ``python -m sheeplike --help``."""
    lines = [
        "python -m sheeplike [train] exp=<recipe> env=<task> [key=value ...]",
        "python -m sheeplike exp=<recipe> env=<task> seeds=3      one run after another; seeds=[3,7,9] names them",
        "python -m sheeplike resume=<run_dir>                     resume a run that was stopped",
        "python -m sheeplike exp=<recipe> env=<task> resume=auto  begin the run, or resume it",
        "python -m sheeplike exp=<recipe> env=<task> show=config  print every value, and where it comes from",
        "python -m sheeplike eval run=demo:franka_pick            play a trained agent, the fastest first try",
        "python -m sheeplike <command> --help",
        "",
        "commands",
        *(f"  {name:<13} {text}" for name, text in list_commands().items()),
        "",
        Sources().describe(),
        "",
        "flags",
        *(f"  {flag:<13} {text}" for flag, text in FLAGS.items()),
        "",
        "python -m sheeplike train --help lists every key; the other commands have a --help too",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    program()
