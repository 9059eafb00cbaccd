"""Values that a program gives to worlds, as arguments of the compiled step.

Options of ``reset`` are values that chosen worlds take instead of drawing them. Settings are numbers of a task that may
change while it runs, one per world, such as the difficulty of a curriculum.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from sheeplike.envs.mjx.randomization.draw import Randomization, Variation
from sheeplike.envs.mjx.task import Memory
from sheeplike.options import one_of

OPTIONS = ("variation", "memory", "worlds")

Choices = dict[str, tuple[jax.Array, jax.Array]]
"""By name, a mask (N,) bool of the worlds that take a value, and the values (N, ...)."""


class Overrides(NamedTuple):
    """Values that worlds take when an episode begins, instead of drawing them."""

    drawn: Choices  # draws of lines, (N, R, C)
    memory: Choices  # fields of the task's memory, as the reset leaves it


NO_OVERRIDES = Overrides({}, {})


def parse_options(
    options: Mapping[str, Any],
    randomization: Randomization,
    variation: Variation,
    memory: Memory,
    *,
    num_envs: int,
    device: jax.Device,
) -> Overrides:
    """Check the options of a reset against what the worlds have.

    Args:
        options: ``variation``: values by name of line; ``memory``: values by name of field of the task's memory, within
            dictionaries as ``info.target``; ``worlds``: indices of the worlds that take them, or (N,) bool; by default
            all. A value is one for all these worlds, or one for each in their order.
        variation, memory: those of all worlds, for their shapes.
    """
    for option in options:
        if option not in OPTIONS:
            raise ValueError(f"options[{option!r}]: expected {one_of(option, OPTIONS)}")
    chosen = _indices(options.get("worlds"), num_envs)
    varied = variation.drawn if randomization.randomize else {}
    drawn = _choices(options, "variation", varied, chosen, "none, as these worlds are not randomized")
    if wrong := randomization.check({name: values[mask] for name, (mask, values) in drawn.items()}):
        name, expected = wrong
        raise ValueError(f"options['variation'][{name!r}]={options['variation'][name]!r}: expected {expected}")
    fields = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(memory)}
    replaced = _choices(options, "memory", fields, chosen, "none, as this task remembers nothing")
    return Overrides(*jax.device_put((drawn, replaced), device))


def replace_fields(memory: Memory, choices: Choices) -> Memory:
    """Replace the chosen fields of the memory of one world."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.where(*choices[_name(path)], leaf) if _name(path) in choices else leaf, memory
    )


def _name(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _indices(given: Any, num_envs: int) -> np.ndarray:
    """Return indices of worlds, ascending where they were given as a mask."""
    if given is None:
        return np.arange(num_envs)
    listed = _array(given)
    if listed.dtype == bool and listed.shape == (num_envs,):
        return np.flatnonzero(listed)
    different = listed.dtype.kind in "iu" and listed.ndim == 1 and listed.size == len(set(listed.tolist()))
    if different and ((listed >= 0) & (listed < num_envs)).all():
        return listed
    raise ValueError(f"options['worlds']={given!r}: expected different indices below {num_envs}, or ({num_envs},) bool")


def _array(given: Any) -> np.ndarray:
    return given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)


def _choices(
    options: Mapping[str, Any], section: str, known: Mapping[str, jax.Array], chosen: np.ndarray, none: str
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return by name masks (N,) of the worlds that take a value, and values (N, ...) in the shape of ``known``."""
    found = {}
    given = options.get(section, {})
    if not isinstance(given, Mapping):
        raise ValueError(f"options[{section!r}]={given!r}: expected names and values, such as {{'name': 1.0}}")
    for name, value in given.items():
        place = f"options[{section!r}][{name!r}]"
        if name not in known:
            raise ValueError(f"{place}: expected {one_of(name, known) if known else none}")
        like, array = known[name], _array(value)
        one, each = like.shape[1:], (len(chosen), *like.shape[1:])
        # Axes of length 1 may be left out: for 8 worlds, a line of one number takes (8,) as well as (8, 1, 1).
        forms = [form for form in ((), one, each) if _long(form) == _long(array.shape)]
        if array.dtype.kind not in "biuf" or not forms:
            expected = f"{like.dtype} {one}, or {each} with one for each world"
            raise ValueError(f"{place} is {array.dtype} {array.shape}: expected {expected}")
        mask, values = np.zeros(like.shape[0], bool), np.zeros(like.shape, like.dtype)
        mask[chosen], values[chosen] = True, array.reshape(forms[0]).astype(like.dtype)
        if not np.isfinite(values).all():
            raise ValueError(f"{place} has a value that is not finite: expected finite numbers")
        found[name] = mask, values
    return found


def _long(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(length for length in shape if length != 1)


# --- settings ---------------------------------------------------------------------------------------------------------

Values = float | Sequence[float] | np.ndarray | torch.Tensor
"""One number for all worlds, or (N,) numbers, one per world; on the host."""


class Settings:
    """Settings of all worlds: a copy on the host that changes, and ``on_device`` float32 (N,) for the simulator."""

    def __init__(self, defaults: Mapping[str, float], *, num_envs: int, device: jax.Device) -> None:
        self.num_envs, self._device = num_envs, device
        self._on_host: dict[str, np.ndarray] = {name: np.zeros(num_envs, np.float32) for name in defaults}
        self.on_device: dict[str, jax.Array] = {}
        self.write(defaults)

    def write(self, values: Mapping[str, Values]) -> None:
        """Change the named settings, or none of them if a value is not valid."""
        written = {name: self._checked(name, value) for name, value in values.items()}
        self._on_host |= written
        # `_checked` returns new arrays: on a CPU the device may read the host's memory. They are committed to the
        # device, like all arguments of a step.
        self.on_device |= {name: jax.device_put(value, self._device) for name, value in written.items()}

    def read(self) -> dict[str, torch.Tensor]:
        """Return copies: float32 (N,) CPU tensors by name."""
        return {name: torch.from_numpy(value.copy()) for name, value in self._on_host.items()}

    def check_name(self, name: str) -> str:
        """Return the name; raise ``ValueError`` if there is no such setting."""
        if name not in self._on_host:
            known = one_of(name, sorted(self._on_host)) if self._on_host else "none, as this task has no settings"
            raise ValueError(f"there is no setting {name!r}: expected {known}")
        return name

    def _checked(self, name: str, values: Values) -> np.ndarray:
        self.check_name(name)
        given = np.asarray(values)
        if given.dtype.kind not in "iuf" or given.shape not in ((), (self.num_envs,)):
            expected = f"expected one number or {self.num_envs} of them on the host, one per world"
            raise ValueError(f"{name}: got {given.dtype} {given.shape}: {expected}")
        checked = np.array(np.broadcast_to(_float32(given), (self.num_envs,)))
        for world in np.flatnonzero(~np.isfinite(checked))[:1]:
            raise ValueError(f"{name}={checked[world]} in world {world}: expected a finite number")
        return checked


def _float32(values: object) -> np.ndarray:
    with np.errstate(over="ignore"):  # a number that is too large becomes infinite, and is refused
        return np.asarray(values).astype(np.float32)
