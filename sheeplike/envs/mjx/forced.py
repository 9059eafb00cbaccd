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
    if not forced:
        return memory
    old = memory_fields(memory)
    new = {name: jnp.where(*choice, old[name]) for name, choice in forced.items()}
    if isinstance(memory, dict):
        return memory | new
    return memory._replace(**new) if isinstance(memory, tuple) else dataclasses.replace(memory, **new)


def memory_fields(memory: Memory) -> dict[str, Any]:
    """The fields of a task's memory by name: of a dict, a NamedTuple or a dataclass."""
    if isinstance(memory, dict):
        return memory
    if isinstance(memory, tuple):
        return memory._asdict() if hasattr(memory, "_asdict") else {}
    return {f.name: getattr(memory, f.name) for f in dataclasses.fields(memory)}
