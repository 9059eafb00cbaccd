"""Batches of which a fixed share comes from recorded steps."""

from __future__ import annotations

from collections.abc import Mapping

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

    def split(self, batch: int) -> tuple[int, int]:
        """Return the numbers of collected and of recorded sequences in a batch."""
        if self.share == 1:
            return 0, batch
        recorded = min(max(round(self.share * batch), 1), batch - 1)
        return batch - recorded, recorded

    @property
    def ready(self) -> bool:
        """True if a batch can be sampled."""
        return self.recorded.ready and (self.share == 1 or self.collected.ready)

    def sample(self, batch: int) -> Sequences:
        """Sample ``batch`` sequences."""
        return self.gather(*self.fetch(*self.draw(batch)))

    def draw(self, batch: int) -> tuple[Tensor, Tensor]:
        """Draw as :meth:`SequenceReplay.draw`; the recorded sequences come last."""
        collected, recorded = self.split(batch)
        envs, starts = self.recorded.draw(recorded)
        envs = envs + self.collected.num_envs
        if collected:
            others = self.collected.draw(collected)
            envs, starts = torch.cat([others[0], envs]), torch.cat([others[1], starts])
        return envs, starts

    def origin(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return worlds and starts of a batch that exists before anything is collected."""
        collected, recorded = self.split(batch)
        envs = torch.tensor([0] * collected + [self.collected.num_envs] * recorded)
        return envs, torch.zeros_like(envs)

    def fetch(self, envs: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Move a draw to the device, as :meth:`SequenceReplay.fetch`."""
        collected, _ = self.split(len(envs))
        own, begins, fetched = self.recorded.fetch(envs[collected:] - self.collected.num_envs, starts[collected:])
        own = own + self.collected.num_envs
        if not collected:
            return own, begins, fetched
        others, first, found = self.collected.fetch(envs[:collected], starts[:collected])
        both = {key: torch.cat([value, fetched[key]]) for key, value in found.items()}
        return torch.cat([others, own]), torch.cat([first, begins]), both

    def gather(self, envs: Tensor, starts: Tensor, fetched: Mapping[str, Tensor]) -> Sequences:
        """Read the sequences of :meth:`fetch`."""
        collected, _ = self.split(len(envs))
        own = {key: value[collected:] for key, value in fetched.items()}
        recorded = self.recorded.gather(envs[collected:] - self.collected.num_envs, starts[collected:], own)
        if not collected:
            return recorded._replace(envs=envs)
        others = {key: value[:collected] for key, value in fetched.items()}
        first = self.collected.gather(envs[:collected], starts[:collected], others)
        data = {key: torch.cat([value, recorded.data[key]]) for key, value in first.data.items()}
        return Sequences(data, envs, torch.cat([first.times, recorded.times]))

    def write_back(self, envs: Tensor, times: Tensor, values: Mapping[str, Tensor]) -> None:
        """Overwrite stored values of both rings."""
        collected, _ = self.split(len(envs))
        own = {key: value[collected:] for key, value in values.items()}
        self.recorded.write_back(envs[collected:] - self.collected.num_envs, times[collected:], own)
        if collected:
            others = {key: value[:collected] for key, value in values.items()}
            self.collected.write_back(envs[:collected], times[:collected], others)
