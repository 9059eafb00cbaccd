"""All worlds of a task in one jitted call: physics, episode bookkeeping, next-step reset, one render.

Order inside ``step``, for every world at once:

    1 control and substeps        also in worlds that ended: their result is thrown away, which costs less than a branch
    2 reset merge                 worlds that ended at the previous call get a new variation and a fresh episode
    3 kinematics                  so that whatever reads positions sees the merged state
    4 evaluate, observe           reward, termination, truncation, statistics, vectors
    5 one batch render

A task that steps the physics itself does 1 and 4 in one call, before the merge; its resets deliver the first vectors.

    call              t          t+1           t+2
    world ends        yes        -             -
    delivered         last       first frame   second frame
    reward            r_T        0             r_1
    terminated |      True       False         False
      truncated
    action            used       ignored       used
"""

import atexit
import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mujoco import mjx
from mujoco.mjx.third_party.mujoco_warp import OverflowType

from sheeplike.envs.mjx.capacity import check_capacity
from sheeplike.envs.mjx.forced import FREE, Forced, replaced
from sheeplike.envs.mjx.randomization.draw import NOMINAL, Randomization, Variation
from sheeplike.envs.mjx.randomization.effects import adjust, delayed, told
from sheeplike.envs.mjx.randomization.fields import BATCHABLE
from sheeplike.envs.mjx.randomization.spec import DELAY, Lines
from sheeplike.envs.mjx.rendering import Renderer
from sheeplike.envs.mjx.settings import Settings, declared
from sheeplike.envs.mjx.state import INPUTS, Output, Scalars, State, Statistics, zero_statistics
from sheeplike.envs.mjx.stepping import WORLDS, Resets, signature
from sheeplike.envs.mjx.task import SteppingTask, Task, steps_itself


