"""Protocol of tasks: one world, written in pure JAX.

A task never batches, never renders and never resets itself. One control step of one world runs in this order:

    control(data, memory, action)     actuator targets
    substeps x physics
    kinematics                        all that the task reads is fresh from here on
    evaluate(data, memory, action)    reward, terminated, success, named reward terms, memory
    observe(data, memory)             vectors

A :class:`SteppingTask` comes from a library in which one function does all of this: it steps the physics itself.
"""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard

import gymnasium
import jax
import mujoco
from mujoco import mjx

Memory = Any
"""A task's own pytree (a NamedTuple or a registered dataclass) of fixed shapes, made anew by every reset."""

Vectors = Mapping[str, jax.Array]
"""Float32 vectors of one world by name: ``"state"``, ``"privileged_state"`` (for critics and world models, never for a
policy), ..."""


class Outcome(NamedTuple):
    """Result of one control step in one world."""

    reward: jax.Array  # float32 (), the sum of `reward_terms`
    terminated: jax.Array
    """bool (), the episode ended by the task's rules, not by time: the simulator truncates."""
    success: jax.Array | None
    """bool (), the goal is met at this step; None if the task has no such goal."""
    reward_terms: dict[str, jax.Array]  # float32 () each, weighted; they sum to `reward`
    memory: Memory


class World(Protocol):
    """Members of every task."""

    name: str
    model: mujoco.MjModel  # The compiled scene, cameras included
    episode_length: int  # Control steps after which the simulator truncates an episode
    substeps: int  # Physics steps per control step
    action_space: gymnasium.spaces.Box
    """Actions of one world, float32 (A,). The simulator clips to its bounds."""
    contacts_per_world: int
    """Contacts to allocate per world: an average with headroom, since worlds share one pool."""
    constraints_per_world: int
    """Constraint rows to allocate in each world: four per frictional contact, plus limits and equalities."""


class Task(World, Protocol):
    """One world of a task.

    ``reset`` gets data whose inputs (positions, velocities, controls, mocap poses, ...) have the model's defaults, and
    may change only these; the simulator runs the kinematics afterwards.

    Optional attributes:

    - ``settings``, numbers that may change while the task runs, as in a curriculum, by name with their defaults, such
      as ``{"box_range": 0.05}``; ``reset`` takes each as a keyword, a traced float32 ();
    - ``default_cameras``, names of cameras in place of all; ``textures``, True to draw those of the scene's materials;
    - ``film_camera``, a camera for videos alone, rendered larger and with shadows;
    - ``positions``, slices of ``privileged_state`` that are positions, such as ``{"box": slice(7, 10)}``, and
      ``action_names``, one for each entry of the action: ``dream`` shows both;
    - ``entries``, other slices of ``privileged_state`` by name, for the report of ``analyze``.
    """

    def reset(self, key: jax.Array, data: mjx.Data) -> tuple[mjx.Data, Memory]:
        """Place things for a new episode; ``key`` is a typed PRNG key."""

    def control(self, data: mjx.Data, memory: Memory, action: jax.Array) -> tuple[mjx.Data, Memory]:
        """Turn an action float32 (A,) into actuator targets (``data.ctrl``)."""

    def evaluate(self, data: mjx.Data, memory: Memory, action: jax.Array) -> Outcome:
        """Return the outcome of the step that led to this state."""

    def observe(self, data: mjx.Data, memory: Memory) -> Vectors:
        """Return the vectors to observe, float32 (D,) each."""


class SteppingTask(World, Protocol):
    """One world of a task that steps the physics itself; it has no settings.

    ``begin`` and ``advance`` must use the given ``model``, whose fields may differ between worlds.
    """

    long_reset: bool
    """``begin`` takes many physics steps; see :class:`sheeplike.envs.mjx.simulator.Resets`."""

    def begin(self, model: mjx.Model, data: mjx.Data, key: jax.Array) -> tuple[mjx.Data, Memory, Vectors]:
        """Begin an episode, from data whose inputs have the model's defaults; only inputs of the result are used."""

    def advance(
        self, model: mjx.Model, data: mjx.Data, memory: Memory, action: jax.Array
    ) -> tuple[mjx.Data, Outcome, Vectors]:
        """Take one control step; return the new data, its outcome and its vectors."""

    def repeated(self, repeat: int) -> "SteppingTask":
        """Return the task with each action held ``repeat`` times as long; ``repeat`` divides ``episode_length``."""


def steps_itself(task: Task | SteppingTask) -> TypeGuard[SteppingTask]:
    """Return True if a task steps the physics itself."""
    return hasattr(task, "advance")


def repeat_actions(task: Task | SteppingTask, repeat: int) -> Task | SteppingTask:
    """Return the task with each action held for ``repeat`` control steps; only the last is evaluated."""
    if repeat < 1:
        raise ValueError(f"action_repeat={repeat}: expected a positive number of control steps, such as 1")
    if task.episode_length % repeat:
        divisors = [count for count in range(1, task.episode_length + 1) if task.episode_length % count == 0]
        nearest = min(divisors, key=lambda count: abs(count - repeat))
        expected = f"a divisor of episode_length={task.episode_length}"
        raise ValueError(f"action_repeat={repeat}: expected {expected}; nearest: {nearest}")
    if steps_itself(task):
        return task.repeated(repeat)
    held = copy.copy(task)
    held.substeps, held.episode_length = task.substeps * repeat, task.episode_length // repeat
    return held


def check_capacity(task: Task | SteppingTask) -> None:
    """Compare the contacts and constraints allocated with those of the scene in its default pose and keyframes."""
    for name, needed in zip(("contacts_per_world", "constraints_per_world"), least_capacity(task.model), strict=True):
        if (allocated := getattr(task, name)) < needed:
            raise ValueError(f"{task.name}: {name}={allocated} is too few: expected at least {needed} for this scene")


def least_capacity(model: mujoco.MjModel) -> tuple[int, int]:
    """Count contacts and constraints of a scene in its default pose and keyframes, at least one of each."""
    data = mujoco.MjData(model)
    contacts = constraints = 1
    for key in range(-1, model.nkey):
        if key >= 0:
            mujoco.mj_resetDataKeyframe(model, data, key)
        mujoco.mj_forward(model, data)
        contacts, constraints = max(contacts, data.ncon), max(constraints, data.nefc)
    return contacts, constraints
