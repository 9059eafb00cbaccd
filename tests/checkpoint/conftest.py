"""A ring of sequences that is small enough to see through, and its way to the disk and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sheeplike import checkpoint
from sheeplike.memory import SequenceReplay

STEPS_PER_CHUNK = 10
SPEC = {
    "image": ((4, 4), torch.uint8),
    "latent": ((2,), torch.float32),
    "is_first": ((), torch.bool),
    "is_last": ((), torch.bool),
}


def make_ring(length: int = 40) -> SequenceReplay:
    """Two worlds; all but ``latent`` never changes: 36 bytes per time step."""
    return SequenceReplay(SPEC, num_envs=2, size=2 * length, sequence=4, refreshed=("latent",))


def fill(replay: SequenceReplay, steps: int, seed: int = 0) -> None:
    """Add random steps, and refresh some latents."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        replay.add(
            {
                key: torch.randint(0, 256, (2, *shape), generator=generator).to(dtype)
                for key, (shape, dtype) in SPEC.items()
            }
        )
    if replay.ready:
        sample = replay.sample(3)
        replay.write_back(sample.worlds, sample.times, {"latent": torch.randn(3, 4, 2, generator=generator)})


def save_ring(root: Path, step: int, replay: SequenceReplay, keep_last: int = 9) -> Path:
    parts = {"agent": {"step": step}, "memory": replay.state_dict(history=False)}
    journals = {"memory": {"replay": replay.journal}}
    return checkpoint.save(root, step, parts, {}, keep_last=keep_last, journals=journals)


def restore_ring(path: Path, length: int = 40) -> SequenceReplay:
    """A new ring from a checkpoint, or from the newest in a directory of them."""
    whole = (path / checkpoint.MANIFEST).exists()
    _, parts = checkpoint.load(path) if whole else checkpoint.load_latest(path)
    replay = make_ring(length)
    replay.load_state_dict(parts["memory"])
    parts["journals"]["memory"]["replay"].copy_to(replay.journal)
    return replay


def assert_same(one: SequenceReplay, other: SequenceReplay) -> None:
    assert (one.added, one.fresh) == (other.added, other.fresh)
    for key in SPEC:
        assert torch.equal(one.storage[key], other.storage[key]), key
    state = one.generator.get_state()
    assert torch.equal(state, other.generator.get_state())
    mine, theirs = one.sample(5), other.sample(5)
    assert all(torch.equal(mine.data[key], theirs.data[key]) for key in SPEC)
    for replay in (one, other):
        replay.generator.set_state(state)


def chunks(path: Path) -> dict[str, int]:
    """Time ranges of a checkpoint's journal files, to their inodes."""
    return {file.name.split(".")[2]: file.stat().st_ino for file in sorted(path.glob("memory.replay.*.pt"))}


def flip_bit(path: Path, where: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    with path.open("r+b") as file:  # the same inode: other links see it as well
        file.write(data)


@pytest.fixture
def rings() -> SimpleNamespace:
    return SimpleNamespace(
        make=make_ring,
        fill=fill,
        save=save_ring,
        restore=restore_ring,
        assert_same=assert_same,
        chunks=chunks,
        flip_bit=flip_bit,
    )


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sheeplike.checkpoint.journals.CHUNK_BYTES", 36 * STEPS_PER_CHUNK)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, OSError], None]:
    """Makes a function of ``os`` fail."""

    def install(name: str, error: OSError) -> None:
        def failing(*args: object, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr(name, failing)

    return install
