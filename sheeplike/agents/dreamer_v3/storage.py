"""Observations that the model sees and predicts, and one step of one world as the replay holds it.

In the authors' code (``danijar/dreamerv3`` ``rssm.py``) all cameras must share one size. Here those of one size are
channels of one image, and each size has its own encoder and decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import gymnasium
import torch
import torch.nn.functional as F
from torch import Tensor

from sheeplike.agents.agent import Step
from sheeplike.agents.dreamer_v3.config import Size
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.agents.spaces import ActionCodec, ObservationKeys
from sheeplike.nn.cnn import to_unit
from sheeplike.nn.vision import nearest_side

LATENTS = ("deter", "stoch")  # stored with every step, and refreshed by every update
# Losses and replay keys are named after observations, which must not take these names.
LOSSES = ("barlow", "reward", "continue", "dyn", "rep", "policy", "value", "replay_value")
STORED = ("action", "reward", "is_first", "is_last", "is_terminal", *LATENTS, "envs", "times")


class Images(NamedTuple):
    """Cameras of one size; ``name`` is the name of their networks, ``channels`` maps keys to channels, sorted."""

    name: str
    height: int
    width: int
    channels: dict[str, int]
    depth: bool

    def read(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Join the cameras: ``(B, H, W, C)`` uint8, or float32 in [0, 1] if there is depth among them."""
        parts = [obs[key] for key in self.channels]
        return torch.cat([to_unit(part) for part in parts] if self.depth else parts, -1)


class ModelKeys(ObservationKeys):
    """Observations that the model sees or predicts; ``sizes`` are their images by size, the smallest first.

    Raises:
        ValueError: as :class:`~sheeplike.agents.spaces.ObservationKeys`; an unsupported image size; a reserved name.
    """

    def __init__(self, space: gymnasium.spaces.Dict, patterns: Sequence[str]) -> None:
        super().__init__(space, patterns)
        self.refuse_names(LOSSES, "a loss")
        self.refuse_names(STORED, "something else in the replay")
        cameras: dict[tuple[int, int], list[str]] = {}
        for key in self.images:
            height, width = self.spaces[key].shape[:2]
            nearest = nearest_side(height), nearest_side(width)
            if (height, width) != nearest:
                raise ValueError(
                    f"observation {key!r}: {height}x{width} pixels; expected multiples of 16 between 48 and 256; "
                    f"nearest is {nearest[0]}x{nearest[1]}"
                )
            cameras.setdefault((height, width), []).append(key)
        self.sizes = [
            Images(
                # Checkpoints hold these names; a single size is not part of its name.
                "cnn" if len(cameras) == 1 else f"cnn_{height}x{width}",
                height,
                width,
                {key: self.channels(key) for key in keys},
                any(self.dtype(key) != torch.uint8 for key in keys),
            )
            for (height, width), keys in sorted(cameras.items())
        ]

    def with_targets(self, space: gymnasium.spaces.Dict, patterns: Sequence[str]) -> ModelKeys:
        """Return these keys and targets, which must not be among them."""
        if not patterns:
            return self
        targets = ObservationKeys(space, patterns).spaces.keys()
        if both := targets & self.spaces.keys():
            raise ValueError(
                f"target {sorted(both)[0]!r}: the model sees it, and predicts what it sees anyway; expected targets "
                "that are not among the observations; nearest: leave it out of one of the two"
            )
        return self.and_also(space, patterns)

    def and_also(self, space: gymnasium.spaces.Dict, patterns: Sequence[str]) -> ModelKeys:
        both = self.spaces.keys() | ObservationKeys(space, patterns).spaces.keys()
        return self if both == self.spaces.keys() else ModelKeys(space, sorted(both))


def replay_spec(
    keys: ModelKeys, codec: ActionCodec, size: Size, stoch: int = 32
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each key of one step of one world."""
    flags = {name: ((), torch.bool) for name in ("is_first", "is_last", "is_terminal")}
    latents = {"deter": ((size.deter,), torch.bfloat16), "stoch": ((stoch,), torch.uint8)}
    return {
        **keys.stored(),
        **flags,
        "action": ((codec.width,), torch.float32),
        "reward": ((), torch.float32),
        **latents,
    }


def encode_step(step: Step, keys: ModelKeys, codec: ActionCodec) -> dict[str, Tensor]:
    """Return a step as the replay stores it.

    Non-finite numbers in actions and latents become 0, or each update that draws such a step would be skipped. The
    world ends its episode after such an action, and the next one begins from the zero state.
    """
    # The environment ignores the action that was chosen on the last step of an episode.
    action = torch.where(step.is_last.unsqueeze(-1), 0.0, codec.from_env(step.action))
    flags = {"is_first": step.is_first, "is_last": step.is_last, "is_terminal": step.is_terminal}
    finite = {"action": _finite_or_zero(action), "deter": _finite_or_zero(step.extras["deter"])}
    return {**{key: step.obs[key] for key in keys.spaces}, **flags, "reward": step.reward, **step.extras, **finite}


def pack_latent(latent: Latent) -> dict[str, Tensor]:
    """Return ``deter (..., D)`` bfloat16 and ``stoch (..., S)`` uint8 class indices."""
    return {"deter": latent.deter.bfloat16(), "stoch": latent.stoch.argmax(-1).to(torch.uint8)}


def unpack_latent(deter: Tensor, index: Tensor, classes: int) -> Latent:
    """Invert :func:`pack_latent`, in float32."""
    return Latent(deter.float(), F.one_hot(index.long(), classes).float())


def _finite_or_zero(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)
