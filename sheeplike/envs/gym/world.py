"""One world: an environment that somebody else made, with our observations and actions, restarted when it fails.

No torch and no JAX: with ``vectorization=async`` this runs in processes of their own.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sheeplike.envs.errors import InvalidOption, Unusable
from sheeplike.envs.gym.actions import translate
from sheeplike.envs.gym.observations import Observer

MakeEnv = Callable[..., gymnasium.Env]
IGNORED = ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that ask a run to stop: they reach all processes of a terminal or a job, and only the first is to act."""
RENDERING = ("MUJOCO_", "PYOPENGL_", "SDL_")
"""How the names of variables begin that say how environments render."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a world makes of its environment.

    Attributes:
        make: makes the environment; takes ``render_mode``.
        episode_length: steps of the environment after which an episode is truncated.
        action_repeat: steps of the environment for which an action is held; rewards are summed.
        frames: ``observation``, ``render`` or ``none``.
        image_size, resize, grayscale, frame_stack: see :class:`~sheeplike.envs.gym.images.Images`.
        pool_frames: of the last two frames of a held action take, pixel by pixel, the brighter: screens flicker.
        clip_rewards: a reward is its sign.
        max_restarts: in a row, without an episode that ended by itself between them.
    """

    make: MakeEnv
    episode_length: int
    action_repeat: int = 1
    frames: str = "none"
    image_size: tuple[int, int] = (64, 64)
    resize: str = "auto"
    grayscale: bool = False
    frame_stack: int = 1
    pool_frames: bool = False
    clip_rewards: bool = False
    max_restarts: int = 10

    def make_env(self) -> gymnasium.Env:
        """A new environment, which renders if frames come from there."""
        return self.make(render_mode="rgb_array" if self.frames == "render" else None)


class World(gymnasium.Env):
    """One world.

    Its ``info`` is empty, but for what is the case: ``success`` (the environment's ``is_success`` or ``success``),
    ``nonfinite``, and ``restarted``, why the environment was replaced by a new one.

    An environment that raises in ``step`` or ``render`` is cut: the step delivers its last good observation, truncated
    and with reward 0. The reset that follows makes a new one, with a seed of its own, and tries again if that fails.

    Args:
        settings: of this world.
        portable: what it raises will be sent to another process, and is made fit for that.
    """

    def __init__(self, settings: Settings, *, portable: bool = False) -> None:
        self.settings, self._portable = settings, portable
        self._env: gymnasium.Env | None = settings.make_env()
        self.metadata = dict(self._env.metadata)
        self.render_mode = None
        self._observe = Observer(
            self._env.observation_space,
            frames=settings.frames,
            image_size=settings.image_size,
            resize=settings.resize,
            grayscale=settings.grayscale,
            frame_stack=settings.frame_stack,
        )
        self.observation_space = self._observe.space
        self.action_space, self._to_env = translate(self._env.action_space)
        self._vectors = [key for key, space in self.observation_space.items() if space.dtype == np.float32]
        self._last: dict[str, np.ndarray] = {}
        self._steps = 0
        self._seed, self._made = 0, 0  # of the stream of random numbers; environments that began in it
        self._new = True  # the environment has not been seeded yet
        self._failures: list[str] = []  # since the last info
        self._in_a_row = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begins an episode; with a ``seed`` a new stream of random numbers too.

        Raises:
            Exception: that of the environment, after ``max_restarts`` restarts in a row.
        """
        if seed is not None:
            self._seed, self._made, self._new = seed, 0, True
        while True:
            try:
                if self._env is None:
                    self._env = self.settings.make_env()
                start = derive_seed(self._seed, self._made) if self._made else self._seed
                raw, _ = self._env.reset(seed=start if self._new else None)
                observation = self._observe(raw, self._env.render, first=True)
                if not self._finite(observation):
                    raise FloatingPointError("the first observation of an episode is not finite")
            except Exception as error:
                self._restart(error)
                continue
            self._new, self._steps = False, 0
            self._last = observation
            return observation, self._told({})

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """One action, held as long as the settings say or until the episode ends.

        Raises:
            Exception: as :meth:`reset`.
        """
        try:
            outcome = self._advance(self._to_env(action))
        except Exception as error:
            self._restart(error)
            return self._last, 0.0, False, True, self._told({})
        self._last, _, terminated, truncated, info = outcome
        if terminated or (truncated and "nonfinite" not in info):
            self._in_a_row = 0
        return outcome

    def close(self) -> None:
        """Closes the environment."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _advance(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        settings, env = self.settings, self._env
        reward, raw, earlier = 0.0, None, None
        for _ in range(settings.action_repeat):
            earlier = raw
            raw, one, terminated, truncated, told = env.step(action)
            reward += float(one)
            self._steps += 1
            if terminated or truncated or self._steps >= settings.episode_length:
                truncated = bool(truncated) or not terminated
                break
        pooled = earlier if settings.pool_frames else None
        observation = self._observe(raw, env.render, first=False, earlier=pooled)
        info: dict[str, Any] = {}
        if _says_success(told):
            info["success"] = True
        if not (self._finite(observation) and np.isfinite(reward)):
            return observation, 0.0, False, True, self._told({"nonfinite": True})
        if settings.clip_rewards:
            reward = float(np.sign(reward))
        return observation, reward, bool(terminated), bool(truncated), self._told(info)

    def _finite(self, observation: dict[str, np.ndarray]) -> bool:
        """Whether all vectors are finite; if not, all of them become zeros."""
        if all(np.isfinite(observation[key]).all() for key in self._vectors):
            return True
        for key in self._vectors:
            observation[key] = np.zeros_like(observation[key])
        return False

    def _restart(self, error: Exception) -> None:
        """Let go of an environment that failed, so that a reset makes another one; or give up."""
        self._in_a_row += 1
        # What is not installed, or does not fit, will not the next time either.
        if isinstance(error, ImportError | gymnasium.error.DependencyNotInstalled | Unusable | InvalidOption):
            raise Unusable(first_line(error)) from error
        if self._in_a_row > self.settings.max_restarts:
            error.add_note(f"the environment failed {self._in_a_row} times in a row (max_restarts)")
            raise sendable(error) if self._portable else error
        self._failures.append(f"{type(error).__name__}: {first_line(error)}")
        if self._env is not None:
            with suppress(Exception):
                self._env.close()
        self._env, self._new, self._made = None, True, self._made + 1

    def _told(self, info: dict[str, Any]) -> dict[str, Any]:
        if self._failures:
            info["restarted"], self._failures = "; ".join(self._failures), []
        return info


