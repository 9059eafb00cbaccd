"""What ``reset(options=...)`` takes: a variation and task values of one's own, for chosen worlds."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from sheeplike.envs.mjx.forced import Forced, memory_fields
from sheeplike.envs.mjx.randomization.draw import Variation
from sheeplike.envs.mjx.simulator import Simulator
from sheeplike.envs.mjx.state import State
from sheeplike.names import one_of

OPTIONS = ("variation", "memory", "worlds")


def parse(options: Mapping[str, Any], simulator: Simulator, variation: Variation, state: State) -> Forced:
    """Checks the options of a reset against what the simulator has.

    Args:
        options: ``variation``: values by name of line (or path of a field, where a function of one's own draws fields);
            ``memory``: values by name of field of the task's memory, of dictionaries within it as ``info.target``;
            ``worlds``: indices of the worlds that take them, or (N,) bool; all if left out. A value is one for all
            these worlds, or one for each, in their order.
        variation, state: of all worlds, whose shapes tell what fits.

    Raises:
        ValueError: an unknown name, a value of a wrong shape or one that its line could not draw at all, or worlds
            that do not exist.
    """
    for option in options:
        if option not in OPTIONS:
            raise ValueError(f"options[{option!r}]: expected {one_of(option, OPTIONS)}")
    worlds = _worlds(options.get("worlds"), simulator.num_envs)
    lines, fields = {}, {}
    for name, value in _section(options, "variation").items():
        # Of lines: fields follow from them, and so do constants and what is observed.
        known = list(variation.drawn or variation.model)
        if simulator.randomization.is_nominal:
            raise ValueError(f"options['variation'][{name!r}]: expected none, as these worlds are nominal")
        if name not in known:
            expected = one_of(name, known) if known else "none, as nothing varies in these worlds"
            raise ValueError(f"options['variation'][{name!r}]: expected {expected}")
        of, forced = (variation.drawn, lines) if name in variation.drawn else (variation.model, fields)
        forced[name] = _forced(f"options['variation'][{name!r}]", value, of[name], worlds)
    if wrong := simulator.randomization.check({name: values[chosen] for name, (chosen, values) in lines.items()}):
        name, expected = wrong
        raise ValueError(f"options['variation'][{name!r}]={options['variation'][name]!r}: expected {expected}")
    memory, known = {}, memory_fields(state.memory)
    for name, value in _section(options, "memory").items():
        if name not in known or not isinstance(known[name], jax.Array):
            names = [field for field, leaf in known.items() if isinstance(leaf, jax.Array)]
            expected = one_of(name, names) if names else "none, as this task remembers nothing"
            raise ValueError(f"options['memory'][{name!r}]: expected {expected}")
        memory[name] = _forced(f"options['memory'][{name!r}]", value, known[name], worlds)
    return Forced(*jax.device_put((lines, fields, memory), simulator.device))


def _section(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = options.get(name, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"options[{name!r}]={section!r}: expected names and values, such as {{'name': 1.0}}")
    return section


def _worlds(given: Any, num_envs: int) -> np.ndarray:
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


def _forced(place: str, value: Any, like: jax.Array, worlds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which worlds take a value (N,), and the value of every world, with the shape and dtype of ``like``."""
    given = _array(value)
    shape = like.shape[1:]
    # Axes of length 1 may be left out: of 8 worlds, a line of one number takes (8,) as well as (8, 1, 1).
    long = tuple(length for length in shape if length != 1)
    given_long = tuple(length for length in given.shape if length != 1)
    per_world = (len(worlds), *long) if len(worlds) != 1 else long
    if given.dtype.kind in "biuf" and given_long in ((), long):
        each = np.broadcast_to(given.reshape(()) if given.size == 1 else given.reshape(shape), (len(worlds), *shape))
    elif given.dtype.kind in "biuf" and given_long == per_world:
        each = given.reshape(len(worlds), *shape)
    else:
        raise ValueError(
            f"{place} is {given.dtype} {given.shape}: expected {like.dtype} {shape}, "
            f"or {(len(worlds), *shape)} with one for each world"
        )
    each = each.astype(like.dtype)
    if each.dtype.kind == "f" and not np.isfinite(each).all():
        raise ValueError(f"{place} has a value that is not finite: expected finite numbers")
    chosen, values = np.zeros(like.shape[0], bool), np.zeros(like.shape, like.dtype)
    chosen[worlds], values[worlds] = True, each
    return chosen, values
