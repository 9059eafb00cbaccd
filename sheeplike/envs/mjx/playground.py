"""Every task of MuJoCo Playground, from pixels, with or without their own vision mode.

Playground's ``reset`` and ``step`` define the task; its wrappers, automatic reset and renderer are not used.

Observations are Playground's vector as ``state``, or its vectors by name. The reward terms are its metrics of the step,
``reward/upright`` as ``upright``; they need not sum to the reward, which is often their product.

As in Playground, the vectors lag the frame by one physics step, and a target that a reset moves (in reaching and
swimming) is in the vectors one step later. Unlike there, a world whose numbers diverge is truncated, not terminated.
Source: Zakka et al. 2025, "MuJoCo Playground".
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import mjx

from sheeplike import host
from sheeplike.envs.contract import Unusable
from sheeplike.envs.mjx.options import PLAYGROUND_IDS, PlaygroundOptions
from sheeplike.envs.mjx.patches import start_warp
from sheeplike.envs.mjx.playground_patches import adapt_scenes, refuse_download, use_model
from sheeplike.envs.mjx.task import Outcome, Vectors, least_capacity
from sheeplike.options import InvalidOption, flat, nearest, one_of

ALLOCATED_FOR = 2048  # the fewest worlds for which Playground's configurations allocate contacts

OURS = {
    "episode_length": "env.options.episode_length",
    "action_repeat": "env.action_repeat",
    "vision": "false: our own renderer makes the frames",
    "vision_config": "env.image_size and env.cameras",
    "impl": "warp, the only one that is rendered",
}
"""Keys of Playground's configurations that are set in other ways here."""

HIDDEN = {"FishSwim": ("ground",)}
"""Geoms that are not drawn: the fish begins each episode halfway in a floor without contacts, and swims below it."""

CAMERAS = {"FishSwim": "fixed_top"}
"""Default cameras where the scene's first is unsuitable: the fish's follows the target's weight, not the fish."""


class Memory(NamedTuple):
    """State of an episode: Playground's state without the physics, made anew by each reset."""

    obs: Any
    info: dict[str, Any]
    metrics: dict[str, jax.Array]


