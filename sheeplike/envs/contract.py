"""What every vector environment has, checked before the first step of one that another package made."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

ATTRIBUTES = ("name", "device", "episode_length", "single_action_space", "action_space", "observation_space")
METHODS = ("reset", "step", "state_dict", "load_state_dict")
IMAGES = {"pixels": ("uint8", 3), "depth": ("float32", 3), "segmentation": ("int32", 3)}


def check(env: Any, *, num_envs: int) -> None:
    """Nothing, for a vector environment of ``num_envs`` worlds such as ``howto/add_an_environment.md`` describes.

    Raises:
        ValueError: it lacks something, in one line.
    """
    if not isinstance(env, gymnasium.vector.VectorEnv):
        raise ValueError(f"is a {type(env).__name__}: expected a gymnasium.vector.VectorEnv")
    for attribute in (*ATTRIBUTES, *METHODS):
        if not hasattr(env, attribute):
            raise ValueError(f"has no {attribute}{'()' * (attribute in METHODS)}")
    if env.num_envs != num_envs:
        raise ValueError(f"has num_envs={env.num_envs}: expected {num_envs}, as it was told")
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.NEXT_STEP:
        raise ValueError(f"has metadata['autoreset_mode']={mode}: expected AutoresetMode.NEXT_STEP")
    if "render_fps" not in env.metadata:
        raise ValueError("has no metadata['render_fps']: expected control steps per second")
    space = env.single_observation_space
    if not isinstance(space, spaces.Dict):
        raise ValueError(f"observes {space}: expected a flat Dict, such as of 'pixels/front' and 'state'")
    for key, one in space.items():
        dtype, axes = IMAGES.get(key.partition("/")[0], ("float32", 1))
        if not isinstance(one, spaces.Box) or one.dtype != dtype or len(one.shape) != axes:
            raise ValueError(f"observes {key!r} as {one}: expected a Box of {dtype} with {axes} axes")
