"""Gymnasium environments as a ``gymnasium.vector.VectorEnv`` whose tensors are torch, on one device."""

import math
import multiprocessing
import multiprocessing.connection
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space

from sheeplike.envs.contract import (
    GaveUp,
    ImageSize,
    OptionalMembers,
    Unusable,
    check_actions,
    check_positive,
    check_seed,
    resolve_device,
    resolve_image_size,
)
from sheeplike.envs.gym.observations import choose_frames, parts_of
from sheeplike.envs.gym.options import CommonOptions
from sheeplike.envs.gym.world import MakeEnv, MakeWorld, by_name, close, derive_seed, first_line
from sheeplike.options import InvalidOption
from sheeplike.terminal import warn

Observations = dict[str, torch.Tensor]
StepResult = tuple[Observations, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]

CLOSING = 10.0  # seconds that processes have to close their environments
DYING = 1.0  # seconds between the end of a process's pipe and its own, at most
FRAME_RATES = (0.01, 1000.0)  # credible steps per second
UNKNOWN_FPS = 30.0
SCALARS = {
    "reward": np.float32,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "success": np.float32,
    "return": np.float32,
    "length": np.int32,
    "nonfinite": np.bool_,
    "restarted": np.bool_,
}
STATE = ("seed", "generation", "restarts")