class PlaygroundTask:
    """Task of MuJoCo Playground; one world, with actions in [-1, 1]; see the module's docstring.

    With ``textures`` one sees that a robot moves: without them the floor is white. They cost a fifth to a third of the
    renderer's speed. ``default_cameras`` is the scene's first, as in published results; see ``CAMERAS``.
    """

    def __init__(self, options: PlaygroundOptions) -> None:
        options.check()
        id, self._options = options.id, options
        registry, self._library = _import()
        if id not in registry.ALL_ENVS:
            expected = f"one of {', '.join(PLAYGROUND_IDS)}, or a task whose meshes are on this machine"
            raise InvalidOption("id", id, expected, nearest(id, registry.ALL_ENVS))
        self._overrides = dict(flat(options.overrides or {}))
        config = registry.get_default_config(id)
        _check_overrides(id, self._overrides, dict(flat(config.to_dict())))
        impl = {"impl": "warp"} if "impl" in config else {}
        start_warp()
        with refuse_download(id, self._library), adapt_scenes():
            try:
                self._env = registry.load(id, config_overrides={**self._overrides, **impl})
            except TypeError as error:
                raise ValueError(f"env.options.overrides: {error}") from None
        config = self._env._config
        steps = config.ctrl_dt / config.sim_dt
        if round(steps) < 1 or abs(steps - round(steps)) > 1e-6:
            expected = f"a multiple of sim_dt={config.sim_dt}; nearest: {max(round(steps), 1) * config.sim_dt:g}"
            raise ValueError(f"ctrl_dt={config.ctrl_dt}: expected {expected}")
        self.name, self.textures = id, True
        self.model: mujoco.MjModel = self._env.mj_model
        for name in HIDDEN.get(id, ()):
            self.model.geom(name).group = 3  # renderers draw groups 0 to 2
        self.episode_length = options.episode_length or config.episode_length
        self.substeps = self._env.n_substeps
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (self._env.action_size,), np.float32)
        contacts, constraints = least_capacity(self.model)
        self.contacts_per_world = max(math.ceil(config.get("naconmax", 0) / ALLOCATED_FOR), 2 * contacts)
        self.constraints_per_world = max(config.get("njmax", 0), 2 * constraints)
        known = [self.model.camera(i).name for i in range(self.model.ncam)]
        self.default_cameras = (CAMERAS[id],) if id in CAMERAS else tuple(known[:1])
        traced = str(jax.make_jaxpr(self._env.reset)(jax.random.PRNGKey(0)))
        self.long_reset = "scan[" in traced or "while[" in traced  # a reset loops only over physics steps

    def begin(self, model: mjx.Model, data: mjx.Data, key: jax.Array) -> tuple[mjx.Data, Memory, Vectors]:
        with use_model(self._library, self._env, model, data):
            state = self._env.reset(jax.random.key_data(key))
        return state.data, _memory(state), _vectors(state.obs)

    def advance(
        self, model: mjx.Model, data: mjx.Data, memory: Memory, action: jax.Array
    ) -> tuple[mjx.Data, Outcome, Vectors]:
        # Playground writes to the dictionaries of the state that it is given: these are copies.
        obs, info, metrics = jax.tree.map(lambda leaf: leaf, tuple(memory))
        zero = jnp.zeros((), jnp.float32)
        state = self._library.State(data, obs, reward=zero, done=zero, metrics=metrics, info=info)
        with use_model(self._library, self._env, model, data):
            state = self._env.step(state, action)
        memory = _memory(state)
        reward = jnp.asarray(state.reward, jnp.float32)
        outcome = Outcome(
            reward=reward,
            terminated=jnp.asarray(state.done).astype(bool),
            success=None,
            reward_terms=_reward_terms(memory.metrics) or {"reward": reward},
            memory=memory,
        )
        return state.data, outcome, _vectors(state.obs)

    def repeated(self, repeat: int) -> "PlaygroundTask":
        """Return the task at a lower control rate, on which some of Playground's rewards and clocks depend."""
        if repeat == 1:
            return self
        overrides = {**self._overrides, "ctrl_dt": self._env._config.ctrl_dt * repeat}
        return PlaygroundTask(self._options.replace(episode_length=self.episode_length // repeat, overrides=overrides))


def _import() -> tuple[Any, Any]:
    """Return Playground's registry, and the module that all its tasks share."""
    try:
        with warnings.catch_warnings():
            # Brax imports JAXopt.
            warnings.filterwarnings("ignore", "JAXopt is no longer maintained", DeprecationWarning)
            from mujoco_playground import registry
            from mujoco_playground._src import mjx_env
    except ImportError as error:
        repair = f"{host.install('playground')} repairs that"
        raise Unusable(f"MuJoCo Playground cannot be imported ({error}): {repair}") from error
    return registry, mjx_env


def _check_overrides(id: str, overrides: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        if ours := OURS.get(key.partition(".")[0]):
            raise ValueError(f"env.options.overrides: {key}={value!r} of {id} is set elsewhere: expected {ours}")
        if key not in config:
            known = [name for name in config if name.partition(".")[0] not in OURS]
            raise ValueError(f"env.options.overrides: {id} has no key {key!r}: expected {one_of(key, known)}")


def _memory(state: Any) -> Memory:
    # Weak types become strong ones, so that a reset and a step return the same types.
    memory = Memory(state.obs, state.info, state.metrics)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), memory)


def _vectors(obs: Any) -> Vectors:
    named = obs if isinstance(obs, Mapping) else {"state": obs}
    return {name: jnp.asarray(value, jnp.float32).reshape(-1) for name, value in named.items()}


def _reward_terms(metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    short = [name.removeprefix("reward/") for name in metrics]
    names = short if len(set(short)) == len(short) else list(metrics)
    return {name: jnp.asarray(value, jnp.float32) for name, value in zip(names, metrics.values(), strict=True)}
