"""What ``reset(options=...)`` takes: values for chosen worlds in place of those that they would draw."""

import dataclasses
from collections.abc import Mapping
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
"""By name: which worlds take a value, (N,) bool, and the values, (N, ...)."""


class Overrides(NamedTuple):
    """What worlds that begin an episode take instead of what they would draw."""

    drawn: Choices
    """Draws of lines, (N, R, C)."""
    memory: Choices
    """Fields of the task's memory, as the reset leaves it."""


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
    """Checks the options of a reset against what the worlds have.

    Args:
        options: ``variation``: values by name of line; ``memory``: values by name of field of the task's memory, of
            dictionaries within it as ``info.target``; ``worlds``: indices of the worlds that take them, or (N,) bool;
            all if left out. A value is one for all these worlds, or one for each, in their order.
        randomization: of the simulator.
        variation, memory: of all worlds, whose shapes tell what fits.
        device: where the overrides are put.

    Raises:
        ValueError: an unknown name, a value of a wrong shape or one that its line could not draw at all, or worlds
            that do not exist.
    """
    for option in options:
        if option not in OPTIONS:
            raise ValueError(f"options[{option!r}]: expected {one_of(option, OPTIONS)}")
    chosen = _indices(options.get("worlds"), num_envs)
    drawn, remembered = {}, {}
    for name, value in _section(options, "variation").items():
        place = f"options['variation'][{name!r}]"
        if not randomization.randomize:
            raise ValueError(f"{place}: expected none, as these worlds are not randomized")
        if name not in variation.drawn:
            known = one_of(name, variation.drawn) if variation.drawn else "none, as nothing varies here"
            raise ValueError(f"{place}: expected {known}")
        drawn[name] = _choice(place, value, variation.drawn[name], chosen)
    if wrong := randomization.check({name: values[mask] for name, (mask, values) in drawn.items()}):
        name, expected = wrong
        raise ValueError(f"options['variation'][{name!r}]={options['variation'][name]!r}: expected {expected}")
    known = {name: leaf for name, leaf in memory_fields(memory).items() if isinstance(leaf, jax.Array)}
    for name, value in _section(options, "memory").items():
        place = f"options['memory'][{name!r}]"
        if name not in known:
            expected = one_of(name, known) if known else "none, as this task remembers nothing"
            raise ValueError(f"{place}: expected {expected}")
        remembered[name] = _choice(place, value, known[name], chosen)
    return Overrides(*jax.device_put((drawn, remembered), device))


def replace_fields(memory: Memory, choices: Choices) -> Memory:
    """The memory of one world, its chosen fields replaced; see :func:`memory_fields` for their names."""
    for path, choice in choices.items():
        memory = _with(memory, path.split("."), choice)
    return memory


def memory_fields(memory: Memory) -> dict[str, Any]:
    """The fields of a task's memory by name: of a dict, a NamedTuple or a dataclass; ``name.key`` of dicts in it."""
    found = {}
    for name, value in _fields(memory).items():
        inner = memory_fields(value) if isinstance(value, dict) else {}
        found |= {f"{name}.{key}": leaf for key, leaf in inner.items()} if inner else {name: value}
    return found


def _fields(memory: Memory) -> dict[str, Any]:
    if isinstance(memory, dict):
        return memory
    if isinstance(memory, tuple):
        return memory._asdict() if hasattr(memory, "_asdict") else {}
    return {f.name: getattr(memory, f.name) for f in dataclasses.fields(memory)}


def _with(memory: Memory, path: list[str], choice: tuple[jax.Array, jax.Array]) -> Memory:
    name, *rest = path
    old = _fields(memory)[name]
    new = {name: _with(old, rest, choice) if rest else jnp.where(*choice, old)}
    if isinstance(memory, dict):
        return memory | new
    return memory._replace(**new) if isinstance(memory, tuple) else dataclasses.replace(memory, **new)


def _section(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = options.get(name, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"options[{name!r}]={section!r}: expected names and values, such as {{'name': 1.0}}")
    return section


def _indices(given: Any, num_envs: int) -> np.ndarray:
    """Indices of worlds, ascending where they were given as a mask."""
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


def _choice(place: str, value: Any, like: jax.Array, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which worlds take a value (N,), and the value of every world, with the shape and dtype of ``like``."""
    given = _array(value)
    shape = like.shape[1:]
    # Axes of length 1 may be left out: of 8 worlds, a line of one number takes (8,) as well as (8, 1, 1).
    long = tuple(length for length in shape if length != 1)
    given_long = tuple(length for length in given.shape if length != 1)
    per_world = (len(chosen), *long) if len(chosen) != 1 else long
    if given.dtype.kind in "biuf" and given_long in ((), long):
        each = np.broadcast_to(given.reshape(()) if given.size == 1 else given.reshape(shape), (len(chosen), *shape))
    elif given.dtype.kind in "biuf" and given_long == per_world:
        each = given.reshape(len(chosen), *shape)
    else:
        raise ValueError(
            f"{place} is {given.dtype} {given.shape}: expected {like.dtype} {shape}, "
            f"or {(len(chosen), *shape)} with one for each world"
        )
    each = each.astype(like.dtype)
    if each.dtype.kind == "f" and not np.isfinite(each).all():
        raise ValueError(f"{place} has a value that is not finite: expected finite numbers")
    mask, values = np.zeros(like.shape[0], bool), np.zeros(like.shape, like.dtype)
    mask[chosen], values[chosen] = True, each
    return mask, values
