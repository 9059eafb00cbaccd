"""Cart-pole from the DM Control suite, balance and swing-up, at 12.5 Hz.

A cart of 1 kg on a rail of +-1.8 m carries a pole of 0.1 kg and 1 m; the action, in [-1, 1], pushes the cart with up to
10 N. The reward is the suite's smooth one, in [0, 1], so that an episode of 125 steps (10 s) returns at most 125:

    upright (1 + cos angle) / 2  x  centred in [1/2, 1]  x  small control in [4/5, 1]  x  small velocity in [1/2, 1]

Source: Tassa et al. 2018, "DeepMind Control Suite", and its published ``cartpole`` domain and ``rewards.tolerance``.
"""

import math
from typing import ClassVar, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import mjx

from sheeplike.envs.mjx.options import CartpoleBalanceOptions, CartpoleSwingupOptions
from sheeplike.envs.mjx.task import Outcome

SUCCESS_ANGLE = np.deg2rad(8.0)
SUCCESS_POSITION = 0.5
SUCCESS_SECONDS = 1.0


class Memory(NamedTuple):
    """State of an episode of cart-pole."""

    held_steps: jax.Array  # int32 (), control steps in a row with the pole upright and the cart centred


def tolerance(value: jax.Array, margin: float, value_at_margin: float = 0.1) -> jax.Array:
    """Return 1 at zero, falling like a Gaussian to ``value_at_margin`` at distance ``margin``."""
    scale = np.sqrt(-2.0 * np.log(value_at_margin))
    return jnp.exp(-0.5 * jnp.square(value / margin * scale))


class Cartpole:
    """Keep the pole of a cart upright; see the module's docstring, and ``howto/tasks.md`` for its observations.

    Success: pole within 8 degrees of upright and cart within 0.5 m of the centre for one second (13 steps) in a row.
    In balance, a pole below the horizontal terminates the episode, as in MuJoCo Playground's cart-pole from pixels,
    unless ``fall_ends=False``. The class of ``options`` selects balance or swing-up.
    """

    # An action repeat of eight, as in PlaNet (Hafner et al. 2019): fifteen imagined steps then span the pole's fall.
    substeps = 8
    # Contacts are disabled; the rail's two ends are the only constraint.
    contacts_per_world = 1
    constraints_per_world = 4
    entries: ClassVar[dict[str, slice]] = {
        "cart, m": slice(0, 1),
        "cosine and sine of the pole": slice(1, 3),
        "cart velocity, m/s": slice(3, 4),
        "pole velocity, rad/s": slice(4, 5),
        "time left, of the episode": slice(5, 6),
        "held, of a success": slice(6, 7),
    }

    def __init__(
        self,
        options: CartpoleBalanceOptions | CartpoleSwingupOptions = CartpoleBalanceOptions(),  # noqa: B008, immutable
    ) -> None:
        self._swing_up = isinstance(options, CartpoleSwingupOptions)
        self._fall_ends = not self._swing_up and options.fall_ends
        self._reward_name = "swingup" if self._swing_up else "balance"
        self.name = f"cartpole_{self._reward_name}"
        self.episode_length = options.episode_length
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.model = mujoco.MjModel.from_xml_string(options.read_scene())
        self._duration = self.episode_length * self.substeps * self.model.opt.timestep

    @property
    def _success_steps(self) -> int:
        return math.ceil(SUCCESS_SECONDS / (self.substeps * self.model.opt.timestep))

    def reset(self, key: jax.Array, data: mjx.Data) -> tuple[mjx.Data, Memory]:
        position_key, angle_key, velocity_key = jax.random.split(key, 3)
        if self._swing_up:
            position = 0.01 * jax.random.normal(position_key)
            angle = jnp.pi + 0.01 * jax.random.normal(angle_key)
        else:
            position = jax.random.uniform(position_key, minval=-0.1, maxval=0.1)
            angle = jax.random.uniform(angle_key, minval=-0.034, maxval=0.034)
        velocity = 0.01 * jax.random.normal(velocity_key, (2,))
        data = data.replace(qpos=jnp.stack([position, angle]), qvel=velocity)
        return data, Memory(held_steps=jnp.zeros((), jnp.int32))

    def control(self, data: mjx.Data, memory: Memory, action: jax.Array) -> tuple[mjx.Data, Memory]:
        return data.replace(ctrl=action), memory

    def evaluate(self, data: mjx.Data, memory: Memory, action: jax.Array) -> Outcome:
        position, angle = data.qpos
        upright = (1.0 + jnp.cos(angle)) / 2.0
        centred = (1.0 + tolerance(position, margin=2.0)) / 2.0
        small_control = (4.0 + jnp.clip(1.0 - jnp.square(action[0]), 0.0, 1.0)) / 5.0
        small_velocity = (1.0 + tolerance(data.qvel[1], margin=5.0)) / 2.0
        reward = upright * centred * small_control * small_velocity

        good = (jnp.cos(angle) > np.cos(SUCCESS_ANGLE)) & (jnp.abs(position) < SUCCESS_POSITION)
        held_steps = jnp.where(good, memory.held_steps + 1, 0)
        return Outcome(
            reward=reward,
            terminated=jnp.asarray(self._fall_ends) & (jnp.cos(angle) < 0.0),
            success=held_steps >= self._success_steps,
            reward_terms={self._reward_name: reward},
            memory=Memory(held_steps),
        )

    def observe(self, data: mjx.Data, memory: Memory) -> dict[str, jax.Array]:
        position, angle = data.qpos
        state = jnp.stack([position, jnp.cos(angle), jnp.sin(angle), data.qvel[0], data.qvel[1]])
        time_left = 1.0 - data.time / self._duration
        held = jnp.minimum(memory.held_steps / self._success_steps, 1.0)
        return {"state": state, "privileged_state": jnp.concatenate([state, jnp.stack([time_left, held])])}
