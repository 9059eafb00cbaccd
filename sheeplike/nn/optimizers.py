"""Adam, and LaProp with adaptive gradient clipping as DreamerV3 has it (``danijar/dreamerv3`` ``embodied/jax/opt.py``).

LaProp (Ziyin et al., 2020) divides the gradient by its running root mean square *before* the momentum average, so its
momentum stays bounded; adaptive gradient clipping (Brock et al., 2021) bounds each gradient relative to its parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sheeplike.nn.patches import silence_capturable


class RestoredInPlace(torch.optim.Optimizer):
    """Optimizer whose state is restored in place, so that a captured update keeps working.

    Values are copied into the optimizer's own tensors: a fused step would write beyond a loaded one that is too small.
    """

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore moments, counters, and a learning rate that is a tensor; ValueError or LookupError for a misfit."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if isinstance(group["lr"], Tensor):
                _restore("lr", group["lr"], saved["lr"])
            for p, number in zip(group["params"], saved["params"], strict=True):
                for name, value in self.state[p].items():
                    _restore(name, value, state_dict["state"][number][name])


def _restore(name: str, ours: Tensor, saved: Any) -> None:
    found = tuple(saved.shape) if isinstance(saved, Tensor) else type(saved).__name__
    if found != tuple(ours.shape):
        raise ValueError(f"{name} of the optimizer is {found}: expected {tuple(ours.shape)}")
    if name in ("lr", "step", "square", "exp_avg_sq") and (saved < 0).any():
        raise ValueError(f"{name} of the optimizer is negative")
    ours.copy_(saved)


class LaProp(RestoredInPlace):
    """LaProp with gradients clipped per tensor, biases and norm scales included.

    Counters are device tensors and all arithmetic is ``foreach``: no host synchronisation, ready for a CUDA graph.
    While ``found_inf``, a 0-dim float32 device tensor, is 1, :meth:`step` changes nothing, as in torch. ``warmup``
    counts completed updates, so the learning rate of the first one is zero.

    Args:
        params: float32.
        betas: decay of the momentum and of the squared gradient.
        eps: added to the root mean square; so small that the second moment must stay float32.
        agc: maximum ratio of gradient norm to parameter norm.
        agc_min: lower bound of the parameter norm in that ratio.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        *,
        betas: tuple[float, float],
        eps: float,
        agc: float,
        agc_min: float = 1e-3,
        warmup: int,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "agc": agc, "agc_min": agc_min, "warmup": warmup}
        super().__init__(params, defaults)
        self.found_inf: Tensor | None = None
        for group in self.param_groups:
            for p in group["params"]:
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] = {"step": step, "momentum": torch.zeros_like(p), "square": torch.zeros_like(p)}

    def learning_rate(self) -> Tensor:
        """Return the learning rate of the next update, a 0-dim float32 device tensor."""
        group = self.param_groups[0]
        step = self.state[group["params"][0]]["step"]
        done = step / group["warmup"] if group["warmup"] else torch.ones_like(step)
        return group["lr"] * done.clamp(max=1.0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update in place every parameter that has a ``grad``; where ``found_inf`` is 1, every bit stays."""
        found_inf = getattr(self, "found_inf", None)  # torch does not copy it with the optimizer
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            beta1, beta2 = group["betas"]
            momentum, square, steps = ([self.state[p][name] for p in params] for name in ("momentum", "square", "step"))
            rate = self.learning_rate()
            keep = torch.ones_like(rate).bool() if found_inf is None else found_inf == 0
            clip, eps = (group["agc_min"], group["agc"]), group["eps"]
            self.change(params, [p.grad for p in params], momentum, square, steps, rate, keep, beta1, beta2, clip, eps)

    def change(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        momentum: list[Tensor],
        square: list[Tensor],
        steps: list[Tensor],
        rate: Tensor,
        keep: Tensor,
        beta1: float,
        beta2: float,
        clip: tuple[float, float],
        eps: float,
    ) -> None:
        """Update ``params`` and their state in place where ``keep``, a 0-dim bool, is true; ``clip``: agc_min, agc."""
        # With a single tensor the host would read its value; with a list it does not.
        torch._foreach_add_(steps, [keep.float()] * len(steps))
        count = steps[0].clamp_min(1.0)  # 0 when the first step is skipped

        # Adaptive gradient clipping on the raw gradients: g / max(1, |g| / (agc * max(agc_min, |p|))).
        limits = torch._foreach_norm(params)
        torch._foreach_clamp_min_(limits, clip[0])
        torch._foreach_mul_(limits, clip[1])
        shrink = torch._foreach_norm(grads)
        torch._foreach_div_(shrink, limits)
        torch._foreach_clamp_min_(shrink, 1.0)
        update = torch._foreach_div(grads, shrink)
        _erase(update, ~keep)

        # Divide by the bias-corrected root mean square.
        torch._foreach_mul_(square, torch.where(keep, beta2, 1.0))
        torch._foreach_addcmul_(square, update, update, 1 - beta2)
        rms = torch._foreach_div(square, 1 - torch.pow(beta2, count))
        torch._foreach_sqrt_(rms)
        torch._foreach_add_(rms, eps)
        torch._foreach_div_(update, rms)

        # A skipped update is 0 here; the momentum averaged with itself keeps its bits.
        torch._foreach_add_(_bits(update), torch._foreach_mul(_bits(momentum), (~keep).int()))

        # Momentum of the scaled gradient; the learning rate multiplies afterwards.
        torch._foreach_lerp_(momentum, update, 1 - beta1)
        change = torch._foreach_mul(momentum, rate / (1 - torch.pow(beta1, count)))
        _erase(change, ~keep)
        torch._foreach_sub_(params, change)


@torch.no_grad()
def update_slow(slow: nn.Module, fast: nn.Module, rate: float, found_inf: Tensor | None = None) -> None:
    """Move the parameters of ``slow`` towards those of ``fast`` by ``rate``, in place, unless ``found_inf`` is 1."""
    before, after = list(slow.parameters()), list(fast.parameters())
    if found_inf is None:
        torch._foreach_lerp_(before, after, rate)
        return
    moved = torch._foreach_lerp(before, after, rate)
    _erase(moved, found_inf != 0)
    _erase(before, found_inf == 0)
    torch._foreach_add_(_bits(before), _bits(moved))


def _bits(tensors: list[Tensor]) -> list[Tensor]:
    """View tensors as int32, where times 0 erases even a NaN, and plus 0 keeps every bit."""
    return [tensor.view(torch.int32) for tensor in tensors]


def _erase(tensors: list[Tensor], where: Tensor) -> None:
    """Set float32 ``tensors`` to 0 if ``where``, a 0-dim bool device tensor, is true."""
    torch._foreach_mul_(_bits(tensors), (~where).int())


def adam(params: Iterable[nn.Parameter], lr: float, *, eps: float) -> torch.optim.Adam:
    """Build an Adam, fused and with its rate on the device, that needs no host to change the rate or skip a step."""
    params = list(params)
    device = params[0].device
    rate = torch.tensor(lr, device=device)
    optimizer = _Adam(params, lr=rate, eps=eps, fused=True, capturable=device.type == "cuda")
    silence_capturable(optimizer)
    for p in params:
        step = torch.zeros((), device=device)
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


class _Adam(RestoredInPlace, torch.optim.Adam):
    def learning_rate(self) -> Tensor:
        """Return the learning rate of the next update, a 0-dim float32 device tensor."""
        return self.param_groups[0]["lr"].clone()
