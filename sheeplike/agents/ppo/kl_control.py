"""What holds the policy near the one that acted."""

from __future__ import annotations

import torch
from torch import Tensor

KL_CONTROLS = ("none", "early_stop", "adaptive_lr")
# How adaptive_lr moves the learning rate, and how far; the numbers of Brax.
LR_FACTOR, LR_RANGE = 1.5, (1e-5, 1e-2)
MEASURABLE_KL = 1e-6  # nats


def control_kl(kind: str, kl: Tensor, target: float, *, finite: Tensor, stopped: Tensor, rate: Tensor) -> None:
    """React to how far an update finds the policy from the one that acted; all tensors are 0-dim on the device.

    Args:
        kind: one of ``KL_CONTROLS``.
        kl: nats.
        target: nats.
        finite: bool; where the update's numbers are not, what was measured says nothing and changes nothing.
        stopped: float32; ``early_stop`` makes it 1 beyond 1.5 times the target.
        rate: the learning rate; ``adaptive_lr`` makes it smaller beyond twice the target and larger below half of it.
    """
    if kind == "early_stop":
        stopped.copy_(torch.maximum(stopped, ((kl > 1.5 * target) & finite).float()))
    elif kind == "adaptive_lr":
        factor = torch.where(kl > 2 * target, 1 / LR_FACTOR, 1.0)
        # At a rollout's first update, where the policy is still the one that acted, there is nothing but rounding.
        factor = torch.where((kl < target / 2) & (kl > MEASURABLE_KL), LR_FACTOR, factor)
        rate.copy_(torch.where(finite, (rate * factor).clamp(*LR_RANGE), rate))
