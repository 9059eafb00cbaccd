"""Begin of episodes, for tasks that step the physics themselves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mujoco import mjx

from sheeplike.envs.mjx.patches import replace_engine
from sheeplike.envs.mjx.physics.physics import INPUTS, Physics
from sheeplike.envs.mjx.rendering.renderer import ENVS
from sheeplike.envs.mjx.task import Memory, Outcome, SteppingTask, Vectors


class Resets:
    """Begins episodes of a stepping task; ``outcome`` and ``vectors`` hold shapes of ``advance``'s results, not values.

    A task's ``begin`` takes a forward pass, or 200 physics steps if it lets a robot fall to rest. So it runs behind a
    branch, for all worlds when any begins an episode: always on a CPU; on a GPU, where the host must wait for the
    condition, only with ``long_reset``. Otherwise it runs in every step.
    """

    def __init__(self, task: SteppingTask, physics: Physics, device: jax.Device) -> None:
        self._task, self._physics = task, physics
        model, template = physics.model, physics.template
        self._branch = device.platform == "cpu" or task.long_reset
        action = jnp.zeros(task.action_space.shape, jnp.float32)
        self._first = jax.eval_shape(self._begin, model, template, jax.random.key(0))
        _, memory, vectors = self._first
        _, self.outcome, self.vectors = jax.eval_shape(self.advance, model, template, memory, action)
        for what, first, later in (("memory", memory, self.outcome.memory), ("vectors", vectors, dict(self.vectors))):
            if signature(first) != signature(later):
                raise TypeError(f"{task.name}.advance returned {what} of {later}: expected begin's, {first}")

    def blank_memory(self) -> Memory:
        """Return a memory of zeros, for a world that has not begun yet."""
        return jax.tree.map(jnp.zeros_like, self._first[1])

    def begin(
        self, model: mjx.Model, clean: mjx.Data, key: jax.Array, due: jax.Array
    ) -> tuple[mjx.Data, Memory, dict[str, jax.Array]]:
        """Return data, memory and first vectors of an episode of one world; arbitrary unless the reset is ``due``.

        ``model`` has this world's fields, ``clean`` inputs at their defaults; ``key`` is a typed PRNG key.
        """
        if self._branch:
            inputs, memory, vectors = jax.lax.cond(
                jax.lax.pmax(due.astype(jnp.int32), ENVS) > 0,  # one flag for all worlds, or both branches would run
                lambda: self._begin(model, clean, key),
                lambda: jax.tree.map(jnp.zeros_like, self._first),
            )
        else:
            inputs, memory, vectors = self._begin(model, clean, key)
        return clean.replace(**inputs), memory, vectors

    def advance(
        self, model: mjx.Model, data: mjx.Data, memory: Memory, action: jax.Array
    ) -> tuple[mjx.Data, Outcome, Vectors]:
        """Take the task's own step, with this engine."""
        with replace_engine(self._physics.step, self._physics.forward):
            return self._task.advance(model, data, memory, action)

    def _begin(self, model: mjx.Model, clean: mjx.Data, key: jax.Array) -> tuple[Any, Memory, dict[str, jax.Array]]:
        with replace_engine(self._physics.step, self._physics.forward):
            first, memory, vectors = self._task.begin(model, clean, key)
        inputs = {name: jnp.asarray(getattr(first, name), getattr(clean, name).dtype) for name in INPUTS}
        return inputs, memory, dict(vectors)


def signature(tree: Any) -> Any:
    """Return structure, shapes and dtypes, which are equal in trees that may replace each other."""
    return jax.tree.structure(tree), [(leaf.shape, np.dtype(leaf.dtype)) for leaf in jax.tree.leaves(tree)]
