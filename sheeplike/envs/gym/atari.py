"""Atari games as DreamerV3's authors play them.

Source: ``danijar/dreamerv3`` ``embodied/envs/atari.py``, and ``atari100k`` in ``dreamerv3/configs.yaml``: no sticky
actions, up to 30 no-op steps at the start, only actions that the game uses, all lives of a game in one episode, frames
in RGB. The world holds an action for four frames and takes the brighter pixels of the last two.
"""

from typing import Any

import ale_py
import gymnasium

ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # otherwise each game greets in two lines

FRAMES = 108_000  # length of an episode: half an hour
NOOP = 0


class Protocol(gymnasium.Wrapper):
    """Begins episodes with up to ``noops`` frames without action, and ends them with a life on demand."""

    def __init__(self, env: gymnasium.Env, *, noops: int, terminal_on_life_loss: bool) -> None:
        super().__init__(env)
        self._noops, self._ends_with_life, self._lives = noops, terminal_on_life_loss, 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        for _ in range(int(self.np_random.integers(self._noops + 1))):
            observation, _, terminated, truncated, info = self.env.step(NOOP)
            if terminated or truncated:
                observation, info = self.env.reset()
        self._lives = info["lives"]
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        lost = 0 < info["lives"] < self._lives
        self._lives = info["lives"]
        return observation, reward, terminated or (lost and self._ends_with_life), truncated, info
