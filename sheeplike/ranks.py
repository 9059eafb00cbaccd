"""Processes that train together, one for each device, and all that they exchange.

Gradients, returns and moments travel between the devices (NCCL, or gloo on CPUs), decisions between the hosts (gloo).
Every collective is called eagerly, by all ranks in the same order; none is captured in a CUDA graph, where it may hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sheeplike.options import CommandError
from sheeplike.terminal import first_sentence


class LostRank(CommandError):
    """Another rank has ended, or did not answer in time."""

    status = 1


class Ranks:
    """The rank of this process among ``size``; with one rank each method returns its argument, and nothing is sent.

    Attributes:
        collectives, bytes: device collectives called so far, and the bytes that this rank has put into them.
    """

    def __init__(self, rank: int = 0, size: int = 1, hosts: dist.ProcessGroup | None = None) -> None:
        assert 0 <= rank < size, (rank, size)
        self.rank, self.size, self._hosts = rank, size, hosts
        self.collectives = self.bytes = 0

    @property
    def first(self) -> bool:
        """True for the rank that writes logs, videos, and the manifests of checkpoints."""
        return self.rank == 0

    def seed(self, seed: int) -> int:
        """Return a seed of this rank's own, below 2**31; ``seed`` for the first rank."""
        return seed if self.first else int(np.random.SeedSequence([seed, self.rank]).generate_state(1)[0] >> 1)

    # --- between devices --------------------------------------------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        """Add ``x`` of all ranks, in place; returns it."""
        if self.size > 1:
            self.count(x)
            with self._others():
                dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return ``x`` of all ranks, ``(size, *x.shape)``."""
        if self.size == 1:
            return x[None]
        found = x.new_empty((self.size, *x.shape))
        self.count(x)
        with self._others():
            dist.all_gather(list(found), x.contiguous())
        return found

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of the first rank."""
        for tensor in tensors if self.size > 1 else ():
            self.count(tensor)
            with self._others():
                dist.broadcast(tensor, 0)

    def count(self, x: Tensor) -> None:
        """Count a collective of ``x``."""
        self.collectives += 1
        self.bytes += x.nbytes

    # --- between hosts ----------------------------------------------------------------------------------------------

    def most(self, *numbers: int) -> list[int]:
        """Return the largest of each number over all ranks."""
        if self.size == 1:
            return list(numbers)
        found = torch.tensor(numbers)
        with self._others():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._hosts)
        return found.tolist()

    def collect(self, value: Any) -> list[Any]:
        """Return ``value`` of all ranks, in their order."""
        found = [value] * self.size
        if self.size > 1:
            with self._others():
                dist.all_gather_object(found, value, group=self._hosts)
        return found

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self.most(0)

    def check_equal(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raise :class:`CommandError` naming a rank whose tensors, summed up as integers, differ from the first's."""
        if self.size == 1:
            return
        sums = {name: int(x.detach().flatten().view(torch.int32).sum(dtype=torch.int64)) for name, x in tensors}
        first, *others = self.collect(sums)
        for rank, theirs in enumerate(others, 1):
            if odd := next((name for name in first if first[name] != theirs.get(name)), None):
                raise CommandError(f"rank {rank} has other numbers than rank 0 in {odd}: expected the same everywhere")

    @contextmanager
    def _others(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise LostRank(f"another rank has ended or hangs: {first_sentence(error)}") from error


ALONE = Ranks()
