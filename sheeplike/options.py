"""Typed, frozen options: each is written once, with its type, default, range and one line of meaning.

Help and errors, with the valid value nearest to an invalid one, are derived from the JSON schema that pydantic makes of
that definition.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from sheeplike.terminal import one_line

_SPOKEN = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_NAMES = {"integer": "integers", "number": "numbers"}
_JSON = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", tuple: "array", dict: "object"}
WIDEST = 32  # maximum width of a column in a table of keys
LINE = 120  # maximum length of a line of it, unless a key or value is wider than its column
_ABSENT = object()
T = TypeVar("T", bound="Options")
Schema = Mapping[str, Any]

# Marks of options, as in `seed: Annotated[int, RESUMABLE, HEADLINE] = Field(0)`; :func:`marked` finds them. A section's
# mark holds for all keys below it.
RESUMABLE = Field(json_schema_extra={"resumable": True})  # it may change when a run is resumed
INCIDENTAL = Field(json_schema_extra={"incidental": True})  # runs that differ in it are the same experiment
CONDITION = Field(json_schema_extra={"condition": True})  # where compared runs differ in it, their labels say so
OWN_CHOICE = Field(json_schema_extra={"own_choice": True})  # excepted from its section's CONDITION
HEADLINE = Field(json_schema_extra={"headline": True})  # shown first by `train --help`


class CommandError(Exception):
    """A request that cannot be met. Its text is always one line."""

    status = 2  # exit status of the command

    def __str__(self) -> str:
        return one_line(super().__str__())


class InvalidOption(CommandError, ValueError):
    """An option's invalid value."""

    def __init__(self, key: str, value: object, expected: str, nearest: object = None) -> None:
        super().__init__(key, value, expected, nearest)
        self.key, self.value, self.expected, self.nearest = key, value, expected, nearest

    def __str__(self) -> str:
        hint = "" if self.nearest is None else f"; nearest: {self.key}={format_value(self.nearest)}"
        return one_line(f"{self.key}={format_value(self.value)}: expected {self.expected}{hint}")


class UnknownOption(InvalidOption):
    """A name that is no option."""


class MissingOption(InvalidOption):
    """A missing option that has no default."""

    def __str__(self) -> str:
        return one_line(f"{self.key} is missing: expected {self.expected}")


class Options(BaseModel):
    """Base class of all options: keyword-only, frozen, no unknown names, no silent conversion of types.

    Values may come from YAML, so a whole float is taken as an integer (``1e6``), an integer as a text where one is
    expected, a list as a tuple, and a single value as a tuple of one.
    """

    # Numbers that are not finite can stand only in values of any type: in JSON pydantic would make them null.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
        populate_by_name=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _from_yaml(cls, value: Any, info: ValidationInfo) -> Any:
        name = cls.model_fields[info.field_name].alias or info.field_name
        return _as_typed(value, schema_of(cls)["properties"][name])

    def replace(self, **changed: Any) -> Any:
        """Return a validated copy with other values."""
        return type(self).model_validate({name: getattr(self, name) for name in type(self).model_fields} | changed)


