"""Which observations the model sees, how they become an embedding, and how they are predicted back.

Source: ``danijar/dreamerv3`` ``rssm.py`` (``Encoder``, ``Decoder``), where all cameras must share one size. Here those
of one size are channels of one image, and each size has an encoder and a decoder of its own. Vectors are squashed by
symlog and concatenated in the order of their sorted keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import gymnasium
import torch
from torch import Tensor, nn

from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.agents.spaces import ObservationKeys
from sheeplike.nn.distributions import symlog
from sheeplike.nn.images import to_unit
from sheeplike.nn.layers import MLP, Linear
from sheeplike.nn.vision import ImageDecoder, ImageEncoder, nearest_side

# Each observation has a loss of its own name, beside these, and a place of its own name in the replay.
LOSSES = ("reward", "continue", "dyn", "rep", "policy", "value", "replay_value")
STORED = ("action", "reward", "is_first", "is_last", "is_terminal", "deter", "stoch", "worlds", "times", "held")


class Images(NamedTuple):
    """Cameras of one size.

    Attributes:
        name: of the networks that read and paint them.
        height, width: pixels.
        channels: key to channels, in sorted order.
        depth: whether there is depth among them.
    """

    name: str
    height: int
    width: int
    channels: dict[str, int]
    depth: bool

    def read(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Side by side along the channels: ``(B, H, W, C)`` uint8, or float32 in [0, 1] where there is depth."""
        parts = [obs[key] for key in self.channels]
        return torch.cat([to_unit(part) for part in parts] if self.depth else parts, -1)


class ModelKeys(ObservationKeys):
    """Observations that the model sees or predicts, chosen by patterns, with their images grouped by size.

    Attributes:
        sizes: the images, the smallest first.

    Raises:
        ValueError: as :class:`~sheeplike.agents.spaces.ObservationKeys`; a camera has a size that the convolutions
            cannot serve, or an observation has the name of a loss or of something else in the replay.
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
                # Without a size in its name where there is but one, as it has always been.
                "cnn" if len(cameras) == 1 else f"cnn_{height}x{width}",
                height,
                width,
                {key: self.channels(key) for key in keys},
                any(self.dtype(key) != torch.uint8 for key in keys),
            )
            for (height, width), keys in sorted(cameras.items())
        ]

    def with_targets(self, space: gymnasium.spaces.Dict, patterns: Sequence[str]) -> ModelKeys:
        """These and what the model predicts beside them without seeing it; these themselves where there is nothing.

        Raises:
            ValueError: as above, or the model sees one of them.
        """
        if not patterns:
            return self
        targets = ObservationKeys(space, patterns).spaces.keys()
        if both := targets & self.spaces.keys():
            raise ValueError(
                f"target {sorted(both)[0]!r}: the model sees it, and predicts what it sees anyway; expected targets "
                "that are not among the observations; nearest: leave it out of one of the two"
            )
        return ModelKeys(space, sorted(self.spaces.keys() | targets))


class Encoder(nn.Module):
    """Observations ``(B, ...)`` to an embedding ``(B, outputs)``."""

    def __init__(self, keys: ModelKeys, *, depth: int, units: int, layers: int = 3) -> None:
        super().__init__()
        self.keys = keys
        self.outputs = 0
        if keys.vectors:
            self.mlp = MLP(sum(map(keys.width, keys.vectors)), units, layers)
            self.outputs += units
        for images in keys.sizes:
            cnn = ImageEncoder(images.height, images.width, sum(images.channels.values()), depth)
            self.add_module(images.name, cnn)
            self.outputs += cnn.outputs

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        parts = []
        if self.keys.vectors:
            parts.append(self.mlp(torch.cat([symlog(obs[key].float()) for key in self.keys.vectors], -1)))
        parts += [getattr(self, images.name)(images.read(obs)) for images in self.keys.sizes]
        return torch.cat(parts, -1)


class Decoder(nn.Module):
    """Latents to predicted observations: images in [0, 1], as :func:`~sheeplike.nn.images.to_unit` has them, and
    vectors in symlog space."""

    def __init__(
        self, keys: ModelKeys, *, deter: int, stoch: int, depth: int, units: int, blocks: int = 8, layers: int = 3
    ) -> None:
        super().__init__()
        self.keys = keys
        if keys.vectors:
            self.mlp = MLP(deter + stoch, units, layers)
            self.heads = nn.ModuleList(Linear(units, keys.width(key)) for key in keys.vectors)
        for images in keys.sizes:
            channels, size = sum(images.channels.values()), {"depth": depth, "units": units, "blocks": blocks}
            self.add_module(images.name, ImageDecoder(deter, stoch, images.height, images.width, channels, **size))

    def forward(self, latent: Latent) -> dict[str, Tensor]:
        """Latents ``(B, ...)`` to key: images ``(B, H, W, C)`` and vectors ``(B, D)``, float32."""
        out: dict[str, Tensor] = {}
        if self.keys.vectors:
            hidden = self.mlp(latent.features)
            out |= {key: head(hidden).float() for key, head in zip(self.keys.vectors, self.heads, strict=True)}
        for images in self.keys.sizes:
            image = getattr(self, images.name)(latent.deter, latent.stoch.flatten(-2))
            parts = image.split(list(images.channels.values()), -1)
            out |= dict(zip(images.channels, parts, strict=True))
        return out

    def losses(self, predicted: Mapping[str, Tensor], obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Squared error per key ``(B,)``: *summed* over pixels and channels, or over the vector in symlog space."""
        losses = {}
        for key in self.keys.images:
            losses[key] = (predicted[key] - to_unit(obs[key])).square().sum((-3, -2, -1))
        for key in self.keys.vectors:
            losses[key] = (predicted[key] - symlog(obs[key].float())).square().sum(-1)
        return losses
