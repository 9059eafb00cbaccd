"""Probes: heads that learn to read vectors from the latents, and do not change the agent.

Each probed observation has a linear map and a small MLP on detached features, with an optimizer of their own.
:mod:`sheeplike.inspection.probes` has probes of a trained model, tested on episodes that they did not learn from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sheeplike.agents.agent import own_randomness
from sheeplike.agents.dreamer_v3.storage import ModelKeys
from sheeplike.nn.layers import MLP, Linear
from sheeplike.nn.normalizers import RunningNorm
from sheeplike.nn.optimizers import adam
from sheeplike.ranks import ALONE, Ranks

RATE, EPS = 1e-3, 1e-8  # Adam
HEADS = ("linear", "mlp")


class Probes:
    """Heads that read vectors from features ``(B, T, F)``; ``units`` is the width of the MLP."""

    def __init__(self, keys: ModelKeys, features: int, units: int, *, device: torch.device, seed: int) -> None:
        if keys.images:
            near = f"nearest: {keys.vectors[0]}" if keys.vectors else "nearest: a vector, such as privileged_state"
            raise ValueError(f"probe {keys.images[0]!r}: expected vectors; {near}")
        self.names, self.device = keys.vectors, device
        widths = [keys.width(key) for key in self.names]
        with own_randomness(device, seed):
            self.heads = nn.ModuleDict(
                {
                    "linear": nn.ModuleList(Linear(features, width, scale=0.0) for width in widths),
                    "mlp": nn.ModuleList(
                        nn.Sequential(MLP(features, units, 1), Linear(units, width, scale=0.0)) for width in widths
                    ),
                    # Targets are whitened, so that millimetres count as much as radians.
                    "norms": nn.ModuleList(RunningNorm(width) for width in widths),
                }
            ).to(device)
        self.optimizer = adam(self.heads.parameters(), RATE, eps=EPS)

    def update_norms(self, obs: Mapping[str, Tensor], ranks: Ranks = ALONE) -> None:
        """Update the whitening with ``obs (N, ...)`` of all ranks."""
        for key, norm in zip(self.names, self.heads["norms"], strict=True):
            norm.update(obs[key], ranks)

    def differentiate(self, features: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute gradients from features ``(B, T, F)`` and the observations of the same steps.

        Returns:
            ``probe/r2/<observation>/<head>``, 0-dim: explained variance in the batch; ``probe/loss``, 0-dim.
        """
        features, metrics, losses = features.detach().float(), {}, []
        for index, (key, norm) in enumerate(zip(self.names, self.heads["norms"], strict=True)):
            target = norm(batch[key])
            spread = (target - target.mean((0, 1))).square().mean()
            for head in HEADS:
                loss = (self.heads[head][index](features) - target).square().mean()
                explained = 1 - loss.detach() / spread  # NaN: a constant has no variance
                metrics[f"probe/r2/{key}/{head}"] = torch.where(spread > 1e-8, explained, math.nan)
                losses.append(loss)
        total = torch.stack(losses).sum()
        self.optimizer.zero_grad()
        total.backward()
        return metrics | {"probe/loss": total.detach()}

    def step(self, loss: Tensor, skip: Tensor) -> None:
        """Make a gradient step, unless ``skip``, 0-dim float32, is 1, or the loss or a gradient is not finite."""
        norm = nn.utils.get_total_norm([p.grad for p in self.heads.parameters()])
        finite = torch.stack([loss, norm]).isfinite().all()
        self.optimizer.found_inf = torch.maximum(skip, (~finite).float())
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"heads": self.heads.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
