"""What the simulator carries from step to step, and what it delivers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from mujoco import mjx

from sheeplike.envs.mjx.task import Memory

Scalars = dict[str, jax.Array]
"""The task's settings by name, float32 () of one world, (N,) of all."""

INPUTS = (
    "qpos",
    "qvel",
    "act",
    "ctrl",
    "qacc_warmstart",
    "time",
    "qfrc_applied",
    "xfrc_applied",
    "mocap_pos",
    "mocap_quat",
    "eq_active",
)
"""The fields of ``mjx.Data`` that the next physics step reads; every other field is computed from these. A reset
replaces exactly these, so nothing of an old episode, non-finite numbers included, reaches the new one."""


class Statistics(NamedTuple):
    """Running totals of the current episode; final values in the step that ends it."""

    returns: jax.Array
    """float32 (), sum of rewards."""
    length: jax.Array
    """int32 (), control steps."""
    success: jax.Array
    """bool (), success was reached at some step."""
    reward_terms: dict[str, jax.Array]
    """float32 () each, sums of the weighted terms."""


class State(NamedTuple):
    """Everything that a step carries over. Donated: never hold on to a part of it."""

    data: mjx.Data
    memory: Memory
    statistics: Statistics
    key: jax.Array
    """uint32 (2,), the words of the world's PRNG key, from which the keys of its episodes are folded. Not the typed key
    itself: JAX would then dispatch every step in Python, leaf by leaf."""
    episode: jax.Array
    """int32 (), episodes begun, the current one included."""
    ended: jax.Array
    """bool (), the previous call delivered the last frame; the next one resets."""
    waiting: dict[str, jax.Array]
    """The last actions, float32 (D, A), newest first, where actions are delayed by up to D steps; empty if not."""


class Output(NamedTuple):
    """What a step delivers, always in memory of its own, so that torch may hold it while the state moves on."""

    frames: dict[str, jax.Array]
    vectors: dict[str, jax.Array]
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    reward_terms: dict[str, jax.Array]
    statistics: Statistics
    nonfinite: jax.Array


def zero_statistics(terms: dict[str, Any]) -> Statistics:
    """Of an episode that begins."""
    return Statistics(
        returns=jnp.zeros((), jnp.float32),
        length=jnp.zeros((), jnp.int32),
        success=jnp.zeros((), bool),
        reward_terms={name: jnp.zeros((), jnp.float32) for name in terms},
    )
