"""Which observations the model sees, how they become an embedding, and how they are predicted back.

Source: ``danijar/dreamerv3`` ``rssm.py`` (``Encoder``, ``Decoder``). Cameras are channels of one image, so they must
share one size; vectors are squashed by symlog and concatenated in the order of their sorted keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import gymnasium
import torch
from torch import Tensor, nn

from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.agents.spaces import ObservationKeys
from sheeplike.nn.distributions import symlog
from sheeplike.nn.layers import MLP, Linear
from sheeplike.nn.vision import ImageDecoder, ImageEncoder

# Each observation has a loss of its own name, beside these.
RESERVED = {"reward", "continue", "dyn", "rep", "policy", "value", "replay_value"}


class ModelKeys(ObservationKeys):
    """The observations that the model sees and predicts: chosen by patterns, with cameras of one size.

    Attributes:
        image_size: ``(H, W)`` of all cameras, or None without any.

    Raises:
        ValueError: as :class:`~sheeplike.agents.spaces.ObservationKeys`; cameras differ in size, or an observation has
            the name of a loss.
    """

    def __init__(self, space: gymnasium.spaces.Dict, patterns: Sequence[str]) -> None:
        super().__init__(space, patterns)
        if taken := self.spaces.keys() & RESERVED:
            raise ValueError(f"observation {sorted(taken)[0]!r}: the name of a loss; rename it in the environment")
        sizes = {self.spaces[key].shape[:2] for key in self.images}
        if len(sizes) > 1:
            raise ValueError(f"cameras {self.images} have sizes {sorted(sizes)}; all must share one")
        self.image_size: tuple[int, int] | None = next(iter(sizes), None)


class Encoder(nn.Module):
    """Observations ``(B, ...)`` to an embedding ``(B, outputs)``."""

    def __init__(self, keys: ModelKeys, *, depth: int, units: int, layers: int = 3) -> None:
        super().__init__()
        self.keys = keys
        self.outputs = 0
        if keys.vectors:
            self.mlp = MLP(sum(map(keys.width, keys.vectors)), units, layers)
            self.outputs += units
        if keys.images:
            self.cnn = ImageEncoder(*keys.image_size, sum(map(keys.channels, keys.images)), depth)
            self.outputs += self.cnn.outputs

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        parts = []
        if self.keys.vectors:
            parts.append(self.mlp(torch.cat([symlog(obs[key].float()) for key in self.keys.vectors], -1)))
        if self.keys.images:
            parts.append(self.cnn(torch.cat([obs[key] for key in self.keys.images], -1)))
        return torch.cat(parts, -1)


class Decoder(nn.Module):
    """Latents to predicted observations: images in [0, 1], vectors in symlog space."""

    def __init__(
        self, keys: ModelKeys, *, deter: int, stoch: int, depth: int, units: int, blocks: int = 8, layers: int = 3
    ) -> None:
        super().__init__()
        self.keys = keys
        if keys.vectors:
            self.mlp = MLP(deter + stoch, units, layers)
            self.heads = nn.ModuleList(Linear(units, keys.width(key)) for key in keys.vectors)
        if keys.images:
            channels = sum(map(keys.channels, keys.images))
            size = {"depth": depth, "units": units, "blocks": blocks}
            self.cnn = ImageDecoder(deter, stoch, *keys.image_size, channels, **size)

    def forward(self, latent: Latent) -> dict[str, Tensor]:
        """Latents ``(B, ...)`` to key: images ``(B, H, W, C)`` and vectors ``(B, D)``, float32."""
        out: dict[str, Tensor] = {}
        if self.keys.vectors:
            hidden = self.mlp(latent.features)
            out |= {key: head(hidden).float() for key, head in zip(self.keys.vectors, self.heads, strict=True)}
        if self.keys.images:
            image = self.cnn(latent.deter, latent.stoch.flatten(-2))
            parts = image.split([self.keys.channels(key) for key in self.keys.images], -1)
            out |= dict(zip(self.keys.images, parts, strict=True))
        return out

    def losses(self, predicted: Mapping[str, Tensor], obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Squared error per key ``(B,)``: *summed* over pixels and channels, or over the vector in symlog space."""
        losses = {}
        for key in self.keys.images:
            losses[key] = (predicted[key] - obs[key].float() / 255).square().sum((-3, -2, -1))
        for key in self.keys.vectors:
            losses[key] = (predicted[key] - symlog(obs[key].float())).square().sum(-1)
        return losses
