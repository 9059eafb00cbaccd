"""Typed, frozen options: each is written once, with its type, default, range and one line of meaning."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class InvalidOption(ValueError):
    """The value of an option is not valid.

    Args:
        key: the option; a dotted path where it is a key of the whole configuration.
        value: what was given.
        expected: what would have been valid, in words.
        nearest: the valid value nearest to ``value``, where there is one.
    """

    def __init__(self, key: str, value: object, expected: str, nearest: object = None) -> None:
        super().__init__(key, value, expected, nearest)
        self.key, self.value, self.expected, self.nearest = key, value, expected, nearest

    def __str__(self) -> str:
        hint = "" if self.nearest is None else f"; nearest: {self.nearest}"
        return f"{self.key}={self.value!r}: expected {self.expected}{hint}"


class Options(BaseModel):
    """Base class of all options: keyword-only, frozen, no unknown names, no silent conversion of types.

    Values may come from YAML, so a whole float is an integer (``1e6``), an integer a text where a text is asked for, a
    list a tuple, and one value a tuple of one.

    Raises:
        pydantic.ValidationError: names every option that is not valid.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    @field_validator("*", mode="before")
    @classmethod
    def _from_yaml(cls, value: Any, info: ValidationInfo) -> Any:
        return _as_typed(value, cls.model_fields[info.field_name].annotation)

    def replace(self, **changed: Any) -> Any:
        """A validated copy with other values."""
        return type(self).model_validate({name: getattr(self, name) for name in type(self).model_fields} | changed)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types that a union joins, or the one type that ``annotation`` is; without None."""
    joined = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return tuple(kind for kind in joined if kind is not type(None))


def _as_typed(value: Any, annotation: Any) -> Any:
    """``value`` as YAML has it, in the types of ``annotation`` where that loses nothing."""
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in alternatives(annotation)]
    tuples = [kind for kind in kinds if get_origin(kind) is tuple]
    mappings = [kind for kind in kinds if get_origin(kind) is dict]
    if isinstance(value, list | tuple):
        inner = get_args(tuples[0])[0] if tuples else Any
        return tuple(_as_typed(entry, inner) if inner is not str else entry for entry in value)
    if isinstance(value, dict) and mappings and (inner := get_args(mappings[0])[1]) is not Any:
        return {name: _as_typed(entry, inner) for name, entry in value.items()}
    if value is None or isinstance(value, bool | dict | BaseModel):
        return value
    if int in kinds and float not in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    if float in kinds and str not in kinds and isinstance(value, str):
        with suppress(ValueError):  # 1e-5 is a text to YAML 1.1
            return float(value)
    if str in kinds and int not in kinds and isinstance(value, int):
        return str(value)
    if len(tuples) == len(kinds):
        return (_as_typed(value, get_args(tuples[0])[0]),)
    return value


def nearest(word: object, choices: Iterable[str], *, cutoff: float = 0.0) -> str | None:
    """The choice most like ``word``, whatever the case of its letters; None where none is.

    Args:
        cutoff: the least likeness, from 0 to 1; with the default there is an answer wherever there is a choice.
    """
    lowered = {choice.lower(): choice for choice in reversed(list(choices))}  # the first of two wins
    close = difflib.get_close_matches(str(word).lower(), lowered, n=1, cutoff=cutoff)
    return lowered[close[0]] if close else None


def one_of(word: object, choices: Iterable[str]) -> str:
    """What was expected in place of ``word``: all choices, and the nearest of them."""
    choices = list(choices)
    return f"one of {', '.join(choices)}" + (f" (nearest: {nearest(word, choices)})" if choices else "")