def build(cls: type[T], data: Mapping[str, Any], prefix: str = "") -> T:
    """Validate plain data as options of a class; InvalidOption names one wrong key, with ``prefix`` before it."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        found = [(*_locate(schema_of(cls), entry["loc"]), entry) for entry in error.errors()]
    # A value that fits no type of a union fails for each. The deepest error is reported, missing keys last.
    names, schema, entry = max(found, key=lambda one: (len(one[0]), one[2]["type"] != "missing"))
    if entry["type"] == "extra_forbidden":
        name, known = str(entry["loc"][-1]), _section(schema)
        raise UnknownOption(prefix + ".".join([*names, name]), entry["input"], one_of(name, known))
    value: Any = data
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else value
    key = prefix + ".".join(names)
    if entry["type"] == "missing":
        raise MissingOption(key, None, expectation(schema))
    if entry["type"] == "string_unicode":
        raise InvalidOption(key, value, "a text in the encoding of the locale; nearest: PYTHONUTF8=1 before it")
    raise InvalidOption(key, value, expectation(schema), closest(value, schema))


def nearest(word: object, choices: Iterable[str], *, cutoff: float = 0.0) -> str | None:
    """Return the choice most similar to ``word``, at least by ``cutoff`` of 0 to 1, else one that contains it."""
    word, choices = str(word).lower(), list(choices)
    size = r"[1-9]\d{0,9}m"  # sizes of models, such as 12m, are compared as numbers
    if re.fullmatch(size, word) and all(re.fullmatch(size, choice) for choice in choices):
        return min(choices, key=lambda choice: abs(math.log(int(choice[:-1]) / int(word[:-1]))), default=None)
    lowered = {choice.lower(): choice for choice in reversed(choices)}  # the first of two equal ones wins
    initials = {choice: "".join(part[:1] for part in choice.split("_")) for choice in lowered if "_" in choice}
    close = [choice for choice in reversed(lowered) if initials.get(choice) == word]  # lr means learning_rate
    close += difflib.get_close_matches(word, lowered, n=1, cutoff=cutoff)
    close += [choice for choice in reversed(lowered) if word and word in choice]
    return lowered[close[0]] if close else None


def one_of(word: object, choices: Iterable[str]) -> str:
    """Describe what was expected in place of ``word``: all choices, and the nearest one."""
    choices = list(choices)
    return f"one of {', '.join(choices)}" + (f" (nearest: {nearest(word, choices)})" if choices else "")


class Key(NamedTuple):
    """One key of a configuration: its full dotted path and its JSON schema."""

    path: str
    schema: Schema

    @property
    def is_section(self) -> bool:
        """True if there are other keys below this one."""
        return "properties" in self.schema

    @property
    def is_open(self) -> bool:
        """True if any key may stand below this one."""
        return any("additionalProperties" in form and "properties" not in form for form in _forms(self.schema))


def keys_of(options: type[Options], prefix: str = "") -> Iterator[Key]:
    """Yield every key of a class of options, sections before the keys below them."""
    yield from _keys_below(schema_of(options), prefix)


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of everything in nested dictionaries; an empty one is a value."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


def marked(keys: Iterable[Key], mark: str) -> frozenset[str]:
    """Return the paths of the keys with a mark, such as ``"resumable"``, not those below them."""
    return frozenset(key.path for key in keys if mark in key.schema)


def is_within(path: str, sections: Collection[str]) -> bool:
    """Return True if ``sections`` has the dotted ``path`` or a section that it is in."""
    return any(above in sections for above in itertools.accumulate(path.split("."), "{}.{}".format))


def explain_keys(keys: Iterable[Key], values: Mapping[str, Any] | None = None) -> str:
    """Format a table for ``--help``: keys, the nested ``values`` of a run if given, defaults, meaning and range."""
    rows = [("key", *(["value"] if values else []), "default", "meaning")]
    for path, schema in ((key.path, key.schema) for key in keys if not key.is_section):
        default = format_value(schema["default"]) if "default" in schema else ""
        value: Any = values
        for name in path.split("."):
            value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        own = [] if not values else [default if value is _ABSENT else format_value(value)]
        rows.append((path, *own, default, f"{schema.get('description', '')} ({expectation(schema)})"))
    widths = [min(max(map(len, column)), WIDEST) for column in zip(*rows, strict=True)]
    indent = " " * (2 + sum(width + 2 for width in widths[:-1]))
    starts = ("".join(f"  {cell:<{width}}" for cell, width in zip(row, widths[:-1], strict=False)) for row in rows)
    meanings = (textwrap.fill(row[-1], LINE - len(indent)).replace("\n", "\n" + indent) for row in rows)
    return "\n".join(f"{start}  {meaning}" for start, meaning in zip(starts, meanings, strict=True))


@functools.cache
def schema_of(options: type[Options]) -> Schema:
    """Return the JSON schema of a class of options, with references to sections resolved."""
    schema = options.model_json_schema()
    return _resolved(schema, schema.get("$defs", {}))


def expectation(schema: Schema) -> str:
    """Describe valid values, such as ``an integer from 48 to 256, a multiple of 16, or null``."""
    forms = _forms(schema)
    words = [_in_words(form, alone=len(forms) == 1) for form in forms]
    nullable = {"type": "null"} in schema.get("anyOf", ())
    return ", or ".join([*words, "null"] if nullable else words)


def closest(value: Any, schema: Schema) -> Any:
    """Return the valid value nearest to an invalid one; None if there is none, as for a number above 0."""
    forms = sorted(_forms(schema), key=lambda form: form.get("type") != _JSON.get(type(value)))
    return next((found for form in forms if (found := _closest(value, form)) is not None), None)


def format_value(value: Any) -> str:
    """Format ``value`` as it would be typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{format_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(format_value(item) for item in value) + "]"
    return str(value)


def _resolved(node: Any, definitions: Schema) -> Any:
    if isinstance(node, list):
        return [_resolved(entry, definitions) for entry in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]] | {name: node[name] for name in node if name != "$ref"}
    return {name: _resolved(entry, definitions) for name, entry in node.items() if name != "$defs"}


def _forms(schema: Schema) -> list[Schema]:
    """Return the forms that a value may have, except null."""
    return [form for form in schema.get("anyOf", [schema]) if form.get("type") != "null"]


def _keys_below(schema: Schema, prefix: str) -> Iterator[Key]:
    for name, below in _section(schema).items():
        yield Key(prefix + name, below)
        yield from _keys_below(below, f"{prefix}{name}.")


