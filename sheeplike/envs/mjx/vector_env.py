"""The simulator as a ``gymnasium.vector.VectorEnv`` whose tensors are torch, on one device."""

import os
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from sheeplike import host
from sheeplike.bridge import to_jax, to_torch
from sheeplike.envs.contract import (
    ImageSize,
    OptionalMembers,
    check_actions,
    check_positive,
    check_seed,
    resolve_device,
)
from sheeplike.envs.mjx.engines import RENDERERS
from sheeplike.envs.mjx.options import SimulationOptions
from sheeplike.envs.mjx.overrides import NO_OVERRIDES, Overrides, Values, parse_options
from sheeplike.envs.mjx.patches import start_warp
from sheeplike.envs.mjx.randomization.draw import NOMINAL, Variation
from sheeplike.envs.mjx.randomization.spec import Lines
from sheeplike.envs.mjx.rendering.cameras import resolve_cameras
from sheeplike.envs.mjx.rendering.renderer import Renderer
from sheeplike.envs.mjx.simulator import Results, Simulator, State
from sheeplike.envs.mjx.task import SteppingTask, Task
from sheeplike.terminal import first_sentence

Observations = dict[str, torch.Tensor]
StepResult = tuple[Observations, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]

SETTING = "settings."  # prefix of settings in a saved state


