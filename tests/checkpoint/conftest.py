"""Small states and rings, their way to the disk and back, and ways to damage what lies there."""

from __future__ import annotations

import hashlib
import json
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


def fill(replay: SequenceReplay, steps: int, seed: int = 0) -> SequenceReplay:
    """Add random steps, and refresh some latents."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        step = {k: torch.randint(0, 256, (2, *shape), generator=generator).to(d) for k, (shape, d) in SPEC.items()}
        replay.add(step)
    if replay.ready:
        sample = replay.sample(3)
        replay.write_back(sample.envs, sample.times, {"latent": torch.randn(3, 4, 2, generator=generator)})
    return replay


def parts_of(replay: SequenceReplay) -> dict:
    return {"agent": {"added": replay.added}, "memory": replay.state_dict(history=False)}


def save_ring(root: Path, step: int, replay: SequenceReplay, keep_last: int = 9, **meta: float) -> Path:
    with checkpoint.Writer(root, keep_last=keep_last) as writer:
        writer.save(step, parts_of(replay), meta, replay, wait=True)
    return root / f"step_{step:012d}"


def restore_ring(path: Path, length: int = 40) -> SequenceReplay:
    """A new ring from a checkpoint, or from the newest in a directory of them."""
    whole = (path / checkpoint.MANIFEST).exists()
    _, parts = checkpoint.load(path) if whole else checkpoint.load_latest(path)
    replay = make_ring(length)
    replay.load_state_dict(parts["memory"])
    parts["history"].copy_to(replay)
    return replay


def assert_same(one: SequenceReplay, other: SequenceReplay) -> None:
    assert (one.added, one.fresh) == (other.added, other.fresh)
    held = min(one.added, one.length)
    assert all(torch.equal(one.storage[key][:held], other.storage[key][:held]) for key in SPEC)
    assert torch.equal(one.generator.get_state(), other.generator.get_state())


def chunks(root: Path) -> dict[str, int]:
    """Chunk files beside a directory of checkpoints, to their inodes."""
    return {file.name: file.stat().st_ino for file in sorted((root.parent / "replay").glob("*"))}


def needed(path: Path) -> list[str]:
    """Chunk files that a checkpoint names."""
    return [entry[0] for entry in json.loads((path / "manifest.json").read_text())["chunks"]]


def rewrite(path: Path, **changed: object) -> None:
    """Change what a manifest says, its digest included, as an attacker would."""
    manifest = json.loads((path / "manifest.json").read_text()) | changed
    manifest.pop("sha256")
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest}))


def flip_bit(path: Path, where: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)


@pytest.fixture
def lab() -> SimpleNamespace:
    helpers = (make_ring, fill, parts_of, save_ring, restore_ring, assert_same, chunks, needed, rewrite, flip_bit)
    return SimpleNamespace(**{helper.__name__: helper for helper in helpers})


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sheeplike.checkpoint.CHUNK_BYTES", 36 * STEPS_PER_CHUNK)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"
