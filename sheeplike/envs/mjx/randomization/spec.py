"""What differs between worlds, as it is written down: a mapping of named lines, read here without JAX or MuJoCo.

    box_colour:
      field: geom_rgba                        or several that share a draw, such as [body_mass, body_inertia]
      of: box                                 names or patterns of what has the field; "!name" leaves one out
      component: [0, 1, 2]                    along the field's last axis; all of them if left out
      operation: set                          set, add, scale, rotate, aim
      distribution: {uniform: [0.5, 1.0]}     or log_uniform, normal, choice, bernoulli
      shared: elements                        one draw for all elements, for all components, or for both

Lines take effect in their order, so that a line can scale what the one before has set.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sheeplike.options import nearest

OPERATIONS = ("set", "add", "scale", "rotate", "aim")
DISTRIBUTIONS = {
    "uniform": "[low, high]",
    "log_uniform": "[low, high], both above 0",
    "normal": "[mean, deviation]",
    "choice": "a list of values, or of lists with one value per component",
    "bernoulli": "the probability of 1, which is otherwise 0",
}
AXES = ("elements", "components")
KEYS = ("field", "of", "component", "operation", "distribution", "shared")

PIXELS = "pixels"
"""Not of the model: the frames of a camera, values in [0, 1]; ``scale`` is brightness, ``add`` an offset."""
DELAY = "action.delay"
"""Not of the model: control steps for which an action waits before it takes effect."""

Number = float | str
Numbers = Number | tuple[Number, ...]
Lines = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line: what is drawn, and what becomes of it.

    Attributes:
        name: tells it apart from the others, in logs and in ``envs.variation``.
        fields: paths in the model, ``PIXELS`` or ``DELAY``; all take the same draw.
        of: patterns of elements' names.
        component: indices along the last axis, or None for all.
        operation: one of ``OPERATIONS``.
        distribution: one of ``DISTRIBUTIONS``.
        parameters: of the distribution; for ``choice`` one entry per value. A string names a material.
        shared: those of ``AXES`` along which one draw serves all.
    """

    name: str
    fields: tuple[str, ...]
    of: tuple[str, ...]
    component: tuple[int, ...] | None
    operation: str
    distribution: str
    parameters: tuple[Numbers, ...]
    shared: frozenset[str]

    def invalid(self, key: str, value: Any, expected: str, choices: Iterable[str] = ()) -> "InvalidLine":
        """The error for a key of this line; ``key="numbers"`` means those of its distribution."""
        key = f"distribution.{self.distribution}" if key == "numbers" else key
        return InvalidLine(self.name, key, value, expected, choices)


LONG = 300  # characters of an expectation: what is nearest comes first


class InvalidLine(ValueError):
    """A line that cannot be: ``key`` within it, what was given, what was expected, and the nearest of it."""

    def __init__(self, name: str, key: str, value: Any, expected: str, choices: Iterable[str] = ()) -> None:
        choices = list(choices)
        hint = f"; nearest: {nearest(value, choices)}" if choices else ""
        place = ".".join(filter(None, ("randomization", name, key)))
        said = f"expected {expected}{hint}"
        if choices and len(said) > LONG:
            said = f"nearest: {nearest(value, choices)}; expected {expected}"
        super().__init__(f"{place}={_shown(value)}: {said}")


def parse(lines: Lines) -> tuple[Line, ...]:
    """Reads the lines and checks all that can be checked without a model.

    Raises:
        InvalidLine: which is a ``ValueError``.
    """
    if not isinstance(lines, Mapping):
        raise InvalidLine("", "", lines, "named lines, such as {box_colour: {field: geom_rgba, ...}}")
    # A number that is changed where a recipe is used, in a line that the recipe has not, is all that there is of it.
    known = [str(name) for name, line in lines.items() if isinstance(line, Mapping) and "field" in line]
    for name, line in lines.items():
        if isinstance(line, Mapping) and known and not {"field", "operation"} & line.keys():
            raise InvalidLine("", "", name, f"one of the lines {', '.join(known)}, or a field for this one", known)
    return tuple(_line(str(name), line) for name, line in lines.items())


