"""LaProp with adaptive gradient clipping, DreamerV3's optimizer (``danijar/dreamerv3`` ``embodied/jax/opt.py``).

LaProp (Ziyin et al., 2020) divides the gradient by its running root mean square *before* the momentum average, so its
momentum stays bounded; adaptive gradient clipping (Brock et al., 2021) bounds each gradient relative to its parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class RestoredInPlace(torch.optim.Optimizer):
    """An optimizer that takes its state back where it is, so that a captured update goes on working.

    Nothing of what is loaded is kept but its numbers: a fused step writes as many as its parameter has, wherever a
    tensor ends that says it is as large.
    """

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore moments, counters, and a learning rate that is a tensor; all other options are our own.

        Raises:
            ValueError, KeyError, TypeError: it is the state of other parameters.
        """
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
    if name not in ("momentum", "exp_avg") and (saved < 0).any():
        raise ValueError(f"{name} of the optimizer is negative")
    ours.copy_(saved)


class LaProp(RestoredInPlace):
    """Clip each tensor's gradient, biases and norm scales included, divide by its RMS, average with momentum, step.

    The step counter is a device tensor and all arithmetic is ``foreach`` on the device: no host synchronisation, and
    ready for capture in a CUDA graph. The first update has learning rate zero when ``warmup > 0`` (the warm-up counts
    completed updates).

    Attributes:
        found_inf: None, or a 0-dim float32 device tensor: where it is 1 the next :meth:`step` changes nothing, whatever
            the gradients are. It is torch's own way to skip a step without asking the host.

    Args:
        params: parameters, float32.
        lr: learning rate after warm-up.
        betas: decay of the momentum and of the squared gradient.
        eps: added to the root mean square; so small that the second moment must stay float32.
        agc: largest ratio of gradient norm to parameter norm.
        agc_min: smallest parameter norm assumed by the clip.
        warmup: updates over which the learning rate rises linearly from zero.
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
        """The learning rate of the next update, a 0-dim float32 device tensor."""
        group = self.param_groups[0]
        step = self.state[group["params"][0]]["step"]
        # Without a warm-up the ratio is at least 1 from the start.
        done = step / group["warmup"] if group["warmup"] else torch.ones_like(step)
        return group["lr"] * done.clamp(max=1.0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter in place from its ``grad``; parameters without one are left alone.

        Where ``found_inf`` is 1, parameters, moments and counters keep every bit.
        """
        found_inf = getattr(self, "found_inf", None)  # torch does not copy it with the optimizer
        keep = None if found_inf is None else found_inf == 0
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            beta1, beta2 = group["betas"]
            momentum, square, steps = ([self.state[p][name] for p in params] for name in ("momentum", "square", "step"))
            rate = self.learning_rate()
            if keep is None:
                one, decay = 1.0, beta2
            else:
                # A list: of a single tensor the host would want to know the value.
                one, decay = [keep.float()] * len(steps), torch.where(keep, beta2, 1.0)
            torch._foreach_add_(steps, one)
            count = steps[0] if keep is None else steps[0].clamp_min(1.0)  # a first step that is skipped has none

            # Adaptive gradient clipping on the raw gradients: g / max(1, |g| / (agc * max(agc_min, |p|))).
            grads = [p.grad for p in params]
            limits = torch._foreach_norm(params)
            torch._foreach_clamp_min_(limits, group["agc_min"])
            torch._foreach_mul_(limits, group["agc"])
            shrink = torch._foreach_norm(grads)
            torch._foreach_div_(shrink, limits)
            torch._foreach_clamp_min_(shrink, 1.0)
            update = torch._foreach_div(grads, shrink)
            if keep is not None:
                _erase(update, ~keep)

            # Divide by the bias-corrected root mean square.
            torch._foreach_mul_(square, decay)
            torch._foreach_addcmul_(square, update, update, 1 - beta2)
            rms = torch._foreach_div(square, 1 - torch.pow(beta2, count))
            torch._foreach_sqrt_(rms)
            torch._foreach_add_(rms, group["eps"])
            torch._foreach_div_(update, rms)

            if keep is not None:  # what is erased is 0 still; an average with itself stays as it is
                torch._foreach_add_(_bits(update), torch._foreach_mul(_bits(momentum), (~keep).int()))

            # Momentum of the scaled gradient; the learning rate multiplies afterwards.
            torch._foreach_lerp_(momentum, update, 1 - beta1)
            change = torch._foreach_mul(momentum, rate / (1 - torch.pow(beta1, count)))
            if keep is not None:
                _erase(change, ~keep)
            torch._foreach_sub_(params, change)


@torch.no_grad()
def update_slow(slow: nn.Module, fast: nn.Module, rate: float, found_inf: Tensor | None = None) -> None:
    """Move the parameters of ``slow`` towards those of ``fast`` by ``rate``, in place.

    Nothing moves where ``found_inf``, a 0-dim float32 device tensor, is 1.
    """
    before, after = list(slow.parameters()), list(fast.parameters())
    if found_inf is None:
        torch._foreach_lerp_(before, after, rate)
        return
    moved = torch._foreach_lerp(before, after, rate)
    _erase(moved, found_inf != 0)
    _erase(before, found_inf == 0)
    torch._foreach_add_(_bits(before), _bits(moved))


def _bits(tensors: list[Tensor]) -> list[Tensor]:
    """The same memory as int32. Times 0 is nothing then, even of a NaN, and plus 0 is every bit as it was."""
    return [tensor.view(torch.int32) for tensor in tensors]


def _erase(tensors: list[Tensor], where: Tensor) -> None:
    """Make all float32 ``tensors`` 0 where ``where``, a 0-dim bool device tensor, is true: one call for all of them."""
    torch._foreach_mul_(_bits(tensors), (~where).int())


def adam(params: Iterable[nn.Parameter], lr: float, *, eps: float) -> torch.optim.Adam:
    """Adam whose step can be changed or skipped without asking the host: fused, with its rate on the device."""
    params = list(params)
    device = params[0].device
    rate = torch.tensor(lr, device=device)
    optimizer = _Adam(params, lr=rate, eps=eps, fused=True, capturable=device.type == "cuda")
    # It is told to be capturable whether or not it will be captured; that needs no warning.
    optimizer._warned_capturable_if_run_uncaptured = True
    for p in params:
        step = torch.zeros((), device=device)
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


class _Adam(RestoredInPlace, torch.optim.Adam):
    """Torch's own, restored in place."""

    def learning_rate(self) -> Tensor:
        """The learning rate of the next update, a 0-dim float32 device tensor."""
        return self.param_groups[0]["lr"].clone()
