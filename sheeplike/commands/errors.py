"""Errors that a user can act on: one line that says what, where, what was expected and the nearest valid choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sheeplike import names
from sheeplike.options import InvalidOption


class CommandError(Exception):
    """A request that cannot be met. Its text is always one line.

    Attributes:
        status: the exit status of a command that ends with it.
    """

    status = 2

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


class InvalidValue(CommandError):
    """The value of a key is not valid.

    Args:
        key: full dotted path.
        value: what was given.
        expected: what would have been valid, in words.
        nearest: the valid value nearest to ``value``, where there is one.
    """

    def __init__(self, key: str, value: Any, expected: str, nearest: Any = None) -> None:
        super().__init__(key)
        self.key, self.value, self.expected, self.nearest = key, value, expected, nearest

    def __str__(self) -> str:
        hint = "" if self.nearest is None else f"; nearest: {self.key}={show(self.nearest)}"
        return " ".join(f"{self.key}={show(self.value)}: expected {self.expected}{hint}".split())


def show(value: Any) -> str:
    """``value`` as it would be typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(item) for item in value) + "]"
    return str(value)


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like ``word``, or None where none is."""
    choices = list(choices)
    within = (choice for choice in choices if word and word.lower() in choice.lower())
    return names.nearest(word, choices, cutoff=0.6) or next(within, None)


def unknown(what: str, word: str, choices: Iterable[str]) -> CommandError:
    """The error for a name that does not exist; it lists those that do."""
    choices = list(choices)
    match = nearest(word, choices)
    hint = f"; nearest: {match}" if match else ""
    return CommandError(f"{what} {word!r} does not exist: expected one of {', '.join(choices) or 'none'}{hint}")


@contextmanager
def as_command_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of ``kinds`` into a :class:`CommandError` of their first line.

    For the construction of what a config describes, where an exception means that the config cannot be met; a failure
    during training is a defect and keeps its traceback.
    """
    try:
        yield
    except InvalidOption as error:
        if not isinstance(error, kinds):
            raise
        key = "env.id" if error.key == "id" else f"env.options.{error.key}"
        raise InvalidValue(key, error.value, error.expected, error.nearest) from error
    except kinds as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise CommandError(lines[0] if lines else type(error).__name__) from error
