"""DeepMind's control suite behind Gymnasium's interface, rendered by one of its cameras."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

CAMERAS = {"quadruped": 2}
"""Cameras of domains that are not learned from camera 0, as in ``danijar/dreamerv3`` ``embodied/envs/dmc.py``."""


class ControlSuite(gymnasium.Env):
    """One task of the suite; observations are its vectors by name, float64.

    An episode terminates if the task ends it with a discount of 0, and is truncated at the time limit.
    """

    def __init__(
        self,
        id: str,
        *,
        image_size: tuple[int, int],
        camera: int | None = None,
        shadow_map: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        from dm_control import suite

        self._env = suite.load(*id.split("-", 1))
        physics = self._env.physics
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 1.0 / self._env.control_timestep()}
        self.render_mode = render_mode
        self.observation_space = spaces.Dict(
            {
                name: spaces.Box(-np.inf, np.inf, spec.shape, np.float64)
                for name, spec in self._env.observation_spec().items()
            }
        )
        action = self._env.action_spec()
        low, high = (np.broadcast_to(bound, action.shape) for bound in (action.minimum, action.maximum))
        self.action_space = spaces.Box(low, high, dtype=np.float64)
        limit = getattr(self._env, "_step_limit", np.inf)
        self.max_episode_steps = int(np.ceil(limit)) if np.isfinite(limit) else None
        self._camera: Any = None
        if render_mode is not None:
            if shadow_map is not None:
                physics.model.vis.quality.shadowsize = shadow_map  # read when the camera gets its context
            self._open_camera(physics, image_size, CAMERAS.get(id.split("-")[0], 0) if camera is None else camera)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._env.task.random.seed(seed)
        return dict(self._env.reset().observation), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        now = self._env.step(action)
        terminated = now.last() and now.discount == 0.0
        return dict(now.observation), now.reward or 0.0, terminated, now.last() and not terminated, {}

    def render(self) -> np.ndarray:
        return self._camera.render()

    def close(self) -> None:
        self._camera = None
        self._env.close()

    def _open_camera(self, physics: Any, size: tuple[int, int], camera: int) -> None:
        from dm_control.mujoco.engine import Camera

        if camera >= physics.model.ncam:
            raise ValueError(f"camera={camera}: expected a number below {physics.model.ncam}; nearest: 0")
        # The offscreen buffer need not be larger than the image.
        physics.model.vis.global_.offheight, physics.model.vis.global_.offwidth = size
        self._camera = Camera(physics, *size, camera_id=camera)
        self._camera.render()  # fails early if there is no OpenGL
