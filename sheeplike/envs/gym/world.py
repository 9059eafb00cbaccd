"""One world: an environment of Gymnasium, with our observations and actions, restarted when it fails.

No torch and no JAX: with ``vectorization=async`` this runs in processes of their own.
"""

import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sheeplike.envs.contract import GaveUp, Unusable
from sheeplike.envs.gym.observations import Observer, translate
from sheeplike.envs.gym.options import CommonOptions
from sheeplike.options import InvalidOption
from sheeplike.terminal import one_line, text_of, warn

MakeEnv = Callable[..., gymnasium.Env]
IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to stop: they reach all processes of a job, of which only the main one acts."""
PATIENCE = 5.0  # seconds that an environment has to close after the run has ended
RENDERING = ("MUJOCO_", "PYOPENGL_", "SDL_")
"""Prefixes of the environment variables that choose how environments render."""


@dataclass(frozen=True, kw_only=True)
class MakeWorld:
    """Makes a world, in this process or, unpickled, in another; ``frames`` and ``episode_length`` are resolved."""

    make: MakeEnv
    options: CommonOptions
    observation_space: spaces.Space
    action_space: spaces.Space
    image_size: tuple[int, int]
    action_repeat: int
    process: int = field(default_factory=os.getpid)
    # The server that forks the processes may have begun before these were set.
    environment: dict[str, str] = field(
        default_factory=lambda: {name: value for name, value in os.environ.items() if name.startswith(RENDERING)}
    )

    def __call__(self) -> "World":
        world = World(self)
        if os.getpid() == self.process:
            with by_name(self.options.id):
                world.open()
            return world
        # Another process opens the environment at its first reset: an exception here would be lost with the process.
        os.environ.update(self.environment)
        for signum in IGNORED:
            signal.signal(signum, signal.SIG_IGN)
        threading.Thread(target=_end_with_run, daemon=True).start()
        return world


def _end_with_run() -> None:
    """End this process when the run has ended, even if its environment hangs."""
    run = multiprocessing.parent_process()
    if run is not None:
        multiprocessing.connection.wait([run.sentinel])
        time.sleep(PATIENCE)
        os._exit(1)


class World(gymnasium.Env):
    """One world; its ``info`` may hold ``success``, ``nonfinite``, and ``restarted`` with the reason.

    If the environment raises in ``step`` or ``render``, the step delivers the last good observation, truncated and with
    reward 0. The reset that follows makes a new environment, with a new seed, and tries again if that fails.
    """

    def __init__(self, made: MakeWorld) -> None:
        self._made, self._options = made, made.options
        self._observe = Observer(made.observation_space, made.options, made.image_size)
        self.observation_space = self._observe.space
        self.action_space, self._to_env = translate(made.action_space)
        self._vectors = [key for key, space in self.observation_space.items() if space.dtype == np.float32]
        self._env: gymnasium.Env | None = None
        self._last: dict[str, np.ndarray] = {}
        self._steps = 0
        self._seed, self._restarts = 0, 0  # environments that were replaced since this seed was set
        self._unseeded = True
        self._failures: list[str] = []  # failures since the last info
        self._in_a_row = 0  # failures since an episode ended by itself

    def open(self) -> None:
        """Make the environment, with rendering if frames come from it."""
        self._env = self._made.make(render_mode="rgb_array" if self._options.frames == "render" else None)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begin an episode; with a ``seed`` a new stream of random numbers too. May raise ``GaveUp``."""
        if seed is not None:
            self._seed, self._restarts, self._unseeded = seed, 0, True
        while True:
            try:
                if self._env is None:
                    self.open()
                start = derive_seed(self._seed, self._restarts) if self._restarts else self._seed
                raw, _ = self._env.reset(seed=start if self._unseeded else None)
                observation = self._observe(raw, self._env.render, first=True)
                if not self._finite(observation):
                    raise FloatingPointError("the first observation of an episode is not finite")
            except BaseException as error:  # also SystemExit, as of a viewer whose window is closed
                self._discard(error)
                continue
            self._unseeded, self._steps = False, 0
            self._last = observation
            return observation, self._with_failures({})

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Hold one action for ``action_repeat`` steps or until the episode ends; raises as :meth:`reset` does."""
        try:
            outcome = self._advance(self._to_env(action))
        except BaseException as error:
            self._discard(error)
            return self._last, 0.0, False, True, self._with_failures({})
        self._last, _, terminated, truncated, info = outcome
        if terminated or (truncated and "nonfinite" not in info):
            self._in_a_row = 0
        return outcome

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            close(env, self._options.id)

    def _advance(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        options, env = self._options, self._env
        reward, raw, earlier, own = 0.0, None, None, {}
        for _ in range(self._made.action_repeat):
            earlier = raw
            raw, one, terminated, truncated, info = env.step(action)
            if np.asarray(one).dtype.kind not in "biuf":
                raise TypeError(f"the reward is {one!r}: expected a number")
            reward += float(one)
            if (reached := _success(info)) is not None:
                own["success"] = own.get("success", False) or reached
            self._steps += 1
            if terminated or truncated or self._steps >= options.episode_length:
                truncated = bool(truncated) or not terminated
                break
        with np.errstate(over="ignore"):
            reward = float(np.float32(reward))  # more than 3.4e38 is infinite as it is delivered
        observation = self._observe(raw, env.render, first=False, earlier=earlier if options.pool_frames else None)
        if not (self._finite(observation) and np.isfinite(reward)):
            return observation, 0.0, False, True, self._with_failures({"nonfinite": True})
        if options.clip_rewards:
            reward = float(np.sign(reward))
        return observation, reward, bool(terminated), bool(truncated), self._with_failures(own)

    def _finite(self, observation: dict[str, np.ndarray]) -> bool:
        """Return True if all vectors are finite; if not, set all of them to zeros."""
        if all(np.isfinite(observation[key]).all() for key in self._vectors):
            return True
        for key in self._vectors:
            observation[key] = np.zeros_like(observation[key])
        return False

    def _discard(self, error: BaseException) -> None:
        """Close the environment that raised ``error``, so that a reset makes a new one; may raise ``GaveUp``."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        # At the first observation a missing package or a wrong option fails the next time as well.
        lasting = ImportError | gymnasium.error.DependencyNotInstalled | Unusable | InvalidOption
        if not self._last and isinstance(error, lasting):
            raise Unusable(first_line(error)) from error
        self._in_a_row += 1
        self._failures.append(f"{type(error).__name__}: {first_line(error)}")
        if self._in_a_row > self._options.max_restarts:
            # Other types may not survive pickling, and an OSError would mean that a process has died.
            raise GaveUp(f"{self._failures[-1]}; it failed {self._in_a_row} times in a row (max_restarts)") from error
        self.close()
        self._unseeded, self._restarts = True, self._restarts + 1

    def _with_failures(self, info: dict[str, Any]) -> dict[str, Any]:
        if self._failures:
            info["restarted"], self._failures = "; ".join(self._failures), []
        return info


def _success(info: Mapping[str, Any]) -> bool | None:
    """Return the success that an environment reports, False for NaN; None if it reports none."""
    said = [np.asarray(info[name]) for name in ("is_success", "success") if name in info]
    is_number = said and said[0].dtype.kind in "biuf" and said[0].size  # texts and objects say nothing
    return bool((said[0] > 0.5).all()) if is_number else None


@contextmanager
def by_name(id: str) -> Iterator[None]:
    """Turn errors of the environment's own code into ``Unusable``, with its name."""
    try:
        yield
    except (Unusable, InvalidOption):
        raise
    except Exception as error:
        raise Unusable(f"{id}: {type(error).__name__}: {first_line(error)}") from error


def close(env: gymnasium.Env, id: str) -> None:
    """Close an environment; if that fails, warn."""
    try:
        env.close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        warn(f"{id}: closing it failed: {type(error).__name__}: {first_line(error)}")


def derive_seed(*numbers: int) -> int:
    """Derive a seed from numbers; it is in [0, 2**31), the range that every environment takes."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, at most 500 characters."""
    return one_line(next((line for line in text_of(error).splitlines() if line.strip()), ""))[:500]
