"""Values that worlds take at a reset in place of those that they would draw."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sheeplike.envs.mjx.task import Memory


class Forced(NamedTuple):
    """What a reset takes instead of what it would have drawn; by name, which worlds (N,) bool, and values (N, ...)."""

    drawn: dict[str, tuple[jax.Array, jax.Array]]
    """Draws of lines, (N, R, C)."""
    model: dict[str, tuple[jax.Array, jax.Array]]
    """Fields of the model."""
    memory: dict[str, tuple[jax.Array, jax.Array]]
    """Fields of the task's memory, as the reset leaves it."""


FREE = Forced({}, {}, {})


def replaced(memory: Memory, forced: dict[str, tuple[jax.Array, jax.Array]]) -> Memory:
    """The memory with some of its fields replaced where that is asked for."""
    for path, choice in forced.items():
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
