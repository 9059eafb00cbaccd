"""Metrics that stay on the device until they are written: adding and taking wait for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class PendingMetrics:
    """Metrics whose copy to the host is queued on the device; only :meth:`read` waits for it."""

    def __init__(self, values: Tensor, name: Callable[[list[float]], dict[str, float]]) -> None:
        self._name, self._copied = name, None  # ``name`` turns the numbers into metrics
        if values.is_cuda:
            # A copy into memory that is not pinned would wait for the device.
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._values = values

    def read(self) -> dict[str, float]:
        """Return the metrics, once the device has made them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._name(self._values.tolist())


class MetricBuffer:
    """Means of named device scalars over the calls of :meth:`add` since the last :meth:`take`."""

    def __init__(self) -> None:
        # Vectors (sums, counts) for each set of names, so that a call costs a few kernels for any number of names.
        self._groups: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add one value of each metric, 0-dim tensors on one device, without a host synchronisation.

        The values are copied, so they may be the static outputs of a CUDA graph. NaN means undefined: means skip it.
        """
        for name, value in metrics.items():
            assert getattr(value, "ndim", None) == 0, f"metric {name!r}: expected a 0-dim tensor"
        if not metrics:
            return
        values = torch.stack([value.detach() for value in metrics.values()]).double()
        missing = values.isnan()
        values, counts = values.masked_fill(missing, 0.0), (~missing).double()
        names = tuple(metrics)
        if names in self._groups:
            sums, total = (t.to(values.device) for t in self._groups[names])
            values, counts = sums + values, total + counts
        self._groups[names] = values, counts

    def take(self) -> PendingMetrics:
        """Return means since the last call; NaN where every value was NaN."""
        if not self._groups:
            return PendingMetrics(torch.zeros(0), lambda _: {})
        device = next(reversed(self._groups.values()))[0].device  # a restored group may still be on the CPU
        sums = torch.cat([sums.to(device) for sums, _ in self._groups.values()])
        counts = torch.cat([counts.to(device) for _, counts in self._groups.values()])
        names = [name for group in self._groups for name in group]
        self._groups.clear()
        return PendingMetrics(torch.cat([sums, counts]), lambda values: _means(names, values))

    def state_dict(self) -> dict[str, Any]:
        groups = self._groups.items()
        return {"groups": [(list(names), sums.clone(), counts.clone()) for names, (sums, counts) in groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._groups = {
            tuple(names): (_vector(sums, len(names)), _vector(counts, len(names)))
            for names, sums, counts in state["groups"]
        }


class EpisodeStatistics:
    """Means over the episodes that ended since the last :meth:`take`, in ``num_envs`` worlds."""

    def __init__(self, num_envs: int, device: torch.device | str) -> None:
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._terms: tuple[str, ...] = ()
        self._sums: Tensor | None = None

    def add(self, reward: Tensor, terminated: Tensor, truncated: Tensor, info: Mapping[str, Any]) -> None:
        """Add one step of all worlds, without a host synchronisation.

        Args:
            reward, terminated, truncated: ``(N,)``.
            info: ``nonfinite`` ``(N,)`` bool; ``episode`` with totals so far: ``return``, ``length``, ``success`` (NaN
                if undefined) and ``reward_terms`` ``{name: (N,)}``; optionally ``restarted`` ``(N,)`` bool: the
                environment failed, and its episode does not count.
        """
        assert reward.shape == (self.num_envs,), reward.shape
        episode = info["episode"]
        terms = episode.get("reward_terms", {})
        if self._sums is None:
            self._terms = tuple(terms)
            self._sums = torch.zeros(7 + len(terms), dtype=torch.float64, device=self.device)
        assert self._terms == tuple(terms), (self._terms, tuple(terms))
        ended = terminated | truncated
        if "restarted" in info:
            ended = ended & ~info["restarted"]
        one = torch.ones_like(reward)
        steps = torch.stack([one, reward, info["nonfinite"]]).double()
        episodes = [one, episode["return"], episode["length"], episode["success"], *terms.values()]
        # A product with `ended` would keep the NaN of a world that is still running.
        episodes = torch.where(ended, torch.stack(episodes).double(), 0.0)
        self._sums = self._sums + torch.cat([steps.sum(1), episodes.sum(1)])

    def take(self, add_up: Callable[[Tensor], Tensor] = lambda sums: sums) -> PendingMetrics:
        """Return means over the steps and the episodes since the last call; ``add_up`` adds the sums of other ranks.

        ``health/nonfinite_worlds`` counts worlds that were reset for a non-finite number, ``rollout/reward_mean`` is
        per step and world, ``rollout/length_mean`` in control steps, and ``reward_terms/<name>`` a mean of episode
        sums. What is undefined is left out.
        """
        terms, sums, self._sums = self._terms, self._sums, None
        if sums is None:
            terms, sums = (), torch.zeros(7)
        return PendingMetrics(add_up(sums), lambda values: _episode_means(terms, values))

    def state_dict(self) -> dict[str, Any]:
        return {"terms": list(self._terms), "sums": None if self._sums is None else self._sums.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._terms, sums = tuple(state["terms"]), state["sums"]
        self._sums = None if sums is None else _vector(sums, 7 + len(self._terms)).to(self.device)


def _vector(saved: Tensor, length: int) -> Tensor:
    """Copy a saved vector; RuntimeError if it has another length."""
    return torch.empty(length, dtype=torch.float64).copy_(saved)


def _means(names: list[str], values: list[float]) -> dict[str, float]:
    """Divide sums by counts, which follow them in ``values``; a name may occur twice, from two groups."""
    totals: dict[str, tuple[float, float]] = {}
    for name, value, count in zip(names, values[: len(names)], values[len(names) :], strict=True):
        before = totals.get(name, (0.0, 0.0))
        totals[name] = before[0] + value, before[1] + count
    return {name: value / count if count else math.nan for name, (value, count) in totals.items()}


def _episode_means(terms: tuple[str, ...], sums: list[float]) -> dict[str, float]:
    steps, reward, nonfinite, episodes, *sums = sums
    values = {"rollout/episodes": episodes, "health/nonfinite_worlds": nonfinite}
    if steps:
        values["rollout/reward_mean"] = reward / steps
    if episodes:
        names = ["rollout/return_mean", "rollout/length_mean", "rollout/success_rate"]
        names += [f"reward_terms/{term}" for term in terms]
        values |= {name: value / episodes for name, value in zip(names, sums, strict=True)}
        if math.isnan(values["rollout/success_rate"]):
            del values["rollout/success_rate"]
    return values
