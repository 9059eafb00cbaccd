"""Typed, frozen options: each is written once, with its type, default, range and one line of meaning.

What an option takes, in words, and the valid value nearest to an invalid one are derived from that definition.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen, MultipleOf
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

_SPOKEN = {"yes": True, "on": True, "1": True, "no": False, "off": False, "0": False}
T = TypeVar("T", bound="Options")


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


class UnknownOption(InvalidOption):
    """There is no such option."""


class MissingOption(InvalidOption):
    """An option without a default is missing."""

    def __str__(self) -> str:
        return f"{self.key} is missing: expected {self.expected}"


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


def build(cls: type[T], data: Mapping[str, Any], prefix: str = "") -> T:
    """Options of a class from plain data.

    Args:
        prefix: in front of the keys that errors name, such as ``agent.``.

    Raises:
        InvalidOption: a value of the wrong type or out of its range, one that is missing, or an :class:`UnknownOption`.
    """
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        found = [(*_locate(cls, entry["loc"]), entry) for entry in error.errors(include_url=False)]
    # Of a union, the error that lies deepest is about the form that was meant. What is missing comes last.
    names, field, entry = max(found, key=lambda one: (len(one[0]), one[2]["type"] != "missing"))
    if entry["type"] == "extra_forbidden":
        known = list((Key("", field, None).section if names else cls).model_fields)
        name = str(entry["loc"][-1])
        raise UnknownOption(f"{prefix}{'.'.join([*names, name])}", entry["input"], one_of(name, known))
    value: Any = data
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else value
    if entry["type"] == "missing":
        raise MissingOption(f"{prefix}{'.'.join(names)}", None, expectation(field))
    raise InvalidOption(f"{prefix}{'.'.join(names)}", value, expectation(field), closest(value, field))


def nearest(word: object, choices: Iterable[str], *, cutoff: float = 0.0) -> str | None:
    """The choice most like ``word``, or else one that contains it, in whatever case; None where there is neither.

    Args:
        cutoff: the least likeness, from 0 to 1; with the default there is an answer wherever there is a choice.
    """
    word = str(word).lower()
    lowered = {choice.lower(): choice for choice in reversed(list(choices))}  # the first of two wins
    close = difflib.get_close_matches(word, lowered, n=1, cutoff=cutoff)
    close += [choice for choice in reversed(lowered) if word and word in choice]
    return lowered[close[0]] if close else None


def one_of(word: object, choices: Iterable[str]) -> str:
    """What was expected in place of ``word``: all choices, and the nearest of them."""
    choices = list(choices)
    return f"one of {', '.join(choices)}" + (f" (nearest: {nearest(word, choices)})" if choices else "")


class Key(NamedTuple):
    """One key of a configuration.

    Attributes:
        path: full dotted path.
        field: its definition.
        default: plain data; None where there is none.
    """

    path: str
    field: FieldInfo
    default: Any

    @property
    def section(self) -> type[Options] | None:
        """The class of the keys below this one, where there are any."""
        found = [kind for kind in alternatives(self.field.annotation) if _is_section(kind)]
        return found[0] if found else None

    @property
    def is_open(self) -> bool:
        """Whether any key may stand below this one."""
        return any(get_origin(kind) is dict for kind in alternatives(self.field.annotation))

    @property
    def nullable(self) -> bool:
        return type(None) in get_args(self.field.annotation)


def keys_of(options: type[Options], prefix: str = "") -> Iterator[Key]:
    """Every key of a class of options, sections before what is below them.

    Args:
        prefix: of all paths, such as ``agent.``.
    """
    for name, field in options.model_fields.items():
        path = prefix + (field.alias or name)
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        key = Key(
            path, field, default.model_dump(mode="json", by_alias=True) if isinstance(default, Options) else default
        )
        yield key
        if key.section:
            yield from keys_of(key.section, f"{path}.")


def expectation(field: FieldInfo) -> str:
    """What a key takes, such as ``an integer from 48 to 256, a multiple of 16, or null``."""
    kinds = alternatives(field.annotation)
    words = ", or ".join(_in_words(kind, field.metadata, alone=len(kinds) == 1) for kind in kinds)
    return words + ", or null" * (type(None) in get_args(field.annotation))


def closest(value: Any, field: FieldInfo) -> Any:
    """The valid value nearest to an invalid one; None where there is no such thing, as for a number above 0."""
    kinds = alternatives(field.annotation)
    fitting = sorted(kinds, key=lambda kind: not _has_form(value, _plain(kind)[0]))
    return next((found for kind in fitting if (found := _closest(value, kind, field.metadata)) is not None), None)


def show(value: Any) -> str:
    """``value`` as it would be typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Options):
        value = value.model_dump(by_alias=True)
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(item) for item in value) + "]"
    return str(value)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Options)


