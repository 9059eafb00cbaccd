"""What a run will take of memory and disk."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from sheeplike.commands.kinds import MemoryEstimate, kind_of
from sheeplike.commands.schema import Config

MIXED, FULL = 2, 4  # bytes of a number
# Bytes of a pixel as the renderer packs it: colours, depth, and what it shows.
PACKED = {"uint8": 4, "float32": 4, "int32": 8}


def estimate(config: Config, space: spaces.Dict | None = None, actions: spaces.Space | None = None) -> MemoryEstimate:
    """What a run takes.

    Args:
        space, actions: of one world; None: one camera per name in ``env.cameras``, and eight numbers.
    """
    space = _assumed(config) if space is None else space
    actions = spaces.Box(-1, 1, (8,), np.float32) if actions is None else actions
    # As the renderer packs them, and as they are delivered.
    pixels = sum(
        math.prod(one.shape[:2]) * (PACKED[one.dtype.name] + one.shape[2] * one.dtype.itemsize)
        for one in _images(space)
    )
    worlds = (config.env.num_envs + (config.eval.num_envs or 0)) * pixels
    return replace(kind_of(config.agent).estimate(config, space, actions), worlds=worlds)


def count_parameters(networks: Callable[[], nn.Module]) -> int:
    """Numbers that gradients change in the networks that are made; nothing is allocated."""
    with torch.device("meta"):
        made = networks()
    return sum(p.numel() for p in made.parameters() if p.requires_grad)


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
    env, patterns = config.env, list(getattr(config.agent, "observations", ()))
    for more in ("value_observations", "targets"):
        patterns += getattr(config.agent, more, None) or ()
    cameras = env.cameras or (tuple(env.image_size) if isinstance(env.image_size, dict) else ("camera",))
    keys = {f"pixels/{name}" for name in cameras if env.renderer != "none"} | {"state"}
    keys |= {pattern for pattern in patterns if not set("*?[") & set(pattern)}
    seen = [key.removeprefix("pixels/") for key in keys if key.startswith("pixels/")]
    keys |= {f"{kind}/{name}" for kind in ("depth", "segmentation") if getattr(env, kind) for name in seen}
    unmet = [pattern for pattern in patterns if not any(fnmatchcase(key, pattern) for key in keys)]
    keys |= {re.sub(r"[*?\[\]]", "x", pattern) for pattern in unmet if pattern[0] not in "*?["}
    found: dict[str, spaces.Space] = {}
    for key in sorted(keys):
        kind, _, camera = key.partition("/")
        if kind in _KINDS:
            low, high, channels, dtype = _KINDS[kind]
            found[key] = spaces.Box(low, high, (*_shape(config, camera), channels), dtype)
        else:
            found[key] = spaces.Box(-np.inf, np.inf, (32,), np.float32)
    return spaces.Dict(found)


def resized(space: spaces.Dict | None, config: Config) -> spaces.Dict | None:
    """The same observations with images of the sizes that the configuration has."""
    if space is None:
        return None
    return spaces.Dict(
        {
            key: spaces.Box(
                one.low.min(), one.high.max(), (*_shape(config, key.partition("/")[2]), one.shape[2]), one.dtype
            )
            if len(one.shape) == 3
            else one
            for key, one in space.items()
        }
    )


_KINDS = {
    "pixels": (0, 255, 3, np.uint8),
    "depth": (0, np.inf, 1, np.float32),
    "segmentation": (-1, 2**16, 1, np.int32),
}


def _images(space: spaces.Dict) -> list[spaces.Box]:
    return [one for one in space.values() if isinstance(one, spaces.Box) and len(one.shape) == 3]


def _shape(config: Config, camera: str) -> tuple[int, int]:
    """``(height, width)`` of a camera's images; the largest there are of one whose name only the task knows."""
    sizes = config.env.image_size
    if isinstance(sizes, dict):
        size = sizes.get(camera) or max(
            sizes.values(), key=lambda one: one**2 if isinstance(one, int) else one[0] * one[1]
        )
    else:
        size = sizes
    return (size, size) if isinstance(size, int) else tuple(size)


def in_words(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
