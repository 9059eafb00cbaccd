"""Metrics that stay on the device until they are written: adding and taking wait for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class PendingMetrics:
    """Numbers on their way to the host: the copy is queued behind the work that makes them, and waits for nothing.

    Args:
        values: ``(K,)``, on any device; not written again.
        name: makes metrics of the ``K`` numbers.
    """

    def __init__(self, values: Tensor, name: Callable[[list[float]], dict[str, float]]) -> None:
        self._name, self._copied = name, None
        if values.is_cuda:
            # Pinned: a copy into other memory would wait for the device here and now.
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._values = values

    def read(self) -> dict[str, float]:
        """The metrics, once the device has come so far: no wait at all where the device has long gone on."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._name(self._values.tolist())


class MetricBuffer:
    """Means of named device scalars over the calls of :meth:`add` since the last :meth:`take`."""

    def __init__(self) -> None:
        # One pair of vectors, (sums, counts), for each set of names: a call costs a few kernels however many names.
        self._groups: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Take in one value of each metric, without a host synchronisation.

        The values are copied on the device, so they may be the static outputs of a CUDA graph. NaN is left out of sum
        and count alike: a metric that is undefined now and then has the mean of its defined values.

        Args:
            metrics: name to 0-dim tensor of a real dtype, all on one device.

        Raises:
            TypeError: a value is not a tensor.
            ValueError: a value is not 0-dim.
        """
        for name, value in metrics.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"metric {name!r}: got {type(value).__name__}, expected a 0-dim tensor")
            if value.dim() != 0:
                raise ValueError(f"metric {name!r} has shape {tuple(value.shape)}: expected a 0-dim tensor")
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
        """Means since the last call; NaN where every value was NaN."""
        if not self._groups:
            return PendingMetrics(torch.zeros(0), lambda _: {})
        device = next(reversed(self._groups.values()))[0].device  # A restored group may still be on the CPU.
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
    """Means over the episodes that ended since the last :meth:`take`, in ``num_envs`` worlds on ``device``.

    Sums are taken from ``info["episode"]``, whose running totals are final where an episode ends.
    """

    def __init__(self, num_envs: int, device: torch.device | str) -> None:
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._terms: tuple[str, ...] = ()
        self._sums: Tensor | None = None

    def add(self, reward: Tensor, terminated: Tensor, truncated: Tensor, info: Mapping[str, Any]) -> None:
        """Take in one environment step, without a host synchronisation.

        Args:
            reward: ``(N,)`` float32. terminated, truncated: ``(N,)`` bool.
            info: ``episode``: ``return`` ``(N,)``, ``length`` ``(N,)``, ``success`` ``(N,)``, NaN where there is none,
                ``reward_terms`` ``{name: (N,)}``; ``nonfinite`` ``(N,)`` bool; of other people's environments
                ``restarted`` ``(N,)`` bool too: the episode was cut, and does not count.

        Raises:
            ValueError: ``reward`` is not ``(num_envs,)``, or the reward terms are others than at the first step.
        """
        if reward.shape != (self.num_envs,):
            raise ValueError(f"reward has shape {tuple(reward.shape)}: expected ({self.num_envs},), one per world")
        episode = info["episode"]
        terms = episode.get("reward_terms", {})
        if self._sums is None:
            self._terms = tuple(terms)
            self._sums = torch.zeros(7 + len(terms), dtype=torch.float64, device=self.device)
        if self._terms != tuple(terms):
            raise ValueError(f"reward terms {list(terms)}: expected those of the first step, {list(self._terms)}")
        ended = terminated | truncated
        if "restarted" in info:  # where the environment failed and was replaced, that was no whole episode
            ended = ended & ~info["restarted"]
        one = torch.ones_like(reward)
        steps = torch.stack([one, reward, info["nonfinite"]]).double()
        episodes = [one, episode["return"], episode["length"], episode["success"], *terms.values()]
        # where, not a product: a world that is still running may hold a NaN.
        episodes = torch.where(ended, torch.stack(episodes).double(), 0.0)
        self._sums = self._sums + torch.cat([steps.sum(1), episodes.sum(1)])

    def take(self) -> PendingMetrics:
        """Means over the episodes ended since the last call.

        Always there: ``rollout/episodes``, ``health/nonfinite_worlds`` (worlds that were reset because they held a
        non-finite number) and, after a step, ``rollout/reward_mean`` (per step and world). Where an episode has ended:
        ``rollout/return_mean``, ``rollout/length_mean`` (control steps), ``rollout/success_rate`` if defined, and
        ``reward_terms/<name>`` (mean of episode sums).
        """
        terms, sums, self._sums = self._terms, self._sums, None
        if sums is None:
            terms, sums = (), torch.zeros(7)
        return PendingMetrics(sums, lambda values: _episode_means(terms, values))

    def state_dict(self) -> dict[str, Any]:
        return {"terms": list(self._terms), "sums": None if self._sums is None else self._sums.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._terms, sums = tuple(state["terms"]), state["sums"]
        self._sums = None if sums is None else _vector(sums, 7 + len(self._terms)).to(self.device)


def _vector(saved: Tensor, length: int) -> Tensor:
    """A copy of saved numbers, which have to be so many."""
    return torch.empty(length, dtype=torch.float64).copy_(saved)


def _means(names: list[str], values: list[float]) -> dict[str, float]:
    """Sums and counts, in this order, to means; a name may be there twice, from two groups."""
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
