"""Fields of a compiled model that may differ between worlds, and the names of their elements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import jax
import mujoco
import numpy as np
from mujoco import mjx
from mujoco.mjx.warp.types import _BATCH_DIM

from sheeplike.envs.mjx.randomization.spec import DELAY, PIXELS, invalid

BATCHABLE = frozenset(
    [name for name, batched in _BATCH_DIM["Model"].items() if batched and "__" not in name]
    + [f"opt.{name}" for name, batched in _BATCH_DIM["Option"].items() if batched]
)
"""Fields that Warp reads for each world separately."""

_CONSTANTS = {
    "body_mass": ("body_subtreemass", "body_invweight0", "dof_invweight0", "tendon_invweight0", "actuator_acc0"),
    "geom_size": ("geom_rbound", "geom_aabb"),
    "cam_quat": ("cam_mat0",),
    "cam_pos": ("cam_pos0", "cam_poscom0"),
    "light_dir": ("light_dir0",),
    "light_pos": ("light_pos0", "light_poscom0"),
}
DERIVED = {constant: field for field, constants in _CONSTANTS.items() for constant in constants}
"""Constants that MuJoCo derives when it compiles a scene, and the field to vary instead."""

OFFERED = BATCHABLE - {"geom_dataid", "mat_texid", "actuator_history", "actuator_historyadr", "sensor_history"}
OFFERED -= DERIVED.keys() | {"sensor_historyadr"}
"""Fields that lines may change: without buffers, and without indices except materials and kinds of light."""

LEFT_OUT: Mapping[str, Callable[[mujoco.MjModel], bool]] = {
    **dict.fromkeys(
        ("opt.wind", "opt.density", "opt.viscosity"),
        lambda scene: scene.opt.wind.any() or scene.opt.density > 0 or scene.opt.viscosity > 0,
    ),
    **dict.fromkeys(("geom_adhesion", "pair_adhesion"), lambda scene: bool(scene.flg_adhesion)),
}
"""Fields that Warp reads only if the compiled scene uses them."""

_WEIGHTS = "body_invweight0, dof_invweight0, tendon_invweight0, actuator_acc0"
KEPT = {
    **dict.fromkeys(("body_ipos", "body_iquat"), _WEIGHTS),
    **dict.fromkeys(("body_pos", "body_quat", "jnt_pos", "jnt_axis"), f"body_subtreemass, {_WEIGHTS}, tendon_length0"),
    "qpos0": f"body_subtreemass, {_WEIGHTS}, qpos_spring, tendon_length0",
    "site_pos": "tendon_length0, tendon_invweight0",
    "tendon_armature": "dof_invweight0, tendon_invweight0",
    "actuator_gear": "actuator_acc0, actuator_lengthrange",
}
"""Fields that may change, and the constants that would follow from them but keep their nominal values."""

_KINDS = {
    **{"jnt": "JOINT", "cam": "CAMERA", "mat": "MATERIAL", "eq": "EQUALITY"},
    **{name: name.upper() for name in ("geom", "body", "light", "site", "actuator", "tendon", "pair", "sensor")},
}
"""Prefixes of fields' names, and MuJoCo's kind of object."""


@dataclass(frozen=True)
class Field:
    """A field of the model: ``path`` as a user writes it, ``place`` as ``mjx.Model.tree_replace`` takes it.

    ``elements`` names the owner of each row; it is None for a field of the whole scene.
    """

    path: str
    place: str
    nominal: jax.Array
    elements: tuple[str, ...] | None

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of elements and components, at least one each: the shape for indexing parts of the field."""
        rows = 1 if self.elements is None else len(self.elements)
        return rows, self.nominal.shape[-1] if self.nominal.ndim > (self.elements is not None) else 1


class Target(NamedTuple):
    """Part of a field that a line changes: rows and components by index."""

    field: Field
    rows: np.ndarray
    components: np.ndarray

    @property
    def at(self) -> tuple[np.ndarray, ...]:
        """Index of the part in the field, reshaped."""
        return np.ix_(self.rows, self.components)