def _line(name: str, line: Any) -> Line:
    if not isinstance(line, Mapping):
        raise InvalidLine(name, "", line, f"a section with {', '.join(KEYS)}")
    if "/" in name or "." in name or not name:
        raise InvalidLine(name, "", dict(line), "a name without dots and slashes")
    for key in line:
        if key not in KEYS:
            raise InvalidLine(name, "", key, f"one of the keys {', '.join(KEYS)}", KEYS)
    for key in ("field", "operation", "distribution"):
        if line.get(key) is None:
            raise InvalidLine(name, key, None, {"operation": f"one of {', '.join(OPERATIONS)}"}.get(key, "a value"))
    operation = line["operation"]
    if operation not in OPERATIONS:
        raise InvalidLine(name, "operation", operation, f"one of {', '.join(OPERATIONS)}", OPERATIONS)
    kind, parameters = _distribution(name, line["distribution"])
    fields = _texts(name, "field", line["field"])
    if DELAY in fields and (len(fields) > 1 or operation != "set"):
        raise InvalidLine(name, "operation", operation, f"set, and no other field, for {DELAY}")
    if DELAY in fields:
        _check_delay(name, kind, parameters)
    if PIXELS in fields and (len(fields) > 1 or operation not in ("scale", "add")):
        raise InvalidLine(name, "operation", operation, f"scale or add, and no other field, for {PIXELS}")
    return Line(
        name=name,
        fields=fields,
        of=_texts(name, "of", line.get("of", "*")),
        component=_components(name, line.get("component")),
        operation=operation,
        distribution=kind,
        parameters=parameters,
        shared=_shared(name, line.get("shared")),
    )


def _distribution(name: str, given: Any) -> tuple[str, tuple[Numbers, ...]]:
    if not isinstance(given, Mapping) or len(given) != 1:
        raise InvalidLine(name, "distribution", given, "one distribution with its numbers, such as {uniform: [0, 1]}")
    ((kind, numbers),) = given.items()
    if kind not in DISTRIBUTIONS:
        raise InvalidLine(name, "distribution", kind, f"one of {', '.join(DISTRIBUTIONS)}", DISTRIBUTIONS)
    key, expected = f"distribution.{kind}", DISTRIBUTIONS[kind]
    if kind == "bernoulli":
        if not _is_number(numbers) or not 0 <= numbers <= 1:
            raise InvalidLine(name, key, numbers, f"{expected}: a number in [0, 1]")
        return kind, (float(numbers),)
    if not isinstance(numbers, Sequence) or isinstance(numbers, str) or not numbers:
        raise InvalidLine(name, key, numbers, expected)
    parameters = tuple(_numbers(name, key, value, expected, texts=kind == "choice") for value in numbers)
    if kind == "choice":
        if len({len(value) if isinstance(value, tuple) else 0 for value in parameters}) > 1:
            raise InvalidLine(name, key, numbers, "values of one length")
        return kind, parameters
    if len(parameters) != 2:
        raise InvalidLine(name, key, numbers, expected)
    widths = {len(value) for value in parameters if isinstance(value, tuple)}
    if len(widths) > 1:
        raise InvalidLine(name, key, numbers, f"{expected}, of one length")
    low, high = ([value] * max(widths, default=1) if not isinstance(value, tuple) else value for value in parameters)
    for a, b in zip(low, high, strict=True):
        if (kind == "normal" and b < 0) or (kind != "normal" and a > b) or (kind == "log_uniform" and a <= 0):
            raise InvalidLine(name, key, numbers, f"{expected}, in ascending order" if kind != "normal" else expected)
    return kind, parameters


def _numbers(name: str, key: str, value: Any, expected: str, *, texts: bool) -> Numbers:
    """A number, or several as a tuple; where ``texts`` may be, a name."""
    if texts and isinstance(value, str):
        return value
    if isinstance(value, bool) and texts:
        return float(value)
    if _is_number(value):
        return float(value)
    if isinstance(value, Sequence) and not isinstance(value, str) and value and all(map(_is_number, value)):
        return tuple(float(number) for number in value)
    raise InvalidLine(name, key, value, expected)


def _check_delay(name: str, kind: str, parameters: tuple[Numbers, ...]) -> None:
    whole = all(_is_number(value) and value == int(value) >= 0 for value in parameters)
    if kind not in ("choice", "bernoulli") or (kind == "choice" and not whole):
        given = {kind: list(parameters)}
        raise InvalidLine(
            name, "distribution", given, f"whole control steps for {DELAY}, such as {{choice: [0, 1, 2]}}"
        )


def _components(name: str, given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    listed = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not listed or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in listed):
        raise InvalidLine(name, "component", given, "an index along the field's last axis, or several, such as [0, 1]")
    if len(set(listed)) != len(listed):
        raise InvalidLine(name, "component", given, "each index once")
    return tuple(listed)


def _shared(name: str, given: Any) -> frozenset[str]:
    listed = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(listed, Sequence) or not all(isinstance(axis, str) for axis in listed):
        raise InvalidLine(name, "shared", given, f"some of {', '.join(AXES)}")
    for axis in listed:
        if axis not in AXES:
            raise InvalidLine(name, "shared", axis, f"some of {', '.join(AXES)}", AXES)
    return frozenset(listed)


def _texts(name: str, key: str, given: Any) -> tuple[str, ...]:
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, Sequence) or not listed or not all(isinstance(text, str) and text for text in listed):
        raise InvalidLine(name, key, given, "a name, or a list of names")
    return tuple(listed)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
