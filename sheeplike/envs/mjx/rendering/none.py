"""No frames at all, for agents that learn from vectors: physics is all that a step then takes."""

from collections.abc import Collection

from gymnasium import spaces
from mujoco import mjx

from sheeplike.envs.mjx.rendering.protocol import Frames


class NoRenderer:
    """Renders nothing, allocates nothing and asks for no camera; a scene without any will do.

    Args:
        num_envs: worlds.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.image_sizes: dict[str, tuple[int, int]] = {}
        self.spaces: dict[str, spaces.Box] = {}

    def vary(self, fields: Collection[str]) -> None: ...

    def open(self) -> None: ...

    def render(self, model: mjx.Model, data: mjx.Data) -> tuple[Frames, mjx.Data]:
        return {}, data
