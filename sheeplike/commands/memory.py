"""What a run will take of memory and disk."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import torch
from gymnasium import spaces

from sheeplike.agents.spaces import ActionCodec
from sheeplike.commands.kinds import MemoryEstimate, kind_of
from sheeplike.commands.schema import Config

MIXED, FULL = 2, 4  # bytes of a number


def estimate(config: Config, space: spaces.Dict | None = None, actions: spaces.Space | None = None) -> MemoryEstimate:
    """What a run takes.

    Args:
        space, actions: of one world; None: one camera per name in ``env.cameras``, and eight numbers.
    """
    space = _assumed(config) if space is None else space
    actions = spaces.Box(-1, 1, (8,), np.float32) if actions is None else actions
    # Packed by the renderer, and unpacked; and depth the same way.
    pixels = sum(math.prod(one.shape[:2]) * (4 + one.shape[2] * one.dtype.itemsize) for one in _images(space))
    worlds = (config.env.num_envs + (config.eval.num_envs or 0)) * pixels
    return replace(kind_of(config.agent).estimate(config, space, actions), worlds=worlds)


def count_parameters(config: Config, space: spaces.Dict, codec: ActionCodec) -> int:
    """Numbers in the networks of a built-in agent that gradients change; nothing is allocated."""
    with torch.device("meta"):
        networks = kind_of(config.agent).networks(config, space, codec)
    return sum(p.numel() for p in networks.parameters() if p.requires_grad)


def precision_bytes(config: Config) -> int:
    """Bytes of a number of the learner's arithmetic."""
    return MIXED if config.fabric.precision == "bf16-mixed" else FULL


def on_disk(config: Config, space: spaces.Dict | None, actions: spaces.Space | None) -> int:
    """Bytes of all checkpoints at most: those that are kept, and the one being written beside them."""
    c = config.checkpoint
    kept = c.keep_last + c.keep_best
    now = estimate(config, space, actions)
    # What was seen never changes, so the checkpoints share it.
    return (kept + 1) * (now.saved + now.renewed * c.replay) + (now.memory - now.renewed) * c.replay


def _assumed(config: Config) -> spaces.Dict:
    """Observations as the configuration lets expect them: a run that cannot build its worlds has no others."""
    image, patterns = _shape(config.env.image_size), list(getattr(config.agent, "observations", ()))
    patterns += getattr(config.agent, "value_observations", None) or ()
    keys = {f"pixels/{name}" for name in config.env.cameras or ("camera",)} | {"state"}
    keys |= {pattern for pattern in patterns if not set("*?[") & set(pattern)}
    keys |= {f"depth/{key.removeprefix('pixels/')}" for key in keys if config.env.depth and key.startswith("pixels/")}
    keys |= {re.sub(r"[*?\[\]]", "x", pattern) for pattern in patterns if pattern[0] not in "*?["}
    found: dict[str, spaces.Space] = {}
    for key in sorted(keys):
        if key.startswith("pixels/"):
            found[key] = spaces.Box(0, 255, (*image, 3), np.uint8)
        elif key.startswith("depth/"):
            found[key] = spaces.Box(0, np.inf, (*image, 1), np.float32)
        else:
            found[key] = spaces.Box(-np.inf, np.inf, (32,), np.float32)
    return spaces.Dict(found)


def resized(space: spaces.Dict | None, config: Config) -> spaces.Dict | None:
    """The same observations with images of another size."""
    if space is None:
        return None
    image = _shape(config.env.image_size)
    return spaces.Dict(
        {
            key: spaces.Box(one.low.min(), one.high.max(), (*image, one.shape[2]), one.dtype)
            if len(one.shape) == 3
            else one
            for key, one in space.items()
        }
    )


def _images(space: spaces.Dict) -> list[spaces.Box]:
    return [one for one in space.values() if len(one.shape) == 3]


def _shape(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def in_words(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