def find(line: str, path: str, scene: mujoco.MjModel, model: mjx.Model) -> Field:
    """Return the field at ``path``; errors name the ``line`` that asks for it."""
    if path in DERIVED:
        raise invalid(line, "field", path, f"{DERIVED[path]}, from which it follows", [DERIVED[path]])
    if path not in OFFERED:
        expected = f"a field that may differ between worlds: {', '.join(sorted(OFFERED))}"
        raise invalid(line, "field", path, f"{expected}, {PIXELS}, {DELAY}", [*OFFERED, PIXELS, DELAY])
    if path in LEFT_OUT and not LEFT_OUT[path](scene):
        expected = f"a field that physics reads: it skips {path}, which is 0 in the scene; give the scene a small value"
        raise invalid(line, "field", path, expected)
    owner, _, name = path.rpartition(".")
    holder, prefix = (model.opt, "opt.") if owner else (model, "")
    nominal = leaf(holder, name)
    place = path if _is_mjx(holder, name) else f"{prefix}_impl.{name}"
    elements = None if owner else tuple(_labels(name, scene))
    if elements is not None and nominal.ndim > 2:
        raise invalid(line, "field", path, "a field of numbers or vectors")
    return Field(path, place, nominal, elements)


def leaf(holder: mjx.Model | mjx.Option | mjx.Data, name: str) -> jax.Array:
    """Return a field of MJX's own, or of those that Warp has added in ``_impl``."""
    return getattr(holder if _is_mjx(holder, name) else holder._impl, name)


def rows(line: str, field: Field, patterns: Sequence[str]) -> np.ndarray:
    """Return the indices of the elements that match the patterns; 0 for a field of the whole scene."""
    if field.elements is None:
        if tuple(patterns) != ("*",):
            raise invalid(line, "of", list(patterns), f"nothing, since {field.path} is the whole scene's")
        return np.zeros(1, np.int32)
    known = list(dict.fromkeys(field.elements))
    chosen: set[str] = set()
    if all(pattern.startswith("!") for pattern in patterns):
        chosen.update(known)
    for pattern in patterns:
        found = {name for name in known if fnmatchcase(name, pattern.removeprefix("!"))}
        if not found:
            listed = ", ".join(known) or "none, as this scene has none"
            raise invalid(line, "of", pattern, f"names or patterns of {listed}", known)
        chosen = chosen - found if pattern.startswith("!") else chosen | found
    if not chosen:
        raise invalid(line, "of", list(patterns), f"patterns that leave at least one of {', '.join(known)}")
    return np.array([index for index, name in enumerate(field.elements) if name in chosen], np.int32)


def _is_mjx(holder: mjx.Model | mjx.Option | mjx.Data, name: str) -> bool:
    return name in {field.name for field in type(holder).fields()}


def _labels(name: str, scene: mujoco.MjModel) -> list[str]:
    """Name the element of each row; without a name, ``<body>/<index among that body's unnamed ones>``."""
    prefix = name.partition("_")[0]
    objects = "jnt" if prefix in ("dof", "qpos", "qpos0") else prefix
    kind = getattr(mujoco.mjtObj, f"mjOBJ_{_KINDS[objects]}")
    labels, unnamed = [], {}
    for index in range(scene.nu if objects == "actuator" else getattr(scene, f"n{objects}")):
        label = mujoco.mj_id2name(scene, kind, index)
        if not label:
            on_body = objects in ("geom", "jnt", "cam", "light", "site")
            body = scene.body(int(getattr(scene, f"{objects}_bodyid")[index])).name if on_body else ""
            label = f"{body or objects}/{unnamed.setdefault(body, 0)}"
            unnamed[body] += 1
        labels.append(label)
    if prefix == "dof":
        return [labels[joint] for joint in scene.dof_jntid]
    if prefix in ("qpos", "qpos0"):
        widths = np.diff([*scene.jnt_qposadr, scene.nq])
        return [label for label, width in zip(labels, widths, strict=True) for _ in range(width)]
    return labels
