"""Batches of which a fixed share comes from recorded steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sheeplike.memory.replay import SequenceReplay, Sequences


class MixedReplay:
    """Two rings, sampled like one: the worlds of ``recorded`` count on after those of ``collected``.

    Args:
        share: part of each batch that comes from ``recorded``, at least one sequence; 1: all of it.
    """

    def __init__(self, collected: SequenceReplay, recorded: SequenceReplay, share: float) -> None:
        self.collected, self.recorded, self.share = collected, recorded, share

    def _parts(self, batch: int) -> list[tuple[SequenceReplay, slice, int]]:
        """Return the rings that a batch comes from, each with its part of the batch and the number of its world 0."""
        collected = 0 if self.share == 1 else batch - min(max(round(self.share * batch), 1), batch - 1)
        recorded = self.recorded, slice(collected, batch), self.collected.num_envs
        return [(self.collected, slice(collected), 0), recorded] if collected else [recorded]

    @property
    def ready(self) -> bool:
        """True if a batch can be sampled."""
        return self.recorded.ready and (self.share == 1 or self.collected.ready)

    def sample(self, batch: int) -> Sequences:
        """Sample ``batch`` sequences."""
        return self.gather(*self.fetch(*self.draw(batch)))

    def draw(self, batch: int) -> tuple[Tensor, Tensor]:
        """Draw as :meth:`SequenceReplay.draw`; the recorded sequences come last."""
        drawn = [(world, *ring.draw(part.stop - (part.start or 0))) for ring, part, world in self._parts(batch)]
        return torch.cat([envs + world for world, envs, _ in drawn]), torch.cat([starts for *_, starts in drawn])

    def origin(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return worlds and starts of a batch that exists before anything is collected."""
        envs = torch.zeros(batch, dtype=torch.int64)
        for _, part, world in self._parts(batch):
            envs[part] = world
        return envs, torch.zeros_like(envs)

    def fetch(self, envs: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Move a draw to the device, as :meth:`SequenceReplay.fetch`."""
        parts = self._parts(len(envs))
        found = [(world, *ring.fetch(envs[part] - world, starts[part])) for ring, part, world in parts]
        envs = torch.cat([own + world for world, own, _, _ in found])
        return envs, torch.cat([begins for _, _, begins, _ in found]), _join([values for *_, values in found])

    def gather(self, envs: Tensor, starts: Tensor, fetched: Mapping[str, Tensor]) -> Sequences:
        """Read the sequences of :meth:`fetch`."""
        found = [
            ring.gather(envs[part] - world, starts[part], {key: value[part] for key, value in fetched.items()})
            for ring, part, world in self._parts(len(envs))
        ]
        return Sequences(_join([one.data for one in found]), envs, torch.cat([one.times for one in found]))

    def write_back(self, envs: Tensor, times: Tensor, values: Mapping[str, Tensor]) -> None:
        """Overwrite stored values of both rings."""
        for ring, part, world in self._parts(len(envs)):
            ring.write_back(envs[part] - world, times[part], {key: value[part] for key, value in values.items()})


def _join(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
