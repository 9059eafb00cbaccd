"""EnvPool's tasks, whose worlds its own threads step together.

EnvPool would reset a world that has ended at its next step. Here a world that ended is always reset by its number,
since some ends are ours: values that are not finite, and time limits, where EnvPool calls a termination a truncation.
"""

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from sheeplike.envs.contract import Unusable
from sheeplike.envs.gym.observations import RENDERED, Observer, choose_frames, translate
from sheeplike.envs.gym.options import EnvpoolOptions
from sheeplike.envs.gym.vector_env import UNKNOWN_FPS, GymVectorEnv
from sheeplike.envs.gym.world import by_name
from sheeplike.options import InvalidOption, nearest

NO_LIMIT = 2**31 - 1  # steps of an episode
RESERVED = {"num_envs", "batch_size", "seed", "env_seed", "max_episode_steps"}
"""Arguments of every task that users cannot give."""
try:
    # EnvPool's MuJoCo looks for OpenGL under this name, and ends the process if EnvPool's own copy was loaded first.
    OPENGL = ctypes.CDLL("libEGL.so", mode=ctypes.RTLD_GLOBAL)
except OSError:
    OPENGL = None


class EnvpoolVectorEnv(GymVectorEnv):
    """:class:`GymVectorEnv` on a :class:`Pool`; no world is ever restarted."""

    def _open(self, make: Callable[..., "Pool"], options: Any, size: Any, repeat: int) -> tuple[int, float]:
        self._worlds = make(num_envs=self.num_envs, action_repeat=repeat)
        self.native_actions = self._worlds.native_actions
        return self._worlds.limit, UNKNOWN_FPS


class Pool:
    """All worlds of a task, with the part of gymnasium's vector environments that :class:`GymVectorEnv` uses."""

    def __init__(
        self, options: EnvpoolOptions, *, image_size: tuple[int, int], num_envs: int, action_repeat: int
    ) -> None:
        import envpool  # it loads its copy of libEGL.so

        id, known = options.id, envpool.list_all_envs()
        if id not in known:
            raise InvalidOption("env.id", id, "one of EnvPool's tasks", nearest(id, known))
        with by_name(id):  # some tasks need libraries of the system
            config = envpool.make_spec(id).config._asdict()
        if config["max_num_players"] > 1:
            raise Unusable(f"{id} has {config['max_num_players']} players: expected a task of one")
        self.limit = options.episode_length or config["max_episode_steps"]
        if self.limit in (0, NO_LIMIT):
            expected = f"a number of steps, since EnvPool states no limit of {id}"
            raise InvalidOption("env.options.episode_length", None, expected, 1000)
        # What only some tasks have: frames of the asked size, one at a time; actions as numbers in ViZDoom.
        ours = {"img_height": image_size[0], "img_width": image_size[1], "stack_num": 1}
        ours |= {"gray_scale": options.grayscale, "use_combined_action": True}
        self._settings = {name: value for name, value in ours.items() if name in config}
        # Texts may be paths, even of programs, and a stranger's export may have arguments.
        free = {name for name, value in config.items() if not isinstance(value, str)}
        free -= self._settings.keys() | RESERVED
        for name, value in (options.arguments or {}).items():
            if name not in free:
                expected = f"one of {', '.join(sorted(free))}"
                raise InvalidOption("env.options.arguments", {name: value}, expected, nearest(name, free))
        # EnvPool's own limit comes too late to matter.
        own = {"num_envs": num_envs, "max_episode_steps": self.limit + 1}
        self._settings = {**(options.arguments or {}), **self._settings, **own}
        with by_name(id):
            spec = envpool.make_spec(id, **self._settings)
            env = SimpleNamespace(observation_space=spec.observation_space, metadata={"render_modes": ["rgb_array"]})
            options = options.replace(frames=choose_frames(options.frames, env))
            self._observe = Observer(spec.observation_space, options, image_size)
            self.native_actions = spec.action_space
            self.single_action_space, self._to_env = translate(spec.action_space)
        self._renders = options.frames == "render"
        if self._renders:
            self._settings["render_mode"] = "rgb_array"
        if self._renders and "frame_stack" in config:  # MuJoCo's tasks; others draw in one size and would cut it
            if OPENGL is None:
                raise Unusable(f"{id} needs libEGL.so to render: on Debian and Ubuntu apt-get install libegl-dev")
            self._settings |= {"render_height": image_size[0], "render_width": image_size[1]}
            self._settings["render_camera_id"] = -1 if options.camera is None else options.camera
        self._id, self._repeat, self._make = id, action_repeat, envpool.make_gymnasium
        self.single_observation_space = space = self._observe.space
        self._seen = {key: np.zeros((num_envs, *one.shape), one.dtype) for key, one in space.items()}
        self._steps = np.zeros(num_envs, np.int64)
        self._ended, self._lost = np.zeros((2, num_envs), bool)  # since the last step; not finite since then

    def reset(self, *, seed: Sequence[int | None]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begin an episode in every world, with seeds in new streams of random numbers."""
        if seed[0] is not None:  # EnvPool takes seeds when it makes the worlds
            with by_name(self._id):
                self._pool = self._make(self._id, seed=list(seed), **self._settings)
        self._begin(np.arange(len(seed)))
        self._ended[:] = False
        self._render()
        return self._seen, {}

    def step(self, actions: np.ndarray) -> tuple[dict[str, np.ndarray], Any, Any, Any, dict[str, Any]]:
        """Hold one action in every world for ``action_repeat`` steps or until the episode ends."""
        began, actions = self._ended, self._to_env(actions)
        reward = np.zeros(began.shape, np.float32)
        terminated, truncated, success = np.zeros((3, *began.shape), bool)
        info: dict[str, Any] = {}
        if began.any():
            self._begin(np.flatnonzero(began))
        running = np.flatnonzero(~began)
        for _ in range(self._repeat):
            if not running.size:
                break
            observations, more, ended, _, said = self._pool.step(actions[running], running)
            self._write(running, observations)
            self._steps[running] += 1
            reward[running] += more
            terminated[running] = ended
            truncated[running] = (self._steps[running] >= self.limit) & ~ended
            if (reached := said.get("is_success", said.get("success"))) is not None:
                success[running] |= reached > 0.5
                info["success"] = success
            running = running[~(terminated | truncated)[running]]
        self._render()
        lost, self._lost = self._lost | ~np.isfinite(reward), np.zeros(began.shape, bool)
        reward[lost], terminated[lost], truncated[lost] = 0.0, False, True
        self._ended = terminated | truncated
        return self._seen, reward, terminated, truncated, info | {"_nonfinite": lost}

    def close(self, **kwargs: Any) -> None:
        self._pool = None

    def _begin(self, worlds: np.ndarray) -> None:
        self._write(worlds, self._pool.reset(worlds)[0])
        self._steps[worlds] = 0

    def _write(self, worlds: np.ndarray, observations: Any) -> None:
        with np.errstate(over="ignore"):
            for key, value in self._observe.batch(observations).items():
                if value.dtype == np.float32 and not np.isfinite(value).all():
                    odd = ~np.isfinite(value).all(-1)
                    value[odd], self._lost[worlds[odd]] = 0.0, True
                self._seen[key][worlds] = value

    def _render(self) -> None:
        if self._renders:
            frames = self._pool.render(np.arange(len(self._ended)))
            self._seen[f"pixels/{RENDERED}"] = self._observe.fit(RENDERED, frames)
