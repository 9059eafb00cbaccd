"""Gymnasium environments as a ``gymnasium.vector.VectorEnv`` whose tensors are torch, on one device."""

import math
import multiprocessing
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space

from sheeplike.envs.arguments import ImageSize, check_seed, resolve_device, resolve_image_size
from sheeplike.envs.errors import Unusable
from sheeplike.envs.gym.checks import look_at, positive, tell
from sheeplike.envs.gym.settings import check_options
from sheeplike.envs.gym.staging import Staging
from sheeplike.envs.gym.world import MakeEnv, MakeWorld, Settings, derive_seed, first_line

Observations = dict[str, torch.Tensor]

CLOSING = 10.0  # seconds that processes have to close their environments
SCALARS = {
    "reward": np.float32,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "success": np.bool_,
    "return": np.float32,
    "length": np.int32,
    "nonfinite": np.bool_,
    "restarted": np.bool_,
}
STATE = ("seed", "begun", "restarts")


class GymVectorEnv(gymnasium.vector.VectorEnv):
    """Worlds of one Gymnasium environment, stepped on the host by gymnasium's own vector environments.

    Observations are a flat dict of tensors on ``device``: ``"pixels/<camera>"`` uint8 (N, H, W, C), ``"state"`` and the
    environment's other vectors float32 (N, D); see :class:`~sheeplike.envs.gym.observations.Observer`. Actions are
    those of :func:`~sheeplike.envs.gym.actions.translate`. Resets follow ``AutoresetMode.NEXT_STEP``: the last frame of
    an episode comes with ``terminated`` or ``truncated``; the next call ignores that world's action and delivers the
    first frame of a new episode, with reward 0.

    ``info`` has the same keys at every call, tensors on ``device``:

    - ``success`` (N,) bool: the environment said so in this episode, in its ``info["is_success"]`` or
      ``info["success"]``; never where it does not tell;
    - ``reward_terms``: empty;
    - ``episode`` {``return`` (N,) float32, ``length`` (N,) int32 in policy steps, ``success`` (N,) bool,
      ``reward_terms``}: running totals, final where the episode ends;
    - ``nonfinite`` (N,) bool: a vector or the reward was not finite. Vectors and reward are zeros, the world is
      truncated, and the next step resets it;
    - ``restarted`` (N,) bool: the environment is replaced by a new one, which is told on stderr: it failed or, in
      ``async``, somebody's process died. Where that was in a step, the world is truncated, shows its last good
      observation and has reward 0; what was played of the episode is not to be counted as one.

    World ``i`` draws from seeds that follow from ``seed`` and ``i``, whatever the number of worlds. A state that is
    loaded begins new episodes in all worlds, from seeds that no episode before had: other people's environments cannot
    be saved (``exact_resume`` is False).

    Args:
        make: makes one environment; takes ``render_mode``. For ``async`` it is sent to other processes.
        name: of the environment, for people to read.
        num_envs: worlds.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.
        image_size: pixels, ``(H, W)`` or one number; the same for all cameras.
        action_repeat: steps of the environment for which an action is held; rewards are summed.
        seed: of the first ``reset()``.
        episode_length: steps of the environment after which an episode is truncated; None: its own limit.
        frames: where images come from: ``observation``, ``render``, ``none``, or ``auto``, the first that there is.
        resize, grayscale, frame_stack: see :class:`~sheeplike.envs.gym.images.Images`.
        pool_frames, clip_rewards: see :class:`~sheeplike.envs.gym.world.Settings`.
        vectorization: ``sync``, one world after another, or ``async``, each in a process of its own.
        max_restarts: of one world in a row, before its exception ends the run; in ``async`` of all worlds too, when a
            process has died.

    Attributes:
        episode_length: policy steps of an episode, at most.
        counters: ``env/restarts`` since the run began.

    Raises:
        Unusable: the environment cannot be made here.
        ValueError: a value that it cannot serve.
    """

    exact_resume = False

    def __init__(
        self,
        make: MakeEnv,
        *,
        name: str,
        num_envs: int,
        device: torch.device | str = "cpu",
        image_size: ImageSize = 64,
        action_repeat: int = 1,
        seed: int = 0,
        episode_length: int | None = None,
        frames: str = "auto",
        resize: str = "auto",
        grayscale: bool = False,
        frame_stack: int = 1,
        pool_frames: bool = False,
        clip_rewards: bool = False,
        vectorization: str = "sync",
        max_restarts: int = 10,
    ) -> None:
        check_options(
            {"episode_length": episode_length, "frames": frames, "resize": resize, "frame_stack": frame_stack}
        )
        check_options({"vectorization": vectorization, "max_restarts": max_restarts})
        self.name, self.num_envs = name, positive("num_envs", num_envs)
        self.device, self._seed = resolve_device(device), check_seed(seed)
        repeat = positive("action_repeat", action_repeat)
        frames, limit, fps = look_at(make, name, frames, episode_length)
        self.episode_length = math.ceil(limit / repeat)
        self._settings = Settings(
            make=make,
            episode_length=limit,
            action_repeat=repeat,
            frames=frames,
            image_size=resolve_image_size(image_size),
            resize=resize,
            grayscale=grayscale,
            frame_stack=frame_stack,
            pool_frames=pool_frames,
            clip_rewards=clip_rewards,
            max_restarts=max_restarts,
        )
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": round(fps / repeat, 6)}
        self._asynchronous = vectorization == "async"
        self._worlds = self._make_worlds()
        self.single_action_space = self._worlds.single_action_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.single_observation_space = self._worlds.single_observation_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        # Names of observations are the environment's: what begins with a colon is ours.
        sent = {key: (space.shape, space.dtype) for key, space in self.observation_space.items()}
        sent |= {f":{key}": ((num_envs,), dtype) for key, dtype in SCALARS.items()}
        self._staging = Staging(sent, self.device)
        self._host = {key: np.zeros(num_envs, dtype) for key, dtype in SCALARS.items()}
        self._buffer: Mapping[str, np.ndarray] = {}  # of the worlds, which write into it at every step
        self._observations: Observations = {}  # the last that were given out
        self._running = False  # a first reset has been made
        self._anew = False  # the next step begins an episode in all worlds, whatever they did
        self._begun = 0  # how often all worlds had to begin anew, with other seeds than before
        self._restarts = 0
        self._deaths = np.zeros(num_envs, int)  # of a world's process, since an episode there last ended by itself

    @property
    def counters(self) -> dict[str, float]:
        """Numbers of the run so far, for its record."""
        return {"env/restarts": float(self._restarts)}

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begins a new episode in every world.

        With a ``seed`` everything restarts from it. Without one, the first call uses the seed given at construction and
        later calls go on in each world's own random stream.

        Raises:
            ValueError: an impossible seed, or ``options``, of which there are none.
            RuntimeError: the environment is closed.
            Exception: that of an environment, after ``max_restarts`` restarts in a row.
        """
        if options:
            raise ValueError(f"options={dict(options)!r}: expected none")
        if self.closed:
            raise RuntimeError("reset() of a closed environment")
        if seed is not None or not self._running:
            self._seed = self._seed if seed is None else check_seed(seed)
            self._begun = self._restarts = 0
            self._anew = True
        self._begin()
        return self._deliver()[::4]

    def step(
        self, actions: torch.Tensor
    ) -> tuple[Observations, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """One action in every world. Waits for the device, which has to say what was chosen.

        Args:
            actions: float32 (N, A), clipped to [-1, 1]; int64 (N,) or (N, K) where they are discrete; on the env's
                device.

        Returns:
            observations, reward (N,) float32, terminated (N,) bool, truncated (N,) bool, info; see the class.

        Raises:
            RuntimeError: ``reset`` was never called, or the environment is closed.
            ValueError: actions of another shape, dtype or device.
            Exception: that of an environment, after ``max_restarts`` restarts in a row.
        """
        if not self._running:
            raise RuntimeError("step() of a closed environment" if self.closed else "step() before the first reset()")
        shape, dtype = self.action_space.shape, self.action_dtype
        if tuple(actions.shape) != shape or actions.dtype != dtype or actions.device != self.device:
            raise ValueError(
                f"actions are {actions.dtype} {tuple(actions.shape)} on {actions.device}: "
                f"expected {dtype} {shape} on {self.device}"
            )
        if self._anew:
            self._begin()
            return self._deliver()
        host = self._host
        before = host["terminated"] | host["truncated"]
        try:
            chosen = actions.detach().cpu().numpy()
            self._buffer, reward, terminated, truncated, info = self._worlds.step(chosen)
        except (EOFError, OSError) as error:
            self._cut(error)
            # Those that had ended were about to begin, and show how: whoever learns from it takes this step for the
            # first of an episode. The next one begins that episode again, from the same seeds.
            if before.any():
                self._reset()
            for name in ("success", "return", "length"):
                host[name][before] = 0
            return self._deliver(keep=~before)
        host["reward"][:], host["terminated"][:], host["truncated"][:] = reward, terminated, truncated
        self._count(info, began=before)
        return self._deliver()

    @property
    def action_dtype(self) -> torch.dtype:
        """Of the actions that ``step`` takes."""
        return torch.float32 if isinstance(self.single_action_space, spaces.Box) else torch.int64

    def close_extras(self, **kwargs: Any) -> None:
        """Closes all environments, and ends their processes."""
        self._running, self._observations = False, {}
        with suppress(Exception):
            self._worlds.close(**({"timeout": CLOSING} if self._asynchronous else {}))
        self._end_processes()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a continuation needs to begin episodes that were not there before.

        Raises:
            RuntimeError: ``reset`` was never called.
        """
        if not self._running:
            raise RuntimeError("state_dict() before reset(): there is no state yet")
        return {name: torch.tensor(getattr(self, f"_{name}")) for name in STATE}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Has the next step begin a new episode in every world, with seeds that the run before did not use.

        Raises:
            ValueError: it is the state of another kind of environment.
        """
        if set(state) != set(STATE):
            odd = sorted(set(state) ^ set(STATE))[0]
            raise ValueError(f"state has {len(state)} entries, this environment {len(STATE)}: {odd!r} is in one only")
        self._seed, self._begun, self._restarts = (int(state[name]) for name in STATE)
        self._begun += 1
        self._running = self._anew = True

    # --- the worlds -------------------------------------------------------------------------------------------------

    def _make_worlds(self) -> SyncVectorEnv | AsyncVectorEnv:
        makers: list[Callable[[], gymnasium.Env]] = [MakeWorld(self._settings)] * self.num_envs
        # Nothing is copied there: what leaves here is.
        common = {"copy": False, "autoreset_mode": AutoresetMode.NEXT_STEP}
        if not self._asynchronous:
            return SyncVectorEnv(makers, **common)
        # A forked copy of this process would hold locks and device contexts whose threads it lacks.
        context = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        if context == "forkserver":
            # Once for all of them: what they need, and the program, which each of them would import otherwise.
            multiprocessing.get_context(context).set_forkserver_preload(["__main__", MakeWorld.__module__])
        try:
            return AsyncVectorEnv(makers, context=context, **common)
        except (EOFError, OSError) as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            raise Unusable(f"{self.name}: worlds in processes of their own could not be made: {why}") from error

    def _reset(self) -> dict[str, Any]:
        """New episodes in all worlds, from seeds or in their own streams; returns what the worlds tell."""
        while True:
            seeds: list[int | None] = [None] * self.num_envs
            if self._anew:
                seeds = [derive_seed(self._seed, world, self._begun) for world in range(self.num_envs)]
            try:
                self._buffer, info = self._worlds.reset(seed=seeds)
                return info
            except (EOFError, OSError) as error:
                self._cut(error)

    def _begin(self) -> None:
        """New episodes in all worlds, with totals from zero."""
        info = self._reset()
        self._running, self._anew = True, False
        for name in ("reward", "terminated", "truncated"):
            self._host[name][:] = 0
        self._count(info, began=np.ones(self.num_envs, bool))

    def _count(self, info: dict[str, Any], *, began: np.ndarray) -> None:
        """Totals of the episodes, and what the worlds told."""
        host, none = self._host, np.zeros(self.num_envs, bool)
        for name in ("success", "return", "length"):
            host[name][began] = 0
        host["return"] += host["reward"]
        host["length"] += ~began
        host["success"] |= info.get("_success", none)
        host["nonfinite"][:] = info.get("_nonfinite", none)
        host["restarted"][:] = info.get("_restarted", none)
        for world in np.flatnonzero(host["restarted"]):
            tell(f"world {world} of {self.name} was restarted: {info['restarted'][world]}")
            self._restarts += 1
        self._deaths[(host["terminated"] | host["truncated"]) & ~host["nonfinite"] & ~host["restarted"]] = 0

    def _deliver(
        self, *, keep: np.ndarray | None = None
    ) -> tuple[Observations, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """What a call returns; ``keep`` (N,) bool: of these worlds with the observations of the last one."""
        sent = self._staging.send({**self._buffer, **{f":{key}": value for key, value in self._host.items()}})
        seen = {key: sent[key] for key in self.single_observation_space}
        if keep is not None:
            worlds = torch.from_numpy(keep).to(self.device)
            seen = {key: torch.where(_along(worlds, new), self._observations[key], new) for key, new in seen.items()}
        self._observations = seen
        told = {key: sent[f":{key}"] for key in SCALARS}
        totals = {key: told[key] for key in ("return", "length", "success")} | {"reward_terms": {}}
        info = {"success": told["success"], "reward_terms": {}, "episode": totals}
        info |= {key: told[key] for key in ("nonfinite", "restarted")}
        return dict(self._observations), told["reward"], told["terminated"], told["truncated"], info

    # --- processes that die -----------------------------------------------------------------------------------------

    def _cut(self, error: Exception) -> None:
        """After a process has died: all worlds are truncated where they last were, and begin anew in new processes.

        Raises:
            Exception: ``error`` was not that, or it has happened too often.
        """
        dead = self._dead()
        if not dead:
            raise error
        self._end_processes()
        self._deaths[min(dead)] += 1  # those that died together count as one
        told = ", ".join(f"that of world {world} ended with status {status}" for world, status in dead.items())
        deaths = int(self._deaths.sum())
        if deaths > self._settings.max_restarts:
            raise RuntimeError(f"{self.name}: processes died {deaths} times in a row (max_restarts); {told}")
        tell(f"all worlds of {self.name} were restarted, since a process has died: {told}")
        self._worlds = self._make_worlds()
        self._restarts += len(dead)
        self._begun += 1
        self._anew = True
        host = self._host
        marks = {"terminated": False, "truncated": True, "nonfinite": False, "restarted": True}
        for name, value in {"reward": 0, **marks}.items():
            host[name][:] = value

    def _dead(self) -> dict[int, int]:
        """Worlds whose process has ended by itself, and its exit status."""
        if not self._asynchronous:
            return {}
        processes = self._worlds.processes
        for process in processes:  # the pipe may be closed a moment before
            process.join(0.1 if all(one.exitcode is None for one in processes) else 0)
        return {world: process.exitcode for world, process in enumerate(processes) if process.exitcode is not None}

    def _end_processes(self) -> None:
        if not self._asynchronous:
            return
        for process in self._worlds.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._worlds.closed = True  # or it would wait for answers when it is collected


def _along(worlds: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``worlds`` (N,) in a shape that goes with ``values`` (N, ...)."""
    return worlds.view(-1, *[1] * (values.ndim - 1))
