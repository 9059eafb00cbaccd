"""What a task is: one world, written in pure JAX.

A task never batches, never renders and never resets itself. The simulator maps it over all worlds, decides when an
episode is cut, and hands every episode a clean slate. One control step of one world runs in this order:

    control(data, memory, action)     actuator targets
    substeps x physics
    kinematics                        every position that a task can read is fresh from here on
    evaluate(data, memory, action)    reward, terminated, success, named reward terms, memory
    observe(data, memory)             vectors
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import gymnasium
import jax
import mujoco
from mujoco import mjx

Memory = Any
"""A task's own typed pytree (a NamedTuple or a registered dataclass) of fixed shapes, made afresh by every reset."""

Vectors = Mapping[str, jax.Array]
"""Named float32 vectors of one world: at least ``"state"`` and ``"privileged_state"``."""


class Outcome(NamedTuple):
    """What one control step led to, in one world."""

    reward: jax.Array
    """float32 (), the sum of ``reward_terms``."""
    terminated: jax.Array
    """bool (), the episode ended by the task's own rules (never by time: that is the simulator's truncation)."""
    success: jax.Array
    """bool (), the goal is met at this step."""
    reward_terms: dict[str, jax.Array]
    """float32 () each, weighted; they sum to ``reward``."""
    memory: Memory


class Task(Protocol):
    """One world of a task.

    ``reset`` gets data whose inputs (positions, velocities, controls, mocap poses, ...) stand at the model's defaults
    and may change these alone; the simulator runs the kinematics afterwards.
    """

    name: str
    model: mujoco.MjModel
    """The compiled scene, cameras included; cameras and lights must be fixed to their bodies."""
    episode_length: int
    """Control steps after which the simulator truncates an episode."""
    substeps: int
    """Physics steps per control step."""
    action_space: gymnasium.spaces.Box
    """Actions of one world, float32 (A,). The simulator clips to its bounds."""
    contacts_per_world: int
    """Contacts to allocate per world; worlds share one pool, so this is an average with headroom."""
    constraints_per_world: int
    """Constraint rows to allocate in each world: four per frictional contact, plus limits and equalities."""

    def reset(self, key: jax.Array, data: mjx.Data) -> tuple[mjx.Data, Memory]:
        """Places things for a new episode; ``key`` is a typed PRNG key."""

    def control(self, data: mjx.Data, memory: Memory, action: jax.Array) -> tuple[mjx.Data, Memory]:
        """Turns an action float32 (A,) into actuator targets (``data.ctrl``)."""

    def evaluate(self, data: mjx.Data, memory: Memory, action: jax.Array) -> Outcome:
        """Judges the state arrived at."""

    def observe(self, data: mjx.Data, memory: Memory) -> Vectors:
        """The vectors to observe, float32 (D,) each."""
