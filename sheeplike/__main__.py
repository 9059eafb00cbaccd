"""``python -m sheeplike [command] overrides…``, also installed as the console script ``sheeplike``."""

from __future__ import annotations

import ast
import atexit
import errno
import importlib
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import sheeplike
from sheeplike import commands
from sheeplike.commands import Request
from sheeplike.config.errors import unknown
from sheeplike.config.sources import Sources
from sheeplike.options import CommandError
from sheeplike.run import signals
from sheeplike.run.signals import FAILED, INTERRUPTED, UNSAVED, AskedToExit
from sheeplike.terminal import echo, warn, warnings_as_lines

COMMANDS = Path(commands.__file__).parent
PATIENCE = 10.0  # seconds for which Python may wait, when a command has ended, for threads that others have begun
# What says that a place cannot be used, rather than that the program is wrong: a line is all there is to tell. Zero is
# that of our own errors.
_KINDS = ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EIO", "ENAMETOOLONG", "ELOOP", "ENOTDIR", "EISDIR")
_KINDS += ("EMFILE", "ENFILE")
FILE_SYSTEM_ERRORS = {0, *(getattr(errno, name) for name in _KINDS if hasattr(errno, name))}
FLAGS = {
    "--help": "this text",
    "--version": "the version",
    "--config-dir": "also look for configs in this directory (so does SHEEPLIKE_SEARCH_PATH, a list separated by ;)",
}


_ended: int | None = None  # the status with which the process is to end


@atexit.register  # before all libraries, so that it comes behind what they do at the exit
def _leave() -> None:
    """End a process of ours now: Python would take everything down first, which takes seconds with torch and JAX."""
    if _ended is not None:
        with suppress(AttributeError, OSError, ValueError):  # there is none, its disk is full, or it is closed
            sys.stdout.flush()
        os._exit(_ended)


def program() -> None:
    """:func:`main` as a whole process, whose status is delivered whatever threads an environment leaves behind."""
    global _ended
    status = 1  # that of a traceback
    signals.receive()
    try:
        main()
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        raise
    finally:
        signals.ignore()  # what there was to save is saved
        _ended = status
        # Python waits for threads before it calls what libraries have registered for the exit: JAX is not cut short.
        timer = threading.Timer(PATIENCE, _end)
        timer.daemon = True
        timer.start()


def _end() -> None:
    others = {threading.main_thread(), threading.current_thread()}
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread not in others]
    if not left:  # Python waits for something else
        return
    warn(f"something in the run left {'threads' if len(left) > 1 else 'a thread'} behind, ended now: {', '.join(left)}")
    _leave()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; ``arguments`` default to those of the process.

    Raises:
        SystemExit: status 2 and one line on stderr when the request cannot be met, or another that the error names.
            ``SHEEPLIKE_DEBUG=1`` lets the exception through instead, with its traceback. Status 130 after Ctrl-C.
    """
    try:
        with warnings_as_lines():
            status = dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        status = INTERRUPTED
    except AskedToExit:
        raise
    except (CommandError, OSError, SystemExit) as error:
        explained = not isinstance(error, OSError) or error.errno in FILE_SYSTEM_ERRORS
        if os.environ.get("SHEEPLIKE_DEBUG") == "1" or not explained:
            raise
        warn(_explain(error))
        status = getattr(error, "status", FAILED if isinstance(error, SystemExit) else UNSAVED)
    if status:
        raise SystemExit(status)


def _explain(error: BaseException) -> str:
    if isinstance(error, SystemExit):  # no command ends so: an environment, or something that it uses, does
        return f"something in the run called sys.exit({error.code!r}); SHEEPLIKE_DEBUG=1 shows what"
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror}; SHEEPLIKE_DEBUG=1 shows where"
    return str(error)


def dispatch(arguments: list[str]) -> int:
    """Run the command that the arguments name, ``train`` where they name none; returns the exit status.

    Raises:
        CommandError: the command does not exist, or it refuses the arguments.
    """
    if arguments in (["--help"], ["-h"]):
        echo(overview())
        return 0
    if arguments == ["--version"]:
        echo(sheeplike.__version__)
        return 0
    name = "train"
    if arguments and "=" not in arguments[0] and not arguments[0].startswith(("-", "~")):
        name, *arguments = arguments
    try:
        os.getcwd()
    except FileNotFoundError:
        raise CommandError("the working directory is gone: expected one that is there") from None
    if name.startswith("_") or not (COMMANDS / f"{name}.py").is_file():
        raise unknown("command", name, list_commands())
    return importlib.import_module(f"sheeplike.commands.{name}").main(parse(arguments)) or 0


def list_commands() -> dict[str, str]:
    """Name and first line of every command, ``train`` first; nothing is imported."""
    files = sorted(COMMANDS.glob("[!_]*.py"), key=lambda file: (file.stem != "train", file.stem))
    docs = {file.stem: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" for file in files}
    return {name: doc.partition("\n")[0].rstrip(".") for name, doc in docs.items()}


def parse(arguments: Iterable[str]) -> Request:
    """Split flags from the rest.

    Raises:
        CommandError: an unknown flag, or one without its value.
    """
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
            directory = value or next(rest, "")
            if not directory:
                raise CommandError("--config-dir: expected a directory behind it")
            config_dirs.append(directory)
        else:
            raise unknown("flag", flag, FLAGS)
    return Request(others, config_dirs, wants_help)


def overview() -> str:
    """The text of ``python -m sheeplike --help``."""
    lines = [
        "python -m sheeplike [train] exp=<recipe> env=<task> [key=value ...]",
        "python -m sheeplike exp=<recipe> env=<task> seeds=3      one run after another; seeds=[3,7,9] names them",
        "python -m sheeplike resume=<run_dir>                     go on with a run that was stopped",
        "python -m sheeplike exp=<recipe> env=<task> resume=auto  begin the run, or go on with it",
        "python -m sheeplike exp=<recipe> env=<task> show=config  print every value, and where it comes from",
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
