"""MiniGrid: the agent's view of the grid, as pixels."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from minigrid.core.grid import Grid
from minigrid.core.world_object import WorldObj

from sheeplike.options import InvalidOption

UNSEEN = 0  # OBJECT_TO_IDX["unseen"]: cells that the agent cannot see
UPWARDS = 3  # the agent's direction in its own view


def tile_size(image_size: tuple[int, int], view: int = 7) -> int:
    """Return the largest even size of a cell with which the view fits: 8 for 7 x 7 cells in 64 x 64 pixels."""
    fits = min(image_size) // view
    return max(fits - fits % 2, 2)


class PartialView(gymnasium.ObservationWrapper):
    """The agent's view in RGB, and the direction that it faces; the mission, a text, is left out.

    The frames are those of ``minigrid.wrappers.RGBImgPartialObsWrapper``, four times as fast: symbols choose from a
    table of drawn cells. ``info["is_success"]``: the episode ended with a reward.
    """

    def __init__(self, env: gymnasium.Env, *, tile: int | None, image_size: tuple[int, int]) -> None:
        super().__init__(env)
        self._view = int(env.unwrapped.agent_view_size)
        self._tile = tile or tile_size(image_size, self._view)
        side = self._view * self._tile
        if tile and side > min(image_size):
            most, (height, width) = min(image_size) // self._view, image_size
            fits = f"at most {most}, with which {self._view}x{self._view} cells fit into {height}x{width}"
            raise InvalidOption("tile_size", tile, fits, most)
        self.observation_space = spaces.Dict(
            direction=spaces.Discrete(4), image=spaces.Box(0, 255, (side, side, 3), np.uint8)
        )
        self._known: dict[int, int] = {}  # code of a cell to its place in the table
        self._table = np.zeros((0, self._tile, self._tile, 3), np.uint8)
        self._agent = self._view // 2 * self._view + self._view - 1  # its cell, at the middle of the lower edge
        self._drawable = True

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, info | {"is_success": terminated and reward > 0}

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {"direction": observation["direction"], "image": self._draw(observation["image"])}

    def _draw(self, symbols: np.ndarray) -> np.ndarray:
        """Draw symbols (columns, rows, 3) of object, colour and state."""
        if not self._drawable:
            return self.env.unwrapped.get_frame(tile_size=self._tile, agent_pov=True)
        codes = (symbols.reshape(-1, 3).astype(np.int64) @ (1, 1 << 8, 1 << 16)).tolist()
        codes[self._agent] |= 1 << 24
        try:
            places = [self._known[code] if code in self._known else self._add(code) for code in codes]
        except (AssertionError, KeyError):  # a kind of object of the environment's own
            self._drawable = False
            return self._draw(symbols)
        cells = self._table[places].reshape(self._view, self._view, self._tile, self._tile, 3)
        return cells.transpose(1, 2, 0, 3, 4).reshape(self._view * self._tile, self._view * self._tile, 3)

    def _add(self, code: int) -> int:
        """Draw a cell for the table, as MiniGrid does."""
        kind, colour, state, agent = (code >> shift & 255 for shift in (0, 8, 16, 24))
        cell = None if kind == UNSEEN else WorldObj.decode(kind, colour, state)
        direction = UPWARDS if agent else None
        drawn = Grid.render_tile(cell, agent_dir=direction, highlight=kind != UNSEEN, tile_size=self._tile)
        self._known[code] = len(self._table)
        self._table = np.concatenate([self._table, drawn[None].astype(np.uint8)])
        return self._known[code]