class MjxVectorEnv(OptionalMembers, gymnasium.vector.VectorEnv):
    """Worlds of one MJX task, simulated and rendered in one jitted call per step.

    Observations are a flat dict of tensors on ``device``: the frames of
    :class:`~sheeplike.envs.mjx.rendering.renderer.Renderer`, ``"state"``, ``"privileged_state"`` and the task's other
    vectors float32 (N, D). Resets follow ``AutoresetMode.NEXT_STEP``. ``info`` has the same keys at every call:

    - ``success`` (N,) bool: reached in this episode so far; float32 NaN if the task defines no success;
    - ``reward_terms`` {name: (N,) float32}: this step's weighted terms, whose sum is the reward;
    - ``episode`` {``return`` (N,) float32, ``length`` (N,) int32, ``success``, ``reward_terms``}: running totals;
    - ``nonfinite`` (N,) bool: this world diverged at this step. Its vectors and reward are zeros, its frames show the
      scene's default pose, it is truncated, and the next step resets it.

    Nothing in ``step`` waits for the device. Tensors that it returns are views of JAX arrays: never write to them.

    Args:
        image_size: pixels, ``(H, W)`` or one number, for all cameras; or a size for each of them, by name.
        randomization: lines by name; see :mod:`sheeplike.envs.mjx.randomization.spec`. Each world draws its variation
            anew for every episode, and observes it as ``"variation"`` and at the end of ``"privileged_state"``.
        randomize: False: every world is the compiled scene, with the same observations.
        stagger: truncate the first episode of each world at a random step, so that episodes do not end together.
        first_env: number of the first world: world ``i`` here draws as world ``first_env + i`` does elsewhere.

    Attributes:
        film_size: height and width of the frames of the task's ``film_camera``, without ``film_pixels``.
        film_pixels: longer side of the frames that :meth:`film` renders by the agent's cameras; None: no such frames.

    Raises:
        ValueError: the task, the scene or the machine cannot serve a value; raised before anything is compiled.
    """

    def __init__(
        self,
        task: Task | SteppingTask,
        *,
        num_envs: int,
        device: torch.device | str = "cpu",
        image_size: ImageSize | Mapping[str, ImageSize] = 64,
        seed: int = 0,
        randomization: Lines | None = None,
        randomize: bool = True,
        stagger: bool = False,
        first_env: int = 0,
        simulation: SimulationOptions = SimulationOptions(),  # noqa: B008, immutable
    ) -> None:
        self.num_envs, self.device = check_positive("num_envs", num_envs, 16), resolve_device(device)
        self.first_env = first_env
        jax_device = jax_device_of(self.device)
        if jax.config.jax_enable_x64:
            raise ValueError("jax_enable_x64 is on: simulations are float32; leave JAX_ENABLE_X64 unset")
        start_warp()
        cameras = getattr(task, "default_cameras", None)
        if (film_camera := getattr(task, "film_camera", None)) is not None:
            resolve_cameras(task.model, (film_camera,))
            cameras = cameras or [name for name in resolve_cameras(task.model, None) if name != film_camera]
        if simulation.cameras is None and cameras:
            simulation = simulation.replace(cameras=cameras)
        if simulation.textures is None:
            simulation = simulation.replace(textures=getattr(task, "textures", False))
        make = RENDERERS.load(simulation.renderer, Renderer)
        renderer = make(task.model, simulation, num_envs=num_envs, image_size=image_size, device=str(self.device))
        self.simulator = Simulator(
            task,
            renderer,
            device=jax_device,
            randomization=randomization,
            randomize=randomize,
            stagger=stagger,
            first_env=first_env,
        )
        for warning in self.simulator.warnings:
            warnings.warn(warning, stacklevel=2)
        self.name, self.episode_length, self.single_action_space = task.name, task.episode_length, task.action_space
        self.action_space = batch_space(task.action_space, num_envs)
        self.positions, self.action_names = getattr(task, "positions", {}), getattr(task, "action_names", ())
        self.entries = getattr(task, "entries", {})
        shapes = self.simulator.vector_shapes
        vectors = {name: spaces.Box(-np.inf, np.inf, shape, np.float32) for name, shape in shapes.items()}
        self.single_observation_space = spaces.Dict(dict(sorted({**renderer.spaces, **vectors}.items())))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        control_rate = 1.0 / (task.substeps * task.model.opt.timestep)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": round(control_rate, 6)}
        self._low = torch.as_tensor(task.action_space.low, device=self.device)
        self._high = torch.as_tensor(task.action_space.high, device=self.device)
        self._no_success = torch.full((num_envs,), torch.nan, device=self.device)
        self._seed = check_seed(seed)
        self._variation: Variation = NOMINAL
        self._state: State | None = None
        self.film_size, self.film_pixels = (180, 240), None
        self._films: dict[str, Callable[[Variation, State], jax.Array]] = {}
        # On a GPU, JAX and torch may reuse memory before the other has read it: all that crossed the bridge in the last
        # two steps stays alive until the next crossing has ordered those reads.
        self._in_flight: deque[list[Any]] = deque([[]], maxlen=2)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin a new episode in every world; with a ``seed`` everything restarts from it.

        ``options`` are values that worlds take instead of drawing them; see ``overrides.parse_options``.
        """
        assert not self.closed, "reset() of a closed environment"
        first = seed is not None or self._state is None
        seed = self._seed if seed is None else check_seed(seed)
        if first:
            variation, state = self.simulator.start(seed)
        else:
            variation, state = self._variation, self._state._replace(ended=self._state.ended | True)
        bound, placed = self.simulator.randomization, {"num_envs": self.num_envs, "device": self.simulator.device}
        overrides = parse_options(options or {}, bound, variation, state.memory, **placed)
        self._seed, self._variation, self._state = seed, variation, state
        no_actions = torch.zeros(self.action_space.shape, dtype=torch.float32, device=self.device)
        observations, _, _, _, info = self._advance(no_actions, overrides)
        return observations, info

    def step(self, actions: torch.Tensor) -> StepResult:
        """Take one control step in every world; actions float32 (N, A) are clipped to the action space."""
        check_actions(self, actions, torch.float32, begun=self._state is not None)
        # Clamping makes a copy as well, to which no caller can write while JAX reads it.
        return self._advance(actions.detach().clamp(self._low, self._high))

    def film(self) -> dict[str, torch.Tensor]:
        """Render the first world by the task's ``film_camera``: uint8 (1, H, W, 3) by its name, on the device.

        With ``film_pixels``, by the agent's cameras as well. The first call compiles a renderer for each camera.
        """
        camera = getattr(self.simulator.task, "film_camera", None)
        seen = self.simulator.renderer.image_sizes
        sizes = {} if camera is None or not seen else {camera: self.film_size}
        if pixels := self.film_pixels:
            sizes = {name: tuple(round(s * pixels / max(size)) for s in size) for name, size in (seen | sizes).items()}
        if not sizes:
            return {}
        assert self._state is not None, "film() before reset()"
        for name in sizes.keys() - self._films.keys():
            self._films[name] = self.simulator.film(name, sizes[name])
        return {name: to_torch(self._films[name](self._variation, self._state)) for name in sizes}

    @property
    def variation(self) -> dict[str, torch.Tensor]:
        """Current draws of each world by name of line: float32 (N, R, C), a copy, on the device."""
        return self._copies(self._variation.drawn)

    @property
    def varied_fields(self) -> dict[str, torch.Tensor]:
        """Fields of the model that differ between worlds, by path: (N, ...), copies, on the device."""
        return self._copies(self._variation.model)

    @property
    def settings(self) -> dict[str, torch.Tensor]:
        """Settings of the task: float32 (N,) CPU tensors by name, a copy."""
        return self.simulator.settings.read()

    def set_attr(self, name: str, values: Values) -> None:
        """Change a setting: one number for all worlds, or (N,) numbers, one per world.

        Each world takes it at its next reset. Nothing is compiled, and nothing waits for the device.
        """
        self.simulator.settings.write({name: values})

    def get_attr(self, name: str) -> tuple[float, ...]:
        """Return a setting of every world, as float32 holds it."""
        return tuple(self.settings[self.simulator.settings.check_name(name)].tolist())

    def close_extras(self, **kwargs: Any) -> None:
        self._state, self._variation, self._in_flight = None, NOMINAL, deque([[]], maxlen=2)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of all worlds' state as CPU tensors, by name; a run that loads them goes on identically."""
        assert self._state is not None, "state_dict() before reset()"
        leaves = self._named_leaves((self._variation, self._state)).items()
        # A copy: on a CPU, device_get gives a view of buffers that the next step donates.
        state = {name: torch.from_numpy(np.array(jax.device_get(_raw(leaf)), copy=True)) for name, leaf in leaves}
        return state | {f"{SETTING}{name}": values for name, values in self.settings.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a ``state_dict`` of the same task, number of worlds and versions."""
        template = self.simulator.start(self._seed)
        leaves = self._named_leaves(template)
        settings = {f"{SETTING}{name}": name for name in self.simulator.settings.on_device}
        known = {*leaves, *settings}
        if odd := sorted(state.keys() ^ known):
            counts = f"state has {len(state)} entries, this environment {len(known)}"
            raise ValueError(f"{counts}: {odd[0]!r} is in one only")
        restored = {}
        for name, leaf in leaves.items():
            value, expected = state[name].cpu().numpy(), _raw(leaf)
            if (value.shape, value.dtype) != (expected.shape, expected.dtype):
                form = f"{value.dtype} {value.shape}: expected {expected.dtype} {expected.shape}"
                raise ValueError(f"state[{name!r}] is {form}")
            # device_put may borrow the tensor's memory, and a donated state is written to, hence the copy.
            array = jnp.copy(jax.device_put(value, self.simulator.device))
            restored[name] = jax.random.wrap_key_data(array) if _is_key(leaf) else array
        self.simulator.settings.write({name: state[saved] for saved, name in settings.items()})
        self._variation, self._state = jax.tree_util.tree_map_with_path(
            lambda path, leaf: restored.get(jax.tree_util.keystr(path), leaf), template
        )

    def _named_leaves(self, tree: tuple[Variation, State]) -> dict[str, jax.Array]:
        """Return the leaves that a checkpoint needs, by name."""
        named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        return {name: leaf for name, leaf in named.items() if self.simulator.physics.saves(name)}

    def _copies(self, arrays: Mapping[str, jax.Array]) -> dict[str, torch.Tensor]:
        copies = {name: jnp.copy(array) for name, array in arrays.items()}
        self._in_flight[-1].extend(copies.values())  # they cross the bridge too
        return {name: to_torch(array) for name, array in copies.items()}

    def _advance(self, actions: torch.Tensor, overrides: Overrides = NO_OVERRIDES) -> StepResult:
        # Flat, because DLPack may give an array (N, 1) another layout, for which JAX would compile once more.
        flat = actions.reshape(-1)
        variation, state, output = self.simulator.step(self._variation, self._state, to_jax(flat), overrides)
        self._variation, self._state = variation, state
        self._in_flight.append([flat, output])
        observations = {name: to_torch(array) for name, array in sorted({**output.frames, **output.vectors}.items())}
        results: Results = output.results.unpack()
        totals = results.statistics
        success = self._no_success if totals.success is None else totals.success
        episode = {"return": totals.returns, "length": totals.length, "success": success}
        info = {
            "success": success,
            "reward_terms": results.reward_terms,
            "episode": episode | {"reward_terms": totals.reward_terms},
            "nonfinite": results.nonfinite,
        }
        return observations, results.reward, results.terminated, results.truncated, info


def _is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: jax.Array) -> jax.Array:
    """Return the numbers of a leaf: a typed PRNG key's words, everything else as it is."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def jax_device_of(device: torch.device) -> jax.Device:
    """Return JAX's device for the same hardware; raise ``ValueError`` if JAX does not have it."""
    if device.type == "cpu" and not jax.config.jax_platforms and host.driver_problem():
        jax.config.update("jax_platforms", "cpu")  # the plugin of a GPU that cannot be used may fail
    try:
        found = jax.devices(device.type)[device.index or 0]
        if device.type == "cuda":  # without it JAX could not wait for torch's stream
            found.get_stream_for_external_ready_events()
        return found
    except (RuntimeError, IndexError, AssertionError) as error:
        asked = f"JAX_PLATFORMS={platforms!r}; " if (platforms := os.environ.get("JAX_PLATFORMS")) else ""
        cuda = "expected a working CUDA plugin of JAX (see python -m sheeplike doctor), or 'cpu'"
        if not platforms and jax.config.jax_platforms == "cpu":
            cuda = "a run on the CPU has switched JAX's GPU off in this process: expected a new process, or 'cpu'"
        expected = cuda if device.type == "cuda" else "expected JAX_PLATFORMS=cpu"
        reason = f"{asked}{expected}; JAX says: {first_sentence(error)}"
        raise ValueError(f"device={str(device)!r}: JAX has no such device here; {reason}") from error
