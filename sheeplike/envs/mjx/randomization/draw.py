"""Lines of randomization bound to a scene: the draws of one world, and the model that follows from them."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import mjx

from sheeplike.envs.mjx.randomization import constants
from sheeplike.envs.mjx.randomization.fields import KEPT, Field, Target, find, rows
from sheeplike.envs.mjx.randomization.spec import DELAY, PIXELS, Line, Lines, parse

NOT_NEGATIVE = frozenset(
    {"body_mass", "body_inertia", "geom_size", "geom_friction", "dof_armature", "dof_damping", "dof_frictionloss"}
    | {"opt.density", "opt.viscosity"}
)
POSITIVE = frozenset({"body_mass", "body_inertia", "geom_size"})
"""Quantities that must stay above 0 where they are so in the compiled scene."""

DEVIATIONS = 3.0
"""Deviations from the mean at which normal distributions are cut off, so that all draws are within checked limits."""


class Variation(NamedTuple):
    """Differences of one world from the compiled scene; for all worlds, every array has N in front."""

    model: dict[str, jax.Array]  # whole fields of the model by path: `{"geom_rgba": (ngeom, 4), "opt.gravity": (3,)}`
    frames: dict[str, jax.Array]  # factor and offset of each camera's colours, float32 (2, 3); colours are in [0, 1]
    delay: dict[str, jax.Array]  # `{"action.delay": int32 ()}` policy steps, or empty
    drawn: dict[str, jax.Array]
    """Draws, float32 (R, C) by name of line: for R elements, or 1 for all, and C components, or 1 for all."""

    def delay_action(self, action: jax.Array, waiting: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the action that takes effect now, and the waiting ones."""
        if not waiting:
            return action, waiting
        line = jnp.concatenate([action[None], waiting[DELAY]])
        return line[self.delay[DELAY]], {DELAY: line[:-1]}

    def append_to(self, vectors: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Add what one world drew to its vectors: as ``variation``, and at the end of ``privileged_state``."""
        if not self.drawn:
            return dict(vectors)
        drawn = jnp.concatenate([numbers.reshape(-1) for _, numbers in sorted(self.drawn.items())])
        seen = vectors.get("privileged_state", vectors.get("state", jnp.zeros(0)))
        return {**vectors, "variation": drawn, "privileged_state": jnp.concatenate([seen, drawn])}

    def adjust(self, frames: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Change the brightness and colours of one world's frames, uint8 before and after."""
        adjusted = dict(frames)
        for camera, (factor, offset) in self.frames.items():
            if (name := f"pixels/{camera}") in frames:
                colours = frames[name].astype(jnp.float32) * factor + 255.0 * offset
                adjusted[name] = jnp.clip(jnp.round(colours), 0, 255).astype(jnp.uint8)
        return adjusted


NOMINAL = Variation({}, {}, {}, {})  # the compiled scene, in every world


class _Bound(NamedTuple):
    """A line with the parts of fields that it changes, and the shape of its draws."""

    line: Line
    targets: tuple[Target, ...]
    shape: tuple[int, int]
    low: np.ndarray  # the first parameter (C,), or all choices (choices, C)
    high: np.ndarray
    neutral: np.ndarray  # (R, C) float32, a draw that changes nothing

    @property
    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Minimum and maximum of its draws, float32 (C,)."""
        if self.line.kind == "normal":
            reach = np.float32(DEVIATIONS) * self.high
            return self.low - reach, self.low + reach
        if self.line.kind == "choice":
            return self.low.min(0), self.low.max(0)
        return (np.zeros_like(self.low), self.high) if self.line.kind == "bernoulli" else (self.low, self.high)


class Randomization:
    """Draws the variation of a world, anew for each of its episodes, from lines of :mod:`~.spec`.

    With ``randomize=False`` every world is the compiled scene; ``drawn`` keeps its shapes, with neutral values.

    Attributes:
        max_delay: the longest that an action can wait, in policy steps.
        warnings: lines about constants that keep their nominal values.

    Raises:
        InvalidOption: a line does not fit the scene; the text names the valid choices.
    """

    def __init__(
        self,
        lines: Lines,
        scene: mujoco.MjModel,
        model: mjx.Model,
        *,
        cameras: Sequence[str] = (),
        randomize: bool = True,
    ) -> None:
        self._scene, self._cameras, self.randomize = scene, tuple(cameras), randomize
        self._fields: dict[str, Field] = {}
        self.warnings: list[str] = []
        parsed = parse(lines)
        for line in parsed:
            for path in () if {PIXELS, DELAY} & set(line.field) else line.field:
                self._fields[path] = find(line.name, path, scene, model)
        self._start_from_materials(parsed)
        self._lines = tuple(self._bind(line) for line in parsed)
        if found := self._unfit_sign({}):
            line, expected = found
            raise line.invalid("numbers", line.distribution[line.kind], expected)
        delays = [bound for bound in self._lines if randomize and DELAY in bound.line.field]
        self.max_delay = max((int(np.max(bound.high)) for bound in delays), default=0)
        self._inertia = None if constants.INERTIAL.isdisjoint(self._fields) else constants.Inertia(scene)

    def rows(self, *paths: str) -> set[int]:
        """Return the rows of these fields that differ between worlds."""
        targets = [target for bound in self._lines if self.randomize for target in bound.targets]
        return {int(row) for target in targets if target.field.path in paths for row in target.rows}

    def sample(self, key: jax.Array) -> Variation:
        """Return the variation of a new episode, from a typed PRNG key."""
        return self.apply(self.draw(key))

    def draw(self, key: jax.Array) -> dict[str, jax.Array]:
        """Draw float32 (R, C) for each line, independently of the other lines."""
        if not self.randomize:
            return {bound.line.name: jnp.asarray(bound.neutral) for bound in self._lines}
        return {
            bound.line.name: _draw(bound, jax.random.fold_in(key, zlib.crc32(bound.line.name.encode())))
            for bound in self._lines
        }

    def apply(self, drawn: Mapping[str, jax.Array]) -> Variation:
        """Return the variation of these draws; with ``randomize=False`` the model keeps its values."""
        if not self.randomize:
            return NOMINAL._replace(drawn=dict(drawn))
        model = {path: field.nominal for path, field in self._fields.items()}
        frames: dict[str, jax.Array] = {}
        delay: dict[str, jax.Array] = {}
        lights = jnp.asarray(self._scene.light_pos, jnp.float32)
        for bound in self._lines:
            numbers, line = drawn[bound.line.name], bound.line
            if DELAY in line.field:
                delay[DELAY] = jnp.clip(jnp.round(numbers[0, 0]), 0, self.max_delay).astype(jnp.int32)
            elif PIXELS in line.field:
                self._adjust(frames, bound, numbers)
            else:
                for target in bound.targets:
                    path = target.field.path
                    model[path] = _changed(model[path], target, line.operation, numbers, model.get("light_pos", lights))
        if self._inertia is not None:
            model |= self._inertia.constants(model)
        if "geom_size" in model:
            model |= constants.bounds(self._scene, model["geom_size"])
        return Variation(model, frames, delay, dict(drawn))

    def placed(self, model: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Rename fields as ``mjx.Model.tree_replace`` takes them."""
        return {self._fields[path].place if path in self._fields else path: value for path, value in model.items()}

    def _adjust(self, frames: dict[str, jax.Array], bound: _Bound, numbers: jax.Array) -> None:
        components = bound.targets[0].components
        numbers = jnp.broadcast_to(numbers, (len(bound.targets[0].rows), len(components)))
        for index, camera in enumerate(bound.targets[0].rows):
            name = self._cameras[camera]
            before = frames.get(name, jnp.stack([jnp.ones(3), jnp.zeros(3)]))
            if bound.line.operation == "scale":  # scales earlier offsets too
                frames[name] = before.at[:, components].multiply(numbers[index])
            else:
                frames[name] = before.at[1, components].add(numbers[index])

    def check(self, overrides: Mapping[str, np.ndarray]) -> tuple[str, str] | None:
        """Return a line whose values float32 (M, R, C), for M worlds, are invalid, and what it expects; or None."""
        for bound in self._lines:
            name, values = bound.line.name, overrides.get(bound.line.name)
            if values is None:
                continue
            if DELAY in bound.line.field:
                if not ((values == np.round(values)) & (values >= 0) & (values <= self.max_delay)).all():
                    return name, f"whole control steps from 0 to {self.max_delay}"
            elif found := unfit_index(bound.targets, values, self._scene):
                return name, found[1]
        each = zip(*overrides.values(), strict=True)
        for world in {tuple(value.tobytes() for value in values): values for values in each}.values():
            if found := self._unfit_sign(dict(zip(overrides, world, strict=True))):
                return (found[0].name if found[0].name in overrides else next(iter(overrides))), found[1]
        return None

    def _unfit_sign(self, overrides: Mapping[str, np.ndarray]) -> tuple[Line, str] | None:
        """Return the first line after which a field can be negative that must not be, and the expected numbers.

        Some lines take values (R, C) instead of drawing.
        """
        spans: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # minimum and maximum of each number
        for bound in self._lines:
            line = bound.line
            least, most = (overrides[line.name],) * 2 if line.name in overrides else bound.limits
            for target in bound.targets:
                field, at = target.field, target.at
                if field.path not in NOT_NEGATIVE:
                    continue
                nominal = np.float32(field.nominal).reshape(field.shape)
                low, high = spans.setdefault(field.path, (nominal.copy(), nominal.copy()))
                a, b = low[at], high[at]
                low[at], high[at] = {
                    "set": (least, most),
                    "add": (a + least, b + most),
                    "scale": (np.minimum(a * least, b * least), b * most),
                }[line.operation]
                changed = (low != nominal) | (high != nominal)
                wrong = changed & ((low < 0) | ((low == 0) & (nominal > 0) & (field.path in POSITIVE)))
                for row, column in np.argwhere(wrong)[:1]:
                    of = "" if field.elements is None else f" of {field.elements[row]}"
                    sign = "above" if field.path in POSITIVE else "not below"
                    reached = f"it can become {low[row, column]:.4g}"
                    return line, f"numbers with which {field.path}{of} stays {sign} 0; {reached}"
        return None

    def _bind(self, line: Line) -> _Bound:
        if DELAY in line.field:
            targets = ()
            if line.of != ("*",) or line.component is not None:
                raise line.invalid("of", list(line.of), f"nothing, since {DELAY} is the whole world's")
        elif PIXELS in line.field:
            colours = Field(PIXELS, PIXELS, jnp.zeros((len(self._cameras), 3)), self._cameras)
            targets = (self._target(line, colours),)
        else:
            targets = tuple(self._target(line, self._fields[path]) for path in line.field)
        for target in targets:
            check_operation(line, target)
            self._check_scene(line, target)
        return _bound(line, targets, self._scene)

    def _start_from_materials(self, lines: Sequence[Line]) -> None:
        """Start from visible colours: to MuJoCo the grey 0.5 0.5 0.5 1 means "the material's colour"."""
        material = self._scene.geom_matid
        marked = (material >= 0) & (self._scene.geom_rgba == np.float32([0.5, 0.5, 0.5, 1.0])).all(-1)
        if field := self._fields.get("geom_rgba"):
            chosen = [rows(line.name, field, line.of) for line in lines if "geom_rgba" in line.field]
            changed = marked & np.isin(np.arange(self._scene.ngeom), np.concatenate(chosen))
            looks = np.where(changed[:, None], self._scene.mat_rgba[material] if self._scene.nmat else 0, field.nominal)
            self._fields["geom_rgba"] = replace(field, nominal=jnp.asarray(looks, jnp.float32))
            marked &= ~changed
        self._shown = set(material[marked].tolist())
        if any("geom_matid" in line.field for line in lines):
            self._shown = set(range(self._scene.nmat))  # any geom may take any material

    def _target(self, line: Line, field: Field) -> Target:
        components = np.arange(field.shape[1]) if line.component is None else np.array(line.component)
        if components.max() >= field.shape[1]:
            expected = f"indices below {field.shape[1]} for {field.path}"
            raise line.invalid("component", components.tolist(), expected)
        return Target(field, rows(line.name, field, line.of), components)

    def _check_scene(self, line: Line, target: Target) -> None:
        path, names = target.field.path, target.field.elements
        if path in ("geom_pos", "geom_quat", "body_pos", "body_quat"):
            bodies = target.rows if path.startswith("body_") else self._scene.geom_bodyid[target.rows]
            for row in target.rows[self._scene.body_weldid[bodies] == 0][:1]:
                expected = f"something that can move: physics computes {path} of fixed bodies only once"
                raise line.invalid("of", names[row], expected)
        for prefix, modes in (("cam_", self._scene.cam_mode), ("light_", self._scene.light_mode)):
            if path in (f"{prefix}pos", f"{prefix}quat", f"{prefix}dir"):
                for row in [row for row in target.rows if modes[row] != mujoco.mjtCamLight.mjCAMLIGHT_FIXED][:1]:
                    raise line.invalid("of", names[row], f"one that is fixed to its body: {path} of this one follows")
        if path == "mat_rgba" and self._shown.isdisjoint(target.rows.tolist()):
            raise line.invalid("of", list(line.of), "a material whose colour some geom shows")
        if path in KEPT and self.randomize:
            kept = f"{KEPT[path]} keep their nominal values"
            self.warnings.append(f"randomization.{line.name}: {path} changes, but {kept}")


def _bound(line: Line, targets: tuple[Target, ...], scene: mujoco.MjModel) -> _Bound:
    """Bind a line: the shape of its draw, and its parameters as arrays."""
    counts = {len(target.rows) for target in targets} or {1}
    if len(counts) > 1 and not line.shares("elements"):
        raise line.invalid("field", list(line.field), "fields of as many elements each, or shared: elements")
    widths = {len(target.components) for target in targets} or {1}
    one_for_all = line.shares("components") or len(targets) > 1
    r = 1 if line.shares("elements") else max(counts)
    c = 3 if line.operation in ("rotate", "aim") else 1 if one_for_all else max(widths)
    parameters = [entry if isinstance(entry, tuple) else (entry,) for entry in line.parameters]
    width = 1 if line.operation == "rotate" else c
    for entry in parameters:
        if len(entry) not in (1, width):
            expected = "one number" if width == 1 else f"one number, or one for each of {c}"
            raise line.invalid("numbers", entry, expected)
    low, high = (np.broadcast_to(np.float32(parameters[i]), (width,)) for i in (0, -1))
    if line.kind == "choice":
        low = high = np.stack([np.broadcast_to(np.float32(entry), (width,)) for entry in parameters])
    elif line.kind == "bernoulli":
        high = np.ones_like(low)
    if found := unfit_index(targets, low if line.kind == "choice" else np.float32([0, 1]), scene):
        raise line.invalid("numbers", *found)
    return _Bound(line, targets, (r, c), low, high, _neutral(line, targets, (r, c)))


def _neutral(line: Line, targets: tuple[Target, ...], shape: tuple[int, int]) -> np.ndarray:
    if line.operation in ("add", "rotate", "aim") or not targets:
        return np.zeros(shape, np.float32)
    if line.operation == "scale":
        return np.ones(shape, np.float32)
    value = np.float32(targets[0].field.nominal).reshape(targets[0].field.shape)[targets[0].at]
    for axis in (0, 1):
        value = value.mean(axis, keepdims=True) if shape[axis] == 1 else value
    return value


def _draw(bound: _Bound, key: jax.Array) -> jax.Array:
    """Draw float32 (R, C)."""
    r, c = bound.shape
    c = 1 if bound.line.operation == "rotate" else c
    first, second = jax.random.split(key)
    kind, low, high = bound.line.kind, bound.low, bound.high
    if kind == "uniform":
        drawn = jax.random.uniform(first, (r, c), minval=low, maxval=high)
    elif kind == "log_uniform":
        drawn = jnp.exp(jax.random.uniform(first, (r, c), minval=np.log(low), maxval=np.log(high)))
    elif kind == "normal":
        drawn = low + high * jax.random.truncated_normal(first, -DEVIATIONS, DEVIATIONS, (r, c))
    elif kind == "bernoulli":
        drawn = (jax.random.uniform(first, (r, c)) < low).astype(jnp.float32)
    else:  # a choice is one of whole rows, so that a colour stays one of the palette
        rowwise = all(isinstance(entry, tuple) for entry in bound.line.parameters)
        index = jax.random.randint(first, (r, 1 if rowwise else c), 0, len(low))
        drawn = jnp.asarray(low)[index[:, 0]] if rowwise else jnp.asarray(low)[index, 0]
    if bound.line.operation == "rotate":
        axis = jax.random.normal(second, (r, 3))
        drawn = drawn * axis / jnp.linalg.norm(axis, axis=-1, keepdims=True)
    return drawn.astype(jnp.float32)


def _changed(value: jax.Array, target: Target, operation: str, numbers: jax.Array, lights: jax.Array) -> jax.Array:
    """Return the field of a target after a line; ``lights`` (nlight, 3) are their positions."""
    whole = value.reshape(target.field.shape)
    if operation == "rotate":
        part = _rotated(whole[target.rows], jnp.broadcast_to(jnp.deg2rad(numbers), (len(target.rows), 3)))
    elif operation == "aim":
        towards = numbers - lights[target.rows]
        part = towards / jnp.maximum(jnp.linalg.norm(towards, axis=-1, keepdims=True), 1e-6)
    else:
        old = whole[target.at]
        part = {"set": numbers, "add": old + numbers, "scale": old * numbers}[operation]
        part = jnp.broadcast_to(part, old.shape).astype(value.dtype)
    return whole.at[target.at].set(part).reshape(value.shape)


def _rotated(value: jax.Array, rotation: jax.Array) -> jax.Array:
    """Rotate quaternions (R, 4) or directions (R, 3) by rotation vectors (R, 3) in radians."""
    angle = jnp.linalg.norm(rotation, axis=-1, keepdims=True)
    axis = rotation / jnp.maximum(angle, 1e-9)
    if value.shape[-1] == 3:
        along = (axis * value).sum(-1, keepdims=True)
        return value * jnp.cos(angle) + jnp.cross(axis, value) * jnp.sin(angle) + axis * along * (1 - jnp.cos(angle))
    w, v = jnp.cos(angle / 2), axis * jnp.sin(angle / 2)
    scalar, vector = value[:, :1], value[:, 1:]
    return jnp.concatenate(
        [w * scalar - (v * vector).sum(-1, keepdims=True), w * vector + scalar * v + jnp.cross(v, vector)], axis=-1
    )


# --- checks of lines against the fields of a scene, before anything is compiled or drawn ------------------------------


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