def _plain(annotation: Any, limits: Any = ()) -> tuple[Any, list[Any]]:
    """A type without ``Annotated``, and all its limits."""
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        for entry in more:
            limits = [*limits, *(entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    return annotation, list(limits)


def _limits(limits: Any) -> dict[type, Any]:
    names = {Ge: "ge", Gt: "gt", Le: "le", Lt: "lt", MultipleOf: "multiple_of", MinLen: "min_length"}
    return {kind: getattr(entry, name) for entry in limits for kind, name in names.items() if isinstance(entry, kind)}


def _in_words(annotation: Any, limits: Any, *, alone: bool = True) -> str:
    kind, limits = _plain(annotation, limits)
    found = _limits(limits)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        if inner[-1] is not Ellipsis:
            return f"{'two' if len(inner) == 2 else len(inner)} of them"
        many = "one or more " if found.get(MinLen) else ""
        element, own = _plain(inner[0])
        if get_origin(element) is Literal:
            return f"a list of {many}of {', '.join(get_args(element))}"
        least = f" of at least {_limits(own)[Ge]:g}" if Ge in _limits(own) else ""
        return f"a list of {many}{ {int: 'integers', float: 'numbers'}.get(element, 'names') }{least}"
    if get_origin(kind) is dict:
        return "a section of names and values, such as {name: 1}" if alone else "that of each camera by name"
    if _is_section(kind):
        return f"a section with the keys {', '.join(field.alias or name for name, field in kind.model_fields.items())}"
    if kind is bool:
        return "true or false"
    if kind is str:
        return "a text"
    return _number_in_words(kind, found)


def _number_in_words(kind: type, limits: Mapping[type, Any]) -> str:
    words = {Ge: "of at least", Gt: "above", Le: "at most", Lt: "below"}
    text = " and ".join(f"{word} {limits[limit]:g}" for limit, word in words.items() if limit in limits)
    if Ge in limits and Le in limits:
        text = f"from {limits[Ge]} to {limits[Le]}"
    text = f"{'a number' if kind is float else 'an integer'} {text}".rstrip()
    return text + (f", a multiple of {limits[MultipleOf]}" if MultipleOf in limits else "")


def _has_form(value: Any, kind: Any) -> bool:
    if isinstance(value, dict):
        return get_origin(kind) is dict or _is_section(kind)
    return isinstance(value, list | tuple) == (get_origin(kind) is tuple)


def _closest(value: Any, annotation: Any, limits: Any) -> Any:
    kind, limits = _plain(annotation, limits)
    if get_origin(kind) is Literal:
        return nearest(value, map(str, get_args(kind)), cutoff=0.3)
    if get_origin(kind) is tuple:
        return _closest_list(value, kind)
    if get_origin(kind) is dict and isinstance(value, dict) and value:
        inner = get_args(kind)[1]
        found = {name: _closest_of_union(entry, inner) for name, entry in value.items()}
        return None if None in found.values() else found
    if kind is bool:
        word = str(value).lower()
        return _SPOKEN.get(word, {"true": True, "false": False}.get(nearest(word, ("true", "false"), cutoff=0.6) or ""))
    if kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return _closest_number(value, kind, _limits(limits))
    return None


def _closest_of_union(value: Any, annotation: Any) -> Any:
    kinds = sorted(alternatives(annotation), key=lambda kind: not _has_form(value, _plain(kind)[0]))
    return next((found for kind in kinds if (found := _closest(value, kind, ())) is not None), None)


def _closest_list(value: Any, kind: Any) -> list[Any] | None:
    inner, given = get_args(kind), value if isinstance(value, list | tuple) else [value]
    fixed = inner[-1] is not Ellipsis
    if (
        not given
        or (fixed and len(given) != len(inner))
        or (not fixed and get_origin(_plain(inner[0])[0]) is not Literal)
    ):
        return None
    found = [_closest(entry, inner[0], ()) for entry in given]
    return None if None in found else found


def _closest_number(value: float, kind: type, limits: Mapping[type, Any]) -> float | None:
    step = limits.get(MultipleOf, 1)
    value = min(max(value, limits.get(Ge, value)), limits.get(Le, value) if Le in limits else math.inf)
    value = math.floor(value / step + 0.5) * step if kind is int else value
    outside = (Gt in limits and not value > limits[Gt]) or (Lt in limits and not value < limits[Lt])
    outside |= (Ge in limits and value < limits[Ge]) or (Le in limits and value > limits[Le])
    return None if outside else kind(value)


def explain_keys(keys: Iterable[Key]) -> str:
    """One line per key for ``--help``: what it means, what it takes, its default."""
    lines = []
    for key in keys:
        if get_origin(key.field.annotation) is dict:
            lines.append(f"  {key.path + '.*':<32} {key.field.description}")
        elif key.section is None or len(alternatives(key.field.annotation)) > 1:
            default = "" if key.field.is_required() else f"; default {show(key.default)}"
            lines.append(f"  {key.path:<32} {key.field.description} ({expectation(key.field)}{default})")
    return "\n".join(lines)


def _locate(cls: type[Options], loc: tuple[int | str, ...]) -> tuple[list[str], Any]:
    """The names of the options on the way to an error, and the definition of the last one.

    Between them, pydantic's location has the forms of unions and the places in lists, which are no options.
    """
    names: list[str] = []
    field, section = None, cls
    for part in loc:
        known = {} if section is None else {one.alias or name: one for name, one in section.model_fields.items()}
        if part in known:
            names.append(str(part))
            field = known[part]
            section = Key("", field, None).section
    return names, field
