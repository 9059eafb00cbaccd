"""Batches of which a fixed share comes from recorded steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sheeplike.memory.replay import SequenceReplay, Sequences


class MixedReplay:
    """Two rings, sampled like one: the last sequences of a batch are recorded ones, of the worlds of ``recorded``.

    Args:
        share: part of each batch that comes from ``recorded``, at least one sequence; 1: all of it.
    """

    def __init__(self, collected: SequenceReplay, recorded: SequenceReplay, share: float) -> None:
        self.collected, self.recorded, self.share = collected, recorded, share

    def _parts(self, batch: int) -> list[tuple[SequenceReplay, slice]]:
        """Return the rings that a batch comes from, each with its part of the batch."""
        if self.share == 1:
            return [(self.recorded, slice(0, batch))]
        collected = batch - min(max(round(self.share * batch), 1), batch - 1)
        return [(self.collected, slice(0, collected)), (self.recorded, slice(collected, batch))]

    @property
    def ready(self) -> bool:
        """True if a batch can be sampled."""
        return self.recorded.ready and (self.share == 1 or self.collected.ready)

    def sample(self, batch: int) -> Sequences:
        """Sample ``batch`` sequences."""
        return self.gather(*self.fetch(*self.draw(batch)))

    def draw(self, batch: int) -> tuple[Tensor, Tensor]:
        """Draw as :meth:`SequenceReplay.draw`."""
        drawn = [ring.draw(part.stop - part.start) for ring, part in self._parts(batch)]
        envs, starts = zip(*drawn, strict=True)
        return torch.cat(envs), torch.cat(starts)

    def fetch(self, envs: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Move a draw to the device, as :meth:`SequenceReplay.fetch`."""
        fetched = [ring.fetch(envs[part], starts[part]) for ring, part in self._parts(len(envs))]
        all_envs, all_starts, values = zip(*fetched, strict=True)
        return torch.cat(all_envs), torch.cat(all_starts), _join(values)

    def gather(self, envs: Tensor, starts: Tensor, fetched: Mapping[str, Tensor]) -> Sequences:
        """Read the sequences of :meth:`fetch`."""
        parts = self._parts(len(envs))
        found = [ring.gather(envs[part], starts[part], _cut(fetched, part)) for ring, part in parts]
        return Sequences(_join([one.data for one in found]), envs, torch.cat([one.times for one in found]))

    def write_back(self, envs: Tensor, times: Tensor, values: Mapping[str, Tensor]) -> None:
        """Overwrite stored values of both rings."""
        for ring, part in self._parts(len(envs)):
            ring.write_back(envs[part], times[part], _cut(values, part))


def _cut(values: Mapping[str, Tensor], part: slice) -> dict[str, Tensor]:
    return {key: value[part] for key, value in values.items()}


def _join(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
