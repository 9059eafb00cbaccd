"""All worlds of a task in one jitted call: physics, episode bookkeeping, next-step reset, one render.

Order inside ``step``, for every world at once:

    1 control and substeps        also in worlds that ended: discarding the results is cheaper than a branch
    2 reset merge                 worlds that ended at the previous call get a new variation and a fresh episode
    3 kinematics                  so that all positions are those of the merged state; for some tasks all that follows
    4 evaluate, observe           reward, termination, truncation, statistics, vectors
    5 one batch render

A :class:`SteppingTask` does 1 and 4 in ``advance``, before 2; its ``begin`` returns a new episode's vectors.
"""

import atexit
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from mujoco import mjx

from sheeplike.bridge import Packed, pack
from sheeplike.envs.mjx.overrides import NO_OVERRIDES, Overrides, Settings, replace_fields
from sheeplike.envs.mjx.patches import replace_engine
from sheeplike.envs.mjx.physics.physics import INPUTS, POSES, Physics, make_physics
from sheeplike.envs.mjx.randomization.draw import Randomization, Variation
from sheeplike.envs.mjx.randomization.spec import DELAY, Lines
from sheeplike.envs.mjx.rendering.renderer import ENVS, Renderer
from sheeplike.envs.mjx.rendering.warp import WarpRenderer
from sheeplike.envs.mjx.task import Memory, Outcome, SteppingTask, Task, Vectors, check_capacity, steps_itself

Scalars = dict[str, jax.Array]  # the task's settings by name, float32 () of one world, (N,) of all


class Statistics(NamedTuple):
    """Running totals of the current episode; final values in the step that ends it."""

    returns: jax.Array  # float32 (), sum of rewards
    length: jax.Array  # int32 (), control steps
    success: jax.Array | None  # bool (), success was reached at some step; None where the task defines no success
    reward_terms: dict[str, jax.Array]  # float32 () each, sums of the weighted terms


class State(NamedTuple):
    """Everything that a step carries over. Donated: never keep a reference to a part of it."""

    data: mjx.Data
    memory: Memory
    statistics: Statistics
    key: jax.Array
    """uint32 (2,), the words of the world's PRNG key, from which the keys of its episodes are folded. With a typed key,
    JAX would dispatch every step in Python, leaf by leaf."""
    episode: jax.Array  # int32 (), episodes begun, the current one included
    ended: jax.Array  # bool (), the last step ended an episode; the next one resets
    waiting: dict[str, jax.Array]
    """The last actions, float32 (D, A), newest first, where actions are delayed by up to D steps; empty if not."""


class Results(NamedTuple):
    """Results of a step in one world, () each, without its observations."""

    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    reward_terms: dict[str, jax.Array]
    statistics: Statistics
    nonfinite: jax.Array


class Output(NamedTuple):
    """Everything that a step delivers, in memory of its own: torch may keep it during the next steps."""

    frames: dict[str, jax.Array]
    vectors: dict[str, jax.Array]
    results: Packed  # :class:`Results` of all worlds


