"""Replay of sequences on the learner's device, sampled as in ``danijar/dreamerv3`` ``embodied/core/replay.py``.

The worlds step together, so one write head serves all of them and every counter is a Python integer: adding, sampling
and writing back never wait for the device. Each world's stream is continuous; episodes are marked, not cut.

Shape letters: ``L`` ring length in time steps, ``N`` worlds, ``B`` batch, ``T`` sequence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sheeplike import host

Spec = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_GENERATOR_STATES = ((5056,), (16,))  # shapes of the state of a generator, on a CPU and on a GPU


class TooLarge(MemoryError):
    """A ring does not fit into the device's free memory; the message names a size that would."""


class Sequences(NamedTuple):
    """A sampled batch."""

    data: dict[str, Tensor]  # (B, T, ...) each
    envs: Tensor  # (B,) int64, the world of each sequence
    times: Tensor  # (B, T) int64, counted from the world's first step: unlike a slot in the ring it names one step


class SequenceReplay:
    """Ring of the last ``size // num_envs`` steps of every world.

    Args:
        spec: key to (shape of one step in one world, dtype). ``is_first`` and ``is_last``, bool, must be among them.
        size: capacity in policy steps, over all worlds.
        sequence: length ``T`` of the sampled sequences.
        online: serve each new sequence once, oldest first and without overlaps, beside those sampled uniformly.
        refreshed: keys that :meth:`write_back` may overwrite; the others never change once they are added.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        num_envs: int,
        size: int,
        sequence: int,
        device: torch.device | str = "cpu",
        online: bool = True,
        seed: int = 0,
        refreshed: Collection[str] = (),
    ) -> None:
        assert spec.keys() >= set(refreshed), (sorted(spec), sorted(refreshed))
        self.length = size // num_envs
        if self.length < sequence + 1:  # one more, so that the write head is never inside a sequence
            raise ValueError(
                f"replay size {size}: {num_envs} worlds keep {self.length} steps each, but sequences of {sequence} "
                f"need at least {sequence + 1}; the smallest valid size is {num_envs * (sequence + 1)}"
            )
        self.device = torch.device(device)
        self.num_envs, self.sequence, self.online = num_envs, sequence, online
        needed, free = self.footprint(spec, num_envs, size), free_memory(self.device)
        if free is not None and needed > 0.9 * free:  # the learner needs some of it too
            fits = int(size * 0.9 * free / needed) // num_envs * num_envs
            hint = f"a size of {fits} would fit" if fits >= num_envs * (sequence + 1) else "fewer worlds would fit"
            of = "memory" if self.device.type == "cpu" else f"{self.device}'s memory"
            sizes = f"{needed / 2**30:.1f} GiB of {of}, {free / 2**30:.1f} GiB are free"
            raise TooLarge(f"replay size {size}: needs {sizes}; {hint}")
        self.storage = {
            key: _zeros((self.length, num_envs, *shape), dtype, self.device) for key, (shape, dtype) in spec.items()
        }
        self.added = 0  # steps ever added, per world
        self.head = torch.zeros((), dtype=torch.int64, device=self.device)  # `added`, for code captured in a graph
        self.fresh: deque[tuple[int, int]] = deque()  # (world, start time) of sequences not yet served
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.refreshed = frozenset(refreshed)
        self.expected: int | None = None  # time of the next step that write_steps has to restore; None: complete
        self.columns = slice(None)  # worlds of which write_steps restores the steps
        # Files of checkpoints that hold some of these steps. Replaced by a new list with the content, so that no stale
        # file is reused.
        self.chunks: list[Any] = []

    @staticmethod
    def footprint(spec: Spec, num_envs: int, size: int) -> int:
        """Return the bytes of a ring of ``size`` policy steps."""
        step = sum(math.prod(shape) * dtype.itemsize for shape, dtype in spec.values())
        return step * num_envs * (size // num_envs)

    def describe(self) -> str:
        taken = sum(ring.nbytes for ring in self.storage.values())
        steps = self.length * self.num_envs
        return f"{steps:,} policy steps, {taken / 2**20:,.0f} MiB on {self.device} ({taken / steps:,.0f} B each)"

    def __len__(self) -> int:
        """Policy steps held now, over all worlds."""
        return min(self.added, self.length) * self.num_envs

    @property
    def oldest(self) -> int:
        """Time of the oldest step held now."""
        return max(0, self.added - self.length)

    @property
    def ready(self) -> bool:
        """True if a sequence can be sampled."""
        return self.added >= self.sequence

    def add(self, step: Mapping[str, Tensor]) -> None:
        """Append a copy of one step of every world, key to ``(N, ...)``."""
        self._check_complete()
        assert step.keys() == self.storage.keys(), (sorted(step), sorted(self.storage))
        slot = self.added % self.length
        for key, value in step.items():
            self.storage[key][slot].copy_(value)
        self.added += 1
        self.head.fill_(self.added)
        if self.online and self.added % self.sequence == 0:
            self.fresh.extend((world, self.added - self.sequence) for world in range(self.num_envs))

    def sample(self, batch: int) -> Sequences:
        """Sample ``batch`` sequences."""
        return self.gather(*self.draw(batch))

    def draw(self, batch: int) -> tuple[Tensor, Tensor]:
        """Draw worlds and starting times of sequences, ``(B,)`` int64 each: a share of the new ones, then uniformly.

        No sequence spans the write head.
        """
        self._check_complete()
        assert self.ready, f"{self.added} steps per world, a sequence needs {self.sequence}"
        draw = {"device": self.device, "generator": self.generator}
        envs = torch.randint(self.num_envs, (batch,), **draw)
        starts = torch.randint(self.oldest, self.added - self.sequence + 1, (batch,), **draw)
        if fresh := self._take_fresh(batch):
            chosen = torch.tensor(fresh, dtype=torch.int64, pin_memory=self.device.type == "cuda")
            chosen = chosen.to(self.device, non_blocking=True)
            envs[: len(fresh)], starts[: len(fresh)] = chosen[:, 0], chosen[:, 1]
        return envs, starts

    def origin(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return worlds and starts of a batch that can be read before anything is added."""
        none = torch.zeros(batch, dtype=torch.int64, device=self.device)
        return none, none

    def _take_fresh(self, batch: int) -> list[tuple[int, int]]:
        # One sequence for each waiting round of all worlds, so that the queue stays short where updates are rare.
        while self.fresh and self.fresh[0][1] < self.oldest:  # it was overwritten while it waited
            self.fresh.popleft()
        rounds = math.ceil(len(self.fresh) / self.num_envs)
        return [self.fresh.popleft() for _ in range(min(rounds, max(batch - 1, 1)))]

    def gather(self, envs: Tensor, starts: Tensor) -> Sequences:
        """Read the sequences of :meth:`draw`, without a host synchronisation.

        ``is_last`` is also set before each step that begins an episode, where a stream was cut.
        """
        times = starts[:, None] + torch.arange(self.sequence, device=self.device)
        rows = self._rows(envs, times)
        data = {key: self._flat(key).index_select(0, rows.flatten()).unflatten(0, rows.shape) for key in self.storage}
        cut = data["is_first"][:, 1:]
        data["is_last"][:, :-1] |= cut
        return Sequences(data, envs, times)

    def write_back(self, envs: Tensor, times: Tensor, values: Mapping[str, Tensor]) -> None:
        """Overwrite stored values: ``envs (B,)``, ``times (B, T)``, key to ``(B, T, ...)``.

        Steps that have left the ring since sampling are skipped: their slots hold newer ones.
        """
        assert values.keys() <= self.refreshed, (sorted(values), sorted(self.refreshed))
        rows = self._rows(envs, times).flatten()
        alive = (times >= self.head - self.length).flatten()
        for key, value in values.items():
            ring = self._flat(key)
            value = value.flatten(0, 1).to(ring.dtype)
            keep = alive.view(-1, *[1] * (value.ndim - 1))
            ring.index_copy_(0, rows, torch.where(keep, value, ring.index_select(0, rows)))

    def _rows(self, envs: Tensor, times: Tensor) -> Tensor:
        return times % self.length * self.num_envs + envs[:, None]

    def _flat(self, key: str) -> Tensor:
        return self.storage[key].flatten(0, 1)

    def _check_complete(self) -> None:
        assert self.expected is None, f"steps were restored up to {self.expected} of {self.added} only"

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def fixed(self) -> list[str]:
        """Keys that never change once they are added."""
        return sorted(self.storage.keys() - self.refreshed)

    @property
    def step_bytes(self) -> int:
        """Bytes of one time step in :meth:`read_steps`."""
        return sum(self.storage[key][0].nbytes for key in self.fixed)

    def read_steps(self, start: int, stop: int) -> dict[str, Tensor]:
        """Copy steps ``[start, stop)`` of the :attr:`fixed` keys to the host's memory: ``(stop - start, N, ...)``."""
        assert self.oldest <= start <= stop <= self.added, (self.oldest, start, stop, self.added)
        steps = {}
        for key in self.fixed:
            ring = self.storage[key]
            steps[key] = torch.empty((stop - start, *ring.shape[1:]), dtype=ring.dtype)
            for place, slots in self._pieces(start, stop):
                steps[key][place].copy_(ring[slots])
        return steps

    def write_steps(self, start: int, steps: Mapping[str, Tensor]) -> None:
        """Restore steps of :meth:`read_steps`, in order of time, after a state without history.

        Steps that have left the ring since, or that are restored already, are skipped. ValueError if they do not fit.
        """
        expected = self.expected
        stop = start + min((len(value) for value in steps.values()), default=0)
        if expected is None or not start <= expected < stop <= self.added:
            raise ValueError(f"replay steps [{start}, {stop}): expected those from {expected} up to {self.added}")
        for key in self.fixed:
            ring, value = self.storage[key], steps.get(key)
            found = None if value is None else (value.dtype, tuple(value.shape))
            needed = (ring.dtype, (stop - start, *ring[0, self.columns].shape))
            if found != needed:
                raise ValueError(f"replay key {key!r}: stored {found}, expected {needed}")
        for key in self.fixed:
            for place, slots in self._pieces(expected, stop):
                self.storage[key][slots, self.columns].copy_(steps[key][expected - start :][place])
        self.expected = None if stop == self.added else stop

    def _pieces(self, start: int, stop: int) -> list[tuple[slice, slice]]:
        """Return slices of a copy of ``[start, stop)`` and of the ring: up to its end, and from its beginning."""
        first, count = start % self.length, stop - start
        unbroken = min(count, self.length - first)
        return [(slice(unbroken), slice(first, first + unbroken)), (slice(unbroken, count), slice(count - unbroken))]

    def state_dict(self, *, history: bool = True) -> dict[str, object]:
        """Return contents, write head, queue and sampler; without ``history``, no contents of the :attr:`fixed` keys.

        The contents are views of the ring and change with it.
        """
        held = min(self.added, self.length)
        keys = self.storage if history else sorted(self.refreshed)
        return {
            "storage": {key: self.storage[key][:held] for key in keys},
            "added": self.added,
            "fresh": [list(item) for item in self.fresh],
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore a :meth:`state_dict`, ValueError if it does not fit; :meth:`write_steps` then adds the history."""
        stored, added = state["storage"], int(state["added"])
        held = min(added, self.length)
        complete = stored.keys() != self.refreshed or self.refreshed == self.storage.keys()
        expected = {key: ring[:held] for key, ring in self.storage.items() if complete or key in self.refreshed}
        for key, ring in expected.items():
            if key not in stored or stored[key].shape != ring.shape:
                found = tuple(stored[key].shape) if key in stored else None
                raise ValueError(f"replay key {key!r}: stored {found}, this ring expects {tuple(ring.shape)}")
        for key, ring in expected.items():
            ring.copy_(stored[key])
        self.added = added
        self.head.fill_(added)
        self.fresh = deque((int(world), int(start)) for world, start in state["fresh"])
        if any(world not in range(self.num_envs) or start not in range(added) for world, start in self.fresh):
            raise ValueError("replay: a sequence is not in this ring")
        self.expected, self.chunks = None if complete or not held else self.oldest, []
        load_generator(self.generator, state["generator"])


def load_generator(generator: torch.Generator, state: Tensor) -> None:
    """Restore the state of a generator, unless it is of another kind of device; ValueError if it is no such state."""
    state = state.cpu()
    if state.dtype != torch.uint8 or state.shape not in _GENERATOR_STATES:
        raise ValueError(f"the state of a generator is {tuple(state.shape)} {state.dtype}")
    # A GPU cannot go on with the random numbers of a CPU, nor the other way round.
    if state.shape == generator.get_state().shape:
        generator.set_state(state)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU they are not written, which would take seconds for a ring of gigabytes."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy takes zeroed pages from the system as they are first used; torch writes zeros itself.
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on ``device``, or None if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host.free_memory()