class GymVectorEnv(OptionalMembers, gymnasium.vector.VectorEnv):
    """Worlds of one Gymnasium environment, stepped on the host by gymnasium's own vector environments.

    Observations are those of :class:`~sheeplike.envs.gym.observations.Observer`, actions those of
    :func:`~sheeplike.envs.gym.observations.translate`, ``info`` that of
    :class:`~sheeplike.envs.mjx.vector_env.MjxVectorEnv`, but for:

    - ``success`` (N,) float32: 1 if ``info["is_success"]`` or ``info["success"]`` was true in this episode, else 0; NaN
      while no environment has reported either, as most define no success;
    - ``restarted`` (N,) bool: the environment failed, and a new one replaces it; stderr tells why. The world is
      truncated, shows its last good observation and has reward 0; its episode does not count.

    World ``i`` draws from seeds that follow from ``seed`` and ``first_env + i`` alone. Gymnasium's environments cannot
    be saved: a loaded state begins new episodes in all worlds, from seeds that no episode had.

    Args:
        make: makes one environment, given ``render_mode``. With ``vectorization=async``, other processes call it.
        action_repeat: steps of the environment for which an action is held; rewards are summed.
    """

    exact_resume = False

    def __init__(
        self,
        make: MakeEnv,
        options: CommonOptions,
        *,
        num_envs: int,
        device: torch.device | str = "cpu",
        image_size: ImageSize = 64,
        action_repeat: int = 1,
        seed: int = 0,
        first_env: int = 0,
    ) -> None:
        self.first_env = first_env
        self.name, self.num_envs = options.id, check_positive("num_envs", num_envs, 16)
        self.device, self._seed = resolve_device(device), check_seed(seed)
        repeat = check_positive("action_repeat", action_repeat, 1)
        limit, fps = self._open(make, options, resolve_image_size(image_size), repeat)
        self.episode_length = math.ceil(limit / repeat)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": round(fps / repeat, 6)}
        self.single_action_space = self._worlds.single_action_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.single_observation_space = self._worlds.single_observation_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._host = {key: np.zeros(num_envs, dtype) for key, dtype in SCALARS.items()}
        self._buffer: Mapping[str, np.ndarray] = {}  # the worlds write into it at every step
        self._reached = np.zeros(num_envs, bool)  # success in this episode
        self._defines_success = False  # no environment has reported a success yet
        self._running = False  # a first reset was made
        self._anew = False  # the next step begins an episode in all worlds
        self._generation = 0  # derives new seeds each time that all worlds begin anew
        self._restarts = 0

    @property
    def counters(self) -> dict[str, float]:
        """Count of restarts so far."""
        return {"env/restarts": float(self._restarts)}

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin a new episode in every world; with a ``seed`` the whole stream of episodes begins anew."""
        if options:
            raise ValueError(f"options={dict(options)!r}: expected none")
        assert not self.closed, "reset() of a closed environment"
        if seed is not None or not self._running:
            self._seed = self._seed if seed is None else check_seed(seed)
            self._generation = self._restarts = 0
            self._anew = True
        self._begin()
        return self._deliver()[::4]

    def step(self, actions: torch.Tensor) -> StepResult:
        """Take one action in every world; waits for the device.

        Actions are float32 (N, A), clipped to [-1, 1], or int64 (N,) or (N, K). Raises ``GaveUp``.
        """
        dtype = torch.float32 if isinstance(self.single_action_space, spaces.Box) else torch.int64
        check_actions(self, actions, dtype, begun=self._running)
        if self._anew:
            self._begin()
            return self._deliver()
        before = self._host["terminated"] | self._host["truncated"]
        with self._explained():
            self._buffer, reward, terminated, truncated, info = self._worlds.step(actions.detach().cpu().numpy())
        self._count(reward, terminated, truncated, info, began=before)
        return self._deliver()

    def close_extras(self, **kwargs: Any) -> None:
        """Close all environments, and end their processes."""
        self._running = False
        with suppress(Exception):
            self._worlds.close(timeout=CLOSING)
        for process in getattr(self._worlds, "processes", ()):
            process.kill()
            process.join()
        self._worlds.closed = True  # otherwise its destructor would wait for answers

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the numbers from which a resumed run derives seeds that no episode had."""
        assert self._running, "state_dict() before reset()"
        return {name: torch.tensor(getattr(self, f"_{name}")) for name in STATE}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Make the next step begin a new episode in every world, with seeds that the saved run did not use."""
        if set(state) != set(STATE):
            odd = sorted(set(state) ^ set(STATE))[0]
            raise ValueError(f"state has {len(state)} entries, this environment {len(STATE)}: {odd!r} is in one only")
        self._seed, self._generation, self._restarts = (int(state[name]) for name in STATE)
        if not all(0 <= number < 2**62 for number in (self._seed, self._generation, self._restarts)):
            raise ValueError("state has a negative or too large a number")
        self._generation += 1
        self._running = self._anew = True

    def _open(self, make: MakeEnv, options: CommonOptions, size: tuple[int, int], repeat: int) -> tuple[int, float]:
        """Make the worlds; return their steps in an episode and in a second, before any are repeated."""
        made, fps, self.action_names = _inspect(make, options, size, repeat)
        self.native_actions = made.action_space
        self._worlds = self._make_worlds(made)
        return made.options.episode_length, fps

    def _make_worlds(self, make_world: MakeWorld) -> SyncVectorEnv | AsyncVectorEnv:
        makers: list[Callable[[], gymnasium.Env]] = [make_world] * self.num_envs
        # No copy there: `send` copies all that is delivered.
        common = {"copy": False, "autoreset_mode": AutoresetMode.NEXT_STEP}
        if make_world.options.vectorization == "sync":
            return SyncVectorEnv(makers, **common)
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            sys.exit(1)  # a program without a guard begins anew in a process that it started; that one reports it
        # Otherwise each process would import the program and this package by itself.
        multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", MakeWorld.__module__])
        try:
            # A forked copy of this process would hold locks and device contexts whose threads it lacks.
            return AsyncVectorEnv(makers, context="forkserver", **common)
        except (EOFError, OSError) as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            why += "; a program needs a file, with `if __name__ == '__main__':` before its run, or vectorization=sync"
            raise Unusable(f"{self.name}: worlds in processes of their own could not be made: {why}") from error

    def _begin(self) -> None:
        """Begin episodes in all worlds, from seeds or in their own streams, with totals from zero."""
        worlds = range(self.first_env, self.first_env + self.num_envs)
        seeds = [derive_seed(self._seed, world, self._generation) if self._anew else None for world in worlds]
        with self._explained():
            self._buffer, info = self._worlds.reset(seed=seeds)
        self._running, self._anew = True, False
        self._count(0, False, False, info, began=np.ones(self.num_envs, bool))

    def _count(self, reward: Any, terminated: Any, truncated: Any, info: dict[str, Any], *, began: np.ndarray) -> None:
        """Update the totals of the episodes from what the worlds return; ``began`` (N,) bool: an episode begins."""
        host, none = self._host, np.zeros(self.num_envs, bool)
        host["reward"][:], host["terminated"][:], host["truncated"][:] = reward, terminated, truncated
        for total in (self._reached, host["return"], host["length"]):
            total[began] = 0
        host["return"] += host["reward"]
        host["length"] += ~began
        self._reached |= info.get("success", none)
        self._defines_success |= "success" in info
        host["success"][:] = self._reached if self._defines_success else np.nan
        host["nonfinite"][:] = info.get("_nonfinite", none)
        host["restarted"][:] = info.get("_restarted", none)
        for world in np.flatnonzero(host["restarted"]):
            warn(f"world {world} of {self.name} was restarted: {info['restarted'][world]}")
            self._restarts += 1

    def _deliver(self) -> StepResult:
        observations = {key: send(self._buffer[key], self.device) for key in self.single_observation_space}
        scalars = {key: send(value, self.device) for key, value in self._host.items()}
        totals = {key: scalars[key] for key in ("return", "length", "success")} | {"reward_terms": {}}
        info = {"success": scalars["success"], "reward_terms": {}, "episode": totals}
        info |= {key: scalars[key] for key in ("nonfinite", "restarted")}
        return observations, scalars["reward"], scalars["terminated"], scalars["truncated"], info

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise ``GaveUp`` if a process has died: with ``vectorization=async`` each world has its own."""
        try:
            yield
        except (EOFError, OSError) as error:
            processes = getattr(self._worlds, "processes", [])
            multiprocessing.connection.wait([process.sentinel for process in processes], DYING)
            dead = {world: process.exitcode for world, process in enumerate(processes) if process.exitcode is not None}
            if not dead:
                raise
            status = ", ".join(f"that of world {world} ended with status {status}" for world, status in dead.items())
            raise GaveUp(
                f"{self.name}: a process has died: {status}; resume the run from its newest checkpoint"
            ) from error


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a tensor of an array as it is now; they share no memory."""
    host = torch.from_numpy(array)
    # A copy from pinned memory does not wait for what the GPU still has to do; torch reuses that memory afterwards.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device, copy=True)


def _frame_rate(metadata: Any) -> float:
    """Return ``render_fps``, or a default if it is missing or not credible."""
    try:
        rate = float(metadata["render_fps"])
    except (TypeError, KeyError, ValueError, OverflowError):
        return UNKNOWN_FPS
    return rate if FRAME_RATES[0] <= rate <= FRAME_RATES[1] else UNKNOWN_FPS


def _choices(env: gymnasium.Env) -> list[str]:
    """Return the names of discrete actions, if the environment has them as ALE's or MiniGrid's do."""
    with suppress(Exception):  # other environments may mean anything by these attributes
        meanings = getattr(env.unwrapped, "get_action_meanings", None)
        names = meanings() if meanings else [one.name for one in env.unwrapped.actions]
        if len(names) == env.action_space.n and all(isinstance(name, str) for name in names):
            return list(names)
    return []


def _inspect(
    make: MakeEnv, options: CommonOptions, image_size: tuple[int, int], action_repeat: int
) -> tuple[MakeWorld, float, list[str]]:
    """Return the maker of worlds, frame rate and names of actions, read from one environment that is made here."""
    with by_name(options.id):
        env = make(render_mode=None)
    try:
        for part in parts_of(env.observation_space)[2]:
            if not isinstance(part.space, spaces.Text):
                warn(f"{options.id}: the observation {part.name or part.space} is left out: it has no fixed size")
        if options.frames != (frames := choose_frames(options.frames, env)):
            options = options.replace(frames=frames)
        limits = [options.episode_length, env.spec.max_episode_steps if env.spec else None]
        limits += [getattr(env.unwrapped, attribute, None) for attribute in ("max_steps", "max_episode_steps")]
        limit = next((int(limit) for limit in limits if isinstance(limit, int | np.integer) and limit > 0), None)
        if limit is None:
            expected = f"a number of steps, since {options.id} has no limit of its own"
            raise InvalidOption("env.options.episode_length", None, expected, 1000)
        made = MakeWorld(
            make=make,
            options=options.replace(episode_length=limit),
            observation_space=env.observation_space,
            action_space=env.action_space,
            image_size=image_size,
            action_repeat=action_repeat,
        )
        return made, _frame_rate(env.metadata), _choices(env)
    finally:
        close(env, options.id)
