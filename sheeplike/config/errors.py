"""Errors that a user can act on: one line that says what, where, what was expected and the nearest valid choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sheeplike import options
from sheeplike.files import check_writable
from sheeplike.options import CommandError, Key, Options, UnknownOption, keys_of
from sheeplike.terminal import text_of

T = TypeVar("T", bound=Options)
HELP = "python -m sheeplike train --help lists every key"


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice like ``word``, or None where none is."""
    return options.nearest(word, choices, cutoff=0.6)


def expand(path: str) -> Path:
    """A path that somebody has typed; ``~`` and ``~<user>`` are home directories.

    Raises:
        CommandError: there is no such home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise CommandError(f"{path}: there is no such home directory; nearest: './{path}'") from None


def unknown(what: str, word: str, choices: Iterable[str]) -> CommandError:
    """The error for a name that does not exist; it lists those that do."""
    choices = list(choices)
    match = nearest(word, choices)
    hint = f"; nearest: {match}" if match else ""
    return CommandError(f"{what} {word!r} does not exist: expected one of {', '.join(choices) or 'none'}{hint}")


def unknown_key(path: str, keys: Iterable[Key], *, elsewhere: str = "") -> CommandError:
    """The error for a key that does not exist, with the nearest that does.

    Args:
        keys: all there are.
        elsewhere: why there is none here, of a key that another agent has.
    """
    section, _, last = path.replace("/", ".").rpartition(".")
    by_name: dict[str, list[str]] = {}
    for key in keys:
        by_name.setdefault(key.path.rpartition(".")[2], []).append(key.path)
    beside = [name for name, paths in by_name.items() if f"{section}.{name}".lstrip(".") in paths]
    # The name itself, wherever it is; then one like it in the section; then one like it anywhere.
    name = last if last in by_name else nearest(last, beside) or (None if elsewhere else nearest(last, by_name))
    match = None if name is None else options.nearest(path.replace("/", "."), by_name[name])
    hint = f"nearest: {match}; " if match else ""
    return CommandError(f"{f'{path}: {elsewhere};' if elsewhere else f'unknown key {path!r}:'} {hint}{HELP}")


def validated(cls: type[T], data: Mapping[str, Any], prefix: str = "") -> T:
    """Options of a class from plain data.

    Args:
        prefix: path of the section that these are, such as ``agent.``.

    Raises:
        InvalidOption: a value of the wrong type or out of its range.
        CommandError: a key that does not exist.
    """
    try:
        return options.build(cls, data, prefix)
    except UnknownOption as error:
        raise unknown_key(error.key, keys_of(cls, prefix)) from None


@contextmanager
def as_command_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of ``kinds`` into a :class:`CommandError` of their first line.

    For the construction of what a configuration describes, where an exception means that the configuration cannot be
    met; a failure during training is a defect and keeps its traceback.
    """
    try:
        yield
    except CommandError:
        raise
    except kinds as error:
        if isinstance(error, OSError) and error.strerror:
            raise CommandError(f"{error.filename or 'a file'}: {error.strerror}") from error
        lines = [line for line in text_of(error).splitlines() if line.strip()]
        raise CommandError(lines[0] if lines else type(error).__name__) from error


def require_writable(key: str, directory: Path, *names: str, nearest: str = "another place") -> None:
    """Raise for a directory in which a command cannot write, or not files of these names, before it begins.

    Raises:
        CommandError: it says what is in the way.
    """
    try:
        check_writable(directory, *names)
    except OSError as error:
        raise CommandError(
            f"{key}={directory}: expected a directory that can be written; {error.filename}: {error.strerror}; "
            f"nearest: {nearest}"
        ) from None
