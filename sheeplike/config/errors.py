"""Errors that a user can act on: one line with the value, what was expected, and the nearest valid choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sheeplike import options
from sheeplike.files import check_writable
from sheeplike.options import CommandError, Key, Options, UnknownOption, keys_of
from sheeplike.terminal import one_line, reason_of

T = TypeVar("T", bound=Options)
HELP = "python -m sheeplike train --help lists every key"


class UnknownName(CommandError):
    """A name that does not exist, as ``UnknownName(what, name, choices)``."""

    def __str__(self) -> str:
        what, name, choices = self.args
        match = nearest(name, choices)
        hint = f"; nearest: {match}" if match else ""
        return one_line(f"{what} {name!r} does not exist: expected one of {', '.join(choices) or 'none'}{hint}")


class UnknownKey(CommandError):
    """A key that does not exist, as ``UnknownKey(path, keys)``; a third argument tells that another agent has it."""

    def __str__(self) -> str:
        path, keys, elsewhere = (*self.args, "")[:3]
        match = _nearest_key(path, keys, anywhere=not elsewhere)
        match = f"logger=[tensorboard,{path}]" if path in ("wandb", "mlflow") else match
        hint = f"nearest: {match}; " if match else ""
        return one_line(f"{f'{path}: {elsewhere};' if elsewhere else f'unknown key {path!r}:'} {hint}{HELP}")


def _nearest_key(path: str, keys: Iterable[Key], *, anywhere: bool) -> str | None:
    """Return the key of the same last name; else a similar one there, if ``anywhere`` elsewhere; else the key above."""
    section, _, last = path.replace("/", ".").rpartition(".")
    by_name: dict[str, list[str]] = {}
    for key in keys:
        by_name.setdefault(key.path.rpartition(".")[2], []).append(key.path)
    beside = [name for name, paths in by_name.items() if f"{section}.{name}".lstrip(".") in paths]
    name = last if last in by_name else nearest(last, beside) or (nearest(last, by_name) if anywhere else None)
    if name is None:
        return section if section in by_name.get(section.rpartition(".")[2], ()) else None
    return options.nearest(path.replace("/", "."), by_name[name])


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice like ``word``, or None."""
    return options.nearest(word, choices, cutoff=0.6)


def expand(path: str) -> Path:
    """Return a typed path with ``~`` and ``~<user>`` replaced by home directories."""
    if "\0" in path:
        raise CommandError(f"{path}: expected a path without the character NUL")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise CommandError(f"{path}: there is no such home directory; nearest: './{path}'") from None


def validated(cls: type[T], data: Mapping[str, Any], prefix: str = "") -> T:
    """Return options of the section ``prefix``, such as ``agent.``, or raise InvalidOption or UnknownKey."""
    try:
        return options.build(cls, data, prefix)
    except UnknownOption as error:
        raise UnknownKey(error.key, list(keys_of(cls, prefix))) from None


@contextmanager
def as_command_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of ``kinds`` into a :class:`CommandError` of their first line.

    For building what a configuration describes. A failure during training is a defect and keeps its traceback.
    """
    try:
        yield
    except CommandError:
        raise
    except kinds as error:
        lines = [line for line in reason_of(error).splitlines() if line.strip()]
        raise CommandError(lines[0] if lines else type(error).__name__) from error


@contextmanager
def writing(key: str, directory: Path, nearest: str = "another place") -> Iterator[None]:
    """Turn an OSError into one line with the key that names a directory, and the file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise CommandError(
            f"{key}={directory}: expected a directory that can be written; {error.filename or directory}: "
            f"{error.strerror}; nearest: {nearest}"
        ) from None


def require_writable(key: str, directory: Path, *names: str, nearest: str = "another place") -> None:
    """Raise before a command begins if it cannot write in a directory, or files of these names."""
    with writing(key, directory, nearest):
        check_writable(directory, *names)
