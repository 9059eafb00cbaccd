"""A ring's content as a checkpoint takes it: by time, and only what never changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sheeplike.memory.replay import SequenceReplay


class ReplayJournal:
    """What of a ring never changes once it is added, by time: a ``sheeplike.checkpoint.Journal``.

    A view, which holds nothing itself.
    """

    def __init__(self, replay: SequenceReplay) -> None:
        self._replay = replay
        self.keys = sorted(replay.storage.keys() - replay.refreshed)
        self.step_bytes = sum(replay.storage[key][0].nbytes for key in self.keys)

    @property
    def lineage(self) -> str:
        """A random name of the content, drawn anew whenever it is replaced instead of added to."""
        return self._replay.lineage

    @property
    def parent(self) -> str | None:
        """What names the checkpoint that the content was restored from; None after any other replacement."""
        return self._replay.parent

    @parent.setter
    def parent(self, name: str | None) -> None:
        self._replay.parent = name

    @property
    def oldest(self) -> int:
        return self._replay.oldest

    @property
    def end(self) -> int:
        return self._replay.added

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Steps ``[start, stop)``: key to ``(stop - start, N, ...)``, copied to the host's memory.

        Raises:
            ValueError: they are not all in the ring.
        """
        if not self.oldest <= start <= stop <= self.end:
            raise ValueError(f"journal of [{self.oldest}, {self.end}): no steps [{start}, {stop})")
        steps = {}
        for key in self.keys:
            ring = self._replay.storage[key]
            steps[key] = torch.empty((stop - start, *ring.shape[1:]), dtype=ring.dtype)
            for place, slots in self._pieces(start, stop):
                steps[key][place].copy_(ring[slots])
        return steps

    def write(self, start: int, steps: Mapping[str, Tensor]) -> None:
        """Put back the steps that begin at ``start``; what has left the ring by now is skipped.

        Raises:
            ValueError: they are of another ring, do not follow on those before, or none are awaited.
        """
        replay, awaited = self._replay, self._replay.awaited
        stop = start + min((len(value) for value in steps.values()), default=0)
        if awaited is None or not start <= awaited < stop <= self.end:
            raise ValueError(f"journal steps [{start}, {stop}): expected those from {awaited} up to {self.end}")
        for key in self.keys:
            ring, value = replay.storage[key], steps.get(key)
            found = None if value is None else (value.dtype, tuple(value.shape))
            expected = (ring.dtype, (stop - start, *ring.shape[1:]))
            if found != expected:
                raise ValueError(f"journal key {key!r}: stored {found}, expected {expected}")
        skipped = awaited - start
        for key in self.keys:
            for place, slots in self._pieces(awaited, stop):
                replay.storage[key][slots].copy_(steps[key][skipped:][place])
        replay.awaited = None if stop == self.end else stop

    def _pieces(self, start: int, stop: int) -> list[tuple[slice, slice]]:
        """Where times ``[start, stop)`` lie in a copy of them and in the ring: in one piece, or two where it wraps."""
        length = self._replay.length
        first, count = start % length, stop - start
        unbroken = min(count, length - first)
        pieces = [(slice(0, unbroken), slice(first, first + unbroken))]
        return pieces + [(slice(unbroken, count), slice(0, count - unbroken))] * (count > unbroken)