class Simulator:
    """Steps ``num_envs`` worlds of ``task``.

    Args:
        task: one world.
        renderer: built for the same number of worlds.
        num_envs: worlds.
        device: where everything lives.
        randomization: what differs between worlds, drawn anew for each episode; see
            :mod:`sheeplike.envs.mjx.randomization.spec`; or one that has been bound to this task's scene.
        nominal: every world is the compiled scene all the same.
        variation: draws fields of the model of one world, by path and whole, from a typed PRNG key, for what cannot be
            written down as ``randomization``; the derived constants are its own business.

    Attributes:
        randomization: bound to the scene.
        custom_variation: ``variation``, if it was given.
        settings: the task's settings and their defaults; which of their values a step takes is its caller's choice.

    Raises:
        ValueError: world counts that differ, too few contacts or constraints allocated for the scene, or a variation
            that cannot be simulated or seen.
        TypeError: a task that takes or returns something other than the protocol says.
    """

    def __init__(
        self,
        task: Task | SteppingTask,
        renderer: Renderer,
        *,
        num_envs: int,
        device: jax.Device,
        randomization: Lines | Randomization | None = None,
        nominal: bool = False,
        variation: Callable[[jax.Array], dict[str, jax.Array]] | None = None,
    ) -> None:
        if renderer.num_envs != num_envs:
            raise ValueError(
                f"renderer.num_envs={renderer.num_envs} but the simulator has num_envs={num_envs}: expected the same"
            )
        check_capacity(task)
        self.task = task
        self.renderer = renderer
        self.num_envs = num_envs
        self.device = device
        if randomization and variation:
            raise ValueError("randomization and variation: expected one of them")
        self.settings = {} if steps_itself(task) else declared(task)
        self._defaults = Settings(self.settings, num_envs=num_envs, device=device).on_device
        model = mjx.put_model(task.model, device=device, impl="warp")
        # Too few contacts or constraints stay reported; a solver of few iterations is cut off by intention.
        quiet = OverflowType.ITERATIONS | OverflowType.LS_ITERATIONS
        warn = model.opt._impl.warn_overflow & ~int(quiet)
        self._model = model.tree_replace({"opt._impl.warn_overflow": warn})
        self._template = mjx.make_data(
            task.model,
            device=device,
            impl="warp",
            naconmax=num_envs * task.contacts_per_world,
            njmax=task.constraints_per_world,
        )
        if not isinstance(randomization, Randomization):
            lines, cameras = randomization or {}, tuple(renderer.image_sizes)
            randomization = Randomization(lines, task.model, self._model, cameras=cameras, nominal=nominal)
        self.randomization = randomization
        self.custom_variation = variation
        self._resets: Resets | None = None
        if steps_itself(task):
            self._resets = Resets(task, inputs=INPUTS, template=self._template, model=self._model, device=device)
        self._check_variation()
        renderer.vary(jax.eval_shape(self.sample_variation, jax.random.key(0)).model)
        self.vector_shapes = self._check_task()
        # State and variation are donated: Warp's physics updates its buffers in place, and on a GPU their stable
        # addresses keep the captured CUDA graphs valid. JAX pairs donated buffers with outputs of the same shape in
        # order of appearance, so every leaf keeps its own only if arguments and results have one order, the donated
        # ones first, and no unused leaf is dropped.
        self._compiled = jax.jit(self._step_all, donate_argnums=(0, 1), keep_unused=True)
        self._forced = jax.jit(self._step_all, donate_argnums=(0, 1), keep_unused=True)
        self._start = jax.jit(jax.vmap(self._start_world, in_axes=(None, 0, 0)))
        # A step under way on a CPU calls Warp in Python, and would hang where Python has gone: the exit waits for it.
        self._newest: list[jax.Array] = []
        atexit.register(_finish, self._newest)

    def start(self, seed: int) -> tuple[Variation, State]:
        """Worlds of which every one is due for a reset: the next ``step`` delivers first frames.

        World ``i`` draws from ``fold_in(key(seed), i)``, whatever the number of worlds.
        """
        self.renderer.open()
        # Committed to the device like every state that a step returns: step would otherwise compile once for this state
        # and once more for its own.
        key, index = jax.device_put((jax.random.key(seed), np.arange(self.num_envs, dtype=np.int32)), self.device)
        return self._start(key, index, self._defaults)

    def step(
        self,
        variation: Variation,
        state: State,
        actions: jax.Array,
        settings: Scalars | None = None,
    ) -> tuple[Variation, State, Output]:
        """One control step of all worlds, in one compiled call.

        Args:
            variation: what differs between worlds, (N, ...) each; replaced where an episode begins. Donated, gone after
                the call.
            state: donated, gone after the call.
            actions: float32 (N, A), or flat (N * A,); clipped to the action space.
            settings: float32 (N,) for each of the task's settings, or their defaults; read where an episode begins.
                Not donated.
        """
        settings = self._defaults if settings is None else settings
        with jax.default_device(self.device):
            variation, state, output = self._compiled(variation, state, actions, settings)
        self._newest[:] = [output.reward]
        return variation, state, output

    def step_forced(
        self, variation: Variation, state: State, actions: jax.Array, settings: Scalars, forced: Forced
    ) -> tuple[Variation, State, Output]:
        """:meth:`step`, in which worlds that begin an episode take what ``forced`` holds for them.

        Compiled on its own when it is first used, and for each set of names in ``forced``.
        """
        with jax.default_device(self.device):
            variation, state, output = self._forced(variation, state, actions, settings, forced)
        self._newest[:] = [output.reward]
        return variation, state, output

    def sample_variation(self, key: jax.Array) -> Variation:
        """The variation of a new episode of one world."""
        return (
            self.randomization.sample(key)
            if self.custom_variation is None
            else NOMINAL._replace(model=self.custom_variation(key))
        )

    @property
    def compilations(self) -> int:
        """How often ``step`` was compiled: once, whatever came in."""
        return self._compiled._cache_size()

    def _start_world(self, key: jax.Array, index: jax.Array, settings: Scalars) -> tuple[Variation, State]:
        key = jax.random.fold_in(key, index)
        if self._resets:
            memory, outcome = self._resets.blank_memory(), self._resets.outcome
        else:
            _, memory = self.task.reset(key, self._template, **settings)
            outcome = jax.eval_shape(self.task.evaluate, self._template, memory, self._action_zero())
        state = State(
            data=self._template,
            memory=memory,
            statistics=zero_statistics(outcome.reward_terms),
            key=jax.random.key_data(key),
            episode=jnp.zeros((), jnp.int32),
            ended=jnp.ones((), bool),
            waiting=self._no_actions(),
        )
        return self.sample_variation(key), state

    def _step_all(
        self, variation: Variation, state: State, actions: jax.Array, settings: Scalars, forced: Forced = FREE
    ) -> tuple[Variation, State, Output]:
        actions = actions.reshape(self.num_envs, *self.task.action_space.shape)
        # Without this, recent GPUs would round the products in inverse kinematics and camera poses to ten bits.
        with jax.default_matmul_precision("highest"):
            step = jax.vmap(self._step, axis_name=WORLDS)
            return step(variation, state, actions, settings, forced)

    def _step(
        self, variation: Variation, state: State, action: jax.Array, settings: Scalars, forced: Forced
    ) -> tuple[Variation, State, Output]:
        """One control step of one world; see the module's docstring for the order."""
        task, reset = self.task, state.ended
        action = jnp.clip(action, task.action_space.low, task.action_space.high)
        action, waiting = delayed(action, state.waiting, variation)

        model = self._varied(variation)
        if self._resets:
            data, outcome, vectors = task.advance(model, state.data, state.memory, action)
        else:
            data, memory = task.control(state.data, state.memory, action)
            data, _ = jax.lax.scan(lambda data, _: (mjx.step(model, data), None), data, None, length=task.substeps)

        episode_key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.episode)
        variation_key, reset_key = jax.random.split(episode_key)
        variation = _where(reset, self._vary(variation_key, forced), variation)
        model = self._varied(variation)
        clean = self._clean(data, model)
        if self._resets:
            first, first_memory, first_vectors = self._resets.begin(model, clean, reset_key, reset)
        else:
            first, first_memory = task.reset(reset_key, clean, **settings)
        first_memory = replaced(first_memory, forced.memory)
        # A diverged world is parked at the defaults until its reset: what the kinematics and the renderer see of it is
        # finite, and nothing of it can spread.
        # Controls count too: physics clamps a NaN to a limit, and would hide that the action was one.
        inputs = (data.qpos, data.qvel, data.act, data.ctrl)
        diverged = ~jnp.stack([jnp.isfinite(value).all() for value in inputs]).all()
        # Field by field: a tree-wide jnp.where would touch Warp's buffers that all worlds share.
        data = data.replace(
            **{
                name: jnp.where(reset, getattr(first, name), jnp.where(diverged, getattr(clean, name), stepped))
                for name in INPUTS
                if (stepped := getattr(data, name)).size
            }
        )
        data = mjx.kinematics(model, data)

        if self._resets:
            memory, vectors = _where(reset, (first_memory, first_vectors), (outcome.memory, dict(vectors)))
        else:
            memory = _where(reset, first_memory, memory)
            outcome = task.evaluate(data, memory, action)
            memory = _where(reset, memory, outcome.memory)
            vectors = dict(task.observe(data, memory))
        vectors = told(vectors, variation)
        finite = jnp.isfinite(outcome.reward) & jnp.stack([jnp.isfinite(v).all() for v in vectors.values()]).all()
        nonfinite = ~reset & (diverged | ~finite)
        alive = ~reset & ~nonfinite
        vectors = {name: jnp.where(nonfinite, 0.0, value) for name, value in vectors.items()}
        reward = jnp.where(alive, outcome.reward, 0.0)
        terms = {name: jnp.where(alive, value, 0.0) for name, value in outcome.reward_terms.items()}

        so_far = _where(reset, zero_statistics(terms), state.statistics)
        statistics = Statistics(
            returns=so_far.returns + reward,
            length=so_far.length + ~reset,
            success=so_far.success | (alive & outcome.success),
            reward_terms={name: so_far.reward_terms[name] + value for name, value in terms.items()},
        )
        terminated = alive & outcome.terminated
        truncated = ~terminated & (nonfinite | (statistics.length >= task.episode_length))

        frames, data = self.renderer.render(model, data)
        frames = adjust(frames, variation.frames)
        state = State(
            data=data,
            memory=memory,
            statistics=statistics,
            key=state.key,
            episode=state.episode + reset,
            ended=terminated | truncated,
            waiting=_where(reset, self._no_actions(), waiting),
        )
        output = Output(frames, vectors, reward, terminated, truncated, terms, statistics, nonfinite)
        return variation, state, output

    def _varied(self, variation: Variation) -> mjx.Model:
        """The model of a world."""
        return self._model.tree_replace(self.randomization.placed(variation.model))

    def _vary(self, key: jax.Array, forced: Forced) -> Variation:
        """The variation of a new episode, but for what is forced."""
        if self.custom_variation is None:
            drawn = self.randomization.draw(key)
            drawn |= {name: jnp.where(*choice, drawn[name]) for name, choice in forced.drawn.items()}
            variation = self.randomization.apply(drawn)
        else:
            variation = self.sample_variation(key)
        fields = {path: jnp.where(*choice, variation.model[path]) for path, choice in forced.model.items()}
        return variation._replace(model=variation.model | fields)

    def _no_actions(self) -> dict[str, jax.Array]:
        """As if nothing had been done for as long as an action can wait."""
        depth = self.randomization.max_delay
        return {DELAY: jnp.zeros((depth, *self.task.action_space.shape), jnp.float32)} if depth else {}

    def _clean(self, data: mjx.Data, model: mjx.Model) -> mjx.Data:
        """``data`` with its inputs at the model's defaults."""
        defaults = {name: getattr(self._template, name) for name in INPUTS}
        return data.replace(**{**defaults, "qpos": model.qpos0})

    def _action_zero(self) -> jax.Array:
        return jnp.zeros(self.task.action_space.shape, jnp.float32)

    def _check_variation(self) -> None:
        if self.custom_variation is None:
            return
        for path, value in jax.eval_shape(self.custom_variation, jax.random.key(0)).items():
            field = self._model
            for part in path.split("."):
                field = getattr(field, part, None)
            if field is None or path not in BATCHABLE:
                raise ValueError(f"variation of {path!r}: the model has no such field that may differ between worlds")
            if (value.shape, value.dtype) != (field.shape, field.dtype):
                raise ValueError(
                    f"variation of {path!r} is {value.dtype} {value.shape}: expected {field.dtype} {field.shape}"
                )

    def _check_task(self) -> dict[str, tuple[int, ...]]:
        """Traces the task's functions on one world (nothing is compiled); returns the shapes of its vectors."""
        changed: list[str] = []

        def episode(key: jax.Array, settings: Scalars) -> tuple[Any, ...]:
            clean = self._clean(self._template, self._model)
            first, memory = self.task.reset(key, clean, **settings)
            kept = [f.name for f in mjx.Data.fields() if f.name not in INPUTS]
            changed.extend(name for name in kept if getattr(first, name) is not getattr(clean, name))
            data, next_memory = self.task.control(first, memory, self._action_zero())
            outcome = self.task.evaluate(data, next_memory, self._action_zero())
            return memory, next_memory, outcome, dict(self.task.observe(data, memory))

        if self._resets:
            outcome, vectors = self._resets.outcome, self._resets.vectors
            memory = next_memory = outcome.memory
        else:
            memory, next_memory, outcome, vectors = jax.eval_shape(
                episode, jax.random.key(0), dict.fromkeys(self.settings, np.float32(0))
            )
        variation = jax.eval_shape(self.sample_variation, jax.random.key(0))
        vectors = jax.eval_shape(told, vectors, variation)
        if changed:
            raise TypeError(f"{self.task.name}.reset changed data.{changed[0]}: expected one of {', '.join(INPUTS)}")
        for where, other in (("control", next_memory), ("evaluate", outcome.memory)):
            if signature(other) != signature(memory):
                raise TypeError(f"{self.task.name}.{where} returned memory of {other}: expected reset's, {memory}")
        for name, value in {"reward": outcome.reward, **outcome.reward_terms, **vectors}.items():
            if value.dtype != jnp.float32 or value.ndim != (name in vectors):
                shape = "(D,)" if name in vectors else "()"
                raise TypeError(f"{self.task.name}: {name} is {value.dtype} {value.shape}: expected float32 {shape}")
        return {name: value.shape for name, value in vectors.items()}


def _finish(newest: list[jax.Array]) -> None:
    with contextlib.suppress(Exception):  # of a device that failed, and has said so
        jax.block_until_ready(newest)


def _where(condition: jax.Array, chosen: Any, other: Any) -> Any:
    """Leaf-wise choice between two trees of one world. Not for ``mjx.Data``."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), chosen, other)
