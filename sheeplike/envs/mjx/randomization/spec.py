"""Lines of randomization as users write them: named mappings, read here without JAX or MuJoCo.

    box_colour:
      field: geom_rgba                        or several that share a draw, such as [body_mass, body_inertia]
      of: box                                 names or patterns of what has the field; "!name" leaves one out
      component: [0, 1, 2]                    along the field's last axis; all of them if left out
      operation: set                          set, add, scale, rotate, aim
      distribution: {uniform: [0.5, 1.0]}     or log_uniform, normal, choice, bernoulli
      shared: elements                        one draw for all elements, for all components, or for both

Lines take effect in their order, so that a line can scale values that an earlier one has set.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from sheeplike.options import InvalidOption, Options, build, nearest

DISTRIBUTIONS = {
    "uniform": "[low, high]",
    "log_uniform": "[low, high], both above 0",
    "normal": "[mean, deviation]",
    "choice": "a list of values, or of lists with one value per component",
    "bernoulli": "the probability of 1, which is otherwise 0",
}

PIXELS = "pixels"  # pseudo-field: a camera's frames, values in [0, 1]; `scale` is brightness, `add` an offset
DELAY = "action.delay"  # pseudo-field: policy steps before an action takes effect

Numbers = float | tuple[float, ...]
Lines = Mapping[str, Mapping[str, Any]]


class LineConfig(Options):
    """A line as users write it; see the module's docstring."""

    field: tuple[str, ...] = Field(min_length=1)
    of: tuple[str, ...] = Field(("*",), min_length=1)
    component: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, min_length=1)
    operation: Literal["set", "add", "scale", "rotate", "aim"]
    distribution: Any
    shared: tuple[Literal["elements", "components"], ...] | None = None


class Line(LineConfig):
    """A line whose distribution is parsed: ``kind`` is one of ``DISTRIBUTIONS``; a choice has a parameter per value."""

    name: str
    kind: str
    parameters: Any

    def shares(self, axis: str) -> bool:
        """Return True if all ``elements``, or all ``components``, share one draw."""
        return axis in (self.shared or ())

    def invalid(self, key: str, value: Any, expected: str, choices: Iterable[str] = ()) -> InvalidOption:
        """Return the error for a key of this line; ``key="numbers"`` means those of its distribution."""
        return invalid(self.name, f"distribution.{self.kind}" if key == "numbers" else key, value, expected, choices)


def invalid(name: str, key: str, value: Any, expected: str, choices: Iterable[str] = ()) -> InvalidOption:
    """Return the error for a key of the line ``name``, with the nearest of ``choices``."""
    return InvalidOption(".".join(filter(None, ("randomization", name, key))), value, expected, nearest(value, choices))


def parse(lines: Lines) -> tuple[Line, ...]:
    """Parse lines; raise ``InvalidOption``, with the whole path, for errors that show without the scene."""
    if not isinstance(lines, Mapping):
        raise invalid("", "", lines, "named lines, such as {box_colour: {field: geom_rgba, ...}}")
    # A line without field and operation was meant to change a recipe's line, whose name is misspelt.
    known = [str(name) for name, line in lines.items() if isinstance(line, Mapping) and "field" in line]
    for name, line in lines.items():
        if isinstance(line, Mapping) and known and not {"field", "operation"} & line.keys():
            raise invalid("", "", name, f"one of the lines {', '.join(known)}, or a field for this one", known)
    return tuple(_line(str(name), line) for name, line in lines.items())


def _line(name: str, line: Any) -> Line:
    if not isinstance(line, Mapping):
        raise invalid(name, "", line, f"a section with {', '.join(LineConfig.model_fields)}")
    if "/" in name or "." in name or not name:
        raise invalid(name, "", dict(line), "a name without dots and slashes")
    written = build(LineConfig, line, f"randomization.{name}.")
    kind, parameters = _distribution(name, written.distribution)
    if written.component and len(set(written.component)) != len(written.component):
        raise invalid(name, "component", list(written.component), "each index once")
    for path, operations in ((DELAY, ("set",)), (PIXELS, ("scale", "add"))):
        if path in written.field and (len(written.field) > 1 or written.operation not in operations):
            expected = f"{' or '.join(operations)}, and no other field, for {path}"
            raise invalid(name, "operation", written.operation, expected)
    if DELAY in written.field:
        whole = all(_is_number(value) and value == int(value) >= 0 for value in parameters)
        if kind != "bernoulli" and not (kind == "choice" and whole):
            expected = f"whole policy steps for {DELAY}, such as {{choice: [0, 1, 2]}}"
            raise invalid(name, "distribution", dict(written.distribution), expected)
    return Line(**dict(written), name=name, kind=kind, parameters=parameters)


def _distribution(name: str, given: Any) -> tuple[str, tuple[Numbers, ...]]:
    if not isinstance(given, Mapping) or len(given) != 1:
        raise invalid(name, "distribution", given, "one distribution with its numbers, such as {uniform: [0, 1]}")
    ((kind, numbers),) = given.items()
    if kind not in DISTRIBUTIONS:
        raise invalid(name, "distribution", kind, f"one of {', '.join(DISTRIBUTIONS)}", DISTRIBUTIONS)
    key, expected = f"distribution.{kind}", DISTRIBUTIONS[kind]
    if kind == "bernoulli":
        if not _is_number(numbers) or not 0 <= numbers <= 1:
            raise invalid(name, key, numbers, f"{expected}: a number in [0, 1]")
        return kind, (float(numbers),)
    if not isinstance(numbers, Sequence) or isinstance(numbers, str) or not numbers:
        raise invalid(name, key, numbers, expected)
    parameters = tuple(_numbers(name, key, value, expected, choice=kind == "choice") for value in numbers)
    if kind != "choice" and len(parameters) != 2:
        raise invalid(name, key, numbers, expected)
    widths = {len(value) if isinstance(value, tuple) else 0 for value in parameters}
    if len(widths if kind == "choice" else widths - {0}) > 1:
        raise invalid(name, key, numbers, f"{expected}, of one length")
    if kind == "choice":
        return kind, parameters
    low, high = (value if isinstance(value, tuple) else [value] * max(1, *widths) for value in parameters)
    for a, b in zip(low, high, strict=True):
        if (kind == "normal" and b < 0) or (kind != "normal" and a > b) or (kind == "log_uniform" and a <= 0):
            raise invalid(name, key, numbers, f"{expected}, in ascending order" if kind != "normal" else expected)
    return kind, parameters


def _numbers(name: str, key: str, value: Any, expected: str, *, choice: bool) -> Numbers:
    """Return a number, or several as a tuple; a choice may also have a truth value as a number."""
    if _is_number(value) or (choice and isinstance(value, bool)):
        return float(value)
    if isinstance(value, Sequence) and not isinstance(value, str) and value and all(map(_is_number, value)):
        return tuple(float(number) for number in value)
    raise invalid(name, key, value, expected)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30  # as float32 too