class Simulator:
    """Steps all worlds of ``task``.

    Args:
        renderer: sets the number of worlds and the options of the simulation.
        randomization: lines, see :mod:`sheeplike.envs.mjx.randomization.spec`, unbound or bound to this scene.
        randomize: False: every world is the compiled scene, and still observes its (neutral) variation.

    Raises:
        ValueError: too few contacts or constraints are allocated, or a variation cannot be simulated or seen.
        TypeError: the task takes or returns something other than the protocol says.
    """

    def __init__(
        self,
        task: Task | SteppingTask,
        renderer: Renderer,
        *,
        device: jax.Device,
        randomization: Lines | Randomization | None = None,
        randomize: bool = True,
        stagger: bool = False,
        first_env: int = 0,
    ) -> None:
        check_capacity(task)
        self.task = task
        self.warnings: list[str] = []
        self.renderer = renderer
        self.num_envs = num_envs = renderer.num_envs
        self.device = device
        self.stagger, self.first_env = stagger, first_env
        defaults = {} if steps_itself(task) else getattr(task, "settings", {})
        self.settings = Settings(defaults, num_envs=num_envs, device=device)
        asked = renderer.options.physics
        self._use(make_physics(asked, task, num_envs=num_envs, device=device))
        if not isinstance(randomization, Randomization):
            lines, cameras = randomization or {}, tuple(renderer.image_sizes)
            randomization = Randomization(lines, task.model, self._model, cameras=cameras, randomize=randomize)
        self.randomization = randomization
        memory, self.vector_shapes, self._outcome = self._check_task()
        read = self._leaves_read(memory)
        if lacking := self.physics.lacks(randomization, read):
            if asked != "auto":
                raise ValueError(f"physics={asked!r}: {task.name} needs {lacking}; nearest: 'warp'")
            self._use(make_physics("warp", task, num_envs=num_envs, device=device))
            self.warnings.append(f"{task.name} needs {lacking}: physics=warp steps it, slowly on a CPU")
        if not self.physics.derives_constants:
            self.warnings += randomization.warnings
        # After a reset all other fields still hold what the old episode computed there, so a task that reads one of
        # them has everything computed anew in each step.
        posed = self._resets is not None or {*INPUTS, *POSES}.issuperset(read)
        self._refresh = self.physics.kinematics if posed else self.physics.forward
        self._varied_fields = tuple(jax.eval_shape(randomization.sample, jax.random.key(0)).model)
        self.physics.vary(self._varied_fields)
        renderer.vary(self._varied_fields)
        # State and variation are donated: Warp's physics updates its buffers in place, and on a GPU their stable
        # addresses keep the captured CUDA graphs valid. JAX pairs donated buffers with outputs of the same shape in
        # order of appearance: each leaf keeps its buffer only if arguments and results have the same order, the
        # donated ones come first, and no unused leaf is dropped.
        self._compiled = jax.jit(self._step_all, donate_argnums=(0, 1), keep_unused=True)
        self._start = jax.jit(jax.vmap(self._start_world, in_axes=(None, 0, 0)))
        # A step on a CPU calls back into Python, and would hang if that had ended: the exit waits for the step.
        self._newest: list[jax.Array] = []
        atexit.register(_finish, self._newest)

    def _use(self, physics: Physics) -> None:
        self.physics, self._model, self._template = physics, physics.model, physics.template
        self._resets = Resets(self.task, physics, self.device) if steps_itself(self.task) else None

    def _leaves_read(self, memory: Memory) -> list[str]:
        """Return the names, such as ``qpos``, of the leaves of a step's data that the task reads."""
        action = jnp.zeros(self.task.action_space.shape, jnp.float32)

        def take_step(data: mjx.Data, memory: Memory) -> Any:
            if self._resets:
                after, outcome, vectors = self._resets.advance(self._model, data, memory, action)
            else:
                after, memory = self.task.control(data, memory, action)
                outcome, vectors = self.task.evaluate(data, memory, action), self.task.observe(data, memory)
            return {name: getattr(after, name) for name in INPUTS}, outcome, dict(vectors)

        traced = jax.make_jaxpr(take_step)(self._template, memory).jaxpr
        _, used = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self._template)]
        named = zip(paths, used, strict=False)  # the leaves of the memory come after those of the data
        return [jax.tree_util.keystr(path, simple=True, separator=".") for path, is_read in named if is_read]

    def start(self, seed: int) -> tuple[Variation, State]:
        """Return worlds that the next ``step`` resets, so that it delivers first frames.

        World ``i`` draws from ``fold_in(key(seed), first_env + i)``.
        """
        self.renderer.open()
        # Committed to the device, as a step's results are, or the step would be compiled twice.
        numbers = np.arange(self.first_env, self.first_env + self.num_envs, dtype=np.int32)
        key, index = jax.device_put((jax.random.key(seed), numbers), self.device)
        return self._start(key, index, self.settings.on_device)

    def step(
        self, variation: Variation, state: State, actions: jax.Array, overrides: Overrides = NO_OVERRIDES
    ) -> tuple[Variation, State, Output]:
        """Take one control step in all worlds, in one compiled call; ``variation`` and ``state`` are donated.

        Actions are float32 (N, A), or flat; worlds that begin an episode take ``overrides`` in place of what they draw.
        """
        with jax.default_device(self.device):
            variation, state, output = self._compiled(variation, state, actions, self.settings.on_device, overrides)
        self._newest[:] = [output.results.words]
        return variation, state, output

    @property
    def compilations(self) -> int:
        """Number of times that ``step`` was compiled: once, and once more for each set of names in ``overrides``."""
        return self._compiled._cache_size()

    def film(self, camera: str, size: tuple[int, int]) -> Callable[[Variation, State], jax.Array]:
        """Return a compiled function that renders the first world, with shadows: uint8 (1, H, W, 3)."""
        own = self.renderer
        look = own.options.replace(cameras=(camera,), shadows=True, depth=False, segmentation=False)
        renderer = WarpRenderer(self.task.model, look, num_envs=1, image_size=size, device=own.device)
        renderer.vary(self._varied_fields)
        renderer.open()

        def render(variation: Variation, poses: dict[str, jax.Array]) -> jax.Array:
            frames, _ = renderer.render(self._varied(variation), self._template.replace(**poses))
            return frames[f"pixels/{camera}"]

        compiled = jax.jit(jax.vmap(render, axis_name=ENVS))

        def film(variation: Variation, state: State) -> jax.Array:
            poses = {name: getattr(state.data, name) for name in POSES if getattr(state.data, name).size}
            return compiled(*jax.tree.map(lambda leaf: leaf[:1], (variation, poses)))

        return film

    def _start_world(self, key: jax.Array, index: jax.Array, settings: Scalars) -> tuple[Variation, State]:
        key = jax.random.fold_in(key, index)
        if self._resets:
            memory = self._resets.blank_memory()
        else:
            _, memory = self.task.reset(key, self._template, **settings)
        state = State(
            data=self._template,
            memory=memory,
            statistics=_zero_statistics(self._outcome),
            key=jax.random.key_data(key),
            episode=jnp.zeros((), jnp.int32),
            ended=jnp.ones((), bool),
            waiting=self._no_actions(),
        )
        return self.randomization.sample(key), state

    def _step_all(
        self, variation: Variation, state: State, actions: jax.Array, settings: Scalars, overrides: Overrides
    ) -> tuple[Variation, State, Output]:
        actions = actions.reshape(self.num_envs, *self.task.action_space.shape)
        # Without this, recent GPUs would round the products in inverse kinematics and camera poses to ten bits.
        with jax.default_matmul_precision("highest"):
            step = jax.vmap(self._step, axis_name=ENVS)
            variation, state, frames, vectors, results = step(variation, state, actions, settings, overrides)
        return variation, state, Output(frames, vectors, pack(results))

    def _step(
        self, variation: Variation, state: State, action: jax.Array, settings: Scalars, overrides: Overrides
    ) -> tuple[Variation, State, dict[str, jax.Array], dict[str, jax.Array], Results]:
        """Take one control step of one world; see the module's docstring for the order."""
        task, reset = self.task, state.ended
        action = jnp.clip(action, task.action_space.low, task.action_space.high)
        action, waiting = variation.delay_action(action, state.waiting)

        model = self._varied(variation)
        if self._resets:
            data, outcome, vectors = self._resets.advance(model, state.data, state.memory, action)
        else:
            data, memory = task.control(state.data, state.memory, action)
            data = self.physics.step(model, data, task.substeps)

        episode_key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.episode)
        variation_key, reset_key = jax.random.split(episode_key)
        drawn = self.randomization.draw(variation_key)
        drawn |= {name: jnp.where(*choice, drawn[name]) for name, choice in overrides.drawn.items()}
        variation = _where(reset, self.randomization.apply(drawn), variation)
        model = self._varied(variation)
        clean = self._clean(data, model)
        if self._resets:
            first, first_memory, first_vectors = self._resets.begin(model, clean, reset_key, reset)
        else:
            # Not even what was computed in the old episode is handed to the task.
            first, first_memory = task.reset(reset_key, self._clean(self._template, model), **settings)
        first_memory = replace_fields(first_memory, overrides.memory)
        # A diverged world is parked at the defaults until its reset: kinematics and renderer see finite numbers only.
        # Controls are checked too, since physics clamps a NaN to a limit and so hides that an action was one.
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
        data = self._refresh(model, data)

        if self._resets:
            memory, vectors = _where(reset, (first_memory, first_vectors), (outcome.memory, dict(vectors)))
        else:
            memory = _where(reset, first_memory, memory)
            outcome = task.evaluate(data, memory, action)
            memory = _where(reset, memory, outcome.memory)
            vectors = dict(task.observe(data, memory))
        vectors = variation.append_to(vectors)
        finite = jnp.stack([jnp.isfinite(value).all() for value in (outcome.reward, *vectors.values())]).all()
        nonfinite = ~reset & (diverged | ~finite)
        alive = ~reset & ~nonfinite
        vectors = {name: jnp.where(nonfinite, 0.0, value) for name, value in vectors.items()}
        reward = jnp.where(alive, outcome.reward, 0.0)
        terms = {name: jnp.where(alive, value, 0.0) for name, value in outcome.reward_terms.items()}

        so_far = _where(reset, _zero_statistics(outcome), state.statistics)
        statistics = Statistics(
            returns=so_far.returns + reward,
            length=so_far.length + ~reset,
            success=None if outcome.success is None else so_far.success | (alive & outcome.success),
            reward_terms={name: so_far.reward_terms[name] + value for name, value in terms.items()},
        )
        terminated = alive & outcome.terminated
        longest = task.episode_length
        if self.stagger:
            first_length = jax.random.randint(jax.random.wrap_key_data(state.key), (), 1, longest + 1)
            longest = jnp.where(state.episode <= 1, first_length, longest)
        truncated = ~terminated & (nonfinite | (statistics.length >= longest))

        frames, data = self.renderer.render(model, data)
        frames = variation.adjust(frames)
        waiting = _where(reset, self._no_actions(), waiting)
        state = state._replace(data=data, memory=memory, statistics=statistics, waiting=waiting)
        state = state._replace(episode=state.episode + reset, ended=terminated | truncated)
        return variation, state, frames, vectors, Results(reward, terminated, truncated, terms, statistics, nonfinite)

    def _varied(self, variation: Variation) -> mjx.Model:
        return self._model.tree_replace(self.randomization.placed(variation.model))

    def _no_actions(self) -> dict[str, jax.Array]:
        """Return zeros for the delayed actions of a new episode."""
        depth = self.randomization.max_delay
        return {DELAY: jnp.zeros((depth, *self.task.action_space.shape), jnp.float32)} if depth else {}

    def _clean(self, data: mjx.Data, model: mjx.Model) -> mjx.Data:
        """Return ``data`` with its inputs at the model's defaults."""
        return data.replace(**{name: getattr(self._template, name) for name in INPUTS} | {"qpos": model.qpos0})

    def _check_task(self) -> tuple[Memory, dict[str, tuple[int, ...]], Outcome]:
        """Check the task by tracing one world; return the shapes of its memory, vectors by name, and outcome."""
        changed: list[str] = []
        action = jnp.zeros(self.task.action_space.shape, jnp.float32)

        def episode(key: jax.Array, settings: Scalars) -> tuple[Any, ...]:
            clean = self._clean(self._template, self._model)
            first, memory = self.task.reset(key, clean, **settings)
            kept = [f.name for f in mjx.Data.fields() if f.name not in INPUTS]
            changed.extend(name for name in kept if getattr(first, name) is not getattr(clean, name))
            data, next_memory = self.task.control(first, memory, action)
            for where, placed in (("reset", first), ("control", data)):
                for name in INPUTS:
                    found, expected = (jnp.shape(getattr(some, name)) for some in (placed, clean))
                    if found != expected:
                        raise TypeError(f"{self.task.name}.{where}: data.{name} is {found}: expected {expected}")
            outcome = self.task.evaluate(data, next_memory, action)
            return memory, next_memory, outcome, dict(self.task.observe(data, memory))

        if self._resets:
            outcome, vectors = self._resets.outcome, self._resets.vectors
            memory = next_memory = outcome.memory
        else:
            settings = dict.fromkeys(self.settings.on_device, np.float32(0))
            memory, next_memory, outcome, vectors = jax.eval_shape(episode, jax.random.key(0), settings)
        variation = jax.eval_shape(self.randomization.sample, jax.random.key(0))
        vectors = jax.eval_shape(Variation.append_to, variation, vectors)
        if changed:
            raise TypeError(f"{self.task.name}.reset changed data.{changed[0]}: expected one of {', '.join(INPUTS)}")
        for where, other in (("control", next_memory), ("evaluate", outcome.memory)):
            if signature(other) != signature(memory):
                raise TypeError(f"{self.task.name}.{where} returned memory of {other}: expected reset's, {memory}")
        flags = {"terminated": outcome.terminated} | ({} if outcome.success is None else {"success": outcome.success})
        for name, value in {"reward": outcome.reward, **outcome.reward_terms, **flags, **vectors}.items():
            dtype, shape = "bool" if name in flags else "float32", "(D,)" if name in vectors else "()"
            if value.dtype != dtype or value.ndim != (name in vectors):
                raise TypeError(f"{self.task.name}: {name} is {value.dtype} {value.shape}: expected {dtype} {shape}")
        return memory, {name: value.shape for name, value in vectors.items()}, outcome


def _finish(newest: list[jax.Array]) -> None:
    with contextlib.suppress(Exception):  # a device that failed has reported it
        jax.block_until_ready(newest)


def _where(condition: jax.Array, chosen: Any, other: Any) -> Any:
    """Choose leaf by leaf between two trees of one world. Not for ``mjx.Data``."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), chosen, other)


def _zero_statistics(outcome: Outcome) -> Statistics:
    """Return the statistics at the begin of an episode, with the reward terms of ``outcome``."""
    return Statistics(
        returns=jnp.zeros((), jnp.float32),
        length=jnp.zeros((), jnp.int32),
        success=None if outcome.success is None else jnp.zeros((), bool),
        reward_terms={name: jnp.zeros((), jnp.float32) for name in outcome.reward_terms},
    )


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
