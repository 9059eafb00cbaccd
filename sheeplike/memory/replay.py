"""Replay of sequences, sampled as in ``danijar/dreamerv3`` ``embodied/core/replay.py``.

The worlds step together, so one write head serves all of them and every counter is a Python integer: adding, sampling
and writing back never wait for the device, unless a ring in the host's memory serves steps that the device has not made
yet. Each world's stream is continuous; episodes are marked, not cut.

Shape letters: ``L`` ring length in time steps, ``N`` worlds, ``B`` batch, ``T`` sequence.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sheeplike import host

Spec = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_GENERATOR_STATES = ((5056,), (16,))  # shapes of the state of a generator, on a CPU and on a GPU
RESIDENT = 2**28  # bytes of a file that are read or written before its pages leave the process


class TooLarge(MemoryError):
    """A ring does not fit into free memory or on the disk; the message names a size that would."""


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
        device: device of the learner.
        place: ``device``; ``cpu``: the host's memory; ``disk``: a file without a name in ``directory``. A GPU keeps the
            ``refreshed`` keys itself, and the other steps pass through pinned memory. All serve the same sequences.
        sampling: ``uniform`` or ``episode``, see :meth:`draw`.
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
        place: str = "device",
        directory: Path | None = None,
        sampling: str = "uniform",
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
        on_gpu = self.device.type == "cuda"
        self.place = "device" if place == "cpu" and not on_gpu else place
        kept = spec.keys() if self.place == "device" else frozenset(refreshed if on_gpu else ())
        other = directory if self.place == "disk" else torch.device("cpu")
        for memory, keys in ((self.device, spec.keys() & kept), (other, spec.keys() - kept)):
            self._require_room({key: spec[key] for key in keys}, size, memory)
        # The steps of a sequence lie side by side where a disk reads them.
        axes = (self.length, num_envs) if self.place == "device" else (num_envs, self.length)
        self.storage, self.maps = {}, {}
        for key, (shape, dtype) in spec.items():
            if key in kept or self.place != "disk":
                ring = _zeros((*axes, *shape), dtype, self.device if key in kept else other)
            else:
                self.maps[key] = _map_file(directory, math.prod(axes + shape) * dtype.itemsize)
                ring = torch.frombuffer(self.maps[key], dtype=dtype).view(*axes, *shape)
            self.storage[key] = ring if self.place == "device" else ring.transpose(0, 1)
        self.touched = 0  # bytes of the file that may be resident
        # Tensors of the host that follow a GPU, and steps on their way to them: (time, event of the copy, values).
        self.staged = {key: ring for key, ring in self.storage.items() if on_gpu and key not in kept}
        self.pending: deque[tuple[int, torch.cuda.Event, dict[str, Tensor]]] = deque()
        self.sampling = sampling
        if sampling == "episode":
            flags = self.storage["is_first"]
            if flags.device.type == "cuda":
                flags = self.staged["is_first"] = torch.zeros(flags.shape, dtype=torch.bool)
            self.flags = flags.numpy()
            self._index_anew()
        self.added = 0  # steps ever added, per world
        self.head = torch.zeros((), dtype=torch.int64, device=self.device)  # `added`, for code captured in a graph
        self.fresh: deque[tuple[int, int]] = deque()  # (world, start time) of sequences not yet served
        self.generator = torch.Generator().manual_seed(seed)  # on the host, where a ring may need what it draws
        self.refreshed = frozenset(refreshed)
        self.expected: int | None = None  # time of the next step that write_steps has to restore; None: complete
        self.columns = slice(None)  # worlds of which write_steps restores the steps
        # Files of checkpoints that hold some of these steps. Replaced by a new list with the content, so that no stale
        # file is reused.
        self.chunks: list[Any] = []

    def _require_room(self, spec: Spec, size: int, memory: torch.device | Path) -> None:
        needed, free = self.footprint(spec, self.num_envs, size), free_memory(memory)
        if free is not None and needed > 0.9 * free:  # the learner or the checkpoints need some of it too
            fits = int(size * 0.9 * free / needed) // self.num_envs * self.num_envs
            enough = fits >= self.num_envs * (self.sequence + 1)
            hint = f"a size of {fits} would fit" if enough else "fewer worlds would fit"
            sizes = f"{needed / 2**30:.1f} GiB on {memory}, {free / 2**30:.1f} GiB are free"
            raise TooLarge(f"replay size {size}: needs {sizes}; {hint}")

    @staticmethod
    def footprint(spec: Spec, num_envs: int, size: int) -> int:
        """Return the bytes of a ring of ``size`` policy steps."""
        step = sum(math.prod(shape) * dtype.itemsize for shape, dtype in spec.values())
        return step * num_envs * (size // num_envs)

    def describe(self) -> str:
        taken = sum(ring.nbytes for ring in self.storage.values())
        steps = self.length * self.num_envs
        place = self.device if self.place == "device" else self.place
        return f"{steps:,} policy steps, {taken / 2**20:,.0f} MiB on {place} ({taken / steps:,.0f} B each)"

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
            if self.storage[key] is not self.staged.get(key):
                self.storage[key][slot].copy_(value)
        if self.staged:
            pinned = {"device": "cpu", "non_blocking": True, "copy": True}  # torch pins such a copy
            arriving = {key: step[key].to(dtype=ring.dtype, **pinned) for key, ring in self.staged.items()}
            self.pending.append((self.added, torch.cuda.Event(), arriving))
            self.pending[-1][1].record()
            self._settle(self.added - self.sequence)
        if self.maps and self.added % self.sequence == 0:  # the pages of old steps are read before they are overwritten
            self._read_ahead(range(self.num_envs), [self.added] * self.num_envs)
        self._touch(self.num_envs)
        self.added += 1
        self.head.fill_(self.added)
        if self.online and self.added % self.sequence == 0:
            self.fresh.extend((world, self.added - self.sequence) for world in range(self.num_envs))

    def sample(self, batch: int) -> Sequences:
        """Sample ``batch`` sequences."""
        return self.gather(*self.fetch(*self.draw(batch)))

    def draw(self, batch: int) -> tuple[Tensor, Tensor]:
        """Draw worlds and starting times of sequences, ``(B,)`` int64 each, on the host: some new ones, then others.

        No sequence spans the write head. With sampling ``uniform`` each of the others begins at any of the starts
        ``[oldest, added - T]`` of any world, all equally likely. With ``episode`` first an episode is drawn, each of
        the ``E`` that the ring holds, whole or in part, with probability ``1 / E``; then one of those starts in its
        world whose sequence has at least one step of the episode, all equally likely. Away from the ring's ends an
        episode of ``n`` steps has ``n + T - 1`` of them, and each of its steps is in ``T``: its first and its last
        steps are drawn as often as its middle.

        An episode counts once its first step can begin a sequence; until then its steps count as those of the episode
        before. So the host needs no flag that is younger than ``T`` steps.
        """
        self._check_complete()
        assert self.ready, f"{self.added} steps per world, a sequence needs {self.sequence}"
        if self.sampling == "episode":
            envs, starts = self._draw_episodes(batch)
        else:
            envs = torch.randint(self.num_envs, (batch,), generator=self.generator)
            starts = torch.randint(self.oldest, self.added - self.sequence + 1, (batch,), generator=self.generator)
        if fresh := self._take_fresh(batch):
            chosen = torch.tensor(fresh, dtype=torch.int64)
            envs[: len(fresh)], starts[: len(fresh)] = chosen[:, 0], chosen[:, 1]
        return envs, starts

    def _draw_episodes(self, batch: int) -> tuple[Tensor, Tensor]:
        """Draw an episode for each sequence, then its start."""
        stop = self.added - self.sequence + 1  # of starts, and of the flags that count
        self._settle(stop - 1)
        times = np.arange(max(self.indexed, self.oldest), stop)
        ended = []
        for row, world in zip(*np.nonzero(self.flags[times % self.length]), strict=True):
            ended.append((world, self.begin[world], times[row]))
            self.begin[world] = times[row]
        self.indexed = stop
        self.ended = np.concatenate([self.ended, np.array(ended, np.int64).reshape(-1, 3)])
        self.ended = self.ended[np.searchsorted(self.ended[:, 2], self.oldest, "right") :]
        going_on = np.stack([np.arange(self.num_envs), self.begin, np.full_like(self.begin, self.added)], 1)
        episodes = np.concatenate([self.ended, going_on])
        drawn = np.empty((2, batch))
        torch.rand(2, batch, dtype=torch.float64, generator=self.generator, out=torch.from_numpy(drawn))
        envs, begin, end = episodes[(drawn[0] * len(episodes)).astype(np.int64)].T
        first = np.maximum(begin - self.sequence + 1, self.oldest)
        starts = first + (drawn[1] * (np.minimum(end, stop) - first)).astype(np.int64)
        return torch.from_numpy(envs), torch.from_numpy(starts)

    def _index_anew(self) -> None:
        """Find the episodes again at the next draw."""
        if self.sampling == "episode":
            self.indexed, self.begin = 0, np.zeros(self.num_envs, np.int64)
            self.ended = np.empty((0, 3), np.int64)  # (world, begin, end) of episodes, in order of their end
            if "is_first" in self.staged:
                self.staged["is_first"].copy_(self.storage["is_first"])

    def _take_fresh(self, batch: int) -> list[tuple[int, int]]:
        # One sequence for each waiting round of all worlds, so that the queue stays short where updates are rare.
        while self.fresh and self.fresh[0][1] < self.oldest:  # it was overwritten while it waited
            self.fresh.popleft()
        rounds = math.ceil(len(self.fresh) / self.num_envs)
        return [self.fresh.popleft() for _ in range(min(rounds, max(batch - 1, 1)))]

    def fetch(self, envs: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Move a :meth:`draw` to the device, and the parts of its sequences that lie in the host's memory.

        The copies run beside the host. It waits only for steps so new that they have not arrived.
        """
        if self.maps:
            self._read_ahead(envs.tolist(), starts.tolist())
            self._touch(len(envs) * self.sequence)
        if self.device.type != "cuda":
            return envs, starts, {}
        fetched = {}
        if self.place != "device":
            self._settle(int(starts.max()) + self.sequence - 1)
            rows = self._rows(envs, starts[:, None] + torch.arange(self.sequence))
            for key, ring in self.staged.items():
                pinned = torch.empty((rows.numel(), *ring.shape[2:]), dtype=ring.dtype, pin_memory=True)
                torch.index_select(self._flat(key), 0, rows.flatten(), out=pinned)
                fetched[key] = pinned.to(self.device, non_blocking=True).unflatten(0, rows.shape)
        # torch reuses pinned memory only after the copies from it are done.
        envs, starts = torch.stack((envs, starts)).pin_memory().to(self.device, non_blocking=True)
        return envs, starts, fetched

    def gather(self, envs: Tensor, starts: Tensor, fetched: Mapping[str, Tensor]) -> Sequences:
        """Read the sequences of :meth:`fetch`, without a host synchronisation.

        ``is_last`` is also set before each step that begins an episode, where a stream was cut.
        """
        times = starts[:, None] + torch.arange(self.sequence, device=self.device)
        rows = self._rows(envs, times)
        here = [key for key in self.storage if key not in fetched]
        data = {key: self._flat(key).index_select(0, rows.flatten()).unflatten(0, rows.shape) for key in here}
        data |= fetched
        data["is_last"][:, :-1] |= data["is_first"][:, 1:]
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
        slots = times % self.length
        return slots * self.num_envs + envs[:, None] if self.place == "device" else envs[:, None] * self.length + slots

    def _flat(self, key: str) -> Tensor:
        ring = self.storage[key]
        return (ring if self.place == "device" else ring.transpose(0, 1)).flatten(0, 1)

    def _settle(self, time: int) -> None:
        """Put steps up to ``time``, and younger ones that have arrived, into the tensors of the host."""
        while self.pending and (self.pending[0][0] <= time or self.pending[0][1].query()):
            added, event, values = self.pending.popleft()
            event.synchronize()
            for key, value in values.items():
                self.staged[key][added % self.length].copy_(value)

    def _read_ahead(self, envs: Iterable[int], starts: Iterable[int]) -> None:
        """Have the system read sequences of a file side by side, not page by page."""
        for key, memory in self.maps.items():
            size = self.storage[key][0, 0].nbytes
            for env, start in zip(envs, starts, strict=True):
                slot = start % self.length
                first = (env * self.length + slot) * size // mmap.PAGESIZE * mmap.PAGESIZE
                stop = (env * self.length + min(slot + self.sequence, self.length)) * size
                memory.madvise(mmap.MADV_WILLNEED, first, stop - first)

    def _touch(self, rows: int) -> None:
        """Give pages of a file back to the system after some use; nothing is lost, since the mapping is shared."""
        self.touched += rows * sum(self.storage[key][0, 0].nbytes for key in self.maps)
        if self.touched > RESIDENT:
            self.touched = 0
            for memory in self.maps.values():
                memory.madvise(mmap.MADV_DONTNEED)

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
        self._settle(stop)
        steps = {}
        for key in self.fixed:
            ring = self.storage[key]
            steps[key] = torch.empty((stop - start, *ring.shape[1:]), dtype=ring.dtype)
            for place, slots in self._pieces(start, stop):
                steps[key][place].copy_(ring[slots])
        self._touch((stop - start) * self.num_envs)
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
        self._touch((stop - expected) * self.num_envs)
        self._index_anew()

    def _pieces(self, start: int, stop: int) -> list[tuple[slice, slice]]:
        """Return slices of a copy of ``[start, stop)`` and of the ring: up to its end, and from its beginning."""
        first, count = start % self.length, stop - start
        unbroken = min(count, self.length - first)
        return [(slice(unbroken), slice(first, first + unbroken)), (slice(unbroken, count), slice(count - unbroken))]

    def state_dict(self, *, history: bool = True) -> dict[str, object]:
        """Return contents, write head, queue and sampler; without ``history``, no contents of the :attr:`fixed` keys.

        The contents are views of the ring and change with it.
        """
        self._settle(self.added)
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
        self.pending.clear()
        for key, ring in expected.items():
            ring.copy_(stored[key])
        self.added = added
        self.head.fill_(added)
        self.fresh = deque((int(world), int(start)) for world, start in state["fresh"])
        if any(world not in range(self.num_envs) or start not in range(added) for world, start in self.fresh):
            raise ValueError("replay: a sequence is not in this ring")
        self.expected, self.chunks = None if complete or not held else self.oldest, []
        self._index_anew()
        load_generator(self.generator, state["generator"])


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
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _map_file(directory: Path, size: int) -> mmap.mmap:
    """Return the memory of a new file that has no name, so that it ends with the process."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a disk that is full later would end the process by a signal
            memory = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise TooLarge(f"a file of {size / 2**30:.1f} GiB in {directory}: {error.strerror}") from error
    memory.madvise(mmap.MADV_RANDOM)
    return memory


def free_memory(place: torch.device | Path) -> int | None:
    """Return the bytes that can still be allocated on a device or on the disk of a directory; None: unknown."""
    if not isinstance(place, torch.device):
        return shutil.disk_usage(place).free
    return torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else host.free_memory()