def _section(schema: Schema) -> Schema:
    """Return the keys below a key."""
    return next((form["properties"] for form in _forms(schema) if "properties" in form), {})


def _locate(schema: Schema, loc: tuple[int | str, ...]) -> tuple[list[str], Schema]:
    """Return the names of the options on the way to an error, and the schema of the last one."""
    names: list[str] = []
    for part in loc:  # pydantic adds forms of unions and places in lists, which are no options
        if part in _section(schema):
            names.append(str(part))
            schema = _section(schema)[part]
    return names, schema


def _as_typed(value: Any, schema: Schema) -> Any:
    """Convert a value of YAML to the expected types where that loses nothing."""
    forms = {form.get("type"): form for form in _forms(schema)}
    if isinstance(value, list | tuple):
        inner = forms.get("array", {}).get("items") or next(iter(forms.get("array", {}).get("prefixItems", [])), {})
        return tuple(_as_typed(entry, inner) if inner.get("type") != "string" else entry for entry in value)
    if isinstance(value, dict):
        inner = forms.get("object", {}).get("additionalProperties")
        return {name: _as_typed(entry, inner) for name, entry in value.items()} if isinstance(inner, dict) else value
    if value is None or isinstance(value, bool | BaseModel):
        return value
    if "integer" in forms and "number" not in forms and isinstance(value, float) and value.is_integer():
        return int(value)
    if "number" in forms and "string" not in forms and isinstance(value, str):
        with suppress(ValueError):  # YAML 1.1 reads 1e-5 as a text
            return float(value)
    if "string" in forms and "integer" not in forms and isinstance(value, int):
        return str(value)
    return (_as_typed(value, forms["array"].get("items", {})),) if set(forms) == {"array"} else value


def _choices(form: Schema) -> list[str]:
    return form.get("enum") or ([form["const"]] if "const" in form else [])


def _in_words(form: Schema, *, alone: bool = True) -> str:
    if _choices(form):
        return f"one of {', '.join(_choices(form))}"
    if form.get("type") == "array":
        if "prefixItems" in form:
            return f"a list of {form['maxItems']} such {_NAMES.get(form['prefixItems'][0].get('type'), 'values')}"
        items, many = form["items"], "one or more " if form.get("minItems") else ""
        if _choices(items):
            return f"a list of {many + 'of ' if many else ''}{', '.join(_choices(items))}"
        least = f" of at least {items['minimum']:.15g}" if "minimum" in items else ""
        return f"a list of {many}{_NAMES.get(items.get('type'), 'names')}{least}"
    if "properties" in form:
        return f"a section with the keys {', '.join(form['properties'])}"
    if form.get("type") == "object":
        return "a section such as {name: 1}" if alone else "{name: value} with one of these for each camera"
    if form.get("type") in ("integer", "number"):
        return _number_in_words(form)
    return {"boolean": "true or false", "string": "a text"}.get(form.get("type"), "any value")


def _number_in_words(form: Schema) -> str:
    words = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    text = " and ".join(f"{word} {form[limit]:.15g}" for limit, word in words.items() if limit in form)
    if "minimum" in form and "maximum" in form:
        text = f"from {form['minimum']:.15g} to {form['maximum']:.15g}"
    text = f"{'a number' if form['type'] == 'number' else 'an integer'} {text}".rstrip()
    return text + (f", a multiple of {form['multipleOf']}" if "multipleOf" in form else "")


def _closest(value: Any, form: Schema) -> Any:
    kind = form.get("type")
    if _choices(form):
        return nearest(value, _choices(form), cutoff=0.3)
    if kind == "array":
        given = value if isinstance(value, list | tuple) else [value]
        items = form.get("prefixItems") or ([form["items"]] * len(given) if _choices(form["items"]) else [])
        found = [closest(entry, item) for entry, item in zip(given, items, strict=False)]
        return None if not given or len(given) != len(items) or None in found else found
    if kind == "boolean":
        word = str(value).lower()
        return _SPOKEN.get(word, _SPOKEN.get(nearest(word, ("true", "false"), cutoff=0.6)))
    if kind in ("integer", "number") and type(value) in (int, float) and -1e300 < value < 1e300:
        return _closest_number(value, form)
    return None


def _closest_number(value: float, form: Schema) -> float | None:
    low, high, step = form.get("minimum", -math.inf), form.get("maximum", math.inf), form.get("multipleOf", 1)
    value = min(max(value, low), high)
    value = math.floor(value / step + 0.5) * step if form["type"] == "integer" else value
    inside = form.get("exclusiveMinimum", -math.inf) < value < form.get("exclusiveMaximum", math.inf)
    return value if inside and low <= value <= high else None
