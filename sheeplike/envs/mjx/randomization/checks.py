"""What a line may do to a field: refused before anything is compiled."""

import mujoco
import numpy as np

from sheeplike.envs.mjx.randomization.fields import Target
from sheeplike.envs.mjx.randomization.spec import InvalidLine, Line

COUNTED = {
    "geom_matid": lambda scene: scene.nmat,
    "light_type": lambda scene: len(mujoco.mjtLightType.__members__) - 1,  # all but that of images
}
"""Fields of indices that may vary, and how many there are to choose from."""

NOT_NEGATIVE = frozenset(
    {"body_mass", "body_inertia", "geom_size", "geom_friction", "dof_armature", "dof_damping", "dof_frictionloss"}
    | {"opt.density", "opt.viscosity"}
)
POSITIVE = frozenset({"body_mass", "body_inertia", "geom_size"})
"""Where the compiled scene has some of it, there must be some."""

DEVIATIONS = 3.0
"""A normal distribution ends so many deviations from its mean: no draw, however rare, leaves what was checked."""


def check_operation(line: Line, target: Target) -> None:
    path, kind = target.field.path, np.dtype(target.field.nominal.dtype).kind
    if kind != "f" and (line.operation != "set" or line.distribution not in ("choice", "bernoulli")):
        raise InvalidLine(
            line.name, "operation", line.operation, f"set by choice or bernoulli, since {path} is no real number"
        )
    if line.operation == "rotate" and not path.endswith(("quat", "dir", "axis")):
        raise InvalidLine(
            line.name, "field", path, "a quaternion or a direction to rotate, such as cam_quat or light_dir"
        )
    if line.operation == "aim" and path != "light_dir":
        raise InvalidLine(line.name, "field", path, "light_dir to aim at a point", ["light_dir"])
    if line.operation in ("aim", "rotate") and line.component is not None:
        raise InvalidLine(line.name, "component", list(line.component), f"none to {line.operation}")


def check_integers(line: Line, targets: tuple[Target, ...], values: np.ndarray, scene: mujoco.MjModel) -> None:
    """An index that does not exist would be read from memory that is not the scene's."""
    for target in targets:
        path, kind = target.field.path, np.dtype(target.field.nominal.dtype).kind
        if kind not in "iu":
            continue
        if path not in COUNTED:
            raise InvalidLine(line.name, "field", path, f"another field: of indices only {', '.join(COUNTED)} can vary")
        count, least = COUNTED[path](scene), 0
        if path == "light_type" and not (scene.light_type == mujoco.mjtLightType.mjLIGHT_SPOT).any():
            least = 1  # Warp leaves spots out of its kernel where the compiled scene has none
        for value in values.ravel() if line.distribution == "choice" else (0, 1):
            if value != int(value) or not least <= value < count:
                expected = f"whole numbers from {least} to {count - 1} for {path}"
                raise InvalidLine(line.name, f"distribution.{line.distribution}", value, expected)


def lowest(line: Line, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The least number that can be drawn, (C,), from the arrays of the distribution's parameters."""
    if line.distribution == "normal":
        return first - DEVIATIONS * second
    if line.distribution == "choice":
        return first.min(0)
    return np.zeros_like(first) if line.distribution == "bernoulli" else first


def check_signs(line: Line, targets: tuple[Target, ...], least: np.ndarray) -> None:
    """A negative mass, or a body that has lost its mass, makes the physics of its world NaN."""
    for field, rows, components in targets:
        if field.path not in NOT_NEGATIVE:
            continue
        value = np.float32(field.nominal).reshape(1 if field.elements is None else len(field.elements), -1)
        value = value if rows is None else value[rows]
        value = value if components is None else value[:, components]
        new = {"set": least, "add": value + least, "scale": value * least}[line.operation]
        new = np.broadcast_to(new, value.shape)
        wrong = (new < 0) | ((new <= 0) & (value > 0) & (field.path in POSITIVE))
        for row, column in np.argwhere(wrong)[:1]:
            of = "" if rows is None else f" of {field.elements[rows[row]]}"
            bound = "above" if field.path in POSITIVE else "not below"
            given = [list(entry) if isinstance(entry, tuple) else entry for entry in line.parameters]
            expected = f"numbers with which {field.path}{of} stays {bound} 0; it can become {new[row, column]:.4g}"
            raise InvalidLine(line.name, f"distribution.{line.distribution}", given, expected)


def several(value: object) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def number(line: Line, value: float | str, scene: mujoco.MjModel) -> float:
    """A number, or the index of the material of this name."""
    if not isinstance(value, str):
        return value
    names = [scene.material(i).name for i in range(scene.nmat)]
    if "geom_matid" not in line.fields or value not in names:
        expected = f"numbers, or for geom_matid a material: {', '.join(names) or 'this scene has none'}"
        raise InvalidLine(line.name, f"distribution.{line.distribution}", value, expected, names)
    return float(names.index(value))
