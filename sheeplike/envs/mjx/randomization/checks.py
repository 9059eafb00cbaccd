"""Checks of lines against the fields of a scene, before anything is compiled or drawn."""

from collections.abc import Sequence

import mujoco
import numpy as np

from sheeplike.envs.mjx.randomization.fields import Field, Target
from sheeplike.envs.mjx.randomization.spec import Line

NOT_NEGATIVE = frozenset(
    {"body_mass", "body_inertia", "geom_size", "geom_friction", "dof_armature", "dof_damping", "dof_frictionloss"}
    | {"opt.density", "opt.viscosity"}
)
POSITIVE = frozenset({"body_mass", "body_inertia", "geom_size"})
"""Quantities that must stay above 0 where they are so in the compiled scene."""

DEVIATIONS = 3.0
"""Deviations from the mean at which normal distributions are cut off, so that all draws are within checked limits."""

# A line, its targets, and minimum and maximum of its draws, float32 and broadcastable to (R, C).
Reach = tuple[Line, tuple[Target, ...], np.ndarray, np.ndarray]


def check_operation(line: Line, target: Target) -> None:
    """Refuse an operation that has no meaning for the field."""
    path, kind = target.field.path, np.dtype(target.field.nominal.dtype).kind
    if kind != "f" and (line.operation != "set" or line.kind not in ("choice", "bernoulli")):
        raise line.invalid("operation", line.operation, f"set by choice or bernoulli, since {path} is no real number")
    if line.operation == "rotate" and not path.endswith(("quat", "dir", "axis")):
        raise line.invalid("field", path, "a quaternion or a direction to rotate, such as cam_quat or light_dir")
    if line.operation == "aim" and path != "light_dir":
        raise line.invalid("field", path, "light_dir to aim at a point", ["light_dir"])
    if line.operation in ("aim", "rotate") and line.component is not None:
        raise line.invalid("component", list(line.component), f"none to {line.operation}")


def extent(distribution: str, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return minimum and maximum of a distribution, float32 (C,), from its parameters (C,) or (choices, C)."""
    if distribution == "normal":
        return first - np.float32(DEVIATIONS) * second, first + np.float32(DEVIATIONS) * second
    if distribution == "choice":
        return first.min(0), first.max(0)
    return (np.zeros_like(first), np.ones_like(first)) if distribution == "bernoulli" else (first, second)


def unfit_index(targets: Sequence[Target], values: np.ndarray, scene: mujoco.MjModel) -> tuple[float, str] | None:
    """Return the first value that is no valid index, and the valid ones: Warp would read beyond its arrays."""
    for target in targets:
        path = target.field.path
        if np.dtype(target.field.nominal.dtype).kind not in "iu":
            continue
        least, count = 0, scene.nmat
        if path == "light_type":
            count = len(mujoco.mjtLightType.__members__) - 1  # all but that of images
            if not (scene.light_type == mujoco.mjtLightType.mjLIGHT_SPOT).any():
                least = 1  # Warp leaves spots out of its kernel where the compiled scene has none
        for value in values.ravel():
            if value != int(value) or not least <= value < count:
                return float(value), f"whole numbers from {least} to {count - 1} for {path}"
    return None


def unfit_sign(reaches: Sequence[Reach]) -> tuple[Line, str] | None:
    """Return the first line after which a field can be negative that must not be, and the expected numbers."""
    spans: dict[str, tuple[Field, np.ndarray, np.ndarray, np.ndarray]] = {}
    for index, (line, targets, least, most) in enumerate(reaches):
        for target in targets:
            field, at = target.field, target.at
            if field.path not in NOT_NEGATIVE:
                continue
            if field.path not in spans:
                value = np.float32(field.nominal).reshape(field.shape)
                spans[field.path] = field, value.copy(), value.copy(), np.full(value.shape, -1)
            _, low, high, by = spans[field.path]
            a, b = low[at], high[at]
            if line.operation == "scale":
                corners = a * least, a * most, b * least, b * most
            else:
                corners = (a + least, b + most) if line.operation == "add" else (least, most)
            corners = np.stack(np.broadcast_arrays(*corners, a)[:-1])
            low[at], high[at], by[at] = corners.min(0), corners.max(0), index
    for path, (field, low, _, by) in spans.items():
        nominal = np.float32(field.nominal).reshape(low.shape)
        wrong = (by >= 0) & ((low < 0) | ((low <= 0) & (nominal > 0) & (path in POSITIVE)))
        for row, column in np.argwhere(wrong)[:1]:
            of = "" if field.elements is None else f" of {field.elements[row]}"
            bound = "above" if path in POSITIVE else "not below"
            expected = f"numbers with which {path}{of} stays {bound} 0; it can become {low[row, column]:.4g}"
            return reaches[by[row, column]][0], expected
    return None


def number(line: Line, value: float | str, scene: mujoco.MjModel) -> float:
    """Return a number, or the index of the material of this name."""
    if not isinstance(value, str):
        return value
    names = [scene.material(i).name for i in range(scene.nmat)]
    if "geom_matid" not in line.field or value not in names:
        expected = f"numbers, or for geom_matid a material: {', '.join(names) or 'this scene has none'}"
        raise line.invalid("numbers", value, expected, names)
    return float(names.index(value))