class Unmade(gymnasium.Env):
    """What there is in another process instead of a world that could not be made: only once it runs can it tell why.

    Args:
        error: of the environment.
        observation_space, action_space: of the other worlds.
    """

    def __init__(self, error: Exception, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self._error, self.observation_space, self.action_space = error, observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        error = sendable(self._error)
        if isinstance(error, MemoryError):
            raise error
        kind = "" if isinstance(self._error, Unusable | InvalidOption) else f"{type(self._error).__name__}: "
        raise Unusable(f"{kind}{first_line(self._error)}")


class MakeWorld:
    """Makes a world, here or in a process of its own; here first, where its spaces are found out."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._spaces: tuple[spaces.Space, ...] = ()
        self._process = multiprocessing.current_process().name
        # A server of processes may have begun before these were set.
        self._environment = {name: value for name, value in os.environ.items() if name.startswith(RENDERING)}

    def __call__(self) -> World | Unmade:
        if multiprocessing.current_process().name == self._process:
            world = World(self.settings)
            self._spaces = world.observation_space, world.action_space
            return world
        os.environ.update(self._environment)
        for name in IGNORED:
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        try:
            return World(self.settings, portable=True)
        except Exception as error:
            return Unmade(error, *self._spaces)


def derive_seed(*numbers: int) -> int:
    """A seed in [0, 2**31) that other numbers do not have; 31 bits, which every environment takes."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def sendable(error: Exception) -> Exception:
    """``error``, or what says the same where it would not survive the way to another process, or be misread there."""
    # These two say there that a process has died.
    misread = isinstance(error, OSError | EOFError)
    if type(error).__module__ == "builtins" and not misread and all(isinstance(x, str | int) for x in error.args):
        with suppress(Exception):
            type(error)(error)  # as gymnasium raises it there
            return error
    return RuntimeError(f"{type(error).__name__}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _says_success(info: dict[str, Any]) -> bool:
    told = info.get("is_success", info.get("success"))
    return told is not None and bool(np.asarray(told).all())
